"""Reading weights: each known pattern, worked out by hand, has its name; sound ones have none; others are not guessed.

The window under test is micro-batches 1 to 3, of 1, 2 and 3 items, in an epoch of five; right is 1/6 for each of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gradcheck_suite.judge.naming import diagnose
from gradcheck_suite.judge.weights import Weights, trial_weights

COUNTS = (2.0, 1.0, 2.0, 3.0, 4.0)
WINDOW = (1, 2, 3)


def _weights(*window: float, k: int = 3, epoch: int = 0, reduction: str = "mean", others=(0.0, 0.0)) -> Weights:
    observed = np.array([others[0], *window, others[1]])
    return Weights(observed, COUNTS, WINDOW, k, epoch, reduction)


def _short(*window: float, k: int, counts: tuple[float, ...]) -> Weights:
    return Weights(np.array(window), counts, tuple(range(len(window))), k, 0, "mean")


def test_the_expected_weight():
    assert _weights(0, 0, 0).expected == 1 / 6
    assert _weights(0, 0, 0, reduction="sum").expected == 1


@pytest.mark.parametrize(
    ("weights", "name", "says"),
    [
        # K times, one K-th, N times, one N-th
        (_weights(3 / 6, 3 / 6, 3 / 6), "wrong-scale", "weighs 3 times what it should, which is accumulation_steps"),
        (_weights(1 / 18, 1 / 18, 1 / 18), "wrong-scale", "which is one over accumulation_steps = 3"),
        (_weights(1, 1, 1), "wrong-scale", "weighs 6 times what it should, which is the window's count, 6"),
        (_weights(1 / 36, 1 / 36, 1 / 36), "wrong-scale", "which is one over the window's count, 6"),
        (_weights(1 / 6, 1 / 6, 1 / 6, reduction="sum"), "wrong-scale", "one over the window's count, 6"),
        (_weights(1 / 12, 1 / 12, 1 / 12), "wrong-scale", "weighs 0.5 times what it should"),
        (_weights(-1 / 6, -1 / 6, -1 / 6), "wrong-scale", "weighs -1 times what it should"),
        # a short window of 2 where K is 5: 2/5, 5/2, one half
        (_short(0.1, 0.1, k=5, counts=(1, 3)), "wrong-scale", "window's micro-batches over accumulation_steps, 2/5"),
        (_short(5 / 8, 5 / 8, k=5, counts=(1, 3)), "wrong-scale", "over the short window's micro-batches, 5/2"),
        (_short(1 / 8, 1 / 8, k=5, counts=(1, 3)), "wrong-scale", "one over the short window's micro-batches, 2"),
        # each mean counted the same: 1/(3 * count)
        (_weights(1 / 3, 1 / 6, 1 / 9), "mean-of-means", "each micro-batch's mean has weight 1/3, whatever its count:"),
        (_weights(1 / 3, 1 / 6, 1 / 9, k=5), "mean-of-means", "mean has weight 1/3, whatever its count"),
        (_weights(1, 1 / 2, 1 / 3, reduction="sum"), "mean-of-means", "has weight 1, whatever its count, where sums"),
        # each mean counted as that of 3 or of 1 items: 3/(6 * count), 1/(6 * count)
        (_weights(1 / 2, 1 / 4, 1 / 6), "wrong-count", "by the count of the window's last micro-batch"),
        (_weights(1 / 6, 1 / 12, 1 / 18), "wrong-count", "by the count of the window's first micro-batch"),
        (_weights(1 / 6, 1 / 6, 3 / 6), "repeated-micro-batch", "3 times: send each loss backward once, and mult"),
        (_weights(1 / 6, 1 / 6, 2 / 6), "repeated-micro-batch", "twice: send each loss backward once, and multiply"),
        (_weights(1 / 3, 1 / 6, 1 / 9, reduction="sum"), "mean-of-means", "has weight 0.333333, whatever its count,"),
        (_weights(1 / 5, 1 / 10, 1 / 15, k=5), "mean-of-means", "has weight 1/5, whatever its count, in a window of 3"),
        (_weights(1, 1 / 2, 1 / 3), "mean-of-means", "each micro-batch's mean has weight 1, whatever its count"),
        (_weights(2 / 3, 2 / 6, 2 / 9), "mean-of-means", "mean has weight 0.666667, whatever its count"),
        # other windows' micro-batches
        (_weights(1 / 6, 1 / 6, 1 / 6, others=(1 / 2, 0)), "stale-window", "micro-batches [0] belong to earlier"),
        (_weights(1 / 6, 1 / 6, 1 / 6, others=(0, 1 / 4)), "other-window", "micro-batches [4] of other windows are"),
        (
            _weights(1 / 6, 1 / 6, 1 / 6, others=(1 / 2, 1 / 4)),
            "other-window",
            "micro-batches [0, 4] of other windows are in the gradient: train",
        ),
        (_weights(1 / 6, 1 / 6, 1 / 6, others=(1 / 2, 1 / 4), epoch=1), "stale-window", "[0, 4] belong to earlier"),
        (_weights(2 / 6, 2 / 6, 2 / 6, epoch=1), "stale-window", "from earlier epochs"),
        # some missing
        (_weights(0, 0, 1 / 6), "reset-inside-window", "only the window's last micro-batch"),
        (_weights(0, 0, 1 / 9), "reset-inside-window", "only the window's last micro-batch"),
        (_weights(0, 0, 1 / 3), "reset-inside-window", "only the window's last micro-batch"),
        (_weights(1 / 6, 0, 0), "first-only", "only the window's first micro-batch"),
        (_weights(0, 1 / 6, 0), "dropped-micro-batch", "micro-batches [1, 3] of the window are not"),
        (_weights(1 / 6, -1 / 6, 0), "dropped-micro-batch", "micro-batches [3] of the window are not"),
        (_weights(1 / 6, 0, 1 / 6), "dropped-micro-batch", "micro-batches [2] of the window are not"),
        (_weights(0, 0, 0), "no-gradient", "nothing of the window"),
        # some more than once
        (_weights(1 / 6, 2 / 6, 1 / 6), "repeated-micro-batch", "micro-batches [2] of the window are in"),
        (_weights(2 / 6, 1 / 6, 2 / 6), "repeated-micro-batch", "micro-batches [1, 3] of the window"),
        (_weights(3 / 6, 2 / 6, 1 / 6), "repeated-micro-batch", "3, 2, ..., 1 times"),
        (_short(4 / 4, 3 / 4, 2 / 4, 1 / 4, k=4, counts=(1, 1, 1, 1)), "repeated-micro-batch", "4, 3, ..., 1 times"),
        # of two, running sums cannot be told from a repetition
        (_short(2 / 4, 1 / 4, k=2, counts=(1, 3)), "repeated-micro-batch", "are in the gradient 2 and 1 times"),
        (_weights(1 / 6, 3 / 6, 1 / 6), "repeated-micro-batch", "micro-batches [2] of the window are in the gradient"),
        (
            _weights(0, 0, 3 / 6),
            "repeated-micro-batch",
            "[3] of the window are in the gradient 3 times, and [1, 2]",
        ),
        (
            _weights(3 / 6, 0, 0),
            "repeated-micro-batch",
            "[1] of the window are in the gradient 3 times, and [2, 3]",
        ),
        (_weights(1 / 6, 1 / 6, 1 / 6 + 1 / 3), "repeated-micro-batch", "micro-batches [3] of the window"),
        # in proportion to the count, and to its inverse square
        (_weights(1 / 36, 2 / 36, 3 / 36), "wrong-count", "weighted by the square of their counts"),
        (_weights(1 / 6, 1 / 24, 1 / 54), "wrong-count", "weighted by one over their counts"),
        # the count of the micro-batch before, of the one after
        (_weights(0.7, 1 / 12, 2 / 18), "wrong-count", "by the count of the micro-batch before it"),
        (_weights(2 / 6, 3 / 12, 0.7), "wrong-count", "by the count of the micro-batch after it"),
        # acc = (acc + mean)/3; acc = 2 acc + share; acc = acc/2 + share
        (_weights(1 / 27, 1 / 18, 1 / 9), "rescaled-accumulator", "weighs 3 times the one before it"),
        (_weights(4 / 6, 2 / 6, 1 / 6), "rescaled-accumulator", "weighs 0.5 times the one before it"),
        (_weights(1 / 24, 1 / 12, 1 / 6), "rescaled-accumulator", "weighs 2 times the one before it"),
        (_weights(-4 / 6, -2 / 6, -1 / 6), "rescaled-accumulator", "weighs 0.5 times the one before it"),
        (_short(1 / 4, 1 / 6, k=2, counts=(1, 3)), "rescaled-accumulator", "weighs 2 times the one before it"),
        # 1/6 rounded to float32, and a factor that is none
        (_weights(*[float(np.float32(1 / 6))] * 3), "low-precision", "are rounded to float32"),
        (_weights(*[float(np.float16(n / 6)) / n for n in (1, 2, 3)]), "low-precision", "are rounded to float16"),
        (_weights(0.17, 0.33 / 2, 0.5 / 3), "low-precision", "are rounded to 2 decimals"),
        (_weights(0.2, 0.3 / 2, 0.5 / 3), "low-precision", "are rounded to 1 decimal:"),
        (_weights(*[(1 - 5e-7) / 6] * 3), "wrong-scale", "1 - 5e-07 times"),
    ],
)
def test_a_known_pattern_has_its_name(weights, name, says):
    diagnosis = diagnose(weights)
    assert diagnosis.name == name, diagnosis
    assert says in diagnosis.sentence


def test_geometric_weights_keep_their_name_however_small_the_first_one_is():
    k = 11
    observed = np.array([float(k) ** -(k - j) for j in range(k)])
    diagnosis = diagnose(Weights(observed, (1.0,) * k, tuple(range(k)), k, 0, "mean"))
    assert diagnosis.name == "rescaled-accumulator"
    assert "weighs 11 times the one before it" in diagnosis.sentence


def test_items_in_place_of_counts():
    """Three micro-batches of 2, 2 and 4 items, of which 1, 2 and 3 count: n / (8 * count)."""
    weights = Weights(np.array([2 / 8, 2 / 16, 4 / 24]), (1.0, 2.0, 3.0), (0, 1, 2), 3, 0, "mean", items=(2, 2, 4))
    assert diagnose(weights).name == "wrong-count"
    assert diagnose(replace(weights, items=(2, 2, 5))).name == "unrecognised-weights"
    assert diagnose(replace(weights, observed=np.full(3, 1 / 2), items=(1, 2, 3))).name == "wrong-scale"


@pytest.mark.parametrize(
    "window",
    [
        (1 / 6, 1 / 6, 1 / 5),
        (0.3, 0.1, 0.2),
        (1 / 6, 2.5 / 6, 1 / 6),
        (1 / 6, -1 / 6, 1 / 6),
        (4 / 6, -2 / 6, 1 / 6),
        (1 / 6 * (1 + 1e-5), 1 / 6, 1 / 6),
    ],
)
def test_an_unknown_pattern_is_called_unrecognised_and_shown(window):
    diagnosis = diagnose(_weights(*window))
    assert diagnosis.name == "unrecognised-weights"
    assert ", ".join(f"{w:.6g}" for w in window) in diagnosis.sentence
    assert "0.166667 is right for each" in diagnosis.sentence


def test_two_micro_batches_are_not_called_geometric_unless_the_factor_is_that_of_the_accumulation_steps():
    assert diagnose(_short(1 / 2, 1 / 8, k=2, counts=(1, 3))).name == "unrecognised-weights"


def test_a_micro_batch_that_counts_nothing_is_not_missed():
    """Its weight cannot be read, since nothing of it is in any gradient."""
    weights = Weights(np.array([1 / 8, 0.0, 1 / 8]), (1.0, 0.0, 3.0), (0, 1, 2), 3, 0, "mean")
    diagnosis = diagnose(weights)
    assert diagnosis.name == "wrong-scale"
    assert "weighs 0.5 times" in diagnosis.sentence


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_any_trace_of_another_window_is_foreign(reduction):
    """What is 0 in a right gradient is 0 exactly: nothing was ever added there."""
    expected = 1.0 if reduction == "sum" else 1 / 6
    for trace in (1e-6, -1e-12):
        diagnosis = diagnose(_weights(*[expected] * 3, reduction=reduction, others=(trace * expected, 0)))
        assert diagnosis.name == "stale-window"
        assert f"with {abs(trace):.3g} of an item's right weight" in diagnosis.sentence


def test_another_window_that_counts_nothing_is_not_looked_at():
    weights = replace(_weights(2 / 6, 2 / 6, 2 / 6, others=(1, 0)), counts=(0.0, *COUNTS[1:]))
    assert diagnose(weights).name == "wrong-scale"


def test_all_names_of_a_factor_are_said():
    """Where K is the window's count, one number has several names, and none is guessed."""
    assert "which is accumulation_steps = 3: a division is left out" in diagnose(_weights(3 / 6, 3 / 6, 3 / 6)).sentence
    two = _short(2 / 2, 2 / 2, k=2, counts=(1, 1))
    assert "which is accumulation_steps = 2 or the window's count, 2: " in diagnose(two).sentence
    short = _short(2 / 8, 2 / 8, k=5, counts=(1, 7))
    assert "which is the short window's micro-batches, 2: " in diagnose(short).sentence
    assert "0.7 times what it should, which no usual count or quotient" in diagnose(_weights(*[0.7 / 6] * 3)).sentence


