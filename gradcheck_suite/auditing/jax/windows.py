"""Puts the window of each optimizer step together: which gradients stand in what it was given, and
with which coefficients.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from gradcheck_suite.auditing.jax.fits import EPS, LinearCombination, Vector, fit, near
from gradcheck_suite.auditing.jax.marks import PassMark, UpdateMark, segments
from gradcheck_suite.auditing.jax.replay import MarkEvent
from gradcheck_suite.auditing.places import Place
from gradcheck_suite.auditing.replay import RELATIVE

MOST_AGE = 3
"""Steps for which a gradient that is in none of them is kept: it may be of another one."""
MOST_OPEN = 512
"""Gradients that are kept."""


@dataclass(frozen=True, eq=False)
class Member:
    """The part of a device in a gradient.

    Attributes:
        device: its index.
        terms: for each term of the loss, what is kept of the weights of its levels.
    """

    device: int
    terms: Sequence[Any]


@dataclass(eq=False)
class Column:
    """A gradient of a loss, on one device, or of all devices where JAX has added them up.

    Attributes:
        number: of the pass.
        mark: of it.
        gradient: a sample of it.
        norm: of the gradient.
        parameters: a sample of those that it is a gradient by.
        members: the devices that are in it.
        mixing: by how much items depend on other rows of inputs, and samples of these.
        rules: the checks of functions with a backward of their own.
        copies: whether one of several copies under a `vmap` was looked at.
        age: the number of steps since then.
        consumers: the optimizers that have stepped on it.
    """

    number: int
    mark: PassMark
    gradient: Vector
    norm: float
    parameters: Vector
    members: list[Member]
    mixing: Sequence[Any]
    rules: Sequence[Any]
    copies: bool
    age: int = 0
    consumers: set[int] = field(default_factory=set)

    @property
    def is_finite(self) -> bool:
        """Whether it has neither NaN nor infinity."""
        return bool(np.isfinite(self.gradient).all())


def _of_device(tree: Any, device: int | None) -> Any:
    return tree if device is None else jax.tree.map(lambda x: x[device], tree)


def gradient_columns(event: MarkEvent, number: int) -> list[Column]:
    """Return the gradients of a pass: one for each device, or one of all."""
    mark = event.mark
    assert isinstance(mark, PassMark)
    devices: list[int | None] = list(range(event.devices)) or [None]
    members = [Member(d or 0, _of_device(event.values["terms"], d)) for d in devices]
    found = []
    # what JAX has added up over devices is the same on all of them: the first one stands for each
    for device in devices[: 1 if mark.reduced else None]:
        values = _of_device(event.values, device)
        found.append(
            Column(
                number=number,
                mark=mark,
                gradient=np.asarray(values["gradient"]["sample"], np.float64),
                norm=float(np.sqrt((np.asarray(values["gradient"]["norms"], float) ** 2).sum())),
                parameters=np.asarray(values["parameters"]["sample"], np.float64),
                members=members if mark.reduced else [members[device or 0]],
                mixing=values["mixing"],
                rules=values["rules"],
                copies=event.copies,
            )
        )
    return found


def select(column: Column, shapes: Sequence[tuple[int, ...]]) -> Column | None:
    """Return the part of a gradient that has some shapes, of neighbouring leaves.

    An optimizer may be given a part of what one loss gives. None where there is no such part, or
    more than one.
    """
    own = column.mark.shapes
    if own == tuple(shapes):
        return column
    number = len(shapes)
    starts = [i for i in range(len(own) - number + 1) if own[i : i + number] == tuple(shapes)]
    # where the shapes fit in two places, as of two equal towers, either could be meant
    if len(starts) != 1:
        return None
    parts = segments(own)[starts[0] : starts[0] + number]
    at = np.concatenate([np.arange(slices[0].start, slices[-1].stop) for slices in parts])
    # a loss may be by more leaves than have a gradient of real numbers
    cut = column.parameters[at] if len(column.parameters) == len(column.gradient) else np.zeros(0)
    return Column(
        column.number,
        column.mark,
        column.gradient[at],
        column.norm,
        cut,
        column.members,
        column.mixing,
        column.rules,
        column.copies,
        column.age,
        column.consumers,
    )


@dataclass(eq=False)
class Step:
    """What an optimizer was given.

    Attributes:
        number: among the steps of all optimizers.
        place: of the update.
        shapes: of the gradient's leaves.
        names: of them.
        gradient: a sample.
        norms: of its leaves.
        parameters: a sample of those that it was given; None where it was given none.
        dtype: the coarsest one of the gradient's leaves.
        noise: by how much the gradient may be off; None for one that the optimizer was given.
        is_scaled: whether a common factor of its coefficients says something.
        is_lost: whether what it changes is thrown away.
    """

    number: int
    place: Place
    shapes: Sequence[tuple[int, ...]]
    names: Sequence[str]
    gradient: Vector
    norms: Vector
    parameters: Vector | None
    dtype: str
    noise: Vector | None = None
    is_scaled: bool = True
    is_lost: bool = False


@dataclass(eq=False)
class StepGradients:
    """The gradients of a step.

    Attributes:
        step: the step.
        columns: the gradients since the last step that may be in it.
        coefficients: of each; 0 for one that is not in it.
        tolerance: relative, of the coefficients.
        added: by how much of the parameters the gradient was made larger, as by a decay.
    """

    step: Step
    columns: list[Column]
    coefficients: list[float]
    tolerance: float
    added: float = 0.0

    @property
    def used(self) -> list[Column]:
        """The gradients that are in the step."""
        pairs = zip(self.columns, self.coefficients, strict=True)
        return [column for column, c in pairs if c]

    @property
    def length(self) -> int:
        """The number of passes that are in the step."""
        return len({column.number for column in self.used})

    @property
    def lost(self) -> list[Column]:
        """Passes of the same parameters and place that are not in it, on any device."""
        used = self.used
        places = {column.mark.place for column in used}
        numbers = {column.number for column in used}
        return [
            column
            for column in self.columns
            if column.number not in numbers
            and column.mark.place in places
            and any(is_same_point(column, other) for other in used)
        ]


def is_of_earlier_step(window: StepGradients, optimizer: Optimizer) -> bool:
    """Return whether gradients are by parameters that the optimizer was given at an earlier step,
    and no longer has.
    """
    now = window.step.parameters
    known = optimizer.parameters
    if now is None or known is None or not window.used:
        return False
    point = window.used[0].parameters
    shapes = window.used[0].mark.shapes
    # samples of other lengths are of other leaves, and say nothing about these
    if any(len(one) != len(point) for one in (now, *known)) or _is_close(point, now, shapes):
        return False
    return any(_is_close(point, one, shapes) for one in known)


SAME = 1e-7
"""By how much elements of parameters that are the same may differ, relative to the largest: not at all."""
SAME_SUM = 1e-6
"""The same of sums over all elements, by the order in which each program adds them up."""


def _is_close(a: Vector, b: Vector, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Return whether two samples of parameters are of the same ones."""
    is_sum = _sums_in(tuple(shapes))
    if len(is_sum) != len(a):
        return _is_within_tolerance(a, b, SAME)
    return _is_within_tolerance(a[~is_sum], b[~is_sum], SAME) and _is_within_tolerance(
        a[is_sum], b[is_sum], SAME_SUM
    )


