"""Plans on the weight probe, and the smallest one that shows a fault."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np

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
    ONE_EPOCH,
    PLAIN_COUNTS,
    WHOLE_WINDOWS,
    dealt_to_ranks,
)
from gradcheck_suite.core.results import Verdict, Violation, is_endless
from gradcheck_suite.errors import UsageError
from gradcheck_suite.run.optimizers import NEEDS
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
SMALL_COUNTS, UNIT = Plan((1, 1, 3, 5, 1), 2), 0.25
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

    A loop that compiles is not checked on the last three, which have hundreds of micro-batches, and twenty sizes.
    """
    for plan in LONG[:-3] if compiles else LONG:
        dealt = dealt_to_ranks(within(plan, assumes), ranks, assumes)
        yield probe_case(dealt, reductions_within(assumes)[0], dtype=dtype, device=device)


def small_count_cases(assumes: frozenset[str], dtype: str, device: str, ranks: int = 1) -> Iterator[Case]:
    """Yield the probe with windows that count less than 1, unless a loop assumes sums or plain counts."""
    if "mean" in reductions_within(assumes) and PLAIN_COUNTS not in assumes:
        dealt = dealt_to_ranks(within(SMALL_COUNTS, assumes), ranks, assumes)
        yield probe_case(dealt, dtype=dtype, device=device, unit=UNIT)


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


def model_cases(
    assumes: frozenset[str], dtype: str, device: str, ranks: int = 1, *, optimizer: str | None = None
) -> Iterator[Case]:
    """Yield cases on a model with a matrix and a bias, of what the probes show on their one vector alone.

    One has an optimizer that moves the parameters far, and takes many steps. The other has gradients of many sizes.
    Losses have both signs.
    """
    sizes = slopes_case(assumes, dtype, device, ranks)
    assert sizes.spec is not None
    spec = ProblemSpec(Input("vector", size=2), (Layer("linear", features=1, bias=True),), sizes.spec.loss)
    exponents = (0, LARGE[dtype][0], 0, SMALL[dtype][0])
    slopes = slopes_text(slope for exponent in exponents for slope in _of_size(exponent))
    plan = within(Plan((2, 2) * len(exponents), 2, 1 if ONE_EPOCH in assumes else 5), assumes)
    loss = Loss("identity", reduction=spec.loss.reduction, slopes=slopes)
    # an optimizer that takes no bias, or no dense gradient, has no such model
    moving = optimizer if optimizer and optimizer not in NEEDS else "sgd"
    moved = sizes.replace(problem=replace(spec, loss=loss), optimizer=moving)
    # ordinary gradients come first: what they show is plainer
    yield moved.replace(plan=dealt_to_ranks(plan, ranks, assumes))
    yield sizes.replace(problem=spec)


def _of_size(exponent: int) -> tuple[float, ...]:
    return tuple(2.0 ** (exponent + within) for within in WITHIN)


# The smallest weight probe that shows a violation of the same kind: fewer windows, epochs and micro-batches, smaller K,
# fewer slopes. Greedy: the first smaller one that shows it is kept, and the search begins anew.


SHRINK_SECONDS = 20.0
"""Seconds of computing after which a violated probe is not made smaller any more."""
Smaller = Iterator[tuple[str, Case]]
"""Smaller probes, each with the number of its plan that is smaller, in words; empty where none alone is."""


def has_slopes(case: Case) -> bool:
    """Return whether the losses of a probe's items have slopes of several sizes."""
    return case.spec is not None and "slopes" in case.spec.loss.o