def test_windows_may_be_long():
    """300 micro-batches of one item each: past 256, equal integers are no longer one object."""
    right = np.full(300, 1 / 300)
    scaled = diagnose(_short(*300 * right, k=int("300"), counts=(1,) * 300))
    assert "which is accumulation_steps = 300 or the window's count, 300: " in scaled.sentence
    doubled = right * (1 + (np.arange(300) == 7))
    assert diagnose(_short(*doubled, k=300, counts=(1,) * 300)).name == "repeated-micro-batch"


def test_what_cannot_be_read_still_counts():
    """Of counts 1, 3 and 1 the last has a gradient of 0, so it may be there or not; right is 1/5."""
    weights = replace(_short(1 / 5, 1 / 5, 0, k=3, counts=(1, 3, 1)), unread=frozenset({2}))
    assert weights.expected == 1 / 5
    assert weights.is_right
    halved = diagnose(replace(weights, observed=weights.observed / 2))
    assert halved.name == "wrong-scale"
    assert "weighs 0.5 times" in halved.sentence
    assert diagnose(replace(weights, observed=0 * weights.observed)).name == "dropped-micro-batch"


def test_tokens_are_counted_though_there_are_more_than_items():
    """Items 1, 2 and 3 of 5, 7 and 4 tokens: weights n / (6 * tokens)."""
    weights = _short(1 / 30, 2 / 42, 3 / 24, k=3, counts=(5, 7, 4))
    assert diagnose(replace(weights, items=(1, 2, 3))).name == "wrong-count"
    assert diagnose(replace(weights, items=(1, 2, 3), reduction="sum")).name == "unrecognised-weights"


