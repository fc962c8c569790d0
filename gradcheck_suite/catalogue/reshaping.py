"""Layers that only reshape. Their output sizes are those of other layers, so that few shapes are compiled."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gradcheck_suite.catalogue.definitions import Arguments, LayerDefinition
from gradcheck_suite.catalogue.signals import Options, Signal, expect, expect_form, vector

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


KINDS = (
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
