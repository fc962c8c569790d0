"""Convolution, pooling, interpolation, sampling and padding over the last axes, with all of torch's
arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import repeat
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from gradcheck_suite.bridge.op_table import Array, is_inexact, register_op, register_table

_LAYOUTS = {1: ("NCH", "OIH", "NCH"), 2: ("NCHW", "OIHW", "NCHW"), 3: ("NCDHW", "OIDHW", "NCDHW")}


def per_axis(value: Any, n: int) -> list[Any]:
    """Return the values for each of n axes of an argument that torch takes as one number or as one
    per axis.
    """
    values = [value] if isinstance(value, int) else list(value)
    return values * n if len(values) == 1 else values


def _transposed_kernel(weight: Array, groups: int) -> Array:
    """Return (C_out, C_in / groups, *K), the kernel flipped, for a weight of (C_in, C_out / groups,
    *K).
    """
    c_in, per_group, *kernel = weight.shape
    # torch lays a transposed weight out by input channels, JAX any weight by output channels
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
    """Return the convolution of (N, C_in, *S) with (C_out, C_in / groups, *K), or the transposed
    convolution.

    The further arguments of the operation are `transposed`, `output_padding`, `groups`, and flags
    of cuDNN.
    """
    transposed, output_padding, groups = further[:3]
    n = weight.ndim - 2
    batched = input.ndim == n + 2
    x = input if batched else input[None]
    stride = per_axis(stride, n)
    padding = per_axis(padding, n)
    dilation = per_axis(dilation, n)
    if transposed:
        extra = per_axis(output_padding, n)
        pads = []
        for axis, size in enumerate(weight.shape[2:]):
            # a transposed convolution pads by what the kernel reaches beyond its first element
            before = dilation[axis] * (size - 1) - padding[axis]
            pads.append((before, before + extra[axis]))
        # a transposed convolution is the gradient of one: a convolution of the spread-out input
        # with the flipped kernel
        kernel = _transposed_kernel(weight, groups)
        strides = [1] * n
        lhs = stride
    else:
        pads = [(p, p) for p in padding]
        kernel = weight
        strides = stride
        lhs = [1] * n
    out = lax.conv_general_dilated(
        x,
        kernel,
        window_strides=strides,
        padding=pads,
        lhs_dilation=lhs,
        rhs_dilation=dilation,
        dimension_numbers=_LAYOUTS[n],
        feature_group_count=groups,
        # by default, JAX computes products in TF32 on GPUs and in bfloat16 on TPUs
        precision=lax.Precision.HIGHEST,
    )
    if bias is not None:
        out = out + bias.reshape(-1, *[1] * n)
    return out if batched else out[0]


Places = npt.NDArray[np.int64]


def _windows(
    size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool
) -> Places:
    """Return the input index of each kernel element, (windows, kernel).

    Indices outside [0, size) are padding.
    """
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (-(-span // stride) if ceil_mode else span // stride) + 1
    if ceil_mode and (count - 1) * stride >= size + padding:
        count -= 1  # a window must begin within the input or its left padding
    starts = np.arange(count) * stride - padding
    return starts[:, None] + np.arange(kernel)[None, :] * dilation


def _adaptive(size: int, out: int) -> Places:
    """Return the input indices of adaptive pooling's windows, (out, longest).

    -1 pads the shorter windows.
    """
    starts = [i * size // out for i in range(out)]
    ends = [-(-(i + 1) * size // out) for i in range(out)]
    longest = max((e - s for s, e in zip(starts, ends, strict=True)), default=0)
    return np.array(
        [
            [p if p < e else -1 for p in range(s, s + longest)]
            for s, e in zip(starts, ends, strict=True)
        ],
        np.int64,
    ).reshape(out, longest)


def _gathered(x: Array, places: Sequence[Places], outside: Any) -> tuple[Array, Places]:
    """Return the windows over x's last axes, (..., *windows, taps), and each tap's flat index,
    (*windows, taps).
    """
    n = len(places)
    spatial = x.shape[x.ndim - n :]
    flat: Any = np.zeros((1,) * (2 * n), np.int64)
    inside: Any = np.ones((1,) * (2 * n), bool)
    for axis, (where, size) in enumerate(zip(places, spatial, strict=True)):
        shape = [1] * (2 * n)
        shape[axis], shape[n + axis] = where.shape
        where = where.reshape(shape)
        inside = inside & (where >= 0) & (where < size)
        # indices outside are clipped to one that exists; their values are replaced below
        flat = flat * size + np.clip(where, 0, max(size - 1, 0))
    windows = flat.shape[:n]
    flat = flat.reshape(*windows, -1)
    inside = inside.reshape(*windows, -1)
    leading = x.shape[: x.ndim - n]
    taken = x.reshape(*leading, math.prod(spatial))[..., flat]
    return jnp.where(inside, taken, outside), flat


def _max(x: Array, places: Sequence[Places]) -> tuple[Array, Array]:
    # padding must not win a maximum
    lowest = -jnp.inf if is_inexact(x) else jnp.iinfo(x.dtype).min
    taken, flat = _gathered(x, places, lowest)
    # `jnp.max` would share the gradient among equal maxima, of which torch takes the first
    best = jnp.argmax(lax.stop_gradient(taken), axis=-1, keepdims=True)
    places_of_all = jnp.broadcast_to(jnp.asarray(flat), taken.shape)
    index = jnp.take_along_axis(places_of_all, best, axis=-1)[..., 0]
    largest = jnp.take_along_axis(taken, best, axis=-1)[..., 0]
    return largest, index.astype(jnp.int64)


def _all_windows(
    x: Array, n: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> list[Places]:
    arguments = [per_axis(value, n) for value in (kernel, stride or kernel, padding, dilation)]
    return [
        _windows(size, k, s, p, d, ceil_mode)
        for size, k, s, p, d in zip(x.shape[-n:], *arguments, strict=True)
    ]


def _all_adaptive(x: Array, n: int, output_size: Any) -> list[Places]:
    sizes = zip(x.shape[-n:], per_axis(output_size, n), strict=True)
    return [_adaptive(size, size if out is None else out) for size, out in sizes]


def _mean(x: Array, places: Sequence[Places], margins: Sequence[int], divisor: Any = None) -> Array:
    """Return the mean of each window, of which positions count up to a margin around x."""
    if divisor is None:
        each = zip(places, x.shape[-len(places) :], margins, strict=True)
        counts = [
            np.sum((where >= -margin) & (where < size + margin), axis=1)
            for where, size, margin in each
        ]
        # a window counts the product of what it counts along each axis
        divisor = jnp.asarray(reduce(np.multiply.outer, counts), x.dtype)
    return jnp.sum(_gathered(x, places, 0)[0], axis=-1) / divisor


def _register_pooling(n: int) -> None:
    def maximum(
        self: Array,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> tuple[Array, Array]:
        """Return the maximum of each window and its index; the first of equal maxima wins."""
        return _max(self, _all_windows(self, n, kernel, stride, padding, dilation, ceil_mode))

    def mean(
        self: Array,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Array:
        """Return the mean of each window.

        The divisor includes padding, excludes it, or is given.
        """
        margins = per_axis(padding if count_include_pad else 0, n)
        return _mean(
            self,
            _all_windows(self, n, kernel, stride, padding, 1, ceil_mode),
            margins,
            divisor_override,
        )

    register_table(
        {
            f"aten._adaptive_avg_pool{n}d": lambda self, size: _mean(
                self, _all_adaptive(self, n, size), [0] * n
            ),
            f"aten.adaptive_max_pool{n}d": lambda self, size: _max(
                self, _all_adaptive(self, n, size)
            ),
            f"aten.avg_pool{n}d": mean,
            f"aten.max_pool{n}d_with_indices": maximum,
        }
    )


_register_pooling(2)  # torch builds one dimension from two
_register_pooling(3)


@register_op("aten.max_unpool2d", "aten.max_unpool3d")
def max_unpool(self: Array, indices: Array, output_size: Sequence[int], *_: Any) -> Array:
    """Return zeros with each entry written at its index of the flattened output."""
    n = len(output_size)
    lead = self.shape[: self.ndim - n]
    flat = self.reshape(int(np.prod(lead, dtype=int)), -1)
    where = indices.reshape(flat.shape)
    out = jnp.zeros((flat.shape[0], int(np.prod(output_size))), self.dtype)
    rows = jnp.arange(flat.shape[0])[:, None]
    written = out.at[rows, where].set(lax.stop_gradient(flat))
    # torch hands an overwritten entry the gradient of its index, too
    linear = out.at[rows, where].add(flat)
    return (written + (linear - lax.stop_gradient(linear))).reshape(*lead, *output_size)


CUBIC = -0.75
Weights = npt.NDArray[np.float64]


def _scale(size: int, out: int, align_corners: bool, scale: float | None) -> float:
    if align_corners:
        return (size - 1) / (out - 1) if out > 1 else 0.0
    return 1 / scale if scale is not None and scale > 0 else size / out


def _cubic_near(x: Any, a: float) -> Any:
    """Return the kernel of cubic convolution at distances of at most 1 (Keys 1981)."""
    return ((a + 2) * x - (a + 3)) * x * x + 1


def _cubic_far(x: Any, a: float) -> Any:
    """Return the kernel of cubic convolution at distances from 1 to 2."""
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a


def cubic_weights(t: Any) -> list[Any]:
    """Return the four weights of cubic convolution at distances t + 1, t, 1 - t, 2 - t."""
    return [
        _cubic_far(t + 1, CUBIC),
        _cubic_near(t, CUBIC),
        _cubic_near(1 - t, CUBIC),
        _cubic_far(2 - t, CUBIC),
    ]


def _antialiased(filter_: Callable[[Any], Any], radius: float) -> Callable[..., Weights]:
    def weights(size: int, out: int, align_corners: bool, scale: float | None) -> Weights:
        step = _scale(size, out, align_corners, scale)
        support = radius * max(step, 1.0)
        stretch = 1 / step if step >= 1 else 1.0
        matrix = np.zeros((out, size))
        for i in range(out):
            centre = step * (i + 0.5)
            low = max(int(centre - support + 0.5), 0)
            high = min(int(centre + support + 0.5), size)
            taps = filter_(np.abs((np.arange(low, high) - centre + 0.5) * stretch))
            # windows at the border are cut off, and their weights sum to 1 all the same
            matrix[i, low:high] = taps / taps.sum()
        return matrix

    return weights


def _cubic(x: Any) -> Any:
    far = np.where(x < 2, _cubic_far(x, -0.5), 0.0)
    return np.where(x < 1, _cubic_near(x, -0.5), far)


Resized = Callable[[Array, int, int, bool, float | None], Array]


def _weighted(weights: Callable[..., Weights]) -> Resized:
    """Return the product of one axis with a constant (out, in) matrix of weights."""

    def resized(x: Array, axis: int, out: int, align_corners: bool, factor: float | None) -> Array:
        matrix = jnp.asarray(weights(x.shape[axis], out, align_corners, factor), x.dtype)
        product = jnp.tensordot(
            x,
            matrix,
            ((axis,), (1,)),
            precision=lax.Precision.HIGHEST,
        )
        return jnp.moveaxis(product, -1, axis)

    return resized


def _nearest(offset: float) -> Resized:
    """Return the nearest entries along one axis, in torch's float32 arithmetic."""

    def resized(x: Array, axis: int, out: int, align_corners: bool, factor: float | None) -> Array:
        size = x.shape[axis]
        step = np.float32(size) / np.float32(out)
        if factor is not None and factor > 0:
            step = np.float32(1 / factor)
        centres = np.arange(out, dtype=np.float32) + np.float32(offset)
        places = np.floor(centres * step).astype(np.int64)
        return jnp.take(x, np.minimum(places, size - 1), axis=axis)

    return resized


