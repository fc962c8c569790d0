"""The judgement of one optimizer step: its sums, its weights, the window again, and JAX's opinion."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from gradcheck_suite.auditing import weights as naming
from gradcheck_suite.auditing import weights as objectives
from gradcheck_suite.auditing.passes import (
    Forward,
    Pass,
    RandomState,
    Sketch,
    Watched,
    as_array,
    is_differentiable,
    is_finite,
    leaves_of,
    point_of,
    supported,
)
from gradcheck_suite.auditing.recorder import Recorder
from gradcheck_suite.auditing.sums import SENTENCES, Explanation, Judged, Step, clip_factor, judge_sum, parameter_name
from gradcheck_suite.auditing.weights import TWICE, Term, term
from gradcheck_suite.auditing.window_again import (
    BY_MICRO_BATCH,
    LEAST,
    ONE_BATCH,
    Difference,
    How,
    InputsChanged,
    NotRecomputed,
    Part,
    Replayed,
    Total,
    backward_hooks,
    by_micro_batch,
    compare,
    distance,
    first_calls,
    in_one_batch,
    is_exact,
    judge_function,
    norm,
    parts_of,
    quiet,
    replay,
    reproduced,
)
from gradcheck_suite.core.comparison import FEW_DRAWS, student_factor
from gradcheck_suite.core.results import LiveViolation

if TYPE_CHECKING:
    from gradcheck_suite.bridge import Lowered


# The judgement of the weights: whether the items of a window weigh the same, and 1/N.


SINGLES = 3
"""Windows of one micro-batch in a row that are no short last windows, where more micro-batches are asked for."""
DECLARE = "declare it with `loss = gradcheck_suite.objective(loss, count=n)`, n being what its mean divides by"


def _pending_scale(state: Watched) -> float:
    """Return the factor by which a fused optimizer divides its gradients inside its step, as GradScaler asks it to."""
    scale = getattr(state.optimizer(), "grad_scale", None)
    return float(scale) if isinstance(scale, torch.Tensor) else 1.0


def _coefficient(note: str) -> str:
    """Return a coefficient in words, without its value, which may differ from window to window."""
    return note.split(" of ")[0] + (TWICE if TWICE in note else "")


def judge_weights(step: Step, found: Explanation | None, result: Judged) -> None:
    """Judge the weights of the items of a window.

    Args:
        step: the step.
        found: what the gradient is made of, or None where sums are not judged.
        result: what the step showed; this adds to it.
    """
    passes, memory = step.passes, step.memory
    factor = 1.0 if found is None else found.factor / clip_factor(passes) / _pending_scale(step.state)
    coefficients = [1.0] * len(passes) if found is None else [c * factor for c in found.coefficients]
    if found is None:
        # without sums: what another optimizer has stepped on is not this one's
        coefficients = [0.0 if p.consumers or not p.accumulates else 1.0 for p in passes]
    by_call: dict[int, Term] = {}
    used = [(p, c) for p, c in zip(passes, coefficients, strict=True) if c]
    for index, (backward, coefficient) in enumerate(used):
        for received in backward.received:
            received.settle()
            if np.isfinite(received.high):
                one = term(received, index, coefficient)
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
    length, steps = len({t.micro_batch for t in terms}), step.whole
    accumulates = steps is not None and steps > 1
    readings = objectives.readings(terms, steps if accumulates else None, memory.histories, step.number)
    memory.lengths[length] += 1
    memory.singles = memory.singles + 1 if length == 1 else 0
    for reading in readings:
        if reading.status == "unknown":
            line = reading.terms[0].line
            remedy = f": {DECLARE}" if reading.note.startswith("with different") else ""
            result.findings.append(f"{line}: a loss {reading.note} was not judged{remedy}")
        elif reading.status == "coefficient" and reading.note.startswith("a coefficient of ") and reading.length > 1:
            result.findings.append(f"{reading.terms[0].line}: the loss has {_coefficient(reading.note)}")
    judged = [reading for reading in readings if reading.status != "unknown"]
    result.weights = bool(judged)
    faulty = next((reading for reading in judged if not reading.holds), None)
    if faulty is not None:
        violation = naming.weight_violation(faulty, steps)
        number = step.number if faulty.step is None else faulty.step
        result.violation = replace(violation, step=number, backward=step.backward, stepped=step.place.line)
    elif step.given is not None and step.given > 1 and memory.singles == SINGLES:
        violation = step.violation("step-per-micro-batch", SENTENCES["step-per-micro-batch"].format(steps=step.given))
        result.violation = replace(violation, kind="step-count")


# The judgement of a window that is computed again: whether `.grad` is its gradient, and what is to blame if it is
# not.
#
# Blame needs a cause that is seen: other parameters or another mode in a part of the window, or a backward pass that
# is not linear. Without one, the difference is a finding, since parameters may be used outside of the recorded
# modules.


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


# The judgement of one optimizer step from what arrived since the one before.


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


# JAX's opinion on a live run: the recorded calls of one window, over the bridge, in float64.
#
# The calls of small models are copied when their window is computed again, and JAX is asked when the run is over:
# training goes on undisturbed, and JAX is not imported before. The gradients that reached a module's outputs are
# recorded, so the sum of their products with the outputs is a loss whose gradient both frameworks compute. Custom
# functions keep their own backward there: `custom_functions` judges them.


MOST_PARAMETERS = 1_000_000
"""Elements of a model's parameters above which JAX is not asked: their copy in float64 takes 8 MB."""
BUDGET_S = 20.0
"""Seconds after which JAX is asked about no further call."""
RESOLUTION, NARROW_RESOLUTION = 2.0**-26, 2.0**-10
"""Share of a parameter's gradient below which a difference is none: in float64, and where the model itself asks for
float32 inside. Rounding is 2^-53 and 2^-24; a wrong derivative is larger."""
RESOLUTION_OF_ALL = 2.0**-40
"""The same as a share of the gradient of all parameters, for a parameter whose own gradient cancels to zero."""


