"""Kernels of a foreach call, counted by hand from the limits of a launch."""

from __future__ import annotations

import pytest

from gradcheck_suite.measure.launches import CHUNK, LARGE, SMALL, foreach_launches


@pytest.mark.parametrize(
    ("elements", "launches"),
    [
        ([], 0),
        ([0, 0], 0),
        ([1], 1),
        ([1] * 110, 1),
        ([1] * 111, 2),
        ([0] * 50 + [1] * 110, 1),
        ([320 * CHUNK], 1),
        ([320 * CHUNK + 1], 2),
        ([CHUNK + 1] * 160, 2),  # 110 tensors fill the first launch
        ([3 * CHUNK] * 107, 2),  # 321 blocks: the last tensor's last chunk goes into a second launch
        ([319 * CHUNK, 2 * CHUNK, 1], 2),
    ],
)
def test_a_launch_is_full_of_tensors_or_of_blocks(elements, launches):
    assert foreach_launches(elements, SMALL) == launches


def test_large_arguments_hold_seven_times_as_much():
    assert (foreach_launches([1] * 770, LARGE), foreach_launches([1] * 771, LARGE)) == (1, 2)
    assert foreach_launches([2240 * CHUNK + 1], LARGE) == 2
