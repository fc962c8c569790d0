"""verify(loop) -> Result: check a loop on many drawn cases, and shrink the first violation."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from gradcheck_suite.core.case import Case, Plan, is_probe
from gradcheck_suite.core.contract import (
    EQUAL_BATCHES,
    EQUAL_MICRO_BATCHES,
    FINITE_GRADIENTS,
    MEAN_REDUCTION,
    SUM_REDUCTION,
    ChosenOptions,
    Loop,
    Problem,
    VerifyOptions,
    assumptions_of,
    autocast_of,
    checked_assumptions,
    checked_autocast,
    dealt_to_ranks,
    expect_within,
    is_jax,
)
from gradcheck_suite.core.results import Result, Verdict, Violation
from gradcheck_suite.errors import UsageError
from gradcheck_suite.judge.elements import wrong_and_right
from gradcheck_suite.judge.gradient import OF_ELEMENTS
from gradcheck_suite.judge.probe_faults import linear_fault
from gradcheck_suite.judge.reruns import LoopRunner
from gradcheck_suite.judge.weights import ALONE, names_of
from gradcheck_suite.loops.ranks import RANK_LOOPS
from gradcheck_suite.loops.reset_modes import plain
from gradcheck_suite.reference.large_batch import CannotJudgeError, Window
from gradcheck_suite.run.instance import Instance, instance_of, one_thread
from gradcheck_suite.run.ranks import kept_ranks, run_ranks
from gradcheck_suite.run.runner import quiet_loops
from gradcheck_suite.run.traffic import PLAIN, traffic_per_window, traffic_text
from gradcheck_suite.strategies.cases import SMALL_MICRO_BATCHES, SOMETIMES_MOVING, cases, expect_layers_left, size_of
from gradcheck_suite.strategies.drawing import ATTEMPTS, RedrawError, run_on_cases
from gradcheck_suite.verification.ahead import Ahead
from gradcheck_suite.verification.check import check, of_torch, terms_of
from gradcheck_suite.verification.probe_plans import (
    Checked,
    Stopwatch,
    first_cases,
    has_slopes,
    long_cases,
    slopes_case,
    smallest_probe,
)
from gradcheck_suite.verification.second_opinion import SecondOpinion, second_opinion
from gradcheck_suite.verification.separability import reference_of


class ViolatedError(Exception):
    """Raised at one place only, so that Hypothesis shrinks one fault and not several."""


class StopError(BaseException):
    """Carries a `UsageError` past Hypothesis, which would go on otherwise."""

    def __init__(self, error: UsageError) -> None:
        super().__init__()
        self.error = error


class EnoughError(BaseException):
    """Ends the drawing of cases. It is no `Exception`, so that Hypothesis does not shrink it."""


# Whether a smaller case shows the fault that a larger one showed, and not another that fits it because it is small.


SHOWN_BY_LARGER = frozenset(
    ("no-gradient", "wrong-scale", "partial-gradient", "permuted-gradient", "swapped-gradients", "missing-gradient")
)
"""Diagnoses that a larger case shows as well as a small one. Where it does not, they fit the small one by chance."""
MAY_BE_OF_ELEMENTS = frozenset(("no-gradient", "not-linear", "unequal-items", "unrecognised-weights"))
"""What a weight probe shows of a fault of elements: its parameter has one element for each item."""


def window_shape(violation: Violation) -> tuple[bool, ...]:
    """Return what a fault's name may depend on in the violated window: later, short, of several, of unequal counts.

    A search that wandered off to another fault is repeated with these kept.
    """
    if violation.window is None:
        return ()
    plan = violation.case.plan
    window = plan.windows[violation.window]
    counts = {0 if j in plan.masked else plan.micro_batches[j] for j in window}
    later = bool(violation.epoch or violation.window)
    return later, len(window) < plan.accumulation_steps, len(window) > 1, len(counts) > 1


def is_same_fault(found: Violation, first: Violation) -> bool:
    """Return whether a violation has the kind and the diagnosis of the first; `not-linear` fits most diagnoses."""
    if found.kind != first.kind or not keeps_right_parameters(found, first):
        return False
    return may_be_unnamed(found, first) or found.diagnosis == first.diagnosis


def may_be_unnamed(found: Violation, first: Violation) -> bool:
    """Return whether the first violation has no name, and the other's is none that the first would have shown."""
    return first.diagnosis == "not-linear" and not names_of(found.diagnosis) & SHOWN_BY_LARGER


