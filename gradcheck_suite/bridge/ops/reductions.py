"""Reductions over axes: sums, extrema, norms, sorting, variances, normalizations and losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from gradcheck_suite.bridge.op_table import (
    Array,
    Lowering,
    absolute,
    is_complex,
    is_inexact,
    jax_dtype,
    on_vectors,
    register_op,
    register_table,
    unless_zero,
    with_derivatives,
)
from gradcheck_suite.bridge.ops.elementwise import log_sigmoid

Dims = int | Sequence[int] | None


def axes_of(x: Array, dim: Dims) -> tuple[int, ...]:
    """Return the axes that torch's `dim` names: None and an empty list name all axes."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(x.ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return () if x.ndim == 0 else tuple(d % x.ndim for d in dims)


def _as_given(self: Array, dtype: torch.dtype | None) -> Array:
    return self if dtype is None else self.astype(jax_dtype(dtype))


def _accumulated(self: Array, dtype: torch.dtype | None) -> Array:
    """Return self in the dtype of torch's sums and products: int64 for integers and booleans if
    none is given.
    """
    return (
        self.astype(jnp.int64) if dtype is None and not is_inexact(self) else _as_given(self, dtype)
    )


def _reducing(
    function: Callable[..., Array], converted: Callable[..., Array] = _as_given
) -> Lowering:
    """Return a reduction with torch's arguments of one with numpy's."""

    def lowering(
        self: Array, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Array:
        x = converted(self, dtype)
        return function(x, axis=axes_of(x, dim), keepdims=keepdim)

    return lowering


def _truth(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, **axes: function(x != 0, **axes).astype(
        jnp.uint8 if x.dtype == jnp.uint8 else jnp.bool_
    )


@register_op("aten.linalg_vector_norm")
def vector_norm(
    self: Array,
    ord: Any = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Array:
    """Return (sum |x|^ord)^(1/ord); the gradient is 0 where the norm is 0."""
    x = _as_given(self, dtype)
    order = 2.0 if ord is None else float(ord)
    size = absolute(x)

    def total(powers: Array, function: Callable[..., Array] = jnp.sum) -> Array:
        return function(powers, axis=axes_of(x, dim), keepdims=keepdim)

    if order == 0:
        return total(lax.stop_gradient(size != 0).astype(size.dtype))
    if order == 1:
        return total(size)
    if math.isinf(order):
        return total(size, jnp.max if order > 0 else jnp.min)
    if order < 0:
        return total(size**order) ** (1 / order)
    if order == 2:
        return _root(total(size * size if is_complex(x) else x * x))
    # a zero entry contributes no gradient, though the derivative of |x|^ord may be infinite there
    of_powers = total(unless_zero(lambda entry: entry**order, size))
    return unless_zero(lambda sum_: sum_ ** (1 / order), of_powers)


def _picked(x: Array, index: Array, dim: int, keepdim: bool) -> tuple[Array, Array]:
    """Return the entries that `index`, in which `dim` is kept, selects along `dim`, and the index."""
    value = jnp.take_along_axis(x, index, axis=dim)
    index = index.astype(jnp.int64)
    if keepdim:
        return value, index
    return jnp.squeeze(value, dim), jnp.squeeze(index, dim)


def _extreme(which: Callable[..., Array]) -> Lowering:
    """Return an extremum and its index; only the entry at that index gets the gradient."""
    # the derivative of `jnp.max` would be shared among equal entries
    return on_vectors(
        lambda self, dim, keepdim=False: _picked(
            self, which(lax.stop_gradient(self), axis=dim, keepdims=True), dim, keepdim
        )
    )


def _index(which: Callable[..., Array]) -> Lowering:
    """Return the index of the first extremum."""
    return on_vectors(
        lambda self, dim=None, keepdim=False: which(self, axis=dim, keepdims=keepdim).astype(
            jnp.int64
        )
    )


@on_vectors
def sort(
    self: Array, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[Array, Array]:
    """Return the sorted values and their indices; the sort is stable, and NaN is the largest."""
    # where torch may exchange equal entries, a stable order is one that it may return
    del stable
    detached = lax.stop_gradient(self)
    order = jnp.argsort(
        detached,
        axis=dim,
        stable=True,
        descending=descending,
    )
    order = order.astype(jnp.int64)
    return jnp.take_along_axis(self, order, axis=dim), order


@on_vectors
def topk(
    self: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Array, ...]:
    """Return the k largest values, in descending order, and their indices."""
    # torch may return them in any order unless it is asked to sort: this order is one of these
    del sorted
    dim = dim % self.ndim
    return tuple(lax.slice_in_dim(x, 0, k, axis=dim) for x in sort(self, dim, largest))


@on_vectors
def kthvalue(self: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """Return the kth smallest value, counted from 1, and its index."""
    _, order = sort(self, dim)
    index = lax.slice_in_dim(
        order,
        k - 1,
        k,
        axis=dim % self.ndim,
    )
    return _picked(self, index, dim, keepdim)


def _cumulative(
    function: Callable[..., Array], converted: Callable[..., Array] = _accumulated
) -> Lowering:
    def lowering(self: Array, dim: int, *, dtype: torch.dtype | None = None) -> Array:
        x = converted(self, dtype)
        return function(x, axis=dim % x.ndim) if x.size else x

    return on_vectors(lowering)


def _running(better: Callable[..., Array]) -> Lowering:
    """Return the cumulative extremum and its index, the last of equal entries."""

    def later(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        # a NaN wins over every number, and a later NaN over an earlier one, as in torch
        value, index = a
        other, other_index = b
        wins = better(other, value) | jnp.isnan(other)
        wins = wins & ~(jnp.isnan(value) & ~jnp.isnan(other))
        return jnp.where(wins, other, value), jnp.where(wins, other_index, index)

    def lowering(self: Array, dim: int) -> tuple[Array, Array]:
        if self.size == 0:
            return self, jnp.zeros(self.shape, jnp.int64)
        place = lax.broadcasted_iota(jnp.int64, self.shape, dim % self.ndim)
        _, index = lax.associative_scan(
            later, (lax.stop_gradient(self), place), axis=dim % self.ndim
        )
        return _picked(self, index, dim, True)

    return on_vectors(lowering)


def _moments(function: Callable[[Array, Array], Any]) -> Lowering:
    """Return a function of the variance, which is divided by (count - correction), and of the mean."""

    def lowering(
        self: Array, dim: Dims = None, *, correction: Any = None, keepdim: bool = False
    ) -> Any:
        axes = axes_of(self, dim)
        count = math.prod(self.shape[a] for a in axes)
        centre = jnp.sum(self, axis=axes, keepdims=True) / (count or jnp.nan)
        off = self - centre
        squares = jnp.real(off * jnp.conj(off)) if is_complex(self) else off * off
        total = jnp.sum(squares, axis=axes, keepdims=keepdim)
        degrees = max(count - (1 if correction is None else correction), 0)
        variance = total / jnp.asarray(degrees, total.dtype)
        return function(variance, centre if keepdim else jnp.squeeze(centre, axes))

    return lowering


def _root(variance: Array) -> Array:
    """Return the square root with gradient 0 at 0, as torch's `std` has it."""
    # the derivative of the root at 0 is infinite
    return unless_zero(jnp.sqrt, variance)


def _median(skip_nan: bool) -> Lowering:
    """Return the lower median and its index.

    A slice with a NaN gives NaN, unless NaN are skipped.
    """

    def lowering(self: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
        missing = jnp.isnan(lax.stop_gradient(self))
        numbers = jnp.sum(~missing, axis=dim, keepdims=True)
        place = jnp.maximum(numbers - 1, 0) // 2
        if not skip_nan:
            # the first NaN stands behind all numbers
            place = jnp.where(numbers < self.shape[dim], numbers, place)
        _, order = sort(self, dim)
        index = jnp.take_along_axis(order, place, axis=dim)
        return _picked(self, index, dim, keepdim)

    return on_vectors(lowering)


def _median_of_all(skip_nan: bool) -> Lowering:
    """Return the median of all entries; equal entries share the gradient evenly."""

    def lowering(self: Array) -> Array:
        x = self.reshape(-1)
        detached = lax.stop_gradient(x)
        value = _median(skip_nan)(detached, 0)[0]
        same = (detached == value) | (jnp.isnan(detached) & jnp.isnan(value))
        return jnp.sum(jnp.where(same, x, 0)) / jnp.sum(same)

    return lowering


register_table(
    {
        # equal extrema share the gradient evenly
        "aten.amax": _reducing(jnp.max),
        "aten.amin": _reducing(jnp.min),
        "aten.any": _reducing(_truth(jnp.any)),
        "aten.argmax": _index(jnp.argmax),
        "aten.argmin": _index(jnp.argmin),
        "aten.cummax": _running(jnp.greater_equal),
        "aten.cummin": _running(jnp.less_equal),
        # jnp.cumprod has no gradient where a factor is 0
        "aten.cumprod": _cumulative(
            lambda x, axis: lax.associative_scan(jnp.multiply, x, axis=axis)
        ),
        "aten.cumsum": _cumulative(jnp.cumsum),
        "aten.kthvalue": kthvalue,
        "aten.logcumsumexp": _cumulative(lax.cumlogsumexp, _as_given),
        "aten.max.default": _reducing(jnp.max),
        "aten.max.dim": _extreme(jnp.argmax),
        "aten.mean": _reducing(jnp.mean),
        "aten.median.default": _median_of_all(skip_nan=False),
        "aten.median.dim": _median(skip_nan=False),
        "aten.min.default": _reducing(jnp.min),
        "aten.min.dim": _extreme(jnp.argmin),
        "aten.nanmedian.default": _median_of_all(skip_nan=True),
        "aten.nanmedian.dim": _median(skip_nan=True),
        "aten.prod": _reducing(jnp.prod, _accumulated),
        "aten.sort": sort,
        "aten.std.correction": _moments(lambda variance, mean: _root(variance)),
        "aten.std_mean.correction": _moments(lambda variance, mean: (_root(variance), mean)),
        "aten.sum": _reducing(jnp.sum, _accumulated),
        "aten.topk": topk,
        "aten.var.correction": _moments(lambda variance, mean: variance),
        "aten.var_mean.correction": _moments(lambda *both: both),
    }
)


MEAN = 1
SUM = 2


def _reduced(items: Array, reduction: int) -> Array:
    """Return the mean (1) or the sum (2) of the item losses, or the item losses (0)."""
    return {MEAN: jnp.mean, SUM: jnp.sum}.get(reduction, lambda x: x)(items)


@register_op("aten.binary_cross_entropy")
def binary_cross_entropy(
    self: Array, target: Array, weight: Array | None = None, reduction: int = MEAN
) -> Array:
    """Return -(t log x + (1 - t) log(1 - x)) with logarithms of at least -100.

    The gradient is torch's, (x - t) / max(x (1 - x), 1e-12), which is not the derivative of the
    value where a logarithm is clamped.
    """
    log = jnp.maximum(jnp.log(self), -100)
    log_of_rest = jnp.maximum(jnp.log1p(-self), -100)
    value = -(target * log + (1 - target) * log_of_rest)
    slope = (self - target) / jnp.maximum((1 - self) * self, 1e-12)
    items = with_derivatives(value, (self, slope), (target, log_of_rest - log))
    return _reduced(items if weight is None else items * weight, reduction)


@register_op("aten.binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    self: Array,
    target: Array,
    weight: Array | None = None,
    pos_weight: Array | None = None,
    reduction: int = MEAN,
) -> Array:
    """Return the binary cross-entropy of sigmoid(x), without overflow."""
    rest = log_sigmoid(self)
    if pos_weight is not None:
        rest = (1 + (pos_weight - 1) * target) * rest
    items = (1 - target) * self - rest
    return _reduced(items if weight is None else items * weight, reduction)


@register_op("aten.multi_margin_loss")
def multi_margin_loss(
    self: Array,
    target: Array,
    p: Any = 1,
    margin: Any = 1,
    weight: Array | None = None,
    reduction: int = MEAN,
) -> Array:
    """Return the sum over c != t of max(0, margin - x[t] + x[c])^p, divided by the number of
    classes.
    """
    x = jnp.atleast_2d(self)
    t = jnp.atleast_1d(target)
    off = margin - jnp.take_along_axis(x, t[:, None], axis=1) + x
    counted = (off > 0) & (jnp.arange(x.shape[1]) != t[:, None])
    off = jnp.where(counted, off, 0)
    each = off if p == 1 else off * off
    each = each if weight is None else each * weight[t][:, None]
    items = jnp.sum(each, axis=1) / x.shape[1]
    return _reduced(items.reshape(self.shape[:-1]), reduction)


@register_op("aten.multilabel_margin_loss_forward")
def multilabel_margin_loss_forward(
    self: Array, target: Array, reduction: int
) -> tuple[Array, Array]:
    """Return the margin loss between the targets before the first -1 and all other classes, and the
    mask of targets.
    """
    x = jnp.atleast_2d(self)
    t = jnp.atleast_2d(target)
    named = jnp.cumprod(t >= 0, axis=1).astype(jnp.bool_)
    index = jnp.where(named, t, 0)
    # (N, targets, classes): of each target, whether it is a class
    is_class = index[..., None] == jnp.arange(x.shape[1])
    is_target = jnp.any(is_class & named[..., None], axis=1)
    at_target = jnp.take_along_axis(x, index, axis=1)
    off = 1 - at_target[:, :, None] + x[:, None, :]
    counted = named[:, :, None] & ~is_target[:, None, :] & (off > 0)
    items = jnp.sum(jnp.where(counted, off, 0), axis=(1, 2)) / x.shape[1]
    mask = is_target.astype(self.dtype).reshape(self.shape)
    return _reduced(items.reshape(self.shape[:-1]), reduction), mask


@register_op("aten._ctc_loss", "aten._ctc_loss.Tensor")
def ctc_loss(
    log_probs: Array,
    targets: Array,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Array, Array]:
    """Return -log of the probability of all alignments, (N,), for log_probs (T, N, C) and targets
    (N, S) or (sum S,).

    Only torch's backward reads the second result; it is empty here.
    """
    del zero_infinity  # torch zeroes infinities after this operation and in its backward
    times, batch, _ = log_probs.shape
    lengths = jnp.asarray(target_lengths)
    inputs = jnp.asarray(input_lengths)
    if targets.ndim == 1:
        longest = int(jnp.max(lengths)) if batch else 0
        starts = jnp.concatenate([jnp.zeros(1, lengths.dtype), jnp.cumsum(lengths)[:-1]])
        # places beyond an item's own targets are another item's, and are masked below
        place = starts[:, None] + jnp.arange(longest)
        targets = targets[jnp.clip(place, 0, max(targets.shape[0] - 1, 0))]
    longest = targets.shape[1]
    # a blank before each target, and one at the end: an alignment may stay in any of them
    blanks = jnp.full((batch, 2 * longest + 1), blank, targets.dtype)
    labels = blanks.at[:, 1::2].set(targets)
    positions = jnp.arange(labels.shape[1])
    labels = jnp.where(positions < 2 * lengths[:, None] + 1, labels, blank)
    # a blank may be left out between two different targets
    may_skip = jnp.concatenate(
        [
            jnp.zeros((batch, 2), jnp.bool_),
            (labels[:, 2:] != blank) & (labels[:, 2:] != labels[:, :-2]),
        ],
        axis=1,
    )
    low = -jnp.inf

    def add(*terms: Array) -> Array:
        """Return the logarithm of the sum of probabilities, given by their logarithms."""
        largest = lax.stop_gradient(jnp.max(jnp.stack(terms), axis=0))
        none = largest == low
        # infinity less infinity is NaN, and so is the gradient of a branch that is not taken
        top = jnp.where(none, 0, largest)
        parts = [jnp.exp(jnp.where(term == low, low, term - top)) for term in terms]
        total = jnp.where(none, 1, sum(parts))
        return jnp.where(none, low, jnp.log(total) + top)

    emit = jnp.take_along_axis(log_probs, jnp.broadcast_to(labels, (times, *labels.shape)), axis=2)
    # an alignment begins with the first blank or the first target, where there is one
    alpha = jnp.full(labels.shape, low, log_probs.dtype)
    alpha = alpha.at[:, :2].set(emit[0, :, :2])
    is_no_target = (positions == 1) & (lengths[:, None] == 0)
    alpha = jnp.where(is_no_target, low, alpha)

    def later(alpha: Array, at: tuple[Array, Array]) -> tuple[Array, None]:
        time, emitted = at
        one = jnp.pad(alpha, ((0, 0), (1, 0)), constant_values=low)[:, :-1]
        # of one blank alone, two to the left are more than there are
        padded = jnp.pad(alpha, ((0, 0), (2, 0)), constant_values=low)
        two = padded[:, : alpha.shape[1]]
        step = add(alpha, one, jnp.where(may_skip, two, low)) + emitted
        return jnp.where((time < inputs)[:, None], step, alpha), None

    alpha, _ = lax.scan(later, alpha, (jnp.arange(1, times), emit[1:]))
    last = jnp.take_along_axis(alpha, 2 * lengths[:, None], axis=1)[:, 0]
    last_target = jnp.maximum(2 * lengths[:, None] - 1, 0)
    before = jnp.take_along_axis(alpha, last_target, axis=1)[:, 0]
    before = jnp.where(lengths > 0, before, low)
    return -add(last, before), jnp.zeros(0, log_probs.dtype)
