"""A window computed again: its recorded calls in one batch where that is possible, else micro-batch
by micro-batch.

The gradients that reached the modules' outputs are recorded, so what follows from them is a
function of the modules alone. The bound on the 2-norm of a parameter's difference is that of the
additions, `growth(K + 5, u)` times the sum of the norms of the contributions. Where it is exceeded,
the rounding errors are measured by `FEW_DRAWS` computations with parameters and inputs changed by
one unit roundoff, and Student's factor for their number times their root mean square is allowed as
well (`core.comparison`).

Once some windows were computed again as a whole, one pass of each is, in turn: what arrived in it is
known by its sample. Where that differs, the window is computed again as a whole.

Blame needs a cause that is seen: another mode in a part of the window, a backward that is not
linear, inputs or parameters that were written between a call and its backward. What a gradient
passes outside of the recorded calls is known from its graph, and is not compared. A difference for
which no cause was measured is `unexplained-difference`: the window is not judged.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np
import torch

from gradcheck_suite.auditing.custom_functions import LEAST, FunctionReport, judge_backward
from gradcheck_suite.auditing.function_calls import (
    CallsOfProgram,
    FunctionCall,
    FunctionKey,
    first_calls,
    given_copies,
    name_of,
    statement_of,
)
from gradcheck_suite.auditing.modes import AsBefore
from gradcheck_suite.auditing.module_calls import (
    CHECKED,
    COPIED,
    INPUTS,
    PARAMETERS,
    STATE,
    Gradients,
    Injected,
    ModuleCall,
    ReplayOptions,
    ReplayResult,
    backward_hooks,
    discarded_output,
    peak_memory,
    point_of,
    replay,
)
from gradcheck_suite.auditing.program_state import NotRecomputed
from gradcheck_suite.auditing.recorder import ActivePass
from gradcheck_suite.auditing.samples import (
    Fingerprint,
    Raw,
    is_plain,
    is_same_fingerprint,
    read_samples,
    sample,
)
from gradcheck_suite.auditing.stopping import Terminated
from gradcheck_suite.auditing.vectors import ELEMENTS, PROJECTIONS, Vector, distance, size
from gradcheck_suite.core.comparison import (
    DRAWS,
    FEW_DRAWS,
    FURTHER_ROUNDINGS,
    UNIT_ROUNDOFF,
    dtype_name,
    growth,
    student_factor,
)
from gradcheck_suite.core.findings import Occurrence, finding
from gradcheck_suite.core.text import counted

ONE_BATCH = "in one batch"
BY_MICRO_BATCH = "micro-batch by micro-batch"
IN_TURN = "one micro-batch of each in turn"
UNSEEN = (
    "bare parameters have none, and a call as `model.forward(...)`, by another method, or with"
    " other tensors by `functional_call` is not seen"
)
MOST_LINES = 3
"""Lines that a sentence names."""
LITTLE_ROOM = 3 << 23
SHARE_OF_PEAK = 0.05
"""Bytes, and share of the program's peak, that a window in one batch may save beyond what one of its calls has."""


class NotKept(NotRecomputed):
    """A call does not give the same again, and something of it was not kept.

    Attributes:
        what: is to be kept of the calls of later windows.
        may_be_wrong: whether the gradient may be wrong for what this window has shown.
    """

    def __init__(self, what: str, sentence: str, *, may_be_wrong: bool) -> None:
        super().__init__(sentence)
        self.what = what
        self.may_be_wrong = may_be_wrong


class NotReproducible(NotRecomputed):
    """The same call gives other results each time."""


class Unexplained(NotRecomputed):
    """The window differs, and nothing that was measured explains it."""


UNEXPLAINED = "unexplained-difference"
NOT_REPRODUCIBLE = "not-reproducible"
"""Names of reasons."""


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """One recorded call with what came back in one backward pass.

    Attributes:
        forward: the call.
        cotangents: index of an output -> the gradient that it received.
        index: of the pass among the window's.
        weight: by which the gradients are multiplied.
        is_sampled: whether projections of its gradients are compared, and not all of their
            elements.
    """

    forward: ModuleCall
    cotangents: dict[int, torch.Tensor]
    index: int
    weight: float = 1.0
    is_sampled: bool = False


def recorded_calls(
    passes: Sequence[ActivePass],
    weights: Sequence[float],
    unseen: str = UNSEEN,
    *,
    is_sampled: bool = False,
) -> list[RecordedCall]:
    """Return the recorded calls of a window.

    Args:
        passes: the backward passes.
        weights: of each pass.
        unseen: why a call may not be recorded.
        is_sampled: whether projections of gradients are compared, and not all of their elements.

    Raises:
        NotRecomputed: no call was recorded in some pass, or an input was changed in place.
    """
    parts = []
    for index, (one, weight) in enumerate(zip(passes, weights, strict=True)):
        if one.unrecorded:
            raise NotRecomputed(one.unrecorded)
        if not one.forwards:
            raise NotRecomputed(
                f"no call of a module that leads to the loss was recorded ({unseen})"
            )
        for forward, received in one.forwards.items():
            if forward.refusal:
                raise NotRecomputed(forward.refusal)
            if forward.has_lost_inputs:
                raise NotKept(
                    INPUTS,
                    "a call of the model writes to a tensor that it is given, in place",
                    may_be_wrong=False,
                )
            if forward.changed:
                raise _input_changed([forward])
            parts.append(
                RecordedCall(
                    forward,
                    dict(received),
                    index,
                    weight,
                    is_sampled,
                )
            )
    return parts


def _input_changed(forwards: Sequence[ModuleCall]) -> NotKept:
    return NotKept(
        INPUTS,
        "an input of the model was changed in place before the step",
        may_be_wrong=any(forward.was_refilled for forward in forwards),
    )


def from_outside(part: RecordedCall, *, hooks: bool = False) -> RecordedCall:
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
        ReplayOptions(hooks=hooks, scale=1.0, received=True),
    )
    own = {i: g - found.inside[i] if i in found.inside else g for i, g in part.cotangents.items()}
    return replace(part, cotangents={i: g for i, g in own.items() if g.any()} or own)


def dtype_of(tensor: torch.Tensor) -> str:
    """Return the name of a dtype, float32 for one without a known unit roundoff."""
    name = dtype_name(tensor.dtype.to_real())
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
    one = one.detach()
    other = other.detach()
    return one + other if one.layout == other.layout else _dense(one) + _dense(other)


@dataclass
class AccumulatedGradient:
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

    def add(self, weight: float, key: int, gradient: torch.Tensor, *, is_sampled: bool) -> None:
        """Add a contribution to the gradient of a parameter, or projections of it."""
        scaled = gradient * weight if weight != 1 else gradient
        self.sizes[key] = self.sizes.get(key, 0.0) + norm(scaled)
        if is_sampled:
            scaled = _projected(scaled)
        self.gradients[key] = (
            add_gradients(self.gradients[key], scaled) if key in self.gradients else scaled
        )


@dataclass
class SampledGradient:
    """A gradient of which samples are kept.

    Attributes:
        samples: id of a parameter -> those of its contributions.
    """

    samples: dict[int, list[Raw]] = field(default_factory=dict)

    def add(self, key: int, gradient: torch.Tensor) -> None:
        """Add a contribution to the gradient of a parameter."""
        self.samples.setdefault(key, []).append(sample(gradient, whole=True))

    def read(self, keys: Iterable[int]) -> dict[int, Vector]:
        """Return a sample of the gradient of each of some parameters; waits for a device."""
        own = {key: self.samples[key] for key in keys}
        values = iter(read_samples(list(chain.from_iterable(own.values()))))
        return {
            key: np.sum([next(values) for _ in several], axis=0) for key, several in own.items()
        }


