"""A window computed again: its recorded calls in one batch where that is possible, else micro-batch
by micro-batch.

The gradients that reached the modules' outputs are recorded, so what follows from them is a
function of the modules alone. The bound on the 2-norm of a parameter's difference is that of the
additions, `growth(K + 5, u)` times the sum of the norms of the contributions. Where it is exceeded,
the rounding errors are measured by `FEW_DRAWS` computations with parameters and inputs changed by
one unit roundoff, and Student's factor for their number times their root mean square is allowed as
well (`core.comparison`).

Blame needs a cause that is seen: another mode in a part of the window, or a backward that is not
linear. Without one, a difference is a finding, since parameters may be used outside of the recorded
modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from gradcheck_suite.auditing.custom_functions import (
    LEAST,
    FunctionKey,
    FunctionReport,
    first_calls,
    judge_function,
    statement_of,
)
from gradcheck_suite.auditing.modes import AsBefore
from gradcheck_suite.auditing.module_calls import (
    Gradients,
    How,
    ModuleCall,
    Replayed,
    backward_hooks,
    point_of,
    quiet,
    replay,
)
from gradcheck_suite.auditing.program_state import NotRecomputed
from gradcheck_suite.auditing.recorder import Running
from gradcheck_suite.auditing.samples import read, sample
from gradcheck_suite.auditing.vectors import distance
from gradcheck_suite.core.comparison import (
    FEW_DRAWS,
    FURTHER_ROUNDINGS,
    UNIT_ROUNDOFF,
    growth,
    student_factor,
)
from gradcheck_suite.core.findings import Found, finding
from gradcheck_suite.core.text import counted

ONE_BATCH, BY_MICRO_BATCH = "in one batch", "micro-batch by micro-batch"
UNSEEN = (
    "bare parameters have none, and a call as `model.forward(...)`, by another method, or with"
    " other tensors by `functional_call` is not seen"
)
MOST_LINES = 3
"""Lines that a sentence names."""


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

    forward: ModuleCall
    cotangents: dict[int, torch.Tensor]
    index: int
    weight: float = 1.0


def parts_of(
    passes: Sequence[Running], weights: Sequence[float], unseen: str = UNSEEN
) -> list[Part]:
    """Return the recorded calls of a window.

    Args:
        passes: the backward passes.
        weights: of each pass.
        unseen: why a call may not be recorded.

    Raises:
        NotRecomputed: no call was recorded in some pass, or an input was changed in place.
    """
    parts = []
    for index, (one, weight) in enumerate(zip(passes, weights, strict=True)):
        if not one.forwards:
            raise NotRecomputed(
                f"no call of a module that leads to the loss was recorded ({unseen})"
            )
        for forward, received in one.forwards.items():
            if forward.refusal:
                raise NotRecomputed(forward.refusal)
            if forward.changed:
                raise InputsChanged("an input of the model was changed in place before the step")
            parts.append(Part(forward, dict(received), index, weight))
    return parts


def from_outside(part: Part, *, hooks: bool = False) -> Part:
    """Return a call with what its outputs received from outside of the module.

    Of several outputs one is often computed from another, as logits from features and a loss from
    logits: what a tensor received is then its own gradient and what came back through the others.

    Args:
        part: the call, with all that its outputs received.
        hooks: whether the backward hooks of modules run.
    """
    if len(part.cotangents) < 2:
        return part
    found = replay(
        part.forward,
        part.forward.arguments,
        part.cotangents,
        How(hooks=hooks, scale=1.0, received=True),
    )
    own = {i: g - found.inside[i] if i in found.inside else g for i, g in part.cotangents.items()}
    return replace(part, cotangents={i: g for i, g in own.items() if g.any()} or own)


def dtype_of(tensor: torch.Tensor) -> str:
    """Return the name of a dtype, float32 for one without a known unit roundoff."""
    name = str(tensor.dtype.to_real()).removeprefix("torch.")
    return name if name in UNIT_ROUNDOFF else "float32"


def norm(tensor: torch.Tensor) -> float:
    """Return the 2-norm of a gradient, computed in float64."""
    values = tensor.coalesce().values() if tensor.layout == torch.sparse_coo else _dense(tensor)
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return float(torch.linalg.vector_norm(values.detach().reshape(-1), dtype=torch.float64))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_dense() if tensor.layout != torch.strided else tensor).detach()


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def add_gradients(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the sum of two gradients.

    That of two sparse ones, of a large table above all, stays sparse.
    """
    one, other = one.detach(), other.detach()
    return one + other if one.layout == other.layout else _dense(one) + _dense(other)


