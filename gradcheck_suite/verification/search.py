"""The search for a violation.

A fault is named twice at most: on the case that showed it and on the smallest one. Weight probes
come first: on them a name is exact. What a probe shows is shown once more on a ladder of small
cases. What no probe shows is drawn, and Hypothesis shrinks it by the kind of the violation alone.
Where the two names differ, `more_specific` decides.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice, product

import numpy as np
from hypothesis import strategies as st

from gradcheck_suite.core.case import (
    Case,
    Input,
    Layer,
    Loss,
    Plan,
    ProblemSpec,
    Reduction,
    is_probe,
    probe_case,
    slopes_of,
    slopes_text,
    unit_of,
)
from gradcheck_suite.core.contract import (
    EQUAL_BATCHES,
    EQUAL_MICRO_BATCHES,
    FINITE_GRADIENTS,
    MEAN_REDUCTION,
    ONE_EPOCH,
    PLAIN_COUNTS,
    SUM_REDUCTION,
    WHOLE_WINDOWS,
    Loop,
    Problem,
    dealt_to_ranks,
    is_jax,
)
from gradcheck_suite.core.faults import is_general, is_of_weights, names_of, with_note
from gradcheck_suite.core.options import ChosenOptions
from gradcheck_suite.core.results import Verdict, Violation, is_endless
from gradcheck_suite.errors import UsageError
from gradcheck_suite.loops.ranks import RANK_LOOPS
from gradcheck_suite.loops.reset_modes import plain
from gradcheck_suite.reference.large_batch import CannotJudgeError, WindowReference
from gradcheck_suite.run.optimizers import NEEDS
from gradcheck_suite.run.ranks import run_ranks
from gradcheck_suite.strategies.cases import SMALL_MICRO_BATCHES, reductions_within, size_of
from gradcheck_suite.strategies.drawing import ATTEMPTS, RedrawError, run_on_cases
from gradcheck_suite.verification.ahead import Prefetcher
from gradcheck_suite.verification.check import check, rules_of
from gradcheck_suite.verification.separability import reference_of


class ViolatedError(Exception):
    """Raised at one place only, so that Hypothesis shrinks one fault and not several."""


class StopError(BaseException):
    """Carries a `UsageError` past Hypothesis, which would go on otherwise."""

    def __init__(self, error: UsageError) -> None:
        super().__init__()
        self.error = error


class ProcessorStopwatch:
    """Measures time from when it is made, such that a busy machine searches as far as an idle one."""

    def __init__(self) -> None:
        self._thread = time.thread_time()
        self._clock = time.perf_counter()

    def passed(self) -> float:
        """Return the seconds that this thread computed since then, or a quarter of the clock's if
        that is more.
        """
        return max(time.thread_time() - self._thread, (time.perf_counter() - self._clock) / 4)


# The battery of weight probes that every loop is checked on before any case is drawn.
#
# Drawn cases have gradients of about 1, few micro-batches and few epochs; the battery has what they
# lack. Most counts are powers of two, so that the weights of a correct loop are exact in every
# dtype.


def _mixed(micro_batches: int) -> tuple[int, ...]:
    """Return sizes of 1 and 2 items whose sum is a power of two."""
    twos = 2 ** math.ceil(math.log2(micro_batches)) - micro_batches
    return (*(2,) * twos, *(1,) * (micro_batches - twos))


FIRST = (Plan((1, 3, 2, 2, 4), 2, 2), Plan((1, 2, 5, 2, 2, 2, 4), 3, 2))
"""The plans that show most faults. In windows of three micro-batches, what two show alike is different: the last one
alone, all but the first, the last one of several equal sizes."""
SMALL_COUNTS = Plan((1, 1, 3, 5, 1), 2)
UNIT = 0.25
"""A plan whose items count so little that windows count less than 1, as sums of class weights may, and more."""
WHOLE = Plan((2, 6), 2)
"""The plan that a loop of JAX is checked on before: a loop that ends no short window may average means as well, and
that is what most training meets. It compiles little. No micro-batch has one item, since padding by it looks like a
mean of means."""
LONG = (
    Plan((*_mixed(17), *_mixed(5)), 17, 2),
    Plan((*_mixed(33), 2, 1, 1), 33),
    Plan((3, 1, 2, 2, 2), 2, 12),
    Plan((*(1, 1, 2) * 91, 4), 3),
    Plan((1, 2, 1) * 100, 1),
    Plan((*range(1, 17), 31, 32, 33, 17), 4),
)
"""Plans that no strategy draws: windows of 17 and of 33 micro-batches, 12 epochs, 274 micro-batches in windows of
three, so that a counter that wraps at a power of two loses the windows, 300 windows, so that a counter of them that is
a byte wraps, and micro-batches of every size up to 17 and of 31 to 33 items."""

LARGE = {
    "float64": (12, 40, 200),
    "float32": (12, 40, 60),
    "bfloat16": (12, 40, 60),
    "float16": (13,),
}
SMALL = {
    "float64": (-12, -40, -200),
    "float32": (-12, -40, -100),
    "bfloat16": (-12, -40, -100),
    "float16": (-16,),
}
"""Sizes of large and small gradients as powers of two. The norm of a large one exceeds 1000. Its square, and
its product with a loss scale of 2**16, stay within the dtype, but for float16: there the loss scale may be 4."""
WITHIN = (0, -2, -1, -3)
"""Exponents that are added within a window's two micro-batches of two items: elements and micro-batches differ in size,
so that clipping by value, by norm and by micro-batch differ."""
ORDINARY = (1.0,) * 4
WITH_INFINITY = (math.inf, 1.0, 1.0, 1.0)
WITH_NAN = (1.0, 1.0, math.nan, 1.0)


def satisfying(plan: Plan, assumes: frozenset[str]) -> Plan:
    """Return the plan, changed so that it satisfies a loop's assumptions."""
    if WHOLE_WINDOWS in assumes and plan.has_short_window:
        plan = plan.select(range(plan.windows[-1][0]))
    if ONE_EPOCH in assumes:
        plan = plan.replace(epochs=1)
    if EQUAL_BATCHES in assumes:
        return plan.replace(micro_batches=(2,) * len(plan.micro_batches))
    if EQUAL_MICRO_BATCHES in assumes:
        smallest = [min(plan.micro_batches[j] for j in window) for window in plan.windows]
        sizes: list[int] = []
        for size, window in zip(smallest, plan.windows, strict=True):
            sizes += [size] * len(window)
        plan = plan.replace(micro_batches=tuple(sizes))
    return plan


