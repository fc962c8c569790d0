"""The search for a violation. A fault is named twice at most: on the case that showed it and on the smallest one.

Weight probes come first: on them a name is exact. What a probe shows is shown once more on a ladder of small cases.
What no probe shows is drawn, and Hypothesis shrinks it by the kind of the violation alone. Where the two names differ,
`more_specific` decides.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from gradcheck_suite.core.case import Case, Input, Layer, Loss, Plan, ProblemSpec, is_probe
from gradcheck_suite.core.contract import (
    FINITE_GRADIENTS,
    MEAN_REDUCTION,
    SUM_REDUCTION,
    Loop,
    Problem,
    dealt_to_ranks,
    is_jax,
)
from gradcheck_suite.core.faults import is_general, is_of_weights, names_of
from gradcheck_suite.core.options import ChosenOptions
from gradcheck_suite.core.results import Verdict, Violation
from gradcheck_suite.errors import UsageError
from gradcheck_suite.loops.ranks import RANK_LOOPS
from gradcheck_suite.loops.reset_modes import plain
from gradcheck_suite.reference.large_batch import CannotJudgeError, Window
from gradcheck_suite.run.ranks import run_ranks
from gradcheck_suite.strategies.cases import SMALL_MICRO_BATCHES, size_of
from gradcheck_suite.strategies.drawing import ATTEMPTS, RedrawError, run_on_cases
from gradcheck_suite.verification.ahead import Ahead
from gradcheck_suite.verification.check import check, terms_of
from gradcheck_suite.verification.probe_plans import (
    Stopwatch,
    first_cases,
    has_slopes,
    long_cases,
    model_cases,
    slopes_case,
    small_count_cases,
    smallest_probe,
    within,
)
from gradcheck_suite.verification.separability import reference_of


class ViolatedError(Exception):
    """Raised at one place only, so that Hypothesis shrinks one fault and not several."""


class StopError(BaseException):
    """Carries a `UsageError` past Hypothesis, which would go on otherwise."""

    def __init__(self, error: UsageError) -> None:
        super().__init__()
        self.error = error


# Cases outside of what a loop assumes: gradients that are infinite or NaN.


OUTSIDE = "a window's gradient is infinite or NaN, and the loop assumes finite-gradients"


def starts_finite(case: Case, problem: Problem | None) -> bool:
    """Return whether the gradient of every window is finite at the initial parameters, in the case's dtype too."""
    try:
        reference, _ = reference_of(case, problem)
    except CannotJudgeError:
        return True  # `check` says why
    return reference is None or all(_is_finite(reference.window(w)) for w in range(len(case.plan.windows)))


def stays_finite(case: Case, problem: Problem | None) -> bool:
    """Return whether a sound loop meets only finite gradients at the parameters to which the optimizer moves."""
    reference, _ = reference_of(case, problem)
    if reference is None or case.optimizer is None:
        return True
    loop = plain if case.plan.world_size == 1 else RANK_LOOPS["all_reduce/zero_grad"]
    for step, observed in enumerate(run_ranks(loop, reference.instance)[0].observations):
        window = reference.window(step % len(case.plan.windows), observed.parameters)
        if not (np.isfinite(reference.flat(observed.gradients)).all() and np.isfinite(window.expected).all()):
            return False
    return True


def _is_finite(window: Window) -> bool:
    computed = [window.expected]
    if window.bound is not window.float64_bound:
        with suppress(RuntimeError):  # torch lacks an operation in this dtype: `check` says so
            computed += [window.bound.large_batch, *window.bound.contributions]
    return all(bool(np.isfinite(gradient).all()) for gradient in computed)


# Which of two names stands.


def more_specific(first: Violation, smallest: Violation) -> Violation:
    """Return the violation on the smallest case, under the name that the evidence supports best.

    The case that showed the fault first is larger, and its name explains more numbers: it stands, unless it is a
    general one and the smallest case's is not one of weights. On a small case, whose numbers are few, one of those fits
    by chance.
    """
    if first.diagnosis == smallest.diagnosis:
        return smallest
    if first.kind != smallest.kind or not smallest.explanation:
        return first
    by_chance = is_of_weights(smallest.diagnosis)
    if is_general(first.kind, first.diagnosis) and not by_chance and smallest.diagnosis != "not-linear":
        return smallest
    note = f"on this case alone the fault would be {smallest.diagnosis}: {smallest.explanation}"
    return replace(
        smallest,
        diagnosis=first.diagnosis,
        explanation=f"{first.explanation} (named on a larger case, {first.case.plan!r})",
        details=(*smallest.details, note),
    )


# The search.


