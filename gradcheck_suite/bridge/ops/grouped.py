"""Products of matrices in groups, with which mixtures of experts multiply every expert's tokens by its own weights."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from gradcheck_suite.bridge.dtypes import Array, jax_dtype
from gradcheck_suite.bridge.op_table import register_op

HIGHEST = lax.Precision.HIGHEST


def _sizes(ends: Array) -> Array:
    return jnp.diff(ends, prepend=jnp.zeros(1, ends.dtype))


@register_op("aten._grouped_mm")
def grouped_mm(
    self: Array, mat2: Array, offs: Array | None = None, bias: Array | None = None, out_dtype: Any = None
) -> Array:
    """Return one product for each group; `offs` are the ends of the groups along the axis that is cut.

    The groups are rows of `self` (S, K) with `mat2` (G, K, N), columns of `mat2` (K, S) with `self` (G, M, K), or
    parts of the axis that is summed: (M, S) and (S, N) give (G, M, N). What lies behind the last group is 0 here, and
    uninitialised in torch. torch refuses a bias.
    """
    del bias
    if offs is None:
        out = jnp.matmul(self, mat2, precision=HIGHEST)
    elif mat2.ndim == 3:
        out = lax.ragged_dot(self, mat2, _sizes(offs), precision=HIGHEST)
    elif self.ndim == 3:
        out = lax.ragged_dot(mat2.T, self.swapaxes(1, 2), _sizes(offs), precision=HIGHEST).T
    else:
        places = jnp.arange(self.shape[1])
        group = jnp.searchsorted(offs, places, side="right")
        parts = jnp.where(group == jnp.arange(offs.size)[:, None], self[:, None], 0)
        out = jnp.einsum("mgs,sn->gmn", parts, mat2, precision=HIGHEST)
    return out if out_dtype is None else out.astype(jax_dtype(out_dtype))


@register_op("transformers.grouped_mm_fallback")
def grouped_mm_fallback(input: Array, weight: Array, offs: Array) -> Array:
    """Return the products of the groups of rows: transformers' own operation for dtypes that torch's has not."""
    return grouped_mm(input, weight, offs)
