"""Normalization layers that are separable over samples: layer, RMS, group and instance norm, batch norm in eval mode.

Batch norm in train mode is not separable (see `cross_sample`). Here a model in train mode keeps its batch norms in eval
mode, as fine-tuning with frozen statistics does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gradcheck_suite.catalogue.definitions import Arguments, Implementation, LayerDefinition
from gradcheck_suite.catalogue.signals import (
    FLOATS,
    ROWS,
    Form,
    Options,
    Signal,
    expect,
    expect_form,
    keeps_signal,
    on,
    product,
)

EPS = 1e-2
"""Larger than torch's default of 1e-5. Rounding errors left by cancellation, as in the mean over positions after an
instance norm, grow by 1/sqrt(EPS) in each further normalization: by 3e7 in three of them at 1e-5. A large value also
makes errors in how it enters the formula visible."""


_AFFINE = (False, True)


def standardised(x: jax.Array, axes: tuple[int, ...], eps: float = EPS) -> jax.Array:
    """Return x with mean 0 and variance 1 over some axes, `eps` added to the variance."""
    centred = x - x.mean(axes, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(axes, keepdims=True) + eps)


def _affine(options: Options, params: Arguments, x: jax.Array, axis: int) -> jax.Array:
    """Return x scaled and shifted per channel; `axis` is the channel axis."""
    if not options["affine"]:
        return x
    shape = [-1 if i == axis % x.ndim else 1 for i in range(x.ndim)]
    return x * params["weight"].reshape(shape) + params["bias"].reshape(shape)


def _channel_axis(x: jax.Array) -> int:
    """Return the channel axis: 1 for an image, the last for a vector or a sequence."""
    return 1 if x.ndim == 4 else -1


def _jax_layer(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return _affine(options, params, standardised(x, (-1,)), -1)


def _jax_rms(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    y = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + EPS)
    return y * params["weight"] if options["affine"] else y


# torch's group, instance and batch norm take channels before positions, so sequences are transposed for them.


class SequenceGroupNorm(torch.nn.GroupNorm):
    """`GroupNorm` over (n, T, D)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class SequenceInstanceNorm(torch.nn.InstanceNorm1d):
    """`InstanceNorm1d` over (n, T, D)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class FrozenBatchNorm1d(torch.nn.BatchNorm1d):
    """`BatchNorm1d` over (n, D) or (n, T, D) that stays in eval mode."""

    def train(self, mode: bool = True) -> Self:
        return super().train(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.ndim == 2 else super().forward(x.transpose(1, 2)).transpose(1, 2)


class FrozenBatchNorm2d(torch.nn.BatchNorm2d):
    """`BatchNorm2d` that stays in eval mode."""

    def train(self, mode: bool = True) -> Self:
        return super().train(False)


def _elements(signal: Signal, groups: int) -> int:
    """Return the number of elements in one group."""
    return int(np.prod(signal.size)) // groups


def _group_variants(signal: Signal) -> Sequence[Options]:
    if signal.form == "tokens":
        return ()
    groups = 2 if signal.features % 2 == 0 and _elements(signal, 2) > 1 else 1
    plain = {"groups": 1, "affine": False}
    return [plain, {"groups": groups, "affine": True}] if _elements(signal, 1) > 1 else ()


def _group_out(signal: Signal, options: Options) -> Signal:
    groups = options["groups"]
    expect_form(signal, "group_norm", *FLOATS)
    expect(groups >= 1 and signal.features % groups == 0, "group_norm", "groups that divide the features", groups)
    expect(_elements(signal, groups) > 1, "group_norm", "more than one number in a group", f"{groups} of {signal}")
    return signal


def _torch_group(signal: Signal, options: Options) -> torch.nn.Module:
    module = SequenceGroupNorm if signal.form == "sequence" else torch.nn.GroupNorm
    return module(options["groups"], signal.features, eps=EPS, affine=options["affine"])


def _jax_group(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    axis = _channel_axis(x)
    channels_first = jnp.moveaxis(x, axis, 1)
    grouped = standardised(channels_first.reshape(len(x), options["groups"], -1), (-1,))
    return _affine(options, params, jnp.moveaxis(grouped.reshape(channels_first.shape), 1, axis), axis)


def _instance_variants(signal: Signal) -> Sequence[Options]:
    takes = signal.form in ("sequence", "image") and _elements(signal, signal.features) > 1
    return product(affine=(False, True)) if takes else ()


def _instance_out(signal: Signal, options: Options) -> Signal:
    expect_form(signal, "instance_norm", "sequence", "image")
    several = _elements(signal, signal.features) > 1
    expect(several, "instance_norm", "more than one position or pixel", signal)
    return signal


def _torch_instance(signal: Signal, options: Options) -> torch.nn.Module:
    module = SequenceInstanceNorm if signal.form == "sequence" else torch.nn.InstanceNorm2d
    return module(signal.features, eps=EPS, affine=options["affine"])


def _jax_instance(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    positions = (1,) if x.ndim == 3 else (2, 3)
    return _affine(options, params, standardised(x, positions), _channel_axis(x))


def _jax_batch(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    axis = _channel_axis(x)
    shape = [-1 if i == axis % x.ndim else 1 for i in range(x.ndim)]
    mean, variance = params["running_mean"].reshape(shape), params["running_var"].reshape(shape)
    return _affine(options, params, (x - mean) / jnp.sqrt(variance + EPS), axis)


def _over_features(name: str, module: Callable[..., torch.nn.Module], jax_apply: Implementation) -> LayerDefinition:
    return LayerDefinition(
        name,
        on(*ROWS, affine=_AFFINE),
        keeps_signal(name, *ROWS),
        lambda signal, options: module(signal.features, eps=EPS, elementwise_affine=options["affine"]),
        jax_apply,
        axes=1,
    )


def _frozen_batch(name: str, module: Callable[..., torch.nn.Module], *forms: Form, axes: int | None) -> LayerDefinition:
    return LayerDefinition(
        name,
        on(*forms, affine=_AFFINE),
        keeps_signal(name, *forms),
        lambda signal, options: module(signal.features, eps=EPS, affine=options["affine"]).eval(),
        _jax_batch,
        axes=axes,
    )


KINDS = (
    _over_features("layer_norm", torch.nn.LayerNorm, _jax_layer),
    _over_features("rms_norm", torch.nn.RMSNorm, _jax_rms),
    LayerDefinition("group_norm", _group_variants, _group_out, _torch_group, _jax_group),
    LayerDefinition("instance_norm", _instance_variants, _instance_out, _torch_instance, _jax_instance),
    _frozen_batch("batch_norm1d", FrozenBatchNorm1d, *ROWS, axes=1),
    _frozen_batch("batch_norm2d", FrozenBatchNorm2d, "image", axes=None),
)
