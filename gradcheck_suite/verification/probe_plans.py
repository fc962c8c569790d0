"""The battery of weight probes that every loop is checked on before any case is drawn, as data.

Drawn cases have gradients of about 1, few micro-batches and few epochs. The battery has what they lack: gradients that
are large, small, infinite and NaN, long windows, many micro-batches, many epochs. Most counts are powers of two, so
that the weights of a correct loop are exact in every dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradcheck_suite.generation.problems import reductions_within
from gradcheck_suite.generation.rank_plans import over_ranks
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import (
    EQUAL_BATCHES,
    EQUAL_MICRO_BATCHES,
    FINITE_GRADIENTS,
    ONE_EPOCH,
    WHOLE_WINDOWS,
)
from gradcheck_suite.schema.plan import Plan
from gradcheck_suite.schema.spec import Reduction
from gradcheck_suite.schema.weight_probe import probe_case, slopes_text


def _mixed(micro_batches: int) -> tuple[int, ...]:
    """Return sizes of 1 and 2 items whose sum is a power of two."""
    twos = 2 ** math.ceil(math.log2(micro_batches)) - micro_batches
    return (*(2,) * twos, *(1,) * (micro_batches - twos))


FIRST = (Plan((1, 3, 2, 2, 4), 2, 2), Plan((1, 2, 5, 2, 2, 2, 4), 3, 2))
"""The plans that show most faults. In windows of three micro-batches, what two show alike is different: the last one
alone, all but the first, the last one of several equal sizes."""
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


def first_cases(assumes: frozenset[str], dtype: str, device: str, ranks: int = 1) -> Iterator[Case]:
    """Yield the probes that show most faults, within a loop's assumptions."""
    for number, plan in enumerate(FIRST):
        dealt = over_ranks(within(plan, assumes), ranks, assumes, uneven=number > 0)
        for reduction in reductions_within(assumes):
            yield probe_case(dealt, reduction, dtype=dtype, device=device)


def long_cases(assumes: frozenset[str], dtype: str, device: str, ranks: int = 1) -> Iterator[Case]:
    """Yield the probes with plans that no strategy draws, within a loop's assumptions."""
    for plan in LONG:
        dealt = over_ranks(within(plan, assumes), ranks, assumes)
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
