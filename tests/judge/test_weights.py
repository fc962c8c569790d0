"""Reading weights: each known pattern, worked out by hand, has its name; sound ones have none.

Others are not guessed. The window under test is micro-batches 1 to 3, of 1, 2 and 3 items, in an
epoch of five; right is 1/6 for each of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gradcheck_suite.judge.naming import diagnose
from gradcheck_suite.judge.weights import Weights
from tests.wording import assert_named

COUNTS = (2.0, 1.0, 2.0, 3.0, 4.0)
WINDOW = (1, 2, 3)


def _weights(
    *window: float, k: int = 3, epoch: int = 0, reduction: str = "mean", others=(0.0, 0.0)
) -> Weights:
    return Weights(np.array([others[0], *window, others[1]]), COUNTS, WINDOW, k, epoch, reduction)


def _all(weight: float, **options) -> Weights:
    return _weights(weight, weight, weight, **options)


def _short(*window: float, counts: tuple[float, ...], k: int = 3, **options) -> Weights:
    return Weights(np.array(window), counts, tuple(range(len(window))), k, 0, "mean", **options)


def _run(*steps, k, windows):
    """Return the weights of all steps of a run over windows, each given by the weights of all
    micro-batches.
    """
    counts = (1.0,) * sum(map(len, windows))
    epochs = [divmod(i, len(windows)) for i in range(len(steps))]
    return [
        Weights(np.array(step, dtype=float), counts, windows[at], k, epoch, "sum", windows=windows)
        for step, (epoch, at) in zip(steps, epochs, strict=True)
    ]


FOUR = ((0,), (1,), (2,), (3,))
PAIRS = ((0, 1), (2, 3), (4, 5))


def _of_counts(*factors):
    """Return a run over windows of one micro-batch each, which count 1, 2 and 3 and weigh so many
    times too much.
    """
    counts = (1.0, 2.0, 3.0)
    rows = np.diag([f / n for f, n in zip(factors, counts, strict=True)])
    windows = FOUR[:3]
    return [
        Weights(row, counts, w, 2, 0, "mean", windows=windows)
        for row, w in zip(rows, windows, strict=True)
    ]


def _kept(kept, own, *, without_the_oldest=False):
    """Return a run whose steps multiply what stands in `.grad`, and the window's own gradient, by
    two numbers.
    """
    steps, left = [], np.zeros(6)
    for step in range(6):
        left = kept * left + own * np.isin(range(6), PAIRS[step % 3])
        steps.append(left)
    if without_the_oldest:
        steps[2] = np.where(np.isin(range(6), PAIRS[0]), 0, steps[2])
    return _run(*steps, k=2, windows=PAIRS)


def _over_ranks(ranks, counts, factor):
    window = tuple(range(len(counts)))
    owners = tuple(j % ranks for j in window)
    return Weights(
        np.full(len(counts), factor / sum(counts)),
        counts,
        window,
        2,
        0,
        "mean",
        owners=owners,
        alike=True,
    )


def _little_off(share=1.0):
    """Return windows that count 4 and 2, divided by 1e-9 more.

    The second is multiplied by a share.
    """
    windows = ((0, 1), (2,))
    weights = [1 / (4 + 1e-9)] * 2 + [0.0], [0.0, 0.0, share / (2 + 1e-9)]
    return [
        Weights(
            np.array(observed),
            (1.0, 3.0, 2.0),
            window,
            2,
            0,
            "mean",
            windows=windows,
            tolerance=1e-13,
        )
        for window, observed in zip(windows, weights, strict=True)
    ]


def _not_set_to_0():
    """Return windows of 4, 3 and 5 items: the second divides by 4 + 3, the third by 3 + 5."""
    counts = (1.0, 3.0, 1.0, 2.0, 4.0, 1.0)
    right = [
        np.isin(range(6), window) / count for window, count in zip(PAIRS, (4, 7, 8), strict=True)
    ]
    return [
        Weights(own, counts, w, 2, 0, "mean", windows=PAIRS)
        for w, own in zip(PAIRS, right, strict=True)
    ]


def _short_over_ranks(*, whole):
    """Return two windows of two ranks, of which the second has one micro-batch, and is wrong.

    With `whole`, also a right window of a plan in which K is 2.
    """
    windows, owners = ((0, 1), (2,)), (0, 1, 1)
    own, short = (
        Weights(
            np.array(observed),
            (1.0,) * 3,
            window,
            1,
            0,
            "mean",
            windows=windows,
            owners=owners,
            alike=True,
        )
        for window, observed in zip(windows, ([0.5, 0.5, 0.0], [0.0, 0.0, 0.3]), strict=True)
    )
    both = replace(
        own,
        window=(2, 3),
        owners=(0, 1, 1, 0),
        counts=(1.0,) * 4,
        observed=np.array([0, 0, 0.5, 0.5]),
    )
    right = replace(both, accumulation_steps=2, windows=((0, 1), (2, 3)))
    return [short, own, *([right] if whole else [])]


SIXTH_IN_FLOAT32 = float(np.float32(1 / 6))
ITEMS = _short(2 / 8, 2 / 16, 4 / 24, counts=(1.0, 2.0, 3.0), items=(2, 2, 4))
TOKENS = _short(1 / 30, 2 / 42, 3 / 24, counts=(5, 7, 4), items=(1, 2, 3))
ONE_TOO_MANY = _short(1 / 13, 1 / 13, 1 / 13, counts=(3.0, 2.0, 4.0), items=(1, 1, 2))
UNREAD = _short(1 / 5, 1 / 5, 0, counts=(1, 3, 1), unread=frozenset({2}))
NAMED = {
    "wrong-scale": {
        "K times": _all(3 / 6),
        "one K-th": _all(1 / 18),
        "N times": _all(1.0),
        "one N-th": _all(1 / 36),
        "one N-th of a sum": _all(1 / 6, reduction="sum"),
        "half": _all(1 / 12),
        "minus": _all(-1 / 6),
        "0.7 times": _all(0.7 / 6),
        "a little less": _all((1 - 5e-7) / 6),
        "2/5 in a short window": _short(0.1, 0.1, k=5, counts=(1, 3)),
        "5/2 in a short window": _short(5 / 8, 5 / 8, k=5, counts=(1, 3)),
        "half in a short window": _short(1 / 8, 1 / 8, k=5, counts=(1, 3)),
        "a short window of 2": _short(2 / 8, 2 / 8, k=5, counts=(1, 7)),
        "K is the window's count": _short(2 / 2, 2 / 2, k=2, counts=(1, 1)),
        "300 micro-batches": _short(*[1.0] * 300, k=int("300"), counts=(1,) * 300),
        "items are counts": replace(ITEMS, observed=np.full(3, 1 / 2), items=(1, 2, 3)),
        "one without targets": _short(1 / 8, 0.0, 1 / 8, counts=(1.0, 0.0, 3.0)),
        "another window without targets": replace(
            _all(2 / 6, others=(1, 0)), counts=(0.0, *COUNTS[1:])
        ),
        "one that cannot be read": replace(UNREAD, observed=UNREAD.observed / 2),
        **{f"3 times in epoch {epoch}": _all((epoch + 2) / 6, epoch=epoch) for epoch in (1, 2)},
        **{f"a 7th in epoch {epoch}": _all(epoch / 6 / 7, epoch=epoch) for epoch in (1, 2)},
        "9/13: 9 targets over 9 + 4 items": ONE_TOO_MANY,
        "9/13 where items are not known": replace(ONE_TOO_MANY, items=()),
        "9/12": replace(ONE_TOO_MANY, observed=np.full(3, 1 / 12)),
        "9/13 with 9 items": replace(ONE_TOO_MANY, items=(3, 2, 4)),
        "1e-9 added to the count": _little_off(),
        "1e-9 added to the count of one window": _little_off(1 + 1e-8),
        "a count that is not set to 0": _not_set_to_0()[1:] + _not_set_to_0()[:1],
        "squared number of 3 ranks": _over_ranks(3, (1, 2, 3, 4, 5, 6), 9),
        "one over 3 ranks, in a whole window": _over_ranks(3, (1, 2, 3, 4, 5, 6), 1 / 3),
        "2 ranks, K = 2 and a count of 2": _over_ranks(2, (0.5,) * 4, 2),
        "each window's count": _of_counts(1, 2, 3),
        "K in each window": _of_counts(2, 2, 2),
        "5 in each window": _of_counts(5, 5, 5),
        "over the previous count": _of_counts(1, 2, 3 / 2),
        "over the next count": _of_counts(1 / 2, 2 / 3, 3),
        "over the epoch's count": _of_counts(1 / 6, 2 / 6, 3 / 6),
        "a loss scale": _of_counts(*[2.0**16] * 3),
        "minus in each window": _of_counts(-1, -1, -1),
        "10 less than the count": _of_counts(-1 / 9, -2 / 8, -3 / 7),
        "the first epoch": _run(
            *(np.repeat(np.eye(3)[i], 2) * factor for factor in (0.5, 1.0) for i in range(3)),
            k=2,
            windows=PAIRS,
        ),
    },
    "mean-of-means": {
        "one K-th each": _weights(1 / 3, 1 / 6, 1 / 9),
        "one K-th each in a short window": _weights(1 / 3, 1 / 6, 1 / 9, k=5),
        "one K-th each over 5": _weights(1 / 5, 1 / 10, 1 / 15, k=5),
        "1 each": _weights(1, 1 / 2, 1 / 3),
        "2/3 each": _weights(2 / 3, 2 / 6, 2 / 9),
        "1 each of a sum": _weights(1, 1 / 2, 1 / 3, reduction="sum"),
        "1/3 each of a sum": _weights(1 / 3, 1 / 6, 1 / 9, reduction="sum"),
    },
    "wrong-count": {
        "of the last one, 3": _weights(1 / 2, 1 / 4, 1 / 6),
        "of the first one, 1": _weights(1 / 6, 1 / 12, 1 / 18),
        "squares": _weights(1 / 36, 2 / 36, 3 / 36),
        "squares of 1, 2 and 5": _short(1 / 8, 2 / 8, 5 / 8, counts=(1, 2, 5)),
        "inverse squares": _weights(1 / 6, 1 / 24, 1 / 54),
        "of the one before": _weights(0.7, 1 / 12, 2 / 18),
        "of the one after": _weights(2 / 6, 3 / 12, 0.7),
        "items for counts": ITEMS,
        "items for tokens": TOKENS,
    },
    "stale-window": {
        "the window before": _all(1 / 6, others=(1 / 2, 0)),
        "both others in epoch 1": _all(1 / 6, others=(1 / 2, 1 / 4), epoch=1),
        "twice in epoch 1": _all(2 / 6, epoch=1),
        **{
            f"a trace of {trace} of a {reduction}": _all(
                right, reduction=reduction, others=(trace * right, 0)
            )
            for reduction, right in (("sum", 1.0), ("mean", 1 / 6))
            for trace in (1e-6, -1e-12)
        },
        "all before": _run(
            [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], k=1, windows=FOUR
        ),
        "tenths": _run(
            [1, 0, 0, 0], [0.1, 1, 0, 0], [0.01, 0.1, 1, 0], [0, 0.01, 0.1, 1], k=1, windows=FOUR
        ),
        "moving average": _kept(0.9, 0.1),
        "moving average without the oldest": _kept(0.9, 0.1, without_the_oldest=True),
        "halved at each reset": _kept(0.5, 1.0),
        "halved without the oldest": _kept(0.5, 1.0, without_the_oldest=True),
        "a tenth, never reset": _kept(1.0, 0.1),
    },
    "other-window": {
        "the next one": _all(1 / 6, others=(0, 1 / 4)),
        "both others": _all(1 / 6, others=(1 / 2, 1 / 4)),
        "one late, the first twice": _run(
            [1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], k=1, windows=FOUR
        ),
        "one late": _run([0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], k=1, windows=FOUR),
        "two late": _run([0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], k=1, windows=FOUR),
        "always the first": _run(
            [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], k=1, windows=FOUR
        ),
        "backwards": _run(
            [0, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0], k=1, windows=FOUR
        ),
        "and the next": _run(
            [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 1], k=1, windows=FOUR
        ),
        "two windows leave open which": _run([1, 0], [1, 0], k=1, windows=FOUR[:2]),
    },
    "wrong-windows": {
        "one long": _run(
            [1, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0], k=2, windows=PAIRS
        ),
        "one ahead": _run(
            [0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1], k=2, windows=PAIRS
        ),
    },
    "reset-inside-window": {
        "right": _weights(0, 0, 1 / 6),
        "as of means": _weights(0, 0, 1 / 9),
        "as of sums": _weights(0, 0, 1 / 3),
    },
    "first-only": {"right": _weights(1 / 6, 0, 0)},
    "dropped-micro-batch": {
        "first and last": _weights(0, 1 / 6, 0),
        "last, and a sign": _weights(1 / 6, -1 / 6, 0),
        "middle": _weights(1 / 6, 0, 1 / 6),
        "all that can be read": replace(UNREAD, observed=0 * UNREAD.observed),
    },
    "no-gradient": {"nothing": _all(0.0)},
    "repeated-micro-batch": {
        "the last 3 times": _weights(1 / 6, 1 / 6, 3 / 6),
        "the last twice": _weights(1 / 6, 1 / 6, 2 / 6),
        "the last twice, of 1, 1 and 2": _short(1 / 4, 1 / 4, 2 / 4, counts=(1, 1, 2)),
        "the middle twice": _weights(1 / 6, 2 / 6, 1 / 6),
        "the middle 3 times": _weights(1 / 6, 3 / 6, 1 / 6),
        "two twice": _weights(2 / 6, 1 / 6, 2 / 6),
        "running sums": _weights(3 / 6, 2 / 6, 1 / 6),
        "running sums of four": _short(4 / 4, 3 / 4, 2 / 4, 1 / 4, k=4, counts=(1, 1, 1, 1)),
        "running sums of two": _short(2 / 4, 1 / 4, k=2, counts=(1, 3)),
        "the last for all": _weights(0, 0, 3 / 6),
        "the first for all": _weights(3 / 6, 0, 0),
        "one of 300": _short(*(1 / 300 * (1 + (np.arange(300) == 7))), k=300, counts=(1,) * 300),
    },
    "rescaled-accumulator": {
        "acc = (acc + mean) / 3": _weights(1 / 27, 1 / 18, 1 / 9),
        "acc = 2 acc + share": _weights(4 / 6, 2 / 6, 1 / 6),
        "acc = acc / 2 + share": _weights(1 / 24, 1 / 12, 1 / 6),
        "acc = 2 acc - share": _weights(-4 / 6, -2 / 6, -1 / 6),
        "of two, by K": _short(1 / 4, 1 / 6, k=2, counts=(1, 3)),
        "of 11, whose first is small": _short(
            *(11.0 ** -(11 - j) for j in range(11)), k=11, counts=(1.0,) * 11
        ),
    },
    "low-precision": {
        "float32": _all(SIXTH_IN_FLOAT32),
        "float32 from the second on": _weights(1 / 6, SIXTH_IN_FLOAT32, SIXTH_IN_FLOAT32),
        "float16": _weights(*(float(np.float16(n / 6)) / n for n in (1, 2, 3))),
        "2 decimals": _weights(0.17, 0.33 / 2, 0.5 / 3),
        "1 decimal": _weights(0.2, 0.3 / 2, 0.5 / 3),
    },
    "unrecognised-weights": {
        "1/5": _weights(1 / 6, 1 / 6, 1 / 5),
        "decimals": _weights(0.3, 0.1, 0.2),
        "2.5 times": _weights(1 / 6, 2.5 / 6, 1 / 6),
        "a sign": _weights(1 / 6, -1 / 6, 1 / 6),
        "geometric with a sign": _weights(4 / 6, -2 / 6, 1 / 6),
        "off by 1e-5": _weights(1 / 6 * (1 + 1e-5), 1 / 6, 1 / 6),
        "nearly float32": _weights(1 / 6, SIXTH_IN_FLOAT32, SIXTH_IN_FLOAT32 * (1 + 1e-9)),
        "two, not by K": _short(1 / 2, 1 / 8, k=2, counts=(1, 3)),
        "other items": replace(ITEMS, items=(2, 2, 5)),
        "items of a sum": replace(TOKENS, reduction="sum"),
        "short window of ranks": _short_over_ranks(whole=False),
        "a rank without micro-batch": _short_over_ranks(whole=True),
        "a factor of each window": _of_counts(7, 11, 13),
        "one window of three": _of_counts(1, 7, 1),
        "a longer window with fewer that count": [
            _short(1 / 3, 0.5 / 3, 0.25 / 3, counts=(1.0, 1.0, 1.0)),
            _short(0, 0, 0.45, 0, 0.15, k=5, counts=(0.0, 0.0, 1.0, 0.0, 1.0)),
        ],
    },
}
"""Name -> what it is -> weights of a step, or of the steps of a run, whose first wrong one is named."""


def _named(weights):
    steps = weights if isinstance(weights, list) else [weights]
    wrong = next(w for w in steps if not w.is_right)
    return diagnose(wrong, [w for w in steps if w is not wrong])


def test_a_pattern_has_its_name(golden):
    found = {
        (name, title): _named(weights)
        for name, rows in NAMED.items()
        for title, weights in rows.items()
    }
    assert_named(
        golden, "judge_weights", {at: (one.name, one.explanation()) for at, one in found.items()}
    )


def test_the_right_weight():
    assert _all(0).expected == 1 / 6
    assert _all(0, reduction="sum").expected == 1
    # right is 1/5 of counts 1, 3 and 1, of which the last has a gradient of 0, so that it may be
    # there or not
    assert UNREAD.expected == 1 / 5
    assert UNREAD.is_right


@pytest.mark.parametrize(
    ("long", "short", "name"),
    [
        ((0, 0, 1), (0, 1), "reset-inside-window"),
        ((0, 1, 1), (0, 1), "dropped-micro-batch"),
        ((1, 0, 0), (1, 0), "first-only"),
        ((1, 1, 0), (1, 0), "dropped-micro-batch"),
        ((1, 0, 1), (1, 0), "dropped-micro-batch"),
        ((0, 0, 3), (0, 2), "repeated-micro-batch"),
        ((3, 2, 1), (2, 1), "repeated-micro-batch"),
        ((4, 2, 1), (2, 1), "rescaled-accumulator"),
        ((2, 1, 1), (2, 1), "repeated-micro-batch"),
    ],
)
def test_a_longer_window_tells_what_a_window_of_two_does_not(long, short, name):
    both = _run([*long, 0, 0], [0, 0, 0, *short], k=3, windows=((0, 1, 2), (3, 4)))
    assert _named(both).name == name
    # of two alone, what is said is right of either fault: that one is missing, or is there too
    # often
    alone = _named(_run(list(short), k=2, windows=((0, 1),)))
    assert alone.name == ("repeated-micro-batch" if max(short) > 1 else "dropped-micro-batch")
