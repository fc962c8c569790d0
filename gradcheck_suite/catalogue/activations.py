"""Pointwise activations, from their definitions.

At a kink an activation has several subgradients, of which torch returns one. Inputs at a kink are common: a dropped or
clamped value is exactly 0, 1 or 6. Each definition below therefore states with `>` or `>=` on which side a kink lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.scipy.special import erf

from gradcheck_suite.catalogue.definitions import (
    FLOATS,
    ROWS,
    Arguments,
    Arrays,
    Form,
    Implementation,
    LayerDefinition,
    Options,
    Signal,
    expect,
    expect_form,
    keeps_signal,
    on,
    product,
)

_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772  # Klambauer et al. 2017, equation 14

Function = Callable[..., jax.Array]


def _below(x: jax.Array) -> jax.Array:
    """Return min(x, 0), so that the exponential in the branch not taken cannot overflow to NaN."""
    return jnp.where(x > 0, 0.0, x)


def _between(x: jax.Array, low: float, high: float, inside: jax.Array) -> jax.Array:
    """Return `inside` strictly between the bounds, and the nearer bound elsewhere."""
    return jnp.where((x > low) & (x < high), inside, jnp.where(x >= high, high, low))


def relu(x: jax.Array) -> jax.Array:
    """Return max(x, 0); the derivative at 0 is 0."""
    return jnp.where(x > 0, x, 0.0)


def gelu(x: jax.Array) -> jax.Array:
    """Return x times the standard normal distribution function."""
    return 0.5 * x * (1 + erf(x / jnp.sqrt(2.0)))


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return 0.5 * x * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x**3)))


def _elu(x: jax.Array, alpha: float) -> jax.Array:
    return jnp.where(x > 0, x, alpha * jnp.expm1(_below(x)))


def _celu(x: jax.Array, alpha: float) -> jax.Array:
    return jnp.where(x > 0, x, alpha * jnp.expm1(_below(x) / alpha))


def _selu(x: jax.Array) -> jax.Array:
    return _SELU_SCALE * _elu(x, _SELU_ALPHA)


def _hardswish(x: jax.Array) -> jax.Array:
    return jnp.where(x >= 3, x, jnp.where(x > -3, x * (x + 3) / 6, 0.0))


def _shrink(x: jax.Array, lambd: float, by: float) -> jax.Array:
    return jnp.where(x > lambd, x - by, jnp.where(x < -lambd, x + by, 0.0))


_Row = tuple[Callable[..., torch.nn.Module], Function, Sequence[dict[str, Any]]]
_PLAIN: Sequence[dict[str, Any]] = ({},)
_ACTIVATIONS: dict[str, _Row] = {
    "relu": (torch.nn.ReLU, relu, _PLAIN),
    "tanh": (torch.nn.Tanh, jnp.tanh, _PLAIN),
    "sigmoid": (torch.nn.Sigmoid, jax.nn.sigmoid, _PLAIN),
    "gelu": (torch.nn.GELU, gelu, _PLAIN),
    "gelu_tanh": (lambda: torch.nn.GELU(approximate="tanh"), _gelu_tanh, _PLAIN),
    "silu": (torch.nn.SiLU, lambda x: x * jax.nn.sigmoid(x), _PLAIN),
    "mish": (torch.nn.Mish, lambda x: x * jnp.tanh(jnp.logaddexp(x, 0.0)), _PLAIN),
    "softplus": (
        torch.nn.Softplus,
        lambda x, beta, threshold: jnp.where(beta * x > threshold, x, jnp.logaddexp(beta * x, 0.0) / beta),
        ({"beta": 1.0, "threshold": 20.0}, {"beta": 2.0, "threshold": 1.0}),
    ),
    "log_sigmoid": (torch.nn.LogSigmoid, lambda x: -jnp.logaddexp(-x, 0.0), _PLAIN),
    "leaky_relu": (
        torch.nn.LeakyReLU,
        lambda x, negative_slope: jnp.where(x > 0, x, negative_slope * x),
        ({"negative_slope": 0.01}, {"negative_slope": 0.5}),
    ),
    "elu": (torch.nn.ELU, _elu, ({"alpha": 1.0}, {"alpha": 0.5})),
    "celu": (torch.nn.CELU, _celu, ({"alpha": 2.0},)),
    "selu": (torch.nn.SELU, _selu, _PLAIN),
    "hardtanh": (torch.nn.Hardtanh, lambda x: _between(x, -1.0, 1.0, x), _PLAIN),
    "relu6": (torch.nn.ReLU6, lambda x: _between(x, 0.0, 6.0, x), _PLAIN),
    "hardswish": (torch.nn.Hardswish, _hardswish, _PLAIN),
    "softshrink": (torch.nn.Softshrink, lambda x: _shrink(x, 0.5, 0.5), _PLAIN),
    "hardshrink": (torch.nn.Hardshrink, lambda x: _shrink(x, 0.5, 0.0), _PLAIN),
    "softsign": (torch.nn.Softsign, lambda x: x / (1 + jnp.where(x > 0, x, -x)), _PLAIN),
    "tanhshrink": (torch.nn.Tanhshrink, lambda x: x - jnp.tanh(x), _PLAIN),
}


def _kind(
    name: str, module: Callable[..., torch.nn.Module], function: Function, options: Sequence[Options]
) -> LayerDefinition:
    def variants(signal: Signal) -> Sequence[Options]:
        return () if signal.form == "tokens" else options

    return LayerDefinition(
        name,
        variants,
        keeps_signal(name, *FLOATS),
        lambda signal, o: module(**o),
        lambda o, params, x, extras: function(x, **o),
        axes=0,
    )


KINDS = tuple(_kind(name, *row) for name, row in _ACTIVATIONS.items())


# Activations of whole feature rows (softmax, GLU) or with a parameter (PReLU).


def _log_softmax(x: jax.Array) -> jax.Array:
    # subtracting the row's maximum changes neither value nor gradient, and prevents overflow
    x = x - jax.lax.stop_gradient(x.max(axis=-1, keepdims=True))
    return x - jnp.log(jnp.exp(x).sum(axis=-1, keepdims=True))


def softmax(x: jax.Array) -> jax.Array:
    """Return the softmax over the last axis."""
    e = jnp.exp(x - jax.lax.stop_gradient(x.max(axis=-1, keepdims=True)))
    return e / e.sum(axis=-1, keepdims=True)


def _feature_activations_over_features(
    name: str, module: Callable[..., torch.nn.Module], function: Callable[[jax.Array], jax.Array]
) -> LayerDefinition:
    return LayerDefinition(
        name,
        on(*ROWS),
        keeps_signal(name, *ROWS),
        lambda signal, o: module(dim=-1),
        lambda o, params, x, extras: function(x),
        axes=1,
    )


def _glu_variants(signal: Signal) -> Sequence[Options]:
    return ({},) if signal.form in ROWS and signal.features % 2 == 0 else ()


def _glu_out(signal: Signal, options: Options) -> Signal:
    expect(signal.form in ROWS and signal.features % 2 == 0, "glu", "an even number of features", signal)
    return signal.with_features(signal.features // 2)


def _glu(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    value, gate = jnp.split(x, 2, axis=-1)
    return value * jax.nn.sigmoid(gate)


def _prelu_variants(signal: Signal) -> Sequence[Options]:
    if signal.form == "tokens":
        return ()
    return product(per_feature=(False, True) if signal.form == "vector" else (False,))


def _prelu_out(signal: Signal, options: Options) -> Signal:
    expect_form(signal, "prelu", *FLOATS)
    # torch's channels are the second axis: the features of a vector, the positions of a sequence
    expect(signal.form == "vector" or not options["per_feature"], "prelu", "a vector for per_feature=True", signal)
    return signal


def _prelu_module(signal: Signal, options: Options) -> torch.nn.Module:
    return torch.nn.PReLU(signal.features if options["per_feature"] else 1)


def _prelu(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return jnp.where(x > 0, x, params["weight"] * x)


FEATURE_ACTIVATIONS_KINDS = (
    _feature_activations_over_features("softmax", torch.nn.Softmax, softmax),
    _feature_activations_over_features("log_softmax", torch.nn.LogSoftmax, _log_softmax),
    LayerDefinition("glu", _glu_variants, _glu_out, lambda signal, o: torch.nn.GLU(dim=-1), _glu, axes=1),
    # not trainable: an item above 0 gives the slope a zero gradient
    LayerDefinition("prelu", _prelu_variants, _prelu_out, _prelu_module, _prelu, axes=1),
)


# Dropout whose mask is part of the batch, so that every split of the items drops the same elements.


class MaskedDropout(torch.nn.Module):
    """x * keep / (1 - p) for a mask `keep` of the input's shape."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return x * keep / (1 - self.p)


