"""What the sums of one window are judged by: which part of which pass stands in each `.grad`, as
arrays of parameters and passes, and what earlier windows of the optimizer have shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt

from gradcheck_suite.auditing.events import BY_HAND, PassRecord
from gradcheck_suite.auditing.places import Loop, Place
from gradcheck_suite.auditing.replay import (
    EARLIER,
    NEGLIGIBLE,
    BackwardPass,
    Coefficients,
    StepWindow,
    distinct,
)

Numbers = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Columns = Sequence[int]
"""Passes of a window by their place in it, from 0."""


@dataclass(frozen=True)
class Discards:
    """Windows before whose only pass others were reset.

    Attributes:
        lost: the number of passes that each of them has lost.
        windows: how many there were.
        is_steady: whether all have lost as many, and each window since the first one has.
    """

    lost: int = 0
    windows: int = 0
    is_steady: bool = True

    def followed_by(self, lost: int) -> Discards:
        """Return them with one more window, which may have lost none."""
        if not lost and not self.windows:
            return self
        # the first one sets the number that the others are held to
        is_steady = self.is_steady and lost == (self.lost or lost)
        return Discards(lost or self.lost, self.windows + bool(lost), is_steady)


@dataclass(frozen=True)
class History:
    """What earlier windows of an optimizer have shown.

    Attributes:
        typical_k: the number of passes of most windows in which nothing is missing, where it is
            known.
        longest: the number of passes of the longest of them; 0 where there was none.
        stepped_in: where in its outer loops the program was at the optimizer's last step; None
            where that is not known.
        discards: windows of one pass that others were reset before.
        unlike: whether a gradient of it was no sum of passes, so that others which look put
            together from some may look so by chance.
    """

    typical_k: int | None = None
    longest: int = 0
    stepped_in: Loop | None = None
    discards: Discards = Discards()
    unlike: bool = False


@dataclass(frozen=True)
class WindowEvidence:
    """What one optimizer stepped on, for rules to read.

    Attributes:
        window: as it was replayed.
        indices: of its passes: the columns of the arrays.
        keys: of the parameters whose `.grad` is explained: the rows.
        coefficients: (rows, columns), of each pass in each `.grad`, that of the rank which has most
            of it; NaN where nothing has arrived, or exactly 0, and in the gradients that were set to
            0 after the last pass.
        null: (columns,), whether all that arrived was 0 as far as it was looked at, which tells
            nothing.
        unknown: (columns,), whether something may have arrived that no sampled element shows.
        by_hand: (columns,), whether the program puts the results into `.grad` itself.
        seen: (columns,), whether another optimizer has stepped on the pass.
        history: of the optimizer.
        weighs_rightly: whether the losses weigh their items rightly with the coefficients of the
            passes.
    """

    window: StepWindow
    indices: Sequence[int]
    keys: Sequence[int]
    coefficients: Numbers
    null: Mask
    unknown: Mask
    by_hand: Mask
    seen: Mask
    history: History = History()
    weighs_rightly: Callable[[], bool] = lambda: False

    @cached_property
    def reached(self) -> Mask:
        """(rows, columns), whether something other than 0 has arrived."""
        return ~np.isnan(self.coefficients)

    @cached_property
    def mean(self) -> Numbers:
        """(columns,), the coefficient of each pass: the median over the parameters; 0 without one."""
        numbers = np.count_nonzero(self.reached, axis=0)
        if not numbers.any():
            return np.zeros(len(self.indices))
        # NaN is sorted behind all numbers; `np.nanmedian` takes ten times as long
        ordered = np.sort(self.coefficients, axis=0)
        columns = np.arange(len(numbers))
        # of an even number the two in the middle, of an odd one the same twice
        lower = ordered[np.maximum(numbers - 1, 0) // 2, columns]
        upper = ordered[np.minimum(numbers // 2, len(ordered) - 1), columns]
        return np.where(numbers > 0, (lower + upper) / 2, 0.0)

    @cached_property
    def in_sum(self) -> Mask:
        """(columns,), whether the pass is in `.grad`."""
        return np.abs(self.mean) > self._least_there

    @property
    def missing(self) -> Mask:
        """(rows, columns), whether a pass that has reached the parameter is not in its `.grad`."""
        gone: Mask = self.reached & ~(np.abs(self.coefficients) > self._least_there)
        return gone

    @property
    def _least_there(self) -> float:
        """The coefficient up to which a pass is not there."""
        # a coefficient that is fitted is never exactly 0, and one that was clipped several times
        # may be as small
        return NEGLIGIBLE if self.window.edit == BY_HAND else 0.0

    @cached_property
    def _rest(self) -> Mask:
        return ~self.null & ~self.by_hand

    @cached_property
    def own(self) -> Columns:
        """The passes that the window must have."""
        # where another optimizer has stepped on some, a pass that is not in the sum may be meant
        # for it alone
        return columns_where(self._rest & ~self.seen & (self.in_sum | (not self.seen.any())))

    @property
    def _passed_over(self) -> Mask:
        """(columns,), whether another optimizer has stepped on a later pass of the same line, which is
        in `.grad`, and not on this one: it no longer waits for it.
        """
        taken = {self.pass_of(j).site: j for j in columns_where(self.seen & self.in_sum)}
        sites = [self.pass_of(j).site for j in range(len(self.indices))]
        is_before = [j < taken.get(site, -1) for j, site in enumerate(sites)]
        return ~self.seen & np.array(is_before, bool)

    @cached_property
    def optional(self) -> Columns:
        """The passes that another optimizer has stepped on, beside own ones."""
        return columns_where(self._rest & self.seen) if self.own else []

    @cached_property
    def required(self) -> Columns:
        """The passes of which `.grad` must be the sum."""
        rest = self._rest
        if self.own:
            return columns_where(rest & ~self.seen)
        is_of_window = self.in_sum | self._passed_over
        return columns_where(rest & is_of_window) or columns_where(rest)

    @cached_property
    def composed(self) -> Columns:
        """The passes that the program may have put together itself: those of which `.grad` must be
        the sum, or else the results of `torch.autograd.grad`.
        """
        return self.required or columns_where(self.by_hand & ~self.null)

    @cached_property
    def are_micro_batches(self) -> bool:
        """Whether the passes that may be put together come from one line, have one loss, and reach
        the same parameters.
        """
        records = list(chain.from_iterable(self.pass_of(j).records for j in self.composed))
        losses = {tuple(term.expression for term in record.terms) for record in records}
        own = {*self.window.keys}
        reached = {frozenset(record.arrivals.keys() & own) for record in records}
        return len(self.places(self.composed)) == 1 and len(losses) == 1 and len(reached) == 1

    @cached_property
    def lost(self) -> Columns:
        """The required passes that are not in `.grad`."""
        return [j for j in self.required if not self.in_sum[j]]

    @cached_property
    def kept(self) -> Columns:
        """The required passes that are in `.grad`."""
        return [j for j in self.required if self.in_sum[j]]

    @cached_property
    def stale(self) -> Sequence[int]:
        """Parameters in whose `.grad` passes of earlier windows stand."""
        window = self.window
        # parameters of one history share an object: it is asked once, and found again by identity
        found = {id(one) for one in self.sums if _has_earlier(window, one)}
        if not found:
            return []
        return [key for key, one in window.coefficients.items() if id(one) in found]

    @cached_property
    def sums(self) -> Sequence[Coefficients]:
        """What the gradients are made of, once for all parameters of one history."""
        return list(distinct(self.window.coefficients.values()))

    @cached_property
    def off(self) -> Mask:
        """(rows, columns), where the coefficient of a required pass differs from that of the pass."""
        required = np.zeros(len(self.indices), bool)
        required[self.required] = True
        return self.reached & ~are_near(self.coefficients, self.mean, 1e-3) & required

    def pass_of(self, column: int) -> BackwardPass:
        """Return a pass."""
        return self.window.passes[self.indices[column]]

    def record(self, column: int) -> PassRecord:
        """Return a pass, as the first rank has it."""
        return self.pass_of(column).records[0]

    def places(self, columns: Columns) -> set[Place]:
        """Return where these passes were called."""
        return {self.pass_of(j).site for j in columns}

    def moved(self, column: int, other: int | None = None) -> bool:
        """Return whether parameters had other values in this pass than in another one, or in the
        window's last one.
        """
        last = self.required[-1] if other is None else other
        here = self.record(column).points
        there = self.record(last).points
        # a parameter that was frozen in one of them has no checksum there
        both = [k for k in self.window.keys if k in here and k in there]
        return any(here[k] != there[k] for k in both)

    def missing_parameters(self) -> Sequence[int]:
        """Return the parameters that a pass reached and that have no gradient."""
        window = self.window
        own = {*window.keys} - window.coefficients.keys()
        if not own:
            return []
        missing = set[int]()
        for index, seen in window.passes.items():
            for rank, record in enumerate(seen.records):
                reached = record.arrivals.keys() & own
                missing |= {key for key in reached if (rank, index, key) not in window.null}
        return sorted(missing)

    @cached_property
    def is_alike(self) -> bool:
        """Whether each pass has one coefficient in all the parameters that it has reached."""
        return not (self.reached & ~are_near(self.coefficients, self.mean, 1e-2)).any()


def columns_where(chosen: Mask) -> Columns:
    """Return the columns of which something is true."""
    return [int(j) for j in np.flatnonzero(chosen)]


def in_any_row(mask: Mask) -> Mask:
    """Return whether something is true in some row, of each column."""
    found: Mask = np.logical_or.reduce(mask, axis=0)
    return found


def are_near(values: Numbers, others: Numbers, tolerance: float) -> Mask:
    """Return where numbers differ by no more than a share of the larger one; False for NaN."""
    near: Mask = np.abs(values - others) <= tolerance * np.maximum(np.abs(values), np.abs(others))
    return near


def _has_earlier(window: StepWindow, coefficients: Coefficients) -> bool:
    """Return whether passes of earlier windows are in a gradient."""
    return any(
        (index == EARLIER or 0 <= index < window.before) and abs(c) > NEGLIGIBLE
        for (_, index), c in coefficients.items()
    )


def evidence_of(window: StepWindow) -> WindowEvidence:
    """Return the evidence of a window by itself."""
    indices = [*window.passes]
    keys = [*window.coefficients]
    ranks = max((len(seen.records) for seen in window.passes.values()), default=0)
    shape = (ranks, len(keys), len(indices))
    arrived = np.zeros(shape, bool)
    for column, seen in enumerate(window.passes.values()):
        for rank, record in enumerate(seen.records):
            arrived[rank, :, column] = _arrived(record.arrivals, keys)
    told = arrived.copy()
    rows = {key: row for row, key in enumerate(keys)} if window.null else {}
    columns = {index: column for column, index in enumerate(indices)}
    for rank, index, key in window.null:
        if key in rows and index in columns:
            told[rank, rows[key], columns[index]] = False
    unmeasured = {index for _, index, key in window.null - window.zero if key in rows}
    largest = np.full(shape[1:], np.nan)
    values = _values(window.coefficients, indices, ranks)
    for rank in range(ranks):
        # not `>`: that is False beside the NaN with which the maximum begins
        larger = told[rank] & ~(np.abs(values[rank]) <= np.abs(largest))
        largest = np.where(larger, values[rank], largest)
    # what is set to 0 after the last pass lacks all of them, whatever it had lost before: the other
    # parameters tell
    is_removed = np.isin(keys, window.removed)
    others = in_any_row(~np.isnan(largest[~is_removed]))
    largest[is_removed[:, None] & others] = np.nan
    return WindowEvidence(
        window,
        indices,
        keys,
        largest,
        null=in_any_row(in_any_row(arrived)) & ~in_any_row(in_any_row(told)),
        unknown=np.array([index in unmeasured for index in indices], bool),
        by_hand=np.array([seen.by_hand for seen in window.passes.values()], bool),
        seen=np.array([bool(window.seen[index]) for index in indices], bool),
    )


def _arrived(arrivals: Mapping[int, str], keys: Sequence[int]) -> Mask:
    """Return (keys,), at which of the parameters something has arrived."""
    # the usual case, in which each pass reaches every parameter, takes one comparison of sets
    if len(arrivals) >= len(keys) and arrivals.keys() >= {*keys}:
        return np.ones(len(keys), bool)
    return np.array([key in arrivals for key in keys], bool)


def _values(
    coefficients: Mapping[int, Coefficients], indices: Sequence[int], ranks: int
) -> Numbers:
    """Return (ranks, keys, passes), the coefficients; parameters of equal history share an object."""
    of_object: dict[int, Numbers] = {}
    found = np.zeros((ranks, len(coefficients), len(indices)))
    for row, one in enumerate(coefficients.values()):
        if id(one) not in of_object:
            of_object[id(one)] = np.array(
                [[one.get((rank, index), 0.0) for index in indices] for rank in range(ranks)]
            ).reshape(ranks, len(indices))
        found[:, row] = of_object[id(one)]
    return found
