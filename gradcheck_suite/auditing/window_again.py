"""A window computed again: its recorded calls in one batch where that is possible, else micro-batch by micro-batch.

The gradients that reached the modules' outputs are recorded, so what follows from them is a function of the modules
alone. The bound on the 2-norm of a parameter's difference is that of the additions, `growth(K + 5, u)` times the sum of
the norms of the contributions. Where it is exceeded, the rounding errors are measured by `FEW_DRAWS` computations with
parameters and inputs changed by one unit roundoff, and Student's factor for their number times their root mean square
is allowed as well (`core.comparison`).

Blame needs a cause that is seen: another mode in a part of the window, or a backward that is not linear. Without one, a
difference is a finding, since parameters may be used outside of the recorded modules.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from gradcheck_suite.auditing.forwards import (
    LEAST,
    Forward,
    FunctionKey,
    FunctionReport,
    Gradients,
    How,
    NotRecomputed,
    Replayed,
    backward_hooks,
    first_calls,
    is_differentiable,
    judge_function,
    leaves_of,
    point_of,
    quiet,
    replay,
    statement_of,
    unchanged,
)
from gradcheck_suite.auditing.recorder import Running
from gradcheck_suite.auditing.samples import distance, read, sample
from gradcheck_suite.core.comparison import FEW_DRAWS, FURTHER_ROUNDINGS, UNIT_ROUNDOFF, growth, student_factor

if TYPE_CHECKING:
    from gradcheck_suite.bridge import Lowered

ONE_BATCH, BY_MICRO_BATCH = "in one batch", "micro-batch by micro-batch"
FULL_PRECISION = ("float32", "float64")


class InputsChanged(NotRecomputed):
    """An input was changed in place."""


@dataclass(frozen=True, eq=False)
class Part:
    """One recorded call with what came back in one backward pass.

    Attributes:
        forward: the call.
        cotangents: index of an output -> the gradient that it received.
        index: of the pass among the window's.
        weight: by which the gradients are multiplied.
    """

    forward: Forward
    cotangents: dict[int, torch.Tensor]
    index: int
    weight: float = 1.0


def parts_of(passes: Sequence[Running], weights: Sequence[float]) -> list[Part]:
    """Return the recorded calls of a window.

    Args:
        passes: the backward passes.
        weights: of each pass.

    Raises:
        NotRecomputed: no call was recorded in some pass, a module is compiled, or an input was changed in place.
    """
    parts = []
    for index, (one, weight) in enumerate(zip(passes, weights, strict=True)):
        if not one.forwards:
            raise NotRecomputed("no call of a module that leads to the loss was recorded")
        for forward, received in one.forwards.items():
            if forward.compiled:
                raise NotRecomputed("the model is compiled")
            if forward.changed:
                raise InputsChanged("an input of the model was changed in place before the step")
            parts.append(Part(forward, dict(received), index, weight))
    return parts


def from_outside(part: Part, *, hooks: bool = False) -> Part:
    """Return a call with what its outputs received from outside of the module.

    Of several outputs one is often computed from another, as logits from features and a loss from logits: what a tensor
    received is then its own gradient and what came back through the others.

    Args:
        part: the call, with all that its outputs received.
        hooks: whether the backward hooks of modules run.
    """
    if len(part.cotangents) < 2:
        return part
    found = replay(part.forward, part.forward.arguments, part.cotangents, How(hooks=hooks, scale=1.0, received=True))
    own = {i: g - found.inside[i] if i in found.inside else g for i, g in part.cotangents.items()}
    return replace(part, cotangents={i: g for i, g in own.items() if g.any()} or own)


def dtype_of(tensor: torch.Tensor) -> str:
    """Return the name of a dtype, float32 for one without a known unit roundoff."""
    name = str(tensor.dtype).removeprefix("torch.")
    return name if name in UNIT_ROUNDOFF else "float32"


def norm(tensor: torch.Tensor) -> float:
    """Return the 2-norm of a gradient, computed in float64."""
    values = tensor.coalesce().values() if tensor.layout == torch.sparse_coo else _dense(tensor)
    return float(torch.linalg.vector_norm(values.detach().reshape(-1), dtype=torch.float64))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_dense() if tensor.layout != torch.strided else tensor).detach()


def _sum(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the sum of two gradients; that of two sparse ones, of a large table above all, stays sparse."""
    one, other = one.detach(), other.detach()
    return one + other if one.layout == other.layout else _dense(one) + _dense(other)


