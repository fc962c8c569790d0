"""What stands in `.grad` at each optimizer step, in terms of the backward passes that arrived, for
1 to N ranks.

The events of all ranks are walked in lockstep. Each measured state of a `.grad` is explained by the
state before it: the same, reset, reduced over the ranks, or multiplied by one factor. What no such
event explains is an edit. So nothing is fitted, but for gradients that a program puts together by
hand.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain, compress, product
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gradcheck_suite.auditing.events import BY_HAND, FREE, NONE, Column, PassRecord, StepRecord
from gradcheck_suite.auditing.places import Place
from gradcheck_suite.auditing.vectors import (
    ELEMENTS,
    PROJECTIONS,
    MaskedElements,
    Vector,
    alike,
    distance,
    factor,
    is_finite,
    is_mostly,
    size,
)
from gradcheck_suite.core.comparison import FURTHER_ROUNDINGS, SMALLEST, UNIT_ROUNDOFF, growth

RELATIVE = {"float64": 1e-10, "float32": 3e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""Relative difference of a factor of `.grad`, by its dtype, that rounding explains."""
ZERO = np.zeros(ELEMENTS)
EARLIER = -1
"""In place of the index of a pass: any pass that an earlier step of the same optimizer has consumed."""
UNKNOWN = -2
"""In place of the index of a pass: something that no event explains."""
NEGLIGIBLE = 1e-6

NO_PASS: Mapping[tuple[int, int], float] = {}

Source = tuple[int, int]
"""A rank, and the index of a pass."""
Coefficients = Mapping[Source, float]
"""Of passes: one object for all parameters that have had the same arrivals, since most of them have."""


def arrays_only(column: Column) -> dict[int, Vector]:
    """Return the samples of a column, without what has none."""
    return {key: now for key, now in column.items() if isinstance(now, np.ndarray)}


def distinct(found: Iterable[Coefficients]) -> Iterable[Coefficients]:
    """Return each object once."""
    return {id(one): one for one in found}.values()


def near(a: float, b: float, tolerance: float) -> bool:
    """Return whether two numbers differ by no more than a share of the larger one."""
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


def fitted(columns: Vector, target: Vector) -> tuple[Vector, Vector, Vector] | None:
    """Fit a sum of columns to a target by least squares.

    None where several sums fit, or no element would tell.

    Args:
        columns: (elements, columns).
        target: (elements,).

    Returns:
        the coefficients (columns,), what is left over (elements,), and the standard errors of the
        coefficients where what is left over has one of 1 (columns,).
    """
    found, _, rank, _ = np.linalg.lstsq(columns, target, rcond=1e-7)
    solution = np.asarray(found, np.float64)
    if not len(columns) > len(solution) == rank:
        return None
    return (
        solution,
        target - columns @ solution,
        np.sqrt(np.diag(np.linalg.inv(columns.T @ columns))),
    )


@dataclass(frozen=True)
class Fit:
    """`.grad` as a sum of what arrived in each pass, by least squares.

    Attributes:
        passes: their indices.
        lost: those of them that were reset in some of the parameters.
        keys: of the parameters.
        coefficients: (passes,).
        bounds: (passes,) of the errors of the coefficients.
        is_exact: whether no more than rounding is left over.
        left: the share of `.grad` that is left over.
    """

    passes: Sequence[int]
    lost: Collection[int]
    keys: Sequence[int]
    coefficients: Vector
    bounds: Vector
    is_exact: bool
    left: float = 0.0

    @property
    def error(self) -> float:
        """Relative to the largest coefficient; infinite where there is none."""
        largest = size(self.coefficients)
        return size(self.bounds) / largest if largest else math.inf

    @property
    def is_identifiable(self) -> bool:
        """Whether rounding leaves a pass that is in the sum as much as another one apart from one
        that is not.
        """
        return not self.is_exact or self.error < 0.5

    @property
    def is_of_copies(self) -> bool:
        """Whether the program has put an edited `.grad` together from copies, and not from what a
        reset has left.

        What was reset is then seen in it.
        """
        found = zip(self.passes, np.abs(self.coefficients), self.bounds, strict=True)
        return any(c > bound for i, c, bound in found if i in self.lost)

    @property
    def is_plausible(self) -> bool:
        """Whether the largest coefficient is that of a sum, of a mean, or of a part of these.

        What stands in `.grad` beside, such as the parameters, may be like the gradients by itself.
        """
        return 0.5 / len(self.passes) <= size(self.coefficients) <= 2.0

    @property
    def is_blank(self) -> bool:
        """Whether no pass at all is seen in an edited `.grad`: noise may hide them, or something
        else stand there.
        """
        return not (np.abs(self.coefficients) > self.bounds).any()


@dataclass(frozen=True)
class RankSplit:
    """Which gradients of a step the ranks share.

    Attributes:
        keys: of the parameters whose gradients are the same on all ranks, or should be.
        unequal: those whose gradients are not the same.
        own: those that each rank has for itself.
        is_reduced: whether gradients are reduced over the ranks.
    """

    keys: list[int]
    unequal: Set[int]
    own: Set[int]
    is_reduced: bool


@dataclass(frozen=True)
class LeftOfLast:
    """What an edit has left of a `.grad` that is left of the last pass of a window alone.

    Attributes:
        varies: whether other elements were left in earlier windows.
        is_written: whether the program wrote to the gradient between the passes, too, and left all
            elements.
    """

    varies: bool
    is_written: bool


class State(NamedTuple):
    """What stands in one parameter's `.grad` on one rank.

    Attributes:
        sample: of it.
        coefficients: of which passes it is made.
        shard: whether each rank has another part of it.
    """

    sample: Vector = ZERO
    coefficients: Coefficients = NO_PASS
    shard: bool = False


@dataclass
class BackwardPass:
    """A pass on all ranks.

    Attributes:
        records: one for each rank.
        consumers: index of an optimizer -> the number of passes there were when it stepped on this
            one.
        reduced: whether `.grad` was reduced over the ranks after it, or what arrived in it.
        by_hooks: whether hooks of the program have reduced what arrived.
        arrived: key of a parameter -> a sample of what arrived in the pass, on the first rank.
    """

    records: Sequence[PassRecord]
    consumers: dict[int, int] = field(default_factory=dict)
    reduced: bool = False
    by_hooks: bool = False
    arrived: Mapping[int, Vector] = field(default_factory=dict)

    @property
    def site(self) -> Place:
        """Where backward was called, as the first rank has it."""
        return self.records[0].place

    @property
    def by_hand(self) -> bool:
        """Whether the program put the results into `.grad` itself."""
        return self.records[0].by_hand

    def has(self, keys: set[int]) -> bool:
        """Return whether something arrived at one of these parameters."""
        return any(keys & record.arrivals.keys() for record in self.records)


SAME = "same"
RESET = "reset"
REDUCED = "reduced"
FACTOR = "factor"
MASKED = "masked"
"""Some elements were set to 0, and the others are what they were."""
EDITED = "edited"
NOT_FINITE = "not finite"
WRITTEN = "written"
"""A result of `torch.autograd.grad`, or a multiple of one, stands there."""
UNEXPLAINED = EDITED, RESET, NOT_FINITE
"""What says nothing of the passes that stand in a `.grad`."""