@dataclass
class ComparedGradient:
    """A window's gradient that is compared as it is computed: no more of it is kept than that of one
    parameter.

    Attributes:
        observed: id of a parameter -> its `.grad`.
        factor: the common factor that something seen explains.
        is_sampled: whether projections are compared.
        keys: the ids of the parameters that have a gradient.
        sizes: id of a parameter that is observed -> the 2-norm of its gradient.
        norms: the same of what is compared.
        off: that of the difference.
        terms: number of contributions.
        functions: classes of the custom functions on the way.
    """

    observed: Gradients
    factor: float
    is_sampled: bool
    keys: set[int] = field(default_factory=set)
    sizes: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    off: dict[int, float] = field(default_factory=dict)
    terms: int = 1
    functions: frozenset[type] = frozenset()

    def compare(self, key: int, gradient: torch.Tensor) -> None:
        """Compare the gradient of a parameter."""
        self.keys.add(key)
        if key not in self.observed:
            return
        self.sizes[key] = norm(gradient)
        one = _projected(gradient) if self.is_sampled else gradient
        self.norms[key] = norm(one)
        self.off[key] = _off_by(self.observed[key], one, self.factor)

    def difference(self) -> GradDifference:
        """Return how `.grad` differs, where rounding is not measured."""
        allowed = _allowed(self.observed, self.sizes, self.terms, None, self.factor)
        return _difference(self.off, self.norms, self.factor, allowed, _beyond)


def _projected(gradient: torch.Tensor) -> torch.Tensor:
    return _projections(read_samples([sample(gradient, whole=True)])[0])


def _off_by(observed: torch.Tensor, one: torch.Tensor, factor: float) -> float:
    """Return by how much a `.grad` differs from a factor times a gradient, as a 2-norm."""
    # a difference of close numbers is exact, a multiple is not
    exact = one if factor == 1 else factor * _double(one)
    return norm(add_gradients(observed.to(exact.dtype), -exact))


def _projections(sampled: Vector) -> torch.Tensor:
    """Return the projections of a gradient, so that their 2-norm is about that of the gradient.

    With random signs, the square of each of them is that of the norm in the mean.
    """
    return torch.from_numpy(sampled[ELEMENTS:] / PROJECTIONS**0.5)


def by_micro_batch(
    parts: Sequence[RecordedCall], how: ReplayOptions
) -> tuple[AccumulatedGradient, list[ReplayResult]]:
    """Compute each call again and return the weighted sum of the gradients."""
    total = AccumulatedGradient()
    replayed = []
    if len({part.index for part in parts}) < len(parts):
        # under autocast, the calls of one pass share a cast parameter, and their gradients are
        # added up in its dtype
        total.dtype = next(
            (dtype_name(p.forward.autocast[1]) for p in parts if p.forward.autocast[2]), None
        )
    for part in parts:
        add = partial(total.add, part.weight, is_sampled=part.is_sampled)
        found = replay(part.forward, part.forward.arguments, part.cotangents, how, add)
        total.terms += 1
        total.functions |= found.functions
        replayed.append(found)
    return total, replayed


@dataclass(frozen=True)
class Batch:
    """All calls of a window as one.

    Attributes:
        arguments: flat, those of all calls one after the other.
        cotangents: index of an output -> the gradients that it receives, with their weights.
        rows: of each call.
    """

    arguments: list[Any]
    cotangents: dict[int, torch.Tensor]
    rows: list[int]


def _concatenated(parts: Sequence[RecordedCall]) -> Batch | None:
    """Return all calls as one batch, None where they do not fit."""
    if not _are_alike(parts):
        return None
    columns = list(zip(*(part.forward.arguments for part in parts), strict=True))
    rows = _rows_of(columns)
    if rows is None:
        return None
    arguments = list[Any]()
    for column in columns:
        if all(isinstance(v, torch.Tensor) for v in column) and _fits(column, rows):
            arguments.append(torch.cat(list(column)))
        elif _is_constant(column):
            arguments.append(column[0])
        else:
            return None
    indices = parts[0].cotangents.keys()
    if any(part.cotangents.keys() != indices for part in parts):
        return None
    if not all(_fits([part.cotangents[i] for part in parts], rows) for i in indices):
        return None
    cotangents = {i: torch.cat([p.cotangents[i] * p.weight for p in parts]) for i in indices}
    return Batch(arguments, cotangents, rows)


def _are_alike(parts: Sequence[RecordedCall]) -> bool:
    """Return whether all calls are of one module in one way, one in each pass, without a number as
    an output.
    """
    forwards = [part.forward for part in parts]
    ways = [(f.module, f.structure, f.modes, f.trained, f.autocast) for f in forwards]
    if any(way != ways[0] for way in ways) or any(any(f.scalars) for f in forwards):
        return False
    return len({part.index for part in parts}) == len(parts)


def _rows_of(columns: Sequence[Sequence[Any]]) -> list[int] | None:
    """Return the number of rows of each call, None where no argument has rows."""
    tensors = [[v for v in column if isinstance(v, torch.Tensor)] for column in columns]
    if any(any(v.is_nested for v in column) for column in tensors):
        return None  # it has no rows, but samples of sizes of their own
    for column, found in zip(columns, tensors, strict=True):
        if len(found) == len(column) and all(v.dim() for v in found):
            return [int(v.shape[0]) for v in found]
    return None


def _is_constant(column: Sequence[Any]) -> bool:
    """Return whether an argument that is no tensor is the same in all calls."""
    first = column[0]
    if all(isinstance(v, torch.Tensor) for v in column):
        return False
    return all(v is first or (type(v) in (int, float, str, bool) and v == first) for v in column)


def _fits(column: Sequence[torch.Tensor], rows: Sequence[int]) -> bool:
    shapes = {(v.shape[1:], v.dtype, v.layout) if v.dim() else None for v in column}
    return (
        len(shapes) == 1 and None not in shapes and [int(v.shape[0]) for v in column] == list(rows)
    )


def _low_precision(parts: Sequence[RecordedCall]) -> bool:
    low = any(p.forward.autocast[2] for p in parts)
    return low or any(
        dtype_of(g) not in ("float32", "float64")
        for g in chain.from_iterable(p.cotangents.values() for p in parts)
    )


def _fits_at_once(parts: Sequence[RecordedCall]) -> bool:
    """Return whether all calls at once take little more memory than one by one: a program that
    accumulates may do so for want of it.

    One by one, their gradients are added up, which takes as much as the parameters.
    """
    saved = [part.forward.bytes_saved for part in parts]
    module = parts[0].forward.module
    of_gradients = sum(p.numel() * p.element_size() for p in module.parameters())
    room = max(LITTLE_ROOM, of_gradients, SHARE_OF_PEAK * peak_memory(module))
    return sum(saved) - max(saved) <= room


def in_one_batch(
    parts: Sequence[RecordedCall], observed: Gradients, factor: float
) -> ComparedGradient | None:
    """Compare the window's gradient from one call, or return None where there is none that is equal
    to the calls.

    In a lower precision than float32 rounding hides too much: there it is not tried.

    Args:
        parts: the calls.
        observed: id of each parameter -> its `.grad`.
        factor: the common factor that something seen explains.
    """
    if len(parts) < 2 or _low_precision(parts) or not _fits_at_once(parts):
        return None
    concatenated = _concatenated(parts)
    if concatenated is None:
        return None
    total = ComparedGradient(observed, factor, parts[0].is_sampled)
    try:
        found = replay(
            parts[0].forward,
            concatenated.arguments,
            concatenated.cotangents,
            ReplayOptions(),
            total.compare,
        )
    except Exception:
        return None  # the model takes no batch of this size
    # whether hooks on tensors and checkpoints change the gradient is asked of the calls as they were
    if found.random or found.hooked or found.checkpoints.number:
        return None
    if not _same_outputs(parts, found, concatenated.rows):
        return None
    total.functions = found.functions
    total.terms = sum(concatenated.rows)
    return total


def _same_outputs(parts: Sequence[RecordedCall], found: ReplayResult, rows: Sequence[int]) -> bool:
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
QUICK_OUTPUTS = {"float64": 2.0**-41, "float32": 2.0**-12, "bfloat16": 2.0**-6, "float16": 2.0**-9}
"""Relative difference of outputs of the same call, up to which their rounding is not measured."""
OUTPUT_DRAWS = 16
"""Draws by which it is. `student_factor` is 12.6 for them."""


def _distance(recorded: Any, output: torch.Tensor) -> float:
    then, now = read_samples([recorded, sample(output, whole=True)])
    # outputs that are not finite at the same places are the same there
    same = (then == now) | (np.isnan(then) & np.isnan(now))
    return distance(np.where(same, 0.0, now), np.where(same, 0.0, then))