@dataclass
class Total:
    """A window's gradient, computed again.

    Attributes:
        gradients: the weighted sum.
        sizes: id of a parameter -> the sum of the 2-norms of its contributions.
        terms: number of contributions.
        dtype: the coarsest dtype in which contributions may be added up, where that is not the
            gradient's.
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
            scaled = gradient * weight if weight != 1 else gradient
            self.gradients[key] = (
                add_gradients(self.gradients[key], scaled) if key in self.gradients else scaled
            )
            self.sizes[key] = self.sizes.get(key, 0.0) + norm(scaled)


def by_micro_batch(parts: Sequence[Part], how: How) -> tuple[Total, list[Replayed]]:
    """Compute each call again and return the weighted sum of the gradients."""
    total, replayed = Total(), []
    if len({part.index for part in parts}) < len(parts):
        # under autocast, the calls of one pass share a cast parameter, and their gradients are
        # added up in its dtype
        total.dtype = next(
            (str(p.forward.autocast[1])[6:] for p in parts if p.forward.autocast[2]), None
        )
    for part in parts:
        found = replay(part.forward, part.forward.arguments, part.cotangents, how)
        total.add(found, part.weight)
        replayed.append(replace(found, gradients={}))
    return total, replayed


def _concatenated(
    parts: Sequence[Part],
) -> tuple[list[Any], dict[int, torch.Tensor], list[int]] | None:
    """Return the arguments and gradients of all calls as one batch, and its sizes.

    None where they do not fit.
    """
    forwards = [part.forward for part in parts]
    ways = [(f.module, f.structure, f.modes, f.trained, f.autocast) for f in forwards]
    same = all(way == ways[0] for way in ways)
    if (
        not same
        or len({part.index for part in parts}) < len(parts)
        or any(any(f.scalars) for f in forwards)
    ):
        return None
    columns = list(zip(*(f.arguments for f in forwards), strict=True))
    if any(isinstance(v, torch.Tensor) and v.is_nested for column in columns for v in column):
        return None  # it has no rows, but samples of sizes of their own
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
        elif all(
            v is column[0] or (type(v) in (int, float, str, bool) and v == column[0])
            for v in column
        ):
            arguments.append(column[0])
        else:
            return None
    indices = parts[0].cotangents.keys()
    same = all(part.cotangents.keys() == indices for part in parts)
    if not same or not all(_fits([part.cotangents[i] for part in parts], rows) for i in indices):
        return None
    return (
        arguments,
        {i: torch.cat([p.cotangents[i] * p.weight for p in parts]) for i in indices},
        rows,
    )


def _fits(column: Sequence[torch.Tensor], rows: Sequence[int]) -> bool:
    shapes = {(v.shape[1:], v.dtype, v.layout) if v.dim() else None for v in column}
    return (
        len(shapes) == 1 and None not in shapes and [int(v.shape[0]) for v in column] == list(rows)
    )


def _low_precision(parts: Sequence[Part]) -> bool:
    low = any(p.forward.autocast[2] for p in parts)
    return low or any(
        dtype_of(g) not in ("float32", "float64") for p in parts for g in p.cotangents.values()
    )


def in_one_batch(parts: Sequence[Part]) -> Total | None:
    """Return the window's gradient from one call, or None where there is none that is equal to the
    calls.

    In a lower precision than float32 rounding hides too much: there it is not tried.
    """
    concatenated = None if len(parts) < 2 or _low_precision(parts) else _concatenated(parts)
    if concatenated is None:
        return None
    arguments, cotangents, rows = concatenated
    first = parts[0].forward
    try:
        found = replay(first, arguments, cotangents, How())
    except Exception:
        return None  # the model takes no batch of this size
    if found.random or not _same_outputs(parts, found, rows):
        return None
    total = Total()
    total.add(found, 1.0)
    total.terms = sum(rows)
    return total


def _same_outputs(parts: Sequence[Part], found: Replayed, rows: Sequence[int]) -> bool:
    """Whether the rows of one batch's outputs are those of the calls: the model is separable over
    samples.
    """
    for i in parts[0].cotangents:
        if (
            i >= len(found.outputs)
            or not found.outputs[i].dim()
            or found.outputs[i].shape[0] != sum(rows)
        ):
            return False
        for part, piece in zip(parts, found.outputs[i].split(list(rows)), strict=True):
            if _is_other(part.forward.outputs[i], piece):
                return False
    return True


ONE_BATCH_OUTPUTS = 2.0**12
"""Relative difference of outputs, in unit roundoffs, above which a model counts as not separable over samples. It
decides no verdict: the window is then computed micro-batch by micro-batch."""


def _is_other(recorded: Any, output: torch.Tensor) -> bool:
    """Return whether an output is another one than it was, but for rounding."""
    then, now = read([recorded, sample(output, whole=True)])
    return not distance(now, then) <= ONE_BATCH_OUTPUTS * UNIT_ROUNDOFF[dtype_of(output)]


@dataclass(frozen=True)
class Difference:
    """How `.grad` differs from the window's gradient.

    Attributes:
        error: 2-norm of the difference over that of the window's gradient, over all parameters.
        worst: id of the parameter whose difference is the largest of what is allowed, or None where
            none exceeds it.
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
    # a difference of close numbers is exact, a multiple is not
    exact = {
        key: total.gradients[key] if factor == 1 else factor * _double(total.gradients[key])
        for key in keys
    }
    off = {
        key: norm(add_gradients(observed[key].to(one.dtype), -one)) for key, one in exact.items()
    }
    size = math.hypot(*(factor * norm(total.gradients[key]) for key in keys))
    terms, adding = total.terms + FURTHER_ROUNDINGS, abs(factor)
    allowed = {
        key: adding * growth(terms, total.dtype or dtype_of(observed[key])) * total.sizes[key]
        for key in keys
    }
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
        squares = [
            norm(_double(other[key]) - _double(expected[key])) ** 2
            for other in moved
            if key in other
        ]
        allowed[key] += (
            student_factor(FEW_DRAWS) * abs(factor) * float(np.mean(squares or [0.0])) ** 0.5
        )
    return {
        k: off[k] / allowed[k] if allowed[k] else math.inf for k in over if not off[k] <= allowed[k]
    }