SHRINK_SECONDS, COMPILING_SECONDS, WAITING_SECONDS = 30.0, 5.0, 0.5
"""Seconds of computing, or a quarter of the clock's: a busy machine shrinks as far."""
WAITS = ("deadlock", "timed-out")
"""Faults of which each smaller case takes seconds of the clock and tells no more: small cases alone are drawn then."""
MOST_HUNTED, MOST_BESIDE, MOST_SMALL = 50, 20, 60
"""Cases that are drawn to show the fault of a first probe, that of another probe, and that of a large case on a small
one."""
SHARE_OF_LIMIT = 0.25
"""Share of the time limit that a probe may be expected to take; one that would take longer is left out and reported."""
OF_GRADIENT = frozenset(("gradient", "non-finite", "none-pattern"))
"""Kinds of violation of which one fault may show several: which one depends on the gradient's values."""
LADDER = (
    *(Plan((n,), 1) for n in (1, 2)),
    *(Plan((1,), 2), Plan((1, 1), 2), Plan((1, 2), 2), Plan((2, 1), 2)),
    *(Plan((1, 1), 1), Plan((1, 2), 1), Plan((1,), 1, 2), Plan((1, 1, 1), 2), Plan((1, 1), 2, 2), Plan((1, 2, 1), 3)),
    *(Plan((1, 1, 1), 1), Plan((1, 2, 1), 2), Plan((1, 1, 1), 2, 2), Plan((1,), 1, 3), Plan((1, 2, 3, 1), 2)),
)
"""Plans of growing size, on which a fault of weights or steps is shown again with a linear model of one weight.

Between ranks it has two weights: a collective of one gradient would fit another rank's of a count, which hides that the
ranks' calls do not match.
"""
Progress = Callable[[Verdict], None]


