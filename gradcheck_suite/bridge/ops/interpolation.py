"""Interpolation. Every mode is one product per axis with a constant (out, in) matrix of weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from gradcheck_suite.bridge.dtypes import Array
from gradcheck_suite.bridge.op_table import register_op

CUBIC = -0.75
Weights = npt.NDArray[np.float64]


def _scale(size: int, out: int, align_corners: bool, scale: float | None) -> float:
    if align_corners:
        return (size - 1) / (out - 1) if out > 1 else 0.0
    return 1 / scale if scale is not None and scale > 0 else size / out


def _sources(size: int, out: int, align_corners: bool, scale: float | None) -> Weights:
    step = _scale(size, out, align_corners, scale)
    places = np.arange(out, dtype=np.float64)
    return places * step if align_corners else (places + 0.5) * step - 0.5


def _spread(places: Weights, offsets: Sequence[int], weights: Sequence[Weights], size: int) -> Weights:
    matrix = np.zeros((len(places), size))
    floor = np.floor(places).astype(int)
    for offset, weight in zip(offsets, weights, strict=True):
        np.add.at(matrix, (np.arange(len(places)), np.clip(floor + offset, 0, size - 1)), weight)
    return matrix


def linear(size: int, out: int, align_corners: bool, scale: float | None) -> Weights:
    """Return the (out, size) matrix of linear interpolation between two neighbours."""
    places = np.clip(_sources(size, out, align_corners, scale), 0, size - 1)
    t = places - np.floor(places)
    return _spread(places, (0, 1), (1 - t, t), size)


def _cubic_near(x: Any, a: float) -> Any:
    """Return the kernel of cubic convolution at distances of at most 1 (Keys 1981)."""
    return ((a + 2) * x - (a + 3)) * x * x + 1


def _cubic_far(x: Any, a: float) -> Any:
    """Return the kernel of cubic convolution at distances from 1 to 2."""
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a


def cubic_weights(t: Any) -> list[Any]:
    """Return the four weights of cubic convolution at distances t + 1, t, 1 - t, 2 - t."""
    return [_cubic_far(t + 1, CUBIC), _cubic_near(t, CUBIC), _cubic_near(1 - t, CUBIC), _cubic_far(2 - t, CUBIC)]


def cubic(size: int, out: int, align_corners: bool, scale: float | None) -> Weights:
    """Return the (out, size) matrix of cubic convolution over four neighbours."""
    places = _sources(size, out, align_corners, scale)
    return _spread(places, (-1, 0, 1, 2), cubic_weights(places - np.floor(places)), size)


def _nearest_places(size: int, out: int, scale: float | None, exact: bool) -> Any:
    step = np.float32(1 / scale) if scale is not None and scale > 0 else np.float32(size) / np.float32(out)
    places = (np.arange(out, dtype=np.float32) + np.float32(0.5 if exact else 0)) * step
    return np.minimum(np.floor(places).astype(np.int64), size - 1)


def _antialiased(filter_: Callable[[Any], Any], radius: float) -> Callable[..., Weights]:
    def weights(size: int, out: int, align_corners: bool, scale: float | None) -> Weights:
        step = _scale(size, out, align_corners, scale)
        support = radius * max(step, 1.0)
        stretch = 1 / step if step >= 1 else 1.0
        matrix = np.zeros((out, size))
        for i in range(out):
            centre = step * (i + 0.5)
            low, high = max(int(centre - support + 0.5), 0), min(int(centre + support + 0.5), size)
            taps = filter_(np.abs((np.arange(low, high) - centre + 0.5) * stretch))
            matrix[i, low:high] = taps / taps.sum()
        return matrix

    return weights


def _triangle(x: Any) -> Any:
    return np.where(x < 1, 1 - x, 0.0)


def _cubic(x: Any) -> Any:
    return np.where(x < 1, _cubic_near(x, -0.5), np.where(x < 2, _cubic_far(x, -0.5), 0.0))


def _applied(x: Array, matrices: Sequence[Weights]) -> Array:
    for i, matrix in enumerate(matrices):
        axis = x.ndim - len(matrices) + i
        moved = jnp.tensordot(x, jnp.asarray(matrix, x.dtype), axes=((axis,), (1,)), precision=lax.Precision.HIGHEST)
        x = jnp.moveaxis(moved, -1, axis)
    return x


def _outs(x: Array, n: int, output_size: Any, scales: Sequence[float | None]) -> list[int]:
    if output_size is not None:
        return list(output_size)
    return [math.floor(s * f) for s, f in zip(x.shape[-n:], scales, strict=True) if f is not None]


def _register(name: str, n: int, resized: Callable[..., Array], *, aligns: bool) -> None:
    """Register both overloads of an upsampling operation over the last n axes.

    Args:
        name: the operation's name.
        n: number of resized axes.
        resized: (x, output sizes, scale factors or None, align_corners) -> the resized tensor.
        aligns: whether the operation's schema has `align_corners` after `output_size`.
    """

    def default(self: Array, output_size: Any, *arguments: Any, **named: Any) -> Array:
        corners, scales = (arguments[0], arguments[1:]) if aligns else (False, arguments)
        factors = [*scales, *named.values()]
        factors += [None] * (n - len(factors))
        return resized(self, _outs(self, n, output_size, factors), factors, corners)

    def vec(input: Array, output_size: Any, *arguments: Any) -> Array:
        *corners, scale_factors = arguments
        factors = [None] * n if scale_factors is None else list(scale_factors)
        return resized(input, _outs(input, n, output_size, factors), factors, *(corners or (False,)))

    register_op(f"aten.{name}.default")(default)
    register_op(f"aten.{name}.vec")(vec)


def _register_weighted(name: str, n: int, weights: Callable[..., Weights]) -> None:
    def resized(x: Array, outs: Sequence[int], factors: Sequence[float | None], align_corners: bool) -> Array:
        sizes = zip(x.shape[-n:], outs, factors, strict=True)
        return _applied(x, [weights(size, out, align_corners, factor) for size, out, factor in sizes])

    _register(name, n, resized, aligns=True)


def _register_nearest(name: str, n: int, exact: bool) -> None:
    def resized(x: Array, outs: Sequence[int], factors: Sequence[float | None], align_corners: bool) -> Array:
        for i, (out, factor) in enumerate(zip(outs, factors, strict=True)):
            axis = x.ndim - n + i
            x = jnp.take(x, _nearest_places(x.shape[axis], out, factor, exact), axis=axis)
        return x

    _register(name, n, resized, aligns=False)


_register_weighted("upsample_linear1d", 1, linear)
_register_weighted("upsample_bilinear2d", 2, linear)
_register_weighted("upsample_trilinear3d", 3, linear)
_register_weighted("upsample_bicubic2d", 2, cubic)
_register_weighted("_upsample_bilinear2d_aa", 2, _antialiased(_triangle, 1.0))
_register_weighted("_upsample_bicubic2d_aa", 2, _antialiased(_cubic, 2.0))
for _n in (1, 2, 3):
    _register_nearest(f"upsample_nearest{_n}d", _n, exact=False)
    _register_nearest(f"_upsample_nearest_exact{_n}d", _n, exact=True)


def _reflect(x: Array, low2: int, high2: int) -> Array:
    """Return coordinates reflected into [low2 / 2, high2 / 2]."""
    if low2 == high2:
        return jnp.zeros_like(x)
    low, span = low2 / 2, (high2 - low2) / 2
    x = jnp.abs(x - low)
    flips = lax.stop_gradient(jnp.floor(x / span))
    extra = x - flips * span
    return jnp.where(flips % 2 == 0, extra + low, span - extra + low)


def _clipped(x: Array, size: int) -> Array:
    return jnp.where(x <= 0, 0, jnp.where(x >= size - 1, size - 1, x)).astype(x.dtype)


def _placed(grid: Array, size: int, padding_mode: int, align_corners: bool) -> Array:
    """Return coordinates in [-1, 1] as positions among `size` entries; padding mode 1 is border, 2 is reflection."""
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
    batch = jnp.arange(image.shape[0]).reshape(-1, *[1] * (places[0].ndim - 1))
    taken = jnp.moveaxis(image, 1, -1)[(batch, *index)]
    return jnp.moveaxis(jnp.where(inside[..., None], taken, 0), -1, 1)


@register_op("aten.grid_sampler_2d", "aten.grid_sampler_3d")
def grid_sampler(input: Array, grid: Array, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Array:
    """Return the image sampled at a grid in [-1, 1]: bilinear (0), nearest (1) or bicubic (2)."""
    sizes = input.shape[2:]
    columns = [grid[..., len(sizes) - 1 - i] for i in range(len(sizes))]
    if interpolation_mode == 2:
        return _bicubic_sampled(input, columns, padding_mode, align_corners)
    places = [_placed(c, s, padding_mode, align_corners) for c, s in zip(columns, sizes, strict=True)]
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


def _bicubic_sampled(image: Array, columns: Sequence[Array], padding_mode: int, align_corners: bool) -> Array:
    sizes = image.shape[2:]
    places = [_placed(c, s, 0, align_corners) for c, s in zip(columns, sizes, strict=True)]
    floors = [lax.stop_gradient(jnp.floor(p)) for p in places]
    weights = [cubic_weights(p - f) for p, f in zip(places, floors, strict=True)]
    total = jnp.zeros((), image.dtype)
    for i, j in np.ndindex(4, 4):
        at = [
            _bounded(f + o - 1, s, padding_mode, align_corners) for f, o, s in zip(floors, (i, j), sizes, strict=True)
        ]
        total = total + (weights[0][i] * weights[1][j])[:, None] * _looked_up(image, at)
    return total