def _variants(signal: Signal) -> Sequence[Options]:
    return () if signal.form == "tokens" else product(p=(0.5, 0.1) if signal.form == "vector" else (0.5,))


def _out(signal: Signal, options: Options) -> Signal:
    expect_form(signal, "dropout", *FLOATS)
    expect(0 <= options["p"] < 1, "dropout", "p of at least 0 and below 1", options["p"])
    return signal


def _extras(signal: Signal, options: Options, rng: np.random.Generator, items: int) -> Arrays:
    return {"keep": rng.random((items, *signal.size)) >= options["p"]}


def _jax(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return jax.numpy.where(extras["keep"], x / (1 - options["p"]), 0.0)


DROPOUT_KINDS = (
    LayerDefinition("dropout", _variants, _out, lambda signal, o: MaskedDropout(o["p"]), _jax, extras=_extras),
)


# Normalization layers that are separable over samples: layer, RMS, group and instance norm, batch norm in eval mode.
#
# Batch norm in train mode is not separable (see `cross_sample`). Here a model in train mode keeps its batch norms in
# eval mode, as fine-tuning with frozen statistics does.


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


def _normalization_over_features(
    name: str, module: Callable[..., torch.nn.Module], jax_apply: Implementation
) -> LayerDefinition:
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


NORMALIZATION_KINDS = (
    _normalization_over_features("layer_norm", torch.nn.LayerNorm, _jax_layer),
    _normalization_over_features("rms_norm", torch.nn.RMSNorm, _jax_rms),
    LayerDefinition("group_norm", _group_variants, _group_out, _torch_group, _jax_group),
    LayerDefinition("instance_norm", _instance_variants, _instance_out, _torch_instance, _jax_instance),
    _frozen_batch("batch_norm1d", FrozenBatchNorm1d, *ROWS, axes=1),
    _frozen_batch("batch_norm2d", FrozenBatchNorm2d, "image", axes=None),
)
