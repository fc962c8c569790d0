"""Torch's attention on the CPU, forward and backward, operation by operation, so that each can be rounded at random."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the logarithms of the sums; `aten::_scaled_dot_product_flash_attention_for_cpu`.

    In bfloat16 and float16, the fused operation rounds the probabilities before it multiplies them by the values. Where
    the values of all keys cancel, as they do after a normalization over them, the output is that rounding error.

    Args:
        query: (batch, heads, queries, features), as are key and value.
        key: what queries are compared with.
        value: what is averaged.
        _dropout_p: 0 on the CPU.
        is_causal: whether a query sees no later key.
        attn_mask: added to the scores, or None.
        scale: factor of the scores; None for 1 / sqrt(features).
    """
    scores, none = _scores(query, key, is_causal, attn_mask, scale)
    return _softmax(scores, none) @ value, scores.masked_fill(none, 0).logsumexp(-1)


def _scores(
    query: torch.Tensor, key: torch.Tensor, is_causal: bool, attn_mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores, and which queries see no key, as a mask (batch, heads, queries, 1)."""
    scores = (query @ key.mT) * _factor(query, scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    return scores, (scores == -torch.inf).all(-1, keepdim=True)


def _factor(query: torch.Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _softmax(scores: torch.Tensor, none: torch.Tensor) -> torch.Tensor:
    """Return the probabilities; a query that sees no key has none."""
    return scores.masked_fill(none, 0).softmax(-1).masked_fill(none, 0)


@dataclass(frozen=True)
class AttentionBackward:
    """The gradients of query, key and value, as torch computes them from what its forward has stored.

    The fused operation computes the probabilities from scores and the stored logarithms of their sums, exp(S - L). L is
    rounded, so that the probabilities of a query add up to 1 but for eps * L. For bfloat16 and float16, L is kept in
    float32, and its error is small beside the rounding of the probabilities: there it counts as not rounded.

    The gradient of the scores is P * (dO V - D), where D = sum(dO * O). Where one probability is 1, O is V and the
    difference is 0; the two sums are rounded apart, so the fused operation returns a rounding error of the size of
    either, which the formula of softmax's gradient would not.

    Args:
        logarithms_rounded: whether L is rounded to the precision of the scores.

    Source: T. Dao et al., FlashAttention (2022), appendix B.2.
    """

    logarithms_rounded: bool

    def __call__(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        _logsumexp: torch.Tensor,
        _dropout_p: float,
        is_causal: bool,
        *,
        attn_mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> Tensors:
        """Return the gradients of query, key and value; `aten::_scaled_dot_product_flash_attention_for_cpu_backward`.

        Args:
            grad_out: (batch, heads, queries, features), as are all but the mask.
            query: of the forward.
            key: of the forward.
            value: of the forward.
            out: of the forward.
            _logsumexp: of the forward.
            _dropout_p: 0 on the CPU.
            is_causal: whether a query sees no later key.
            attn_mask: added to the scores, or None.
            scale: factor of the scores; None for 1 / sqrt(features).
        """
        scores, none = _scores(query, key, is_causal, attn_mask, scale)
        probabilities = _softmax(scores, none)
        if self.logarithms_rounded:
            probabilities = probabilities * _error_of_logarithms(scores.masked_fill(none, 0)).exp()
        both = (grad_out * out).sum(-1, keepdim=True)
        grad_scores = probabilities * (grad_out @ value.mT - both) * _factor(query, scale)
        return grad_scores @ key, grad_scores.mT @ query, probabilities.mT @ grad_out


def _error_of_logarithms(scores: torch.Tensor) -> torch.Tensor:
    """Return the error that rounding gives m + log(sum(exp(S - m))), m the largest score; exactly computed, it is 0.

    It is at most the logarithm, since m is a number of the precision: nothing where one score is far above all others.
    """
    largest = scores.amax(-1, keepdim=True)
    logarithm = (scores - largest).exp().sum(-1, keepdim=True).log()
    error = logarithm - ((largest + logarithm) - largest)
    return error.maximum(-logarithm).minimum(logarithm)
