"""Chosen micro-batches: some of a window's micro-batches are left out, others are there several times."""

from __future__ import annotations

from collections.abc import Callable

from gradcheck_suite.evidence.zoo.bug import Bug
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import Batch, TrainingRun


def _train_on(run: TrainingRun, chosen: Callable[[list[Batch]], list[Batch]]) -> None:
    """Train on some of each window's micro-batches; weights are those of the whole window."""
    for window in windows(run):
        run.optimizer.zero_grad(set_to_none=False)
        total = window_count(run, window)
        kept = chosen(window)
        for batch in kept:
            part_of_window(run, batch, total).backward()
        if not kept:
            (0 * part_of_window(run, window[0], total)).backward()
        run.optimizer.step()


def last_k_times(run: TrainingRun) -> None:
    """Build one closure per micro-batch in a loop; each sees the loop variable's last value."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        parts = []
        for batch in window:
            parts.append(lambda: part_of_window(run, batch, total))  # noqa: B023
        for part in parts:
            part().backward()
        run.optimizer.step()


LAST_K_TIMES = Bug(
    name="last-k-times",
    citations=("python FAQ: lambdas defined in a loop",),
    mechanism="Closures that are made in a loop see the variable's last value: the last micro-batch is there K times.",
    needs="2 micro-batches in a window",
    loop=last_k_times,
    wanted=frozenset({"gradient/repeated-micro-batch"}),
)


def first_k_times(run: TrainingRun) -> None:
    """Call `next(iter(loader))` for every micro-batch of a window."""
    _train_on(run, lambda window: [window[0]] * len(window))


FIRST_K_TIMES = Bug(
    name="first-k-times",
    citations=("discuss.pytorch.org: next(iter(loader)) in a loop",),
    mechanism="A new iterator is made for every micro-batch, so each is the window's first.",
    needs="2 micro-batches in a window",
    loop=first_k_times,
    wanted=frozenset({"gradient/repeated-micro-batch"}),
)


def all_but_the_first(run: TrainingRun) -> None:
    """Peek at a window's first micro-batch, and train on the rest of the iterator."""
    _train_on(run, lambda window: window[1:])


ALL_BUT_THE_FIRST = Bug(
    name="all-but-the-first",
    mechanism="The first micro-batch is taken off the iterator to look at its shape, and is never trained on.",
    needs="any case",
    loop=all_but_the_first,
    wanted=frozenset({"gradient/dropped-micro-batch"}),
)


def all_but_the_last(run: TrainingRun) -> None:
    """Iterate over `range(K - 1)`."""
    _train_on(run, lambda window: window[:-1])


ALL_BUT_THE_LAST = Bug(
    name="all-but-the-last",
    mechanism="The window's loop ends one micro-batch early.",
    needs="any case",
    loop=all_but_the_last,
    wanted=frozenset({"gradient/dropped-micro-batch"}),
)


def equal_sizes_dropped(run: TrainingRun) -> None:
    """Keep a window's micro-batches in a dictionary by their number of items."""
    _train_on(run, lambda window: list({len(next(iter(batch.values()))): batch for batch in window}.values()))


EQUAL_SIZES_DROPPED = Bug(
    name="equal-sizes-dropped",
    mechanism="Micro-batches are cached under their shape, so of several with one shape the last survives.",
    needs="2 micro-batches of equal size in a window",
    loop=equal_sizes_dropped,
    wanted=frozenset({"gradient/dropped-micro-batch"}),
)


def every_second(run: TrainingRun) -> None:
    """Advance the iterator twice for each backward."""
    _train_on(run, lambda window: window[::2])


EVERY_SECOND = Bug(
    name="every-second",
    mechanism="`next` is called in the loop's condition and in its body: every second micro-batch is lost.",
    needs="2 micro-batches in a window",
    loop=every_second,
    wanted=frozenset({"gradient/dropped-micro-batch"}),
)


def single_items_skipped(run: TrainingRun) -> None:
    """Skip micro-batches of one item, which batch statistics could not stand."""
    _train_on(run, lambda window: [batch for batch in window if len(next(iter(batch.values()))) > 1])


SINGLE_ITEMS_SKIPPED = Bug(
    name="single-items-skipped",
    mechanism="Micro-batches of one item are skipped, and counted all the same.",
    needs="a micro-batch of one item",
    loop=single_items_skipped,
    wanted=frozenset({"gradient/dropped-micro-batch"}),
)


def middle_twice(run: TrainingRun) -> None:
    """Retry the window's second micro-batch after a failure that came after its backward."""
    _train_on(run, lambda window: [*window, window[1]] if len(window) > 1 else window)


MIDDLE_TWICE = Bug(
    name="middle-twice",
    mechanism="A micro-batch is tried again after an error, although its first backward had succeeded.",
    needs="2 micro-batches in a window",
    loop=middle_twice,
    wanted=frozenset({"gradient/repeated-micro-batch"}),
)