def _is_other(recorded: Any, output: torch.Tensor) -> bool:
    """Return whether an output is another one than it was, but for rounding."""
    return not _distance(recorded, output) <= ONE_BATCH_OUTPUTS * UNIT_ROUNDOFF[dtype_of(output)]


def _coarsest(part: RecordedCall, outputs: Sequence[torch.Tensor]) -> str:
    """Return the coarsest dtype in which a call may have computed its outputs."""
    dtypes = [dtype_of(one) for one in (*outputs, *part.forward.module.parameters())]
    if part.forward.autocast[2]:
        dtypes.append(dtype_name(part.forward.autocast[1]))
    return max((one for one in dtypes if one in UNIT_ROUNDOFF), key=UNIT_ROUNDOFF.__getitem__)


def _lost_by(part: RecordedCall, found: ReplayResult) -> float:
    """Return by how much a call's outputs differ from those that it gave; 0 for no more than
    rounding explains.

    Where they differ at all, their rounding is measured by calls with parameters and inputs that
    are changed by one unit roundoff.
    """
    off = dict[int, float]()
    for i in part.cotangents:
        if i >= len(found.outputs):
            return math.inf
        off[i] = _distance(part.forward.outputs[i], found.outputs[i])
    quick = QUICK_OUTPUTS[_coarsest(part, found.outputs)]
    over = [i for i, one in off.items() if not one <= quick]
    if not over:
        return 0.0
    # where the same call gives something else each time, rounding is not what would be measured
    how = ReplayOptions(forward_only=True)
    twice = replay(part.forward, part.forward.arguments, part.cotangents, how)
    if any(_distance(sample(found.outputs[i], whole=True), twice.outputs[i]) > quick for i in over):
        return max(off[i] for i in over)
    squares = dict.fromkeys(over, 0.0)
    for seed in range(OUTPUT_DRAWS):
        moved = replay(
            part.forward,
            part.forward.arguments,
            part.cotangents,
            ReplayOptions(seed=seed, forward_only=True),
        )
        for i in over:
            squares[i] += _distance(sample(found.outputs[i], whole=True), moved.outputs[i]) ** 2
    allowed = {
        i: quick + student_factor(OUTPUT_DRAWS) * (square / OUTPUT_DRAWS) ** 0.5
        for i, square in squares.items()
    }
    return max((off[i] for i in over if not off[i] <= allowed[i]), default=0.0)


@dataclass(frozen=True)
class GradDifference:
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


def compare_grad(
    observed: Mapping[int, torch.Tensor],
    total: AccumulatedGradient,
    factor: float,
    draws: Callable[[int], AccumulatedGradient],
) -> GradDifference:
    """Compare `.grad` with a factor times the window's gradient.

    Args:
        observed: id of each parameter -> its `.grad`.
        total: the window's gradient, computed again.
        factor: the common factor that something seen explains.
        draws: computes the window again with changed parameters and inputs.
    """
    keys = [key for key in total.gradients if key in observed]
    off = {key: _off_by(observed[key], total.gradients[key], factor) for key in keys}
    norms = {key: norm(total.gradients[key]) for key in keys}
    sizes = {key: total.sizes[key] for key in keys}
    allowed = _allowed(observed, sizes, total.terms, total.dtype, factor)

    def exceeds(finite: Mapping[int, float], bounds: dict[int, float]) -> dict[int, float]:
        return exceeding(
            finite, bounds, total.gradients, lambda seed: draws(seed).gradients, factor
        )

    return _difference(off, norms, factor, allowed, exceeds)


def _allowed(
    observed: Mapping[int, torch.Tensor],
    sizes: Mapping[int, float],
    terms: int,
    dtype: str | None,
    factor: float,
) -> dict[int, float]:
    """Return by how much each parameter's gradient may differ without a measurement."""
    number = terms + FURTHER_ROUNDINGS
    found = dict[int, float]()
    for key, one in sizes.items():
        own = dtype_of(observed[key])
        rounding = growth(number, dtype or own) * one
        underflow = UNDERFLOW.get(own, 0.0) * observed[key].numel() ** 0.5
        found[key] = abs(factor) * (rounding + underflow)
    return found


UNDERFLOW = {"float64": 2.0**-1032, "float32": 2.0**-136}
"""Error of an element that underflow explains: some thousand times the smallest number that there is.

Below the smallest normal number an error is no share of the result (Higham, Accuracy and Stability of
Numerical Algorithms, section 2.8), as in gradients that vanish in a deep network.
"""


def _difference(
    off: Mapping[int, float],
    norms: Mapping[int, float],
    factor: float,
    allowed: dict[int, float],
    exceeds: Callable[[Mapping[int, float], dict[int, float]], dict[int, float]],
) -> GradDifference:
    """Return how a gradient differs over all parameters."""
    size = math.hypot(*(factor * one for one in norms.values()))
    # a gradient that is not finite is compared with nothing
    finite = {key: value for key, value in off.items() if not math.isnan(value)}
    ratios = exceeds(finite, allowed)
    error = math.hypot(*off.values()) / size if size else 0.0
    worst = max(ratios, key=ratios.__getitem__, default=None)
    return GradDifference(error, worst, ratios[worst] if worst is not None else 0.0)


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
    if not over:  # the library of the bound alone takes as much memory as a small model
        return {}
    squares = {key: list[float]() for key in over}

    def draw(seeds: Iterable[int]) -> None:
        for moved in map(draws, seeds):
            for key in squares.keys() & moved.keys():
                difference = moved[key].double() - expected[key].double()
                squares[key].append((factor * norm(difference)) ** 2)

    def bound(key: int, of_draws: float) -> float:
        return allowed[key] + of_draws * float(np.mean(squares[key] or [0.0])) ** 0.5

    begun = time.perf_counter()
    draw(range(FEW_DRAWS))
    took = time.perf_counter() - begun
    few = student_factor(FEW_DRAWS)
    unclear = [key for key in over if bound(key, LIKELY) < off[key] <= bound(key, few)]
    # four draws may by chance be ten times as small as the others: more of them settle it
    number = min(DRAWS, FEW_DRAWS + int(LONGEST_DRAWS * FEW_DRAWS / max(took, 1e-9)))
    draw(range(FEW_DRAWS, number if unclear else FEW_DRAWS))
    many = student_factor(number)
    for key in over:
        allowed[key] = bound(key, many if unclear else few)
    return _beyond(off, allowed)


def _beyond(off: Mapping[int, float], allowed: Mapping[int, float]) -> dict[int, float]:
    """Return by how many times differences exceed what is allowed, of those that do."""
    return {
        key: one / allowed[key] if allowed[key] else math.inf
        for key, one in off.items()
        if not one <= allowed[key]
    }


LONGEST_DRAWS = 20.0
"""Seconds of further draws: with fewer of them more is allowed."""
LIKELY = 6.0
"""Root mean squares of the draws below which no more are made: a sound window rarely has a larger difference."""


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
    "output hook": (
        "a hook on an output of the model multiplies the gradients of the window's micro-batches by"
        " factors from {numbers}, so micro-batches do not add up to one batch (it normalizes or"
        " clips each)"
    ),
    "stolen": (
        "`.grad` is twice the gradient of the last micro-batch, and has nothing of those before: a"
        " function returns memory of its own as a gradient, which became `.grad`, and writes to it"
        " in each backward"
    ),
    "written": "custom function {name}: {fault}",
    "changed-batch": (
        "the memory of a model's input was filled with other values between its call and its"
        " backward, which then computes with these"
    ),
    "stale-parameters": (
        "parameters were written between a call of the model and its backward, which then computes"
        " with other ones than the call"
    ),
    "rewritten": (
        "the forward of {names} writes to a tensor that an operation has saved for the backward, as"
        " by `.data` or numpy, of which torch does not know: the backward computes with other values"
        " than the forward did"
    ),
    "written buffers": (
        "buffers of the model were written between its call and its backward, which then computes"
        " with other ones than the call"
    ),
    "before the step": (
        "an optimizer stepped between the call of the model and its backward: the gradient is the one"
        " at the parameters of before, and the next step starts from other ones"
    ),
    "stale casts": (
        "autocast keeps the parameters of an earlier step, cast to {dtype}, since its context is"
        " not left between the step and the next call"
    ),
    "wrong-backward": "the backward of custom function {name} is wrong: {fault}",
}
WRITES = (
    "its forward writes to a tensor that it is given and does not declare it by `mark_dirty`, and"
    " the backward of another function reads what it wrote"
)
NOT_CALLED = (
    "its backward was not checked, since no call of it was seen when the window was computed again"
)