def _register_upsampling(name: str, n: int, resized: Resized, *, aligns: bool = True) -> None:
    """Register both overloads of an upsampling operation over the last n axes.

    Args:
        name: the operation's name.
        n: number of resized axes.
        resized: (x, axis, output size, align_corners, scale factor or None) -> x with one axis
            resized.
        aligns: whether the operation's schema has `align_corners` after `output_size`.
    """

    def over_axes(
        x: Array, output_size: Any, align_corners: bool, factors: Sequence[float | None]
    ) -> Array:
        for i, factor in enumerate(factors):
            axis = x.ndim - n + i
            if output_size is not None:
                out = output_size[i]
            else:
                out = math.floor(x.shape[axis] * (1 if factor is None else factor))
            x = resized(x, axis, out, align_corners, factor)
        return x

    def default(self: Array, output_size: Any, *arguments: Any) -> Array:
        corners, scales = (arguments[0], arguments[1:]) if aligns else (False, arguments)
        factors = [*scales, *repeat(None, n - len(scales))]
        return over_axes(self, output_size, corners, factors)

    # torch decomposes some of these, into several times as many operations
    def vec(input: Array, output_size: Any, *arguments: Any) -> Array:
        *corners, factors = arguments
        return over_axes(input, output_size, bool(corners and corners[0]), factors or [None] * n)

    register_table({f"aten.{name}.default": default, f"aten.{name}.vec": vec})


