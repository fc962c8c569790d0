"""The judgement of the sum: whether `.grad` at a step is what arrived in the window's backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gradcheck_suite.live.judging.names import parameter_name
from gradcheck_suite.live.judging.steps import Judged, Step
from gradcheck_suite.live.judging.sums import Explanation, Sums, empty, exactly, explain, parallel
from gradcheck_suite.live.judging.words import SENTENCES
from gradcheck_suite.live.recording.passes import Pass, Watched, is_finite
from gradcheck_suite.live.recording.sketches import PROJECTIONS, Sketch, as_array, resolution, tolerance
from gradcheck_suite.numerics.bounds import UNIT_ROUNDOFF
from gradcheck_suite.schema.live_results import LiveViolation
from gradcheck_suite.schema.results import ViolationKind


def _sketches(
    state: Watched, passes: Sequence[Pass], gradients: dict[int, Sketch], previous: dict[int, Sketch]
) -> tuple[Sums, list[int]]:
    """Return the sketches as arrays, and the ids of the parameters."""
    keys, shapes, dtypes = [], [], []
    for key, parameter in state.live():
        if key in gradients or any(key in p.arrivals for p in passes):
            keys.append(key)
            shapes.append(tuple(parameter.shape))
            gradient = parameter.grad if parameter.grad is not None else parameter
            dtypes.append(str(gradient.dtype).removeprefix("torch."))
    arrivals = empty(len(keys), len(passes))
    now, before = np.zeros((len(keys), PROJECTIONS)), np.zeros((len(keys), PROJECTIONS))
    allowed, own = np.zeros(len(keys)), np.zeros(len(keys))
    for index, key in enumerate(keys):
        norms = []
        for j, one in enumerate(passes):
            if key in one.arrivals:
                found = as_array(one.arrivals[key])
                arrivals[index, j] = found[:PROJECTIONS]
                norms.append(max(found[PROJECTIONS], 0.0) ** 0.5)
        sizes = np.array(norms)
        size = 0.0
        for target, source in ((now, gradients), (before, previous)):
            if key in source and is_finite(source[key]):
                target[index] = source[key][:PROJECTIONS]
                size = max(size, float(source[key][PROJECTIONS]) ** 0.5)
        dtype = dtypes[index] if dtypes[index] in UNIT_ROUNDOFF else "float32"
        allowed[index] = tolerance(sizes, shapes[index], dtype)
        own[index] = resolution(size, shapes[index], dtype)
    optional = np.array([bool(p.consumers) or not p.accumulates for p in passes])
    if optional.all():
        # nothing came after the other optimizer's step: both step on the same passes
        optional = np.array([not p.accumulates for p in passes])
    return Sums(arrivals, now, before, allowed, own, optional), keys


def _untouched(sums: Sums, passes: Sequence[Pass]) -> bool:
    """Whether gradients were written by hand, and not from all that one line computed by `torch.autograd.grad`."""
    if not sums.optional.all() or not np.abs(sums.gradient).max(initial=0.0):
        return False
    found = explain(sums)
    unused = {p.place.line for p, c in zip(passes, found.coefficients, strict=True) if abs(c) < 1e-3}
    used = {p.place.line for p, c in zip(passes, found.coefficients, strict=True) if abs(c) >= 1e-3}
    return found.name == "not-linear" or (found.name != "" and not unused & used)


def _handmade(step: Step, found: Explanation, before: Explanation, now: Sums, left: Sums) -> bool:
    """Whether the user has put a gradient together from passes that he had reset, as per-example clipping does."""
    if before.name != "reset-inside-window" or found.name not in ("unrecognised-weights", "not-linear"):
        return False
    again = any(abs(f) >= 1e-3 > abs(b) for f, b in zip(found.coefficients, before.coefficients, strict=True))
    if found.name == "unrecognised-weights":
        return again
    # what is left of the last pass is small beside what was written over it
    last, written = left.gradient.ravel(), now.gradient.ravel()
    sizes = float(last @ last) * float(written @ written)
    overwritten = sizes > 0 and float(last @ written) ** 2 < MOSTLY * sizes
    return step.state.replaced() or overwritten or all(p.clips for p in step.passes)


def _foreign(passes: Sequence[Pass], found: Explanation, optional: np.ndarray) -> bool:
    """Whether the gradient has passes that another optimizer stepped on, from other lines than this window's own."""
    left = [p for p, c, o in zip(passes, found.coefficients, optional, strict=True) if o and c and p.consumers]
    own = [p for p, o in zip(passes, optional, strict=True) if not o]
    lines = [
        {r.call.place.line for p in part for r in p.received} or {p.place.line for p in part} for part in (left, own)
    ]
    return bool(left and own) and not lines[0] & lines[1]


