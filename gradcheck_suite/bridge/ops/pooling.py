"""Pooling. Windows are gathered, so one rule serves all arguments and one entry gets a maximum's gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from gradcheck_suite.bridge.dtypes import Array, is_inexact
from gradcheck_suite.bridge.op_table import register_op
from gradcheck_suite.bridge.ops.convolution import per_axis

Places = npt.NDArray[np.int64]


def _windows(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> Places:
    """Return the input index of each kernel element, (windows, kernel); indices outside [0, size) are padding."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (-(-span // stride) if ceil_mode else span // stride) + 1
    if ceil_mode and (count - 1) * stride >= size + padding:
        count -= 1  # a window must begin within the input or its left padding
    return np.arange(count)[:, None] * stride - padding + np.arange(kernel)[None, :] * dilation


def _adaptive(size: int, out: int) -> Places:
    """Return the input indices of adaptive pooling's windows, (out, longest); -1 pads the shorter windows."""
    starts = [i * size // out for i in range(out)]
    ends = [-(-(i + 1) * size // out) for i in range(out)]
    longest = max((e - s for s, e in zip(starts, ends, strict=True)), default=0)
    return np.array(
        [[p if p < e else -1 for p in range(s, s + longest)] for s, e in zip(starts, ends, strict=True)], np.int64
    ).reshape(out, longest)


def _gathered(x: Array, places: Sequence[Places], outside: Any) -> tuple[Array, Places]:
    """Return the windows over x's last axes, (..., *windows, taps), and each tap's flat index, (*windows, taps)."""
    n = len(places)
    spatial = x.shape[x.ndim - n :]
    flat: Any = np.zeros((1,) * (2 * n), np.int64)
    inside: Any = np.ones((1,) * (2 * n), bool)
    for axis, (where, size) in enumerate(zip(places, spatial, strict=True)):
        shape = [1] * (2 * n)
        shape[axis], shape[n + axis] = where.shape
        where = where.reshape(shape)
        inside = inside & (where >= 0) & (where < size)
        flat = flat * size + np.clip(where, 0, max(size - 1, 0))
    windows = flat.shape[:n]
    flat, inside = flat.reshape(*windows, -1), inside.reshape(*windows, -1)
    taken = x.reshape(*x.shape[: x.ndim - n], math.prod(spatial))[..., flat]
    return jnp.where(inside, taken, outside), flat


def _max(x: Array, places: Sequence[Places]) -> tuple[Array, Array]:
    lowest = -jnp.inf if is_inexact(x) else jnp.iinfo(x.dtype).min
    taken, flat = _gathered(x, places, lowest)
    best = jnp.argmax(lax.stop_gradient(taken), axis=-1, keepdims=True)
    index = jnp.take_along_axis(jnp.broadcast_to(jnp.asarray(flat), taken.shape), best, axis=-1)[..., 0]
    return jnp.take_along_axis(taken, best, axis=-1)[..., 0], index.astype(jnp.int64)


def _max_pool(n: int) -> None:
    def pool(
        self: Array, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> tuple[Array, Array]:
        """Return the maximum of each window and its index; the first of equal maxima wins."""
        kernel = per_axis(kernel_size, n)
        stride = per_axis(stride, n) if stride not in ((), []) else kernel
        arguments = zip(self.shape[-n:], kernel, stride, per_axis(padding, n), per_axis(dilation, n), strict=True)
        return _max(self, [_windows(*each, ceil_mode) for each in arguments])

    def adaptive(self: Array, output_size: Any) -> tuple[Array, Array]:
        """Return the maximum of each adaptive window and its index."""
        sizes = zip(self.shape[-n:], per_axis(output_size, n), strict=True)
        return _max(self, [_adaptive(size, size if out is None else out) for size, out in sizes])

    if n > 1:  # torch builds one dimension from two
        register_op(f"aten.max_pool{n}d_with_indices")(pool)
        register_op(f"aten.adaptive_max_pool{n}d")(adaptive)


def _avg_pool(n: int) -> None:
    def pool(
        self: Array,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Array:
        """Return the mean of each window; the divisor includes padding, excludes it, or is given."""
        kernel, pads = per_axis(kernel_size, n), per_axis(padding, n)
        stride = per_axis(stride, n) if stride not in ((), []) else kernel
        sizes = self.shape[-n:]
        places = [_windows(s, k, t, p, 1, ceil_mode) for s, k, t, p in zip(sizes, kernel, stride, pads, strict=True)]
        total = jnp.sum(_gathered(self, places, 0)[0], axis=-1)
        if divisor_override is not None:
            return total / divisor_override
        count: Any = np.ones((1,) * n)
        for axis, (where, size, pad) in enumerate(zip(places, sizes, pads, strict=True)):
            margin = pad if count_include_pad else 0
            each = np.sum((where >= -margin) & (where < size + margin), axis=1)
            count = count * each.reshape([-1 if a == axis else 1 for a in range(n)])
        return total / jnp.asarray(count, self.dtype)

    def adaptive(self: Array, output_size: Any) -> Array:
        """Return the mean of each adaptive window."""
        sizes = self.shape[-n:]
        outs = [s if o is None else o for s, o in zip(sizes, per_axis(output_size, n), strict=True)]
        places = [_adaptive(s, o) for s, o in zip(sizes, outs, strict=True)]
        count: Any = np.ones((1,) * n)
        for axis, where in enumerate(places):
            count = count * np.sum(where >= 0, axis=1).reshape([-1 if a == axis else 1 for a in range(n)])
        return jnp.sum(_gathered(self, places, 0)[0], axis=-1) / jnp.asarray(count, self.dtype)

    register_op(f"aten.avg_pool{n}d")(pool)
    if n > 1:
        register_op(f"aten._adaptive_avg_pool{n}d")(adaptive)


for _n in (1, 2, 3):
    _max_pool(_n)
    _avg_pool(_n)


@register_op("aten.max_unpool2d", "aten.max_unpool3d")
def max_unpool(
    self: Array, indices: Array, output_size: Sequence[int], stride: Any = None, padding: Any = None
) -> Array:
    """Return zeros with each entry written at its index of the flattened output."""
    del stride, padding
    n = len(output_size)
    lead = self.shape[: self.ndim - n]
    flat = self.reshape(int(np.prod(lead, dtype=int)), -1)
    where = indices.reshape(flat.shape)
    out = jnp.zeros((flat.shape[0], int(np.prod(output_size))), self.dtype)
    written = out.at[jnp.arange(flat.shape[0])[:, None], where].set(lax.stop_gradient(flat))
    # torch hands an overwritten entry the gradient of its index, too
    linear = out.at[jnp.arange(flat.shape[0])[:, None], where].add(flat)
    return (written + (linear - lax.stop_gradient(linear))).reshape(*lead, *output_size)