def first_cases(
    assumes: frozenset[str], dtype: str, device: str, ranks: int = 1, *, compiles: bool = False
) -> Iterator[Case]:
    """Yield the probes that show most faults, within a loop's assumptions.

    `WHOLE` first of one that compiles.
    """
    if compiles:
        yield probe_case(
            satisfying(WHOLE, assumes), reductions_within(assumes)[0], dtype=dtype, device=device
        )
    for number, plan in enumerate(FIRST):
        dealt = dealt_to_ranks(
            satisfying(plan, assumes),
            ranks,
            assumes,
            uneven=number > 0,
        )
        for reduction in reductions_within(assumes):
            yield probe_case(dealt, reduction, dtype=dtype, device=device)


def long_cases(
    assumes: frozenset[str], dtype: str, device: str, ranks: int = 1, *, compiles: bool = False
) -> Iterator[Case]:
    """Yield the probes with plans that no strategy draws, within a loop's assumptions.

    A loop that compiles is not checked on the last three, which have hundreds of micro-batches, and
    twenty sizes.
    """
    plans = LONG[:-3] if compiles else LONG
    for plan in plans:
        dealt = dealt_to_ranks(satisfying(plan, assumes), ranks, assumes)
        yield probe_case(dealt, reductions_within(assumes)[0], dtype=dtype, device=device)


def small_count_cases(
    assumes: frozenset[str], dtype: str, device: str, ranks: int = 1
) -> Iterator[Case]:
    """Yield the probe with windows that count less than 1, unless a loop assumes sums or plain
    counts.
    """
    if "mean" in reductions_within(assumes) and PLAIN_COUNTS not in assumes:
        dealt = dealt_to_ranks(satisfying(SMALL_COUNTS, assumes), ranks, assumes)
        yield probe_case(dealt, dtype=dtype, device=device, unit=UNIT)


def slopes_case(assumes: frozenset[str], dtype: str, device: str, ranks: int = 1) -> Case:
    """Return the probe whose windows have gradients of many sizes, and an infinity and a NaN in two
    of them.

    Between them are windows of ordinary gradients, which show what a window leaves behind. Its plan
    is within every assumption.
    """
    large, small = ([_of_size(e) for e in exponents[dtype]] for exponents in (LARGE, SMALL))
    windows = [ORDINARY, large[0], ORDINARY, *large[1:], ORDINARY, *small, ORDINARY]
    if FINITE_GRADIENTS not in assumes:
        windows += [WITH_INFINITY, ORDINARY, WITH_NAN, ORDINARY]
    slopes = slopes_text(chain.from_iterable(windows))
    reduction: Reduction = reductions_within(assumes)[0]
    plan = Plan((2, 2) * len(windows), 2)
    if ranks > 1:
        # the same items in each window, dealt to two ranks
        plan = Plan((1, 1, 1, 1) * len(windows), 2, ranks=(2 * len(windows),) * 2)
    return probe_case(
        plan,
        reduction,
        dtype=dtype,
        device=device,
        slopes=slopes,
    )


