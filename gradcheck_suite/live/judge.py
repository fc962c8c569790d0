"""The judgement of one optimizer step from what arrived since the one before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from gradcheck_suite.live import naming, objectives
from gradcheck_suite.live.names import parameter_name
from gradcheck_suite.live.passes import Pass, Watched, is_finite
from gradcheck_suite.live.places import NOWHERE, Place
from gradcheck_suite.live.sketches import PROJECTIONS, Sketch, as_array, resolution, tolerance
from gradcheck_suite.live.sums import Explanation, Sums, empty, exactly, explain, parallel
from gradcheck_suite.live.words import SENTENCES
from gradcheck_suite.numerics.bounds import UNIT_ROUNDOFF
from gradcheck_suite.schema.live_results import LiveViolation
from gradcheck_suite.schema.results import ViolationKind

Histories = dict[Hashable, objectives.History]


@dataclass
class Judged:
    """What one step showed.

    Attributes:
        violation: the fault, or None.
        weights: whether the weights of a recognised loss were judged.
        sums: whether the sum was judged.
        handmade: whether the gradient was put together by the user, in a way that says nothing about weights.
        findings: what is worth knowing.
    """

    violation: LiveViolation | None = None
    weights: bool = False
    sums: bool = False
    handmade: bool = False
    findings: list[str] = field(default_factory=list)


@dataclass
class Memory:
    """What the windows of one optimizer showed so far.

    Attributes:
        histories: of each objective.
        lengths: how often each number of micro-batches made a window.
        unclear: a fault of the sum that may be an edit after the last backward; the next window tells.
        singles: number of windows of one micro-batch in a row.
    """

    histories: Histories = field(default_factory=dict)
    lengths: Counter[int] = field(default_factory=Counter)
    unclear: LiveViolation | None = None
    singles: int = 0

    def steps(self, given: int | None) -> int | None:
        """Return the number of micro-batches in a whole window: as given, else the most frequent one so far."""
        if given is not None:
            return given
        return self.lengths.most_common(1)[0][0] if self.lengths else None


def judge(
    state: Watched, place: Place, number: int, memory: Memory, *, given: int | None, weights: bool, sums: bool
) -> Judged:
    """Judge one step of one optimizer.

    Args:
        state: the optimizer and the passes since its last step.
        place: of the call of `step`.
        number: of the step, among all.
        memory: of earlier windows; this one is added to it.
        given: the accumulation steps that the user states, or None.
        weights: whether to judge weights.
        sums: whether to judge sums.
    """
    result = Judged()
    gradients = state.gradients() if sums else {}
    previous, state.previous = {key: as_array(s) for key, s in state.previous.items()}, dict(gradients)
    passes = state.pending
    if state.late or state.overflown:
        result.findings.append("the first step of an optimizer was not judged: it was not known before")
        return result
    if not passes:
        if sums and previous and any(np.abs(g).max() for g in gradients.values()) and _same(gradients, previous):
            result.violation = _violation("stale-window", passes, place, number)
        return result
    if not all(is_finite(as_array(s)) for p in passes for s in p.arrivals.values()):
        result.findings.append("a gradient was not finite: that window was not judged")
        return result
    if not all(is_finite(s) for s in gradients.values()):
        result.findings.append(
            "`.grad` was not finite at a step, while all that arrived was: that window was not judged"
        )
        return result
    found: Explanation | None = None
    if sums and any(p.arrivals for p in passes):
        found = _judge_sum(state, passes, gradients, previous, place, number, memory, given, result)
        if result.violation is not None:
            return result
    if weights and result.violation is None and not result.handmade:
        _judge_weights(state, passes, found, place, number, memory, given, result)
    return result


def _same(gradients: dict[int, Sketch], previous: dict[int, Sketch]) -> bool:
    return all(key in previous and np.array_equal(g, previous[key]) for key, g in gradients.items())


# The sum


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


def _judge_sum(
    state: Watched,
    passes: list[Pass],
    gradients: dict[int, Sketch],
    previous: dict[int, Sketch],
    place: Place,
    number: int,
    memory: Memory,
    given: int | None,
    result: Judged,
) -> Explanation | None:
    """Judge the sum; return what the gradient is made of where that is clear."""
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
        if _handmade(state, found, before):
            state.detail, memory.unclear = True, None
            result.findings.append(HANDMADE)
            result.handmade = found.name == "not-linear"
            return None if result.handmade else replace(found, name="")
        if before.factor != 1.0 and parallel(left):
            # where all arrivals are parallel, any sum of them is a multiple of any other
            found = exactly(left) or found
        elif found.name and before.name and (before.name != "not-linear" or found.name == "not-linear"):
            found = before
        elif found.name and not before.name:
            state.detail = result.sums = True
            memory.unclear = None
            result.findings.append("gradients were edited between the last backward and the step, not by one factor")
            return replace(before, factor=1.0)
    unexplained = not found.name and abs(found.factor / _clip_factor(passes) - 1) > UNEXPLAINED
    state.detail = own_buffer or unexplained
    if found.name and (excuse := _excuse(state, passes, found, memory, given)):
        result.findings.append(excuse)
        # what is left in the gradient is a window of its own
        return None if found.name == "not-linear" else replace(found, name="")
    if not found.name:
        result.sums = True
        if _foreign(passes, found, sums.optional):
            result.violation = replace(
                _violation("stale-window", passes, place, number), explanation=SENTENCES["foreign"]
            )
        return _with_edits(passes, found, place, number, result)
    violation = _sum_violation(found, passes, place, number, memory, given)
    violation = replace(violation, parameter=_parameter(state, keys, found, sums))
    if found.name == "not-linear" and not passes[-1].after:
        state.detail = True
        memory.unclear = memory.unclear or violation
        result.findings.append("a gradient is not the sum of what arrived, and may have been edited before the step")
        return None
    result.sums = True
    result.violation = violation
    return None


def _untouched(sums: Sums, passes: Sequence[Pass]) -> bool:
    """Whether gradients were written by hand, and not from all that one line computed by `torch.autograd.grad`."""
    if not sums.optional.all() or not np.abs(sums.gradient).max(initial=0.0):
        return False
    found = explain(sums)
    unused = {p.place.line for p, c in zip(passes, found.coefficients, strict=True) if abs(c) < 1e-3}
    used = {p.place.line for p, c in zip(passes, found.coefficients, strict=True) if abs(c) >= 1e-3}
    return found.name == "not-linear" or (found.name != "" and not unused & used)


def _handmade(state: Watched, found: Explanation, before: Explanation) -> bool:
    """Whether the user has put a gradient together from passes that he had reset, as per-example clipping does."""
    if before.name != "reset-inside-window" or found.name not in ("unrecognised-weights", "not-linear"):
        return False
    again = any(abs(f) >= 1e-3 > abs(b) for f, b in zip(found.coefficients, before.coefficients, strict=True))
    return again if found.name == "unrecognised-weights" else state.replaced()


def _foreign(passes: Sequence[Pass], found: Explanation, optional: np.ndarray) -> bool:
    """Whether the gradient has passes that another optimizer stepped on, from other lines than this window's own."""
    left = [p for p, c, o in zip(passes, found.coefficients, optional, strict=True) if o and c and p.consumers]
    own = [p for p, o in zip(passes, optional, strict=True) if not o]
    lines = [
        {r.call.place.line for p in part for r in p.received} or {p.place.line for p in part} for part in (left, own)
    ]
    return bool(left and own) and not lines[0] & lines[1]


