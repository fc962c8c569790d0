"""The sketches: linear, blind to layout, within their bound on sound sums, and sharp enough for planted faults."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradcheck_suite.live.recording.sketches import PROJECTIONS, as_array, resolution, sketch, tolerance

SHAPES = ((), (1,), (7,), (5000,), (3, 4), (300, 96), (5000, 40), (8, 3, 3, 3), (2, 70000))
LARGE = (300, 96)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
FAULTS = {
    "leak": lambda total, part, other, size: total + size * other,
    "drop": lambda total, part, other, size: total - size * part,
    "scale": lambda total, part, other, size: (1 + size) * total,
}
"""Another window's gradient added, a share of one contribution lost, one parameter of several multiplied."""
SMALLEST = {
    "float64": {"leak": 1e-12, "drop": 5e-13, "scale": 2.5e-13},
    "float32": {"leak": 5e-4, "drop": 2.5e-4, "scale": 1e-4},
    "bfloat16": {"leak": 3.0, "drop": 3.0, "scale": 1.5},
}
"""The size of a fault that is always found in a window of eight and a matrix of 300 by 96; a 25th of it never is."""


def _draw(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _misfit(total, parts, shape, dtype):
    """Return the largest difference of a projection, relative to the bound."""
    name = str(dtype).removeprefix("torch.")
    found = as_array(sketch(total))
    arrived = [as_array(sketch(part)) for part in parts]
    norms = np.array([a[PROJECTIONS] ** 0.5 for a in arrived])
    allowed = tolerance(norms, shape, name) + resolution(found[PROJECTIONS] ** 0.5, shape, name)
    return np.abs(found - sum(arrived))[:PROJECTIONS].max() / allowed


def _summed(shape, dtype, seed, length):
    """Return the contributions of a window and their sum in a dtype."""
    parts = [_draw(shape, dtype, 100 * seed + j) for j in range(length)]
    total = torch.zeros(shape, dtype=dtype)
    for part in parts:
        total += part
    return total, parts


def _planted(fault, size, total, parts, seed):
    """Return the misfit of a sum with a fault of some size."""
    other = _draw(total.shape, torch.float64, seed + 7777)
    wrong = FAULTS[fault](total.double(), parts[0].double(), other, size).to(total.dtype)
    return _misfit(wrong, parts, tuple(total.shape), total.dtype)


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_is_within_its_bound_and_a_planted_fault_is_not(dtype):
    for shape in SHAPES:
        for seed in range(20):
            total, parts = _summed(shape, dtype, seed, 8)
            assert _misfit(total, parts, shape, dtype) < 1, (shape, seed)
            for fault, size in SMALLEST[str(dtype).removeprefix("torch.")].items() if shape == LARGE else ():
                assert _planted(fault, size, total, parts, seed) > 1, (fault, seed)
                assert _planted(fault, size / 25, total, parts, seed) < 1, (fault, seed)


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_share_of_planted_faults_that_is_found_grows_with_their_size(dtype, fault):
    """With `-s`, the curve: in how many of 20 draws a fault of each size is found."""
    least = SMALLEST[str(dtype).removeprefix("torch.")][fault] / 100
    sizes = [least * 10 ** (quarter / 4) for quarter in range(11)]
    for length in (2, 8):
        sums = [_summed(LARGE, dtype, seed, length) for seed in range(20)]
        found = [int(sum(_planted(fault, size, *one, seed) > 1 for seed, one in enumerate(sums))) for size in sizes]
        print(dtype, length, fault, [(f"{size:.2g}", count) for size, count in zip(sizes, found, strict=True)])
        assert (found[0], found[-1]) == (0, 20)
        assert found == sorted(found)


def test_a_sketch_depends_on_the_values_alone():
    dense = _draw((90, 64), torch.float32, 0)
    dense[::3] = 0
    expected = as_array(sketch(dense))
    rows = torch.arange(90).repeat(2)
    twice = torch.sparse_coo_tensor(rows[None], torch.cat([dense, dense]), (90, 64), check_invariants=False)
    for same in (dense.t().contiguous().t(), dense.to_sparse(1), dense.double(), 0.5 * twice):
        np.testing.assert_allclose(as_array(sketch(same)), expected, rtol=1e-4, atol=1e-3)
    images = _draw((4, 8, 5, 5), torch.float32, 1)
    channels_last = images.to(memory_format=torch.channels_last)
    np.testing.assert_allclose(as_array(sketch(channels_last)), as_array(sketch(images)), rtol=1e-4, atol=1e-3)
    assert not np.isfinite(as_array(sketch(torch.tensor([1.0, torch.nan])))).all()
