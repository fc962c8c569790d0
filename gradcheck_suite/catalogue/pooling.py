"""Average and maximum pooling of images, over windows of one size (pooling) or a number of bins (adaptive pooling).

Equal maxima are common after a ReLU. torch gives the gradient to the first one in row-major order, as `argmax` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import torch

from gradcheck_suite.catalogue.convolution import AREAS
from gradcheck_suite.catalogue.definitions import Arguments, Implementation, LayerDefinition
from gradcheck_suite.catalogue.signals import Options, Signal, expect, expect_form, product

Bin = tuple[slice, slice]

_AVERAGE = (
    {"kernel": 2, "stride": 2, "padding": 0, "count_padding": True},
    {"kernel": 3, "stride": 1, "padding": 1, "count_padding": True},
    {"kernel": 3, "stride": 1, "padding": 1, "count_padding": False},
)
_MAXIMUM = (
    {"kernel": 2, "stride": 2, "padding": 0, "dilation": 1},
    {"kernel": 3, "stride": 1, "padding": 1, "dilation": 1},
    {"kernel": 2, "stride": 1, "padding": 1, "dilation": 2},
)


def _length(size: int, o: Options) -> int:
    return int((size + 2 * o["padding"] - o.get("dilation", 1) * (o["kernel"] - 1) - 1) // o["stride"] + 1)


def _area(signal: Signal, options: Options) -> tuple[int, int]:
    _, height, width = signal.size
    return _length(height, options), _length(width, options)


def _every_window_holds_a_pixel(size: int, o: Options) -> bool:
    """Return whether every window contains a pixel: with dilation, a window can lie in the padding alone.

    For such a window torch's maximum is -inf, and its backward writes outside of the image's gradient.
    """
    starts = (o["stride"] * i - o["padding"] for i in range(_length(size, o)))
    return all(any(0 <= start + o.get("dilation", 1) * j < size for j in range(o["kernel"])) for start in starts)


def _fitting(signal: Signal, variants: Sequence[Options]) -> Sequence[Options]:
    if signal.form != "image":
        return ()
    fits = (all(_every_window_holds_a_pixel(size, o) for size in signal.size[1:]) for o in variants)
    return [o for o, fit in zip(variants, fits, strict=True) if fit and _area(signal, o) in AREAS]


def _pooled(kind: str, signal: Signal, options: Options) -> Signal:
    expect_form(signal, kind, "image")
    for name in ("kernel", "stride", "dilation"):
        expect(options.get(name, 1) >= 1, kind, f"{name} of at least 1", options.get(name))
    expect(0 <= options["padding"] <= options["kernel"] // 2, kind, "padding of at most half the kernel", dict(options))
    height, width = _area(signal, options)
    expect(height >= 1 and width >= 1, kind, "a kernel that the padded image holds", f"{dict(options)} on {signal}")
    # torch returns -inf and an index outside the image: https://github.com/pytorch/pytorch/issues/114216
    whole = all(_every_window_holds_a_pixel(size, options) for size in signal.size[1:])
    expect(whole, kind, "a pixel in every window", f"{dict(options)} on {signal}")
    return Signal("image", (signal.size[0], height, width))


def _torch_average(signal: Signal, options: Options) -> torch.nn.Module:
    return torch.nn.AvgPool2d(
        options["kernel"], options["stride"], options["padding"], count_include_pad=options["count_padding"]
    )


def _torch_maximum(signal: Signal, options: Options) -> torch.nn.Module:
    return torch.nn.MaxPool2d(options["kernel"], options["stride"], options["padding"], options["dilation"])


def _windows(x: jax.Array, options: Options, outside: float) -> jax.Array:
    """Return the windows, (n, C, H', W', kernel * kernel), row by row, with `outside` beyond the image."""
    kernel, stride, padding = options["kernel"], options["stride"], options["padding"]
    dilation = options.get("dilation", 1)
    height, width = (_length(size, options) for size in x.shape[2:])
    padded = jnp.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)), constant_values=outside)
    places = [
        padded[
            :,
            :,
            dilation * i : dilation * i + stride * (height - 1) + 1 : stride,
            dilation * j : dilation * j + stride * (width - 1) + 1 : stride,
        ]
        for i in range(kernel)
        for j in range(kernel)
    ]
    return jnp.stack(places, axis=-1)


def first_maximum(x: jax.Array) -> jax.Array:
    """Return the maximum over the last axis; the first of equal maxima gets the gradient."""
    return jnp.take_along_axis(x, x.argmax(-1, keepdims=True), axis=-1)[..., 0]


def _jax_average(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    total = _windows(x, options, 0.0).sum(-1)
    if options["count_padding"]:
        return total / options["kernel"] ** 2
    return total / _windows(jnp.ones_like(x), options, 0.0).sum(-1)


def _jax_maximum(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return first_maximum(_windows(x, options, -jnp.inf))


def _adaptive_variants(signal: Signal) -> Sequence[Options]:
    return product(size=(1, 2)) if signal.form == "image" and signal.size[1:] == (4, 5) else ()


def _adapted(kind: str, signal: Signal, options: Options) -> Signal:
    expect_form(signal, kind, "image")
    expect(options["size"] >= 1, kind, "size of at least 1", options["size"])
    return Signal("image", (signal.size[0], options["size"], options["size"]))


def _bins(x: jax.Array, size: int) -> Iterator[Bin]:
    """Yield the bins row by row, from floor(i H / size) to ceil((i + 1) H / size): neighbours may overlap."""
    height, width = x.shape[2:]
    for i in range(size):
        for j in range(size):
            rows = slice(i * height // size, -(-(i + 1) * height // size))
            yield rows, slice(j * width // size, -(-(j + 1) * width // size))


def _pooling(
    name: str,
    choices: Sequence[Options],
    module: Callable[[Signal, Options], torch.nn.Module],
    in_jax: Implementation,
) -> LayerDefinition:
    return LayerDefinition(
        name,
        lambda signal: _fitting(signal, choices),
        lambda signal, options: _pooled(name, signal, options),
        module,
        in_jax,
    )


def _adaptive(
    name: str, module: Callable[[int], torch.nn.Module], pool: Callable[[jax.Array], jax.Array]
) -> LayerDefinition:
    def jax_apply(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
        size = options["size"]
        pooled = [pool(x[:, :, rows, columns]) for rows, columns in _bins(x, size)]
        return jnp.stack(pooled, -1).reshape(*x.shape[:2], size, size)

    return LayerDefinition(
        name,
        _adaptive_variants,
        lambda signal, options: _adapted(name, signal, options),
        lambda signal, options: module(options["size"]),
        jax_apply,
    )


KINDS = (
    _pooling("average_pool2d", _AVERAGE, _torch_average, _jax_average),
    _pooling("max_pool2d", _MAXIMUM, _torch_maximum, _jax_maximum),
    _adaptive("adaptive_average_pool2d", torch.nn.AdaptiveAvgPool2d, lambda x: x.mean((2, 3))),
    _adaptive("adaptive_max_pool2d", torch.nn.AdaptiveMaxPool2d, lambda x: first_maximum(x.reshape(*x.shape[:2], -1))),
)
