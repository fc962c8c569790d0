"""Plans on the weight probe, and the smallest one that shows a fault."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from gradcheck_suite.core.case import Case, Plan, Reduction, probe_case, slopes_of, slopes_text
from gradcheck_suite.core.contract import (
    EQUAL_BATCHES,
    EQUAL_MICRO_BATCHES,
    FINITE_GRADIENTS,
    ONE_EPOCH,
    WHOLE_WINDOWS,
    dealt_to_ranks,
)
from gradcheck_suite.core.results import Verdict, Violation
from gradcheck_suite.errors import UsageError
from gradcheck_suite.strategies.cases import reductions_within


class Stopwatch:
    """Measures time from when it is made, such that a busy machine searches as far as an idle one."""

    def __init__(self) -> None:
        self._thread, self._clock = time.thread_time(), time.perf_counter()

    def passed(self) -> float:
        """Return the seconds that this thread computed since then, or a quarter of the clock's if that is more."""
        return max(time.thread_time() - self._thread, (time.perf_counter() - self._clock) / 4)


# The battery of weight probes that every loop is checked on before any case is drawn.
#
# Drawn cases have gradients of about 1, few micro-batches and few epochs; the battery has what they lack. Most counts
# are powers of two, so that the weights of a correct loop are exact in every dtype.


def _mixed(micro_batches: int) -> tuple[int, ...]:
    """Return sizes of 1 and 2 items whose sum is a power of two."""
    twos = 2 ** math.ceil(math.log2(micro_batches)) - micro_batches
    return (*(2,) * twos, *(1,) * (micro_batches - twos))


FIRST = (Plan((1, 3, 2, 2, 4), 2, 2), Plan((1, 2, 5, 2, 2, 2, 4), 3, 2))
"""The plans that show most faults. In windows of three micro-batches, what two show alike is different: the last one
alone, all but the first, the last one of several equal sizes."""
WHOLE = Plan((2, 6), 2)
"""The plan that a loop of JAX is checked on before: a loop that ends no short window may average means as well, and
that is what most training meets. It compiles little. No micro-batch has one item, since padding by it looks like a
mean of means."""
LONG = (
    Plan((*_mixed(17), *_mixed(5)), 17, 2),
    Plan((*_mixed(33), 2, 1, 1), 33),
    Plan((3, 1, 2, 2, 2), 2, 12),
    Plan((*(1, 1, 2) * 91, 4), 3),
    Plan((*range(1, 17), 31, 32, 33, 17), 4),
)
"""Plans that no strategy draws: windows of 17 and of 33 micro-batches, 12 epochs, 274 micro-batches in windows of
three, so that a counter that wraps at a power of two loses the windows, and micro-batches of every size up to 17 and of
31 to 33 items."""

LARGE = {"float64": (12, 40, 200), "float32": (12, 40, 60), "bfloat16": (12, 40, 60), "float16": (13,)}
SMALL = {"float64": (-12, -40, -200), "float32": (-12, -40, -100), "bfloat16": (-12, -40, -100), "float16": (-16,)}
"""Sizes of large and small gradients as powers of two. The norm of a large one exceeds 1000. Its square, and
its product with a loss scale of 2**16, stay within the dtype, but for float16: there the loss scale may be 4."""
WITHIN = (0, -2, -1, -3)
"""Exponents that are added within a window's two micro-batches of two items: elements and micro-batches differ in size,
so that clipping by value, by norm and by micro-batch differ."""
ORDINARY = (1.0,) * 4
WITH_INFINITY, WITH_NAN = (math.inf, 1.0, 1.0, 1.0), (1.0, 1.0, math.nan, 1.0)


def within(plan: Plan, assumes: frozenset[str]) -> Plan:
    """Return the plan, changed so that it satisfies a loop's assumptions."""
    if WHOLE_WINDOWS in assumes and plan.has_short_window:
        plan = plan.select(range(plan.windows[-1][0]))
    if ONE_EPOCH in assumes:
        plan = plan.replace(epochs=1)
    if EQUAL_BATCHES in assumes:
        return plan.replace(micro_batches=(2,) * len(plan.micro_batches))
    if EQUAL_MICRO_BATCHES in assumes:
        smallest = [min(plan.micro_batches[j] for j in window) for window in plan.windows]
        plan = plan.replace(micro_batches=tuple(n for n, w in zip(smallest, plan.windows, strict=True) for _ in w))
    return plan


