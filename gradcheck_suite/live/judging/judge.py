"""The judgement of one optimizer step from what arrived since the one before."""

from __future__ import annotations

import numpy as np

from gradcheck_suite.live.judging.batch_judge import judge_batch
from gradcheck_suite.live.judging.steps import Judged, Step
from gradcheck_suite.live.judging.sum_judge import judge_sum
from gradcheck_suite.live.judging.sums import Explanation
from gradcheck_suite.live.judging.weight_judge import judge_weights
from gradcheck_suite.live.judging.words import SENTENCES
from gradcheck_suite.live.recording.passes import is_finite
from gradcheck_suite.live.recording.sketches import Sketch, as_array


def _same(gradients: dict[int, Sketch], previous: dict[int, Sketch]) -> bool:
    return all(key in previous and np.array_equal(g, previous[key]) for key, g in gradients.items())


def _note_use(step: Step, found: Explanation, result: Judged) -> None:
    """Note which passes the step trains on; find optimizers that step between the micro-batches of this one."""
    used = [p for p, c in zip(step.passes, found.coefficients, strict=True) if abs(c) >= 1e-3]
    own = id(step.state)
    step.memory.windows += 1
    step.memory.lines.update({p.place.line for p in used})
    for other in {key for p in used for key in p.trained} - {own}:
        steps = [p.trained.get(other) for p in used]
        if len(set(steps)) > 1:
            between = len({n for n in steps[:-1] if n is not None})
            result.violation = step.violation("moving-parameters", SENTENCES["moving-parameters"].format(steps=between))
    for one in used:
        one.trained[own] = step.state.steps


def judge(step: Step, *, weights: bool, sums: bool, batch: bool) -> Judged:
    """Judge one step of one optimizer.

    Args:
        step: the step.
        weights: whether to judge weights.
        sums: whether to judge sums.
        batch: whether to compute the window again.
    """
    result, state, passes = Judged(), step.state, step.passes
    gradients = state.gradients() if sums else {}
    previous, state.previous = {key: as_array(s) for key, s in state.previous.items()}, dict(gradients)
    if (missing := state.missing()) is not None:
        result.findings.append(f"a step was not judged: {missing}")
        return result
    if not passes:
        if sums and previous and any(np.abs(g).max() for g in gradients.values()) and _same(gradients, previous):
            result.violation = step.violation("stale-window")
        return result
    if not all(is_finite(as_array(s)) for p in passes for s in p.arrivals.values()):
        result.findings.append("a gradient was not finite: that window was not judged")
        return result
    if not all(is_finite(s) for s in gradients.values()):
        result.findings.append(
            "`.grad` was infinite or NaN at a step, though every gradient of the window was finite: that window was "
            "not judged; look for an overflow in the sum, or for what writes to `.grad`"
        )
        return result
    found: Explanation | None = None
    if sums and any(p.arrivals for p in passes):
        found = judge_sum(step, gradients, previous, result)
    if found is not None and result.violation is None:
        _note_use(step, found, result)
    if weights and result.violation is None and not result.handmade:
        judge_weights(step, found, result)
    if batch and not (result.handmade or result.edited) and (found is not None or not sums):
        judge_batch(step, found, result)
    return result