def keeps_right_parameters(found: Violation, first: Violation) -> bool:
    """Return whether some parameter is right that has a gradient, where the first violation is of others alone."""
    comparison = found.evidence
    if ALONE not in first.explanation or comparison is None:
        return True
    _, right = wrong_and_right(comparison)
    return any(np.any(comparison.layout.part(comparison.expected, name)) for name in right)


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


SHARE_OF_LIMIT = 0.25
"""Share of the time limit that a probe may be expected to take; one that would take longer is left out and reported."""


@dataclass(frozen=True)
class Battery:
    """What the battery shows of a loop.

    Attributes:
        violation: of the first probe that is violated, made smaller where `final`; None where all hold.
        final: whether no drawn case can show the violation.
        skipped: why probes were not judged.
    """

    violation: Violation | None = None
    final: bool = False
    skipped: tuple[str, ...] = ()


def run_battery(
    checked: Checked,
    runner: Callable[[], LoopRunner],
    *,
    assumes: frozenset[str],
    dtype: str,
    device: str,
    time_limit_s: float | None,
    ranks: int = 1,
    compiles: bool = False,
) -> Battery:
    """Check a loop on the battery, within its assumptions.

    The first probes show most faults; for such a fault drawn cases are searched, too. What the other probes show is a
    fault that no drawn case can show: their violation, made smaller, is the verdict.

    Args:
        checked: returns the loop's verdict on a case.
        runner: returns a new runner of the loop.
        assumes: assumptions of the loop.
        dtype: of the probe's parameter.
        device: of the runs.
        time_limit_s: seconds after which the loop is stopped on one probe.
        ranks: number of ranks of the probes.
        compiles: whether each run compiles, as that of a loop of JAX, so that it takes seconds: what a probe shows is
            then the verdict, and few smaller ones are tried.
    """
    pace = _Pace(time_limit_s)
    seconds = COMPILING_SECONDS if compiles else SHRINK_SECONDS
    for case in first_cases(assumes, dtype, device, ranks, compiles=compiles):
        verdict = pace.timed(checked, case)
        if verdict.skipped:
            return Battery(skipped=(f"the weight probes: {verdict.skipped}",))
        if verdict.violation is not None and compiles:
            small = len(case.plan.micro_batches) <= 2
            found = verdict.violation if small else smallest_probe(checked, verdict.violation, assumes, seconds)
            return Battery(found, final=True)
        if verdict.violation is not None:
            return Battery(_with_size_fault(verdict.violation, slopes_case(assumes, dtype, device, ranks), runner))
    skipped: list[str] = []
    for case in (
        slopes_case(assumes, dtype, device, ranks),
        *long_cases(assumes, dtype, device, ranks, compiles=compiles),
    ):
        if reason := pace.too_slow(case):
            skipped.append(reason)
            continue
        verdict = pace.timed(checked, case)
        if verdict.skipped:
            skipped.append(f"a weight probe: {verdict.skipped}")
        if verdict.violation is not None:
            return Battery(
                smallest_probe(checked, verdict.violation, assumes, seconds), final=True, skipped=tuple(skipped)
            )
    return Battery(skipped=tuple(skipped))