def first_cases(
    assumes: frozenset[str], dtype: str, device: str, ranks: int = 1, *, compiles: bool = False
) -> Iterator[Case]:
    """Yield the probes that show most faults, within a loop's assumptions; `WHOLE` first of one that compiles."""
    if compiles:
        yield probe_case(within(WHOLE, assumes), reductions_within(assumes)[0], dtype=dtype, device=device)
    for number, plan in enumerate(FIRST):
        dealt = dealt_to_ranks(within(plan, assumes), ranks, assumes, uneven=number > 0)
        for reduction in reductions_within(assumes):
            yield probe_case(dealt, reduction, dtype=dtype, device=device)


def long_cases(
    assumes: frozenset[str], dtype: str, device: str, ranks: int = 1, *, compiles: bool = False
) -> Iterator[Case]:
    """Yield the probes with plans that no strategy draws, within a loop's assumptions.

    A loop that compiles is not checked on the last two, which have hundreds of micro-batches, and twenty sizes.
    """
    for plan in LONG[:-2] if compiles else LONG:
        dealt = dealt_to_ranks(within(plan, assumes), ranks, assumes)
        yield probe_case(dealt, reductions_within(assumes)[0], dtype=dtype, device=device)


def slopes_case(assumes: frozenset[str], dtype: str, device: str, ranks: int = 1) -> Case:
    """Return the probe whose windows have gradients of many sizes, and an infinity and a NaN in two of them.

    Between them are windows of ordinary gradients, which show what a window leaves behind. Its plan is within every
    assumption.
    """
    large, small = ([_of_size(e) for e in exponents[dtype]] for exponents in (LARGE, SMALL))
    windows = [ORDINARY, large[0], ORDINARY, *large[1:], ORDINARY, *small, ORDINARY]
    if FINITE_GRADIENTS not in assumes:
        windows += [WITH_INFINITY, ORDINARY, WITH_NAN, ORDINARY]
    slopes = slopes_text(slope for window in windows for slope in window)
    reduction: Reduction = reductions_within(assumes)[0]
    plan = Plan((2, 2) * len(windows), 2)
    if ranks > 1:
        # the same items in each window, dealt to two ranks
        plan = Plan((1, 1, 1, 1) * len(windows), 2, ranks=(2 * len(windows),) * 2)
    return probe_case(plan, reduction, dtype=dtype, device=device, slopes=slopes)


def _of_size(exponent: int) -> tuple[float, ...]:
    return tuple(2.0 ** (exponent + within) for within in WITHIN)


# The smallest weight probe that shows a fault: fewer windows, epochs and micro-batches, smaller K, fewer slopes.


Checked = Callable[[Case], Verdict]
SHRINK_SECONDS = 20.0
"""Seconds of computing after which a violated probe is not made smaller any more."""


MOST_BELOW = 4
"""Numbers below the least violated one among which one that holds is looked for."""


def has_slopes(case: Case) -> bool:
    """Return whether the losses of a probe's items have slopes of several sizes."""
    return case.spec is not None and "slopes" in case.spec.loss.o


def smallest_probe(
    checked: Checked, violation: Violation, assumes: frozenset[str], seconds: float = SHRINK_SECONDS
) -> Violation:
    """Return the violation on the smallest weight probe that shows it, with the next smaller plans that hold.

    Args:
        checked: returns a loop's verdict on a case.
        violation: of that loop, on a weight probe.
        assumes: assumptions of the loop, which smaller plans satisfy too.
        seconds: of computing after which it is not made smaller any more.
    """
    if violation.kind == "raised" or violation.diagnosis == "endless":
        return violation
    search = _Search(checked, violation, assumes, seconds)
    if has_slopes(violation.case) and not search.attempt(_of_plan(violation.case, violation.case.plan)):
        _shrink_slopes(search)
        return search.best
    before = None
    while before is not search.best:
        before = search.best
        for number in NUMBERS:
            search.bisect(number)
        search.attempt(_of_plan(search.case, replace(search.plan, micro_batches=(1,) * len(search.plan.micro_batches))))
    beside = [line for number in NUMBERS if (line := search.line_beside(number))]
    return replace(search.best, details=(*search.best.details, *beside))


@dataclass(frozen=True)
class _Number:
    """A number of a plan that is made smaller.

    Attributes:
        text: what it counts, with `{}` for the number.
        value: returns the plan's number.
        plan: (plan, number) -> the plan with that number.
    """

    text: str
    value: Callable[[Plan], int]
    plan: Callable[[Plan, int], Plan]


def _with_steps(plan: Plan, steps: int) -> Plan:
    """Return the plan with another K; a plan of one window keeps one."""
    if len(plan.windows) > 1:
        return replace(plan, accumulation_steps=steps)
    return replace(plan, accumulation_steps=steps, micro_batches=plan.micro_batches[:steps])


