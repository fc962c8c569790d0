"""Records of how well the bridge agrees with torch on real architectures, which the report's table
is made of.

pytest studies/tests/architectures --full --bridge-records reports
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from gradcheck_suite.bridge import BridgeError
from gradcheck_suite.core.records import append_record
from gradcheck_suite.run import environment
from studies.records import KINDS
from tests.bridge.agreeing import Agreement


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that stores records."""
    parser.addoption(
        "--bridge-records", type=Path, metavar="DIR", help="append what was measured to DIR/records"
    )


def _model(model: torch.nn.Module, kind: str) -> dict[str, Any]:
    package = "transformers" if type(model).__module__.startswith("transformers.") else "torch"
    return {
        "architecture": type(model).__name__,
        "kind": kind,
        "package": package,
        "version": version(package),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


@pytest.fixture
def note_agreement(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that records an agreement where that is asked for."""
    reports = request.config.getoption("--bridge-records", default=None)

    def note(
        model: torch.nn.Module, kind: str, agreement: Agreement, *, widened: bool = False
    ) -> None:
        if reports is None:
            return
        data = {
            **_model(model, kind),
            "widened": widened,
            "operations": agreement.lowered.operations,
            "loss_error": agreement.loss,
            "gradient_error": agreement.gradient,
            "allowed": agreement.allowed,
            "narrow": sorted(set(agreement.lowered.narrow)),
        }
        append_record(reports, KINDS["bridge"], data, environment=environment.environment())

    return note


@pytest.fixture
def note_refusal(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that records a refusal where that is asked for."""
    reports = request.config.getoption("--bridge-records", default=None)

    def note(model: torch.nn.Module, kind: str, error: BridgeError) -> None:
        if reports is not None:
            data = {**_model(model, kind), "widened": False, "refused": error.reason}
            append_record(reports, KINDS["bridge"], data, environment=environment.environment())

    return note
