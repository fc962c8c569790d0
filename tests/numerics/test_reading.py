"""Reading weights: each known pattern, worked out by hand, has its name; sound ones have none; others are not guessed.

The window under test is micro-batches 1 to 3, of 1, 2 and 3 items, in an epoch of five; right is 1/6 for each of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gradcheck_suite.numerics.reading import Weights, diagnose

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
        (_weights(1 / 3, 1 / 6, 1 / 9), "mean-of-means", "each micro-batch's mean weighs 1/3 whatever its count"),
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
        # acc = (acc + mean)/3; acc = 2 acc + share; acc = acc/2 + share
        (_weights(1 / 27, 1 / 18, 1 / 9), "rescaled-accumulator", "weighs 3 times the one before it"),
        (_weights(4 / 6, 2 / 6, 1 / 6), "rescaled-accumulator", "weighs 0.5 times the one before it"),
        (_weights(1 / 24, 1 / 12, 1 / 6), "rescaled-accumulator", "weighs 2 times the one before it"),
        (_short(1 / 4, 1 / 6, k=2, counts=(1, 3)), "rescaled-accumulator", "weighs 2 times the one before it"),
        # 1/6 rounded to float32
        (_weights(*[float(np.float32(1 / 6))] * 3), "rounded-weights", "right to 3e-08 only"),
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