@dataclass
class StepWindow:
    """What one optimizer stepped on.

    Attributes:
        optimizer: its index.
        number: of the program's call of a step among those of all optimizers.
        step: as the first rank has it.
        passes: index -> pass, of those that reached its parameters since its last step.
        keys: of its parameters.
        coefficients: key -> of which passes its `.grad` is made.
        factor: by which all of `.grad` was multiplied after the last pass; None where parameters
            differ.
        factor_error: how far the parameters' own factors are from it, relative, as by rounding.
        edit: `"reset"` (some parameters), `"all reset"`, `"free"`, `"by hand"`, or None.
        seen: index of a pass -> its consumers when this step came.
        first: whether it is the optimizer's first step.
        before: the number of passes at the optimizer's last step.
        local: parameters in whose `.grad` the last passes are the rank's own, where there are
            several ranks.
        null: what arrived there changed nothing that was sampled: it tells nothing.
        zero: those of `null` of which all elements were looked at: what arrived is exactly 0.
        not_finite: the passes with an arrival that was not finite.
        copies: whether the optimizer steps on copies of the parameters (master weights), for which
            these stand here.
        fit: of `.grad` where no event explains it; None where what arrived is not known.
        removed: parameters whose `.grad` was set to 0 after the last pass.
        kept_apart: the passes that stood in a `.grad` together, with their coefficients, when it
            was reset or edited.
        error: of coefficients that are fitted, relative to the largest one; 0 where none is.
        unclipped: by which all of `.grad` had been multiplied after the last pass when torch's
            clipping began; None where it did not, or parameters differ.
        misplaced: parameters that have the gradient of another one -> that one.
        factor_of_most: by which most elements were multiplied after the last pass, where others were
            edited; None where there is no such factor.
        edits_slightly: whether sampled elements alone might not have shown an edit after the last
            pass.
        masked: parameters of whose `.grad` elements were set to 0 between passes -> whether the same
            ones each time: whether none of these stands there after another pass of the window.
        left_of_last: parameters of whose `.grad` an edit after the last pass has left what that pass
            has reached, and nothing else.
        hidden: results of `torch.autograd.grad` that are too small beside others to be told.
    """

    optimizer: int
    number: int
    step: StepRecord
    passes: dict[int, BackwardPass]
    keys: list[int]
    coefficients: dict[int, Coefficients]
    factor: float | None
    edit: str | None
    seen: dict[int, dict[int, int]]
    first: bool
    before: int
    local: Collection[int]
    null: set[tuple[int, int, int]]
    zero: set[tuple[int, int, int]]
    not_finite: set[int]
    copies: bool = False
    fit: Fit | None = None
    removed: Sequence[int] = ()
    kept_apart: Sequence[Coefficients] = ()
    error: float = 0.0
    unclipped: float | None = None
    misplaced: Mapping[int, int] = field(default_factory=dict)
    factor_error: float = 0.0
    edits_slightly: bool = False
    factor_of_most: float | None = None
    masked: Mapping[int, bool] = field(default_factory=dict)
    left_of_last: Mapping[int, LeftOfLast] = field(default_factory=dict)
    hidden: Set[int] = frozenset()

    def slim(self) -> None:
        """Let go of what only the judgement of its sum needs: a window is kept, to be weighed with
        the others of the run.
        """
        if self.edit != BY_HAND:
            self.null = set()
            self.zero = set()
            self.coefficients = {}

    def has_only(self, arrivals: Set[tuple[int, int, int]]) -> bool:
        """Return whether all that arrived in it is among some arrivals: `null` or `zero`."""
        own = {*self.keys}
        for index, seen in self.passes.items():
            for rank, record in enumerate(seen.records):
                if any((rank, index, key) not in arrivals for key in own & record.arrivals.keys()):
                    return False
        return True

    @property
    def where(self) -> Place:
        """Where its last pass went backward, or else the step."""
        return self.passes[max(self.passes)].site if self.passes else self.step.place

    @property
    def is_reduced(self) -> bool:
        """Whether passes of several ranks stand in some `.grad`."""
        return any(len({rank for rank, _ in cs}) > 1 for cs in self.coefficients.values())

    @property
    def left(self) -> float:
        """By what `.grad` was multiplied after the last pass, beside what a GradScaler takes out.

        1 where none is.
        """
        return (self.factor or 1.0) * self._unscaled

    @property
    def _unscaled(self) -> float:
        return 1.0 if self.step.fused else self.step.scale or 1.0

    @property
    def divided(self) -> float | None:
        """The same without clipping; None where it is not known which part of it is clipping."""
        if self.unclipped is not None:
            return self.unclipped * self._unscaled
        return None

    def brought_by(self, weights: Mapping[int, float]) -> dict[int, Vector]:
        """Return the sum of what some passes have brought, on the first rank, with their weights.

        None of parameters of which some pass was not sampled as a whole.
        """
        found = dict[int, Vector]()
        for key in self.keys:
            arrived = [
                weight * self.passes[index].arrived[key]
                for index, weight in weights.items()
                if key in self.passes[index].arrived
            ]
            if arrived and all(len(one) == ELEMENTS + PROJECTIONS for one in arrived):
                found[key] = np.sum(arrived, axis=0)
        return found

    def coefficient_of(self, source: Source) -> float | None:
        """Return the coefficient of a pass, the median over the parameters that it reached.

        None where it has none.
        """
        every = (of_key.get(source, 0.0) for of_key in self.coefficients.values())
        found = [coefficient for coefficient in every if abs(coefficient) > 1e-9]
        return median(found) if found else None


class GradChange(NamedTuple):
    """What a measured `.grad` is of what stood there.

    Attributes:
        event: that happened to it.
        factor: by which it was multiplied.
        coefficients: of the passes.
        now: a sample of it.
    """

    event: str
    factor: float
    coefficients: Coefficients
    now: Vector


