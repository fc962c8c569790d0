"""Normalization over features, groups and batches. New running statistics are returned, never written in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from gradcheck_suite.bridge.dtypes import Array
from gradcheck_suite.bridge.op_table import register_op
from gradcheck_suite.bridge.ops.reductions import vector_norm


def _standardised(x: Array, axes: tuple[int, ...], eps: float) -> tuple[Array, Array, Array]:
    """Return (x - mean) * rstd, mean and rstd, the reduced axes kept with length 1."""
    mean = jnp.mean(x, axis=axes, keepdims=True)
    off = x - mean
    rstd = 1 / jnp.sqrt(jnp.mean(off * off, axis=axes, keepdims=True) + eps)
    return off * rstd, mean, rstd


def _affine(x: Array, weight: Array | None, bias: Array | None) -> Array:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


@register_op("aten.native_layer_norm")
def native_layer_norm(
    input: Array, normalized_shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    """Return the layer norm over the last axes, the mean and the reciprocal standard deviation."""
    axes = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    out, mean, rstd = _standardised(input, axes, eps)
    return _affine(out, weight, bias), mean, rstd


@register_op("aten._fused_rms_norm")
def fused_rms_norm(
    input: Array, normalized_shape: Sequence[int], weight: Array | None, eps: float | None
) -> tuple[Array, Array]:
    """Return x / sqrt(mean x^2 + eps) over the last axes; eps defaults to the dtype's machine epsilon."""
    axes = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    eps = float(jnp.finfo(input.dtype).eps) if eps is None else eps
    rstd = 1 / jnp.sqrt(jnp.mean(input * input, axis=axes, keepdims=True) + eps)
    return _affine(input * rstd, weight, None), rstd


@register_op("aten.native_group_norm")
def native_group_norm(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    N: int,  # noqa: N803  (the schema's name)
    C: int,  # noqa: N803
    HxW: int,  # noqa: N803
    group: int,
    eps: float,
) -> tuple[Array, Array, Array]:
    """Return the group norm, and mean and reciprocal standard deviation of (N, group)."""
    out, mean, rstd = _standardised(input.reshape(N, group, C // group * HxW), (2,), eps)
    shape = (1, C, *[1] * (input.ndim - 2))
    out = out.reshape(input.shape)
    weight, bias = (None if p is None else p.reshape(shape) for p in (weight, bias))
    return _affine(out, weight, bias), mean[..., 0], rstd[..., 0]


def _per_channel(p: Array | None, x: Array) -> Array | None:
    return None if p is None else p.reshape(1, -1, *[1] * (x.ndim - 2))


def _batch_norm(
    input: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """Return the output, the batch's mean and rstd (empty outside training) and the new running statistics."""
    axes = (0, *range(2, input.ndim))
    if not training:
        assert running_mean is not None
        assert running_var is not None
        rstd = 1 / jnp.sqrt(running_var + eps)
        mean_, rstd_ = _per_channel(running_mean, input), _per_channel(rstd, input)
        assert mean_ is not None
        assert rstd_ is not None
        out = _affine((input - mean_) * rstd_, _per_channel(weight, input), _per_channel(bias, input))
        empty = jnp.zeros(0, input.dtype)
        return out, empty, empty, running_mean, running_var
    out, mean, rstd = _standardised(input, axes, eps)
    out = _affine(out, _per_channel(weight, input), _per_channel(bias, input))
    mean, rstd = mean.reshape(-1), rstd.reshape(-1)
    count = math.prod(input.shape[a] for a in axes)
    if running_mean is not None:
        running_mean = momentum * lax.stop_gradient(mean) + (1 - momentum) * running_mean
    if running_var is not None:
        unbiased = jnp.var(lax.stop_gradient(input), axis=axes) * (count / max(count - 1, 1))
        running_var = momentum * unbiased + (1 - momentum) * running_var
    return out, mean, rstd, running_mean, running_var


# One line for each of torch's signatures. The functional ones return the new running statistics as well; the last one
# also returns an empty reserve buffer before them.
register_op("aten._native_batch_norm_legit_functional")(_batch_norm)
register_op("aten.native_batch_norm")(lambda *arguments: _batch_norm(*arguments)[:3])
register_op("aten._native_batch_norm_legit.no_stats")(
    lambda x, weight, bias, *arguments: _batch_norm(x, weight, bias, None, None, *arguments)[:3]
)
register_op("aten._native_batch_norm_legit_no_training")(
    lambda x, weight, bias, mean, var, *factors: _batch_norm(x, weight, bias, mean, var, False, *factors)[:3]
)


@register_op("aten._batch_norm_with_update_functional")
def batch_norm_with_update(
    input: Array, weight: Array | None, bias: Array | None, running_mean: Array, running_var: Array, *factors: float
) -> tuple[Any, ...]:
    """Return the batch norm, its mean and rstd, an empty reserve buffer and the new running statistics."""
    out, mean, rstd, *running = _batch_norm(input, weight, bias, running_mean, running_var, True, *factors)
    return out, mean, rstd, jnp.zeros(0, jnp.uint8), *running


@register_op("aten._weight_norm_interface")
def weight_norm(v: Array, g: Array, dim: int = 0) -> tuple[Array, Array]:
    """Return g * v / |v| with the norm over all axes but `dim`, and the detached norm."""
    axes = tuple(a for a in range(v.ndim) if a != dim % v.ndim)
    norm = jnp.sqrt(jnp.sum(v * v, axis=axes, keepdims=True))
    return v * (g / norm), lax.stop_gradient(norm)


@register_op("aten.renorm")
def renorm(self: Array, p: Any, dim: int, maxnorm: Any) -> Array:
    """Return the slices along `dim` scaled down to a norm of at most `maxnorm`."""
    axes = tuple(a for a in range(self.ndim) if a != dim % self.ndim)
    norm = vector_norm(self, p, axes, keepdim=True)
    return jnp.where(norm > maxnorm, self * (maxnorm / (norm + 1e-7)), self)
