"""Kernels of a foreach call, counted by hand from the limits of a launch."""

from __future__ import annotations

import pytest

from studies.properties.benchmarks import bench_modes
from studies.reset_modes import RESET_MODES
from studies.step_times import CHUNK, LARGE, SMALL, fill_launches, foreach_launches
from studies.workload import Size


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
        # 321 blocks: the last tensor's last chunk goes into a second launch
        ([3 * CHUNK] * 107, 2),
        ([319 * CHUNK, 2 * CHUNK, 1], 2),
    ],
)
def test_a_launch_is_full_of_tensors_or_of_blocks(elements, launches):
    assert foreach_launches(elements, SMALL) == launches


def test_large_arguments_hold_seven_times_as_much():
    assert (foreach_launches([1] * 770, LARGE), foreach_launches([1] * 771, LARGE)) == (1, 2)
    assert foreach_launches([2240 * CHUNK + 1], LARGE) == 2


@pytest.mark.parametrize(
    ("elements", "itemsize", "launches"),
    [
        (0, 4, 0),
        (1, 4, 1),
        (2**29, 4, 1),
        (2**29 + 1, 4, 2),
        (2**30, 2, 1),
        (2**30 + 1, 2, 2),
        (2**31, 4, 4),
    ],
)
def test_a_fill_is_halved_until_its_offsets_fit_32_bits(elements, itemsize, launches):
    assert fill_launches(elements, itemsize) == launches


@pytest.mark.parametrize(
    ("mode", "size", "dtype", "kernels"),
    [
        ("zero_", Size(10**6, "many"), "float32", {100}),
        ("zero_", Size(10**9, "few"), "float32", {2}),
        ("set_to_none", Size(10**9, "few"), "float32", {0}),
        ("flat_buffer", Size(10**8, "few"), "float32", {1}),
        # 4 GB: two kernels, or one where torch fills with a memset
        ("flat_buffer", Size(10**9, "few"), "float32", {1, 2}),
        ("flat_buffer", Size(10**9, "few"), "bfloat16", {1}),
        ("zero_grad_foreach", Size(10**6, "many"), "float32", {1}),
    ],
)
def test_the_benchmark_of_a_reset_predicts_its_kernels(mode, size, dtype, kernels):
    assert bench_modes._launches(RESET_MODES[mode], size, dtype) == kernels
