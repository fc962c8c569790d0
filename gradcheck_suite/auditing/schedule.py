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
        self.again: Counter[int] = Counter()
        self._every = options.every or EVERY
        self._share = options.share
        self._on_ranks = on_ranks
        self._began = self._last = time.perf_counter()
        self._due: dict[int, int] = {}
        self._attempts: Counter[int] = Counter()
        self._last_window: dict[int, int] = {}
        self._judged: Counter[int] = Counter()
        self._in_a_row = 0
        self._windows = self._counted = self._gaps = self._number = self._passes = self._odd = (
            self._expected
        ) = 0
        self._lengths: Counter[int] = Counter()
        self._usual = 0
        self._is_fresh = self._again_first = self._has_let_go = False
        self._spent = self._of_windows = self._of_recomputed = self._seconds = 0.0

    def _measure(self, optimizer: int, passes: int) -> None:
        """Count a window, and expect one of another length as far away as the last one was: an
        epoch ends with it.
        """
        self._windows += 1
        # in the order of their last windows
        self._last_window.pop(optimizer, None)
        self._last_window[optimizer] = self._windows
        while self._last_window[oldest := next(iter(self._last_window))] <= self._windows - RECENT:
            del self._last_window[oldest]
        length = passes - self._passes
        self._passes = passes
        self._lengths[length] += 1
        if self._lengths[length] > self._lengths[self._usual]:
            self._usual = length
        if length != self._usual:
            period = self._windows - self._odd
            self._odd = self._windows
            self._expected = self._windows + period if period > RECENT else 0

    def after(self, optimizer: int, passes: int, spent: float, *, was_full: bool) -> bool:
        """Count a window that was judged, and return whether the next one is.

        Args:
            optimizer: whose window it is.
            passes: that have gone backward so far.
            spent: seconds that the audit has taken so far.
            was_full: whether it was looked at in full.
        """
        now = time.perf_counter()
        cost = spent - self._spent
        seconds = now - self._last
        self._spent = spent
        self._last = now
        self._judged[optimizer] += 1
        self._in_a_row += 1
        if self._is_fresh:  # it tells what stands in `.grad`, and has been counted
            self._is_fresh = False
            self._passes = passes
            return True
        self._measure(optimizer, passes)
        if was_full:
            self._attempts[optimizer] += 1
            self._of_recomputed = cost
        else:
            self._number += 1
            # what the first windows cost more is soon outweighed
            share = 1 / min(self._number, FIRST)
            self._of_windows += share * (cost - self._of_windows)
            self._seconds += share * (seconds - self._seconds)
        self._count(optimizer, was_full=was_full)
        self.full = min(self._due.values(), default=0) <= 0 and (
            self._again_first or self._pays(self._of_recomputed)
        )
        return (
            self._share is None
            or not self._is_done()
            or (not self._on_ranks and self._goes_on(self._share))
        )

    def _count(self, optimizer: int, *, was_full: bool) -> None:
        """Count a window: the first ones of each optimizer are due, and every M-th after it."""
        if was_full:
            # one that steps no more is not waited for
            kept = {other: due for other, due in self._due.items() if due > -self._every}
            self._due = {other: due - (due <= 0) for other, due in kept.items()}
            self._again_first = self._share is not None and not self._gaps and self._windows < FIRST
            self._again_first &= (
                self.again[optimizer] < AGAIN and self._attempts[optimizer] < ATTEMPTS
            )
            self._due[optimizer] = 0 if self._again_first else self._wait(optimizer) - 1
        else:
            self._due[optimizer] = self._due.get(optimizer, 1) - 1

    def _wait(self, optimizer: int) -> int:
        """Return after how many windows one is computed again: ever more where none could be."""
        failed = self._attempts[optimizer] - self.again[optimizer]
        return self._every << min(max(failed - ATTEMPTS + 1, 0), LONGEST)

    def _is_done(self) -> bool:
        """Return whether the windows that are judged together have been, of each optimizer that
        steps.
        """
        # the first step of each optimizer after a gap tells what stands in `.grad`, and is not
        # judged
        least = PAIR + bool(self._gaps)
        costs_much = not self._on_ranks and self._spent > ENOUGH
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
        for kept in (self._last_window, self._due, self._attempts, self._judged, self.again):
            kept.pop(optimizer, None)

    def _goes_on(self, share: float) -> bool:
        """Return whether judging every window costs less than the budget, or it pays for one more
        at least.
        """
        return 0 < self._of_windows <= share * self._seconds or self._pays(self._of_windows)

    def _pays(self, cost: float) -> bool:
        """Return whether the budget pays for so many seconds more.

        Several ranks must decide alike.
        """
        if self._share is None or self._on_ranks:
            return True
        lasted = max(time.perf_counter() - self._began, SHORTEST)
        # a share of what the run takes by itself
        return self._spent + cost <= self._share * (lasted - self._spent)

    def resumes(self, optimizer: int, passes: int, spent: float) -> bool:
        """Count a window that was not judged, and return whether it tells what stands there before
        the next ones are.

        Args:
            optimizer: whose window it is.
            passes: that have gone backward so far.
            spent: seconds that the audit has taken so far.
        """
        self._spent = spent
        self._counted += 1
        self._measure(optimizer, passes)
        due = min(self._due.values(), default=0) <= 0
        begins = self._counted >= (ON_RANKS if self._on_ranks else FURTHEST) - PAIR
        if not self._on_ranks:
            begins = begins or self._windows == self._expected - PAIR
            begins = begins or self._pays((PAIR + 1) * self._of_windows + due * self._of_recomputed)
        if begins:
            self._counted = 0
            self._gaps = self._gaps + 1
            self._is_fresh = True
            self._has_let_go = False
            self._last = time.perf_counter()
            self._judged.clear()
            self._in_a_row = 0
            self.full = due and self._pays(self._of_recomputed)
        return begins