NOT_RECORDED = "its backward was not checked, since a call of it could not be recorded ({error})"


@dataclass
class RecomputeResult:
    """What computing a window again showed.

    Attributes:
        how: in one batch or micro-batch by micro-batch; None where it was not computed.
        error: the 2-norm of the gradient's error over that of the gradient.
        name: of a fault, or None.
        sentence: what is wrong and what to do.
        causes: of the fault, for which the table of faults has remedies of their own.
        allowed: the relative error that rounding explains.
        parameter: id of a parameter that shows it.
        notes: what is worth knowing.
        reason: the name of the reason why it was not computed, where it has one.
        keep: what is to be kept of calls from now on; None for nothing more.
        doubt: why the gradient may be wrong, where what is kept from now on will tell; else empty.
        covered: the number of parameters whose gradient was compared with one that was computed
            again, and of those that have one.
        parts: the calls.
    """

    how: str | None = None
    error: float | None = None
    name: str | None = None
    sentence: str = ""
    causes: tuple[str, ...] = ()
    allowed: float | None = None
    parameter: int | None = None
    notes: list[Occurrence] = field(default_factory=list)
    reason: str = ""
    keep: str | None = None
    doubt: str = ""
    covered: tuple[int, int] = (0, 0)
    parts: Sequence[RecordedCall] = ()


@dataclass(frozen=True)
class PassInTurn:
    """The one pass of a window that is computed again in place of all.

    Attributes:
        index: of it among those of the window.
        arrived: id of a parameter -> a sample of the gradient that arrived in it.
        sizes: id of a parameter -> the sizes of the elements, and of the projections, of the
            samples of what had arrived there in this window: these were added up.
    """

    index: int
    arrived: Mapping[int, Vector]
    sizes: Mapping[int, tuple[float, float]]


@dataclass(frozen=True)
class RecomputeRequest:
    """A window that is to be computed again.

    Attributes:
        passes: that are in `.grad`, or should be.
        weights: the right weight of each.
        factor: by which `.grad` was multiplied after the last pass.
        observed: id of a parameter -> its `.grad`.
        is_faulty: whether a fault is known already: then only its size is asked.
        known: the custom functions that were judged before; new ones are added.
        used_at: id of a parameter -> a line that uses it, where that is known.
        turn: the one pass that is enough where it shows nothing; None where all are asked for.
        is_sampled: whether `observed` has projections of what the passes have brought to each
            parameter, in place of a `.grad` that was edited after them.
        looked_at: ids of the modules of which it is known whether their forward writes to what it
            has saved; new ones are added.
    """

    passes: Sequence[ActivePass]
    weights: Sequence[float]
    factor: float
    observed: Gradients
    is_faulty: bool
    known: set[FunctionKey]
    used_at: Mapping[int, str] = field(default_factory=dict)
    turn: PassInTurn | None = None
    is_sampled: bool = False
    looked_at: set[int] = field(default_factory=set)

    def of_arrivals(self, brought: Mapping[int, Vector]) -> RecomputeRequest:
        """Return the same of what the passes have brought, in place of `.grad`.

        Args:
            brought: id of a parameter -> a sample of that, as a whole.
        """
        projections = {
            # bounds are those of the dtype in which gradients are added up
            key: _projections(brought[key]).to(now.dtype.to_real())
            for key, now in self.observed.items()
            if key in brought
        }
        return replace(self, observed=projections, factor=1.0, turn=None, is_sampled=True)

    @property
    def subject(self) -> str:
        """What is compared, in a sentence."""
        return "what has arrived in `.grad`" if self.is_sampled else "`.grad`"

    @property
    def outside(self) -> set[int]:
        """The ids of the parameters that get a gradient from outside of the recorded calls, too."""
        return {id(leaf) for leaf in chain.from_iterable(one.outside.leaves for one in self.passes)}

    @property
    def compared(self) -> Gradients:
        """Id of a parameter that gets none from there -> its `.grad`."""
        outside = self.outside
        return {key: now for key, now in self.observed.items() if key not in outside}

    def used_outside(self) -> str:
        """Return some lines that use parameters outside of the recorded calls."""
        lines = [self.used_at[key] for key in self.outside if key in self.used_at]
        return ", ".join([*dict.fromkeys(lines)][:MOST_LINES])

    def unseen(self, keys: Iterable[int]) -> str:
        """Return where some parameters are used, and why that may not be a call that was recorded."""
        lines = list(dict.fromkeys(self.used_at[key] for key in keys if key in self.used_at))[
            :MOST_LINES
        ]
        return f"used at {', '.join(lines)}; {UNSEEN}" if lines else UNSEEN


def turn_of(
    index: int, arrived: Sequence[Mapping[int, Vector]], ids: Mapping[int, int]
) -> PassInTurn | None:
    """Return the pass of an index, or None where what arrived in it was not sampled as a whole.

    Args:
        index: of the pass among those of the window.
        arrived: key of a parameter -> a sample of what arrived, of each pass of the window.
        ids: key of a parameter -> its id.
    """
    own = {ids[key]: one for key, one in arrived[index].items() if key in ids}
    if not own or any(len(one) < ELEMENTS + PROJECTIONS for one in own.values()):
        return None
    sizes = {}
    for key, name in ids.items():
        earlier = [one[key] for one in arrived[: index + 1] if key in one]
        sizes[name] = (
            sum(size(one[:ELEMENTS]) for one in earlier),
            sum(size(one[ELEMENTS:]) for one in earlier),
        )
    return PassInTurn(index, own, sizes)


def recompute(asked: RecomputeRequest) -> RecomputeResult:
    """Compute a window again, and say what that shows.

    An exception of the program's own modules is a note.
    """
    result = RecomputeResult()
    try:
        _compute(asked, result)
        is_right = result.name is None and not asked.is_faulty
        if is_right and result.how in (ONE_BATCH, BY_MICRO_BATCH):
            _judge_saved(asked, result)
    except NotRecomputed as reason:
        return _refused(reason)
    except (KeyboardInterrupt, Terminated):
        raise
    except BaseException as error:
        # the program's own call ends it no more than its second one
        first = (str(error).splitlines() or [""])[0]
        return _refused(NotRecomputed(f"{type(error).__name__}: {first}"))
    return result


def _refused(reason: NotRecomputed) -> RecomputeResult:
    sentence = f"a window was not computed again: {reason}"
    if isinstance(reason, Unexplained):
        return RecomputeResult(notes=[finding(UNEXPLAINED, str(reason))], reason=UNEXPLAINED)
    if isinstance(reason, NotReproducible):
        return RecomputeResult(notes=[finding(NOT_REPRODUCIBLE, sentence)], reason=NOT_REPRODUCIBLE)
    if isinstance(reason, NotKept):
        doubt = str(reason) if reason.may_be_wrong else ""
        note = finding("not-recomputed", sentence)
        return RecomputeResult(notes=[note], keep=reason.what, doubt=doubt)
    return RecomputeResult(notes=[finding("not-recomputed", sentence)])


def _computed(
    asked: RecomputeRequest, parts: Sequence[RecordedCall], how: ReplayOptions
) -> tuple[GradDifference, AccumulatedGradient, list[ReplayResult]]:
    """Return how `.grad` differs from the window that is computed again micro-batch by micro-batch."""
    total, replayed = by_micro_batch(parts, how)
    found = compare_grad(
        asked.compared,
        total,
        asked.factor,
        lambda n: by_micro_batch(parts, replace(how, seed=n))[0],
    )
    return found, total, replayed


def _common_modes(
    parts: Sequence[RecordedCall], passes: Sequence[ActivePass]
) -> dict[RecordedCall, tuple[bool, ...]]:
    """Return the parts that ran in another mode than the same call of most passes, with the mode of
    those.
    """
    calls: dict[tuple[Any, int, int, int], list[RecordedCall]] = {}
    for index, group in groupby(parts, attrgetter("index")):
        members = list(group)
        place = passes[index].record.place
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