@dataclass
class Total:
    """A window's gradient, computed again.

    Attributes:
        gradients: the weighted sum.
        sizes: id of a parameter -> the sum of the 2-norms of its contributions.
        terms: number of contributions.
        dtype: the coarsest dtype in which contributions may be added up, where that is not the gradient's.
        functions: classes of the custom functions on the way.
    """

    gradients: Gradients = field(default_factory=dict)
    sizes: dict[int, float] = field(default_factory=dict)
    terms: int = 0
    dtype: str | None = None
    functions: frozenset[type] = frozenset()

    def add(self, found: Replayed, weight: float) -> None:
        """Add a contribution."""
        self.terms += 1
        self.functions |= found.functions
        for key, gradient in found.gradients.items():
            scaled = gradient * weight
            self.gradients[key] = _sum(self.gradients[key], scaled) if key in self.gradients else scaled
            self.sizes[key] = self.sizes.get(key, 0.0) + norm(scaled)


def by_micro_batch(parts: Sequence[Part], how: Callable[[Part], How]) -> tuple[Total, list[Replayed]]:
    """Compute each call again and return the weighted sum of the gradients."""
    total, replayed = Total(), []
    if len({part.index for part in parts}) < len(parts):
        # under autocast, the calls of one pass share a cast parameter, and their gradients are added up in its dtype
        total.dtype = next((str(p.forward.autocast[1])[6:] for p in parts if p.forward.autocast[2]), None)
    for part in parts:
        found = replay(part.forward, part.forward.arguments, part.cotangents, how(part))
        total.add(found, part.weight)
        replayed.append(replace(found, gradients={}))
    return total, replayed


def _joined(parts: Sequence[Part]) -> tuple[list[Any], dict[int, torch.Tensor], list[int]] | None:
    """Return the arguments and gradients of all calls as one batch, and its sizes; None where they do not fit."""
    forwards = [part.forward for part in parts]
    first = forwards[0]
    same = all(
        (f.module, f.structure, f.modes, f.trained, f.autocast)
        == (first.module, first.structure, first.modes, first.trained, first.autocast)
        for f in forwards
    )
    if not same or len({part.index for part in parts}) < len(parts) or any(any(f.scalars) for f in forwards):
        return None
    columns = list(zip(*(f.arguments for f in forwards), strict=True))
    batched = [c for c in columns if all(isinstance(v, torch.Tensor) and v.dim() for v in c)]
    if not batched:
        return None
    rows = [int(v.shape[0]) for v in batched[0]]
    arguments: list[Any] = []
    for column in columns:
        if all(isinstance(v, torch.Tensor) for v in column):
            if not _fits(column, rows):
                return None
            arguments.append(torch.cat(list(column)))
        elif all(v is column[0] or (type(v) in (int, float, str, bool) and v == column[0]) for v in column):
            arguments.append(column[0])
        else:
            return None
    indices = parts[0].cotangents.keys()
    if any(part.cotangents.keys() != indices for part in parts):
        return None
    received = {i: [part.cotangents[i] for part in parts] for i in indices}
    if not all(_fits(column, rows) for column in received.values()):
        return None
    cotangents = {
        i: torch.cat([g * part.weight for g, part in zip(column, parts, strict=True)]) for i, column in received.items()
    }
    return arguments, cotangents, rows


def _fits(column: Sequence[torch.Tensor], rows: Sequence[int]) -> bool:
    shapes = {(v.shape[1:], v.dtype, v.layout) if v.dim() else None for v in column}
    return len(shapes) == 1 and None not in shapes and [int(v.shape[0]) for v in column] == list(rows)


