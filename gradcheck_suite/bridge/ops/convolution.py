"""Convolution in one to three dimensions with all of torch's arguments, im2col and col2im."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcheck_suite.bridge.dtypes import Array
from gradcheck_suite.bridge.op_table import register_op

_LAYOUTS = {1: ("NCH", "OIH", "NCH"), 2: ("NCHW", "OIHW", "NCHW"), 3: ("NCDHW", "OIDHW", "NCDHW")}


def per_axis(value: Any, n: int) -> list[Any]:
    """Return the values for each of n axes of an argument that torch takes as one number or as one per axis."""
    values = [value] if isinstance(value, int) else list(value)
    return values * n if len(values) == 1 else values


def _transposed_kernel(weight: Array, groups: int) -> Array:
    """Return (C_out, C_in / groups, *K), the kernel flipped, for a weight of (C_in, C_out / groups, *K)."""
    c_in, per_group, *kernel = weight.shape
    w = weight.reshape(groups, c_in // groups, per_group, *kernel).swapaxes(1, 2)
    w = w.reshape(groups * per_group, c_in // groups, *kernel)
    return jnp.flip(w, tuple(range(2, w.ndim)))


@register_op("aten.convolution")
def convolution(
    input: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *further: Any,
    **_: Any,
) -> Array:
    """Return the convolution of (N, C_in, *S) with (C_out, C_in / groups, *K), or the transposed convolution.

    The further arguments of the operation are `transposed`, `output_padding`, `groups`, and flags of cuDNN.
    """
    transposed, output_padding, groups = further[:3]
    n = weight.ndim - 2
    batched = input.ndim == n + 2
    x = input if batched else input[None]
    stride, padding, dilation = per_axis(stride, n), per_axis(padding, n), per_axis(dilation, n)
    if transposed:
        extent = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        extra = per_axis(output_padding, n)
        pads = [(r - p, r - p + e) for r, p, e in zip(extent, padding, extra, strict=True)]
        kernel, strides, lhs = _transposed_kernel(weight, groups), [1] * n, stride
    else:
        pads, kernel, strides, lhs = [(p, p) for p in padding], weight, stride, [1] * n
    out = lax.conv_general_dilated(
        x,
        kernel,
        window_strides=strides,
        padding=pads,
        lhs_dilation=lhs,
        rhs_dilation=dilation,
        dimension_numbers=_LAYOUTS[n],
        feature_group_count=groups,
        precision=lax.Precision.HIGHEST,
    )
    if bias is not None:
        out = out + bias.reshape(-1, *[1] * n)
    return out if batched else out[0]


def _blocks(size: int, kernel: int, dilation: int, padding: int, stride: int) -> Any:
    """Return the padded input's index of each kernel element of each block, (kernel, blocks)."""
    count = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    return np.arange(kernel)[:, None] * dilation + np.arange(count)[None, :] * stride


@register_op("aten.im2col")
def im2col(
    self: Array, kernel_size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Array:
    """Return (N, C * kh * kw, L) for (N, C, H, W): `torch.nn.functional.unfold`."""
    kernel_size, dilation, padding, stride = (per_axis(v, 2) for v in (kernel_size, dilation, padding, stride))
    x = self if self.ndim == 4 else self[None]
    n, c, h, w = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2))
    rows, columns = (
        _blocks(size, *each)
        for size, each in zip((h, w), zip(kernel_size, dilation, padding, stride, strict=True), strict=True)
    )
    taken = x[:, :, rows[:, None, :, None], columns[None, :, None, :]]
    out = taken.reshape(n, c * kernel_size[0] * kernel_size[1], rows.shape[1] * columns.shape[1])
    return out if self.ndim == 4 else out[0]


@register_op("aten.col2im")
def col2im(
    self: Array,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Array:
    """Return (N, C, H, W) for (N, C * kh * kw, L), overlapping entries summed: `torch.nn.functional.fold`."""
    kernel_size, dilation, padding, stride = (per_axis(v, 2) for v in (kernel_size, dilation, padding, stride))
    x = self if self.ndim == 3 else self[None]
    n, (h, w), (kh, kw) = x.shape[0], output_size, kernel_size
    c = x.shape[1] // (kh * kw)
    rows = _blocks(h, kh, dilation[0], padding[0], stride[0])
    columns = _blocks(w, kw, dilation[1], padding[1], stride[1])
    values = x.reshape(n, c, kh, kw, rows.shape[1], columns.shape[1])
    out = jnp.zeros((n, c, h + 2 * padding[0], w + 2 * padding[1]), x.dtype)
    out = out.at[:, :, rows[:, None, :, None], columns[None, :, None, :]].add(values)
    out = out[:, :, padding[0] : padding[0] + h, padding[1] : padding[1] + w]
    return out if self.ndim == 3 else out[0]