def model_cases(
    assumes: frozenset[str],
    dtype: str,
    device: str,
    ranks: int = 1,
    *,
    optimizer: str | None = None,
) -> Iterator[Case]:
    """Yield cases on a model with a matrix and a bias, of what the probes show on their one vector
    alone.

    One has an optimizer that moves the parameters far, and takes many steps. The other has
    gradients of many sizes. Losses have both signs.
    """
    sizes = slopes_case(assumes, dtype, device, ranks)
    assert sizes.spec is not None
    spec = ProblemSpec(
        Input("vector", size=2), (Layer("linear", features=1, bias=True),), sizes.spec.loss
    )
    exponents = (0, LARGE[dtype][0], 0, SMALL[dtype][0])
    slopes = slopes_text(chain.from_iterable(map(_of_size, exponents)))
    plan = satisfying(Plan((2, 2) * len(exponents), 2, 1 if ONE_EPOCH in assumes else 5), assumes)
    loss = Loss("identity", reduction=spec.loss.reduction, slopes=slopes)
    # an optimizer that takes no bias, or no dense gradient, has no such model
    moving = optimizer if optimizer and optimizer not in NEEDS else "sgd"
    moved = sizes.replace(problem=replace(spec, loss=loss), optimizer=moving)
    # ordinary gradients come first: what they show is plainer
    yield moved.replace(plan=dealt_to_ranks(plan, ranks, assumes))
    yield sizes.replace(problem=spec)


def _of_size(exponent: int) -> tuple[float, ...]:
    return tuple(2.0 ** (exponent + within) for within in WITHIN)


# The smallest weight probe that shows a violation of the same kind: fewer windows, epochs and
# micro-batches, smaller K, fewer slopes. Greedy: the first smaller one that shows it is kept, and
# the search begins anew.


PROBE_SECONDS = 20.0
"""Seconds of computing after which a violated probe is not made smaller any more."""
Smaller = Iterator[tuple[str, Case]]
"""Smaller probes, each with the number of its plan that is smaller, in words; empty where none alone is."""


def has_slopes(case: Case) -> bool:
    """Return whether the losses of a probe's items have slopes of several sizes."""
    return case.spec is not None and "slopes" in case.spec.loss.o


def smallest_probe(
    checked: Callable[[Case], Verdict],
    violation: Violation,
    assumes: frozenset[str],
    seconds: float,
) -> tuple[Violation, list[str]]:
    """Return the violation on the smallest weight probe that shows it, and the next smaller plans
    that hold, in words.

    Args:
        checked: returns a loop's verdict on a case.
        violation: the loop's violation, on a weight probe.
        assumes: assumptions of the loop, which smaller plans satisfy too.
        seconds: the time after which shrinking ends, at most `PROBE_SECONDS`.
    """
    began = ProcessorStopwatch()
    right = dict[str, str]()
    if violation.kind == "raised" or is_endless(violation):
        return violation, []
    before = None
    while before is not violation:
        before = violation
        right.clear()
        for text, case in _smaller(violation, assumes):
            if began.passed() > min(seconds, PROBE_SECONDS):
                return violation, []
            verdict = checked(case)
            if verdict.violation is not None and verdict.violation.kind == violation.kind:
                violation = verdict.violation
                break
            if text and verdict.holds and not verdict.skipped:
                # the last one of a number is the next smaller
                right[text.partition(" = ")[0]] = f"the loop is right with {text}, all else alike"
    return violation, [*right.values()]


def _smaller(violation: Violation, assumes: frozenset[str]) -> Smaller:
    case = violation.case
    sloped = has_slopes(violation.case)
    if sloped:
        yield "", _of_plan(case, case.plan)
        yield from _of_fewer_slopes(violation)
    # with slopes, which belong to the items, of the numbers only that of epochs
    for text, number, with_number in islice(_numbers(case.plan), 1 if sloped else None):
        step = number // 2
        while step:
            # the assumptions may leave no micro-batch
            with suppress(UsageError):
                if (plan := satisfying(with_number(number - step), assumes)) != case.plan:
                    yield f"{text} = {number - step}", _of_plan(case, plan, tuple(slopes_of(case)))
            step //= 2
    if sloped:
        return
    # within the assumptions, micro-batches of one item may have the size of this plan's again
    single = satisfying(
        replace(case.plan, micro_batches=(1,) * len(case.plan.micro_batches)), assumes
    )
    if single != case.plan:
        yield "", _of_plan(case, single)


