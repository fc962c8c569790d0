"""Fourier transforms. torch's normalization is a number: 0 none, 1 by 1/sqrt(n), 2 by 1/n."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp

from gradcheck_suite.bridge.dtypes import Array
from gradcheck_suite.bridge.op_table import register_op


def _factor(normalization: int, count: int) -> float:
    return {0: 1.0, 1: 1 / math.sqrt(count), 2: 1 / count}[normalization]


@register_op("aten._fft_c2c")
def fft_c2c(self: Array, dim: Sequence[int], normalization: int, forward: bool) -> Array:
    """Return the complex-to-complex transform, or its inverse."""
    if not dim:
        return self
    count = math.prod(self.shape[d] for d in dim)
    if forward:
        return jnp.fft.fftn(self, axes=tuple(dim)) * _factor(normalization, count)
    return jnp.fft.ifftn(self, axes=tuple(dim)) * (count * _factor(normalization, count))


@register_op("aten._fft_r2c")
def fft_r2c(self: Array, dim: Sequence[int], normalization: int, onesided: bool) -> Array:
    """Return the real-to-complex transform, one-sided along the last of the axes where asked for."""
    count = math.prod(self.shape[d] for d in dim)
    out = jnp.fft.rfftn(self, axes=tuple(dim)) if onesided else jnp.fft.fftn(self, axes=tuple(dim))
    return out * _factor(normalization, count)


@register_op("aten._fft_c2r")
def fft_c2r(self: Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> Array:
    """Return the complex-to-real inverse transform of a spectrum one-sided along the last of the axes."""
    sizes = [self.shape[d] for d in dim[:-1]] + [last_dim_size]
    count = math.prod(sizes)
    out = jnp.fft.irfftn(self, s=sizes, axes=tuple(dim))
    return out * (count * _factor(normalization, count))
