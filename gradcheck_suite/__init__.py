"""gradcheck-suite: does this training loop hand its optimizer the gradient it should?

This module re-exports the public names and must import neither torch nor JAX: modules that need them are imported when
one of their names is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradcheck_suite.errors import CannotRunHere, GradcheckSuiteError, UsageError
from gradcheck_suite.execution import environment
from gradcheck_suite.schema.case import Case, case_from_json
from gradcheck_suite.schema.contract import ASSUMPTIONS, Problem, TrainingRun, training_loop
from gradcheck_suite.schema.plan import Plan
from gradcheck_suite.schema.results import Result, Verdict, Violation
from gradcheck_suite.schema.spec import Input, Layer, Loss, ProblemSpec

if TYPE_CHECKING:
    from gradcheck_suite.generation.cases import cases
    from gradcheck_suite.generation.plans import plans
    from gradcheck_suite.generation.problems import problems
    from gradcheck_suite.live.context import audit, objective
    from gradcheck_suite.trainers.transformers_loop import transformers_loop
    from gradcheck_suite.verification.check import check
    from gradcheck_suite.verification.verify import verify

__version__ = "0.1.0"

_LAZY = {
    "audit": "live.context",
    "cases": "generation.cases",
    "check": "verification.check",
    "objective": "live.context",
    "plans": "generation.plans",
    "problems": "generation.problems",
    "transformers_loop": "trainers.transformers_loop",
    "verify": "verification.verify",
}

__all__ = [
    "ASSUMPTIONS",
    "CannotRunHere",
    "Case",
    "GradcheckSuiteError",
    "Input",
    "Layer",
    "Loss",
    "Plan",
    "Problem",
    "ProblemSpec",
    "Result",
    "TrainingRun",
    "UsageError",
    "Verdict",
    "Violation",
    "audit",
    "case_from_json",
    "cases",
    "check",
    "environment",
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
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