class _Refused(Exception):
    """Why JAX is not asked about a call."""


@dataclass(frozen=True, eq=False)
class KeptCall:
    """A call to ask JAX about.

    Attributes:
        forward: the call, with a copy of the module and of its arguments in float64, without autocast.
        cotangents: index of an output -> the gradient that it received.
        micro_batch: index of the backward pass in its window.
    """

    forward: Forward
    cotangents: dict[int, torch.Tensor]
    micro_batch: int


@dataclass
class JaxOpinion:
    """What JAX said of a window.

    Attributes:
        calls: number of recorded calls.
        answered: number of these whose gradient JAX computed.
        refusal: why JAX could not compute the first of the others, or None.
        findings: parameters whose gradients differ, one sentence for each call.
    """

    calls: int = 0
    answered: int = 0
    refusal: str | None = None
    findings: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """Return a sentence."""
        if not self.answered:
            return f"JAX gives no second opinion: {self.refusal or 'no window was computed again'}"
        text = f"JAX gave a second opinion on {self.answered} of {self.calls} calls of one window"
        if not self.findings:
            text += ", and agrees with torch"
        return text if self.refusal is None else f"{text}; the first call that it could not compute: {self.refusal}"


def _float64(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().to(torch.float64) if value.is_floating_point() else value.detach().clone()


def kept_calls(parts: Sequence[Part]) -> list[KeptCall] | str:
    """Return copies of a window's calls, or why there are none."""
    copies: dict[int, torch.nn.Module] = {}
    kept = []
    for part in parts:
        forward = part.forward
        size = sum(p.numel() for p in forward.module.parameters())
        if size > MOST_PARAMETERS:
            return f"the model has {size:,} parameters, and JAX computes only models of at most {MOST_PARAMETERS:,}"
        if id(forward.module) not in copies:
            try:
                copies[id(forward.module)] = copy.deepcopy(forward.module).double()
            except Exception as error:
                return f"the model cannot be copied: {type(error).__name__}: {error}"
        wide = replace(
            forward,
            module=copies[id(forward.module)],
            arguments=[_float64(value) for value in forward.arguments],
            autocast=(forward.autocast[0], forward.autocast[1], False),
        )
        kept.append(KeptCall(wide, {i: _float64(g) for i, g in part.cotangents.items()}, part.index))
    return kept


def ask_jax(calls: Sequence[KeptCall]) -> JaxOpinion:
    """Compare the gradients of calls by torch and by JAX, both in float64."""
    opinion, began = JaxOpinion(len(calls)), time.perf_counter()
    before = RandomState.now()
    try:
        for call in calls:
            if opinion.answered and time.perf_counter() - began > BUDGET_S:
                break
            try:
                with quiet():
                    finding = _compare(call)
            except _Refused as error:
                opinion.refusal = opinion.refusal or str(error)
            except Exception as error:
                opinion.refusal = opinion.refusal or f"{type(error).__name__}: {str(error).splitlines()[0]}"
            else:
                opinion.answered += 1
                if finding:
                    opinion.findings.append(finding)
    finally:
        before.set()
    return opinion


def _compare(call: KeptCall) -> str | None:
    """Return what differs, or None.

    Raises:
        _Refused: the call draws random numbers.
        BridgeError: the model cannot be translated.
    """
    found = _by_torch(call, None)
    if found.random:
        raise _Refused("the model draws random numbers, which JAX draws differently")
    gradients, narrow = _by_jax(call, found.functions)
    names = {id(p): name for name, p in call.forward.module.named_parameters()}
    total = sum(norm(g) ** 2 for g in found.gradients.values()) ** 0.5
    share = NARROW_RESOLUTION if narrow else RESOLUTION
    off = {key: norm(g.cpu() - gradients[names[key]]) for key, g in found.gradients.items()}
    allowed = {key: share * norm(g) + RESOLUTION_OF_ALL * total for key, g in found.gradients.items()}
    over = [key for key in off if not off[key] <= allowed[key]]
    if over:
        draws = [_by_torch(call, seed).gradients for seed in range(FEW_DRAWS)]
        for key in over:
            moved = sum(norm(drawn[key] - found.gradients[key]) ** 2 for drawn in draws) / FEW_DRAWS
            allowed[key] += student_factor(FEW_DRAWS) * moved**0.5
    wrong = [key for key in over if not off[key] <= allowed[key]]
    if not wrong:
        return None
    worst = max(wrong, key=lambda key: off[key] / allowed[key])
    size = norm(found.gradients[worst])
    relative = f"by {off[worst] / size:.2g} of its size" if size else f"by {off[worst]:.2g}, where torch's is 0"
    others = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return (
        f"torch and JAX differ in the gradient of {names[worst]} {relative}{others}, both in float64, in a call of "
        f"{type(call.forward.module).__name__} in micro-batch {call.micro_batch}: no loop is to blame"
    )


def _by_torch(call: KeptCall, seed: int | None) -> Replayed:
    return replay(call.forward, call.forward.arguments, call.cotangents, How(seed=seed, scale=1.0))


def _by_jax(call: KeptCall, functions: frozenset[type]) -> tuple[dict[str, torch.Tensor], bool]:
    """Return the gradients by name, and whether the model asks for less than float64 inside.

    Args:
        call: the call.
        functions: custom functions whose own backward is taken.
    """
    from gradcheck_suite.bridge import arguments_of, lower

    model, structure = call.forward.module, call.forward.structure
    for part, training in zip(model.modules(), call.forward.modes, strict=True):
        part.training = training
    positional, keywords = pytree.tree_unflatten(call.forward.arguments, structure)
    places = [i for i, leaf in enumerate(leaves_of(model(*positional, **keywords))) if is_differentiable(leaf)]

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        positional, keywords = pytree.tree_unflatten(list(batch["arguments"]), structure)
        outputs = leaves_of(model(*positional, **keywords))
        products = [(outputs[places[i]] * gradient).sum() for i, gradient in batch["gradients"].items()]
        return torch.stack(products).sum()

    batch = {"arguments": call.forward.arguments, "gradients": call.cotangents}
    lowered: Lowered = lower(model, loss, batch, own_backwards=functions)
    _, gradients, _ = lowered.value_and_gradient(*arguments_of(model, batch))
    return {name: torch.from_numpy(g.copy()) for name, g in gradients.items()}, bool(lowered.narrow)


# What is said when an audit ends: micro-batches without a step, and why nothing could be judged.


UNCLEAR = (
    "at a step, `.grad` was not the sum of the window's backward passes, and it is unclear why: "
    "it was edited before the step, or other code writes to `.grad`"
)
WRAP = (
    "Call what writes to the parameters (an extension in C++, a loop over them) in the step() of a subclass of "
    "torch.optim.Optimizer"
)


def dropped_tail(state: Watched, accumulation_steps: int | None) -> LiveViolation | None:
    """Return the violation of a short last window that was accumulated and never stepped, or None.

    Args:
        state: of an optimizer, when the run is over.
        accumulation_steps: micro-batches of its windows; None where that is not known.
    """
    left = [p for p in state.pending if p.accumulates and not p.consumers and p.received]
    if not left or accumulation_steps is None or not len(left) < accumulation_steps > 1 or not state.steps:
        return None
    return LiveViolation(
        "step-count",
        "tail-dropped",
        SENTENCES["tail-dropped"].format(lost=len(left)).replace("reset without", "left without"),
        where=left[-1].received[-1].call.place.line,
        backward=min({p.place.line for p in left}),
    )


def why_unjudged(recorder: Recorder, windows: int, findings: Iterable[str]) -> str | None:
    """Return why nothing could be judged, or None where something was.

    Args:
        recorder: of the run.
        windows: number of windows that were judged.
        findings: of the audit so far, beside the recorder's own.
    """
    if not recorder.weights and not recorder.sums and recorder.every is None:
        return "every instrument was switched off"
    if not recorder.steps_seen and recorder.passes_seen:
        return (
            f"no optimizer.step() was seen, and {recorder.passes_seen} call(s) of backward were: the script trains "
            f"without a torch.optim optimizer. {WRAP}"
        )
    if not recorder.steps_seen:
        return (
            "no backward pass and no optimizer.step() was seen in this process: the script trains nothing here, or in "
            "another process"
        )
    if windows:
        return None
    for line, node in recorder.unrecognised.items():
        made = "was computed inside torch.compile" if node.startswith("Compiled") else f"comes from {node}"
        return f"the loss that goes backward at {line} {made} and was not recognised: {DECLARE}"
    reasons = [*findings, *recorder.findings][:2] or ["no loss went backward"]
    return f"no step could be judged: {'; '.join(reasons)}"
