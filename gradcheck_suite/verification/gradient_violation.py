"""The violation of a wrong gradient: its kind, its diagnosis and its evidence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from gradcheck_suite.diagnosis.further_runs.loop_runner import LoopRunner
from gradcheck_suite.diagnosis.gradient import explain_gradient, explain_missing
from gradcheck_suite.diagnosis.weight_patterns.weights import Diagnosis, missing_gradient
from gradcheck_suite.diagnosis.wrong_elements.fitted_weights import diagnose_case
from gradcheck_suite.execution.observer import Evaluation
from gradcheck_suite.numerics.comparison import Comparison
from gradcheck_suite.references.window import Window
from gradcheck_suite.schema.results import Violation, ViolationKind

UNNAMED = Diagnosis("", "")
"""In place of a diagnosis for which the loop would have to run again."""


def _fitted(window: Window, comparison: Comparison, epoch: int, *, alike: bool) -> Diagnosis:
    """Return the diagnosis that a wrong gradient alone determines, without a further run of the loop."""
    if window.moved or window.reference.instance.case.dtype != "float64":
        return UNNAMED
    return diagnose_case(window, comparison, epoch, alike=alike) or UNNAMED


def gradient_violation(
    window: Window,
    evaluation: Evaluation,
    comparison: Comparison,
    epoch: int,
    runner: LoopRunner | None,
    known: Diagnosis | None,
    *,
    alike: bool,
) -> Violation:
    """Return the violation of a wrong gradient.

    Args:
        window: in which the gradient is wrong.
        evaluation: what the step used.
        comparison: of the gradient with the window's.
        epoch: of the step.
        runner: runs the loop again for a diagnosis; None while shrinking.
        known: the diagnosis where it is known already.
        alike: whether all of several ranks had the same gradients at each step.
    """
    layout, worst = comparison.layout, comparison.worst
    parameter, _ = layout.place(worst.index)
    seen = evaluation.gradients[parameter]
    kind: ViolationKind = "gradient"
    if seen is None:
        kind = "none-pattern"
        named = missing_gradient(parameter)
        if runner:
            named = explain_missing(parameter, comparison, window, epoch, runner)
    else:
        if runner and known is None:
            known = explain_gradient(comparison, window, epoch, runner)
        named = known or _fitted(window, comparison, epoch, alike=alike)
        expected = layout.part(window.expected, parameter)
        if not bool(torch.isfinite(seen).all()) and bool(np.isfinite(expected).all()):
            kind = "non-finite"
            said = f"{parameter}.grad is not finite at the step, the right gradient is; {named.sentence}"
            named = replace(named, sentence=said)
    return Violation(
        kind,
        named.name,
        named.sentence,
        window.reference.instance.case,
        parameter=parameter,
        epoch=epoch,
        window=window.index,
        error=worst.error,
        allowed=worst.allowed,
        details=named.details,
        weights=named.weights,
        moved=window.moved,
        evidence=replace(comparison, missing=frozenset(n for n, g in evaluation.gradients.items() if g is None)),
    )
