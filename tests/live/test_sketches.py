"""The sketches: linear, blind to layout, within their bound on sound sums, and sharp enough for planted errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradcheck_suite.live.recording.sketches import PROJECTIONS, as_array, resolution, sketch, tolerance

SHAPES = ((), (1,), (7,), (5000,), (3, 4), (300, 96), (5000, 40), (8, 3, 3, 3), (2, 70000))
SMALLEST = {"float64": 1e-12, "float32": 5e-4, "bfloat16": 3.0}
"""The size of a leak, relative to one of eight contributions, that is found in a matrix of 300 by 96."""


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_sum_is_within_its_bound_and_a_planted_leak_is_not(dtype):
    for shape in SHAPES:
        for seed in range(20):
            parts = [_draw(shape, dtype, 100 * seed + j) for j in range(8)]
            total = torch.zeros(shape, dtype=dtype)
            for part in parts:
                total += part
            assert _misfit(total, parts, shape, dtype) < 1, (shape, seed)
            if shape == (300, 96):
                leak = SMALLEST[str(dtype).removeprefix("torch.")] * _draw(shape, torch.float64, seed + 7777)
                assert _misfit((total.double() + leak).to(dtype), parts, shape, dtype) > 1, seed


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