def _with_fault(step: Step, found: Explanation, violation: LiveViolation, result: Judged) -> Explanation | None:
    """Report a wrong sum, or look at the next step in detail where this gradient may have been edited."""
    if found.name == "not-linear" and not step.passes[-1].after:
        step.state.detail = True
        step.memory.unclear = step.memory.unclear or violation
        result.findings.append("a gradient is not the sum of what arrived, and may have been edited before the step")
        return None
    result.sums = True
    result.violation = violation
    return found


def _with_edits(step: Step, found: Explanation, result: Judged) -> Explanation:
    """Judge the edits of user hooks: the same factors in each micro-batch are one edit of the window's gradient."""
    edits = [fixed for p in step.passes for fixed in p.edited.values()]
    if not edits:
        return found
    if len(step.passes) > 1 and not all(edits):
        result.violation = step.violation("not-linear", SENTENCES["hook"])
    else:
        result.findings.append("a hook on a parameter multiplies its gradient by fixed factors")
    return found


def _excuse(step: Step, found: Explanation) -> str | None:
    """Return why a sum that lacks passes is no fault, or None."""
    state, passes = step.state, step.passes
    zero = [abs(c) < 1e-3 for c in found.coefficients]
    versions = [p.versions.get(id(state)) for p in passes]
    moved = [v != versions[-1] for v in versions]
    partial = ("reset-inside-window", "dropped-micro-batch", "unrecognised-weights")
    excused = found.name in partial and all(m for m, z in zip(moved, zero, strict=True) if z)
    if any(moved) and (excused or found.name == "not-linear"):
        return "parameters were written between the backward passes of a window: the earlier ones were not judged"
    if found.name in partial and any(zero):
        dropped = [p for p, z in zip(passes, zero, strict=True) if z]
        kept_lines = {p.place.line for p, z in zip(passes, zero, strict=True) if not z}
        if all(len(p.versions) > 1 and p.place.line not in kept_lines for p in dropped):
            return "backward passes that another optimizer shares were reset before the window: they were not judged"
    if found.name == "reset-inside-window" and any(zero):
        lost, kept = sum(zero), len(zero) - sum(zero)
        whole = step.whole
        if whole is not None and kept == whole and lost % whole == 0:
            return "a whole window was reset without a step, as a guard against bad windows does: it was not judged"
        if state.steps == 0 and not {p.place.line for p, z in zip(passes, zero, strict=True) if z} & {
            p.place.line for p, z in zip(passes, zero, strict=True) if not z
        }:
            return "backward passes before the training began were reset: they were not judged"
    return None


def _sum_violation(step: Step, found: Explanation) -> LiveViolation:
    passes, name = step.passes, found.name
    kind: ViolationKind = "gradient"
    zero = [abs(c) < 1e-3 for c in found.coefficients]
    whole = step.whole
    sentence = SENTENCES[name]
    if name == "reset-inside-window" and whole is not None and len(zero) - sum(zero) == whole and sum(zero) < whole:
        name, kind = "tail-dropped", "step-count"
        sentence = SENTENCES[name].format(lost=sum(zero))
    if found.wrong and name == "no-gradient":
        name, kind = "missing-gradient", "none-pattern"
        sentence = SENTENCES[name]
    if name in ("dropped-micro-batch", "repeated-micro-batch", "unrecognised-weights", "rescaled-accumulator"):
        shown = ", ".join(f"{c:.4g}" for c in found.coefficients[:16])
        sentence += f"; the window's backward passes are in the gradient {shown} times"
    if clipped := sum(bool(p.clips) for p in passes[:-1]):
        sentence = (
            f"gradients are clipped {clipped + bool(passes[-1].clips)} times in a window of {len(passes)}: "
            "clip once, after the window's last backward"
        )
        name = "not-linear"
    amount = f"the gradient is off by {found.excess:.2g} of its size"
    which = "" if not found.wrong else f", in {len(found.wrong)} parameter(s)"
    violation = step.violation(name)
    return replace(
        violation,
        kind=kind,
        explanation=f"{sentence} ({amount}{which})",
        error=found.excess,
        allowed=found.excess / max(found.ratio, 1e-300),
    )


