"""Convolutions over the positions of a sequence and over images.

A sequence is (T, D) per item and torch's `Conv1d` takes (D, T), so the 1d implementations transpose. Variants are few
and produce the sizes of other layers, because every new shape is one more compilation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch

from gradcheck_suite.catalogue.definitions import Arguments, LayerDefinition
from gradcheck_suite.catalogue.signals import Options, Signal, expect, expect_form

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


def _length(size: int, o: Options) -> int:
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
    fits = all(_length(size, options) >= 1 for size in axes)
    expect(fits, kind, "a kernel that the padded input holds", f"{dict(options)} on {signal.size}")


def _variants1d(signal: Signal) -> Sequence[Options]:
    if signal.form != "sequence":
        return ()
    length, features = signal.size
    return [o for o in _ONE_DIMENSION if _length(length, o) == length and features % o["groups"] == 0]


def _out1d(signal: Signal, options: Options) -> Signal:
    expect_form(signal, "conv1d", "sequence")
    _checked("conv1d", signal, options)
    length = _length(signal.size[0], options)
    return Signal("sequence", (length, options["features"]), padded=signal.padded and length == signal.size[0])


def _variants2d(signal: Signal) -> Sequence[Options]:
    if signal.form != "image":
        return ()
    channels, height, width = signal.size
    return [
        o for o in _TWO_DIMENSIONS if (_length(height, o), _length(width, o)) in AREAS and channels % o["groups"] == 0
    ]


def _out2d(signal: Signal, options: Options) -> Signal:
    expect_form(signal, "conv2d", "image")
    _checked("conv2d", signal, options)
    _, height, width = signal.size
    return Signal("image", (options["features"], _length(height, options), _length(width, options)))


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


KINDS = (
    LayerDefinition("conv1d", _variants1d, _out1d, _torch1d, _jax1d, trainable=True),
    LayerDefinition("conv2d", _variants2d, _out2d, _torch2d, _jax2d, trainable=True),
)