class _Pace:
    """The time that a loop takes per micro-batch, from its latest probe."""

    def __init__(self, time_limit_s: float | None) -> None:
        self._time_limit_s, self._seconds = time_limit_s, 0.0

    def timed(self, checked: Checked, case: Case) -> Verdict:
        """Return the verdict on a case and note the time."""
        began = time.perf_counter()
        verdict = checked(case)
        self._seconds = (time.perf_counter() - began) / _micro_batches(case.plan)
        return verdict

    def too_slow(self, case: Case) -> str | None:
        """Return why a case is left out: it would come close to the time limit. None where it would not."""
        needed = self._seconds * _micro_batches(case.plan)
        if self._time_limit_s is None or needed <= SHARE_OF_LIMIT * self._time_limit_s:
            return None
        return (
            f"the weight probe of {_micro_batches(case.plan)} micro-batches was left out: it would take this loop "
            f"{needed:.0f} s of the time limit of {self._time_limit_s:g} s, which --time-limit raises"
        )


def _micro_batches(plan: Plan) -> int:
    return plan.epochs * len(plan.micro_batches)


def _with_size_fault(violation: Violation, case: Case, runner: Callable[[], LoopRunner]) -> Violation:
    """Return a violation with a line about a further fault that depends on the size of the gradient, if there is one.

    The weights are wrong anyway, so the loop is held to its own weights on the same plan with slopes of 1.
    """
    if violation.kind != "gradient":
        return violation
    fault = linear_fault(case, runner())
    if fault is None or fault.name in (violation.diagnosis, "not-linear"):
        return violation
    return replace(violation, details=(*violation.details, f"a further fault, {fault.name}: {fault.sentence}"))


SHRINK_SECONDS, COMPILING_SECONDS = 30.0, 5.0
"""Seconds of computing, or a quarter of the clock's: a busy machine shrinks as far. A loop that compiles in each run is
not run so often."""
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
        self.loop, self._problem, self._time_limit_s, self._progress = loop, problem, time_limit_s, progress
        self._autocast, self._assumes, self._finite_only = autocast, assumes, FINITE_GRADIENTS in assumes
        self._outside = 0
        terms = terms_of(loop, assumes, autocast)
        self.ahead = Ahead(loop, problem, terms, time_limit_s, runs=not (self._finite_only or is_jax(loop)))
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
        as_drawn = seen.diagnosis not in MAY_BE_OF_ELEMENTS and (is_jax(self.loop) or not has_slopes(seen.case))
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
            lambda: LoopRunner(self.loop, time_limit_s=self._time_limit_s),
            assumes=assumes,
            dtype=dtype,
            device=device,
            time_limit_s=self._time_limit_s,
            ranks=self._ranks,
            compiles=is_jax(self.loop),
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
        seconds = COMPILING_SECONDS if is_jax(self.loop) else SHRINK_SECONDS
        if (shrinking or self._settled) and self._found_at.passed() > seconds:
            self.stopped = f"shrinking stopped after {seconds:g} s, so a smaller case may exist"
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
            self.loop,
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
            # some elements are wrong, which a weight probe, with one element for each item, shows as another fault
            if names_of(violation.diagnosis) & OF_ELEMENTS:
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
        # The same fault may have another name without further runs. A case on which both give the same name explains
        # the fault better: a window of one micro-batch shows a mean of means as a wrong factor.
        alone = self._check(violation.case, shrinking=True).violation
        named = "" if alone is None else alone.diagnosis
        if self._first_pass and violation.kind == "gradient" and named not in ("", violation.diagnosis):
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


LARGE_MODEL = 1_000_000
"""Number of parameters from which several threads are faster than one, also on a busy machine."""
SMALL_EXAMPLES = 60
"""Number of small cases that are tried where shrinking has left a larger one."""
UNASKED = ("not-accumulable", "raised", "step-count")
"""Kinds of violation on which JAX is not asked: the gradient is not what is wrong."""