def _compute(asked: RecomputeRequest, result: RecomputeResult) -> None:
    received = recorded_calls(
        asked.passes,
        asked.weights,
        asked.unseen(asked.observed),
        is_sampled=asked.is_sampled,
    )
    modes = _common_modes(received, asked.passes)
    if asked.turn is not None and not modes and _holds_in_turn(asked, asked.turn, received, result):
        return
    parts = result.parts = [from_outside(part) for part in received]
    modes = {parts[received.index(part)]: mode for part, mode in modes.items()}
    if not modes and _is_that_of_one_batch(asked, parts, result):
        return
    difference, total, replayed = _computed(asked, parts, ReplayOptions())
    _expect_comparable(asked, total)
    if dtype := _stale_casts(parts, replayed):
        result.how = BY_MICRO_BATCH
        result.name = "stale-parameters"
        result.sentence = SENTENCES["stale casts"].format(dtype=dtype)
        result.causes = ("casts",)
        return
    if lost := max(map(_lost_by, parts, replayed)):
        _explain_lost(parts, replayed, lost)
    result.how = BY_MICRO_BATCH
    result.error = difference.error
    if asked.is_faulty:
        return
    _cover(asked, total.gradients.keys(), result)
    if difference.worst is not None:
        try:
            _judge_difference(asked, received, parts, difference, result)
        except (Unexplained, NotReproducible):
            _judge_functions(asked, parts, total.functions, result)
            if result.name is None:
                raise
    elif modes:
        _judge_modes(asked, parts, modes, result)
    else:
        _note_tensor_hooks(asked, parts, replayed, result)
    if result.name is None:
        _judge_age(asked, parts, result)
    if result.name is None:
        _judge_functions(asked, parts, total.functions, result)


def _note_tensor_hooks(
    asked: RecomputeRequest,
    parts: Sequence[RecordedCall],
    replayed: Sequence[ReplayResult],
    result: RecomputeResult,
) -> None:
    """Note hooks that the forward sets on tensors, and that change the gradient."""
    lines = sorted(set[str]().union(*(found.hooked for found in replayed)))
    if not lines:
        return
    without, _, _ = _computed(asked, parts, ReplayOptions(unhooked=True))
    if without.worst is not None:
        where = ", ".join(lines[:MOST_LINES])
        said = (
            f"a hook that the forward sets on a tensor ({where}) changes the gradient of what is"
            " below it"
        )
        result.notes.append(finding("hook-factor", said))


def _is_that_of_one_batch(
    asked: RecomputeRequest, parts: Sequence[RecordedCall], result: RecomputeResult
) -> bool:
    """Compute all calls in one batch, and return whether that says all there is to be said."""
    whole = in_one_batch(parts, asked.compared, asked.factor)
    if whole is None or whole.keys.isdisjoint(asked.compared):
        return False
    difference = whole.difference()
    if difference.worst is not None and not asked.is_faulty:
        return False
    result.how = ONE_BATCH
    result.error = difference.error
    _cover(asked, whole.keys, result)
    _judge_functions(asked, parts, whole.functions, result)
    return True


def _judge_modes(
    asked: RecomputeRequest,
    parts: Sequence[RecordedCall],
    modes: Mapping[RecordedCall, tuple[bool, ...]],
    result: RecomputeResult,
) -> None:
    """Ask whether the window has another gradient where all its calls are in one mode.

    Args:
        asked: the window.
        parts: its calls.
        modes: the calls in another mode than most, with the mode of those.
        result: to which a fault is added.
    """
    alike = [
        replace(p, forward=replace(p.forward, modes=modes.get(p, p.forward.modes))) for p in parts
    ]
    difference, _, _ = _computed(asked, alike, ReplayOptions())
    if difference.worst is not None:
        numbers = ", ".join(str(index) for index in sorted({part.index for part in modes}))
        _blame("wrong-mode", SENTENCES["wrong-mode"].format(numbers=numbers), difference, result)


def _holds_in_turn(
    asked: RecomputeRequest,
    turn: PassInTurn,
    received: Sequence[RecordedCall],
    result: RecomputeResult,
) -> bool:
    """Compute one pass again, and return whether all is as it was.

    It finds nothing wrong by itself: where this is False, the whole window is computed again, which
    shows what is.
    """
    if any(part.forward.was_moved or part.forward.was_refilled for part in received):
        return False
    parts = [
        replace(from_outside(part), weight=1.0) for part in received if part.index == turn.index
    ]
    total = SampledGradient()
    replayed = [
        replay(p.forward, p.forward.arguments, p.cotangents, ReplayOptions(), total.add)
        for p in parts
    ]
    compared = total.samples.keys() & asked.compared.keys() & turn.arrived.keys()
    functions = frozenset(chain.from_iterable(found.functions for found in replayed))
    if not compared or functions - asked.known:
        return False
    if any(map(_lost_by, parts, replayed)):
        return False
    for key, again in total.read(sorted(compared)).items():
        if _differs(turn, key, again, dtype_of(asked.observed[key])):
            return False
    reached = [key for key, one in turn.arrived.items() if key in asked.observed and one.any()]
    result.how = IN_TURN
    result.parts = parts
    result.covered = len(compared), len(compared.union(reached))
    return True


def _differs(turn: PassInTurn, key: int, again: Vector, dtype: str) -> bool:
    """Return whether what arrived at a parameter is another gradient than the one computed again.

    What arrived is known as a difference of two sums, which were rounded.
    """
    then = turn.arrived[key]
    unit = growth(FURTHER_ROUNDINGS, dtype)
    parts = (slice(ELEMENTS), slice(ELEMENTS, None))
    for part, of_sums in zip(parts, turn.sizes[key], strict=True):
        off = float(np.abs(then[part] - again[part]).max())
        allowed = unit * (of_sums + float(np.abs(again[part]).max())) + UNDERFLOW.get(dtype, 0.0)
        if not off <= allowed:
            return True
    return False


def _judge_age(
    asked: RecomputeRequest, parts: Sequence[RecordedCall], result: RecomputeResult
) -> None:
    """Ask whether the gradient is one of parameters that the step does not start from.

    A loss that is computed before the last step goes backward after it: `.grad` is that of its
    calls, and their parameters are those of before. What arrives at the calls' outputs is of before,
    too, so that the outputs are compared and not the gradient.
    """
    old = [
        part
        for part in parts
        if part.forward.was_moved
        and part.forward.is_of_before_a_step  # a decay of the program's own is no part of a gradient
        and part.forward.kept.parameters.keys() & asked.compared.keys()
    ]
    now = [
        replace(part, forward=replace(part.forward, kept=replace(part.forward.kept, parameters={})))
        for part in old
    ]
    how = ReplayOptions(forward_only=True)
    replayed = [replay(p.forward, p.forward.arguments, p.cotangents, how) for p in now]
    if any(map(_lost_by, now, replayed)):
        result.name = "stale-parameters"
        result.sentence = SENTENCES["before the step"]


def _expect_comparable(asked: RecomputeRequest, total: AccumulatedGradient) -> None:
    """Refuse a window of which no gradient could be compared.

    Raises:
        NotRecomputed: there is none.
    """
    if total.gradients.keys() & asked.compared.keys():
        return
    if not asked.observed:
        raise NotRecomputed(
            "no parameter of the optimizer gets its gradient without a hook of the script's"
        )
    if total.gradients.keys() & asked.observed.keys():
        where = asked.used_outside()
        raise NotRecomputed(
            "every parameter gets a part of its gradient from outside of the recorded calls of"
            f" modules{f' ({where})' if where else ''}"
        )
    raise NotRecomputed(
        f"no parameter of the optimizer is in a recorded call ({asked.unseen(asked.observed)})"
    )


def _cover(asked: RecomputeRequest, reached: Set[int], result: RecomputeResult) -> None:
    """Note of which parameters the gradient was compared, and why not of the others.

    Args:
        asked: the window.
        reached: the ids of the parameters whose gradient was computed again.
        result: to which it is added.
    """
    compared = reached & asked.compared.keys()
    left = [key for key, now in asked.observed.items() if key not in compared and now.any()]
    result.covered = len(compared), len(compared) + len(left)
    if left:
        number = counted(len(left), "parameter")
        which = "" if reached.isdisjoint(left) else ", or not with all of it"
        said = f"{number} had no part in a window computed again{which} ({asked.unseen(left)})"
        result.notes.append(finding("uncovered-parameters", said))