def _numbers(plan: Plan) -> Iterator[tuple[str, int, Callable[[int], Plan]]]:
    """Yield each number of a plan that can be smaller, in words, its value, and the plan with
    another.
    """
    count = len(plan.micro_batches)
    k = plan.accumulation_steps
    yield "epochs", plan.epochs, lambda n: replace(plan, epochs=n)
    yield "micro-batches in an epoch", count, lambda n: plan.select(range(n))
    # a plan of one window keeps one
    one = count <= k
    yield (
        "accumulation_steps",
        k,
        lambda n: replace(
            plan, accumulation_steps=n, micro_batches=plan.micro_batches[: n if one else count]
        ),
    )


def _of_fewer_slopes(violation: Violation) -> Smaller:
    """Yield one window or two, then one item of each, then slopes nearer to 1, all by the same
    power of two.
    """
    case = violation.case
    slopes = tuple(slopes_of(case))
    yield from _of_fewer_windows(case, slopes, violation.window)
    yield from _of_fewer_items(case, slopes)
    yield from _of_plainer_slopes(case, slopes)


def _of_fewer_windows(case: Case, slopes: Sequence[float], window: int | None) -> Smaller:
    plan = case.plan
    last = len(plan.windows) - 1 if window is None else window
    single = range(last + 1) if window is None else [last]
    chosen = [*((w,) for w in single), *((w, last) for w in reversed(range(last)))]
    for windows in chosen:
        if len(windows) < len(plan.windows):
            kept = list(chain.from_iterable(plan.windows[w] for w in windows))
            items = chain.from_iterable(map(plan.items, kept))
            yield "", _of_plan(case, plan.select(kept), tuple(slopes[i] for i in items))


def _of_fewer_items(case: Case, slopes: Sequence[float]) -> Smaller:
    plan = case.plan
    number = len(plan.windows)
    if number > 2 or plan.total_items == number or plan.ranks:
        return
    for item in plan.window_items(0):
        items = (item, plan.window_items(1)[0]) if number == 2 else (item,)
        yield "", _of_plan(case, Plan((1,) * number, 1), tuple(slopes[i] for i in items))


def _of_plainer_slopes(case: Case, slopes: Sequence[float]) -> Smaller:
    if len(case.plan.windows) != 1 or not np.isfinite(slopes).all():
        return
    largest = max(math.frexp(slope)[1] - 1 for slope in slopes)
    step = abs(largest) // 2 or abs(largest)
    while step:
        factor = 2.0 ** -math.copysign(step, largest)
        yield "", _of_plan(case, case.plan, tuple(slope * factor for slope in slopes))
        step //= 2


def _of_plan(case: Case, plan: Plan, slopes: tuple[float, ...] = ()) -> Case:
    """Return the case of another plan, otherwise like a case."""
    assert case.spec is not None
    text = slopes_text(slopes) if {*slopes} - {1.0} else ""
    reduction = case.spec.loss.reduction
    unit = unit_of(case)
    if is_probe(case):
        return probe_case(
            plan, reduction, device=case.device, dtype=case.dtype, slopes=text, unit=unit
        )
    loss = Loss("identity", reduction=reduction, **({"slopes": text} if text else {}))
    return case.replace(plan=plan, problem=replace(case.spec, loss=loss))


# Cases outside of what a loop assumes: gradients that are infinite or NaN.


OUTSIDE = "a window's gradient is infinite or NaN, and the loop assumes finite-gradients"


def starts_finite(case: Case, problem: Problem | None) -> bool:
    """Return whether the gradient of every window is finite at the initial parameters, in the
    case's dtype too.
    """
    try:
        reference, _ = reference_of(case, problem)
    except CannotJudgeError:
        return True  # `check` says why
    return reference is None or all(
        _is_finite(reference.window(w)) for w in range(len(case.plan.windows))
    )


def stays_finite(case: Case, problem: Problem | None) -> bool:
    """Return whether a sound loop meets only finite gradients at the parameters to which the
    optimizer moves.
    """
    reference, _ = reference_of(case, problem)
    if reference is None or case.optimizer is None:
        return True
    loop = plain if case.plan.world_size == 1 else RANK_LOOPS["all_reduce/zero_grad"]
    for step, observed in enumerate(run_ranks(loop, reference.instance)[0].observations):
        window = reference.window(step % len(case.plan.windows), observed.parameters)
        if not (
            np.isfinite(reference.flat(observed.gradients)).all()
            and np.isfinite(window.expected).all()
        ):
            return False
    return True