def whole_windows_case(problem_name: str, assumes: frozenset[str], options: ChosenOptions) -> Case:
    """Return the case of a user's problem that is tried first: two whole windows of unequal micro-batches, one pass.

    Most training meets a fault in whole windows; a fault of the short last window is searched for afterwards.
    """
    micro_batches = (2, 2, 1, 1) if EQUAL_MICRO_BATCHES in assumes else (1, 3, 4, 2)
    if EQUAL_BATCHES in assumes:
        micro_batches = (2, 2, 2, 2)
    plan = dealt_to_ranks(Plan(micro_batches, 2), options.ranks, assumes)
    return Case(problem_name, plan, dtype=options.dtype, device=options.device)


def verify(
    loop: Loop,
    options: VerifyOptions | None = None,
    *,
    name: str | None = None,
    problem: Problem | None = None,
    problem_name: str = "problem",
    plan: st.SearchStrategy[Plan] | None = None,
    progress: Progress | None = None,
    **fields: Any,
) -> Result:
    """Verify a loop on drawn cases.

    Args:
        loop: the subject, a callable that takes a `TrainingRun`.
        options: number of cases, dtype and so on; the defaults of `VerifyOptions` if None.
        name: the loop's name in the result.
        problem: the user's problem that is trained in place of random ones; then only plans are drawn.
        problem_name: the problem's name in cases, such as `"model.py:PROBLEM"`.
        plan: a strategy in place of `plans()`; then the fixed first cases, which have their own plans, are left out.
        progress: called with every verdict.
        fields: fields of `VerifyOptions`, over those of `options`: `examples=5`. `seed_value` is another name of
            `seed`.

    Raises:
        UsageError: an argument is wrong, or the problem breaks its contract.
    """
    if "seed_value" in fields:
        fields["seed"] = fields.pop("seed_value")
    options = (options or VerifyOptions()).replace(**fields).of(loop)
    problem = of_torch(loop, problem)
    chosen = _assumed(loop, options, problem, problem_name)
    autocast = options.autocast or checked_autocast(autocast_of(loop))
    by_chance = options.optimizer is None
    search = Search(
        loop, problem, options.time_limit_s, progress, autocast, chosen, moves_by_chance=by_chance, ranks=options.ranks
    )
    started = time.perf_counter()
    opinion, interrupted, traffic = None, False, None
    try:
        with _threads(problem), _frozen_heap(), kept_ranks(), _settled(search), quiet_loops(options.quiet_loop):
            _search(search, options, chosen, None if problem is None else problem_name, plan)
            if options.ranks > 1 and search.violation is None:
                traffic = _traffic(loop, options, problem, problem_name)
        opinion = _opinion(search, problem, options.second_opinion_s)
    except KeyboardInterrupt:
        interrupted = True  # the verdicts so far stand
    except StopError as stop:
        raise stop.error from None
    return Result(
        loop=name or str(getattr(loop, "__name__", repr(loop))),
        cases=search.cases,
        seconds=time.perf_counter() - started,
        violation=search.violation,
        found_after=search.found_after,
        assumes=tuple(sorted(chosen)),
        autocast=autocast,
        ratio=search.ratio,
        findings=(*search.findings, *(opinion.findings if opinion else ())),
        skipped=dict(search.skipped),
        interrupted=interrupted,
        judged=search.judged,
        windows=search.windows,
        windows_skipped=dict(search.windows_skipped),
        second_opinion=None if opinion is None else opinion.summary(),
        shrinking=search.stopped,
        traffic=traffic,
        moved_by_zeros=next(iter(search.moved_by_zeros), None),
        moving_cases=len(search.moved_by_zeros),
    )


def _assumed(loop: Loop, options: VerifyOptions, problem: Problem | None, problem_name: str) -> frozenset[str]:
    """Return what a loop relies on; expect the problem, or what is drawn, to be within it."""
    if is_jax(loop) and options.ranks > 1:
        raise UsageError(
            "a loop of JAX runs in one process: drop --ranks, and set "
            "XLA_FLAGS=--xla_force_host_platform_device_count=2 for a loop that uses shard_map on several devices"
        )
    if not callable(loop):
        raise UsageError(f"a loop must be callable with one TrainingRun, got {type(loop).__name__}")
    chosen = checked_assumptions({*options.assumes, *assumptions_of(loop)})
    if problem is not None:
        expect_within(problem, chosen, name=problem_name)
    expect_layers_left(chosen)
    return chosen