class Replay:
    """Walks the events of `ranks` ranks, and gives a window for each step.

    Attributes:
        passes: index -> pass, of those that may still matter.
        last: index of an optimizer -> the number of passes at its last step.
        of_rank: parameters that had other values on each rank at the first step.
        alike: of passes of several ranks, whether the same arrived on all of them -> how many.
        sparse: parameters at which something has arrived that no sampled element shows, as at the
            rows of an embedding, or of whose `.grad` elements are set to 0 between passes: their
            gradients have to be sampled as a whole.
    """

    def __init__(self, ranks: int, dtypes: dict[int, str]) -> None:
        self.ranks = ranks
        self.passes: dict[int, BackwardPass] = {}
        self.number_of_passes = 0
        self.last: dict[int, int] = {}
        self.of_rank: set[int] = set()
        self.alike: Counter[bool] = Counter()
        self.sparse: set[int] = set()
        self._call = -1
        self._before_call = 0
        self._at_last_step = 0
        self._dtypes = dtypes
        self._states: list[defaultdict[int, State]] = [defaultdict(State) for _ in range(ranks)]
        self._arrived: defaultdict[Source, dict[int, Vector]] = defaultdict(dict)
        self._null: set[tuple[int, int, int]] = set()
        self._zero: set[tuple[int, int, int]] = set()
        self._late: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self._zeroed: dict[tuple[int, int], tuple[npt.NDArray[np.bool_], bool]] = {}
        self._not_finite: set[int] = set()
        self._owners: defaultdict[int, set[int]] = defaultdict(set)
        self._copies: dict[int, int] = {}
        self._misplaced_copies: Mapping[int, int] = {}
        self._discarded: dict[frozenset[int], Coefficients] = {}
        self._of_last: deque[dict[int, str]] = deque(maxlen=MOST_ALIKE)

    def tolerance(self, key: int) -> float:
        """Return the relative difference that rounding explains in the `.grad` of a parameter."""
        return RELATIVE[self._dtype(key)]

    def _dtype(self, key: int) -> str:
        dtype = self._dtypes.get(key, "float32")
        return dtype if dtype in UNIT_ROUNDOFF else "float32"

    def _explain_all(
        self, rank: int, measured: Mapping[int, Vector], *, inside: bool
    ) -> dict[int, GradChange]:
        """Explain what stands in the `.grad` of several parameters.

        Args:
            rank: on which it was measured.
            measured: key of a parameter -> a sample of its `.grad`.
            inside: whether more passes of the window may follow: a factor then stays in the
                coefficients.
        """
        kept = self._kept(rank, measured)
        found = {
            key: (
                GradChange(
                    SAME,
                    1.0,
                    self._states[rank][key].coefficients,
                    now,
                )
                if key in kept
                else self._explain(rank, key, now, inside=inside)
            )
            for key, now in measured.items()
        }
        reduced = [one.factor for one in found.values() if one.event == REDUCED]
        unsure = found if reduced else {}
        for key, one in unsure.items():
            # two numbers are parallel: whether one of a single element was reduced or multiplied,
            # the others tell
            if one.event == FACTOR and (
                other := self._explain(rank, key, one.now, inside=inside, sure=True)
            ):
                found[key] = other if near(other.factor, float(np.median(reduced)), 1e-3) else one
        return found

    def _kept(self, rank: int, measured: Mapping[int, Vector]) -> set[int]:
        """Return the parameters in whose `.grad` every sampled element is what it was, finite, and
        not all are 0.
        """
        found = set[int]()
        for keys, now, then in self._together(rank, measured):
            same = (now == then).all(1) & np.isfinite(now).all(1) & now.any(1)
            found |= {key for key, is_same in zip(keys, same, strict=True) if is_same}
        return found

    def _together(
        self, rank: int, measured: Mapping[int, Vector]
    ) -> Iterator[tuple[list[int], Vector, Vector]]:
        """Yield parameters, what was measured in their `.grad`, and what stood there, as far as
        both are known.
        """
        states = self._states[rank]
        groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for key, now in measured.items():
            then = states[key].sample
            groups[len(now), len(then) if len(then) == len(now) or then.any() else 0].append(key)
        for (length, known), keys in groups.items():
            now = np.concatenate([measured[key] for key in keys]).reshape(-1, length)
            then = (
                np.concatenate([states[key].sample for key in keys]).reshape(-1, known)
                if known
                else np.zeros_like(now)
            )
            both = min(length, known or length)
            yield keys, now[:, :both], then[:, :both]

    def _explain(
        self, rank: int, key: int, now: Vector, *, inside: bool, sure: bool = False
    ) -> GradChange:
        """Explain a measured `.grad`.

        `sure` takes it for reduced even where it may only have been multiplied.
        """
        state = self._states[rank][key]
        tolerance = self.tolerance(key)
        cut, then = alike(now, state.sample)
        if not is_finite(cut):
            return GradChange(
                NOT_FINITE,
                1.0,
                {},
                now,
            )
        is_empty = not size(cut)
        if is_empty and (size(then) or not state.coefficients):
            return GradChange(
                RESET,
                0.0,
                {},
                now,
            )
        if is_empty or distance(then, cut) <= 1e-3 * tolerance:
            return GradChange(
                SAME,
                1.0,
                state.coefficients,
                now,
            )
        if self.ranks > 1 and not state.shard:
            found = self._reduction(
                key,
                cut,
                then,
                tolerance,
                sure=sure,
            )
            if found is not None:
                return GradChange(REDUCED, *found, now)
        # a parameter of few elements may be a multiple of anything
        tells = bool(np.count_nonzero(cut[:ELEMENTS]) >= FEWEST)
        results = self._results(rank, key, state)
        for index, result in results.items():
            written = factor(now, result, tolerance)
            if written is not None and (tells or near(written, 1.0, 1e-3 * tolerance)):
                return GradChange(
                    WRITTEN,
                    1.0,
                    {(rank, index): written},
                    now,
                )
        multiplied = factor(cut, then, tolerance)
        is_edit = (
            multiplied is not None
            and not inside
            and self._is_slight_edit(key, multiplied * then, cut)
        )
        if multiplied is not None and not is_edit and (tells or not results):
            scaled = {source: c * multiplied for source, c in state.coefficients.items()}
            return GradChange(
                FACTOR,
                multiplied,
                scaled if inside else state.coefficients,
                now,
            )
        return GradChange(
            EDITED,
            1.0,
            {(rank, UNKNOWN): 1.0},
            now,
        )

    def _is_slight_edit(self, key: int, multiple: Vector, now: Vector) -> bool:
        """Return whether a `.grad` that looks multiplied is an edit that is small beside it.

        Whole samples tell more than roundings of a few products. In 16 bits these are as large as
        what `tolerance` lets pass, and several ranks may reduce in another order.
        """
        dtype = self._dtype(key)
        if (
            self.ranks > 1
            or len(now) <= ELEMENTS
            or UNIT_ROUNDOFF[dtype] > UNIT_ROUNDOFF["float32"]
        ):
            return False
        return distance(multiple, now) > growth(FURTHER_ROUNDINGS, dtype)

    def _results(self, rank: int, key: int, state: State) -> dict[int, Vector]:
        """Return what `torch.autograd.grad` gave for a parameter after the last pass that stands in
        its `.grad`, the newest first.
        """
        last = max((index for _, index in state.coefficients), default=-1)
        later = {index: self._result(rank, index, key) for index in self.passes if index > last}
        return {i: later[i] for i in reversed(later) if later[i] is not None}  # type: ignore[misc]

    def _result(self, rank: int, index: int, key: int) -> Vector | None:
        """Return what `torch.autograd.grad` gave for a parameter in a pass, or None."""
        return self._arrived[rank, index].get(key) if self.passes[index].by_hand else None

    def _reduction(
        self, key: int, now: Vector, then: Vector, tolerance: float, *, sure: bool
    ) -> tuple[float, Coefficients] | None:
        """Explain a state as the sum or the mean of the states of all ranks.

        Covers a reduction at every pass, too.
        """
        states = [ranked[key] for ranked in self._states]
        total = np.sum([s.sample[: len(now)] for s in states], axis=0)
        found = factor(now, total, 20 * tolerance)
        off = 1e-3
        if found is None:
            # a hook of DDP may compress what it reduces to 16 bits
            found = factor(now, total, RELATIVE["bfloat16"])
            off = 1e-2
        divisor = (
            None
            if found is None
            else next((d for d in (self.ranks, 1) if near(found, 1 / d, off)), None)
        )
        if found is None or size(total) < 1e-30 or (divisor is None and off > 1e-3):
            return None
        if (
            not sure
            and factor(now, then, tolerance) is not None
            and not near(found, 1 / self.ranks, 1e-3)
        ):
            return None
        return (1.0 if divisor else found * self.ranks), self._united(key, divisor or self.ranks)

    def _united(self, key: int, divisor: float) -> Coefficients:
        """Return of which passes the `.grad` of all ranks are made together, divided by a number."""
        united: defaultdict[Source, float] = defaultdict(float)
        for state in (ranked[key] for ranked in self._states):
            for source, coefficient in state.coefficients.items():
                united[source] += coefficient / divisor
        return dict(united)

    def on_pass(self, records: Sequence[PassRecord]) -> int:
        """Take a pass of all ranks, and return its index."""
        index = self.number_of_passes
        last = self.passes.get(self.number_of_passes - 1)
        self.number_of_passes += 1
        self.passes[index] = BackwardPass(records)
        self._note_alike(records)
        # all ranks are measured before any is changed: a reduction is a sum over them
        explained = [
            self._explain_masked(
                rank,
                self._explain_all(rank, arrays_only(record.was), inside=True),
                arrays_only(record.masked),
            )
            for rank, record in enumerate(records)
        ]
        for rank, ones in enumerate(explained):
            self._set_states(rank, ones)
            if last is not None and any(one.event == REDUCED for one in ones.values()):
                last.reduced = True
        for rank, record in enumerate(records):
            self._take_arrivals(rank, index, record)
        seen = self.passes[index]
        seen.arrived = self._arrived.get((0, index), {})
        seen.by_hooks = self._is_reduced_by_hooks(index, records)
        seen.reduced = seen.reduced or seen.by_hooks
        # hundreds of windows are kept: what arrived is in the states now, and only where it arrived
        # is asked for
        self.passes[index].records = [
            replace(
                record,
                was={},
                masked={},
                now={},
                raw={},
            )
            for record in records
        ]
        return index

    def _explain_masked(
        self, rank: int, found: Mapping[int, GradChange], told: Mapping[int, Vector]
    ) -> Mapping[int, GradChange]:
        """Return the explanations, with the gradients of which elements were set to 0 between passes.

        Passes stand there as before: whether the same elements were set to 0 after each of them, the
        step tells.

        Args:
            rank: on which it was measured.
            found: key of a parameter -> what is explained by samples.
            told: key of a parameter -> what `MaskWatch` tells, of many more elements.
        """
        states = self._states[rank]
        explained = dict(found)
        for key, one in found.items():
            if key in told:
                is_masked = _is_masked(told[key]) and one.event not in (REDUCED, WRITTEN)
            else:
                is_masked = one.event == EDITED and self._looks_masked(rank, key, one.now)
            if is_masked:
                self.sparse.add(key)
                explained[key] = one._replace(event=MASKED, coefficients=states[key].coefficients)
        return explained

    def _looks_masked(self, rank: int, key: int, now: Vector) -> bool:
        """Return whether the sampled elements were set to 0, or are what they were, and note which.

        A program may begin to set elements to 0 at any step: then no more of them were kept before
        the first time.
        """
        state = self._states[rank][key]
        now = now[:ELEMENTS]
        then = state.sample[:ELEMENTS]
        elements = MaskedElements.of(then, now)
        if elements.is_mask:
            sums = np.cumsum(self._arrivals_in(rank, key, state.coefficients), axis=0)
            stood = sums[:-1].any(axis=0)
            self._zeroed[rank, key] = elements.zeroed, bool((elements.zeroed & stood).any())
        return elements.is_mask

    def _arrivals_in(self, rank: int, key: int, passes: Coefficients) -> Vector:
        """Return (passes, elements), what some passes have brought to a parameter, in their order."""
        found = [self._arrived[rank, index].get(key, ZERO) for _, index in sorted(passes)]
        return np.array([one[:ELEMENTS] for one in found]).reshape(-1, ELEMENTS)

    def _masked_in(self, steps: Sequence[StepRecord]) -> dict[int, bool]:
        """Return the parameters of whose `.grad` elements were set to 0 between passes, on some rank,
        and whether the same ones each time.
        """
        found = dict[int, bool]()
        for rank, step in enumerate(steps):
            for key, told in arrays_only(step.masked).items():
                if _is_masked(told):
                    returns = told[1]
                    found[key] = found.get(key, True) and not returns
            for key, now in arrays_only(step.gradients).items():
                zeroed, returned = self._zeroed.pop((rank, key), (ZERO, False))
                if zeroed.any():
                    returns = returned or bool(now[:ELEMENTS][zeroed].any())
                    found[key] = found.get(key, True) and not returns
        return found

    def _note_alike(self, records: Sequence[PassRecord]) -> None:
        """Note whether the same arrived on all ranks."""
        own, *others = (arrays_only(record.now) for record in records)
        is_plain = not any(record.shards or record.hooked for record in records)
        if others and is_plain and any(map(size, own.values())):
            self.alike[all(_are_equal(own, one) for one in others)] += 1

    def _set_states(self, rank: int, explained: Mapping[int, GradChange]) -> None:
        """Set what stands in each `.grad` before a pass."""
        states = self._states[rank]
        self._discard(rank, [key for key, one in explained.items() if one.event == RESET])
        for key, one in explained.items():
            states[key] = State(one.now, one.coefficients, states[key].shard)

    def _take_arrivals(self, rank: int, index: int, record: PassRecord) -> None:
        """Take what has arrived in a pass of a rank."""
        if record.by_hand:
            self._arrived[rank, index] = arrays_only(record.now)
            return
        fresh = [key for key, before in record.arrivals.items() if before == NONE]
        self._discard(rank, fresh)
        for key in fresh:
            self._states[rank][key] = State()
        for key in record.arrivals.keys() - record.now.keys():
            self._late[rank, key].append(index)
        self._add(rank, index, record)

    def _is_reduced_by_hooks(self, index: int, records: Sequence[PassRecord]) -> bool:
        """Return whether the program's hooks have reduced a pass: on all ranks the same arrived, and
        it was not the same before the hooks.
        """
        first, *others = (arrays_only(record.raw) for record in records)
        keys = set.intersection(*map(set, (first, *others)))
        own, *arrived = (self._arrived.get((rank, index), {}) for rank in range(self.ranks))
        if not others or not keys or not all(keys <= one.keys() for one in (own, *arrived)):
            return False
        # hooks have left the same on all ranks, of what was not the same before them
        return self.are_alike(own, arrived, keys) and not self.are_alike(first, others, keys)

    def are_alike(
        self, one: Mapping[int, Vector], others: Iterable[Mapping[int, Vector]], keys: Iterable[int]
    ) -> bool:
        """Return whether what has arrived at parameters on one rank, or in one pass, has in others."""
        for key in keys:
            allowed = self.tolerance(key) * size(one[key])
            for other in others:
                own, its = alike(one[key], other[key])
                if not size(own - its) <= allowed:
                    return False
        return True

    def _add(self, rank: int, index: int, record: PassRecord) -> None:
        """Add what has arrived in a pass to what stands in each `.grad`."""
        states = self._states[rank]
        made = dict[Any, tuple[Coefficients, Coefficients]]()
        self.passes[index].reduced = self.passes[index].reduced or bool(record.shards)
        for keys, now, then in self._together(rank, arrays_only(record.now)):
            if not np.isfinite(now).all():
                self._not_finite.add(index)
            with np.errstate(invalid="ignore"):
                differences = now - then
            self._arrived[rank, index] |= zip(keys, differences, strict=True)
            is_whole = differences.shape[1] > ELEMENTS
            shown = np.any(differences[:, :ELEMENTS], axis=1)
            arrived = np.any(differences, axis=1) if is_whole else shown
            if not shown.all():
                # without projections nobody knows whether something has arrived: they are taken from
                # now on
                may_be_unseen = ~shown & arrived if is_whole else ~shown
                self.sparse.update(compress(keys, may_be_unseen))
            for key, is_any in zip(keys, arrived.tolist(), strict=True):
                old = states[key].coefficients
                divisor = record.shards.get(key)
                together = (*self._late.pop((rank, key), ()), index) if self._late else (index,)
                if not is_any:
                    # a branch that begins at zero: whether it was reset cannot be told from it
                    of_key = {(rank, i, key) for i in together}
                    self._null |= of_key
                    if is_whole:
                        self._zero |= of_key
                    added = old
                elif (asked := (id(old), divisor, together)) in made:
                    added = made[asked][0]
                else:
                    sources = product(range(self.ranks), together) if divisor else [(rank, index)]
                    added = {
                        **old,
                        **{
                            source: old.get(source, 0.0) + 1.0 / (divisor or 1.0)
                            for source in sources
                        },
                    }
                    made[asked] = added, old  # as long as the old one is kept, no other has its id
                states[key] = State(record.now[key], added, bool(divisor))  # type: ignore[arg-type]

    def _discard(self, rank: int, keys: Iterable[int]) -> None:
        """Note which passes stood together in a `.grad` that was reset: the program may have kept
        it elsewhere.
        """
        for coefficients in distinct(self._states[rank][key].coefficients for key in keys):
            kept = {source: c for source, c in coefficients.items() if source[1] >= 0}
            self._discarded.setdefault(frozenset(index for _, index in kept), kept)

    def _slim(self, seen: BackwardPass) -> None:
        """Let go of what a pass has that only its own windows need: they are kept, to be weighed with
        the others of the run, and of thousands of parameters each would take megabytes.
        """
        seen.arrived = {}
        for record in seen.records:
            # most passes reach the same parameters as the one before
            record.arrivals = next(
                (one for one in self._of_last if one == record.arrivals), record.arrivals
            )
            self._of_last.append(record.arrivals)

    def on_gap(self) -> None:
        """Forget what stood in `.grad`: passes and steps follow that were not recorded."""
        for seen in self.passes.values():
            self._slim(seen)
        for kept in (
            self.passes,
            self._arrived,
            self._null,
            self._zero,
            self._not_finite,
            self._late,
            self._zeroed,
            self._discarded,
        ):
            kept.clear()
        for states in self._states:
            states.clear()
        self._before_call = self._at_last_step = self.number_of_passes

    def on_unknown(self, steps: Sequence[StepRecord]) -> None:
        """Take a step of all ranks whose window was not recorded: all that stands there is of an
        earlier window.
        """
        optimizer = steps[0].optimizer
        for rank, step in enumerate(steps):
            for key, now in step.gradients.items():
                of = self._copies.get(key, key)
                stands = isinstance(now, np.ndarray) and bool(size(now))
                self._states[rank][of] = (
                    State(np.asarray(now), {(rank, EARLIER): 1.0}) if stands else State()
                )
                self._owners[of].add(optimizer)
        for seen in self.passes.values():
            if seen.has({self._copies.get(key, key) for key in steps[0].gradients}):
                seen.consumers.setdefault(optimizer, self.number_of_passes)
        self.last[optimizer] = self._at_last_step = self.number_of_passes
        self._forget()

    def on_step(self, steps: Sequence[StepRecord]) -> StepWindow:
        """Take a step of all ranks."""
        is_of_copies = self._are_copies(steps[0])
        unwritten = set[int]()
        if is_of_copies:
            # handed over once: the parameter's own `.grad` is another tensor since it was set to
            # None
            unwritten = {self._copies.get(key, key) for key in steps[0].unwritten}
            steps = [self._of_parameters(step) for step in steps]
        first = steps[0]
        found = self._explain_all(0, arrays_only(first.gradients), inside=False)
        split = self._split_by_ranks(steps, found)
        explained = {key: found[key] for key in split.keys if key in found}
        if split.is_reduced:
            self._unite_edited(explained, split.unequal)
        explained = self._replaced(explained, unwritten)
        window = self._window(first, split, is_of_copies=is_of_copies)
        window.unclipped = self._before_clipping(first)
        window.masked = self._masked_in(steps)
        window.left_of_last = _left_of_last(first)
        self._fill(window, explained)
        window.misplaced = (
            self._misplaced_copies if is_of_copies else self._misplaced(window.passes, explained)
        )
        self._leave(window, steps)
        return window

    def _split_by_ranks(
        self, steps: Sequence[StepRecord], found: Mapping[int, GradChange]
    ) -> RankSplit:
        """Return which gradients of a step are the same on all ranks.

        Args:
            steps: of each rank.
            found: what the gradients of the first one are.
        """
        self.of_rank |= self._unequal([step.values for step in steps])
        unequal = self._unequal([step.gradients for step in steps])
        is_reduced = any(one.event == REDUCED for one in found.values())
        # a parameter that each rank has for itself, such as an expert, is not reduced
        own = unequal & self.of_rank if is_reduced else set[int]()
        keys = [key for key in steps[0].gradients if key not in own]
        return RankSplit(keys, unequal, own, is_reduced)

    def _window(self, step: StepRecord, split: RankSplit, *, is_of_copies: bool) -> StepWindow:
        """Return the window that a step ends, of which nothing is explained yet."""
        optimizer = step.optimizer
        before = self.last.get(optimizer, 0)
        keys = {*split.keys}
        members = {i: p for i, p in self.passes.items() if i >= before and p.has(keys)}
        late = [(rank, key) for rank, key in self._late if key in step.gradients]
        for place in late:
            del self._late[place]
        return StepWindow(
            optimizer=optimizer,
            number=step.call,
            step=step,
            passes=members,
            keys=split.keys,
            coefficients={},
            factor=1.0,
            edit=None,
            seen={i: dict(p.consumers) for i, p in members.items()},
            first=optimizer not in self.last,
            before=before,
            local=[key for _, key in late] or split.unequal - split.own,
            null={n for n in self._null if n[1] in members},
            zero={n for n in self._zero if n[1] in members},
            not_finite=self._not_finite & members.keys(),
            copies=is_of_copies,
        )

    def _arrived_in_all(
        self, passes: Mapping[int, BackwardPass], keys: Iterable[int]
    ) -> Mapping[int, Vector]:
        """Return the sum of what has arrived at parameters in some passes."""
        sums = dict[int, Vector]()
        for key in keys:
            several = [self._arrived[0, i][key] for i in passes if key in self._arrived[0, i]]
            # a pass that is sampled as a whole has projections beside the elements
            length = min(map(len, several), default=0)
            if length:
                sums[key] = np.sum([one[:length] for one in several], axis=0)
        return sums

    def _misplaced(
        self, passes: Mapping[int, BackwardPass], found: Mapping[int, GradChange]
    ) -> Mapping[int, int]:
        """Return the parameters whose `.grad` is what has arrived at another one in all passes.

        Several have exchanged theirs, or some have a copy: a multiple of another one's may be the
        program's own.
        """
        edited = {key: one.now for key, one in found.items() if one.event == EDITED}
        sums = self._arrived_in_all(passes, found if edited else ())
        of = dict[int, int]()
        for key, now in edited.items():
            alike = [
                other
                for other, total in sums.items()
                if np.count_nonzero(total[:ELEMENTS]) >= FEWEST
                and factor(now, total, 10 * self.tolerance(key)) is not None
            ]
            if len(alike) == 1 and alike[0] != key:
                of[key] = alike[0]
        if len(of) > 1 and len({*of.values()}) == len(of):
            return of
        return {
            key: other
            for key, other in of.items()
            if other in found
            and other not in edited
            and near(
                factor(edited[key], sums[other], 10 * self.tolerance(key)) or 0.0,
                1.0,
                self.tolerance(key),
            )
        }

    def _of_parameters(self, step: StepRecord) -> StepRecord:
        """Return a step on copies as one on the parameters that they stand for."""
        of = self._copies
        return replace(step, gradients={of.get(key, key): g for key, g in step.gradients.items()})

    def _unite_edited(self, found: Mapping[int, GradChange], unequal: Collection[int]) -> None:
        """Take what is alike on all ranks for reduced, where an edit is all that is seen.

        It was compressed to less than 16 bits, or to a matrix of low rank.
        """
        states = self._states[0]
        for key, one in found.items():
            if one.event == EDITED and key not in unequal:
                united = self._united(key, self.ranks)
                states[key] = states[key]._replace(coefficients=united)

    def _replaced(
        self, found: Mapping[int, GradChange], unwritten: Collection[int]
    ) -> dict[int, GradChange]:
        """Return the explanations, with what was written or handed over in place of what stood
        there.
        """
        taken = dict(found)
        for key, one in found.items():
            if one.event == WRITTEN:  # what it replaces is in no step
                self._states[0][key] = State(one.now, one.coefficients)
            elif one.event in (EDITED, FACTOR) and key in unwritten:
                earlier = {(0, EARLIER): 1.0}
                taken[key] = one._replace(event=SAME, factor=1.0, coefficients=earlier)
        return taken

    def _before_clipping(self, step: StepRecord) -> float | None:
        """Return by which factor all of `.grad` had been multiplied when clipping began."""
        before = {
            key: now
            for key, now in arrays_only(step.before_clipping).items()
            if self._states[0][key].coefficients
        }
        found = self._explain_all(0, before, inside=False).values()
        if any(one.event not in (SAME, FACTOR) for one in found):
            return None
        factors = [one.factor for one in found]
        common = median(factors) if factors else 0.0
        tolerance = 10 * max(map(self.tolerance, before), default=0.0)
        return common if factors and all(near(f, common, tolerance) for f in factors) else None

    def _are_copies(self, step: StepRecord) -> bool:
        """Return whether an optimizer steps on copies of parameters, and note which parameter each
        one stands for.

        What is given to a copy is what stood in the `.grad` of its parameter: in float32, or
        divided by a number that all share. Copies are in the order of the parameters, which tells
        those of one element apart.
        """
        given = False
        for key, now in step.gradients.items():
            if not isinstance(now, np.ndarray) or not size(now):
                continue
            given = True
            if any(
                key in record.arrivals
                for record in chain.from_iterable(seen.records for seen in self.passes.values())
            ):
                return False
            if key not in self._copies:
                taken = {*self._copies.values(), *self._owners}
                states = (
                    (k, state.sample) for k, state in self._states[0].items() if k not in taken
                )
                found = next(
                    (k for k, then in states if factor(now, then, COPIED) is not None), None
                )
                if found is None:
                    return False
                self._copies[key] = found
        if step.values and given:
            self._misplaced_copies = self._exchanged(arrays_only(step.values))
        return given

    def _exchanged(self, values: Mapping[int, Vector]) -> Mapping[int, int]:
        """Return the parameters whose copies are given another one's gradient.

        A copy has the values of its parameter, rounded.
        """
        of = dict[int, int]()
        for copy, given in self._copies.items():
            own = [
                key
                for key, value in values.items()
                if key not in self._copies
                and copy in values
                and len(value) == len(values[copy])
                and np.count_nonzero(value[:ELEMENTS]) >= FEWEST
                and distance(value, values[copy]) <= COPIED_VALUES
            ]
            if len(own) == 1 and own[0] != given:
                of[own[0]] = given
        return of if {*of} == {*of.values()} else {}

    def _unequal(self, of_ranks: Sequence[Column]) -> set[int]:
        """Return the parameters of which the ranks have different samples.

        Of a shard each has a part of its own.
        """
        found = set[int]()
        own, *others = map(arrays_only, of_ranks)
        for other in others:
            for key in own.keys() & other.keys():
                now, then = alike(own[key], other[key])
                if not self._states[0][key].shard and size(now - then) > self.tolerance(key) * size(
                    now
                ):
                    found.add(key)
        return found

    def _fill(self, window: StepWindow, found: Mapping[int, GradChange]) -> None:
        """Set the coefficients, the common factor and the edit of a window."""
        factors = self._factors(found)
        kept = self._coefficients(window, found)
        common = _common(factors)
        off = self._off(factors, common)
        lost = {key: self._lost_in(window, key) for key in found}
        # what the program kept elsewhere can have come back only where a pass was reset
        keys = [key for key, passes in lost.items() if passes]
        may_be = self._may_be_put_together(window, found, factors, off=off, lost=keys)
        window.hidden = self._hidden_in(window, kept)
        window.edits_slightly = self._may_be_unseen(found, off)
        if may_be and not (off and self._is_of_some_elements(found, keys or off)):
            fitted_keys = {key: found[key] for key in keys or found}
            window.fit = self._fit(
                window, fitted_keys, set(chain.from_iterable(lost[key] for key in keys))
            )
            if (
                not off
                and window.fit
                and (not window.fit.is_identifiable or window.fit.is_of_copies)
            ):
                off = list(factors)
        self._set_groups(window, kept)
        fit = self._fit_by_hand(window, found, off)
        if fit is not None:
            window.edit = BY_HAND
            window.error = fit.error
            window.coefficients = {**kept, **self._of_fit(fit)}
            return
        window.coefficients = kept
        _set_edit(window, factors, common, off)
        if window.factor != 1.0:
            # no fit of rounded elements tells a factor better than one of them is rounded
            rounding = (UNIT_ROUNDOFF[self._dtype(key)] for key in factors)
            window.factor_error = max(window.factor_error, max(rounding, default=0.0))
        if window.edit == FREE:
            window.factor_of_most = self._factor_of_most(found)

    def _hidden_in(self, window: StepWindow, kept: Mapping[int, Coefficients]) -> set[int]:
        """Return the results of `torch.autograd.grad` that rounding hides beside others, wherever
        these are seen.
        """
        results = {index: seen for index, seen in window.passes.items() if seen.by_hand}
        keys = [key for key, coefficients in kept.items() if coefficients]
        hidden = set[int]()
        for index, seen in results.items():
            others = [other for i, other in results.items() if i != index]
            if others and not any(self._is_shown(key, seen, others) for key in keys):
                hidden.add(index)
        return hidden

    def _is_shown(self, key: int, seen: BackwardPass, others: Iterable[BackwardPass]) -> bool:
        """Return whether what a pass has brought to a parameter is more than the rounding of others."""
        if key not in seen.arrived:
            return False
        largest = max(size(other.arrived.get(key, ZERO)) for other in others)
        return size(seen.arrived[key]) > 2 * self.tolerance(key) * largest

    def _factors(self, found: Mapping[int, GradChange]) -> dict[int, float | None]:
        """Return by what the `.grad` of each parameter was multiplied after the last pass.

        None where it was edited.
        """
        factors: dict[int, float | None] = {}
        for key, one in found.items():
            stood = bool(self._states[0][key].coefficients)
            if one.event != NOT_FINITE and (stood or one.event != RESET):
                factors[key] = None if one.event == EDITED else one.factor
        return factors

    def _coefficients(
        self, window: StepWindow, found: Mapping[int, GradChange]
    ) -> dict[int, Coefficients]:
        """Return of which passes each `.grad` is made, as far as no fit says otherwise."""
        states = self._states[0]
        kept = {
            key: states[key].coefficients if one.event in UNEXPLAINED else one.coefficients
            for key, one in found.items()
        }
        for key, one in found.items():
            # what a program has written there in place of an earlier step's is not known
            if one.event == NOT_FINITE and self._is_by_hand_alone(window, key):
                kept[key] = {}
        edited = {key: one for key, one in found.items() if one.event == EDITED}
        sources = set[Source]().union(*(kept[key] for key in edited))
        if self._still_stands(edited, _beside(window, sources)):
            return kept
        # written over: what an earlier step has left there is gone
        for key in edited:
            kept[key] = {s: c for s, c in kept[key].items() if s[1] >= window.before}
        return kept

    def _is_by_hand_alone(self, window: StepWindow, key: int) -> bool:
        """Return whether no pass of a window has arrived in a `.grad`, and results of
        `torch.autograd.grad` may have been put there.
        """
        of_window = [s for s in self._states[0][key].coefficients if s[1] in window.passes]
        return not of_window and any(self._result(0, i, key) is not None for i in window.passes)

    def _off(self, factors: Mapping[int, float | None], common: float) -> list[int]:
        """Return the parameters that have another factor than the common one, or none."""
        tolerance = 10 * max(map(self.tolerance, factors), default=RELATIVE["float32"])
        return [key for key, f in factors.items() if f is None or not near(f, common, tolerance)]

    def _may_be_put_together(
        self,
        window: StepWindow,
        found: Mapping[int, GradChange],
        factors: Mapping[int, float | None],
        *,
        off: Sequence[int],
        lost: Sequence[int],
    ) -> bool:
        """Return whether a `.grad` may be a sum that the program has made itself."""
        if self.ranks > 1 or not window.passes:
            return False
        if off or not lost:
            return bool(off)
        return not self._is_multiple({key: found[key] for key in factors}, _common(factors))

    def _fit_by_hand(
        self, window: StepWindow, found: Mapping[int, GradChange], off: Sequence[int]
    ) -> Fit | None:
        """Return the fit of a `.grad` that the program has put together, or None."""
        fit = window.fit
        if fit is None or not fit.is_exact or not fit.is_identifiable:
            return None
        # an edit within rounding of what was left after a reset is no sum made by hand
        if fit.lost and not fit.is_of_copies:
            return None
        return fit

    def _is_of_some_elements(self, found: Mapping[int, GradChange], keys: Sequence[int]) -> bool:
        """Return whether an edit has left most elements of some parameters as they stood, which a
        sum that is made anew does not.
        """
        states = self._states[0]
        now = np.concatenate([found[key].now[:ELEMENTS] for key in keys])
        return is_mostly(now, np.concatenate([states[key].sample[:ELEMENTS] for key in keys]))

    def _factor_of_most(self, found: Mapping[int, GradChange]) -> float | None:
        """Return by which factor most of the sampled elements were multiplied, None for none.

        An edit of few elements, such as clipping them, leaves the division before it in the others.
        """
        states = self._states[0]
        then = np.concatenate([states[key].sample[:ELEMENTS] for key in found])
        now = np.concatenate([one.now[:ELEMENTS] for one in found.values()])
        stood = then != 0
        if np.count_nonzero(stood) < FEWEST:
            return None
        factors = now[stood] / then[stood]
        common = float(np.median(factors))
        unit = max(UNIT_ROUNDOFF[self._dtype(key)] for key in found)
        is_common = np.abs(factors - common) <= FURTHER_ROUNDINGS * unit * abs(common)
        return common if 2 * np.count_nonzero(is_common) > len(factors) else None

    def _may_be_unseen(self, found: Mapping[int, GradChange], off: Sequence[int]) -> bool:
        """Return whether another edit of the kind may leave all sampled elements as they stood, but
        for one factor.
        """
        edited = [key for key in off if found[key].event == EDITED]
        if not edited:
            return False
        states = self._states[0]
        looks_multiplied = [
            factor(
                found[key].now[:ELEMENTS],
                states[key].sample[:ELEMENTS],
                self.tolerance(key),
            )
            is not None
            for key in edited
        ]
        return all(looks_multiplied) or self._is_of_some_elements(found, edited)

    def _of_fit(self, fit: Fit) -> dict[int, Coefficients]:
        """Return the coefficients of the passes that a fit has found, by parameter."""
        pairs = list(zip(fit.passes, map(float, fit.coefficients), strict=True))
        return {
            key: {(0, i): c for i, c in pairs if key in self._arrived[0, i]} for key in fit.keys
        }

    def _still_stands(
        self, edited: Mapping[int, GradChange], beside: Iterable[BackwardPass]
    ) -> bool:
        """Return whether what stood in some `.grad` is still a part of them, or nothing tells.

        Args:
            edited: the gradients.
            beside: passes that may be in them, too.
        """
        if not edited:
            return True
        then = np.concatenate([self._states[0][key].sample[:ELEMENTS] for key in edited])
        now = np.concatenate([one.now[:ELEMENTS] for one in edited.values()])
        arrived = [
            np.concatenate([seen.arrived.get(key, ZERO)[:ELEMENTS] for key in edited])
            for seen in beside
        ]
        others = [one for one in arrived if one.any()]
        columns = [then, *others] if len(now) > 2 * len(others) + FEWEST else [then]
        found = fitted(np.stack(columns, axis=1), now)
        if found is None or np.count_nonzero(then) < FEWEST:
            return False
        shares, left, spreads = found
        rest = np.sqrt((left * left).sum() / (len(left) - len(columns)))
        return bool(abs(shares[0]) > SIGNIFICANT * rest * spreads[0])

    def _lost_in(self, window: StepWindow, key: int) -> list[int]:
        """Return the passes that arrived at a parameter and that no event has left in its `.grad`."""
        standing = {
            index
            for (_, index), c in self._states[0][key].coefficients.items()
            if abs(c) > NEGLIGIBLE
        }
        missing = [i for i in window.passes if i not in standing]
        return [i for i in missing if key in self._arrived[0, i] and (0, i, key) not in window.null]

    def _set_groups(self, window: StepWindow, kept: Mapping[int, Coefficients]) -> None:
        """Set which passes stood in `.grad` together."""
        groups = {
            **self._discarded,
            **{frozenset(i for _, i in cs): cs for cs in distinct(kept.values())},
        }
        groups |= {
            frozenset({i}): {(0, i): 1.0} for i, seen in window.passes.items() if seen.by_hand
        }
        # a parameter that some of the passes do not reach has fewer of them
        own = [one for one in groups if one and one <= window.passes.keys()]
        window.kept_apart = [groups[one] for one in own if not any(one < other for other in own)]

    def _is_multiple(self, found: Mapping[int, GradChange], common: float) -> bool:
        """Return whether each element is the common multiple of what stood there, and that by no
        accident.

        Of a sum, the largest element alone may hide that the others are none; and of few elements,
        any sum may be one.
        """
        number = 0
        largest = 0.0
        for keys, now, then in self._together(
            0, {key: one.now[:ELEMENTS] for key, one in found.items()}
        ):
            dtypes = list(map(self._dtype, keys))
            # of a product or two
            rounding = np.array([2 * UNIT_ROUNDOFF[dtype] for dtype in dtypes])
            allowed = (
                rounding[:, None] * np.abs(now)
                + np.array([SMALLEST[dtype] for dtype in dtypes])[:, None]
            )
            if not (np.abs(common * then - now) <= allowed).all():
                return False
            number = number + int(np.count_nonzero(now))
            largest = max(largest, float(rounding.max()))
        # one element is always a multiple of another one
        return largest ** max(number - 1, 0) <= ACCIDENT or all(
            one.event == SAME for one in found.values()
        )

    def _fit(
        self, window: StepWindow, found: Mapping[int, GradChange], lost: Collection[int]
    ) -> Fit | None:
        """Fit a sum of what arrived in each pass to a `.grad`.

        If that fails, add what the last step was given. The gradient of the last step is a leak if
        it weighs as much as the passes do, or if it weighs 1 and they weigh less. In a running
        average it weighs less than they do, or the weights sum to 1.
        """
        passes = [i for i in window.passes if found.keys() & self._arrived[0, i].keys()]
        fit = self._fit_of(passes, found, lost)
        if fit is None or fit.is_exact:
            return fit
        leak = self._fit_of([*passes, EARLIER], found, lost)
        if leak is None or not leak.is_exact or not (leak.coefficients > leak.bounds).all():
            return fit
        *own, earlier = leak.coefficients
        stands = near(earlier, max(own), 1e-3) or near(earlier, max(*own, 1.0), 1e-3)
        return leak if stands and not near(earlier + max(own), 1.0, 1e-3) else fit

    def _fit_of(
        self, passes: Sequence[int], found: Mapping[int, GradChange], lost: Collection[int]
    ) -> Fit | None:
        """Fit a sum of what arrived in some passes to what stood in `.grad`, over some parameters.

        What the fit leaves over must be within the rounding of a sum of so many terms, else `.grad`
        is edited: an edit moves the coefficients by as much as it leaves over, so what is left over
        is also how well they are known.
        """
        length = min((len(one.now) for one in found.values()), default=0)
        nothing = np.zeros(length)

        def column(values: Iterable[Vector]) -> Vector:
            return np.concatenate([(v if len(v) >= length else nothing)[:length] for v in values])

        if not passes:
            return None
        columns = [column(self._arrived[0, i].get(key, nothing) for key in found) for i in passes]
        target = column(one.now for one in found.values())
        arrivals = np.stack(columns, 1)
        number = len(passes)
        of = (passes, lost, list(found))
        if not is_finite(target) or not np.isfinite(arrivals).all():
            return None
        # rounding is relative to each parameter, and to its elements and its projections apart
        of_keys = np.split(arrivals, len(found))
        scale = _scale_of_rows(of_keys)
        reached = scale > 0
        arrived = arrivals.any(1)
        # projections of few elements say nothing beside them
        elements = np.concatenate([np.arange(len(one)) < ELEMENTS for one in of_keys])
        is_enough = (arrived & elements).sum() >= 2 * number and not size(target[~reached])
        scaled = fitted(arrivals[reached] / scale[reached, None], target[reached] / scale[reached])
        if is_enough and scaled is not None:
            solution = scaled[0]
            bound = self._bound_of_fit(found, scaled, int(arrived.sum()))
            if bound is not None:
                return Fit(
                    *of,
                    solution,
                    np.full(number, bound),
                    is_exact=True,
                )
        # projections repeat the elements of a small parameter, and an edit of few elements is in each
        # of them: as rows beside the elements they would make chance significant
        noisy = fitted(arrivals[elements], target[elements])
        if noisy is None:
            return Fit(
                *of,
                np.zeros(number),
                np.zeros(number),
                is_exact=True,
            )
        solution, residual, spread = noisy
        deviation = np.sqrt((residual * residual).sum() / (len(residual) - number))
        share = float(np.hypot.reduce(residual) / (np.hypot.reduce(target[elements]) or 1.0))
        return Fit(
            *of,
            solution,
            SIGNIFICANT * deviation * spread,
            is_exact=False,
            left=share,
        )

    def _bound_of_fit(
        self, keys: Iterable[int], fit: tuple[Vector, Vector, Vector], rows: int
    ) -> float | None:
        """Return how far off the coefficients of a fit may be; None where it leaves over more than
        rounding explains.

        Args:
            keys: of the parameters.
            fit: the coefficients, what they leave over, and their spread.
            rows: that something has reached.
        """
        solution, residual, spread = fit
        number = len(solution)
        dtypes = set(map(self._dtype, keys))
        rounding = RELATIVE["float64"] + max(
            growth(number + FURTHER_ROUNDINGS, dtype) for dtype in dtypes
        )
        left = float(np.sqrt((residual * residual).sum() / (rows - number)))
        largest = size(solution)
        # negated, so that a NaN is no fit
        if not left <= RMS_OF_ROUNDING * rounding * largest:
            return None
        left = max(left, *(UNIT_ROUNDOFF[dtype] * largest for dtype in dtypes))
        # as if it were no noise that the elements average out, but a direction, such as that of the
        # parameters; and two coefficients may be off in opposite directions
        return 2 * math.sqrt(rows) * left * float(spread.max())

    def _leave(self, window: StepWindow, steps: Sequence[StepRecord]) -> None:
        """Set the states that a step leaves behind, and forget what no later step can ask for."""
        left: dict[int, Coefficients] = {}
        for one in distinct(window.coefficients.values()):
            # what is left in `.grad` after a step is an earlier window's, however many those were
            places = {
                (of, EARLIER if index < window.before else index): c
                for (of, index), c in one.items()
            }
            left[id(one)] = {
                place: c if place[1] != EARLIER else 1.0 for place, c in places.items()
            }
        for rank, step in enumerate(steps):
            earlier = self._arrived[rank, EARLIER]
            for key in window.keys:
                now = step.gradients.get(key)
                earlier.pop(key, None)
                if not isinstance(now, np.ndarray):
                    self._states[rank][key] = State()
                    continue
                earlier[key] = now
                known = left.get(id(window.coefficients.get(key)), NO_PASS)
                kept = known if window.edit is None or size(now) else NO_PASS
                self._states[rank][key] = State(now, kept, self._states[rank][key].shard)
        standing = list(distinct(window.coefficients.values()))
        for index in window.passes:
            sources = {(rank, index) for rank in range(self.ranks)}
            if any(
                abs(c) > 1e-9
                for s, c in chain.from_iterable(cs.items() for cs in standing)
                if s in sources
            ):
                self.passes[index].consumers.setdefault(window.optimizer, self.number_of_passes)
        self.last[window.optimizer] = self.number_of_passes
        if window.number != self._call:
            self._call = window.number
            self._before_call = self._at_last_step
        self._at_last_step = self.number_of_passes
        for key in window.keys:
            self._owners[key].add(window.optimizer)
        self._forget()

    def is_stepped(self, keys: Iterable[int]) -> bool:
        """Return whether an optimizer has stepped on some of these parameters."""
        return any(self._owners.get(key) for key in keys)

    def owners(self, key: int) -> Collection[int]:
        """Return the optimizers that have stepped on a parameter."""
        return self._owners.get(key, ())

    def standing(self, keys: Iterable[int]) -> set[int]:
        """Return the passes since the last step that stand in the `.grad` of some parameters."""
        own = list(keys)
        states = chain.from_iterable((ranked[key] for key in own) for ranked in self._states)
        found = distinct([state.coefficients for state in states])
        return {
            index
            for (_, index), c in chain.from_iterable(coefficients.items() for coefficients in found)
            if abs(c) > NEGLIGIBLE
        }

    def _forget(self) -> None:
        """Let go of the passes that every optimizer of their parameters has stepped on.

        A parameter that no optimizer has stepped on yet, or that none ever will, keeps its passes
        for a while. Those of the present call of a step are kept: an optimizer may step another
        one.
        """

        def is_done(index: int, seen: BackwardPass) -> bool:
            keys = set(chain.from_iterable(record.arrivals for record in seen.records))
            return index < self._before_call and all(
                index < stepped.get(key, 0) - 1 for key in keys
            )

        stepped = {
            key: min(self.last[optimizer] for optimizer in of)
            for key, of in self._owners.items()
            if of
        }
        old = self.number_of_passes - MOST_PASSES
        for index in [i for i, seen in self.passes.items() if i < old or is_done(i, seen)]:
            self._slim(self.passes.pop(index))
        kept = self.passes.keys()
        for source in [
            source for source in self._arrived if source[1] not in kept and source[1] != EARLIER
        ]:
            del self._arrived[source]
        self._null = {n for n in self._null if n[1] in kept}
        self._zero = {n for n in self._zero if n[1] in kept}
        self._not_finite &= kept
        self._discarded = {one: cs for one, cs in self._discarded.items() if one <= kept}