@pytest.mark.parametrize("epoch", [1, 2])
def test_other_multiples_are_not_blamed_on_earlier_epochs(epoch):
    assert diagnose(_weights(*[(epoch + 2) / 6] * 3, epoch=epoch)).name == "wrong-scale"
    assert diagnose(_weights(*[epoch / 6 / 7] * 3, epoch=epoch)).name == "wrong-scale"


def test_one_target_too_many_for_every_item_has_its_name():
    """Counts 3, 2 and 4 in 1, 1 and 2 items: over all, 9 targets are divided by 9 + 4."""
    weights = Weights(np.full(3, 1 / 13), (3.0, 2.0, 4.0), (0, 1, 2), 3, 0, "mean", items=(1, 1, 2))
    diagnosis = diagnose(weights)
    assert diagnosis.name == "wrong-scale"
    assert "9/13: one target too many is counted for every item" in diagnosis.sentence
    for other in (
        replace(weights, items=()),
        replace(weights, observed=np.full(3, 1 / 12)),
        replace(weights, items=(3, 2, 4)),
    ):
        assert "one target too many" not in diagnose(other).sentence


def test_a_repetition_is_no_square_of_counts_unless_three_counts_tell():
    """Counts 1, 1 and 2: twice the last one is also its square. Counts 1, 2 and 5 in 8 weigh 1/8, 2/8 and 5/8."""
    twice = diagnose(_short(1 / 4, 1 / 4, 2 / 4, k=3, counts=(1, 1, 2)))
    assert twice.name == "repeated-micro-batch"
    assert "micro-batches [2] of the window are in the gradient twice" in twice.sentence
    square = diagnose(_short(1 / 8, 2 / 8, 5 / 8, k=3, counts=(1, 2, 5)))
    assert square.name == "wrong-count"
    assert "the square of their counts" in square.sentence