def _low_precision(parts: Sequence[Part]) -> bool:
    low = any(p.forward.autocast[2] for p in parts)
    return low or any(dtype_of(g) not in FULL_PRECISION for p in parts for g in p.cotangents.values())


def in_one_batch(parts: Sequence[Part]) -> Total | None:
    """Return the window's gradient from one call, or None where there is none that is equal to the calls.

    In a lower precision than float32 rounding hides too much: there it is not tried.
    """
    joined = None if len(parts) < 2 or _low_precision(parts) else _joined(parts)
    if joined is None:
        return None
    arguments, cotangents, rows = joined
    first = parts[0].forward

    def computed(seed: int | None) -> Replayed:
        return replay(first, arguments, cotangents, How(seed=seed))

    try:
        found = computed(None)
    except Exception:
        return None  # the model takes no batch of this size
    if found.random or not _same_outputs(parts, found, rows):
        return None
    total = Total()
    total.add(found, 1.0)
    total.terms = sum(rows)
    return total


def _same_outputs(parts: Sequence[Part], found: Replayed, rows: Sequence[int]) -> bool:
    """Whether the rows of one batch's outputs are those of the calls: the model is separable over samples."""
    for i in parts[0].cotangents:
        if i >= len(found.outputs) or not found.outputs[i].dim() or found.outputs[i].shape[0] != sum(rows):
            return False
        for part, piece in zip(parts, found.outputs[i].split(list(rows)), strict=True):
            if _apart(part.forward.outputs[i], piece) > ONE_BATCH_OUTPUTS * UNIT_ROUNDOFF[dtype_of(piece)]:
                return False
    return True


ONE_BATCH_OUTPUTS = 2.0**12
"""Relative difference of outputs, in unit roundoffs, above which a model counts as not separable over samples. It
decides no verdict: the window is then computed micro-batch by micro-batch."""


def _apart(recorded: Any, output: torch.Tensor) -> float:
    then, now = read([recorded, sample(output, whole=True)])
    return distance(now, then)


def reproduced(part: Part, found: Replayed) -> bool:
    """Return whether a call's outputs are what they were, but for rounding."""
    return all(
        i < len(found.outputs)
        and _apart(part.forward.outputs[i], found.outputs[i])
        <= ONE_BATCH_OUTPUTS * UNIT_ROUNDOFF[dtype_of(found.outputs[i])]
        for i in part.cotangents
    )


@dataclass(frozen=True)
class Difference:
    """How `.grad` differs from the window's gradient.

    Attributes:
        error: 2-norm of the difference over that of the window's gradient, over all parameters.
        worst: id of the parameter whose difference is the largest of what is allowed, or None where none exceeds it.
        ratio: that difference over what is allowed.
    """

    error: float
    worst: int | None = None
    ratio: float = 0.0


def compare(
    observed: Mapping[int, torch.Tensor], total: Total, factor: float, draws: Callable[[int], Total]
) -> Difference:
    """Compare `.grad` with a factor times the window's gradient.

    Args:
        observed: id of each parameter -> its `.grad`.
        total: the window's gradient, computed again.
        factor: the common factor that something seen explains.
        draws: computes the window again with changed parameters and inputs.
    """
    keys = [key for key in total.gradients if key in observed]
    off = {key: norm(_sum(observed[key].double(), -factor * total.gradients[key].double())) for key in keys}
    size = math.hypot(*(factor * norm(total.gradients[key]) for key in keys))
    terms, adding = total.terms + FURTHER_ROUNDINGS, abs(factor)
    allowed = {key: adding * growth(terms, total.dtype or dtype_of(observed[key])) * total.sizes[key] for key in keys}
    # a gradient that is not finite is compared with nothing
    finite = {key: value for key, value in off.items() if not math.isnan(value)}
    ratios = exceeding(finite, allowed, total.gradients, lambda seed: draws(seed).gradients, factor)
    error = math.hypot(*off.values()) / size if size else 0.0
    worst = max(ratios, key=ratios.__getitem__, default=None)
    return Difference(error, worst, ratios[worst] if worst is not None else 0.0)