def _explain_lost(
    parts: Sequence[RecordedCall], replayed: Sequence[ReplayResult], lost: float
) -> NoReturn:
    """Say why calls give other outputs than they gave: each cause is measured.

    Raises:
        NotRecomputed: it is none that makes the gradient wrong, or none was found.
    """
    forwards = list(dict.fromkeys(part.forward for part in parts))
    if watching := sorted(
        {type(mode).__name__ for mode in chain.from_iterable(one.watching for one in forwards)}
    ):
        raise NotRecomputed(
            f"the model gives other outputs when it is called without {', '.join(watching)}, which"
            " may not see a second call"
        )
    if refilled := [forward for forward in forwards if forward.is_refilled]:
        raise _input_changed(refilled)
    _expect_known_parameters(forwards, differs=False)
    _expect_reproducible(parts, replayed)
    if not all(forward.kept.state for forward in forwards):
        raise NotKept(
            STATE,
            "the model gives other outputs when it is called again from the state that it has at"
            f" the step (by {lost:.2g} of their size)",
            may_be_wrong=True,
        )
    raise Unexplained(
        f"the model gives other outputs when it is called again, by {lost:.2g} of"
        " their size; its inputs, its parameters, its buffers, what its code reaches in Python and"
        " the random numbers are those of the call, and two more calls give the same as each other"
    )


def _expect_known_parameters(forwards: Sequence[ModuleCall], *, differs: bool) -> None:
    """Refuse calls whose parameters are others now, and were not kept.

    Args:
        forwards: the calls.
        differs: whether the gradient differs, where the outputs do not.

    Raises:
        NotKept: there are some.
    """
    moved = [
        forward
        for forward in forwards
        if not forward.kept.parameters and forward.point != point_of(forward.module.parameters())
    ]
    if any(forward.was_moved for forward in moved):
        raise NotKept(
            PARAMETERS,
            "parameters were written between a call of the model and its backward",
            may_be_wrong=True,
        )
    if moved:
        raise NotKept(
            PARAMETERS,
            "parameters were written between the window's backward passes and the step",
            may_be_wrong=differs,
        )


def _expect_reproducible(parts: Sequence[RecordedCall], replayed: Sequence[ReplayResult]) -> None:
    """Refuse calls that do not give the same when they are called twice.

    Raises:
        NotReproducible: some do not.
    """
    for part, found in zip(parts, replayed, strict=True):
        compiled = [
            name or type(module).__name__
            for name, module in part.forward.module.named_modules()
            if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
        ]
        if compiled and found.random:
            raise NotReproducible(
                f"{compiled[0]} is compiled and draws random numbers, which"
                " eager code draws otherwise"
            )
        how = ReplayOptions(forward_only=True, marked=True)
        one, other = (
            replay(part.forward, part.forward.arguments, part.cotangents, how).marks
            for _ in range(2)
        )
        if (where := _first_parting(one, other)) is not None:
            raise NotReproducible(
                f"two more calls of the model with the same inputs, parameters"
                f" and random numbers part in {where}"
            )


Marks = Sequence[tuple[str, Sequence[Fingerprint]]]


def _first_parting(one: Marks, other: Marks) -> str | None:
    """Return the first module that has returned something else, None where all have returned the
    same.
    """
    for (name, then), (_, now) in zip(one, other, strict=False):
        if len(then) != len(now) or not all(map(is_same_fingerprint, then, now)):
            return name
    return None if len(one) == len(other) else one[-1][0]


LEAST_OF_CASTS = 2.0**-14
"""Relative difference of outputs from which on it is asked whether casts are stale."""


def _stale_casts(parts: Sequence[RecordedCall], replayed: Sequence[ReplayResult]) -> str:
    """Return the dtype of casts of parameters that autocast has kept over a step; empty where it
    has kept none.

    With the parameters themselves, whose casts it may keep, a call then gives what it gave, to the
    bit; with copies of them, which it casts anew, it does not.
    """
    for part, found in zip(parts, replayed, strict=True):
        _, dtype, enabled = part.forward.autocast
        if not enabled or not torch.is_autocast_cache_enabled():
            continue
        if _off(part, found) > LEAST_OF_CASTS and not part.forward.is_refilled:
            how = ReplayOptions(forward_only=True, own_parameters=True)
            own = replay(part.forward, part.forward.arguments, part.cotangents, how)
            if _off(part, own) == 0:
                return dtype_name(dtype)
    return ""


def _off(part: RecordedCall, found: ReplayResult) -> float:
    """Return the largest relative difference of a call's outputs from those that it gave."""
    if any(i >= len(found.outputs) for i in part.cotangents):
        return math.inf
    return max(_distance(part.forward.outputs[i], found.outputs[i]) for i in part.cotangents)


@dataclass(frozen=True)
class Writable:
    """What a program may write between a call of a model and its backward.

    Attributes:
        what: it is.
        was_written: whether it was, of a call.
        is_kept: whether it is known as it was at the call.
        kept_as: what is to be kept of a call, that it is.
        fault: the name of the fault.
        sentence: the key of the sentence.
    """

    what: str
    was_written: Callable[[ModuleCall], bool]
    is_kept: Callable[[ModuleCall], bool]
    kept_as: str
    fault: str
    sentence: str


WRITABLE = (
    Writable(
        "inputs",
        lambda forward: forward.was_refilled,
        lambda forward: not forward.arguments_are_given,
        INPUTS,
        "changed-batch",
        "changed-batch",
    ),
    Writable(
        "parameters",
        lambda forward: forward.was_moved,
        lambda forward: bool(forward.kept.parameters),
        PARAMETERS,
        "stale-parameters",
        "stale-parameters",
    ),
    Writable(
        "buffers",
        lambda forward: forward.has_written_buffers,
        lambda forward: bool(forward.kept.buffers),
        STATE,
        "changed-batch",
        "written buffers",
    ),
)


def _judge_difference(
    asked: RecomputeRequest,
    received: Sequence[RecordedCall],
    parts: Sequence[RecordedCall],
    difference: GradDifference,
    result: RecomputeResult,
) -> None:
    """Say why `.grad` is another one than that of the calls, which give what they gave.

    Raises:
        NotRecomputed: nothing that was measured explains it.
    """
    forwards = list(dict.fromkeys(part.forward for part in parts))
    for one in WRITABLE:
        written = list(filter(one.was_written, forwards))
        if not written:
            continue
        if not all(map(one.is_kept, written)):
            raise NotKept(
                one.kept_as,
                f"{one.what} were written between a call of the model and its backward",
                may_be_wrong=True,
            )
        how = ReplayOptions(scale=1.0, as_it_was_at_backward=True)
        if _computed(asked, parts, how)[0].worst is None:
            _blame(one.fault, SENTENCES[one.sentence], difference, result)
            result.causes = ("written",)
            return
    _judge_backward(asked, received, difference, result)


def _judge_backward(
    asked: RecomputeRequest,
    received: Sequence[RecordedCall],
    without: GradDifference,
    result: RecomputeResult,
) -> None:
    """Say which backward is not linear.

    Raises:
        NotRecomputed: the gradient is not that of the recorded calls.
    """
    hooked = sorted(
        set(chain.from_iterable(backward_hooks(part.forward.module) for part in received))
    )
    parts = [from_outside(part, hooks=True) for part in received]
    difference, _, _ = _computed(asked, parts, ReplayOptions())
    exact, _, replayed = _computed(asked, parts, ReplayOptions(hooks=True, scale=1.0))
    if exact.worst is not None:
        if _judge_output_hooks(asked, received, exact, result):
            return
        if _judge_stolen(asked, parts, exact, result):
            return
        if _is_that_of_packed(asked, parts, exact, result):
            return
        _refuse_difference(asked, parts, replayed, without)
    scaled, eightfold, _ = _computed(asked, parts, ReplayOptions(hooks=True))
    names = ", ".join(hooked[:3])
    if scaled.worst is None:
        said = (
            f"a backward hook on a module ({names}) changes the gradient by {difference.error:.2g}"
            " of its size"
        )
        result.notes.append(finding("module-hook", said))
        return
    functions = sorted(
        {kind.__name__ for kind in chain.from_iterable(found.functions for found in replayed)}
    )
    if not hooked and _judge_own_terms(asked, parts, eightfold, ", ".join(functions), result):
        return
    what = f"a hook on a module ({names})" if hooked else _changed_by(functions, replayed)
    smaller, _, _ = _computed(
        asked, parts, ReplayOptions(hooks=True, scale=1 / ReplayOptions.scale)
    )
    if smaller.worst is None:
        # a threshold that no gradient of the program has reached
        said = (
            f"the backward pass of {what} is linear up to the gradients of the window, and no"
            f" linear function of gradients {ReplayOptions.scale:.0f} times as large"
        )
        result.notes.append(finding("not-linear", said))
        return
    _blame("not-linear", SENTENCES["not-linear"].format(what=what), difference, result)


