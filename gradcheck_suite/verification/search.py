"""The search for a violation: check drawn cases, shrink the first violated one, and diagnose the smallest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress

from hypothesis import strategies as st

from gradcheck_suite.diagnosis.further_runs.loop_runner import LoopRunner
from gradcheck_suite.diagnosis.weight_patterns.weights import names_of
from gradcheck_suite.errors import UsageError
from gradcheck_suite.generation.cases import SMALL_MICRO_BATCHES, size_of
from gradcheck_suite.generation.drawing import ATTEMPTS, RedrawError, run_on_cases
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import FINITE_GRADIENTS, MEAN_REDUCTION, SUM_REDUCTION, Loop, Problem
from gradcheck_suite.schema.results import Verdict, Violation
from gradcheck_suite.schema.weight_probe import is_probe
from gradcheck_suite.verification.ahead import Ahead
from gradcheck_suite.verification.battery import Battery, run_battery
from gradcheck_suite.verification.check import check, terms_of
from gradcheck_suite.verification.finite_gradients import OUTSIDE, starts_finite, stays_finite
from gradcheck_suite.verification.same_fault import (
    MAY_BE_OF_ELEMENTS,
    is_named_otherwise,
    is_of_elements,
    is_same_fault,
    keeps_right_parameters,
    may_be_unnamed,
    window_shape,
)
from gradcheck_suite.verification.search_ends import EnoughError, StopError, ViolatedError
from gradcheck_suite.verification.smallest_probe import has_slopes
from gradcheck_suite.verification.stopwatch import Stopwatch

SHRINK_SECONDS = 30.0
"""Seconds of computing, or a quarter of the clock's: a busy machine shrinks as far."""
MOST_HUNTED = 50
"""Cases that are searched for the fault of a probe."""
MOST_AFTER = 20
"""Cases that are searched for it after one has shown another fault."""
MOST_BESIDE = 20
"""Cases that are searched for a fault of elements after a probe's fault of size."""
Progress = Callable[[Verdict], None]