class Search:
    """What a search has found so far.

    Attributes:
        violation: the smallest violation that has been named, or None.
        found_after: number of drawn cases until one showed it, 0 where a case of the ladder does; None where no
            ordinary case does.
        stopped: why shrinking ended before it had tried every smaller case, in words, or None.
        runs: how often the loop was run on cases whose turn came.
    """

    def __init__(
        self,
        loop: Loop,
        problem: Problem | None,
        options: ChosenOptions,
        progress: Progress | None,
        autocast: str | None,
        assumes: frozenset[str],
    ) -> None:
        self._loop, self._problem, self._options, self._progress = loop, problem, options, progress
        self._autocast, self._assumes, self._finite_only = autocast, assumes, FINITE_GRADIENTS in assumes
        self._compiles, terms = is_jax(loop), terms_of(loop, assumes, autocast)
        self._seconds = COMPILING_SECONDS if self._compiles else SHRINK_SECONDS
        self.ahead = Ahead(loop, problem, terms, options.time_limit_s, runs=not (self._finite_only or self._compiles))
        self.cases, self.judged, self.windows, self.ratio = 0, 0, 0, 0.0
        self._outside = self.runs = 0
        self.findings: dict[str, None] = {}
        self.skipped: Counter[str] = Counter()
        self.windows_skipped: Counter[str] = Counter()
        self.moved_by_zeros: list[str] = []
        self.users_cases: list[Case] = []
        self.found_after: int | None = None
        self.violation: Violation | None = None
        self.stopped: str | None = None
        self._sloped = False

    def run(
        self, drawn: st.SearchStrategy[Case], small: st.SearchStrategy[Case], fixed: Case | None, *, probes: bool
    ) -> None:
        """Search, and leave the smallest violation.

        Args:
            drawn: strategy of the cases.
            small: the same, of small ones.
            fixed: a case that is checked first, or None.
            probes: whether weight probes are checked.
        """
        seen, final = self.check(fixed).violation if fixed else None, False
        if probes and seen is None:
            seen, final = self.on_probes()
        self.violation = seen
        if seen is not None and self._is_enough(seen, final=final):
            return
        most = self._options.examples if seen is None else MOST_BESIDE if final else MOST_HUNTED
        found = self._drawn(drawn, seen, min(most, self._options.examples))
        if found is None:
            return
        first, smallest = found
        layers, micro_batches, *_ = size_of(smallest.case)
        if layers > 2 or micro_batches > SMALL_MICRO_BATCHES * smallest.case.plan.world_size:
            smaller = self._drawn(small, smallest, MOST_SMALL, already_found=True)
            if smaller is not None and size_of(smaller[1].case) < size_of(smallest.case):
                smallest = smaller[1]
        named = smallest if smallest is first else self._named(smallest)
        # a violation of ordinary gradients is plainer than that of large, small or infinite ones
        named_at_last = more_specific(first if seen is None or self._sloped or seen.kind != named.kind else seen, named)
        if not (self._sloped and named_at_last.diagnosis == "not-linear"):  # there the probe says more
            self.violation = named_at_last

    def _is_enough(self, seen: Violation, *, final: bool) -> bool:
        """Whether no case needs to be drawn for what a probe or the fixed case shows.

        A loop that did not return from a probe would make every drawn case wait for the time limit too.
        """
        if seen.diagnosis == "timed-out":
            return True
        if final:
            sloped = self._sloped and not self._compiles
            # a drawn case tells a fault of elements; of an exception it tells no more
            general = seen.kind != "raised" and is_general(seen.kind, seen.diagnosis)
            return self._problem is not None or not (sloped or general)
        return self._problem is None and not is_general(seen.kind, seen.diagnosis) and self.on_ladder(seen)

    def _named(self, violation: Violation) -> Violation:
        """Return the violation of a case with its name; the same where the loop shows none again."""
        return self.check(violation.case).violation or violation

    def _drawn(
        self, drawn: st.SearchStrategy[Case], seen: Violation | None, most: int, *, already_found: bool = False
    ) -> tuple[Violation, Violation] | None:
        """Draw cases until one shows the kind that was seen, or any; return that violation and the smallest one.

        Args:
            drawn: the strategy.
            seen: a violation of the kind that is searched for; None for any.
            most: number of cases.
            already_found: whether a drawn case has shown this violation before, so that no case is named or counted.
        """
        found: list[Violation] = []
        began, seconds = Stopwatch(), self._seconds
        kinds: set[str] = {seen.kind} if seen else set()
        kinds |= OF_GRADIENT if kinds & OF_GRADIENT and not already_found else set()

        def judge(case: Case) -> None:
            nonlocal began, seconds
            shrinking = bool(found) or already_found
            if shrinking and began.passed() > seconds:
                self.stopped = f"shrinking stopped after {seconds:g} s, so a smaller case may exist"
                return
            try:
                if self._is_outside(case) and self._outside % ATTEMPTS:
                    raise RedrawError
                verdict = self._simplest(case, shrinking=shrinking)
            except UsageError as error:
                raise StopError(error) from None
            violation = verdict.violation
            if not shrinking:
                self.cases += 1
                self._note(verdict)
            if violation is None or (kinds and violation.kind not in kinds):
                return
            if not found:
                began = Stopwatch()
                kinds.clear()
                kinds.add(violation.kind)
                if not already_found:
                    self.found_after = self.cases
                    self.violation = self.violation or violation
            if violation.diagnosis in WAITS:
                seconds = WAITING_SECONDS if already_found else 0.0
            if not found or size_of(violation.case) < size_of(found[-1].case):
                found.append(violation)
            raise ViolatedError

        try:
            with suppress(ViolatedError):
                run_on_cases(judge, drawn, examples=most, seed_value=self._options.seed, prepare=self.ahead.prepare)
        except KeyboardInterrupt:
            if found and not already_found:
                self.stopped = "shrinking was interrupted, so a smaller case may exist"
                with suppress(KeyboardInterrupt):  # a second one keeps the first case
                    self.violation = more_specific(found[0], self._named(found[-1]))
            raise
        finally:
            self.ahead.forget()
        return (found[0], found[-1]) if found else None

    def _simplest(self, case: Case, *, shrinking: bool) -> Verdict:
        """Return the verdict on a drawn case, or on the same without an optimizer where that shows a fault too."""
        verdict = self.check(case, shrinking=shrinking)
        if case.optimizer and verdict.violation and self._options.optimizer is None:
            still = self.check(case.replace(optimizer=None), shrinking=shrinking)
            return still if still.violation else verdict
        return verdict

    def on_ladder(self, seen: Violation) -> bool:
        """Show a probe's fault on a small case: the first that gives it the same name, else the first of its kind."""
        shown: Violation | None = None
        even_alone = False
        for case in self._ladder(seen.case):
            is_uneven = len({*case.plan.ranks}) > 1
            if is_uneven and even_alone:
                continue
            # many loops wait, or do something else wrong, where a rank has fewer micro-batches: there the name tells
            violation = self.check(case, shrinking=not is_uneven).violation
            if violation is None:
                continue
            is_kind = violation.kind == seen.kind
            # most others have no name until `_named` runs the loop further
            same = is_kind and (
                not violation.diagnosis or bool(names_of(violation.diagnosis) & names_of(seen.diagnosis))
            )
            if same or (is_kind and shown is None and not is_uneven):
                shown = violation
            if same:
                break
            even_alone |= is_uneven
        if shown is None:
            return False
        self.found_after, self.violation = 0, more_specific(seen, self._named(shown))
        return True

    def _ladder(self, probe: Case) -> Iterator[Case]:
        assert probe.spec is not None
        layers, loss = (Layer("linear", bias=False, features=1),), Loss("mse", reduction=probe.spec.loss.reduction)
        options, assumes, plans = self._options, self._assumes, dict[Plan, None]()
        spec = ProblemSpec(Input("vector", size=min(options.ranks, 2)), layers, loss)
        for plan in LADDER:
            with suppress(UsageError):  # the assumptions leave no micro-batch
                plans[within(plan, assumes)] = None
        numbers = sorted({min(options.ranks, 2), options.ranks})
        # a rank with fewer micro-batches makes a smaller case
        dealt = (
            dealt_to_ranks(plan, ranks, assumes, uneven=uneven)
            for plan, ranks, uneven in itertools.product(plans, numbers, (True, False))
        )
        for plan in dict.fromkeys(dealt):
            yield Case(spec, plan, dtype=options.dtype, device=options.device, optimizer=options.optimizer)

    def on_probes(self) -> tuple[Violation | None, bool]:
        """Check the weight probes; return the first violation, and whether no drawn case can show it.

        A loop may be made for its problem alone. Beside a user's problem the probes therefore count only if the loop
        passes the first of them.
        """
        options, assumes, users = self._options, self._assumes, self._problem
        if users is not None:
            assumes |= {SUM_REDUCTION if users.reduction == "sum" else MEAN_REDUCTION}
        asked, seconds = (assumes, options.dtype, options.device, options.ranks), 0.0

        def timed(case: Case) -> Verdict:
            nonlocal seconds
            began = time.perf_counter()
            verdict = self.check(case)
            seconds = (time.perf_counter() - began) / _micro_batches(case.plan)
            return verdict

        for case in first_cases(*asked, compiles=self._compiles):
            verdict = timed(case)
            if verdict.skipped:
                self.skipped[f"the weight probes: {verdict.skipped}"] += 1
                return None, False
            if (found := verdict.violation) and users is not None:
                name = found.diagnosis
                why = f"the weight probes: the loop fails on them ({name}), so its own problem alone was tried"
                self.skipped[why] += 1
                return None, False
            if found and self._compiles:
                # each run takes seconds: what a probe shows is the verdict, and few smaller ones are tried
                small = len(case.plan.micro_batches) <= 2
                return found if small else self._smallest_probe(found, assumes), True
            if found:
                return found, False
        rest = (
            slopes_case(*asked),
            *small_count_cases(*asked),
            *long_cases(*asked, compiles=self._compiles),
            *model_cases(*asked, optimizer=options.optimizer),
        )
        for case in rest:
            number, limit = _micro_batches(case.plan), options.time_limit_s
            if limit is not None and seconds * number > SHARE_OF_LIMIT * limit:
                self.skipped[
                    f"the weight probe of {number} micro-batches was left out: it would take this loop "
                    f"{seconds * number:.0f} s of the time limit of {limit:g} s, which --time-limit raises"
                ] += 1
                continue
            verdict = timed(case)
            if verdict.skipped:
                self.skipped[f"a weight probe: {verdict.skipped}"] += 1
            if verdict.violation:
                return self._smallest_probe(verdict.violation, assumes), True
        return None, False

    def _smallest_probe(self, first: Violation, assumes: frozenset[str]) -> Violation:
        """Return the violation on the smallest probe that shows it, named there and on the first."""
        self.violation = first  # what an interrupt keeps
        self._sloped = has_slopes(first.case)
        smallest, beside = smallest_probe(lambda case: self.check(case, shrinking=True), first, assumes, self._seconds)
        named = first if smallest is first else more_specific(first, self._named(smallest))
        return replace(named, details=(*named.details, *beside))

    def check(self, case: Case, *, shrinking: bool = False) -> Verdict:
        """Return the verdict on a case, with the name of the fault unless a smaller case is searched for."""
        problem = None if case.spec else self._problem
        if self._finite_only and not is_probe(case) and not starts_finite(case, problem):
            return Verdict(case, skipped=OUTSIDE)
        known, outcome = self.ahead.result(case)
        verdict = known or check(
            self._loop,
            case,
            problem=problem,
            outcome=outcome,
            time_limit_s=self._options.time_limit_s,
            shrinking=shrinking,
            autocast=self._autocast,
            assumes=self._assumes,
        )
        self.runs += verdict.runs
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


def _micro_batches(plan: Plan) -> int:
    return plan.epochs * len(plan.micro_batches)
