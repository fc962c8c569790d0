"""Multi-head self-attention, optionally causal, with padding masked (Vaswani et al. 2017, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from gradcheck_suite.catalogue.definitions import Arguments, LayerDefinition
from gradcheck_suite.catalogue.feature_activations import softmax
from gradcheck_suite.catalogue.signals import Options, Signal, expect, expect_form, product

HEADS = (1, 2)


class SelfAttention(torch.nn.Module):
    """`torch.nn.MultiheadAttention` with the sequence as query, key and value."""

    def __init__(self, features: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(features, heads, batch_first=True)
        self.features, self.heads, self.causal = features, heads, causal

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        length = x.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1) if self.causal else None
        y, _ = self.attention(
            x,
            x,
            x,
            # torch's masks are True at ignored positions
            key_padding_mask=None if mask is None else ~mask,
            attn_mask=future,
            is_causal=self.causal,
            need_weights=False,
        )
        return y


def attend(params: Arguments, prefix: str, x: jax.Array, heads: int, visible: jax.Array) -> jax.Array:
    """Return multi-head self-attention.

    Args:
        params: `in_proj_weight` (3D, D) and `in_proj_bias` (3D,), the stacked projections to queries, keys and values;
            `out_proj.weight` (D, D) and `out_proj.bias` (D,), the projection of the concatenated heads.
        prefix: prefix of those names in `params`.
        x: (n, T, D).
        heads: H, which divides D.
        visible: broadcasts to (n, H, T, T); True where a query (third axis) attends to a key (fourth axis). Every
            query attends to at least one key.

    Returns:
        (n, T, D).
    """
    n, length, features = x.shape
    projected = x @ params[prefix + "in_proj_weight"].T + params[prefix + "in_proj_bias"]
    q, k, v = (part.reshape(n, length, heads, -1) for part in jnp.split(projected, 3, axis=-1))
    scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / jnp.sqrt(features / heads)
    scores = jnp.where(visible, scores, -jnp.inf)
    y = jnp.einsum("nhqk,nkhd->nqhd", softmax(scores), v).reshape(n, length, features)
    return y @ params[prefix + "out_proj.weight"].T + params[prefix + "out_proj.bias"]


def visible_keys(x: jax.Array, extras: Arguments, causal: bool) -> jax.Array:
    """Return the attention mask, (n or 1, 1, T, T): True at keys that are valid and, if `causal`, not in the future."""
    length = x.shape[1]
    visible = jnp.ones((1, 1, length, length), dtype=bool)
    if causal:
        visible = jnp.tril(visible)
    return visible & extras["mask"][:, None, None, :] if "mask" in extras else visible


def _variants(signal: Signal) -> Sequence[Options]:
    if signal.form != "sequence":
        return ()
    return product(heads=[h for h in HEADS if signal.features % h == 0], causal=(False, True))


def _out(signal: Signal, options: Options) -> Signal:
    expect_form(signal, "attention", "sequence")
    heads = options["heads"]
    expect(heads >= 1 and signal.features % heads == 0, "attention", "heads that divide the features", (heads, signal))
    return signal


def _torch(signal: Signal, options: Options) -> torch.nn.Module:
    return SelfAttention(signal.features, options["heads"], options["causal"])


def _jax(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return attend(params, "attention.", x, options["heads"], visible_keys(x, extras, options["causal"]))


KINDS = (LayerDefinition("attention", _variants, _out, _torch, _jax, uses_mask=True, trainable=True),)
