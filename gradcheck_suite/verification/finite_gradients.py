"""Whether the right gradients of a case are finite, for loops that assume `finite-gradients`."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from gradcheck_suite.execution.observer import Observation
from gradcheck_suite.execution.ranks.run import run_ranks
from gradcheck_suite.loops.ranks import RANK_LOOPS
from gradcheck_suite.loops.sound import plain
from gradcheck_suite.references.errors import CannotJudgeError
from gradcheck_suite.references.reference import Reference
from gradcheck_suite.references.window import Window
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import Problem
from gradcheck_suite.verification.accumulable import reference_of

OUTSIDE = "a window's gradient is infinite or NaN, and the loop assumes finite-gradients"


def starts_finite(case: Case, problem: Problem | None) -> bool:
    """Return whether the gradient of every window is finite at the initial parameters, in the case's dtype too."""
    try:
        reference, _ = reference_of(case, problem)
    except CannotJudgeError:
        return True  # `check` says why
    return reference is None or all(_is_finite(reference.window(w)) for w in range(len(case.plan.windows)))


def stays_finite(case: Case, problem: Problem | None) -> bool:
    """Return whether a sound loop meets only finite gradients at the parameters to which the optimizer moves."""
    reference, _ = reference_of(case, problem)
    if reference is None or case.optimizer is None:
        return True
    loop = plain if case.plan.world_size == 1 else RANK_LOOPS["all_reduce/zero_grad"]
    observations = run_ranks(loop, reference.instance)[0].observations
    return all(_was_finite(reference, step, observed) for step, observed in enumerate(observations))


def _was_finite(reference: Reference, step: int, observed: Observation) -> bool:
    seen = reference.flat(observed.gradients)
    window = reference.window(step % len(reference.instance.case.plan.windows), observed.parameters)
    return bool(np.isfinite(seen).all() and np.isfinite(window.expected).all())


def _is_finite(window: Window) -> bool:
    computed = [window.expected]
    if window.bound is not window.float64_bound:
        with suppress(RuntimeError):  # torch lacks an operation in this dtype: `check` says so
            computed += [window.bound.large_batch, *window.bound.contributions]
    return all(bool(np.isfinite(gradient).all()) for gradient in computed)