# What a window that is computed again shows.


SENTENCES = {
    "wrong-mode": (
        "micro-batch(es) {numbers} of the window were computed in another mode (train or eval) than"
        " the others"
    ),
    "not-linear": (
        "the backward pass of {what} is no linear function of the gradient that it receives, so "
        "micro-batches do not add up to one batch (it ignores the gradient, clips or normalizes it)"
    ),
    "own term": (
        "the term that custom function {name} adds by itself has weight 1 in each of {number}"
        " micro-batches, and not 1/{number}"
    ),
    "redrawn": (
        "a checkpoint draws other random numbers in backward than in the forward"
        " (`preserve_rng_state=False`?)"
    ),
    "wrong-backward": "the backward of custom function {name} is wrong: {fault} of its forward",
}
NOT_CALLED = (
    "its backward was not checked, since no call of it was seen when the window was computed again"
)


@dataclass
class Recomputed:
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
    notes: list[Found] = field(default_factory=list)
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
        used_at: id of a parameter -> a line that uses it, where that is known.
    """

    passes: Sequence[Running]
    weights: Sequence[float]
    factor: float
    observed: Gradients
    is_faulty: bool
    known: set[FunctionKey]
    used_at: Mapping[int, str] = field(default_factory=dict)

    def unseen(self, keys: Iterable[int]) -> str:
        """Return where some parameters are used, and why that may not be a call that was recorded."""
        lines = list(dict.fromkeys(self.used_at[key] for key in keys if key in self.used_at))[
            :MOST_LINES
        ]
        return f"used at {', '.join(lines)}; {UNSEEN}" if lines else UNSEEN


def recompute(asked: Asked) -> Recomputed:
    """Compute a window again, and say what that shows.

    An exception of the program's own modules is a note.
    """
    result = Recomputed()
    try:
        _compute(asked, result)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        why = str(error) if isinstance(error, NotRecomputed) else f"{type(error).__name__}: {first}"
        changed = isinstance(error, InputsChanged)
        said = f"a window was not computed again: {why}"
        return Recomputed(notes=[finding("not-recomputed", said)], inputs_changed=changed)
    return result


def _computed(
    asked: Asked, parts: Sequence[Part], how: How
) -> tuple[Difference, Total, list[Replayed]]:
    """Return how `.grad` differs from the window that is computed again micro-batch by micro-batch."""
    total, replayed = by_micro_batch(parts, how)
    found = compare(
        asked.observed,
        total,
        asked.factor,
        lambda n: by_micro_batch(parts, replace(how, seed=n))[0],
    )
    return found, total, replayed


def _common_modes(parts: Sequence[Part], passes: Sequence[Running]) -> dict[Part, tuple[bool, ...]]:
    """Return the parts that ran in another mode than the same call of most passes, with the mode of
    those.
    """
    calls: dict[tuple[Any, int, int, int], list[Part]] = {}
    for index, group in groupby(parts, attrgetter("index")):
        members, place = list(group), passes[index].record.place
        for position, part in enumerate(members):
            calls.setdefault((place, len(members), position, id(part.forward.module)), []).append(
                part
            )
    found = {}
    for same in calls.values():
        modes = [part.forward.modes for part in same]
        most = max(modes, key=lambda mode: (sum(mode), modes.count(mode)))
        found.update({part: most for part in same if part.forward.modes != most})
    return found


def _compute(asked: Asked, result: Recomputed) -> None:
    received = parts_of(asked.passes, asked.weights, asked.unseen(asked.observed))
    parts = result.parts = [from_outside(part) for part in received]
    modes = _common_modes(parts, asked.passes)
    whole = None if modes else in_one_batch(parts)
    if whole is not None and whole.gradients.keys() & asked.observed.keys():
        difference = compare(asked.observed, whole, asked.factor, lambda seed: whole)
        if difference.worst is None or asked.is_faulty:
            result.how, result.error = ONE_BATCH, difference.error
            _judge_functions(asked, parts, whole.functions, result)
            return
    difference, total, replayed = _computed(asked, parts, How())
    if not total.gradients.keys() & asked.observed.keys():
        where = "gets its gradient without a hook of the script's"
        if asked.observed:
            where = f"is in a recorded call ({asked.unseen(asked.observed)})"
        raise NotRecomputed(f"no parameter of the optimizer {where}")
    _expect_reproduced(parts, replayed)
    result.how, result.error = BY_MICRO_BATCH, difference.error
    if asked.is_faulty:
        return
    left = [key for key, now in asked.observed.items() if key not in total.gradients and now.any()]
    if left:
        number = counted(len(left), "parameter")
        said = f"{number} had no part in a window computed again ({asked.unseen(left)})"
        result.notes.append(finding("uncovered-parameters", said))
    if difference.worst is not None:
        _judge_backward(asked, received, result)
    elif modes:
        parts = [
            replace(p, forward=replace(p.forward, modes=modes.get(p, p.forward.modes)))
            for p in parts
        ]
        difference, _, _ = _computed(asked, parts, How())
        if difference.worst is not None:
            numbers = ", ".join(str(index) for index in sorted({part.index for part in modes}))
            _blame(
                "wrong-mode", SENTENCES["wrong-mode"].format(numbers=numbers), difference, result
            )
    elif any(
        found.random and found.redrawn and not found.functions for found in replayed
    ):  # those draw on purpose
        _blame("wrong-backward", SENTENCES["redrawn"], difference, result)
    if result.name is None:
        _judge_functions(asked, parts, total.functions, result)


def _expect_reproduced(parts: Sequence[Part], replayed: Sequence[Replayed]) -> None:
    """Refuse calls that give other outputs than they gave.

    Raises:
        NotRecomputed: some do.
    """
    lost = any(
        i >= len(found.outputs) or _is_other(part.forward.outputs[i], found.outputs[i])
        for part, found in zip(parts, replayed, strict=True)
        for i in part.cotangents
    )
    watching = sorted({type(mode).__name__ for part in parts for mode in part.forward.watching})
    if lost and watching:
        raise NotRecomputed(
            f"the model gives other outputs when it is called without {', '.join(watching)}, which"
            " may not see a second call"
        )
    if lost and any(part.forward.point != point_of(part.forward.module) for part in parts):
        raise NotRecomputed(
            "parameters were written between the window's calls of the model and the step"
        )
    if lost:
        raise NotRecomputed(
            "the model gives other outputs when it is called again: it has a state of its own, or"
            " is compiled, which draws other random numbers than eager code"
        )


def _judge_backward(asked: Asked, received: Sequence[Part], result: Recomputed) -> None:
    """Say which backward is not linear.

    Raises:
        NotRecomputed: the gradient is not that of the recorded calls.
    """
    hooked = sorted({name for part in received for name in backward_hooks(part.forward.module)})
    parts = [from_outside(part, hooks=True) for part in received]
    difference, _, _ = _computed(asked, parts, How())
    exact, _, replayed = _computed(asked, parts, How(hooks=True, scale=1.0))
    if exact.worst is not None:
        raise NotRecomputed(
            "parameters get gradients from outside of the recorded calls of modules, or compiled"
            " ones round otherwise"
        )
    scaled, eightfold, _ = _computed(asked, parts, How(hooks=True))
    names = ", ".join(hooked[:3])
    if scaled.worst is None:
        said = (
            f"a backward hook on a module ({names}) changes the gradient by {difference.error:.2g}"
            " of its size"
        )
        result.notes.append(finding("module-hook", said))
        return
    functions = sorted({kind.__name__ for found in replayed for kind in found.functions})
    if not hooked and _judge_own_terms(asked, parts, eightfold, ", ".join(functions), result):
        return
    what = (
        f"a hook on a module ({names})"
        if hooked
        else f"custom function {', '.join(functions) or '?'}"
    )
    _blame("not-linear", SENTENCES["not-linear"].format(what=what), difference, result)


def _judge_own_terms(
    asked: Asked, parts: Sequence[Part], eightfold: Total, names: str, result: Recomputed
) -> bool:
    """Judge functions whose backward is affine, and adds a gradient of its own.

    Return whether it is that alone.
    """
    _, own, replayed = _computed(asked, parts, How(hooks=True, scale=1.0, own=True))
    linear = Total(sizes=eightfold.sizes, terms=eightfold.terms, dtype=eightfold.dtype)
    of_own = {key: gradient for key, gradient in own.gradients.items() if gradient.any()}
    for key, gradient in eightfold.gradients.items():
        # what is its own has been divided by the scale with the rest
        linear.gradients[key] = add_gradients(gradient, own.gradients[key] * (1 - 1 / How.scale))
    if (
        not of_own
        or compare(asked.observed, linear, asked.factor, lambda seed: linear).worst is not None
    ):
        return False
    injected = [
        (part, one)
        for part, found in zip(parts, replayed, strict=True)
        for one in found.injected
        if one.weight
    ]
    rest = [
        norm(add_gradients(linear.gradients[key], -gradient)) for key, gradient in of_own.items()
    ]
    if not injected and not any(
        size > LEAST * norm(one) for size, one in zip(rest, of_own.values(), strict=True)
    ):
        return False  # it ignores the gradient
    number = len(asked.passes)
    said = (
        f"custom function {names} adds a gradient of its own (its backward of 0 is not 0), whatever"
        f" the loss weighs: its weight must be one over the micro-batches of a window ({number}"
        " here)"
    )
    result.notes.append(finding("own-gradient", said, remedy=""))
    for part, one in injected:
        whole = abs(one.weight * part.weight * asked.factor - 1) < LEAST
        if (
            number > 1
            and one.is_mean
            and whole
            and not any(abs(f * number - 1) < LEAST for f in one.factors)
        ):
            result.name, result.error, result.allowed = "wrong-scale", number - 1.0, LEAST
            result.sentence = SENTENCES["own term"].format(name=names, number=number)
    return True


def _blame(name: str, sentence: str, difference: Difference, result: Recomputed) -> None:
    result.name, result.sentence = name, sentence
    result.error, result.parameter = difference.error, difference.worst
    result.allowed = difference.error / difference.ratio if difference.ratio else None


def _judge_functions(
    asked: Asked, parts: Sequence[Part], kinds: Set[type], result: Recomputed
) -> None:
    """Judge those custom functions on the way that no earlier window has shown."""
    new = {
        kind: made
        for kind in kinds - asked.known
        if (made := statement_of(kind)) not in asked.known
    }
    if not new or asked.is_faulty:
        return
    with first_calls(new.keys()) as calls:
        for part in parts:
            if any({kind, made}.isdisjoint(calls) for kind, made in new.items()):
                # a number that a forward computes is another one then
                replay(part.forward, part.forward.arguments, part.cotangents, How(seed=0))
    missed = {made: kind for kind, made in new.items() if {kind, made}.isdisjoint(calls)}
    # a class that is made anew each time may hold tensors: its statement is known in its place
    asked.known.update(calls, missed)
    with quiet(), AsBefore(parts[0].forward.on):
        verdicts = [judge_function(call) for call in calls.values()]
    verdicts += [FunctionReport(kind.__name__, note=NOT_CALLED) for kind in missed.values()]
    for verdict in verdicts:
        if verdict.note:
            said = f"custom function {verdict.name}: {verdict.note}"
            result.notes.append(finding("custom-function", said))
        if verdict.fault and result.name is None:
            result.name = "wrong-backward"
            result.sentence = SENTENCES["wrong-backward"].format(
                name=verdict.name, fault=verdict.fault
            )
            # the window was computed again with the same fault, so the error is that of the
            # function
            result.error, result.allowed = verdict.error, LEAST