_register_upsampling(
    "_upsample_bilinear2d_aa",
    2,
    _weighted(_antialiased(lambda x: np.where(x < 1, 1 - x, 0.0), 1.0)),
)
_register_upsampling("_upsample_bicubic2d_aa", 2, _weighted(_antialiased(_cubic, 2.0)))
for _axes in (1, 2, 3):
    _register_upsampling(f"upsample_nearest{_axes}d", _axes, _nearest(0), aligns=False)
    _register_upsampling(f"_upsample_nearest_exact{_axes}d", _axes, _nearest(0.5), aligns=False)


def _reflect(x: Array, low2: int, high2: int) -> Array:
    """Return coordinates reflected into [low2 / 2, high2 / 2]."""
    if low2 == high2:
        return jnp.zeros_like(x)
    low = low2 / 2
    span = (high2 - low2) / 2
    x = jnp.abs(x - low)
    # how often a coordinate is reflected is a whole number, and has no derivative
    flips = lax.stop_gradient(jnp.floor(x / span))
    extra = x - flips * span
    return jnp.where(flips % 2 == 0, extra + low, span - extra + low)


def _clipped(x: Array, size: int) -> Array:
    at_most = jnp.where(x >= size - 1, size - 1, x)
    # `jnp.clip` shares the gradient at its bounds, where torch's derivative is 0
    return jnp.where(x <= 0, 0, at_most).astype(x.dtype)