def _with_edits(passes: list[Pass], found: Explanation, place: Place, number: int, result: Judged) -> Explanation:
    """Judge the edits of user hooks: the same factors in each micro-batch are one edit of the window's gradient."""
    edits = [fixed for p in passes for fixed in p.edited.values()]
    if not edits:
        return found
    if len(passes) > 1 and not all(edits):
        result.violation = replace(
            _violation("not-linear", passes, place, number),
            explanation=SENTENCES["hook"],
        )
    else:
        result.findings.append("a hook on a parameter multiplies its gradient by fixed factors")
    return found


def _excuse(state: Watched, passes: list[Pass], found: Explanation, memory: Memory, given: int | None) -> str | None:
    """Return why a sum that lacks passes is no fault, or None."""
    zero = [abs(c) < 1e-3 for c in found.coefficients]
    versions = [p.versions.get(id(state)) for p in passes]
    moved = [v != versions[-1] for v in versions]
    partial = ("reset-inside-window", "dropped-micro-batch", "unrecognised-weights")
    excused = found.name in partial and all(m for m, z in zip(moved, zero, strict=True) if z)
    if any(moved) and (excused or found.name == "not-linear"):
        return "parameters were written between the backward passes of a window: the earlier ones were not judged"
    if found.name == "reset-inside-window" and any(zero):
        lost, kept = sum(zero), len(zero) - sum(zero)
        whole = memory.steps(given)
        if whole is not None and kept == whole and lost % whole == 0:
            return "a whole window was reset without a step, as a guard against bad windows does: it was not judged"
        if state.steps == 0 and not {p.place.line for p, z in zip(passes, zero, strict=True) if z} & {
            p.place.line for p, z in zip(passes, zero, strict=True) if not z
        }:
            return "backward passes before the training began were reset: they were not judged"
    return None