def test_weights_that_are_rounded_from_the_second_micro_batch_on_are_named_so():
    rounded = float(np.float32(1 / 6))
    assert diagnose(_weights(1 / 6, rounded, rounded)).name == "low-precision"
    assert diagnose(_weights(1 / 6, rounded, rounded * (1 + 1e-9))).name != "low-precision"


def test_factors_that_differ_from_1_by_little_are_shown_by_that():
    """1e-9 more than the count of each window, which is 4 and 2, is what it is divided by."""
    windows = ((0, 1), (2,))
    steps = [
        Weights(np.array(observed), (1.0, 3.0, 2.0), window, 2, 0, "mean", windows=windows, tolerance=1e-13)
        for window, observed in zip(windows, ([1 / (4 + 1e-9)] * 2 + [0.0], [0.0, 0.0, 1 / (2 + 1e-9)]), strict=True)
    ]
    said = diagnose(steps[0], steps[1:])
    assert said.name == "wrong-scale"
    assert "weighs 1 - 2.5e-10 times what it should, as where 1e-09 is added to the window's count" in said.sentence
    other = replace(steps[1], observed=steps[1].observed * (1 + 1e-8))
    said = diagnose(steps[0], [other])
    assert said.name == "wrong-scale"
    assert "the factors are 1 - 2.5e-10, 1 + 9.5e-09, which no usual count or quotient of counts" in said.sentence


