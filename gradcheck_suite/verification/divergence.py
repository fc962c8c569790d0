"""Parameters that have diverged under a real optimizer, where gradients overflow in one order of operations alone."""

from __future__ import annotations

import numpy as np
import torch

from gradcheck_suite.execution.observer import Evaluation
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.references.reference import Reference
from gradcheck_suite.schema.case import Case

DIVERGED = "the parameters have diverged under the optimizer"
"""Why gradients are not judged whose finiteness depends on the order of operations."""
FAR = 16.0
"""Factor of the largest initial value from which on a gradient may overflow in one order of operations alone."""


def is_diverged(evaluation: Evaluation) -> bool:
    """Whether a real optimizer has taken the parameters where products of a few of them overflow.

    From there on what is finite depends on the order of operations, and a sound loop diverges like any other.
    """
    values = evaluation.parameters.values()
    return any(bool((p.abs() > torch.finfo(p.dtype).max ** 0.25).any() or p.isnan().any()) for p in values)


def ended_in_divergence(case: Case, outcome: Outcome) -> bool:
    """Whether a loop raised, or took too few steps, at parameters that have diverged under a real optimizer.

    A check of the loss and a gradient scaler then do what they are for. The steps that were taken are judged. A loop
    that the time limit stopped has done neither.
    """
    if case.optimizer is None or outcome.structure or outcome.timed_out:
        return False
    if outcome.raised is None and len(outcome.observations) >= case.plan.steps:
        return False
    last = outcome.observations[-1].after if outcome.observations else outcome.parameters
    return is_diverged(Evaluation({}, last))


def is_start(evaluation: Evaluation, outcome: Outcome) -> bool:
    """Whether no parameter has moved yet, so that the window is one of those that are kept."""
    return all(value is outcome.start[name] for name, value in evaluation.parameters.items())


def is_far(reference: Reference, evaluation: Evaluation) -> bool:
    """Whether some parameter is far larger than all were at first, so that the order of operations may overflow."""
    first = max([1.0, *(float(np.abs(value).max()) for value in reference.values64.values() if value.size)])
    return any(bool((p.abs() > FAR * first).any()) for p in evaluation.parameters.values())
