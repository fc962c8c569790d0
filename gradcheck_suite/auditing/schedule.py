"""Which windows of a live run an audit judges, and which of these it computes again.

Must not look at gradients: it knows how many windows and passes there were, and what they have
cost.
"""

from __future__ import annotations

import time
from collections import Counter

from gradcheck_suite.core.options import EVERY, AuditOptions

FIRST = 20
AGAIN = 3
ATTEMPTS = 6
PAIR = 2
"""Windows at the beginning that are judged, those of them that are computed again, in so many attempts, and windows
that are judged together: that a gradient leaks shows in the second one."""
ENOUGH = 10.0
"""Seconds of an audit after which no more of the first windows are judged than those that are computed again and a
pair, unless the budget pays for them."""
FURTHEST = 500
ON_RANKS = 50
"""Windows of which one pair is judged whatever it costs; the same where several ranks judge the same windows."""
LONGEST = 20
"""Doublings of the number of windows after which one that cannot be computed again is tried again."""
MOST_TURNS = 3
"""How often in a row each optimizer may have its turn while one is waited for."""
RECENT = 100
"""Windows after which an optimizer that has not stepped is not waited for, and the fewest of an epoch whose last one,
where it has another length, is judged whatever it costs."""
SHORTEST = 5.0
"""Seconds that a run is taken to last at least."""


class EpochEnds:
    """Expects a window of another length than usual as far away as the last one was: an epoch ends
    with it.

    Attributes:
        expected: the number of the window that is expected; 0 where none is.
    """

    def __init__(self) -> None:
        self.expected = 0
        self._passes = 0
        self._last = 0
        self._usual = 0
        self._lengths: Counter[int] = Counter()

    def take(self, window: int, passes: int) -> None:
        """Take a window, by its number and that of the passes that have gone backward so far."""
        length = passes - self._passes
        self._passes = passes
        self._lengths[length] += 1
        if self._lengths[length] > self._lengths[self._usual]:
            self._usual = length
        if length != self._usual:
            period = window - self._last
            self._last = window
            self.expected = window + period if period > RECENT else 0

    def skip(self, passes: int) -> None:
        """Take passes that are not counted as a window."""
        self._passes = passes


class Budget:
    """Tells what the time of a run pays for.

    Args:
        share: of the run's time; None for all of it.

    Attributes:
        spent: seconds that the audit has taken so far.
        of_windows: seconds that a judged window takes.
        of_recomputed: seconds that the last window took that was computed again.
    """

    def __init__(self, share: float | None) -> None:
        self.spent = 0.0
        self.of_windows = 0.0
        self.of_recomputed = 0.0
        self._share = share
        self._began = self._last = time.perf_counter()
        self._seconds = 0.0
        self._number = 0

    def take(self, spent: float, *, was_full: bool | None) -> None:
        """Take a judged window.

        Args:
            spent: seconds that the audit has taken so far.
            was_full: whether it was computed again; None for one that was judged in part.
        """
        now = time.perf_counter()
        cost = spent - self.spent
        seconds = now - self._last
        self.spent = spent
        self._last = now
        if was_full:
            self.of_recomputed = cost
        elif was_full is not None:
            self._number += 1
            # what the first windows cost more is soon outweighed
            share = 1 / min(self._number, FIRST)
            self.of_windows += share * (cost - self.of_windows)
            self._seconds += share * (seconds - self._seconds)

    def begin(self) -> None:
        """Begin to measure a window."""
        self._last = time.perf_counter()

    def pays(self, cost: float) -> bool:
        """Return whether there are so many seconds more."""
        if self._share is None:
            return True
        lasted = max(time.perf_counter() - self._began, SHORTEST)
        # a share of what the run takes by itself
        return self.spent + cost <= self._share * (lasted - self.spent)

    def pays_for_all(self) -> bool:
        """Return whether judging every window costs less."""
        return self._share is None or 0 < self.of_windows <= self._share * self._seconds


class Recomputed:
    """Tells of which optimizer a window is to be computed again.

    Args:
        every: windows of an optimizer after which the next one is due.

    Attributes:
        number: index of an optimizer -> how many of its windows were computed again.
        begins: whether the first windows of an optimizer are.
    """

    def __init__(self, every: int) -> None:
        self.number: Counter[int] = Counter()
        self.begins = False
        self._every = every
        self._due: dict[int, int] = {}
        self._attempts: Counter[int] = Counter()

    @property
    def is_due(self) -> bool:
        """Whether a window of some optimizer is."""
        return min(self._due.values(), default=0) <= 0

    def take(self, optimizer: int, *, was_full: bool, may_begin: bool) -> None:
        """Take a window: the first ones of each optimizer are due, and every M-th after it."""
        if not was_full:
            self._due[optimizer] = self._due.get(optimizer, 1) - 1
            return
        self._attempts[optimizer] += 1
        # one that steps no more is not waited for
        kept = {other: due for other, due in self._due.items() if due > -self._every}
        self._due = {other: due - (due <= 0) for other, due in kept.items()}
        is_tried = self.number[optimizer] < AGAIN and self._attempts[optimizer] < ATTEMPTS
        self.begins = may_begin and is_tried
        self._due[optimizer] = 0 if self.begins else self._wait(optimizer) - 1

    def _wait(self, optimizer: int) -> int:
        """Return after how many windows one is computed again: ever more where none could be."""
        failed = self._attempts[optimizer] - self.number[optimizer]
        return self._every << min(max(failed - ATTEMPTS + 1, 0), LONGEST)

    def forget(self, optimizer: int) -> None:
        """Forget an optimizer that the program has let go."""
        for kept in (self._due, self._attempts, self.number):
            kept.pop(optimizer, None)