def _placed(grid: Array, size: int, padding_mode: int, align_corners: bool) -> Array:
    """Return coordinates in [-1, 1] as positions among `size` entries.

    Padding mode 1 is border, 2 is reflection.
    """
    # -1 and 1 are the centres of the outermost entries, or their outer edges
    x = (grid + 1) / 2 * (size - 1) if align_corners else ((grid + 1) * size - 1) / 2
    return _bounded(x, size, padding_mode, align_corners)


def _bounded(x: Array, size: int, padding_mode: int, align_corners: bool) -> Array:
    if padding_mode == 1:
        return _clipped(x, size)
    if padding_mode == 2:
        low2, high2 = (0, 2 * (size - 1)) if align_corners else (-1, 2 * size - 1)
        return _clipped(_reflect(x, low2, high2), size)
    return x


def _looked_up(image: Array, places: Sequence[Array]) -> Array:
    """Return image[n, :, *places[n]], (N, C, *out), and 0 outside of the image."""
    sizes = image.shape[2:]
    inside = jnp.ones(places[0].shape, jnp.bool_)
    index = []
    for place, size in zip(places, sizes, strict=True):
        inside = inside & (place >= 0) & (place <= size - 1)
        index.append(jnp.clip(place, 0, size - 1).astype(jnp.int64))
    # (N, 1, ...): each item is looked up in its own image
    batch = jnp.arange(image.shape[0]).reshape(-1, *[1] * (places[0].ndim - 1))
    taken = jnp.moveaxis(image, 1, -1)[(batch, *index)]
    return jnp.moveaxis(jnp.where(inside[..., None], taken, 0), -1, 1)


@register_op("aten.grid_sampler_2d", "aten.grid_sampler_3d")
def grid_sampler(
    input: Array, grid: Array, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Array:
    """Return the image sampled at a grid in [-1, 1]: bilinear (0), nearest (1) or bicubic (2)."""
    sizes = input.shape[2:]
    columns = [grid[..., len(sizes) - 1 - i] for i in range(len(sizes))]
    if interpolation_mode == 2:
        return _bicubic_sampled(input, columns, padding_mode, align_corners)
    places = [
        _placed(c, s, padding_mode, align_corners) for c, s in zip(columns, sizes, strict=True)
    ]
    if interpolation_mode == 1:
        return _looked_up(input, [lax.stop_gradient(jnp.round(p)) for p in places])
    floors = [lax.stop_gradient(jnp.floor(p)) for p in places]
    total = jnp.zeros((), input.dtype)
    for corner in np.ndindex(*[2] * len(sizes)):
        weight = jnp.ones((), input.dtype)
        for place, floor, side in zip(places, floors, corner, strict=True):
            weight = weight * (place - floor if side else floor + 1 - place)
        near = _looked_up(input, [f + side for f, side in zip(floors, corner, strict=True)])
        total = total + weight[:, None] * near
    return total


def _bicubic_sampled(
    image: Array, columns: Sequence[Array], padding_mode: int, align_corners: bool
) -> Array:
    sizes = image.shape[2:]
    places = [_placed(c, s, 0, align_corners) for c, s in zip(columns, sizes, strict=True)]
    floors = [lax.stop_gradient(jnp.floor(p)) for p in places]
    weights = [cubic_weights(p - f) for p, f in zip(places, floors, strict=True)]
    total = jnp.zeros((), image.dtype)
    for i, j in np.ndindex(4, 4):
        at = [
            _bounded(f + o - 1, s, padding_mode, align_corners)
            for f, o, s in zip(floors, (i, j), sizes, strict=True)
        ]
        weight = weights[0][i] * weights[1][j]
        total = total + weight[:, None] * _looked_up(image, at)
    return total


@register_op("aten.constant_pad_nd")
def constant_pad_nd(self: Array, pad: Sequence[int], value: Any = 0) -> Array:
    """Return self padded by (before, after) pairs, the last axis first; negative widths crop."""
    widths = [(0, 0, 0)] * self.ndim
    for i in range(len(pad) // 2):
        widths[self.ndim - 1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    return lax.pad(self, jnp.asarray(value, self.dtype), widths)