def _sum_violation(
    found: Explanation, passes: list[Pass], place: Place, number: int, memory: Memory, given: int | None
) -> LiveViolation:
    name: str = found.name
    kind: ViolationKind = "gradient"
    zero = [abs(c) < 1e-3 for c in found.coefficients]
    whole = memory.steps(given)
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
    violation = _violation(name, passes, place, number)
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


def _violation(name: str, passes: Sequence[Pass], place: Place, number: int) -> LiveViolation:
    where = next((r.call.place.line for p in reversed(passes) for r in p.received), None)
    return LiveViolation(
        "gradient",
        name,
        SENTENCES[name],
        step=number,
        where=where or (passes[-1].place.line if passes else place.line),
        backward=passes[-1].place.line if passes and passes[-1].place is not NOWHERE else None,
        stepped=place.line,
    )


# The weights


def _clip_factor(passes: Sequence[Pass]) -> float:
    """Return the factor of the clipping after the last backward pass."""
    factor = 1.0
    for _, norm, largest in passes[-1].clips:
        size = float(norm)
        if np.isfinite(size):
            factor *= min(1.0, largest / (size + 1e-6))
    return factor


def _pending_scale(state: Watched) -> float:
    """Return the factor by which a fused optimizer divides its gradients inside its step, as GradScaler asks it to."""
    scale = getattr(state.optimizer(), "grad_scale", None)
    return float(scale) if isinstance(scale, torch.Tensor) else 1.0


def _judge_weights(
    state: Watched,
    passes: list[Pass],
    found: Explanation | None,
    place: Place,
    number: int,
    memory: Memory,
    given: int | None,
    result: Judged,
) -> None:
    factor = 1.0 if found is None else found.factor / _clip_factor(passes) / _pending_scale(state)
    coefficients = [1.0] * len(passes) if found is None else [c * factor for c in found.coefficients]
    if found is None:
        # without sums: what another optimizer has stepped on is not this one's
        coefficients = [0.0 if p.consumers or not p.accumulates else 1.0 for p in passes]
    by_call: dict[int, objectives.Term] = {}
    used = [(p, c) for p, c in zip(passes, coefficients, strict=True) if c]
    for index, (backward, coefficient) in enumerate(used):
        for received in backward.received:
            received.settle()
            if np.isfinite(received.high):
                one = objectives.term(received, index, coefficient)
                before = by_call.get(id(received.call))
                # a call that several passes reach weighs what they give it together
                by_call[id(received.call)] = (
                    one if before is None else replace(before, weight=before.weight + one.weight)
                )
    terms = list(by_call.values())
    unknown = sorted({p.unknown for p, _ in used if p.unknown})
    if not terms:
        return
    result.findings += [f"a part of the loss ({name}) was not recognised: {DECLARE}" for name in unknown]
    steps = memory.steps(given)
    length = len({t.micro_batch for t in terms})
    readings = objectives.readings(terms, steps if steps is not None and steps > 1 else None, memory.histories, number)
    memory.lengths[length] += 1
    memory.singles = memory.singles + 1 if length == 1 else 0
    for reading in readings:
        if reading.status == "unknown":
            line = reading.terms[0].line
            remedy = f": {DECLARE}" if reading.note.startswith("with different") else ""
            result.findings.append(f"{line}: a loss {reading.note} was not judged{remedy}")
        elif reading.status == "coefficient" and reading.note.startswith("a coefficient") and reading.length > 1:
            result.findings.append(f"{reading.terms[0].line}: the loss has {reading.note.split(' of ')[0]}")
    judged = [reading for reading in readings if reading.status != "unknown"]
    result.weights = bool(judged)
    faulty = next((reading for reading in judged if not reading.holds), None)
    if faulty is not None:
        violation = naming.weight_violation(faulty, steps)
        step = number if faulty.step is None else faulty.step
        result.violation = replace(violation, step=step, backward=_line(passes[-1].place), stepped=place.line)
    elif given is not None and given > 1 and memory.singles == SINGLES:
        result.violation = replace(
            _violation("step-per-micro-batch", passes, place, number),
            kind="step-count",
            explanation=SENTENCES["step-per-micro-batch"].format(steps=given),
        )


HANDMADE = "gradients were put together by hand from several backward passes: their sum was not judged"
UNEXPLAINED = 1e-3
"""Relative deviation from what clipping explains, from which on the next window is looked at in detail."""
SINGLES = 3
"""Windows of one micro-batch in a row that are no short last windows, where more micro-batches are asked for."""
DECLARE = "declare it with `loss = gradcheck_suite.objective(loss, count=n)`, n being what its mean divides by"


def _line(place: Place) -> str | None:
    return None if place is NOWHERE else place.line