def smallest_probe(
    checked: Callable[[Case], Verdict], violation: Violation, assumes: frozenset[str], seconds: float
) -> tuple[Violation, list[str]]:
    """Return the violation on the smallest weight probe that shows it, and the next smaller plans that hold, in words.

    Args:
        checked: returns a loop's verdict on a case.
        violation: the loop's violation, on a weight probe.
        assumes: assumptions of the loop, which smaller plans satisfy too.
        seconds: the time after which shrinking ends, at most `SHRINK_SECONDS`.
    """
    began, right = Stopwatch(), dict[str, str]()
    if violation.kind == "raised" or is_endless(violation):
        return violation, []
    before = None
    while before is not violation:
        before = violation
        right.clear()
        for text, case in _smaller(violation, assumes):
            if began.passed() > min(seconds, SHRINK_SECONDS):
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
    case, sloped = violation.case, has_slopes(violation.case)
    if sloped:
        yield "", _of_plan(case, case.plan)
        yield from _of_fewer_slopes(violation)
    # with slopes, which belong to the items, of the numbers only that of epochs
    for text, number, with_number in itertools.islice(_numbers(case.plan), 1 if sloped else None):
        step = number // 2
        while step:
            # the assumptions may leave no micro-batch
            with suppress(UsageError):
                if (plan := within(with_number(number - step), assumes)) != case.plan:
                    yield f"{text} = {number - step}", _of_plan(case, plan, tuple(slopes_of(case)))
            step //= 2
    if sloped:
        return
    # within the assumptions, micro-batches of one item may have the size of this plan's again
    single = within(replace(case.plan, micro_batches=(1,) * len(case.plan.micro_batches)), assumes)
    if single != case.plan:
        yield "", _of_plan(case, single)


def _numbers(plan: Plan) -> Iterator[tuple[str, int, Callable[[int], Plan]]]:
    """Yield each number of a plan that can be smaller, in words, its value, and the plan with another."""
    count, k = len(plan.micro_batches), plan.accumulation_steps
    yield "epochs", plan.epochs, lambda n: replace(plan, epochs=n)
    yield "micro-batches in an epoch", count, lambda n: plan.select(range(n))
    # a plan of one window keeps one
    one = count <= k
    yield (
        "accumulation_steps",
        k,
        lambda n: replace(plan, accumulation_steps=n, micro_batches=plan.micro_batches[: n if one else count]),
    )


def _of_fewer_slopes(violation: Violation) -> Smaller:
    """Yield one window or two, then one item of each, then slopes nearer to 1, all by the same power of two."""
    case, plan, slopes = violation.case, violation.case.plan, tuple(slopes_of(violation.case))
    number, last = len(plan.windows), len(plan.windows) - 1 if violation.window is None else violation.window
    single = range(last + 1) if violation.window is None else [last]
    chosen = [*((w,) for w in single), *((w, last) for w in reversed(range(last)))]
    for windows in chosen:
        if len(windows) < number:
            kept = [j for w in windows for j in plan.windows[w]]
            yield "", _of_plan(case, plan.select(kept), tuple(slopes[i] for j in kept for i in plan.items(j)))
    if plan.total_items > number <= 2 and not plan.ranks:
        for item in plan.window_items(0):
            items = (item, plan.window_items(1)[0]) if number == 2 else (item,)
            yield "", _of_plan(case, Plan((1,) * number, 1), tuple(slopes[i] for i in items))
    if number == 1 and np.isfinite(slopes).all():
        largest = max(math.frexp(slope)[1] - 1 for slope in slopes)
        step = abs(largest) // 2 or abs(largest)
        while step:
            yield "", _of_plan(case, plan, tuple(slope * 2.0 ** -math.copysign(step, largest) for slope in slopes))
            step //= 2


def _of_plan(case: Case, plan: Plan, slopes: tuple[float, ...] = ()) -> Case:
    """Return the case of another plan, otherwise like a case."""
    assert case.spec is not None
    text = slopes_text(slopes) if {*slopes} - {1.0} else ""
    reduction, unit = case.spec.loss.reduction, unit_of(case)
    if is_probe(case):
        return probe_case(plan, reduction, device=case.device, dtype=case.dtype, slopes=text, unit=unit)
    loss = Loss("identity", reduction=reduction, **({"slopes": text} if text else {}))
    return case.replace(plan=plan, problem=replace(case.spec, loss=loss))
