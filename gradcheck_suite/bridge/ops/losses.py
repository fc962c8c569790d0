"""Losses that are one ATen operation; torch composes its other losses of these and of arithmetic."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from gradcheck_suite.bridge.dtypes import Array, absolute
from gradcheck_suite.bridge.op_table import register_op
from gradcheck_suite.bridge.ops.activations import log_sigmoid

MEAN, SUM = 1, 2


def _reduced(items: Array, reduction: int) -> Array:
    """Return the mean (1) or the sum (2) of the item losses, or the item losses (0)."""
    return {MEAN: jnp.mean, SUM: jnp.sum}.get(reduction, lambda x: x)(items)


@register_op("aten.mse_loss")
def mse_loss(self: Array, target: Array, reduction: int = MEAN) -> Array:
    """Return (x - t)^2, reduced."""
    off = self - target
    return _reduced(off * off, reduction)


@register_op("aten.smooth_l1_loss")
def smooth_l1_loss(self: Array, target: Array, reduction: int = MEAN, beta: float = 1.0) -> Array:
    """Return the smooth L1 loss: quadratic within beta, linear beyond."""
    off = self - target
    size = absolute(off)
    if beta == 0:
        return _reduced(size, reduction)
    return _reduced(jnp.where(size < beta, 0.5 * off * off / beta, size - 0.5 * beta), reduction)


@register_op("aten.huber_loss")
def huber_loss(self: Array, target: Array, reduction: int = MEAN, delta: float = 1.0) -> Array:
    """Return the Huber loss: quadratic within delta, linear beyond."""
    off = self - target
    size = absolute(off)
    return _reduced(jnp.where(size < delta, 0.5 * off * off, delta * (size - 0.5 * delta)), reduction)


def _nll(x: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int) -> tuple[Array, Array]:
    """Return the loss and the sum of weights, for x (N, C, *rest) and target (N, *rest)."""
    valid = target != ignore_index
    index = jnp.where(valid, target, 0)
    picked = -jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]
    share = jnp.ones((), x.dtype) if weight is None else weight[index]
    share = jnp.where(valid, share, 0)
    # an ignored position's log-probability may be infinite and must not reach the sum
    items = jnp.where(valid, share * jnp.where(valid, picked, 0), 0)
    if reduction == 0:
        return items, jnp.zeros((), x.dtype)
    total = jnp.sum(share)
    if reduction == SUM:
        return jnp.sum(items), total
    # the mean of no valid targets is NaN, and its gradient is 0
    empty = lax.stop_gradient(jnp.sum(items)) * jnp.nan
    none = ~jnp.any(valid)
    return jnp.where(none, empty, jnp.sum(items) / jnp.where(none, 1, total)), total


@register_op("aten.nll_loss_forward")
def nll_loss_forward(
    self: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int
) -> tuple[Array, Array]:
    """Return -x[target] weighted by class, and the sum of the weights; x is (N, C) or (C,)."""
    if self.ndim == 1:
        # of a single item, torch returns the weight without a reduction too
        _, total = _nll(self[None], target.reshape(1), weight, SUM, ignore_index)
        items, _ = _nll(self[None], target.reshape(1), weight, reduction, ignore_index)
        return (items.reshape(()), total)
    return _nll(self, target, weight, reduction, ignore_index)


@register_op("aten.nll_loss2d_forward")
def nll_loss2d_forward(
    self: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int
) -> tuple[Array, Array]:
    """Return `nll_loss_forward` for x (N, C, H, W)."""
    return _nll(self, target, weight, reduction, ignore_index)


@register_op("aten.binary_cross_entropy")
def binary_cross_entropy(self: Array, target: Array, weight: Array | None = None, reduction: int = MEAN) -> Array:
    """Return -(t log x + (1 - t) log(1 - x)) with logarithms of at least -100.

    The gradient is torch's, (x - t) / max(x (1 - x), 1e-12), which is not the derivative of the value where a logarithm
    is clamped.
    """
    value = lax.stop_gradient(
        -(target * jnp.maximum(jnp.log(self), -100) + (1 - target) * jnp.maximum(jnp.log1p(-self), -100))
    )
    x = lax.stop_gradient(self)
    slope = (x - lax.stop_gradient(target)) / jnp.maximum((1 - x) * x, 1e-12)
    of_target = lax.stop_gradient(jnp.maximum(jnp.log1p(-x), -100) - jnp.maximum(jnp.log(x), -100))
    linear = slope * self + of_target * target
    items = value + (linear - lax.stop_gradient(linear))
    return _reduced(items if weight is None else items * weight, reduction)


@register_op("aten.binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    self: Array, target: Array, weight: Array | None = None, pos_weight: Array | None = None, reduction: int = MEAN
) -> Array:
    """Return the binary cross-entropy of sigmoid(x), without overflow."""
    rest = log_sigmoid(self)
    if pos_weight is not None:
        rest = (1 + (pos_weight - 1) * target) * rest
    items = (1 - target) * self - rest
    return _reduced(items if weight is None else items * weight, reduction)


@register_op("aten.soft_margin_loss")
def soft_margin_loss(self: Array, target: Array, reduction: int = MEAN) -> Array:
    """Return log(1 + e^(-t * x)), reduced."""
    return _reduced(jnp.log1p(jnp.exp(-target * self)), reduction)


@register_op("aten.multi_margin_loss")
def multi_margin_loss(
    self: Array, target: Array, p: Any = 1, margin: Any = 1, weight: Array | None = None, reduction: int = MEAN
) -> Array:
    """Return the sum over c != t of max(0, margin - x[t] + x[c])^p, divided by the number of classes."""
    x, t = jnp.atleast_2d(self), jnp.atleast_1d(target)
    off = margin - jnp.take_along_axis(x, t[:, None], axis=1) + x
    counted = (off > 0) & (jnp.arange(x.shape[1]) != t[:, None])
    off = jnp.where(counted, off, 0)
    each = off if p == 1 else off * off
    each = each if weight is None else each * weight[t][:, None]
    items = jnp.sum(each, axis=1) / x.shape[1]
    return _reduced(items.reshape(self.shape[:-1]), reduction)


@register_op("aten.multilabel_margin_loss_forward")
def multilabel_margin_loss_forward(self: Array, target: Array, reduction: int) -> tuple[Array, Array]:
    """Return the margin loss between the targets before the first -1 and all other classes, and the mask of targets."""
    x, t = jnp.atleast_2d(self), jnp.atleast_2d(target)
    named = jnp.cumprod(t >= 0, axis=1).astype(jnp.bool_)
    index = jnp.where(named, t, 0)
    is_target = jnp.any((index[..., None] == jnp.arange(x.shape[1])) & named[..., None], axis=1)
    at_target = jnp.take_along_axis(x, index, axis=1)
    off = 1 - at_target[:, :, None] + x[:, None, :]
    counted = named[:, :, None] & ~is_target[:, None, :] & (off > 0)
    items = jnp.sum(jnp.where(counted, off, 0), axis=(1, 2)) / x.shape[1]
    return _reduced(items.reshape(self.shape[:-1]), reduction), is_target.astype(self.dtype).reshape(self.shape)


@register_op("aten._ctc_loss", "aten._ctc_loss.Tensor")
def ctc_loss(
    log_probs: Array,
    targets: Array,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Array, Array]:
    """Return -log of the probability of all alignments, (N,), for log_probs (T, N, C) and targets (N, S) or (sum S,).

    Only torch's backward reads the second result; it is empty here.
    """
    del zero_infinity  # torch zeroes infinities after this operation and in its backward
    times, batch, _ = log_probs.shape
    lengths, inputs = jnp.asarray(target_lengths), jnp.asarray(input_lengths)
    if targets.ndim == 1:
        longest = int(jnp.max(lengths)) if batch else 0
        starts = jnp.concatenate([jnp.zeros(1, lengths.dtype), jnp.cumsum(lengths)[:-1]])
        place = jnp.clip(starts[:, None] + jnp.arange(longest), 0, max(targets.shape[0] - 1, 0))
        targets = targets[place]
    longest = targets.shape[1]
    labels = jnp.full((batch, 2 * longest + 1), blank, targets.dtype).at[:, 1::2].set(targets)
    labels = jnp.where(jnp.arange(labels.shape[1]) < 2 * lengths[:, None] + 1, labels, blank)
    may_skip = jnp.concatenate(
        [jnp.zeros((batch, 2), jnp.bool_), (labels[:, 2:] != blank) & (labels[:, 2:] != labels[:, :-2])], axis=1
    )
    low = -jnp.inf

    def add(*terms: Array) -> Array:
        top = lax.stop_gradient(jnp.max(jnp.stack(terms), axis=0))
        none = top == low
        total = sum(jnp.exp(jnp.where(t == low, low, t - jnp.where(none, 0, top))) for t in terms)
        return jnp.where(none, low, jnp.log(jnp.where(none, 1, total)) + jnp.where(none, 0, top))

    emit = jnp.take_along_axis(log_probs, jnp.broadcast_to(labels, (times, *labels.shape)), axis=2)
    alpha = jnp.full(labels.shape, low, log_probs.dtype).at[:, :2].set(emit[0, :, :2])
    alpha = jnp.where((jnp.arange(labels.shape[1]) == 1) & (lengths[:, None] == 0), low, alpha)

    def later(alpha: Array, at: tuple[Array, Array]) -> tuple[Array, None]:
        time, emitted = at
        one = jnp.pad(alpha, ((0, 0), (1, 0)), constant_values=low)[:, :-1]
        two = jnp.pad(alpha, ((0, 0), (2, 0)), constant_values=low)[:, : alpha.shape[1]]
        step = add(alpha, one, jnp.where(may_skip, two, low)) + emitted
        return jnp.where((time < inputs)[:, None], step, alpha), None

    alpha, _ = lax.scan(later, alpha, (jnp.arange(1, times), emit[1:]))
    last = jnp.take_along_axis(alpha, 2 * lengths[:, None], axis=1)[:, 0]
    before = jnp.take_along_axis(alpha, jnp.maximum(2 * lengths[:, None] - 1, 0), axis=1)[:, 0]
    return -add(last, jnp.where(lengths > 0, before, low)), jnp.zeros(0, log_probs.dtype)
