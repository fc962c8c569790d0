"""Convolutions over the positions of a sequence and over images.

A sequence is (T, D) per item and torch's `Conv1d` takes (D, T), so the 1d implementations transpose. Variants are few
and produce the sizes of other layers, because every new shape is one more compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gradcheck_suite.catalogue.definitions import (
    Arguments,
    Implementation,
    LayerDefinition,
    Options,
    Signal,
    expect,
    expect_form,
    product,
    vector,
)

AREAS = ((4, 5), (2, 2), (1, 1))
_GEOMETRY = ("kernel", "stride", "padding", "dilation")


def _options(
    features: int,
    kernel: int,
    *,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    bias: bool = False,
) -> Options:
    return {
        "features": features,
        "kernel": kernel,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "bias": bias,
    }


# Each of these maps 3 positions to 3, so that a padded sequence's mask still fits.
_ONE_DIMENSION = (
    _options(2, 1),
    _options(2, 3, padding=1, bias=True),
    _options(2, 3, stride=2, padding=2),
    _options(2, 2, padding=1, dilation=2, bias=True),
    _options(4, 3, padding=1, groups=2, bias=True),
)
# These map 4x5 to 4x5 or 2x2, and 2x2 to 2x2 or 1x1.
_TWO_DIMENSIONS = (
    _options(2, 1),
    _options(2, 3, padding=1, bias=True),
    _options(2, 2, stride=2, bias=True),
    _options(4, 4, stride=2, padding=1),
    _options(2, 3, padding=2, dilation=2, bias=True),
    _options(4, 3, padding=1, groups=2, bias=True),
)


def _convolution_length(size: int, o: Options) -> int:
    """Return the output length along an axis of `size`, as torch's `Conv1d` documents it."""
    return int((size + 2 * o["padding"] - o["dilation"] * (o["kernel"] - 1) - 1) // o["stride"] + 1)


def _checked(kind: str, signal: Signal, options: Options) -> None:
    for name in ("features", "kernel", "stride", "dilation", "groups"):
        expect(options[name] >= 1, kind, f"{name} of at least 1", options[name])
    expect(options["padding"] >= 0, kind, "padding of at least 0", options["padding"])
    groups, features = options["groups"], options["features"]
    fits = signal.features % groups == 0 and features % groups == 0
    expect(fits, kind, f"input and output features that {groups} groups divide", (signal.features, features))
    axes = signal.size[:-1] if signal.form == "sequence" else signal.size[1:]
    fits = all(_convolution_length(size, options) >= 1 for size in axes)
    expect(fits, kind, "a kernel that the padded input holds", f"{dict(options)} on {signal.size}")


def _variants1d(signal: Signal) -> Sequence[Options]:
    if signal.form != "sequence":
        return ()
    length, features = signal.size
    return [o for o in _ONE_DIMENSION if _convolution_length(length, o) == length and features % o["groups"] == 0]


def _out1d(signal: Signal, options: Options) -> Signal:
    expect_form(signal, "conv1d", "sequence")
    _checked("conv1d", signal, options)
    length = _convolution_length(signal.size[0], options)
    return Signal("sequence", (length, options["features"]), padded=signal.padded and length == signal.size[0])


def _variants2d(signal: Signal) -> Sequence[Options]:
    if signal.form != "image":
        return ()
    channels, height, width = signal.size
    return [
        o
        for o in _TWO_DIMENSIONS
        if (_convolution_length(height, o), _convolution_length(width, o)) in AREAS and channels % o["groups"] == 0
    ]


def _out2d(signal: Signal, options: Options) -> Signal:
    expect_form(signal, "conv2d", "image")
    _checked("conv2d", signal, options)
    _, height, width = signal.size
    return Signal(
        "image", (options["features"], _convolution_length(height, options), _convolution_length(width, options))
    )


def _arguments(options: Options) -> dict[str, Any]:
    geometry = dict(zip(("kernel_size", *_GEOMETRY[1:]), (options[n] for n in _GEOMETRY), strict=True))
    return {**geometry, "groups": options["groups"], "bias": options["bias"]}


class SequenceConv(torch.nn.Conv1d):
    """`Conv1d` over (n, T, D)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def _torch1d(signal: Signal, options: Options) -> torch.nn.Module:
    return SequenceConv(signal.features, options["features"], **_arguments(options))


def _torch2d(signal: Signal, options: Options) -> torch.nn.Module:
    return torch.nn.Conv2d(signal.features, options["features"], **_arguments(options))


def _convolve(options: Options, params: Arguments, x: jax.Array, axes: tuple[str, str, str]) -> jax.Array:
    spatial = x.ndim - 2
    y = jax.lax.conv_general_dilated(
        x,
        params["weight"],
        window_strides=(options["stride"],) * spatial,
        padding=((options["padding"], options["padding"]),) * spatial,
        rhs_dilation=(options["dilation"],) * spatial,
        dimension_numbers=axes,
        feature_group_count=options["groups"],
        precision=jax.lax.Precision.HIGHEST,
    )
    if not options["bias"]:
        return y
    return y + params["bias"].reshape([-1 if axis == "C" else 1 for axis in axes[2]])


def _jax1d(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return _convolve(options, params, x, ("NWC", "OIW", "NWC"))


def _jax2d(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return _convolve(options, params, x, ("NCHW", "OIHW", "NCHW"))


CONVOLUTION_KINDS = (
    LayerDefinition("conv1d", _variants1d, _out1d, _torch1d, _jax1d, trainable=True),
    LayerDefinition("conv2d", _variants2d, _out2d, _torch2d, _jax2d, trainable=True),
)


# Average and maximum pooling of images, over windows of one size (pooling) or a number of bins (adaptive pooling).
#
# Equal maxima are common after a ReLU. torch gives the gradient to the first one in row-major order, as `argmax`
# does.


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


def _pooling_length(size: int, o: Options) -> int:
    return int((size + 2 * o["padding"] - o.get("dilation", 1) * (o["kernel"] - 1) - 1) // o["stride"] + 1)


def _area(signal: Signal, options: Options) -> tuple[int, int]:
    _, height, width = signal.size
    return _pooling_length(height, options), _pooling_length(width, options)


def _every_window_holds_a_pixel(size: int, o: Options) -> bool:
    """Return whether every window contains a pixel: with dilation, a window can lie in the padding alone.

    For such a window torch's maximum is -inf, and its backward writes outside of the image's gradient.
    """
    starts = (o["stride"] * i - o["padding"] for i in range(_pooling_length(size, o)))
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
    height, width = (_pooling_length(size, options) for size in x.shape[2:])
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


POOLING_KINDS = (
    _pooling("average_pool2d", _AVERAGE, _torch_average, _jax_average),
    _pooling("max_pool2d", _MAXIMUM, _torch_maximum, _jax_maximum),
    _adaptive("adaptive_average_pool2d", torch.nn.AdaptiveAvgPool2d, lambda x: x.mean((2, 3))),
    _adaptive("adaptive_max_pool2d", torch.nn.AdaptiveMaxPool2d, lambda x: first_maximum(x.reshape(*x.shape[:2], -1))),
)


# Layers that only reshape. Their output sizes are those of other layers, so that few shapes are compiled.


MOST_FEATURES = 12
LENGTH = 3
_TRANSPOSABLE = ((3, 4), (4, 3))


def _flatten_variants(signal: Signal) -> Sequence[Options]:
    small = signal.form in ("sequence", "image") and np.prod(signal.size) <= MOST_FEATURES
    return ({},) if small else ()


def _flatten_out(signal: Signal, options: Options) -> Signal:
    expect_form(signal, "flatten", "sequence", "image")
    return vector(int(np.prod(signal.size)))


def _flatten(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return x.reshape(len(x), -1)


def _unflatten_variants(signal: Signal) -> Sequence[Options]:
    takes = signal.form == "vector" and signal.size[0] // LENGTH in (1, 2, 4) and signal.size[0] % LENGTH == 0
    return ({"length": LENGTH},) if takes else ()


def _unflatten_out(signal: Signal, options: Options) -> Signal:
    expect_form(signal, "unflatten", "vector")
    length = options["length"]
    expect(length >= 1 and signal.size[0] % length == 0, "unflatten", f"a length that divides {signal.size[0]}", length)
    return Signal("sequence", (length, signal.size[0] // length))


def _unflatten(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return x.reshape(len(x), options["length"], -1)


class Transpose(torch.nn.Module):
    """Transposes (n, A, B) to (n, B, A), a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


def _transpose_variants(signal: Signal) -> Sequence[Options]:
    return ({},) if signal.form == "sequence" and not signal.padded and signal.size in _TRANSPOSABLE else ()


def _transpose_out(signal: Signal, options: Options) -> Signal:
    expect(signal.form == "sequence" and not signal.padded, "transpose", "a sequence without padding", signal)
    return Signal("sequence", signal.size[::-1])


def _transpose(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return jnp.swapaxes(x, 1, 2)


class Pixels(torch.nn.Module):
    """Turns images (n, C, H, W) into sequences of pixels (n, H W, C), row by row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(2).transpose(1, 2)


def _pixels_variants(signal: Signal) -> Sequence[Options]:
    return ({},) if signal.form == "image" and signal.size[1:] == (2, 2) else ()


def _pixels_out(signal: Signal, options: Options) -> Signal:
    expect_form(signal, "pixels", "image")
    channels, height, width = signal.size
    return Signal("sequence", (height * width, channels))


def _pixels(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return jnp.einsum("nchw->nhwc", x).reshape(len(x), -1, x.shape[1])


RESHAPING_KINDS = (
    LayerDefinition("flatten", _flatten_variants, _flatten_out, lambda signal, o: torch.nn.Flatten(), _flatten),
    LayerDefinition(
        "unflatten",
        _unflatten_variants,
        _unflatten_out,
        lambda signal, o: torch.nn.Unflatten(1, (o["length"], signal.size[0] // o["length"])),
        _unflatten,
    ),
    LayerDefinition("transpose", _transpose_variants, _transpose_out, lambda signal, o: Transpose(), _transpose),
    LayerDefinition("pixels", _pixels_variants, _pixels_out, lambda signal, o: Pixels(), _pixels),
)
