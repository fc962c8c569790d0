"""The judgement of a window that is computed again: whether `.grad` is its gradient, and what is to blame if it is not.

Blame needs a cause that is seen: other parameters or another mode in a part of the window, or a backward pass that is
not linear. Without one, the difference is a finding, since parameters may be used outside of the recorded modules.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from functools import partial

import torch

from gradcheck_suite.live.judging.custom_functions import LEAST, first_calls, judge_function
from gradcheck_suite.live.judging.names import parameter_name
from gradcheck_suite.live.judging.replay import How, Replayed, backward_hooks, quiet, replay
from gradcheck_suite.live.judging.steps import Judged, Step
from gradcheck_suite.live.judging.sum_judge import clip_factor
from gradcheck_suite.live.judging.sums import Explanation
from gradcheck_suite.live.judging.window_again import (
    BY_MICRO_BATCH,
    ONE_BATCH,
    Difference,
    InputsChanged,
    NotRecomputed,
    Part,
    Total,
    by_micro_batch,
    compare,
    distance,
    in_one_batch,
    is_exact,
    parts_of,
    reproduced,
)
from gradcheck_suite.live.judging.words import SENTENCES
from gradcheck_suite.live.recording.forwards import RandomState, point_of
from gradcheck_suite.live.recording.passes import Pass, supported

Observed = dict[int, torch.Tensor]


def _scale_of(part: Part) -> float:
    # a larger float16 number may overflow
    return 1.0 if any(g.dtype == torch.float16 for g in part.cotangents.values()) else How.scale


def _computed(
    parts: Sequence[Part], observed: Observed, factor: float, how: How
) -> tuple[Difference, Total, list[Replayed]]:
    """Return how `.grad` differs from the window that is computed again micro-batch by micro-batch."""

    def each(seed: int | None) -> tuple[Total, list[Replayed]]:
        return by_micro_batch(parts, lambda part: replace(how, seed=seed, scale=min(how.scale, _scale_of(part))))

    total, replayed = each(None)
    return compare(observed, total, factor, lambda seed: each(seed)[0]), total, replayed


def _common_modes(parts: Sequence[Part], passes: Sequence[Pass]) -> dict[Part, tuple[bool, ...]]:
    """Return the parts that ran in another mode than the same call of most passes, with the mode of those."""
    by_pass: dict[tuple[str, int], list[Part]] = {}
    for part in parts:
        by_pass.setdefault((passes[part.index].place.line, part.index), []).append(part)
    calls: dict[tuple[str, int, int, int], list[Part]] = {}
    for (line, _), members in by_pass.items():
        for position, part in enumerate(members):
            calls.setdefault((line, len(members), position, id(part.forward.module)), []).append(part)
    found = {}
    for same in calls.values():
        modes = [part.forward.modes for part in same]
        most = max(modes, key=lambda mode: (sum(mode), modes.count(mode)))
        found.update({part: most for part in same if part.forward.modes != most})
    return found


def _again(part: Part, seed: int | None = None) -> Replayed:
    return replay(part.forward, part.forward.arguments, part.cotangents, How(seed=seed))


def _numbers(parts: Sequence[Part]) -> str:
    return ", ".join(str(index) for index in sorted({part.index for part in parts}))


def _of_the_forward(
    parts: Sequence[Part], replayed: Sequence[Replayed], passes: Sequence[Pass]
) -> tuple[str, str] | None:
    """Return the diagnosis and sentence of outputs that are not reproduced; None where all are.

    Raises:
        NotRecomputed: they are not, and it is not seen that parameters are to blame.
    """
    pairs = list(zip(parts, replayed, strict=True))
    steady = [is_exact(part, found) for part, found in pairs if _is_now(part)]
    exactly = bool(steady) and all(steady)
    lost = [part for part, found in pairs if not reproduced(part, found, partial(_again, part), exactly=exactly)]
    if not lost:
        return None
    if len({one.steps for one in passes}) > 1:
        raise NotRecomputed("another optimizer has stepped inside of it")
    last = [part for part in parts if part.index == parts[-1].index]
    if (
        all(_is_now(part) and part not in lost for part in last)
        and not any(map(_is_now, lost))
        and all(map(_is_deterministic, lost))
    ):
        return "stale-parameters", SENTENCES["stale-parameters"].format(numbers=_numbers(lost))
    if any(not _is_now(part) for part in parts):
        raise NotRecomputed("parameters were written between the window's calls of the model and the step")
    raise NotRecomputed("the model gives other outputs when it is called again: it has a state of its own")


def _is_now(part: Part) -> bool:
    return part.forward.point == point_of(part.forward.module)


def _is_deterministic(part: Part) -> bool:
    one, two = _again(part), _again(part)
    return all(torch.equal(one.outputs[i], two.outputs[i]) for i in part.cotangents)


def _of_the_backward(parts: Sequence[Part], observed: Observed, factor: float, error: float) -> tuple[str, str] | str:
    """Return the diagnosis and sentence of a backward pass that is not linear, or what is a finding about it.

    Raises:
        NotRecomputed: the gradient is not that of the recorded calls.
    """
    hooked = sorted({name for part in parts for name in backward_hooks(part.forward.module)})
    exact, _, replayed = _computed(parts, observed, factor, How(hooks=True, scale=1.0))
    if exact.worst is not None:
        raise NotRecomputed("parameters get gradients from outside of the recorded calls of modules")
    scaled, _, _ = _computed(parts, observed, factor, How(hooks=True))
    if scaled.worst is None:
        names = ", ".join(hooked[:3])
        return f"a backward hook on a module ({names}) changes the gradient by {error:.2g} of its size"
    functions = sorted({kind.__name__ for found in replayed for kind in found.functions})
    what = (
        f"a hook on a module ({', '.join(hooked[:3])})" if hooked else f"custom function {', '.join(functions) or '?'}"
    )
    return "not-linear", SENTENCES["nonlinear-backward"].format(what=what)


def _weights(step: Step, found: Explanation | None, result: Judged) -> tuple[list[Pass], list[float], float]:
    """Return the passes that a window should consist of, the right weight of each, and the factor of `.grad`.

    Raises:
        NotRecomputed: the sum was not judged, or several losses have different errors.
    """
    passes = step.passes
    if found is None:
        used = [p for p in passes if p.accumulates and not p.consumers]
        return used, [1.0] * len(used), clip_factor(passes)
    if result.violation is not None and not result.violation.weights:
        used = [p for p in passes if p.accumulates and not p.consumers]
        return used, [1.0] * len(used), found.factor
    pairs = [(p, c) for p, c in zip(passes, found.coefficients, strict=True) if c]
    weights = [c for _, c in pairs]
    for index, (one, coefficient) in enumerate(pairs if result.violation is not None else ()):
        rows = [row for row in result.violation.weights if row.micro_batch == index]  # type: ignore[union-attr]
        ratios = {round(row.expected / row.observed, 6) for row in rows if row.observed and row.count}
        if len(ratios) > 1 or len(rows) != len({id(r.call) for r in one.received}):
            raise NotRecomputed("several losses go backward together, with different errors")
        weights[index] = coefficient * ratios.pop() if ratios else coefficient
    return [p for p, _ in pairs], weights, found.factor


def _recompute(step: Step, found: Explanation | None, result: Judged) -> None:
    passes, weights, factor = _weights(step, found, result)
    if not passes:
        return
    parts = result.parts = parts_of(passes, weights)
    edited = {key for p in passes for key in p.edited}
    live = {key: p.grad for key, p in step.state.live() if p.grad is not None and supported(p.grad)}
    observed = {k: gradient for k, gradient in live.items() if k not in edited or result.violation is not None}
    modes = _common_modes(parts, passes)
    whole = None if modes else in_one_batch(parts)
    if whole is not None:
        difference = compare(observed, whole, factor, lambda seed: whole)
        if difference.worst is None or result.violation is not None:
            result.again, result.error = ONE_BATCH, difference.error
            _judge_functions(step, parts, whole.functions, result)
            return
    difference, total, replayed = _computed(parts, observed, factor, How())
    if not total.gradients.keys() & observed.keys():
        raise NotRecomputed("no parameter of the optimizer is in a recorded call")
    result.again, result.error = BY_MICRO_BATCH, difference.error
    if result.violation is not None:
        return
    fault: tuple[str, str] | str | None = _of_the_forward(parts, replayed, passes)
    if fault is None and difference.worst is not None:
        fault = _of_the_backward(parts, observed, factor, difference.error)
    if fault is None and modes:
        other = [part for part in parts if part in modes]
        mixed = Total()
        for part in parts:
            how = How(modes=modes.get(part), scale=_scale_of(part))
            mixed.add(replay(part.forward, part.forward.arguments, part.cotangents, how), part.weight)
        difference = compare(observed, mixed, factor, lambda seed: mixed)
        if difference.worst is not None:
            result.error = difference.error
            fault = "mixed-modes", SENTENCES["mixed-modes"].format(numbers=_numbers(other))
    if isinstance(fault, str):
        result.findings.append(fault)
    elif fault is not None:
        _blame(step, fault, parts, replayed, difference, result)
    else:
        _judge_functions(step, parts, total.functions, result)


def _judge_functions(step: Step, parts: Sequence[Part], kinds: Set[type], result: Judged) -> None:
    """Judge those custom functions on the way that no earlier window has shown."""
    new = kinds - step.memory.functions
    if not new or result.violation is not None:
        return
    step.memory.functions |= new
    before = RandomState.now()
    with first_calls(new) as calls:
        for part in parts:
            if calls.keys() != new:
                _again(part)
    with quiet():
        verdicts = [judge_function(call) for call in calls.values()]
    before.set()
    for verdict in verdicts:
        if verdict.note:
            result.findings.append(f"custom function {verdict.name}: {verdict.note}")
        if verdict.fault and result.violation is None:
            sentence = SENTENCES["wrong-backward"].format(name=verdict.name, fault=verdict.fault)
            result.violation = replace(step.violation("wrong-backward", sentence), error=verdict.error, allowed=LEAST)
            result.error = None  # the window was computed again with the same fault


def _blame(
    step: Step,
    fault: tuple[str, str],
    parts: Sequence[Part],
    replayed: Sequence[Replayed],
    difference: Difference,
    result: Judged,
) -> None:
    outputs = [
        distance(part.forward.outputs[i], found.outputs[i])
        for part, found in zip(parts, replayed, strict=True)
        for i in part.cotangents
    ]
    error = max(difference.error, *outputs)
    result.error = error
    violation = step.violation(*fault)
    worst = None if difference.worst is None else parameter_name(step.state, difference.worst)
    allowed = error / difference.ratio if difference.ratio else None
    result.violation = replace(violation, parameter=worst, error=error, allowed=allowed)


def judge_batch(step: Step, found: Explanation | None, result: Judged) -> None:
    """Compute a window again and judge its gradient; a violation that was found already gets its size.

    Args:
        step: the step.
        found: what the gradient is made of, or None where sums are not judged.
        result: what the step showed; this adds to it.
    """
    try:
        _recompute(step, found, result)
    except NotRecomputed as reason:
        result.again = result.error = None
        result.copies = isinstance(reason, InputsChanged)
        result.findings.append(f"a window was not computed again: {reason}")
    except Exception as error:
        result.again = result.error = None
        result.findings.append(f"a window was not computed again: {type(error).__name__}: {str(error).splitlines()[0]}")
    if result.violation is not None and result.error is not None:
        result.violation = replace(result.violation, gradient_error=result.error)
