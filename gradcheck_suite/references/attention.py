"""The backward of torch's attention on the CPU, operation by operation, so that each can be rounded at random."""

from __future__ import annotations

import math

import torch

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attention_backward(
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

    The fused operation computes the probabilities from scores and their stored logarithms of sums, exp(S - L). If S and
    L were rounded apart, large scores would make them infinite.

    The gradient of the scores is P * (dO V - D), where D = sum(dO * O). Where one probability is 1, O is V and the
    difference is 0; the two sums are rounded apart, so the fused operation returns a rounding error of the size of
    either, which the formula of softmax's gradient would not.

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

    Source: T. Dao et al., FlashAttention (2022), appendix B.2.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query @ key.mT) * scale
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    # a query that sees no key has no probabilities
    none = (scores == -torch.inf).all(-1, keepdim=True)
    probabilities = scores.masked_fill(none, 0).softmax(-1).masked_fill(none, 0)
    both = (grad_out * out).sum(-1, keepdim=True)
    grad_scores = probabilities * (grad_out @ value.mT - both) * scale
    return grad_scores @ key, grad_scores.mT @ query, probabilities.mT @ grad_out
