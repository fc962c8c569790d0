"""Embedding look-ups, whose padding row gets no gradient."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcheck_suite.bridge.dtypes import Array
from gradcheck_suite.bridge.op_table import register_op


def _without_padding_gradient(weight: Array, padding_idx: int) -> Array:
    """Return the weight, its padding row detached."""
    if padding_idx < 0:
        return weight
    padding = (np.arange(weight.shape[0]) == padding_idx)[:, None]
    return jnp.where(padding, lax.stop_gradient(weight), weight)


def _by_frequency(rows: Array, indices: Array, size: int) -> Array:
    """Return the rows with gradients divided by how often each index occurs."""
    counts = jnp.zeros(size, rows.dtype).at[indices.reshape(-1)].add(1)
    scale = (1 / counts[indices])[..., None]
    scaled = rows * scale
    return lax.stop_gradient(rows) + (scaled - lax.stop_gradient(scaled))


@register_op("aten.embedding")
def embedding(
    weight: Array, indices: Array, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Array:
    """Return weight[indices], (..., width); the row `padding_idx` gets no gradient."""
    del sparse
    rows = _without_padding_gradient(weight, padding_idx)[indices]
    return _by_frequency(rows, indices, weight.shape[0]) if scale_grad_by_freq else rows


@register_op("aten._embedding_bag", "aten._embedding_bag_forward_only")
def embedding_bag(
    weight: Array,
    indices: Array,
    offsets: Array,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    _sparse: bool = False,
    per_sample_weights: Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Array, Array, Array, Array]:
    """Return the sum (mode 0), mean (1) or maximum (2) of the rows of each bag, without its padding.

    Only torch's backward reads the other three results; they are empty here.
    """
    starts = offsets[:-1] if include_last_offset else offsets
    bags = starts.shape[0]
    bag = jnp.sum(jnp.arange(indices.shape[0])[:, None] >= starts[None, :], axis=1) - 1
    rows = _without_padding_gradient(weight, padding_idx)[indices]
    if scale_grad_by_freq:
        rows = _by_frequency(rows, indices, weight.shape[0])
    kept = indices != padding_idx if padding_idx >= 0 else jnp.ones(indices.shape, jnp.bool_)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    counts = jnp.zeros(bags, jnp.int64).at[bag].add(kept)
    if mode == 2:
        member = (bag[None, :] == jnp.arange(bags)[:, None]) & kept[None, :]
        candidates = jnp.where(member[..., None], lax.stop_gradient(rows)[None], -jnp.inf)
        best = jnp.argmax(candidates, axis=1)
        out = jnp.where((counts > 0)[:, None], jnp.take_along_axis(rows, best, axis=0), 0)
    else:
        out = jnp.zeros((bags, weight.shape[1]), weight.dtype).at[bag].add(jnp.where(kept[:, None], rows, 0))
        if mode == 1:
            out = out / jnp.maximum(counts, 1)[:, None].astype(weight.dtype)
    empty = jnp.zeros(0, indices.dtype)
    return out, empty, empty, empty