class Schedule:
    """Tells which windows are judged, and which of them are looked at in full and computed again.

    Without a budget all are judged. With one, the first windows are, and then as many pairs of
    neighbours as it pays for. Where judging every window costs less than the budget, every one is.

    Args:
        options: of the audit.
        on_ranks: whether several ranks must judge the same windows, whatever each of them costs.

    Attributes:
        full: whether the window that runs now is computed again.
        again: index of an optimizer -> how many of its windows were computed again.
    """

    def __init__(self, options: AuditOptions, *, on_ranks: bool) -> None:
        self.full = True
        self._recomputed = Recomputed(options.every or EVERY)
        self.again = self._recomputed.number
        self._has_budget = options.share is not None
        # several ranks must decide alike, and none knows the time of the others
        self._budget = Budget(None if on_ranks else options.share)
        self._on_ranks = on_ranks
        self._ends = EpochEnds()
        self._last_window: dict[int, int] = {}
        self._judged: Counter[int] = Counter()
        self._in_a_row = 0
        self._windows = self._counted = self._gaps = 0
        self._is_fresh = False
        self._has_let_go = False

    def _measure(self, optimizer: int, passes: int) -> None:
        """Count a window."""
        self._windows += 1
        # in the order of their last windows
        self._last_window.pop(optimizer, None)
        self._last_window[optimizer] = self._windows
        while self._last_window[oldest := next(iter(self._last_window))] <= self._windows - RECENT:
            del self._last_window[oldest]
        self._ends.take(self._windows, passes)

    def after(self, optimizer: int, passes: int, spent: float, *, was_full: bool) -> bool:
        """Count a window that was judged, and return whether the next one is.

        Args:
            optimizer: whose window it is.
            passes: that have gone backward so far.
            spent: seconds that the audit has taken so far.
            was_full: whether it was looked at in full.
        """
        self._budget.take(spent, was_full=None if self._is_fresh else was_full)
        self._judged[optimizer] += 1
        self._in_a_row += 1
        if self._is_fresh:  # it tells what stands in `.grad`, and has been counted
            self._is_fresh = False
            self._ends.skip(passes)
            return True
        self._measure(optimizer, passes)
        may_begin = self._has_budget and not self._gaps and self._windows < FIRST
        self._recomputed.take(optimizer, was_full=was_full, may_begin=may_begin)
        self.full = self._recomputed.is_due and (
            self._recomputed.begins or self._budget.pays(self._budget.of_recomputed)
        )
        return not self._has_budget or not self._is_done() or self._goes_on()

    def _is_done(self) -> bool:
        """Return whether the windows that are judged together have been, of each optimizer that
        steps.
        """
        # the first step of each optimizer after a gap tells what stands in `.grad`, and is not
        # judged
        least = PAIR + bool(self._gaps)
        costs_much = not self._on_ranks and self._budget.spent > ENOUGH
        first = AGAIN + PAIR if costs_much else FIRST
        number = least if self._gaps else first
        if self._in_a_row < number:
            return False
        # optimizers that are made anew all the time would be waited for in vain: to do so took nine
        # windows in place of three, each of which costs as much as twenty steps of a small task
        if self._has_let_go or self._in_a_row >= MOST_TURNS * least * len(self._last_window):
            return True
        return all(self._judged[of] >= least for of in self._last_window)

    def forget(self, optimizer: int) -> None:
        """Forget an optimizer that the program has let go: its windows are not waited for."""
        self._has_let_go = True
        self._recomputed.forget(optimizer)
        for kept in (self._last_window, self._judged):
            kept.pop(optimizer, None)

    def _goes_on(self) -> bool:
        """Return whether judging every window costs less than the budget, or it pays for one more
        at least.
        """
        budget = self._budget
        return not self._on_ranks and (budget.pays_for_all() or budget.pays(budget.of_windows))

    def resumes(self, optimizer: int, passes: int, spent: float) -> bool:
        """Count a window that was not judged, and return whether it tells what stands there before
        the next ones are.

        Args:
            optimizer: whose window it is.
            passes: that have gone backward so far.
            spent: seconds that the audit has taken so far.
        """
        budget = self._budget
        budget.spent = spent
        self._counted += 1
        self._measure(optimizer, passes)
        due = self._recomputed.is_due
        begins = self._counted >= (ON_RANKS if self._on_ranks else FURTHEST) - PAIR
        if not begins and not self._on_ranks:
            cost = (PAIR + 1) * budget.of_windows + due * budget.of_recomputed
            begins = self._windows == self._ends.expected - PAIR or budget.pays(cost)
        if begins:
            self._counted = 0
            self._gaps = self._gaps + 1
            self._is_fresh = True
            self._has_let_go = False
            self._judged.clear()
            self._in_a_row = 0
            budget.begin()
            self.full = due and budget.pays(budget.of_recomputed)
        return begins
