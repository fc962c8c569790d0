"""Reading weights: each known pattern, worked out by hand, has its name; sound ones have none; others are not guessed.

The window under test is micro-batches 1 to 3, of 1, 2 and 3 items, in an epoch of five; right is 1/6 for each of them.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from gradcheck_suite.diagnosis.weights import Weights, diagnose

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
        (
            _weights(3 / 6, 3 / 6, 3 / 6),
            "wrong-scale",
            "weighs 3 times what it should, which is accumulation_steps",
        ),
        (_weights(1 / 18, 1 / 18, 1 / 18), "wrong-scale", "which is 1/accumulation_steps = 1/3"),
        (_weights(1, 1, 1), "wrong-scale", "weighs 6 times what it should, which is the window's count, 6"),
        (_weights(1 / 36, 1 / 36, 1 / 36), "wrong-scale", "which is one over the window's count, 1/6"),
        (_weights(1 / 6, 1 / 6, 1 / 6, reduction="sum"), "wrong-scale", "one over the window's count, 1/6"),
        (_weights(1 / 12, 1 / 12, 1 / 12), "wrong-scale", "weighs 0.5 times what it should"),
        (_weights(-1 / 6, -1 / 6, -1 / 6), "wrong-scale", "weighs -1 times what it should"),
        # a short window of 2 where K is 5: 2/5, 5/2, one half
        (
            _short(0.1, 0.1, k=5, counts=(1, 3)),
            "wrong-scale",
            "window's micro-batches over accumulation_steps, 2/5",
        ),
        (_short(5 / 8, 5 / 8, k=5, counts=(1, 3)), "wrong-scale", "over the short window's micro-batches, 5/2"),
        (_short(1 / 8, 1 / 8, k=5, counts=(1, 3)), "wrong-scale", "one over the short window's micro-batches, 1/2"),
        # each mean counted the same: 1/(3 * count)
        (_weights(1 / 3, 1 / 6, 1 / 9), "mean-of-means", "each micro-batch's mean weighs 1/3 whatever its count: "),
        (_weights(1 / 3, 1 / 6, 1 / 9, k=5), "mean-of-means", "mean weighs 1/3 whatever its count: "),
        (_weights(1, 1 / 2, 1 / 3, reduction="sum"), "mean-of-means", "weighs 1 whatever its count, where sums are to"),
        (_weights(1 / 3, 1 / 6, 1 / 9, reduction="sum"), "mean-of-means", "weighs 0.333333 whatever its count, where"),
        (_weights(1 / 5, 1 / 10, 1 / 15, k=5), "mean-of-means", "weighs 1/5 whatever its count, in a window of 3"),
        (_weights(1, 1 / 2, 1 / 3), "wrong-scale", "each micro-batch's mean has weight 1, 3 times the mean of means"),
        (_weights(2 / 3, 2 / 6, 2 / 9), "mean-of-means", "mean weighs 0.666667 whatever its count"),
        # other windows' micro-batches
        (_weights(1 / 6, 1 / 6, 1 / 6, others=(1 / 2, 0)), "stale-window", "micro-batches [0] belong to other windows"),
        (_weights(1 / 6, 1 / 6, 1 / 6, others=(0, 1 / 4)), "stale-window", "micro-batches [4] belong to other windows"),
        (_weights(2 / 6, 2 / 6, 2 / 6, epoch=1), "stale-window", "from earlier epochs"),
        (_weights(3 / 6, 3 / 6, 3 / 6, epoch=2, k=4), "stale-window", "from earlier epochs"),
        # some missing
        (_weights(0, 0, 1 / 6), "reset-inside-window", "only the window's last micro-batch"),
        (_weights(0, 0, 1 / 9), "reset-inside-window", "only the window's last micro-batch"),
        (_weights(1 / 6, 0, 0), "first-only", "only the window's first micro-batch"),
        (_weights(0, 1 / 6, 0), "dropped-micro-batch", "micro-batches [1, 3] of the window are not"),
        (_weights(1 / 6, -1 / 6, 0), "dropped-micro-batch", "micro-batches [3] of the window are not"),
        (_weights(1 / 6, 0, 1 / 6), "dropped-micro-batch", "micro-batches [2] of the window are not"),
        (_weights(0, 0, 0), "no-gradient", "nothing of the window"),
        # some more than once
        (
            _weights(1 / 6, 2 / 6, 1 / 6),
            "repeated-micro-batch",
            "micro-batches [2] of the window are in",
        ),
        (_weights(2 / 6, 1 / 6, 2 / 6), "repeated-micro-batch", "micro-batches [1, 3] of the window"),
        (_weights(3 / 6, 2 / 6, 1 / 6), "running-loss", "3, 2, ..., 1 times"),
        (_short(4 / 4, 3 / 4, 2 / 4, 1 / 4, k=4, counts=(1, 1, 1, 1)), "running-loss", "4, 3, ..., 1 times"),
        (_short(2 / 4, 1 / 4, k=2, counts=(1, 3)), "repeated-micro-batch", "micro-batches [0] of the window"),
        # acc = (acc + mean)/3; acc = 2 acc + share; acc = acc/2 + share
        (_weights(1 / 27, 1 / 18, 1 / 9), "rescaled-accumulator", "weighs 3 times the one before it"),
        (_weights(4 / 6, 2 / 6, 1 / 6), "rescaled-accumulator", "weighs 0.5 times the one before it"),
        (_weights(1 / 24, 1 / 12, 1 / 6), "rescaled-accumulator", "weighs 2 times the one before it"),
        (_weights(-4 / 6, -2 / 6, -1 / 6), "rescaled-accumulator", "weighs 0.5 times the one before it"),
        (_short(1 / 4, 1 / 6, k=2, counts=(1, 3)), "rescaled-accumulator", "weighs 2 times the one before it"),
        # 1/6 rounded to float32
        (_weights(*[float(np.float32(1 / 6))] * 3), "rounded-weights", "right to 3e-08 only"),
        (_weights(*[(1 - 5e-7) / 6] * 3), "rounded-weights", "right to 5e-07 only"),
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
        (1 / 6, 3 / 6, 1 / 6),
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


def test_rounded_weights_are_told_from_wrong_ones():
    assert diagnose(_weights(*[(1 + 0.9e-6) / 6] * 3)).name == "rounded-weights"
    assert diagnose(_weights(*[(1 + 1.1e-6) / 6] * 3)).name == "wrong-scale"


def test_a_trace_of_another_window_is_stale_from_a_millionth_of_a_weight_on():
    """Below it may be rounding; the sum's weight is 1, the mean's 1/6."""
    for reduction, expected in (("sum", 1.0), ("mean", 1 / 6)):
        right = [expected * (1 + 1e-8)] * 3
        for trace in (1e-6 * expected, -1e-6 * expected):
            assert diagnose(_weights(*right, reduction=reduction, others=(trace, 0))).name == "rounded-weights"
            beyond = _weights(*right, reduction=reduction, others=(1.001 * trace, 0))
            assert diagnose(beyond).name == "stale-window"


def test_another_window_that_counts_nothing_is_not_looked_at():
    weights = replace(_weights(2 / 6, 2 / 6, 2 / 6, others=(1, 0)), counts=(0.0, *COUNTS[1:]))
    assert diagnose(weights).name == "wrong-scale"


def test_all_names_of_a_factor_are_said():
    """Where the window is whole, or K is its count, one number has several names, and none is guessed."""
    assert diagnose(_weights(3 / 6, 3 / 6, 3 / 6)).sentence.endswith("which is accumulation_steps = 3")
    two = _short(2 / 2, 2 / 2, k=2, counts=(1, 1))
    assert diagnose(two).sentence.endswith("which is accumulation_steps = 2 or the window's count, 2")
    short = _short(2 / 8, 2 / 8, k=5, counts=(1, 7))
    assert diagnose(short).sentence.endswith("which is the short window's micro-batches, 2")
    assert diagnose(_weights(*[0.7 / 6] * 3)).sentence.endswith("weighs 0.7 times what it should")


def test_windows_may_be_long():
    """300 micro-batches of one item each: past 256, equal integers are no longer one object."""
    right = np.full(300, 1 / 300)
    scaled = diagnose(_short(*300 * right, k=int("300"), counts=(1,) * 300))
    assert scaled.sentence.endswith("which is accumulation_steps = 300 or the window's count, 300")
    doubled = right * (1 + (np.arange(300) == 7))
    assert diagnose(_short(*doubled, k=300, counts=(1,) * 300)).name == "repeated-micro-batch"


def test_a_count_from_outside_is_the_windows():
    """Two micro-batches of counts 1 and 3 are looked at, of a window that counts 5."""
    weights = replace(_short(1 / 5, 1 / 5, k=2, counts=(1, 3)), total=5.0)
    assert weights.expected == 1 / 5
    assert diagnose(weights).name == "rounded-weights"
    assert "right to 0 only" in diagnose(weights).sentence


def test_tokens_are_counted_though_there_are_more_than_items():
    """Items 1, 2 and 3 of 5, 7 and 4 tokens: weights n / (6 * tokens)."""
    weights = _short(1 / 30, 2 / 42, 3 / 24, k=3, counts=(5, 7, 4))
    assert diagnose(replace(weights, items=(1, 2, 3))).name == "wrong-count"
    assert diagnose(replace(weights, items=(1, 2, 3), reduction="sum")).name == "unrecognised-weights"


@pytest.mark.parametrize("epoch", [1, 2])
def test_other_multiples_are_not_blamed_on_earlier_epochs(epoch):
    assert diagnose(_weights(*[(epoch + 2) / 6] * 3, epoch=epoch)).name == "wrong-scale"
    assert diagnose(_weights(*[epoch / 6 / 7] * 3, epoch=epoch)).name == "wrong-scale"


def test_weights_and_diagnoses_are_frozen():
    with pytest.raises(FrozenInstanceError):
        _weights(0, 0, 0).epoch = 1
    with pytest.raises(FrozenInstanceError):
        diagnose(_weights(0, 0, 0)).name = "right"


def test_one_target_too_many_for_every_item_has_its_name():
    """Counts 3, 2 and 4 in 1, 1 and 2 items: over all, 9 targets are divided by 9 + 4."""
    weights = Weights(np.full(3, 1 / 13), (3.0, 2.0, 4.0), (0, 1, 2), 3, 0, "mean", items=(1, 1, 2))
    diagnosis = diagnose(weights)
    assert diagnosis.name == "wrong-scale"
    assert "9/(9 + 4): one target too many is counted for every item" in diagnosis.sentence
    for other in (
        replace(weights, items=()),
        replace(weights, observed=np.full(3, 1 / 12)),
        replace(weights, items=(3, 2, 4)),
    ):
        assert "one target too many" not in diagnose(other).sentence