def _is_within_tolerance(a: Vector, b: Vector, tolerance: float) -> bool:
    return bool(np.abs(a - b).max(initial=0.0) <= tolerance * np.abs(a).max(initial=1e-30))


@functools.cache
def _sums_in(shapes: tuple[tuple[int, ...], ...]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which samples of some leaves are sums over all elements of one."""
    leaves = segments(shapes)
    found = np.zeros(leaves[-1][-1].stop if leaves else 0, bool)
    for _, *projections in leaves:
        for part in projections:
            found[part] = True
    return found


def is_same_point(one: Column, other: Column) -> bool:
    """Return whether two gradients are by the same parameters."""
    a = one.parameters
    b = other.parameters
    return len(a) == len(b) and _is_close(a, b, one.mark.shapes)


REDRAWN = 0.3
"""By how much an input differs from that of the pass before, relative to its size, if it is a batch: parameters move by
small steps."""


def mixes(column: Column, before: Column) -> float:
    """Return by how much items depend on other rows of a batch; 0 where no batch tells.

    Args:
        column: a gradient.
        before: that of the pass before it, of the same place.
    """
    largest = 0.0
    for now, then in zip(column.mixing, before.mixing, strict=False):
        here = np.asarray(now["input"], float)
        there = np.asarray(then["input"], float)
        redrawn = here.shape == there.shape and np.linalg.norm(here - there) > REDRAWN * max(
            np.linalg.norm(here), np.linalg.norm(there)
        )
        if redrawn and np.isfinite(now["by"]):
            largest = max(largest, float(now["by"]))
    return largest


@dataclass(frozen=True)
class Unfitted:
    """Why no window could be put together.

    Attributes:
        name: of the reason.
        reason: in words.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class Stale:
    """A step with something of an earlier one.

    Attributes:
        what: of it is in there.
        is_all: whether nothing else is.
    """

    what: str
    is_all: bool


NO_SUM = (
    "the gradient at the step is no weighted sum of those that were computed, as where it is clipped"
    " by element, projected, or noise is added"
)
NO_SUM_OF_FIRST = (
    "the gradient at the step is no weighted sum of those that were read: of the copies of a `vmap`"
    " that is the first one"
)
NO_MULTIPLE = (
    "the change of the parameters is no multiple of the gradients before it, as of momentum, or of an"
    " optimizer that is neither optax's nor one of `jax.example_libraries`"
)
ZEROS = "each gradient before it is exactly 0"
ALIKE = "the gradients of the window are too much alike to tell them apart"
NOT_FINITE = "a gradient is not finite"
NONE_BEFORE = (
    "no gradient of its shapes was computed before it by `jax.grad`, `jax.value_and_grad` or"
    " `jax.vjp`, of a loss that is one number, while the audit looked"
)


@dataclass(eq=False)
class HeldBack:
    """Gradients for which an optimizer gave updates of 0.

    Attributes:
        columns: those since its last step.
        times: how often.
        all_times: how often, with those that `MultiSteps` holds back.
    """

    columns: list[Column] = field(default_factory=list)
    times: int = 0
    all_times: int = 0


@dataclass(eq=False)
class Optimizer:
    """An optimizer and what is known of its steps.

    Attributes:
        index: in the order of first steps.
        last: the sample of the gradient at its last step.
        before: the gradients of its last window.
        sites: the places of passes that it has stepped on.
        lengths: numbers of passes of its windows -> how often.
        generation: of what is known; another one tells that events before it were not seen.
        steps: their number.
        reached: of each leaf, whether some gradient of it was not 0.
        is_apart: whether devices that began alike have stepped on gradients of their own.
        held: what it held back.
        turns: whether some update of it was against the gradient it was given, as a step is.
        mark: of its first update.
        place: of its last update.
        moved_after: the number of passes there were at each of its steps.
        parameters: samples of the first and of the last parameters that it was given.
    """

    index: int
    last: Column | None = None
    before: list[Column] = field(default_factory=list)
    sites: set[Place] = field(default_factory=set)
    lengths: Counter[int] = field(default_factory=Counter)
    generation: int = 0
    steps: int = 0
    reached: Vector | None = None
    is_apart: bool = False
    held: HeldBack = field(default_factory=HeldBack)
    turns: bool = False
    mark: UpdateMark | None = None
    place: Place | None = None
    moved_after: list[int] = field(default_factory=list)
    parameters: tuple[Vector, Vector] | None = None


def explain(
    optimizer: Optimizer, step: Step, columns: list[Column]
) -> StepGradients | Stale | Unfitted:
    """Explain the gradient at a step by those that were computed since the last one.

    Args:
        optimizer: whose step it is.
        step: what it was given.
        columns: gradients of its shapes.
    """
    if not columns:
        return Unfitted("no-gradient-before-step", NONE_BEFORE)
    # least squares with one NaN in it returns NaN for every coefficient
    if not (np.isfinite(step.gradient).all() and all(one.is_finite for one in columns)):
        return Unfitted("not-finite", NOT_FINITE)
    columns = [one for one in columns if one.gradient.any()]  # others tell nothing
    if not columns:
        return Unfitted("no-gradient-before-step", ZEROS)
    own = _fit(step, columns)
    # many combinations fit, as where all gradients are alike: the plainest one is taken, the same
    # coefficient for each of the last passes
    if own.is_exact and (own.is_degenerate or not own.is_told):
        window = _shortest(step, columns)
        if window is not None:
            return window
    if not own.is_told:
        return Unfitted("too-few-elements", ALIKE)
    if own.is_exact:
        return _window(step, columns, own)
    # of a step that is only seen as a change of the parameters, neither a decay nor momentum could
    # be told from the optimizer's own rule
    if step.noise is not None:
        return Unfitted("unexplained-gradient", NO_MULTIPLE)
    found = _stale(optimizer, step, columns) or _with_decay(step, columns)
    if found is not None:
        return found
    has_copies = any(one.copies for one in columns)
    return Unfitted("unexplained-gradient", NO_SUM_OF_FIRST if has_copies else NO_SUM)


def _stale(optimizer: Optimizer, step: Step, columns: list[Column]) -> Stale | None:
    """Explain a gradient with something of an earlier step in it."""
    last = [] if optimizer.last is None else [optimizer.last]
    for what, extra in (
        ("gradients of the window before are", optimizer.before),
        ("the gradient of the step before is", last),
    ):
        if not extra:
            continue
        of_both = _fit(step, [*columns, *extra])
        own = of_both.found[: len(columns)]
        earlier = of_both.found[len(columns) :]
        if of_both.is_exact and of_both.is_told and any(earlier):
            return Stale(what, is_all=not any(own))
    return None


def _fit(step: Step, columns: Sequence[Column], *more: Vector) -> LinearCombination:
    vectors = [*(column.gradient for column in columns), *more]
    # the step is no more precise than the coarsest gradient that went into it
    relative = max(RELATIVE[d] for d in {step.dtype, *(c.mark.dtype for c in columns)})
    return fit(
        step.shapes,
        vectors,
        step.gradient,
        relative=max(relative, 3e-5),
        noise=step.noise,
    )


def _window(
    step: Step, columns: list[Column], found: LinearCombination
) -> StepGradients | Unfitted:
    # coefficients that are known to 2% at best do not tell one count of items from the next
    if found.tolerance > 0.02:
        return Unfitted("too-few-elements", ALIKE)
    return StepGradients(
        step,
        columns,
        found.found[: len(columns)],
        found.tolerance,
    )


def _shortest(step: Step, columns: list[Column]) -> StepGradients | None:
    """Explain a gradient by columns of which some are combinations of others.

    All of them alike is tried first, then the shortest window at the end.
    """
    for first in (0, *range(len(columns) - 1, 0, -1)):
        # one coefficient for all is one column: their sum, which leaves least squares no choice
        some = columns[first:]
        total = sum((column.gradient for column in some), np.zeros_like(step.gradient))
        relative = max(RELATIVE[step.dtype], 3e-5)
        short = fit(
            step.shapes,
            [total],
            step.gradient,
            relative=relative,
            noise=step.noise,
        )
        if short.is_exact and short.found[0]:
            coefficients = [short.found[0]] * len(some)
            return StepGradients(
                step,
                some,
                coefficients,
                short.tolerance,
            )
    return None


def _with_decay(step: Step, columns: list[Column]) -> StepGradients | None:
    """Explain a gradient to which a multiple of the parameters was added."""
    if step.parameters is None or len(step.parameters) != len(step.gradient):
        return None
    found = _fit(step, columns, step.parameters)
    # the parameters are the last column
    *_, added = found.found
    tells = found.is_exact and found.is_told and not found.is_degenerate
    if not tells or not added or found.tolerance > 0.02:
        return None
    return StepGradients(
        step,
        columns,
        found.found[:-1],
        found.tolerance,
        added,
    )


def implicit_step(number: int, place: Place, columns: Sequence[Column], after: Column) -> Step:
    """Return the step that a change of the parameters is, where no optimizer is seen.

    The learning rate is not known, and so neither is the common factor of the coefficients.
    """
    first = columns[0]
    # the way that plain gradient descent goes: its change is the learning rate times the gradient
    change = first.parameters - after.parameters
    # the rounding of the parameters is that of their size, not of the change
    noise = 2 * EPS * np.abs(first.parameters)
    norms = np.array([np.abs(change[slices[0]]).max() for slices in segments(first.mark.shapes)])
    return Step(
        number,
        place,
        first.mark.shapes,
        first.mark.names,
        change,
        norms,
        None,
        first.mark.dtype,
        noise,
        is_scaled=False,
    )


def is_uneven(window: StepGradients) -> bool:
    """Return whether gradients have different coefficients in a window."""
    sizes = np.array([c for c in window.coefficients if c])
    return len(sizes) > 1 and not near(sizes, sizes.max(), window.tolerance)


def norms_alike(window: StepGradients) -> int:
    """Return how many gradients were cut to the norm of another one before they were added up."""
    sizes = np.array([c for c in window.coefficients if c])
    norms = np.array([column.norm for column in window.used])
    # clipping to a norm keeps the direction, and leaves shorter gradients as they are: all
    # coefficients the same, or a negative one, is something else
    if len(sizes) < 2 or (sizes <= 0).any() or near(sizes, sizes.max(), window.tolerance):
        return 0
    cut = sizes < sizes.max() * (1 - window.tolerance)
    limits = (sizes * norms)[cut]
    alike = cut.sum() > 1 and near(limits, limits[0], max(1e-3, window.tolerance))
    # a gradient that was not cut is no longer than the limit
    if not alike or not ((sizes * norms)[~cut] <= limits[0] * 1.01).all():
        return 0
    # one that is as long as the limit may have been cut as little as cannot be seen
    reached = (sizes * norms)[~cut] >= limits[0] * (1 - max(1e-3, window.tolerance))
    return int(cut.sum() + reached.sum()) - 1