def _changed_by(functions: Sequence[str], replayed: Sequence[ReplayResult]) -> str:
    """Return what may change a gradient where no hook of a module does."""
    lines = sorted(set(chain.from_iterable(found.hooked for found in replayed)))
    if functions or not lines:
        return f"custom function {', '.join(functions) or '?'}"
    return f"a hook that the forward sets on a tensor ({', '.join(lines[:MOST_LINES])})"


def _judge_output_hooks(
    asked: RecomputeRequest,
    received: Sequence[RecordedCall],
    difference: GradDifference,
    result: RecomputeResult,
) -> bool:
    """Judge hooks of the program's on outputs of a model, where these explain the difference.

    What arrived there is known, and what the hooks have let pass.
    """
    hooked = [part for part in received if part.forward.has_hooked_output]
    if not hooked or any(part.forward.passed.keys() != part.cotangents.keys() for part in hooked):
        return False
    passed = [
        replace(part, cotangents=dict(part.forward.passed)) if part in hooked else part
        for part in received
    ]
    if _computed(asked, passed, ReplayOptions(hooks=True, scale=1.0))[0].worst is not None:
        return False
    factors = list[float | None]()
    for part in hooked:
        passing = part.forward.passed
        factors += [_factor_of(part.cotangents[index], passing[index]) for index in passing]
    known = [one for one in factors if one is not None]
    if len(known) == len(factors) and max(known) - min(known) > NEAR_TWICE * max(map(abs, known)):
        numbers = f"{min(known):.3g} to {max(known):.3g}"
        _blame("not-linear", SENTENCES["output hook"].format(numbers=numbers), difference, result)
        return True
    said = (
        f"a hook on an output of the model changes the gradient by {difference.error:.2g} of its"
        " size"
    )
    result.notes.append(finding("hook-factor", said))
    return True


def _is_that_of_packed(
    asked: RecomputeRequest,
    parts: Sequence[RecordedCall],
    difference: GradDifference,
    result: RecomputeResult,
) -> bool:
    """Ask whether the gradient is that of what hooks of the program unpack, in place of what was
    saved: they may have packed it into fewer bits.
    """
    if all(part.forward.packing is None for part in parts):
        return False
    packed = ReplayOptions(hooks=True, scale=1.0, packed=True)
    if _computed(asked, parts, packed)[0].worst is not None:
        return False
    said = (
        "what the program's hooks on saved tensors unpack is not what they have packed, and changes"
        f" the gradient by {difference.error:.2g} of its size"
    )
    result.notes.append(finding("packed-tensors", said))
    return True


def _factor_of(arrived: torch.Tensor, passed: torch.Tensor) -> float | None:
    """Return the one factor by which a gradient was multiplied; None for anything else."""
    one = _double(arrived).flatten()
    other = _double(passed).flatten()
    square = float((one * one).sum())
    found = float((one * other).sum()) / square if square else 0.0
    return found if norm(other - found * one) <= NEAR_TWICE * norm(other) else None


NEAR_TWICE = 1e-3
"""Relative difference up to which a `.grad` is twice what the last pass brings."""


def _judge_stolen(
    asked: RecomputeRequest,
    parts: Sequence[RecordedCall],
    difference: GradDifference,
    result: RecomputeResult,
) -> bool:
    """Judge gradients that lie in memory to which each backward writes.

    Autograd takes a gradient that nobody else holds for `.grad`, without a copy. Where the same
    memory is written to and returned once more, it is added to itself: `.grad` is twice what the
    last pass brings, whatever the passes before have brought.
    """
    last = max(part.index for part in parts)
    whole, _ = by_micro_batch(parts, ReplayOptions(hooks=True, scale=1.0))
    own, _ = by_micro_batch(
        [p for p in parts if p.index == last], ReplayOptions(hooks=True, scale=1.0)
    )
    if last == min(part.index for part in parts):
        return False

    def is_near(key: int, one: torch.Tensor) -> bool:
        off = norm(add_gradients(asked.compared[key].to(one.dtype), -asked.factor * one))
        return off <= NEAR_TWICE * abs(asked.factor) * norm(one)

    keys = whole.gradients.keys() & own.gradients.keys() & asked.compared.keys()
    others = [key for key in keys if not is_near(key, whole.gradients[key])]
    if not others or not all(is_near(key, 2 * own.gradients[key]) for key in others):
        return False
    _blame("stolen-buffer", SENTENCES["stolen"], difference, result)
    return True


def _refuse_difference(
    asked: RecomputeRequest,
    parts: Sequence[RecordedCall],
    replayed: Sequence[ReplayResult],
    found: GradDifference,
) -> NoReturn:
    """Say that `.grad` is another one than that of the calls, and what was ruled out.

    Raises:
        NotRecomputed: always.
    """
    by = (
        f"{asked.subject} differs from the gradient of the window that is computed again by"
        f" {found.error:.2g} of its size, {found.ratio:.3g} times what rounding explains"
    )
    if any(part.forward.has_hooked_output for part in parts):
        raise Unexplained(
            f"{by}; the script has set a hook on an output of the model (`Tensor.register_hook`),"
            " which may change the gradient that passes it: it was not computed again"
        )
    _expect_known_parameters([part.forward for part in parts], differs=True)
    _expect_reproducible(parts, replayed)
    twice = [by_micro_batch(parts, ReplayOptions(hooks=True, scale=1.0))[0] for _ in range(2)]
    between = compare_grad(twice[0].gradients, twice[1], 1.0, lambda seed: twice[1])
    if between.worst is not None:
        raise NotReproducible(
            f"two more backward passes of the same calls give gradients that"
            f" differ by {between.error:.2g} of their size"
        )
    if not all(part.forward.kept.state for part in parts):
        raise NotKept(
            STATE, f"{by}: it was not computed from the state before the call", may_be_wrong=True
        )
    raise Unexplained(
        f"{by}; the model gives the outputs that it gave from the inputs, parameters, buffers and"
        " random numbers of the call, its inputs and parameters were the same at the backward, and"
        " hooks on modules do not explain it; hooks on tensors outside of the model, tensors that"
        " hooks have packed, and gradients that share memory were not looked at"
    )


def _judge_own_terms(
    asked: RecomputeRequest,
    parts: Sequence[RecordedCall],
    eightfold: AccumulatedGradient,
    names: str,
    result: RecomputeResult,
) -> bool:
    """Judge functions whose backward is affine, and adds a gradient of its own.

    Return whether it is that alone.
    """
    _, own, replayed = _computed(asked, parts, ReplayOptions(hooks=True, scale=1.0, own=True))
    linear = AccumulatedGradient(
        sizes=eightfold.sizes, terms=eightfold.terms, dtype=eightfold.dtype
    )
    of_own = {key: gradient for key, gradient in own.gradients.items() if gradient.any()}
    for key, gradient in eightfold.gradients.items():
        # what is its own has been divided by the scale with the rest
        linear.gradients[key] = add_gradients(
            gradient, own.gradients[key] * (1 - 1 / ReplayOptions.scale)
        )
    if (
        not of_own
        or compare_grad(asked.observed, linear, asked.factor, lambda seed: linear).worst is not None
    ):
        return False
    injected = list[tuple[RecordedCall, Injected]]()
    for part, found in zip(parts, replayed, strict=True):
        injected += [(part, one) for one in found.injected if one.weight]
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
            result.name = "wrong-scale"
            result.error = number - 1.0
            result.allowed = LEAST
            result.sentence = SENTENCES["own term"].format(name=names, number=number)
    return True