def _beside(window: StepWindow, sources: Iterable[Source]) -> Iterable[BackwardPass]:
    """Return the passes of a window where all that stood in a `.grad` is of earlier ones: gradients of
    one step are like those of the last one, and are no part of them.
    """
    indices = {index for _, index in sources}
    is_of_earlier = bool(indices) and all(EARLIER <= index < window.before for index in indices)
    return window.passes.values() if is_of_earlier else ()


def _are_equal(own: Mapping[int, Vector], other: Mapping[int, Vector]) -> bool:
    """Return whether the same arrived at the same parameters."""
    return own.keys() == other.keys() and all(map(np.array_equal, own.values(), other.values()))


def _left_of_last(step: StepRecord) -> dict[int, LeftOfLast]:
    """Return the parameters of whose `.grad` nothing is left but what the last pass has reached."""
    found = dict[int, LeftOfLast]()
    for key, told in arrays_only(step.masked).items():
        is_zeroed, _, has_other, is_of_last, varies, is_written = map(bool, told)
        if is_of_last:
            found[key] = LeftOfLast(varies, is_written and not is_zeroed and not has_other)
    return found


def _is_masked(told: Vector) -> bool:
    """Return whether elements of a `.grad` were set to 0 between passes, and none to something else."""
    is_zeroed, _, has_other, *_ = told
    return bool(is_zeroed) and not has_other


