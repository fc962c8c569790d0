"""The Hypothesis strategy for plans: they shrink to the fewest windows, the fewest and smallest
micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain, repeat
from typing import Any, TypedDict, Unpack

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from gradcheck_suite.core.case import Plan
from gradcheck_suite.core.contract import (
    BUSY_RANKS,
    EQUAL_BATCHES,
    EQUAL_MICRO_BATCHES,
    EVEN_RANKS,
    ONE_EPOCH,
    PLAIN_COUNTS,
    WHOLE_WINDOWS,
    checked_assumptions,
)
from gradcheck_suite.errors import UsageError

ACCUMULATION_STEPS = (1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 6, 7, 8, 11)
SIZES = (1, 1, 2, 2, 3, 3, 4, 5, 8)
MAX_MICRO_BATCHES = 24

# building and validating a strategy costs Hypothesis more time than drawing from it, so each is
# built once
integers = cache(st.integers)
sampled = cache(st.sampled_from)


@cache
def counts(low: int, high: int) -> st.SearchStrategy[int]:
    """Return a strategy of numbers from `low` to `high`, the smaller ones more often, since each
    micro-batch runs the model.
    """
    # the smallest comes first, since Hypothesis shrinks to what stands there
    often = [repeat(number, high + 1 - number) for number in range(low, high + 1)]
    return sampled(tuple(chain.from_iterable(often)))


_with_mask = cache(lambda sizes: st.tuples(sizes, st.booleans()))


def check_range(low: Any, high: Any, name: str) -> None:
    """Raise `InvalidArgument` unless 1 <= low <= high."""
    if not isinstance(low, int) or not isinstance(high, int) or not 1 <= low <= high:
        raise InvalidArgument(f"expected 1 <= min_{name} <= max_{name}, got {low!r} and {high!r}")


def hashable(assumes: Iterable[str]) -> str | tuple[str, ...]:
    """Return what a loop assumes as a tuple; a string, which is a mistake, as it is."""
    return assumes if isinstance(assumes, str) else tuple(assumes)


@cache
def valid_assumptions(assumes: str | tuple[str, ...]) -> frozenset[str]:
    """Return what a loop assumes as a set; `InvalidArgument` where there is no such assumption."""
    try:
        return checked_assumptions(assumes)
    except UsageError as error:
        raise InvalidArgument(str(error)) from None


class PlanBounds(TypedDict, total=False):
    """Bounds of plans, as `plans` describes them."""

    max_epochs: int
    min_windows: int
    max_windows: int
    min_accumulation_steps: int
    max_accumulation_steps: int
    max_items: int


@dataclass(frozen=True)
class _Bounds:
    ranks: int
    max_epochs: int = 3
    min_windows: int = 1
    max_windows: int = 4
    min_accumulation_steps: int = 1
    max_accumulation_steps: int = max(ACCUMULATION_STEPS)
    max_items: int = max(SIZES)


@cache
def _sizes_and_steps(bounds: _Bounds) -> tuple[st.SearchStrategy[int], st.SearchStrategy[int]]:
    """Return strategies for a micro-batch's items and for K.

    `InvalidArgument` where the bounds are not in order.
    """
    check_range(1, bounds.max_epochs, "epochs")
    check_range(bounds.min_windows, bounds.max_windows, "windows")
    low = bounds.min_accumulation_steps
    high = bounds.max_accumulation_steps
    check_range(low, high, "accumulation_steps")
    check_range(1, bounds.max_items, "items")
    check_range(1, bounds.ranks, "ranks")
    steps = sorted((*ACCUMULATION_STEPS, *{low, high}.difference(ACCUMULATION_STEPS)))
    return sampled(tuple(n for n in SIZES if n <= bounds.max_items)), sampled(
        tuple(k for k in steps if low <= k <= high)
    )


def _shares(
    draw: st.DrawFn, windows: int, k: int, world: int, assumes: frozenset[str]
) -> tuple[int, ...]:
    """Return how many micro-batches each rank gets in an epoch of so many windows, the last one
    possibly short.
    """
    if WHOLE_WINDOWS in assumes:
        return (windows * k,) * world
    if world == 1 or EVEN_RANKS in assumes:
        return (windows * k - (0 if k == 1 else draw(integers(0, k - 1))),) * world
    # a rank may run out of micro-batches before others do, but has at least one
    most = k - 1 if BUSY_RANKS in assumes or windows == 1 else k
    # what is drawn is what a rank has above the least it may have, so that shrinking takes
    # micro-batches away
    return tuple(
        windows * k - most + (draw(integers(0, most)) if most else 0) for _ in range(world)
    )


def _partly_masked(
    draw: st.DrawFn,
    sizes: st.SearchStrategy[int],
    count: int,
    k: int,
    epochs: int,
    ranks: tuple[int, ...],
) -> Plan:
    """Draw a plan of which some micro-batches have no valid targets."""
    # size and mask are adjacent draws, so that shrinking deletes a whole micro-batch
    drawn = [draw(_with_mask(sizes)) for _ in range(count)]
    masked = {j for j, (_, mask) in enumerate(drawn) if mask}
    plan = Plan(
        tuple(n for n, _ in drawn),
        k,
        epochs,
        ranks=ranks,
    )
    # a window without valid targets is outside the contract
    masked -= {window[0] for window in plan.windows if masked.issuperset(window)}
    return plan.replace(masked=tuple(masked))


@st.composite
def _drawn_plan(
    draw: st.DrawFn, bounds: _Bounds, maskable: bool, assumes: str | tuple[str, ...]
) -> Plan:
    sizes, steps = _sizes_and_steps(bounds)
    chosen = valid_assumptions(assumes)
    epochs = 1 if ONE_EPOCH in chosen else draw(counts(1, bounds.max_epochs))
    # up to two ranks there is nothing to draw
    world = bounds.ranks
    if world > 2:
        world = draw(sampled(tuple(range(2, world + 1))))
    k = draw(steps)
    most = max(bounds.min_windows, min(bounds.max_windows, MAX_MICRO_BATCHES // (k * world)))
    shares = _shares(
        draw,
        draw(counts(bounds.min_windows, most)),
        k,
        world,
        chosen,
    )
    count = sum(shares)
    ranks = shares if world > 1 else ()
    if EQUAL_BATCHES in chosen:
        return Plan(
            (draw(sizes),) * count,
            k,
            epochs,
            ranks=ranks,
        )
    if EQUAL_MICRO_BATCHES in chosen:
        windows = Plan((1,) * count, k, ranks=ranks).windows
        per_window = [draw(sizes) for _ in windows]
        equal = tuple(chain.from_iterable(map(repeat, per_window, map(len, windows))))
        return Plan(
            equal,
            k,
            epochs,
            ranks=ranks,
        )
    if not (maskable and PLAIN_COUNTS not in chosen and draw(sampled((False, True, True, True)))):
        return Plan(
            tuple(draw(sizes) for _ in range(count)),
            k,
            epochs,
            ranks=ranks,
        )
    return _partly_masked(draw, sizes, count, k, epochs, ranks)


def plans(
    *,
    maskable: bool = False,
    assumes: Iterable[str] = (),
    ranks: int = 1,
    **bounds: Unpack[PlanBounds],
) -> st.SearchStrategy[Plan]:
    """Return a strategy of plans: micro-batches of 1 to `max_items` items, windows of K, short last
    windows, epochs.

    Args:
        maskable: whether some micro-batches may have no valid targets, which only some losses
            support.
        assumes: assumptions of the loop, names from `ASSUMPTIONS`.
        ranks: largest number of ranks; if it is more than 1, every plan has two ranks or more.
        bounds: `max_epochs` (3) passes; `min_windows` (1) to `max_windows` (4) windows in an epoch,
            fewer for a K with which an epoch would exceed 24 micro-batches;
            `min_accumulation_steps` (1) <= K <= `max_accumulation_steps` (11); `max_items` (8) in a
            micro-batch.

    Raises:
        InvalidArgument: at the first draw, where an argument is wrong.
    """
    return _drawn_plan(_Bounds(ranks, **bounds), maskable, hashable(assumes))