def test_a_count_that_was_not_set_to_0_has_its_name():
    """Windows of 4, 3 and 5 items: the second divides by 4 + 3, the third by 3 + 5."""
    windows, counts = ((0, 1), (2, 3), (4, 5)), (1.0, 3.0, 1.0, 2.0, 4.0, 1.0)
    right = [np.isin(range(6), window) / count for window, count in zip(windows, (4, 7, 8), strict=True)]
    first, *rest = (
        Weights(own, counts, w, 2, 0, "mean", windows=windows) for w, own in zip(windows, right, strict=True)
    )
    said = diagnose(rest[0], [first, rest[1]])
    assert said.name == "wrong-scale"
    assert "its own and the previous window's together, 3/7: set the count to 0 when a window begins" in said.sentence


def test_a_window_of_ranks_is_short_where_it_has_fewer_micro_batches_than_all_ranks_should():
    windows, owners = ((0, 1), (2,)), (0, 1, 1)
    own, short = (
        Weights(np.array(observed), (1.0,) * 3, window, 1, 0, "mean", windows=windows, owners=owners, alike=True)
        for window, observed in zip(windows, ([0.5, 0.5, 0.0], [0.0, 0.0, 0.3]), strict=True)
    )
    assert diagnose(short, [own]).sentence.endswith("(only in short windows)")
    both = replace(own, window=(2, 3), owners=(0, 1, 1, 0), counts=(1.0,) * 4, observed=np.array([0, 0, 0.5, 0.5]))
    right = replace(both, accumulation_steps=2, windows=((0, 1), (2, 3)))
    said = diagnose(short, [own, right]).sentence
    assert said.endswith("(only in windows in which a rank has no micro-batch)")


