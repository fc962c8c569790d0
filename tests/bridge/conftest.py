"""Records of how well the bridge agrees with torch on real architectures, which the report's table is made of.

pytest tests/bridge/test_architectures.py --bridge-records reports
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from gradcheck_suite.execution import environment
from gradcheck_suite.records.store import append_record
from tests.bridge.agreeing import Agreement


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that stores records."""
    parser.addoption("--bridge-records", type=Path, metavar="DIR", help="append what was measured to DIR/records")


@pytest.fixture
def note_agreement(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that records an agreement where that is asked for."""
    reports = request.config.getoption("--bridge-records", default=None)

    def note(model: torch.nn.Module, agreement: Agreement, tolerance: float, *, widened: bool = False) -> None:
        if reports is None:
            return
        package = "transformers" if type(model).__module__.startswith("transformers.") else "torch"
        data: dict[str, Any] = {
            "architecture": type(model).__name__,
            "package": package,
            "version": version(package),
            "widened": widened,
            "parameters": sum(p.numel() for p in model.parameters()),
            "operations": agreement.lowered.operations,
            "loss_error": agreement.loss,
            "gradient_error": agreement.gradient,
            "allowed": tolerance,
            "narrow": sorted(set(agreement.lowered.narrow)),
        }
        append_record(reports, "bridge", data, environment=environment.environment())

    return note