@contextmanager
def _settled(search: Search) -> Iterator[None]:
    """Keep the smallest case that was found before an interrupt; a second interrupt keeps the first case."""
    try:
        yield
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt, UsageError):
            search.settle_interrupted()
        raise


@lru_cache(maxsize=64)
def _cases(*, compiles: bool, **fields: Any) -> st.SearchStrategy[Case]:
    """Return the strategy of the cases; the same for the same arguments, since `run_on_cases` keeps what it draws."""
    return cases(**fields).map(_of_two_sizes) if compiles else cases(**fields)


def _of_two_sizes(case: Case) -> Case:
    """Return a case whose micro-batches have its smallest or its largest size: a loop of JAX compiles each size."""
    sizes = case.plan.micro_batches
    low, high = min(sizes), max(sizes)
    few = tuple(low if 2 * n < low + high else high for n in sizes)
    return case if few == sizes else case.replace(plan=case.plan.replace(micro_batches=few))


def _search(
    search: Search,
    options: ChosenOptions,
    assumes: frozenset[str],
    problem_name: str | None,
    plan: st.SearchStrategy[Plan] | None,
) -> None:
    """Check the fixed first cases, then drawn ones, and shrink the first violation."""
    drawn, small = (
        _cases(
            problem=problem_name,
            plan=plan,
            dtype=options.dtype,
            device=options.device,
            optimizer=options.optimizer or SOMETIMES_MOVING,
            assumes=tuple(sorted(assumes)),
            small=few,
            ranks=options.ranks,
            compiles=is_jax(search.loop),
        )
        for few in (False, True)
    )
    if problem_name is None and plan is None:
        search.run_battery(assumes, options.dtype, options.device)
    elif problem_name is not None and plan is None:
        search.probe([whole_windows_case(problem_name, assumes, options)])
        search.run_battery_beside_problem(assumes, options.dtype, options.device)
    if not search.is_over:
        run_search(search, drawn, options.examples, options.seed)
    if search.turn_to_other_fault():
        run_search(search, drawn, options.examples, options.seed)
    search.settle()
    if search.search_small():
        run_search(search, small, SMALL_EXAMPLES, options.seed)
        search.settle()


def _opinion(search: Search, problem: Problem | None, budget_s: float) -> SecondOpinion | None:
    """Ask JAX about a user's problem, on the cases that the verdict rests on; None where it is not asked."""
    violation = search.violation
    # JAX computes the gradient of a problem of JAX already
    if problem is None or is_jax(search.loop) or (violation and (violation.kind in UNASKED or violation.case.spec)):
        return None
    return second_opinion([violation.case] if violation else search.users_cases, problem, budget_s=budget_s)


def _traffic(loop: Loop, options: ChosenOptions, problem: Problem | None, problem_name: str) -> str | None:
    """Return a sentence about what ranks communicate in each window; None where the loop fails on such plans."""
    subject = PLAIN if problem is None else problem_name

    def instance(plan: Plan) -> Instance:
        return instance_of(Case(subject, plan, dtype=options.dtype, device=options.device), problem)

    found = traffic_per_window(loop, instance, options.ranks, options.time_limit_s)
    return traffic_text(found) if found else None


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Leave what exists out of garbage collection: each walk over the objects of torch and JAX takes 0.3 s."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _threads(problem: Problem | None) -> AbstractContextManager[None]:
    """Return the context that a problem's models are computed in: one thread, unless they are large."""
    if problem is None:
        return one_thread()
    try:
        size = sum(p.numel() for p in problem.model(0).parameters())
    except (Exception, SystemExit):
        return nullcontext()  # a user's own code may raise anything; the check of the first case reports it
    return one_thread() if size < LARGE_MODEL else nullcontext()