@pytest.mark.parametrize(
    ("ranks", "counts", "factor", "says"),
    [
        (3, (1, 2, 3, 4, 5, 6), 9, "which is the square of the number of ranks, 9: "),
        # six micro-batches are a whole window of three ranks with two each
        (3, (1, 2, 3, 4, 5, 6), 1 / 3, "which is one over the number of ranks, 3: "),
        (2, (0.5,) * 4, 2, "which is accumulation_steps = 2 or the window's count, 2: "),
        (2, (0.5,) * 4, 2, "; or the number of ranks, 2: "),
    ],
)
def test_a_factor_of_ranks_is_said(ranks, counts, factor, says):
    window = tuple(range(len(counts)))
    owners = tuple(j % ranks for j in window)
    weights = np.full(len(counts), factor / sum(counts))
    found = diagnose(Weights(weights, counts, window, 2, 0, "mean", owners=owners, alike=True))
    assert found.name == "wrong-scale"
    assert says in found.sentence


# Several steps


def _run(*steps, k, windows, counts=None, epochs=1):
    """Return the weights of all steps of a run over windows, each given by the weights of all micro-batches."""
    counts = counts or (1.0,) * sum(map(len, windows))
    return [
        Weights(
            np.array(step, dtype=float), counts, windows[i % len(windows)], k, i // len(windows), "sum", windows=windows
        )
        for i, step in enumerate(steps)
    ]


def _first_wrong(steps):
    wrong = next(w for w in steps if not w.is_right)
    return diagnose(wrong, [w for w in steps if w is not wrong])


FOUR = ((0,), (1,), (2,), (3,))
PAIRS = ((0, 1), (2, 3), (4, 5))


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        (_run([1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], k=1, windows=FOUR), "other-window"),
        (_run([0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], k=1, windows=FOUR), "other-window"),
        (_run([0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], k=1, windows=FOUR), "other-window"),
        (_run([1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], k=1, windows=FOUR), "other-window"),
        (_run([0, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0], k=1, windows=FOUR), "other-window"),
        (_run([1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], k=1, windows=FOUR), "stale-window"),
        (_run([1, 0, 0, 0], [0.1, 1, 0, 0], [0.01, 0.1, 1, 0], [0, 0.01, 0.1, 1], k=1, windows=FOUR), "stale-window"),
        (_run([1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 1], k=1, windows=FOUR), "other-window"),
        # two windows alone leave open which
        (_run([1, 0], [1, 0], k=1, windows=FOUR[:2], counts=(1.0, 1.0)), "other-window"),
        (_run([1, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0], k=2, windows=PAIRS), "wrong-windows"),
        (_run([0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1], k=2, windows=PAIRS), "wrong-windows"),
    ],
)
def test_steps_together_tell_which_window_a_gradient_is_of(steps, name):
    assert _first_wrong(steps).name == name


@pytest.mark.parametrize(
    ("kept", "own", "says"),
    [
        # what stands in .grad is multiplied by the first number at each step, and the new gradient by the second
        (
            0.9,
            0.1,
            "weighs 0.9 times as much with each further step, as by a moving average; the window's own weighs 0.1",
        ),
        (0.5, 1.0, "weighs 0.5 times as much with each further step, as by a reset that scales"),
        (1.0, 0.1, "in other steps, the gradient of earlier windows is still in the sum"),
    ],
)
def test_what_is_kept_of_earlier_windows_is_said(kept, own, says):
    steps, left = [], np.zeros(6)
    for step in range(6):
        left = kept * left + own * np.isin(range(6), PAIRS[step % 3])
        steps.append(left)
    found = _first_wrong(_run(*steps, k=2, windows=PAIRS))
    assert found.name == "stale-window"
    assert says in found.sentence
    # a step without the oldest window is no such average
    steps[2] = np.where(np.isin(range(6), PAIRS[0]), 0, steps[2])
    assert "each further step" not in _first_wrong(_run(*steps, k=2, windows=PAIRS)).sentence