def _is_finite(window: WindowReference) -> bool:
    computed = [window.expected]
    if window.bound is not window.float64_bound:
        with suppress(RuntimeError):  # torch lacks an operation in this dtype: `check` says so
            computed += [window.bound.large_batch, *window.bound.contributions]
    return all(bool(np.isfinite(gradient).all()) for gradient in computed)


# Which of two names stands.


def more_specific(first: Violation, smallest: Violation) -> Violation:
    """Return the violation on the smallest case, under the name that the evidence supports best.

    The case that showed the fault first is larger, and its name explains more numbers: it stands,
    unless it is a general one and the smallest case's is not one of weights. On a small case, whose
    numbers are few, one of those fits by chance.
    """
    if first.diagnosis == smallest.diagnosis:
        return smallest
    if first.kind != smallest.kind or not smallest.explanation:
        return first
    if smallest.refutes_weights and is_of_weights(first.diagnosis):
        return smallest  # a name is held to the case that is shown
    by_chance = is_of_weights(smallest.diagnosis)
    if _is_contradicted(first.diagnosis, smallest):
        return replace(smallest, diagnosis=UNRECOGNISED) if by_chance else smallest
    if (
        is_general(first.kind, first.diagnosis)
        and not by_chance
        and smallest.diagnosis != "not-linear"
    ):
        return smallest
    note = f"on this case alone the fault would be {smallest.diagnosis}: {smallest.explanation}"
    return replace(
        smallest,
        diagnosis=first.diagnosis,
        explanation=with_note(first.explanation, f"named on a larger case, {first.case.plan!r}"),
        details=(*smallest.details, note),
    )


UNRECOGNISED = "unrecognised-weights"
"""The name of weights that fit no fault."""


def _is_contradicted(diagnosis: str, shown: Violation) -> bool:
    """Return whether a case shows weights that a name rules out: nothing is in the gradient, and
    something is.
    """
    return diagnosis == "no-gradient" and any(row.count and row.observed for row in shown.weights)


# The search.


SHRINK_SECONDS = 30.0
COMPILING_SECONDS = 5.0
WAITING_SECONDS = 0.5
"""Seconds of computing, or a quarter of the clock's: a busy machine shrinks as far."""
WAITS = ("deadlock", "timed-out")
"""Faults of which each smaller case takes seconds of the clock and tells no more: small cases alone are drawn then."""
MOST_HUNTED = 50
MOST_BESIDE = 20
MOST_SMALL = 60
"""Cases that are drawn to show the fault of a first probe, that of another probe, and that of a large case on a small
one."""
SHARE_OF_LIMIT = 0.25
"""Share of the time limit that a probe may be expected to take; one that would take longer is left out and reported."""
OF_GRADIENT = frozenset(("gradient", "non-finite", "none-pattern"))
"""Kinds of violation of which one fault may show several: which one depends on the gradient's values."""
LADDER = (
    *(Plan((n,), 1) for n in (1, 2)),
    *(Plan((1,), 2), Plan((1, 1), 2), Plan((1, 2), 2), Plan((2, 1), 2)),
    *(
        Plan((1, 1), 1),
        Plan((1, 2), 1),
        Plan((1,), 1, 2),
        Plan((1, 1, 1), 2),
        Plan((1, 1), 2, 2),
        Plan((1, 2, 1), 3),
    ),
    *(
        Plan((1, 1, 1), 1),
        Plan((1, 2, 1), 2),
        Plan((1, 1, 1), 2, 2),
        Plan((1,), 1, 3),
        Plan((1, 2, 3, 1), 2),
    ),
)
"""Plans of growing size, on which a fault of weights or steps is shown again with a linear model of one weight.

Between ranks it has two weights: a collective of one gradient would fit another rank's of a count, which hides that the
ranks' calls do not match.
"""
Progress = Callable[[Verdict], None]


@dataclass
class Tally:
    """What the cases of a search came to.

    Attributes:
        cases: number of drawn cases.
        judged: number of those that could be judged.
        windows: number of their windows that were.
        ratio: the largest error over what is allowed, of cases that hold.
        findings: what torch and JAX disagree on.
        skipped: reason -> number of cases that could not be judged.
        windows_skipped: reason -> number of windows that could not.
        moved_by_zeros: of each case in which zeros moved a parameter that None leaves, how.
        users_cases: the judged cases of a user's problem.
    """

    cases: int = 0
    judged: int = 0
    windows: int = 0
    ratio: float = 0.0
    findings: dict[str, None] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    windows_skipped: Counter[str] = field(default_factory=Counter)
    moved_by_zeros: list[str] = field(default_factory=list)
    users_cases: list[Case] = field(default_factory=list)

    def note(self, verdict: Verdict) -> None:
        """Count what a verdict says."""
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