def exceeding(
    off: Mapping[int, float],
    allowed: dict[int, float],
    expected: Gradients,
    draws: Callable[[int], Gradients],
    factor: float = 1.0,
) -> dict[int, float]:
    """Return by how many times differences exceed what is allowed, of those that do.

    Where one does, the rounding errors are measured, and allowed as well.

    Args:
        off: id of a parameter -> the 2-norm of the difference.
        allowed: what is allowed without a measurement; what is measured is added.
        expected: the gradients.
        draws: computes them again with changed parameters and inputs.
        factor: by which they are multiplied.
    """
    over = [key for key in off if not off[key] <= allowed[key]]
    moved = [draws(seed) for seed in range(FEW_DRAWS)] if over else []
    for key in over:
        squares = [norm(other[key].double() - expected[key].double()) ** 2 for other in moved if key in other]
        allowed[key] += student_factor(FEW_DRAWS) * abs(factor) * float(np.mean(squares or [0.0])) ** 0.5
    return {k: off[k] / allowed[k] if allowed[k] else math.inf for k in over if not off[k] <= allowed[k]}


# What a window that is computed again shows.


SENTENCES = {
    "wrong-mode": "micro-batch(es) {numbers} of the window were computed in another mode (train or eval) than the "
    "others: call model.train() after every evaluation",
    "not-linear": "the backward pass of {what} is no linear function of the gradient that it receives, so "
    "micro-batches do not add up to one batch (it ignores the gradient, clips or normalizes it): do that once, to "
    "`.grad`, before the step",
    "wrong-backward": "the backward of custom function {name} is wrong: {fault} of its forward: mend it, or accept it "
    "with --accept wrong-backward where that is on purpose",
}
NOT_CALLED = "its backward was not checked, since no call of it was seen when the window was computed again"


@dataclass
class Outcome:
    """What computing a window again showed.

    Attributes:
        how: in one batch or micro-batch by micro-batch; None where it was not computed.
        error: the 2-norm of the gradient's error over that of the gradient.
        name: of a fault, or None.
        sentence: what is wrong and what to do.
        allowed: the relative error that rounding explains.
        parameter: id of a parameter that shows it.
        notes: what is worth knowing.
        inputs_changed: whether inputs are changed in place, and have to be copied from now on.
        parts: the calls.
    """

    how: str | None = None
    error: float | None = None
    name: str | None = None
    sentence: str = ""
    allowed: float | None = None
    parameter: int | None = None
    notes: list[str] = field(default_factory=list)
    inputs_changed: bool = False
    parts: Sequence[Part] = ()


@dataclass(frozen=True)
class Asked:
    """A window that is to be computed again.

    Attributes:
        passes: that are in `.grad`, or should be.
        weights: the right weight of each.
        factor: by which `.grad` was multiplied after the last pass.
        observed: id of a parameter -> its `.grad`.
        is_faulty: whether a fault is known already: then only its size is asked.
        known: the custom functions that were judged before; new ones are added.
    """

    passes: Sequence[Running]
    weights: Sequence[float]
    factor: float
    observed: Gradients
    is_faulty: bool
    known: set[FunctionKey]


def compute_again(asked: Asked) -> Outcome:
    """Compute a window again, and say what that shows; an exception of the program's own modules is a note."""
    outcome = Outcome()
    try:
        _compute(asked, outcome)
    except NotRecomputed as reason:
        return Outcome(
            notes=[f"a window was not computed again: {reason}"], inputs_changed=isinstance(reason, InputsChanged)
        )
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        return Outcome(notes=[f"a window was not computed again: {type(error).__name__}: {first}"])
    return outcome


def _scale_of(part: Part) -> float:
    # a larger float16 number may overflow
    return 1.0 if any(g.dtype == torch.float16 for g in part.cotangents.values()) else How.scale