def test_a_factor_must_fit_all_windows():
    """Windows of 1, 2 and 3 micro-batches' counts; what is 2 in one of them is the count or K in all, or neither."""
    windows, counts = ((0,), (1,), (2,)), (1.0, 2.0, 3.0)

    def run(*factors):
        rows = np.diag([f / n for f, n in zip(factors, counts, strict=True)])
        return [Weights(row, counts, w, 2, 0, "mean", windows=windows) for row, w in zip(rows, windows, strict=True)]

    assert "the window's count" in _first_wrong(run(1, 2, 3)).sentence
    assert "accumulation_steps = 2" in _first_wrong(run(2, 2, 2)).sentence
    assert "in every wrong window alike, whatever its counts" in _first_wrong(run(5, 5, 5)).sentence
    assert "over the previous window's" in _first_wrong(run(1, 2, 3 / 2)).sentence
    assert "over the next window's" in _first_wrong(run(1 / 2, 2 / 3, 3)).sentence
    assert "over the whole epoch's" in _first_wrong(run(1 / 6, 2 / 6, 3 / 6)).sentence
    # read off one micro-batch each, they are no factor of a window unless the run explains them
    assert _first_wrong(run(7, 11, 13)).name == "unrecognised-weights"
    assert "2**16, such as a loss scale that is never divided out" in _first_wrong(run(*[2.0**16] * 3)).sentence
    assert "the sign is wrong" in _first_wrong(run(-1, -1, -1)).sentence
    assert "as where -10 is added to the window's count" in _first_wrong(run(-1 / 9, -2 / 8, -3 / 7)).sentence
    sentence = _first_wrong(run(1, 7, 1)).sentence
    assert "(only window 1 of epoch 0 of this run; 2 of 3 steps are right)" in sentence


def test_steps_of_the_first_epoch_are_told_from_those_of_the_second():
    first, second = ([np.repeat(np.eye(3)[i], 2) * factor for i in range(3)] for factor in (0.5, 1.0))
    assert _first_wrong(_run(*first, *second, k=2, windows=PAIRS)).sentence.endswith("(only in the first epoch)")


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
    windows = ((0, 1, 2), (3, 4))
    both = _run([*long, 0, 0], [0, 0, 0, *short], k=3, windows=windows)
    assert _first_wrong(both).name == name
    # of two alone, what is said is right of either fault: that one is missing, or is there too often
    alone = _first_wrong(_run(list(short), k=2, windows=((0, 1),)))
    assert alone.name == ("repeated-micro-batch" if max(short) > 1 else "dropped-micro-batch")


def test_a_longer_window_with_fewer_micro_batches_that_count_is_no_place_of_a_shorter_one():
    short = Weights(np.array([1, 0.5, 0.25]) / 3, (1.0, 1.0, 1.0), (0, 1, 2), 3, 0, "mean")
    long = Weights(np.array([0, 0, 0.9, 0, 0.3]) / 2, (0.0, 0.0, 1.0, 0.0, 1.0), (0, 1, 2, 3, 4), 5, 0, "mean")
    assert diagnose(short, [long]).name == "unrecognised-weights"


# Weights that are tried where a gradient has too few elements to solve for them


LAST = Weights(np.zeros(5), (2.0, 4.0, 1.0, 2.0, 3.0), (2, 3, 4), 3, 0, "mean", windows=((0,), (1,), (2, 3, 4)))
OF_RANKS = Weights(
    np.zeros(6),
    (1.0, 2.0, 3.0, 4.0, 5.0, 6.0),
    (0, 1, 2, 3),
    2,
    0,
    "mean",
    windows=((0, 1, 2, 3), (4, 5)),
    owners=(0, 0, 1, 1, 0, 1),
)


@pytest.mark.parametrize(
    ("w", "given"),
    [
        # the window before is still in the gradient; the sign is wrong; the second of three is missing
        (LAST, (0, 1 / 4, 1 / 6, 1 / 6, 1 / 6)),
        (LAST, (0, 0, -1 / 6, -1 / 6, -1 / 6)),
        (LAST, (0, 0, 1 / 6, 0, 1 / 6)),
        # rank 1's share alone; each rank divides by its own count, 3 and 7
        (OF_RANKS, (0, 0, 1 / 10, 1 / 10, 0, 0)),
        (OF_RANKS, (1 / 3, 1 / 3, 1 / 7, 1 / 7, 0, 0)),
    ],
)
def test_the_weights_that_known_faults_give_are_tried(w, given):
    assert any(np.allclose(values, given, rtol=1e-12, atol=0) for values in trial_weights(w))