def _common(factors: Mapping[int, float | None]) -> float:
    """Return the factor that most parameters have; 0 where they have none."""
    some = [one for one in factors.values() if one]
    return median(some) if some else 0.0


def _set_edit(
    window: StepWindow,
    factors: Mapping[int, float | None],
    common: float,
    off: Sequence[int],
) -> None:
    """Say what was done to `.grad` after the last pass, beside a common factor."""
    window.factor = common
    if common:
        window.factor_error = max(abs(one / common - 1) for one in factors.values() if one)
    if factors and all(factor == 0.0 for factor in factors.values()):
        window.edit = "all reset"
    elif any(factors[key] != 0.0 for key in off):
        window.edit = FREE
        window.factor = None
    elif off:
        window.edit = "reset"
        window.removed = off


MOST_PASSES = 512
"""Passes that are kept for parameters that no optimizer has stepped on."""
MOST_ALIKE = 4
"""Passes with whose arrivals those of one are compared: the first one of a window finds nothing in `.grad`, and others
what it has left."""
COPIED = 1e-5
"""Relative difference of a gradient that is copied from one parameter to another one in float32, and may be divided."""
COPIED_VALUES = 1e-2
"""Relative difference of a parameter in low precision from its copy in a higher one."""
RMS_OF_ROUNDING = 0.25
"""Of the roundings of a sum, relative to their bound; of sums in float32 and bfloat16 it is up to an eighth or so."""
ACCIDENT = 1e-4
"""Chance, from which on it counts, that a few elements of a sum are within rounding a multiple of one of its terms."""
FEWEST = 8
"""Elements from which on a part of an edited gradient is told from chance."""
SIGNIFICANT = 5.0
"""Standard errors from which on a coefficient is not 0."""


def _scale_of_rows(of_keys: Sequence[Vector]) -> Vector:
    """Return (rows,), the size of what arrived at the parameter of each row, for its elements and its
    projections apart.

    Args:
        of_keys: (elements and projections, passes) for each parameter.
    """
    apart = chain.from_iterable(np.split(one, [ELEMENTS]) for one in of_keys)
    parts = [part for part in apart if len(part)]
    sizes = [float(np.hypot.reduce(np.abs(part).max(0))) for part in parts]
    return np.repeat(sizes, list(map(len, parts)))