def _computed(asked: Asked, parts: Sequence[Part], how: How) -> tuple[Difference, Total, list[Replayed]]:
    """Return how `.grad` differs from the window that is computed again micro-batch by micro-batch."""

    def each(seed: int | None) -> tuple[Total, list[Replayed]]:
        return by_micro_batch(parts, lambda part: replace(how, seed=seed, scale=min(how.scale, _scale_of(part))))

    total, replayed = each(None)
    return compare(asked.observed, total, asked.factor, lambda seed: each(seed)[0]), total, replayed


def _again(part: Part, seed: int | None = None) -> Replayed:
    return replay(part.forward, part.forward.arguments, part.cotangents, How(seed=seed))


def _common_modes(parts: Sequence[Part], passes: Sequence[Running]) -> dict[Part, tuple[bool, ...]]:
    """Return the parts that ran in another mode than the same call of most passes, with the mode of those."""
    by_pass: dict[tuple[Any, int], list[Part]] = {}
    for part in parts:
        by_pass.setdefault((passes[part.index].record.place, part.index), []).append(part)
    calls: dict[tuple[Any, int, int, int], list[Part]] = {}
    for (place, _), members in by_pass.items():
        for position, part in enumerate(members):
            calls.setdefault((place, len(members), position, id(part.forward.module)), []).append(part)
    found = {}
    for same in calls.values():
        modes = [part.forward.modes for part in same]
        most = max(modes, key=lambda mode: (sum(mode), modes.count(mode)))
        found.update({part: most for part in same if part.forward.modes != most})
    return found


def _compute(asked: Asked, outcome: Outcome) -> None:
    received = parts_of(asked.passes, asked.weights)
    parts = outcome.parts = [from_outside(part) for part in received]
    modes = _common_modes(parts, asked.passes)
    whole = None if modes else in_one_batch(parts)
    if whole is not None and whole.gradients.keys() & asked.observed.keys():
        difference = compare(asked.observed, whole, asked.factor, lambda seed: whole)
        if difference.worst is None or asked.is_faulty:
            outcome.how, outcome.error = ONE_BATCH, difference.error
            _judge_functions(asked, parts, whole.functions, outcome)
            return
    difference, total, replayed = _computed(asked, parts, How())
    if not total.gradients.keys() & asked.observed.keys():
        where = "is in a recorded call" if asked.observed else "gets its gradient without a hook of the script's"
        raise NotRecomputed(f"no parameter of the optimizer {where}")
    outcome.how, outcome.error = BY_MICRO_BATCH, difference.error
    if asked.is_faulty:
        return
    _expect_reproduced(parts, replayed)
    if difference.worst is not None:
        _judge_backward(asked, received, outcome)
    elif modes:
        _judge_modes(asked, parts, modes, outcome)
    if outcome.name is None:
        _judge_functions(asked, parts, total.functions, outcome)


def _expect_reproduced(parts: Sequence[Part], replayed: Sequence[Replayed]) -> None:
    """Refuse calls that give other outputs than they gave.

    Raises:
        NotRecomputed: some do.
    """
    lost = [part for part, found in zip(parts, replayed, strict=True) if not reproduced(part, found)]
    if lost and any(part.forward.point != point_of(part.forward.module) for part in parts):
        raise NotRecomputed("parameters were written between the window's calls of the model and the step")
    if lost:
        raise NotRecomputed("the model gives other outputs when it is called again: it has a state of its own")


def _judge_backward(asked: Asked, received: Sequence[Part], outcome: Outcome) -> None:
    """Say which backward is not linear.

    Raises:
        NotRecomputed: the gradient is not that of the recorded calls.
    """
    hooked = sorted({name for part in received for name in backward_hooks(part.forward.module)})
    parts = [from_outside(part, hooks=True) for part in received]
    difference, _, _ = _computed(asked, parts, How())
    exact, _, replayed = _computed(asked, parts, How(hooks=True, scale=1.0))
    if exact.worst is not None:
        raise NotRecomputed("parameters get gradients from outside of the recorded calls of modules")
    scaled, _, _ = _computed(asked, parts, How(hooks=True))
    names = ", ".join(hooked[:3])
    if scaled.worst is None:
        outcome.notes.append(
            f"a backward hook on a module ({names}) changes the gradient by {difference.error:.2g} of its size"
        )
        return
    functions = sorted({kind.__name__ for found in replayed for kind in found.functions})
    what = f"a hook on a module ({names})" if hooked else f"custom function {', '.join(functions) or '?'}"
    _blame("not-linear", SENTENCES["not-linear"].format(what=what), difference, outcome)


