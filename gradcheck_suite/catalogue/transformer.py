"""Transformer encoder layers: self-attention and a two-layer network, each with a residual and a layer norm."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import torch

from gradcheck_suite.catalogue.activations import gelu, relu
from gradcheck_suite.catalogue.attention import attend, visible_keys
from gradcheck_suite.catalogue.definitions import Arguments, LayerDefinition
from gradcheck_suite.catalogue.normalization import standardised
from gradcheck_suite.catalogue.signals import Options, Signal, expect, expect_form

HIDDEN = 3
_EPS = 1e-5
_ACTIVATIONS = ("relu", "gelu")


class Block(torch.nn.Module):
    """`torch.nn.TransformerEncoderLayer` without dropout, whose random numbers differ between torch and JAX."""

    def __init__(self, features: int, heads: int, activation: str, norm_first: bool) -> None:
        super().__init__()
        self.features, self.heads, self.activation, self.norm_first = features, heads, activation, norm_first
        self.block = torch.nn.TransformerEncoderLayer(
            features,
            heads,
            dim_feedforward=HIDDEN,
            dropout=0.0,
            activation=activation,
            layer_norm_eps=_EPS,
            batch_first=True,
            norm_first=norm_first,
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.block(x, src_key_padding_mask=None if mask is None else ~mask)
        return y


def _norm(params: Arguments, name: str, x: jax.Array) -> jax.Array:
    return standardised(x, (-1,), _EPS) * params[f"block.{name}.weight"] + params[f"block.{name}.bias"]


def _network(params: Arguments, activation: str, x: jax.Array) -> jax.Array:
    h = x @ params["block.linear1.weight"].T + params["block.linear1.bias"]
    h = relu(h) if activation == "relu" else gelu(h)
    return h @ params["block.linear2.weight"].T + params["block.linear2.bias"]


def _variants(signal: Signal) -> Sequence[Options]:
    # the layer norm of one feature is constant: such a block would not depend on its input
    if signal.form != "sequence" or signal.features < 2:
        return ()
    rows = ((1, "relu", False), (1, "gelu", True), (2, "gelu", False))
    return [
        {"heads": heads, "activation": activation, "norm_first": norm_first}
        for heads, activation, norm_first in rows
        if signal.features % heads == 0
    ]


def _out(signal: Signal, options: Options) -> Signal:
    expect_form(signal, "transformer", "sequence")
    heads, activation = options["heads"], options["activation"]
    expect(heads >= 1 and signal.features % heads == 0, "transformer", "heads that divide the features", heads)
    expect(activation in _ACTIVATIONS, "transformer", f"an activation among {_ACTIVATIONS}", activation)
    return signal


def _torch(signal: Signal, options: Options) -> torch.nn.Module:
    return Block(signal.features, options["heads"], options["activation"], options["norm_first"])


def _jax(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    visible = visible_keys(x, extras, causal=False)

    def attention(x: jax.Array) -> jax.Array:
        return attend(params, "block.self_attn.", x, options["heads"], visible)

    def network(x: jax.Array) -> jax.Array:
        return _network(params, options["activation"], x)

    if options["norm_first"]:
        x = x + attention(_norm(params, "norm1", x))
        return x + network(_norm(params, "norm2", x))
    x = _norm(params, "norm1", x + attention(x))
    return _norm(params, "norm2", x + network(x))


KINDS = (LayerDefinition("transformer", _variants, _out, _torch, _jax, uses_mask=True, trainable=True),)
