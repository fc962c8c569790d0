"""gradcheck-suite: does this training loop hand its optimizer the gradient it should?

This module re-exports the public names and must import neither torch nor JAX: modules that need
them are imported when one of their names is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradcheck_suite.core.case import Case, Input, Layer, Loss, Plan, ProblemSpec, case_from_json
from gradcheck_suite.core.contract import (
    ASSUMPTIONS,
    JaxTrainingRun,
    Problem,
    TrainingRun,
    jax_training_loop,
    training_loop,
)
from gradcheck_suite.core.results import Result, Verdict, Violation
from gradcheck_suite.errors import CannotRunHere, GradcheckSuiteError, UsageError, ViolationFound
from gradcheck_suite.run import environment

if TYPE_CHECKING:
    from gradcheck_suite.auditing.objectives import objective
    from gradcheck_suite.auditing.session import audit
    from gradcheck_suite.loops.trainers.adapters.transformers_trainer import transformers_loop
    from gradcheck_suite.port.compare import compare_port
    from gradcheck_suite.port.pair import Port
    from gradcheck_suite.port.result import PortResult
    from gradcheck_suite.strategies.cases import cases, problems
    from gradcheck_suite.strategies.plans import plans
    from gradcheck_suite.verification.check import check
    from gradcheck_suite.verification.verify import verify

_LAZY = {
    "Port": "port.pair",
    "PortResult": "port.result",
    "audit": "auditing.session",
    "cases": "strategies.cases",
    "check": "verification.check",
    "compare_port": "port.compare",
    "objective": "auditing.objectives",
    "plans": "strategies.plans",
    "problems": "strategies.cases",
    "transformers_loop": "loops.trainers.adapters.transformers_trainer",
    "verify": "verification.verify",
}

__all__ = [
    "ASSUMPTIONS",
    "CannotRunHere",
    "Case",
    "GradcheckSuiteError",
    "Input",
    "JaxTrainingRun",
    "Layer",
    "Loss",
    "Plan",
    "Port",
    "PortResult",
    "Problem",
    "ProblemSpec",
    "Result",
    "TrainingRun",
    "UsageError",
    "Verdict",
    "Violation",
    "ViolationFound",
    "audit",
    "case_from_json",
    "cases",
    "check",
    "compare_port",
    "environment",
    "jax_training_loop",
    "objective",
    "plans",
    "problems",
    "training_loop",
    "transformers_loop",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"gradcheck_suite.{_LAZY[name]}"), name)
    if name == "__version__":
        return environment.own_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