NUMBERS = (
    _Number("epochs = {}", lambda plan: plan.epochs, lambda plan, n: replace(plan, epochs=n)),
    _Number(
        "micro-batches in an epoch = {}",
        lambda plan: len(plan.micro_batches),
        lambda plan, n: plan.select(range(n)),
    ),
    _Number("accumulation_steps = {}", lambda plan: plan.accumulation_steps, _with_steps),
)


class _Search:
    """The smallest violation so far.

    Attributes:
        best: it; its diagnosis never changes.
    """

    def __init__(self, checked: Checked, violation: Violation, assumes: frozenset[str], seconds: float) -> None:
        self._checked, self._assumes, self.best, self._seconds = checked, assumes, violation, seconds
        self._began = Stopwatch()

    @property
    def case(self) -> Case:
        """The smallest case so far."""
        return self.best.case

    @property
    def plan(self) -> Plan:
        """Its plan."""
        return self.case.plan

    def attempt(self, case: Case | None) -> bool:
        """Keep a case if it shows the same fault; return whether it does."""
        if case is None or case == self.case or self._began.passed() > self._seconds:
            return False
        found = self._checked(case).violation
        if found is None or found.diagnosis != self.best.diagnosis:
            return False
        self.best = found
        return True

    def bisect(self, number: _Number) -> None:
        """Keep the least of a plan's numbers that shows the fault, if it shows from some number on."""
        plan = self.plan
        _bisect(1, number.value(plan), lambda value: self.attempt(self._with_number(plan, number, value)))

    def line_beside(self, number: _Number) -> str | None:
        """Return which somewhat smaller number of the plan the loop is right with, or None if there is none."""
        value = number.value(self.plan)
        for fewer in range(value - 1, max(0, value - 1 - MOST_BELOW), -1):
            case = self._with_number(self.plan, number, fewer)
            if case is None or self._began.passed() > self._seconds:
                return None
            verdict = self._checked(case)
            if verdict.holds and not verdict.skipped:
                return f"the loop is right with {number.text.format(number.value(case.plan))}, all else alike"
        return None

    def _with_number(self, plan: Plan, number: _Number, value: int) -> Case | None:
        try:
            smaller = within(number.plan(plan, value), self._assumes)
        except UsageError:
            return None  # the assumptions leave no micro-batch
        return None if smaller == plan else _of_plan(self.case, smaller)


def _bisect(low: int, high: int, shows: Callable[[int], bool]) -> None:
    """Ask for ever smaller numbers that show a fault: of hundreds of micro-batches some ten are asked about."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if shows(middle) else (middle + 1, high)


def _of_plan(case: Case, plan: Plan, slopes: tuple[float, ...] = ()) -> Case:
    """Return the probe of another plan, otherwise like a case."""
    assert case.spec is not None
    text = slopes_text(slopes)
    return probe_case(plan, case.spec.loss.reduction, device=case.device, dtype=case.dtype, slopes=text)


def _shrink_slopes(search: _Search) -> None:
    """Keep one window or two, then one item in each, then slopes as close to 1 as show the fault."""
    start, violated = search.case, search.best.window
    last = len(search.plan.windows) - 1 if violated is None else violated
    alone = range(last + 1) if violated is None else [last]
    for windows in [*((w,) for w in alone), *((w, last) for w in reversed(range(last)))]:
        kept = [j for w in windows for j in start.plan.windows[w]]
        own = tuple(slopes_of(start)[i] for j in kept for i in start.plan.items(j))
        if search.attempt(_of_plan(start, start.plan.select(kept), own)):
            break
    before, slopes = search.plan.windows, tuple(slopes_of(search.case))
    if len(before) <= 2:
        first = search.plan.window_items(0)
        second = [] if len(before) == 1 else [search.plan.window_items(1)[0]]
        for choice in [[i, *second] for i in first]:
            if search.attempt(_of_plan(start, Plan((1,) * len(choice), 1), tuple(slopes[i] for i in choice))):
                break
    if len(search.plan.windows) == 1 and np.isfinite(slopes_of(search.case)).all():
        _bisect_exponent(search)


def _bisect_exponent(search: _Search) -> None:
    """Bring the slopes of one window as close to 1 as show the fault, all by the same power of two."""
    slopes, case = tuple(slopes_of(search.case)), search.case
    largest = max(math.frexp(slope)[1] - 1 for slope in slopes)

    def shows(exponent: int) -> bool:
        factor = 2.0 ** (math.copysign(exponent, largest) - largest)
        return search.attempt(_of_plan(case, case.plan, tuple(slope * factor for slope in slopes)))

    _bisect(0, abs(largest), shows)