class Search:
    """The state of the search while Hypothesis draws cases and shrinks a violated one.

    Drawn cases are checked until one shows the fault that is searched for. From then on `_trail` has smaller and
    smaller cases with a violation of the same kind. Only the first has been diagnosed by further runs of the loop;
    `settle` diagnoses the smallest. A case whose gradient determines another fault than the first one's is skipped.
    """

    def __init__(
        self,
        loop: Loop,
        problem: Problem | None,
        time_limit_s: float | None,
        progress: Progress | None,
        autocast: str | None = None,
        assumes: frozenset[str] = frozenset(),
        *,
        moves_by_chance: bool = False,
        ranks: int = 1,
    ) -> None:
        self._ranks = ranks
        self._moves_by_chance = moves_by_chance
        self._loop, self._problem, self._time_limit_s, self._progress = loop, problem, time_limit_s, progress
        self._autocast, self._assumes, self._finite_only = autocast, assumes, FINITE_GRADIENTS in assumes
        self._outside = 0
        terms = terms_of(loop, assumes, autocast)
        self.ahead = Ahead(loop, problem, terms, time_limit_s, runs=not self._finite_only)
        self.cases = 0
        self.ratio = 0.0
        self.findings: dict[str, None] = {}
        self.skipped: Counter[str] = Counter()
        self.found_after: int | None = None
        self.judged = 0
        self.windows = 0
        self.windows_skipped: Counter[str] = Counter()
        self.moved_by_zeros: list[str] = []
        self.users_cases: list[Case] = []
        self._trail: list[Violation] = []
        self._fitting: frozenset[str] = frozenset()
        self._settled: Violation | None = None
        self._wandered = False
        self._found_at = Stopwatch()
        self._on_probe: Violation | None = None
        self._other: Violation | None = None
        self._first_pass = True
        self._final = False
        self.stopped: str | None = None
        """Why shrinking ended before it had tried every smaller case, in words, or None."""

    @property
    def violation(self) -> Violation | None:
        """The smallest violation that has been diagnosed."""
        return self._settled or next(iter(self._trail), None) or self._other or self._on_probe

    @property
    def found(self) -> bool:
        """Whether a drawn case has shown the fault."""
        return bool(self._trail or self._settled)

    @property
    def is_over(self) -> bool:
        """Whether no case needs to be drawn.

        It is so where no drawn case can show a probe's fault, and where the loop did not return from a probe: every
        drawn case would wait for the time limit too.
        """
        seen = self._on_probe
        if seen is None or seen.diagnosis == "timed-out":
            return seen is not None
        # small elements that are 0 are a fault of elements already, and a name of weights says what a long plan shows
        as_drawn = seen.diagnosis not in MAY_BE_OF_ELEMENTS and not has_slopes(seen.case)
        as_drawn |= seen.diagnosis == "flushed-to-zero"
        return self._final and (self._problem is not None or as_drawn)

    def run_battery(self, assumes: frozenset[str], dtype: str, device: str) -> None:
        """Check the weight probes. A fault that the first of them show is then searched for among drawn cases."""
        found = self._battery(assumes, dtype, device)
        self._on_probe, self._final = found.violation, found.final
        self.skipped.update(found.skipped)

    def run_battery_beside_problem(self, assumes: frozenset[str], dtype: str, device: str) -> None:
        """Check the weight probes of a loop that trains a user's problem, where the problem shows no fault so far.

        A loop may be made for its problem alone. The probes therefore count only if it passes the first of them.
        """
        if self._problem is None or self._on_probe is not None:
            return
        reduction = SUM_REDUCTION if self._problem.reduction == "sum" else MEAN_REDUCTION
        found = self._battery(assumes | {reduction}, dtype, device)
        self.skipped.update(found.skipped)
        if found.final:
            self._on_probe, self._final = found.violation, True
        elif found.violation is not None:
            name = found.violation.diagnosis
            self.skipped[f"the weight probes: the loop fails on them ({name}), so its own problem alone was tried"] += 1

    def _battery(self, assumes: frozenset[str], dtype: str, device: str) -> Battery:
        return run_battery(
            self._check,
            lambda: LoopRunner(self._loop, time_limit_s=self._time_limit_s),
            assumes=assumes,
            dtype=dtype,
            device=device,
            time_limit_s=self._time_limit_s,
            ranks=self._ranks,
        )

    def probe(self, cases: Iterable[Case]) -> None:
        """Check fixed cases. The fault that one of them shows is then searched for among drawn cases."""
        for case in cases:
            self._on_probe = self._check(case).violation
            if self._on_probe is not None:
                return

    def search_small(self) -> bool:
        """Prepare to search for the fault among small cases; return whether shrinking did not end at one."""
        if self._settled is None:
            return False
        self._found_at = Stopwatch()
        layers, micro_batches, *_ = size_of(self._settled.case)
        most = SMALL_MICRO_BATCHES * self._settled.case.plan.world_size
        return self._wandered or layers > 2 or micro_batches > most

    def turn_to_other_fault(self) -> bool:
        """Search for the fault of drawn cases where it is not the probes'; return whether it is not."""
        if self.found or self._other is None:
            return False
        self._on_probe, self._first_pass, self._final = self._other, False, False
        return True

    def judge(self, case: Case) -> None:
        """Check a case; raise `ViolatedError` where it shows the fault that is searched for."""
        shrinking = bool(self._trail)
        if (shrinking or self._settled) and self._found_at.passed() > SHRINK_SECONDS:
            self.stopped = f"shrinking stopped after {SHRINK_SECONDS:g} s, so a smaller case may exist"
            return
        try:
            if self._is_outside(case) and self._outside % ATTEMPTS:
                raise RedrawError
            verdict = self._check(case, shrinking=shrinking)
            if self._moves_by_chance and case.optimizer and verdict.violation:
                # the simpler case, if it shows a fault too
                still = self._check(case.replace(optimizer=None), shrinking=shrinking)
                verdict = still if still.violation else verdict
        except UsageError as error:
            raise StopError(error) from None
        if not shrinking and self._first_pass:
            self.cases += 1
            self._note(verdict)
        if verdict.violation is not None and self._is_the_fault(verdict.violation):
            if not shrinking or size_of(case) < size_of(self._trail[-1].case):
                self._trail.append(verdict.violation)
            raise ViolatedError
        if not self.found and self._on_probe is not None and self._first_pass and self._hunted:
            raise EnoughError

    @property
    def _hunted(self) -> bool:
        """Whether enough cases were searched for the fault of a probe."""
        if self._final:
            return bool(self._other) or self.cases >= MOST_BESIDE
        return self.cases >= (MOST_HUNTED if self.found_after is None else self.found_after + MOST_AFTER)

    def settle(self) -> None:
        """Diagnose the smallest case, with as many draws for the bound as for the first case.

        Shrinking does not diagnose, so its last case may show another fault of the same kind. Then bisection finds the
        smallest case of the trail that still shows the first case's fault.
        """
        if not self._trail:
            return
        best, low, high = self._trail[0], 0, len(self._trail)
        while high - low > 1:
            middle = high - 1 if high == len(self._trail) else (low + high) // 2
            found = self._check(self._trail[middle].case).violation
            if found is not None and is_same_fault(found, best):
                best, low = found, middle
            else:
                high = middle
        self._wandered = high < len(self._trail)
        before = self._settled
        named = before is not None and before.diagnosis == "not-linear" != best.diagnosis
        if before is None or named or size_of(best.case) < size_of(before.case):
            self._settled = best
        self._trail, self._first_pass = [], False

    def settle_interrupted(self) -> None:
        """Diagnose the smallest case so far, after Ctrl-C; a second one keeps the first case."""
        if self._trail:
            self.stopped = "shrinking was interrupted, so a smaller case may exist"
            self.settle()

    def _check(self, case: Case, *, shrinking: bool = False) -> Verdict:
        problem = None if case.spec else self._problem
        if self._finite_only and not is_probe(case) and not starts_finite(case, problem):
            return Verdict(case, skipped=OUTSIDE)
        known, outcome = self.ahead.result(case)
        verdict = known or check(
            self._loop,
            case,
            problem=problem,
            outcome=outcome,
            time_limit_s=self._time_limit_s,
            shrinking=shrinking,
            autocast=self._autocast,
            assumes=self._assumes,
        )
        if verdict.violation and self._finite_only and not is_probe(case) and not stays_finite(case, problem):
            return Verdict(case, skipped=OUTSIDE)
        return verdict

    def _is_outside(self, case: Case) -> bool:
        """Whether a drawn case has gradients that the loop assumes away; counts such cases in a row."""
        outside = self._finite_only and not starts_finite(case, None if case.spec else self._problem)
        self._outside = self._outside + 1 if outside else 0
        return outside

    def _note(self, verdict: Verdict) -> None:
        self.ratio = max(self.ratio, verdict.ratio)
        if verdict.finding:
            self.findings[verdict.finding] = None
        if verdict.skipped:
            self.skipped[verdict.skipped] += 1
        elif not verdict.finding:
            self.judged += 1
            self.windows += verdict.windows
            self.windows_skipped.update(verdict.windows_skipped)
            if verdict.moved_by_zeros:
                self.moved_by_zeros.append(verdict.moved_by_zeros)
            if self._problem is not None:
                self.users_cases.append(verdict.case)
        if self._progress is not None:
            self._progress(verdict)

    def _is_the_fault(self, violation: Violation) -> bool:
        if self._final:
            if is_of_elements(violation):
                self.found_after, self._other = self.cases, violation
            return False
        if self.found_after is None:
            self.found_after = self.cases
        if self._trail:
            # how many steps there are tells little of the fault; `settle` names it
            first = self._trail[0]
            fits = violation.kind == "step-count" or may_be_unnamed(violation, first)
            fits = fits or bool(names_of(violation.diagnosis) & self._fitting)
            fits = fits and keeps_right_parameters(violation, first)
            if self._wandered and not violation.diagnosis:
                fits = fits and window_shape(violation) == window_shape(self._trail[0])
            return fits and violation.kind == self._trail[-1].kind
        sought = self._settled or self._on_probe
        if sought is not None and not is_same_fault(violation, sought):
            self._other = self._other or violation
            return False
        # the same fault may have another name without further runs
        alone = self._check(violation.case, shrinking=True).violation
        if self._first_pass and is_named_otherwise(alone, violation):
            self._other = self._other or violation
            return False
        if self._settled is None:
            self._found_at = Stopwatch()
        self._fitting = names_of("").union(*(names_of(v.diagnosis) for v in (violation, alone) if v))
        return True


def run_search(search: Search, drawn: st.SearchStrategy[Case], examples: int, seed_value: int) -> None:
    """Check drawn cases until one shows the fault that is searched for, and shrink that one."""
    try:
        with suppress(ViolatedError, EnoughError):
            run_on_cases(search.judge, drawn, examples=examples, seed_value=seed_value, prepare=search.ahead.prepare)
    finally:
        search.ahead.forget()