class SearchState:
    """What a search has found so far.

    Attributes:
        tally: what its cases came to.
        violation: the smallest violation that has been named, or None.
        found_after: number of drawn cases until one showed it, 0 where a case of the ladder does;
            None where no ordinary case does.
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
        self._loop = loop
        self._problem = problem
        self._options = options
        self._progress = progress
        self._autocast = autocast
        self._assumes = assumes
        rules = rules_of(loop, assumes, autocast)
        self._seconds = COMPILING_SECONDS if self._compiles else SHRINK_SECONDS
        self.ahead = Prefetcher(
            loop,
            problem,
            rules,
            options.time_limit_s,
            runs=not (self._finite_only or self._compiles),
        )
        self.tally = Tally()
        self._outside = 0
        self.runs = 0
        self.found_after: int | None = None
        self.violation: Violation | None = None
        self.stopped: str | None = None
        self._sloped = False

    @property
    def _finite_only(self) -> bool:
        return FINITE_GRADIENTS in self._assumes

    @property
    def _compiles(self) -> bool:
        return is_jax(self._loop)

    def run(
        self,
        drawn: st.SearchStrategy[Case],
        small: st.SearchStrategy[Case],
        fixed: Case | None,
        *,
        probes: bool,
    ) -> None:
        """Search, and leave the smallest violation.

        Args:
            drawn: strategy of the cases.
            small: the same, of small ones.
            fixed: a case that is checked first, or None.
            probes: whether weight probes are checked.
        """
        seen = self.check(fixed).violation if fixed else None
        final = False
        if probes and seen is None:
            seen, final = self.on_probes()
        self.violation = seen
        if seen is not None and self._is_enough(seen, final=final):
            return
        most = self._options.examples if seen is None else MOST_BESIDE if final else MOST_HUNTED
        found = self._drawn(drawn, seen, min(most, self._options.examples))
        if found is not None:
            self._keep_plainest(seen, *found, small)

    def _keep_plainest(
        self,
        seen: Violation | None,
        first: Violation,
        smallest: Violation,
        small: st.SearchStrategy[Case],
    ) -> None:
        """Keep the violation that says most, of a probe's and of those of drawn cases.

        Args:
            seen: that of a probe or the fixed case, or None.
            first: that of the first drawn case.
            smallest: that of the smallest one.
            small: strategy of small cases.
        """
        layers, micro_batches, *_ = size_of(smallest.case)
        if layers > 2 or micro_batches > SMALL_MICRO_BATCHES * smallest.case.plan.world_size:
            smaller = self._drawn(
                small,
                smallest,
                MOST_SMALL,
                already_found=True,
            )
            if smaller is not None and size_of(smaller[1].case) < size_of(smallest.case):
                smallest = smaller[1]
        named = smallest if smallest is first else self._named(smallest)
        # a violation of ordinary gradients is plainer than that of large, small or infinite ones
        is_plain = seen is not None and not self._sloped and seen.kind == named.kind
        named_at_last = more_specific(seen if seen and is_plain else first, named)
        # of a loop that is not linear the probe of many sizes says more
        if not (self._sloped and named_at_last.diagnosis == "not-linear"):
            self.violation = named_at_last

    def _is_enough(self, seen: Violation, *, final: bool) -> bool:
        """Whether no case needs to be drawn for what a probe or the fixed case shows.

        A loop that did not return from a probe would make every drawn case wait for the time limit
        too.
        """
        if seen.diagnosis == "timed-out":
            return True
        if final:
            sloped = self._sloped and not self._compiles
            # a drawn case tells a fault of elements; of an exception it tells no more
            general = seen.kind != "raised" and is_general(seen.kind, seen.diagnosis)
            return self._problem is not None or not (sloped or general)
        return (
            self._problem is None
            and not is_general(seen.kind, seen.diagnosis)
            and self.on_ladder(seen)
        )

    def _named(self, violation: Violation) -> Violation:
        """Return the violation of a case with its name.

        The same where the loop shows none again.
        """
        return self.check(violation.case).violation or violation

    def _drawn(
        self,
        drawn: st.SearchStrategy[Case],
        seen: Violation | None,
        most: int,
        *,
        already_found: bool = False,
    ) -> tuple[Violation, Violation] | None:
        """Draw cases until one shows the kind that was seen, or any.

        Return that violation and the smallest one.

        Args:
            drawn: the strategy.
            seen: a violation of the kind that is searched for; None for any.
            most: number of cases.
            already_found: whether a drawn case has shown this violation before, so that no case is
                named or counted.
        """
        found: list[Violation] = []
        began = ProcessorStopwatch()
        seconds = self._seconds
        kinds: set[str] = {seen.kind} if seen else set()
        kinds |= OF_GRADIENT if kinds & OF_GRADIENT and not already_found else set()

        def judge(case: Case) -> None:
            nonlocal began, seconds
            shrinking = bool(found) or already_found
            if shrinking and began.passed() > seconds:
                self.stopped = f"shrinking stopped after {seconds:g} s, so a smaller case may exist"
                return
            try:
                # after so many in a row the case is judged, so that a search ends
                if self._is_outside(case) and self._outside % ATTEMPTS:
                    raise RedrawError
                verdict = self._simplest(case, shrinking=shrinking)
            except UsageError as error:
                raise StopError(error) from None
            violation = verdict.violation
            if not shrinking:
                self.tally.cases += 1
                self._note(verdict)
            if violation is None or (kinds and violation.kind not in kinds):
                return
            if not found:
                began = ProcessorStopwatch()
                kinds.clear()
                kinds.add(violation.kind)
                if not already_found:
                    self.found_after = self.tally.cases
                    self.violation = self.violation or violation
            if violation.diagnosis in WAITS:
                seconds = WAITING_SECONDS if already_found else 0.0
            if not found or size_of(violation.case) < size_of(found[-1].case):
                found.append(violation)
            raise ViolatedError

        try:
            with suppress(ViolatedError):
                run_on_cases(
                    judge,
                    drawn,
                    examples=most,
                    seed_value=self._options.seed,
                    prepare=self.ahead.prepare,
                )
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
        """Return the verdict on a drawn case, or on the same without an optimizer where that shows
        a fault too.
        """
        verdict = self.check(case, shrinking=shrinking)
        if case.optimizer and verdict.violation and self._options.optimizer is None:
            still = self.check(case.replace(optimizer=None), shrinking=shrinking)
            return still if still.violation else verdict
        return verdict

    def on_ladder(self, seen: Violation) -> bool:
        """Show a probe's fault on a small case: the first that gives it the same name, else the
        first of its kind.
        """
        shown: Violation | None = None
        even_alone = False
        for case in self._ladder(seen.case):
            is_uneven = len({*case.plan.ranks}) > 1
            if is_uneven and even_alone:
                continue
            # many loops wait, or do something else wrong, where a rank has fewer micro-batches:
            # there the name tells
            violation = self.check(case, shrinking=not is_uneven).violation
            if violation is None:
                continue
            is_kind = violation.kind == seen.kind
            # most others have no name until `_named` runs the loop further
            same = is_kind and (
                not violation.diagnosis
                or bool(names_of(violation.diagnosis) & names_of(seen.diagnosis))
            )
            if same or (is_kind and shown is None and not is_uneven):
                shown = violation
            if same:
                break
            even_alone |= is_uneven
        if shown is None:
            return False
        self.found_after = 0
        self.violation = more_specific(seen, self._named(shown))
        return True

    def _ladder(self, probe: Case) -> Iterator[Case]:
        assert probe.spec is not None
        layers = (Layer("linear", bias=False, features=1),)
        loss = Loss("mse", reduction=probe.spec.loss.reduction)
        options = self._options
        assumes = self._assumes
        plans = dict[Plan, None]()
        spec = ProblemSpec(Input("vector", size=min(options.ranks, 2)), layers, loss)
        for plan in LADDER:
            with suppress(UsageError):  # the assumptions leave no micro-batch
                plans[satisfying(plan, assumes)] = None
        numbers = sorted({min(options.ranks, 2), options.ranks})
        # a rank with fewer micro-batches makes a smaller case
        dealt = (
            dealt_to_ranks(plan, ranks, assumes, uneven=uneven)
            for plan, ranks, uneven in product(plans, numbers, (True, False))
        )
        for plan in dict.fromkeys(dealt):
            yield Case(
                spec, plan, dtype=options.dtype, device=options.device, optimizer=options.optimizer
            )

    def on_probes(self) -> tuple[Violation | None, bool]:
        """Check the weight probes.

        Return the first violation, and whether no drawn case can show it. A loop may be made for
        its problem alone. Beside a user's problem the probes therefore count only if the loop
        passes the first of them.
        """
        options = self._options
        assumes = self._assumes
        users = self._problem
        if users is not None:
            assumes |= {SUM_REDUCTION if users.reduction == "sum" else MEAN_REDUCTION}
        asked = (assumes, options.dtype, options.device, options.ranks)
        seconds = 0.0

        def timed(case: Case) -> Verdict:
            nonlocal seconds
            began = time.perf_counter()
            verdict = self.check(case)
            seconds = (time.perf_counter() - began) / _micro_batches(case.plan)
            return verdict

        for case in first_cases(*asked, compiles=self._compiles):
            verdict = timed(case)
            found = verdict.violation
            if self._cannot_use_probes(verdict):
                return None, False
            if found and self._compiles:
                # each run takes seconds: what a probe shows is the verdict, and few smaller ones
                # are tried
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
        # the second process would wait for them; another loop may end the search at any probe
        if self.ahead.is_own:
            for case in rest:
                self.ahead.prepare(case)
        for case in rest:
            if self._would_take_too_long(case, seconds):
                continue
            verdict = timed(case)
            if verdict.skipped:
                self.tally.skipped[f"a weight probe: {verdict.skipped}"] += 1
            if (found := verdict.violation) and not self._lacks_optimizer(found):
                return self._smallest_probe(found, assumes), True
        return None, False

    def _cannot_use_probes(self, verdict: Verdict) -> bool:
        """Whether one of the first probes says nothing on the loop; notes why."""
        if verdict.skipped:
            self.tally.skipped[f"the weight probes: {verdict.skipped}"] += 1
            return True
        found = verdict.violation
        if found is None:
            return False
        if self._lacks_optimizer(found):
            return True
        if self._problem is None:
            return False
        why = (
            f"the weight probes: the loop fails on them ({found.diagnosis}), so its own problem"
            " alone was tried"
        )
        self.tally.skipped[why] += 1
        return True

    def _would_take_too_long(self, case: Case, seconds: float) -> bool:
        """Whether a probe would take most of the time limit; notes it.

        Args:
            case: the probe.
            seconds: that a micro-batch took.
        """
        number = _micro_batches(case.plan)
        limit = self._options.time_limit_s
        if limit is None or seconds * number <= SHARE_OF_LIMIT * limit:
            return False
        why = (
            f"the weight probe of {number} micro-batches was left out: it would take this"
            f" loop {seconds * number:.0f} s of the time limit of {limit:g} s, which"
            " --time-limit raises"
        )
        self.tally.skipped[why] += 1
        return True

    def _lacks_optimizer(self, found: Violation) -> bool:
        """Whether a loop raises on a weight probe alone, for want of the optimizer that was asked
        for; notes it.
        """
        name = self._options.optimizer
        case = found.case
        if name is None or found.diagnosis != "raised" or case.optimizer is not None:
            return False
        # a vector is nothing that these train: drawn cases tell whether the loop raises
        if name not in NEEDS:
            with_it = self.check(case.replace(optimizer=name), shrinking=True).violation
            if with_it is not None and with_it.diagnosis == "raised":
                return False
        why = (
            "a weight probe: its optimizer, whose step changes nothing, lacks what the loop uses"
            f" of {name}"
        )
        self.tally.skipped[why] += 1
        return True

    def _smallest_probe(self, first: Violation, assumes: frozenset[str]) -> Violation:
        """Return the violation on the smallest probe that shows it, named there and on the first."""
        self.violation = first  # what an interrupt keeps
        self._sloped = has_slopes(first.case)
        smallest, beside = smallest_probe(
            lambda case: self.check(case, shrinking=True), first, assumes, self._seconds
        )
        named = first if smallest is first else more_specific(first, self._named(smallest))
        return replace(named, details=(*named.details, *beside))

    def check(self, case: Case, *, shrinking: bool = False) -> Verdict:
        """Return the verdict on a case, with the name of the fault unless a smaller case is
        searched for.
        """
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
        if (
            verdict.violation
            and self._finite_only
            and not is_probe(case)
            and not stays_finite(case, problem)
        ):
            return Verdict(case, skipped=OUTSIDE)
        return verdict

    def _is_outside(self, case: Case) -> bool:
        """Whether a drawn case has gradients that the loop assumes away.

        Counts such cases in a row.
        """
        outside = self._finite_only and not starts_finite(
            case, None if case.spec else self._problem
        )
        self._outside = self._outside + 1 if outside else 0
        return outside

    def _note(self, verdict: Verdict) -> None:
        self.tally.note(verdict)
        if self._problem is not None and not verdict.skipped and not verdict.finding:
            self.tally.users_cases.append(verdict.case)
        if self._progress is not None:
            self._progress(verdict)


def _micro_batches(plan: Plan) -> int:
    return plan.epochs * len(plan.micro_batches)