def _judge_saved(asked: RecomputeRequest, result: RecomputeResult) -> None:
    """Judge what a forward writes to that it has saved, where no version tells, as by `.data`: the
    backward then computes with other values than the forward did, each time.
    """
    new = {
        id(part.forward.module): part
        for part in result.parts
        if id(part.forward.module) not in asked.looked_at
    }
    asked.looked_at.update(new)
    how = ReplayOptions(forward_only=True, saved=CHECKED)
    rewriting = [
        part
        for part in new.values()
        if part.forward.packing is None
        and replay(part.forward, part.forward.arguments, part.cotangents, how).rewrites
    ]
    if not rewriting:
        return
    difference, _, _ = _computed(asked, result.parts, ReplayOptions(saved=COPIED))
    if difference.worst is None or not any(
        _is_other_than_slope(part, difference.worst) for part in rewriting
    ):
        return  # a mask over what a ReLU has given is in its derivative, too
    names = [type(part.forward.module).__name__ for part in rewriting]
    said = SENTENCES["rewritten"].format(names=", ".join(names[:MOST_LINES]))
    _blame("changed-batch", said, difference, result)
    result.causes = ("written",)


def _is_other_than_slope(part: RecordedCall, key: int) -> bool:
    """Return whether the gradient of a parameter is another one than that of the values of a call,
    along most of some directions.
    """
    parameter = next((p for p in part.forward.module.parameters() if id(p) == key), None)
    if parameter is None or not is_plain(parameter) or not parameter.is_floating_point():
        return False
    found = replay(part.forward, part.forward.arguments, part.cotangents, ReplayOptions()).gradients
    gradient = found[key].double()
    own = parameter.detach().clone()
    off = 0
    for seed in range(DIRECTIONS):
        generator = torch.Generator().manual_seed(seed)
        along = torch.randn(own.shape, generator=generator, dtype=own.dtype)
        along *= STEP * norm(own) / norm(along)
        try:
            values = [_value_at(part, parameter, own + sign * along) for sign in (1, -1)]
        finally:
            parameter.data.copy_(own)
        slope = (values[0] - values[1]) / 2
        expected = float((gradient * along).sum())
        off += not abs(slope - expected) <= SLOPE_ERROR * (abs(slope) + abs(expected))
    return 2 * off > DIRECTIONS


DIRECTIONS = 5
STEP = 1e-2
SLOPE_ERROR = 0.05
"""Directions in which a slope is measured, the length of a step in each, relative to the parameter, and the relative
error that curvature and rounding may have: what a forward writes over changes gradients by tens of percent."""


def _value_at(part: RecordedCall, parameter: torch.Tensor, values: torch.Tensor) -> float:
    """Return what goes backward from a call with other values of a parameter, which is left there."""
    parameter.data.copy_(values)
    how = ReplayOptions(forward_only=True)
    outputs = replay(part.forward, part.forward.arguments, {}, how).outputs
    return sum(float((outputs[i].double() * g.double()).sum()) for i, g in part.cotangents.items())


def _blame(name: str, sentence: str, difference: GradDifference, result: RecomputeResult) -> None:
    result.name = name
    result.sentence = sentence
    result.error = difference.error
    result.parameter = difference.worst
    result.allowed = difference.error / difference.ratio if difference.ratio else None


def _judge_functions(
    asked: RecomputeRequest,
    parts: Sequence[RecordedCall],
    kinds: Set[type],
    result: RecomputeResult,
) -> None:
    """Judge those custom functions on the way that no earlier window has shown."""
    new: dict[type, Any] = {}
    for kind in kinds - asked.known:
        made = statement_of(kind)
        if made not in asked.known:
            new[kind] = made
    if not new or asked.is_faulty:
        return
    # a number that a forward computes is another one then; some functions expect their gradient
    how = ReplayOptions(seed=0, scale=1.0)
    failed = dict[Any, str]()
    with first_calls(new.keys(), failed=failed) as found:
        for part in parts:
            replay(part.forward, part.forward.arguments, part.cotangents, how)
    missed = {made: kind for kind, made in new.items() if not (found.get(kind) or found.get(made))}
    # a class that is made anew each time may hold tensors: its statement is known in its place
    asked.known.update(found, missed)
    for key, each in found.items():
        asked.known.update((key, signature) for signature in each)
    calls = list(chain.from_iterable(each.values() for each in found.values()))
    with discarded_output(), AsBefore(parts[0].forward.on):
        accumulates = len(asked.passes) > 1
        verdicts = [judge_backward(call, accumulates=accumulates) for call in calls]
    verdicts += _not_recorded(failed)
    verdicts += [
        FunctionReport(kind.__name__, note=NOT_CALLED)
        for kind in missed.values()
        if kind not in failed
    ]
    verdicts += _written(parts, calls)
    blame_functions(verdicts, result, asked.known)


def _not_recorded(failed: Mapping[Any, str]) -> list[FunctionReport]:
    """Return which functions were not checked, since a call of them could not be recorded."""
    return [
        FunctionReport(name_of(kind), note=NOT_RECORDED.format(error=error))
        for kind, error in failed.items()
    ]


def _written(
    parts: Sequence[RecordedCall], calls: Iterable[FunctionCall]
) -> Iterable[FunctionReport]:
    """Judge functions that write to a tensor that they are given, and do not declare it.

    The window is computed again with copies in its place: where that is another gradient, the
    backward of another function has read what was written.
    """
    writing = defaultdict[Any, set[int]](set)
    for call in calls:
        if call.wrote:
            writing[call.kind].update(call.wrote)
    if not writing:
        return []
    how = ReplayOptions(scale=1.0)
    own, _ = by_micro_batch(parts, how)
    try:
        with given_copies(writing):
            other, _ = by_micro_batch(parts, how)
    except Exception as error:  # a function may take what it is given for what it has kept
        said = f"it writes to what it is given, and cannot be called with copies ({error})"
        return [FunctionReport(name_of(kind), note=said) for kind in writing]
    size = math.hypot(*map(norm, other.gradients.values()))
    off = math.hypot(
        *(
            norm(add_gradients(own.gradients[key], -gradient))
            for key, gradient in other.gradients.items()
            if key in own.gradients
        )
    )
    if not off > LEAST * size:
        return []
    return [FunctionReport(name_of(kind), WRITES, error=off / size) for kind in writing]


def blame_functions(
    verdicts: Iterable[FunctionReport], result: RecomputeResult, known: set[FunctionKey]
) -> None:
    """Note what is known of custom functions, and blame the first one that is wrong.

    Args:
        verdicts: of calls.
        result: to which it is added.
        known: what was noted already; new notes are added.
    """
    for verdict in verdicts:
        said = f"custom function {verdict.name}: {verdict.note}"
        if verdict.note and said not in known:
            known.add(said)
            result.notes.append(finding("custom-function", said))
        if verdict.fault and result.name is None:
            result.name = verdict.called
            is_written = verdict.called != "wrong-backward"
            result.causes = ("written",) if is_written else ()
            sentence = SENTENCES["written" if is_written else "wrong-backward"]
            result.sentence = sentence.format(name=verdict.name, fault=verdict.fault)
            # the window was computed again with the same fault, so the error is that of the
            # function
            result.error = verdict.error
            result.allowed = LEAST


def judge_calls_of_program(
    calls: CallsOfProgram,
    passes: Sequence[ActivePass],
    known: set[FunctionKey],
    of_calls: Set[type] = frozenset(),
) -> RecomputeResult:
    """Judge the custom functions that the program calls outside of recorded modules.

    Those of a window are known when it has gone backward. They are watched from then on, and judged
    at the next step.

    Args:
        calls: what was recorded of those that earlier windows have shown.
        passes: of this window.
        known: the functions that need not be judged; new ones are added.
        of_calls: those in recorded calls, of which a window may not be computed again.
    """
    result = RecomputeResult()
    blame_functions(_not_recorded(calls.failed), result, known)
    if calls.has_calls:
        with discarded_output():
            accumulates = len(passes) > 1
            verdicts = [judge_backward(call, accumulates=accumulates) for call in calls.taken()]
        blame_functions(verdicts, result, known)
    shown = set(chain.from_iterable(one.outside.functions for one in passes)) | of_calls
    new = {kind for kind in shown if not {kind, statement_of(kind)} & known}
    # a later call may take another branch
    inside = {kind for kind in known if isinstance(kind, type)}
    calls.watch(new | inside, known)
    known.update(new, map(statement_of, new))
    return result
