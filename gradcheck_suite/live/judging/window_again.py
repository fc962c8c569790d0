"""The window again: its recorded module calls in one batch where that is possible, else micro-batch by micro-batch.

The gradients that reached the modules' outputs are recorded, so what follows from them is a function of the modules
alone. The bound on the 2-norm of a parameter's difference is that of the additions, `growth(K + 5, u)` times the sum of
the norms of the contributions. Where it is exceeded, the rounding errors are measured by `FEW_DRAWS` computations with
parameters and inputs changed by one unit roundoff, and Student's factor for their number times their root mean square
is allowed as well (`numerics.bounds`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from gradcheck_suite.live.judging.replay import Gradients, How, Replayed, replay
from gradcheck_suite.live.recording.forwards import Forward
from gradcheck_suite.live.recording.passes import Pass
from gradcheck_suite.live.recording.sketches import PROJECTIONS, as_array, resolution, sketch
from gradcheck_suite.numerics.bounds import FEW_DRAWS, FURTHER_ROUNDINGS, UNIT_ROUNDOFF, growth, student_factor

ONE_BATCH, BY_MICRO_BATCH = "in one batch", "micro-batch by micro-batch"
FULL_PRECISION = ("float32", "float64")


class NotRecomputed(Exception):
    """Why a window cannot be computed again."""


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


def parts_of(passes: Sequence[Pass], weights: Sequence[float]) -> list[Part]:
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
            scalars = {i: g for i, g in received.items() if forward.scalars[i]}
            # the loss that a model returns beside its logits is computed from them
            parts.append(Part(forward, scalars or dict(received), index, weight))
    return parts


def dtype_of(tensor: torch.Tensor) -> str:
    """Return the name of a dtype, float32 for one without a known unit roundoff."""
    name = str(tensor.dtype).removeprefix("torch.")
    return name if name in UNIT_ROUNDOFF else "float32"


def norm(tensor: torch.Tensor) -> float:
    """Return the 2-norm of a gradient, computed in float64."""
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return float(torch.linalg.vector_norm(dense.detach().reshape(-1), dtype=torch.float64))


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
            scaled = (gradient.to_dense() if gradient.layout != torch.strided else gradient) * weight
            self.gradients[key] = self.gradients[key] + scaled if key in self.gradients else scaled
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
        (f.module, f.structure, f.modes, f.autocast) == (first.module, first.structure, first.modes, first.autocast)
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
            if distance(part.forward.outputs[i], piece) > ONE_BATCH_OUTPUTS * UNIT_ROUNDOFF[dtype_of(piece)]:
                return False
    return True


ONE_BATCH_OUTPUTS = 2.0**12
"""Relative difference of outputs, in unit roundoffs, above which a model counts as not separable over samples. It
decides no verdict: the window is then computed micro-batch by micro-batch."""


def distance(recorded: Any, output: torch.Tensor) -> float:
    """Return the largest difference of a projection of two outputs, relative to their norm."""
    then, now = as_array(recorded), as_array(sketch(output))
    size = max(float(then[PROJECTIONS]), float(now[PROJECTIONS])) ** 0.5
    return float(np.abs(then - now)[:PROJECTIONS].max()) / size if size else 0.0


def is_exact(part: Part, found: Replayed) -> bool:
    """Whether a call's outputs are what they were to the bit."""
    return all(
        i < len(found.outputs) and not distance(part.forward.outputs[i], found.outputs[i]) for i in part.cotangents
    )


def reproduced(part: Part, found: Replayed, draws: Callable[[int], Replayed], *, exactly: bool) -> bool:
    """Whether a call's outputs are what they were, but for rounding.

    Args:
        part: the call.
        found: what it gave when it was computed again.
        draws: computes it again with changed parameters and inputs.
        exactly: whether other calls of the window gave the same bits: then only the rounding of parameters that were
            written and put back is allowed, in their dtype.
    """
    if is_exact(part, found):
        return True
    for i in part.cotangents:
        if i >= len(found.outputs):
            return False
        now, then = as_array(sketch(found.outputs[i])), as_array(part.forward.outputs[i])  # type: ignore[arg-type]
        if not np.isfinite(now).all() or not np.isfinite(then).all():
            return False
        dtype, shape = dtype_of(found.outputs[i]), tuple(found.outputs[i].shape)
        off = np.abs(now - then)[:PROJECTIONS]
        if exactly:
            dtype = min(map(dtype_of, part.forward.module.parameters()), key=lambda name: -UNIT_ROUNDOFF[name])
        allowed = resolution(float(then[PROJECTIONS]) ** 0.5, shape, dtype)
        if off.max() > allowed:
            if exactly:
                return False
            moved = np.array([as_array(sketch(draws(seed).outputs[i])) - now for seed in range(FEW_DRAWS)])
            noise = float(np.sqrt((moved[:, :PROJECTIONS] ** 2).mean()))
            if off.max() > allowed + student_factor(FEW_DRAWS) * noise:
                return False
    return True


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
    squares = [0.0, 0.0]
    ratios: dict[int, float] = {}
    off: dict[int, float] = {}
    for key, gradient in total.gradients.items():
        if key in observed:
            found = observed[key].detach()
            dense = found.to_dense() if found.layout != torch.strided else found
            off[key] = norm(dense.double() - factor * gradient.double())
            squares[0] += off[key] ** 2
            squares[1] += (factor * norm(gradient)) ** 2
            ratios[key] = _ratio(off[key], _adding(observed[key], total, key, factor))
    error = (squares[0] / squares[1]) ** 0.5 if squares[1] else 0.0
    if max(ratios.values(), default=0.0) > 1:
        moved = [draws(seed).gradients for seed in range(FEW_DRAWS)]
        for key in [key for key, ratio in ratios.items() if ratio > 1]:
            here = total.gradients[key]
            mean = np.mean([norm(other[key].double() - here.double()) ** 2 for other in moved if key in other] or [0.0])
            noise = student_factor(FEW_DRAWS) * abs(factor) * float(mean) ** 0.5
            ratios[key] = _ratio(off[key], _adding(observed[key], total, key, factor) + noise)
    worst = max(ratios, key=lambda key: ratios[key], default=None)
    if worst is None or ratios[worst] <= 1:
        return Difference(error)
    return Difference(error, worst, ratios[worst])


def _adding(gradient: torch.Tensor, total: Total, key: int, factor: float) -> float:
    return abs(factor) * growth(total.terms + FURTHER_ROUNDINGS, total.dtype or dtype_of(gradient)) * total.sizes[key]


def _ratio(difference: float, allowed: float) -> float:
    return 0.0 if not difference else difference / allowed if allowed else float("inf")
