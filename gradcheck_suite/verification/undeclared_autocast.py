"""The diagnosis of a loop that computes in a lower precision than the run's, which it did not declare.

The precision that a loop is held to comes from its declaration, never from the run. Otherwise a loop that turns on
autocast by mistake would widen its own bound.
"""

from __future__ import annotations

from gradcheck_suite.diagnosis.weight_patterns.weights import Diagnosis
from gradcheck_suite.execution.autocast import Compute
from gradcheck_suite.execution.observer import Evaluation
from gradcheck_suite.numerics.bounds import UNIT_ROUNDOFF
from gradcheck_suite.references.errors import CannotJudgeError
from gradcheck_suite.references.window import Window


def undeclared_autocast(window: Window, evaluation: Evaluation, compute: Compute) -> Diagnosis | None:
    """Return the diagnosis of a wrong gradient that is right but for the rounding errors of autocast, else None.

    Args:
        window: in which the gradient is wrong in the precision that the loop declares.
        evaluation: what the step used.
        compute: the autocast dtype that the loop's losses were computed in, or None.
    """
    reference = window.reference
    name = reference.instance.case.dtype
    if compute is None or UNIT_ROUNDOFF[compute] <= UNIT_ROUNDOFF[name]:
        return None
    wider = reference.window(window.index, evaluation.parameters if window.moved else None, compute)
    try:
        if wider.compare(reference.flat(evaluation.gradients)).ratio > 1:
            return None
    except CannotJudgeError:
        return None
    return Diagnosis(
        "undeclared-autocast",
        f"the loop computes its losses under torch.autocast in {compute} in a {name} run: the gradient has rounding "
        f"errors of {compute}, and no other error. If this precision is meant, declare it: --autocast {compute}, or "
        f'@training_loop(autocast="{compute}")',
    )
