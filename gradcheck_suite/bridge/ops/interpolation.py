"""Interpolation: along each axis a fixed matrix of weights, (out, in), so that every mode is one product per axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from gradcheck_suite.bridge.dtypes import Array
from gradcheck_suite.bridge.table import register_op

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
    """Between the two neighbours."""
    places = np.clip(_sources(size, out, align_corners, scale), 0, size - 1)
    t = places - np.floor(places)
    return _spread(places, (0, 1), (1 - t, t), size)


def cubic_weights(t: Any, a: float = CUBIC) -> list[Any]:
    """Return the four weights of cubic convolution at distances t + 1, t, 1 - t, 2 - t."""

    def near(x: Any) -> Any:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Any) -> Any:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def cubic(size: int, out: int, align_corners: bool, scale: float | None) -> Weights:
    """Cubic convolution over four neighbours."""
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


def _keys(x: Any, a: float = -0.5) -> Any:
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


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


def _register_weighted(name: str, n: int, weights: Callable[..., Weights]) -> None:
    def at_scales(self: Array, output_size: Any, align_corners: bool, *scales: float | None, **named: Any) -> Array:
        """To a size, with the factors that it came from where they are known."""
        factors = [*scales, *named.values()]
        factors += [None] * (n - len(factors))
        sizes = zip(self.shape[-n:], _outs(self, n, output_size, factors), factors, strict=True)
        return _applied(self, [weights(size, out, align_corners, f) for size, out, f in sizes])

    def by_factors(input: Array, output_size: Any, align_corners: bool, scale_factors: Any) -> Array:
        """To a size or by factors."""
        factors = [None] * n if scale_factors is None else list(scale_factors)
        return at_scales(input, _outs(input, n, output_size, factors), align_corners, *factors)

    register_op(f"aten.{name}.default")(at_scales)
    register_op(f"aten.{name}.vec")(by_factors)


def _register_nearest(name: str, n: int, exact: bool) -> None:
    def at_scales(self: Array, output_size: Any, *scales: float | None, **named: Any) -> Array:
        """The nearest entry's value."""
        factors = [*scales, *named.values()]
        factors += [None] * (n - len(factors))
        outs = _outs(self, n, output_size, factors)
        for i, (out, factor) in enumerate(zip(outs, factors, strict=True)):
            axis = self.ndim - n + i
            self = jnp.take(self, _nearest_places(self.shape[axis], out, factor, exact), axis=axis)
        return self

    def by_factors(input: Array, output_size: Any, scale_factors: Any) -> Array:
        """To a size or by factors."""
        factors = [None] * n if scale_factors is None else list(scale_factors)
        return at_scales(input, _outs(input, n, output_size, factors), *factors)

    register_op(f"aten.{name}.default")(at_scales)
    register_op(f"aten.{name}.vec")(by_factors)


_register_weighted("upsample_linear1d", 1, linear)
_register_weighted("upsample_bilinear2d", 2, linear)
_register_weighted("upsample_trilinear3d", 3, linear)
_register_weighted("upsample_bicubic2d", 2, cubic)
_register_weighted("_upsample_bilinear2d_aa", 2, _antialiased(_triangle, 1.0))
_register_weighted("_upsample_bicubic2d_aa", 2, _antialiased(_keys, 2.0))
for _n in (1, 2, 3):
    _register_nearest(f"upsample_nearest{_n}d", _n, exact=False)
    _register_nearest(f"_upsample_nearest_exact{_n}d", _n, exact=True)


def _reflect(x: Array, low2: int, high2: int) -> Array:
    """Fold coordinates back between low2 / 2 and high2 / 2."""
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
    """Return coordinates in [-1, 1] as places among `size` entries; padding mode 1 is the border, 2 reflection."""
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
    """Return image[n, :, *places[n]] as (N, C, *out), 0 outside."""
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
    """The image at points of a grid in [-1, 1]: bilinear (0), nearest (1) or bicubic (2)."""
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