def _parameter(state: Watched, keys: list[int], found: Explanation, sums: Sums) -> str | None:
    candidates = found.wrong or range(len(keys))
    worst = max(candidates, key=lambda p: float(np.abs(sums.gradient[p]).max() + np.abs(sums.arrivals[p]).max()))
    return parameter_name(state, keys[worst]) if keys else None


def clip_factor(passes: Sequence[Pass]) -> float:
    """Return the factor of the clipping after the last backward pass."""
    factor = 1.0
    for _, norm, largest in passes[-1].clips:
        size = float(norm)
        if np.isfinite(size):
            factor *= min(1.0, largest / (size + 1e-6))
    return factor


HANDMADE = "gradients were put together by hand from several backward passes: their sum was not judged"
GROWN = (
    "the gradient of a step was more than what arrived in its window, by one factor: something multiplied it after the "
    "last backward, or gradients of earlier steps are in it"
)
LARGER = 0.05
"""Relative excess over what arrived from which on it is reported; bfloat16 may add 2**-9 for each micro-batch."""
MOSTLY = 0.5
"""Share of the square of a gradient from which on it counts as that of the last pass, with something added."""
UNEXPLAINED = 1e-3
"""Relative deviation from what clipping explains, from which on the next window is looked at in detail."""


def judge_sum(
    step: Step, gradients: dict[int, Sketch], previous: dict[int, Sketch], result: Judged
) -> Explanation | None:
    """Judge the sum; return what the gradient is made of where that is clear.

    Args:
        step: the step.
        gradients: id of each parameter -> sketch of its `.grad`.
        previous: the same at the step before.
        result: what the step showed; this adds to it.
    """
    state, passes, memory = step.state, step.passes, step.memory
    sums, keys = _sketches(state, passes, gradients, previous)
    if _untouched(sums, passes):
        result.findings.append("gradients were written by hand: what arrived by backward was not used")
        return None
    found, own_buffer = explain(sums), False
    after = {key: as_array(sketch) for key, sketch in passes[-1].after.items()}
    if after and any(g[:PROJECTIONS].any() for g in gradients.values()):
        # `.grad` as the last backward pass left it: what was done to it afterwards is the user's decision
        left, _ = _sketches(state, passes, after, previous)
        before = explain(left)
        own_buffer = not found.name and before.name == "reset-inside-window"
        if _handmade(step, found, before, sums, left):
            state.detail, memory.unclear = True, None
            result.findings.append(HANDMADE)
            result.handmade = found.name == "not-linear"
            return None if result.handmade else replace(found, name="")
        if before.factor != 1.0 and parallel(left):
            # where all arrivals are parallel, any sum of them is a multiple of any other
            found = exactly(left) or found
        elif found.name and before.name and (before.name != "not-linear" or found.name == "not-linear"):
            found = replace(before, factor=before.factor * clip_factor(passes))
        elif found.name and not before.name:
            state.detail = result.sums = result.edited = True
            memory.unclear = None
            result.findings.append("gradients were edited between the last backward and the step, not by one factor")
            return replace(before, factor=1.0)
    unexplained = 0.0 if found.name else found.factor / clip_factor(passes) - 1
    state.detail = own_buffer or abs(unexplained) > UNEXPLAINED
    if unexplained > LARGER:
        result.findings.append(GROWN)
    if found.name and (excuse := _excuse(step, found)):
        result.findings.append(excuse)
        # what is left in the gradient is a window of its own
        return None if found.name == "not-linear" else replace(found, name="")
    if not found.name:
        result.sums = True
        if _foreign(passes, found, sums.optional):
            result.violation = step.violation("stale-window", SENTENCES["foreign"])
        return _with_edits(step, found, result)
    violation = replace(_sum_violation(step, found), parameter=_parameter(state, keys, found, sums))
    return _with_fault(step, found, violation, result)
