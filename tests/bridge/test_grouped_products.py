"""Products in groups in float64, where torch has no kernel: against one product for each group."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from gradcheck_suite.bridge.op_table import to_array
from gradcheck_suite.bridge.ops.linear_algebra import grouped_mm
from tests.bridge.samples import tensor

ROWS, WEIGHTS = tensor(7, 3), tensor(4, 3, 5, seed=1)


def _each_group(rows, weights, ends):
    """Multiply the rows of each group by its own matrix; those behind the last group are 0."""
    starts = [0, *ends]
    parts = [rows[a:b] @ w for a, b, w in zip(starts, ends, weights, strict=False)]
    return torch.cat(
        [*parts, torch.zeros(len(rows) - ends[-1], weights.shape[2], dtype=rows.dtype)]
    )


def _error(function, ends) -> float:
    """Return the largest difference of the product and of its gradients from one product for each
    group.
    """
    out = _each_group(ROWS, WEIGHTS, ends)
    cotangent = tensor(7, 5, seed=2).detach()
    expected = torch.autograd.grad(out, (ROWS, WEIGHTS), cotangent)
    got, pull = jax.vjp(
        lambda a, w: function(a, w, jnp.asarray(ends)), to_array(ROWS), to_array(WEIGHTS)
    )
    pairs = zip((out, *expected), (got, *pull(to_array(cotangent))), strict=True)
    return max(float(np.abs(x.detach().numpy() - np.asarray(y)).max()) for x, y in pairs)


@pytest.mark.parametrize("ends", [[2, 2, 5, 7], [0, 3, 3, 6], [7, 7, 7, 7], [0, 0, 0, 0]])
def test_a_product_in_groups_is_one_product_for_each_group(ends):
    assert _error(grouped_mm, ends) < 1e-14


def test_a_product_of_shifted_groups_is_not_one_product_for_each_group():
    """The planted fault: every end is one row late."""
    assert _error(lambda a, w, ends: grouped_mm(a, w, ends + 1), [2, 2, 5, 6]) > 0.1