def _judge_modes(asked: Asked, parts: Sequence[Part], modes: Mapping[Part, tuple[bool, ...]], outcome: Outcome) -> None:
    total, _ = by_micro_batch(parts, lambda part: How(modes=modes.get(part), scale=_scale_of(part)))
    difference = compare(asked.observed, total, asked.factor, lambda seed: total)
    if difference.worst is not None:
        numbers = ", ".join(str(index) for index in sorted({part.index for part in modes}))
        _blame("wrong-mode", SENTENCES["wrong-mode"].format(numbers=numbers), difference, outcome)


def _blame(name: str, sentence: str, difference: Difference, outcome: Outcome) -> None:
    outcome.name, outcome.sentence = name, sentence
    outcome.error, outcome.parameter = difference.error, difference.worst
    outcome.allowed = difference.error / difference.ratio if difference.ratio else None


def _judge_functions(asked: Asked, parts: Sequence[Part], kinds: Set[type], outcome: Outcome) -> None:
    """Judge those custom functions on the way that no earlier window has shown."""
    statements = {kind: statement_of(kind) for kind in kinds - asked.known}
    new = {kind: made for kind, made in statements.items() if made not in asked.known}
    if not new or asked.is_faulty:
        return
    with first_calls(new.keys()) as calls:
        for part in parts:
            if any({kind, made}.isdisjoint(calls) for kind, made in new.items()):
                _again(part, 0)  # a number that a forward computes is another one then
    missed = {made: kind for kind, made in new.items() if {kind, made}.isdisjoint(calls)}
    # a class that is made anew each time may hold tensors: its statement is known in its place
    asked.known.update(calls, missed)
    with quiet():
        verdicts = [judge_function(call) for call in calls.values()]
    verdicts += [FunctionReport(kind.__name__, note=NOT_CALLED) for kind in missed.values()]
    for verdict in verdicts:
        if verdict.note:
            outcome.notes.append(f"custom function {verdict.name}: {verdict.note}")
        if verdict.fault and outcome.name is None:
            outcome.name = "wrong-backward"
            outcome.sentence = SENTENCES["wrong-backward"].format(name=verdict.name, fault=verdict.fault)
            # the window was computed again with the same fault, so the error is that of the function
            outcome.error, outcome.allowed = verdict.error, LEAST


# JAX's opinion on a live run: the recorded calls of one window, over the bridge, in float64.
#
# The calls of small models are copied when their window is computed again, and JAX is asked when the run is over:
# training goes on undisturbed, and JAX is not imported before. The gradients that reached a module's outputs are
# recorded, so the sum of their products with the outputs is a loss whose gradient both frameworks compute. Custom
# functions keep their own backward there: they are judged above.


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
    if found.functions and _by_torch(call, None).functions != found.functions:
        raise _Refused("the class of a custom function is made anew in each forward, so its own backward is not taken")
    with unchanged(call.forward.module):
        gradients, narrow = _by_jax(call, found.functions)
    names = {id(p): name for name, p in call.forward.module.named_parameters()}
    total = sum(norm(g) ** 2 for g in found.gradients.values()) ** 0.5
    share = NARROW_RESOLUTION if narrow else RESOLUTION
    off = {key: norm(_sum(g.cpu(), -gradients[names[key]])) for key, g in found.gradients.items()}
    allowed = {key: share * norm(g) + RESOLUTION_OF_ALL * total for key, g in found.gradients.items()}
    wrong = exceeding(off, allowed, found.gradients, lambda seed: _by_torch(call, seed).gradients)
    if not wrong:
        return None
    worst = max(wrong, key=wrong.__getitem__)
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
