"""Scaled dot-product attention."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from gradcheck_suite.bridge.dtypes import Array
from gradcheck_suite.bridge.errors import RandomnessError
from gradcheck_suite.bridge.op_table import register_op


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p > 0:
        raise RandomnessError(f"attention's dropout is active (dropout_p = {dropout_p:g})")


def _scores(query: Array, key: Array, attn_mask: Array | None, is_causal: bool, scale: float | None) -> Array:
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.einsum("...qd,...kd->...qk", query, key, precision=lax.Precision.HIGHEST) * factor
    if is_causal:
        allowed = jnp.tril(jnp.ones(scores.shape[-2:], jnp.bool_))
        scores = jnp.where(allowed, scores, -jnp.inf)
    if attn_mask is not None and attn_mask.dtype == jnp.bool_:
        return jnp.where(attn_mask, scores, -jnp.inf)
    return scores if attn_mask is None else scores + attn_mask


@register_op("aten.scaled_dot_product_attention")
def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """Return softmax(q k' * scale + mask) v; a query whose keys are all masked gives zeros."""
    _refuse_dropout(dropout_p)
    if enable_gqa:
        heads = query.shape[-3]
        key, value = (jnp.repeat(x, heads // x.shape[-3], axis=-3) for x in (key, value))
    scores = _scores(query, key, attn_mask, is_causal, scale)
    fully_masked = jnp.all(scores == -jnp.inf, axis=-1, keepdims=True)
    weights = jnp.where(fully_masked, 0, jax.nn.softmax(jnp.where(fully_masked, 0, scores), axis=-1))
    return jnp.einsum("...qk,...kd->...qd", weights, value, precision=lax.Precision.HIGHEST)


@register_op("aten._scaled_dot_product_flash_attention_for_cpu")
def flash_attention_for_cpu(
    query: Array,
    key: Array,
    value: Array,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array]:
    """Return the attention output and the log-sum-exp of each row's scores, (N, heads, rows)."""
    out = scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return out, jax.nn.logsumexp(_scores(query, key, attn_mask, is_causal, scale), axis=-1)
