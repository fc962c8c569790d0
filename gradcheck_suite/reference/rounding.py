"""Rounding errors of gradients by Monte Carlo arithmetic: float64 operations whose results are
rounded at random.

Two frameworks compute the same gradient by different operations and libraries: XLA's tanh is off by
up to 4 unit roundoffs where torch's is off by at most 1.3. The effect on the gradient depends on
cancellation, which perturbed inputs alone do not show: x - tanh(x) maps neighbouring x to the same
number, so its error is the same in every draw. Random rounding of every result shows it.

A lower precision is simulated by float64 operations with larger errors. No operation in that
precision runs, so that a fault of torch in it cannot widen the bound that torch is held to.

Source: D. S. Parker, Monte Carlo Arithmetic, UCLA CSD-970002 (1997).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch._decomp import get_decompositions

from gradcheck_suite.core.comparison import (
    DRAWS,
    MANY_DRAWS,
    Layout,
    Vector,
    likely_bound,
    noise_bound,
    summation_bound,
)
from gradcheck_suite.core.contract import Batch
from gradcheck_suite.run.instance import Compute, Instance, autocast_context, map_leaves
from gradcheck_suite.run.modes import Mode

# Torch's attention on the CPU, forward and backward, operation by operation, so that each can be
# rounded at random.


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
    """Return the output and the logarithms of the sums.

    `aten::_scaled_dot_product_flash_attention_for_cpu`. In bfloat16 and float16, the fused
    operation rounds the probabilities before it multiplies them by the values. Where the values of
    all keys cancel, as they do after a normalization over them, the output is that rounding error.

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
    query: torch.Tensor,
    key: torch.Tensor,
    is_causal: bool,
    attn_mask: torch.Tensor | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores, and which queries see no key, as a mask (batch, heads, queries, 1)."""
    scores = (query @ key.mT) * _factor(query, scale)
    if is_causal:
        # from the upper left corner on, as torch's CPU kernel has it where queries and keys differ
        # in number
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    return scores, (scores == -torch.inf).all(-1, keepdim=True)


def _factor(query: torch.Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _softmax(scores: torch.Tensor, none: torch.Tensor) -> torch.Tensor:
    """Return the probabilities; a query that sees no key has none."""
    # filled first, since the softmax of a row of minus infinities is NaN, also in its gradient
    return scores.masked_fill(none, 0).softmax(-1).masked_fill(none, 0)


@dataclass(frozen=True)
class AttentionBackward:
    """The gradients of query, key and value, as torch computes them from what its forward has
    stored.

    The fused operation computes the probabilities from scores and the stored logarithms of their
    sums, exp(S - L). L is rounded, so that the probabilities of a query add up to 1 but for eps *
    L. For bfloat16 and float16, L is kept in float32, and its error is small beside the rounding of
    the probabilities: there it counts as not rounded.

    The gradient of the scores is P * (dO V - D), where D = sum(dO * O). Where one probability is 1,
    O is V and the difference is 0; the two sums are rounded apart, so the fused operation returns a
    rounding error of the size of either, which the formula of softmax's gradient would not.

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
        """Return the gradients of query, key and value.

        `aten::_scaled_dot_product_flash_attention_for_cpu_backward`.

        Args:
            grad_out: (batch, heads, queries, features), as are all but the mask.
            query: the forward's query.
            key: the forward's key.
            value: the forward's value.
            out: the forward's output.
            _logsumexp: the forward's log-sum-exp, unused.
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
    """Return the error that rounding gives m + log(sum(exp(S - m))), m the largest score.

    Exactly computed, it is 0. It is at most the logarithm, since m is a number of the precision:
    nothing where one score is far above all others.
    """
    largest = scores.amax(-1, keepdim=True)
    logarithm = (scores - largest).exp().sum(-1, keepdim=True).log()
    error = logarithm - ((largest + logarithm) - largest)
    return error.maximum(-logarithm).minimum(logarithm)


# Normalizations as functions of simpler operations, so that each of these is rounded at random.


Tensor = torch.Tensor


def _statistics(x: Tensor, axes: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the centred input, the mean, and one over the standard deviation.

    The last two keep the axes. A normalization gives the same output whatever is added to all of
    its inputs, so moved inputs alone show no error. Where the inputs are large and close together,
    torch's float32 output has the rounding error of their mean, divided by their standard
    deviation: 5e-6 for (-6.7251, -6.8569).

    An error of the mean alone would cancel in the variance. Welford's method, which torch uses,
    multiplies deviations from two partial means, each with an error of its own: each value is
    therefore rounded before it is centred again.
    """
    mean = x.mean([*axes], keepdim=True)
    centred = x - mean
    recentred = x * 1.0 - mean
    return centred, mean, ((centred * recentred).mean([*axes], keepdim=True) + eps).rsqrt()


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `aten.native_layer_norm`: the output, the mean and one over the standard deviation."""
    centred, mean, scale = _statistics(x, range(x.dim() - len(shape), x.dim()), eps)
    out = centred * scale
    out = out if weight is None else out * weight
    return out if bias is None else out + bias, mean, scale


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,
    channels: int,
    size: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `aten.native_group_norm`, as `x * scale + shift`."""
    parts = x.reshape(n, groups, channels // groups, size)
    _, mean, scale = _statistics(parts, (2, 3), eps)
    wide = scale if weight is None else scale * weight.reshape(1, groups, -1, 1)
    shift = -(mean * wide)
    shift = shift if bias is None else shift + bias.reshape(1, groups, -1, 1)
    out = (parts * wide + shift).reshape(x.shape)
    return out, mean.reshape(n, groups), scale.reshape(n, groups)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `aten.native_batch_norm`, as `x * scale + shift`.

    The running statistics stay as they are.
    """
    across = [1, -1, *[1] * (x.dim() - 2)]
    # a layer without running statistics takes those of the batch in eval mode, too
    if training or running_mean is None or running_var is None:
        _, mean, scale = _statistics(x, [axis for axis in range(x.dim()) if axis != 1], eps)
        kept = mean.reshape(-1), scale.reshape(-1)
    else:
        mean = running_mean.reshape(across)
        scale = (running_var.reshape(across) + eps).rsqrt()
        # torch returns empty tensors here, and a backward in eval mode reads none
        kept = x.new_empty(0), x.new_empty(0)
    wide = scale if weight is None else scale * weight.reshape(across)
    shift = -(mean * wide)
    shift = shift if bias is None else shift + bias.reshape(across)
    return x * wide + shift, *kept


FORWARD_NORMS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.native_layer_norm.default: layer_norm,
    torch.ops.aten.native_group_norm.default: group_norm,
    torch.ops.aten.native_batch_norm.default: batch_norm,
}
"""Operations -> functions with their arguments and results."""


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute `aten.native_layer_norm_backward`, operation by operation as torch's decomposition.

    That one asks a symbolic shape whether it is empty, and so imports sympy, which takes a second
    of the processor (torch/_decomp/decompositions.py).

    Args:
        grad: the gradient of the output, as large as `x`.
        x: the input, whose last axes are normalized.
        shape: the sizes of the axes that are normalized.
        mean: over these axes.
        scale: one over the standard deviation.
        weight: of these sizes, or None.
        bias: of these sizes, or None.
        wanted: whether the gradients of input, weight and bias are wanted.
    """
    inner = list(range(x.dim() - len(shape), x.dim()))
    outer = list(range(x.dim() - len(shape)))
    number = math.prod(shape)
    # torch computes those of a low precision in float32
    is_low = x.dtype in (torch.bfloat16, torch.float16)
    dtype = torch.float32 if is_low else x.dtype
    grad_wide, x_wide = (
        tensor.to(dtype, memory_format=torch.contiguous_format) for tensor in (grad, x)
    )
    normalized = (x_wide - mean) * scale
    into_normalized = grad_wide if weight is None else grad_wide * weight.to(dtype)
    multiple = into_normalized * number
    along = into_normalized.sum(inner, keepdim=True)
    across = (into_normalized * normalized).sum(inner, keepdim=True)
    shared = normalized * across
    centred = multiple - along - shared
    into_x = ((scale / number) * centred).to(x.dtype) if wanted[0] else None
    into_weight: Tensor | None = None
    if wanted[1] and weight is not None:
        terms = grad_wide * normalized
        into_weight = (terms.sum(outer) if outer else terms).to(weight.dtype)
    into_bias: Tensor | None = None
    if wanted[2] and bias is not None:
        into_bias = (grad_wide.sum(outer) if outer else grad_wide.clone()).to(bias.dtype)
    return into_x, into_weight, into_bias


def batch_norm_of_stored(
    rounded: Callable[[Tensor], None],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    _running_mean: Tensor | None,
    _running_var: Tensor | None,
    _training: bool,
    _momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `aten.native_batch_norm` of a batch in training from statistics that are rounded.

    torch on the CPU stores them in the dtype of the input. In bfloat16 a mean of 1 is off by up to
    0.002, and so is every value of its channel, times 10 where the standard deviation is 0.1: the
    results do not add up to 0.

    Args:
        rounded: rounds a tensor in place.
        x: (n, channels, ...).
        weight: (channels,), or None.
        bias: (channels,), or None.
        eps: added to the variance.
    """
    across = [1, -1, *[1] * (x.dim() - 2)]
    _, mean, scale = _statistics(x, [axis for axis in range(x.dim()) if axis != 1], eps)
    rounded(mean)
    rounded(scale)
    out = (x - mean) * scale
    out = out if weight is None else out * weight.reshape(across)
    out = out if bias is None else out + bias.reshape(across)
    rounded(out)
    return out, mean.reshape(-1), scale.reshape(-1)


SELECTING = frozenset(
    (
        "_to_copy",
        "_unsafe_view",
        "abs",
        "arange",
        "amax",
        "amin",
        "aminmax",
        "argmax",
        "argmin",
        "argsort",
        "cat",
        "clone",
        "constant_pad_nd",
        "copy",
        "cummax",
        "cummin",
        "embedding",
        "empty",
        "empty_like",
        "fill",
        "flip",
        "full",
        "full_like",
        "gather",
        "index",
        "index_select",
        "kthvalue",
        "lift_fresh",
        "masked_fill",
        "masked_select",
        "max",
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
        "maximum",
        "median",
        "min",
        "minimum",
        "mode",
        "neg",
        "new_empty",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones",
        "ones_like",
        "relu",
        "roll",
        "scatter",
        "select_backward",
        "sign",
        "slice_backward",
        "sort",
        "stack",
        "threshold_backward",
        "topk",
        "where",
        "zero",
        "zeros",
        "zeros_like",
    )
)
"""Operations without rounding: they copy, select or negate."""

WITHIN_ONE = frozenset(("_softmax", "cos", "erf", "sigmoid", "sin", "tanh"))
"""Operations whose results lie within [-1, 1], also after rounding."""

CANCELLING = frozenset(("gelu", "gelu_backward"))
"""Functions whose formula cancels inside: 1 + erf(x) is 0 to rounding where x is -6, and the result is its product
with the first argument. With tanh in place of erf, the derivative at -7 has 45 times the error of tanh: float64 and
float32 therefore compute it step by step."""

SHIFTED = "_log_softmax"
"""x - m - log(sum(exp(x - m))), m the largest x. Torch rounds the sum, and m plus its logarithm, before it subtracts.
At logits of 0 and -5.5, the sum is 1.0041, which bfloat16 rounds to 1.0078; at logits of 8 and 0, the result for the
first is 0 in place of -3.4e-4. No result is above 0: rounding is monotonic, and m is a number of the precision."""

LARGEST = "logsumexp"
"""At least the largest x, for the same reason. Otherwise exp(x - logsumexp(x)) in its gradient would overflow."""

BATCH_NORM = torch.ops.aten.native_batch_norm.default
IN_TRAINING = 5
"""Place of the argument that says whether the batch's own statistics are used."""

SALT = 0x9E3779B97F4A7C15
OF_SMALLEST = 0.3
"""Factor of the errors -3/2, -1/2, 1/2 and 3/2 in spacings of the smallest numbers: 0 stays 0, others are rounded to
either neighbour."""


@dataclass(frozen=True)
class _Grid:
    """The errors of a precision: one of -3/2, -1/2, 1/2 and 3/2 steps, the same for all values of a
    cell.

    Values that round to the same number have correlated errors: where a sigmoid saturates, all of
    its results round to 1. A cell has the values that round to one number of the precision.

    Attributes:
        step: the spacing of the results of an operation.
        inside: step of its arguments, where it adds up products of them.
        shift: number of lower bits that the values of a cell differ in.
    """

    step: float
    inside: float
    shift: int

    @property
    def rounds_inside(self) -> bool:
        """Whether operations round inside, too."""
        return self.inside > self.step


@cache
def _grid(dtype: torch.dtype) -> _Grid:
    """Return the errors of a dtype.

    Correct rounding has an error of at most 0.6 unit roundoffs in the root mean square. bfloat16
    and float16, whose functions are computed in float32, have 0.7 here. float32 has 1.1, and
    float64 has 1.7: the least accurate of the elementary functions, XLA's tanh, has 1.0. Inside of
    an operation, such as the gradient of layer normalization, these two round several times, and
    bfloat16 and float16 do not round.
    """
    eps = torch.finfo(dtype).eps
    step = {torch.float64: 1.5, torch.float32: 1.0}.get(dtype, 0.6) * eps / 2
    inside = 2 * step if dtype in (torch.float64, torch.float32) else step
    return _Grid(step, inside, round(math.log2(eps)) + 52)


@dataclass(frozen=True)
class _Rounding:
    """What is rounded in an operation: its results, and before them which of its arguments."""

    results: bool
    arguments: tuple[int, ...] = ()
    within_one: bool = False
    cancels: bool = False
    shifted: bool = False
    largest: bool = False


class _RoundingMode(Mode):
    """A mode that runs every operation in its own way, and some as functions of simpler operations."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation."""
        if (decomposed := self._simpler().get(func)) is not None:
            # the mode is off inside of its own dispatch: the simpler operations have to be rounded
            # as well
            with self:
                return decomposed(*args, **(kwargs or {}))
        return self._run(func, args, kwargs or {})

    def _simpler(self) -> dict[Any, Any]:
        """Return the operations that are run as functions of simpler ones, with these functions."""
        raise NotImplementedError

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        raise NotImplementedError


class RandomRounding(_RoundingMode):
    """A mode in which the results of every operation are rounded at random.

    An operation that adds up products rounds each of them, and in an order that is not known. Its
    arguments are therefore rounded, too: where the parts of a sum cancel, the result has an error
    of the size of the parts.

    The error of a value is a hash of the value, in every second draw also of the operation: equal
    values have equal errors, as in arithmetic, and those of another operation may differ.
    """

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype = torch.float64,
        *,
        guarded: bool = False,
        smallest: float = 0.0,
    ) -> None:
        """Prepare a draw.

        Args:
            seed: the seed of the errors.
            dtype: the precision that is simulated.
            guarded: whether the largest numbers, as in the masks of attention, stay finite.
            smallest: spacing of the smallest numbers of the dtypes that take part; 0 for that of
                `dtype`, where this is float64 or float16.
        """
        super().__init__()
        self._dtype = dtype
        self._guarded = guarded
        self._salted = seed % 2 == 1
        # float64 has this spacing among the numbers around the second one; results are cast to
        # float16 anyway
        self._smallest = 0.0 if dtype is torch.float16 else smallest
        self._coarse = 1.5 * 2.0**52 * smallest
        self._hash = random.Random(seed).getrandbits(64)
        self._operations = 0

    def _simpler(self) -> dict[Any, Any]:
        return _decompositions(inside=_grid(self._dtype).rounds_inside)

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the operation with rounding errors."""
        rounding = _rounding_of(func)
        self._operations += self._salted
        given = args
        if rounding.arguments:
            args = tuple(
                self._argument(a) if i in rounding.arguments else a for i, a in enumerate(args)
            )
        if func is BATCH_NORM and args[IN_TRAINING]:
            return batch_norm_of_stored(self._round, *args)
        out = func(*args, **kwargs)
        if not rounding.results and not _narrows(func, args, out):
            return out
        if isinstance(out, torch.Tensor):
            if rounding.cancels:
                out += self._moved(args[0], 1) - args[0]
            if rounding.shifted:
                out += self._shift(args[0], args[1])
            self._round(out, rounding.within_one)
            if rounding.shifted:
                out.clamp_(max=0)
            if rounding.largest:
                # of the arguments before they were moved, of which the result is to be no less
                out.copy_(out.maximum(given[0].amax(*given[1:])))
        elif isinstance(out, list | tuple):
            for value in out:
                self._round(value, rounding.within_one)
        return out

    def _shift(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the error of what `_log_softmax` subtracts from all `x` of a row."""
        largest = x.amax(dim, keepdim=True)
        sums = (x - largest).exp().sum(dim, keepdim=True)
        error = self._moved(largest, 1) - largest + (sums / self._moved(sums, 1)).log()
        return torch.where(error.isfinite(), error, 0.0)

    def _argument(self, value: Any) -> Any:
        if not _is_rounded(value):
            return value
        return self._moved(value, 1)

    def _round(self, value: Any, within_one: bool = False) -> None:
        if not _is_rounded(value):
            return
        moved = self._moved(value, 0)
        if self._guarded:
            moved = torch.where(moved.isfinite(), moved, value)
        if within_one:
            moved = moved.clamp_(-1, 1)
        if self._dtype is torch.float16:
            # numbers below 6e-5 have fewer digits; what overflows is judged apart
            largest = torch.finfo(torch.float16).max
            moved = moved.clamp_(-largest, largest).to(torch.float16)
        value.copy_(moved)

    def _moved(self, value: torch.Tensor, salt: int) -> torch.Tensor:
        """Return a tensor with random errors, in float64."""
        # a part that a model computes in float32 keeps its own precision in a float64 run
        coarser = max(value.dtype, self._dtype, key=lambda dtype: torch.finfo(dtype).eps)
        grid = _grid(coarser)
        value = value.to(torch.float64)
        # odd, so that the product is a permutation of the 64-bit numbers and no two cells share all
        # of their bits
        multiplier = (self._hash + (2 * self._operations + salt) * SALT) % 2**64 | 1
        if multiplier >= 2**63:  # int64 has the same bits as a negative number
            multiplier -= 2**64
        cells = value.view(torch.int64)
        if grid.shift:
            # half of a cell is added first, so that a cell is what rounds to one number, not what
            # is cut to it
            cells = (cells + (1 << (grid.shift - 1))).bitwise_right_shift_(grid.shift)
        steps = cells.mul(multiplier).bitwise_right_shift_(62)  # -2, -1, 0 or 1
        step = grid.inside if salt else grid.step
        if not self._smallest:
            return steps.to(torch.float64).mul_(step).add_(1 + step / 2).mul_(value)
        errors = steps.to(torch.float64).add_(0.5)
        moved = (
            errors.mul(step).add_(1).mul_(value).add_(errors, alpha=OF_SMALLEST * self._smallest)
        )
        # adding and subtracting a large number rounds to its spacing
        return moved.add_(self._coarse).sub_(self._coarse)


def _is_rounded(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.layout is torch.strided
    )


def _narrows(func: Any, args: Sequence[Any], out: Any) -> bool:
    """Return whether an operation casts to a dtype of lower precision, as at the start of a model's
    float32 parts.
    """
    if func.overloadpacket.__name__ != "_to_copy" or not (
        args[0].is_floating_point() and out.is_floating_point()
    ):
        return False
    return torch.finfo(out.dtype).eps > torch.finfo(args[0].dtype).eps


@cache
def _decompositions(*, inside: bool) -> dict[Any, Any]:
    """Return the operations whose result is a difference of sums, as functions of simpler
    operations.

    The gradient of the layer norm of a single number is g - g. Whatever its arguments are, the
    operation returns 0, and torch in a lower precision returns a rounding error of g / sqrt(eps).

    Args:
        inside: whether a normalization rounds inside, the derivative of gelu, and the logarithms of
            sums that the backward of attention reads.
    """
    aten = torch.ops.aten
    names = (
        "native_group_norm_backward",
        "native_batch_norm_backward",
    )
    stepwise = (*names, "gelu_backward") if inside else names
    found = {
        **get_decompositions([getattr(aten, name) for name in stepwise]),
        aten.native_layer_norm_backward.default: layer_norm_backward,
        aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: AttentionBackward(
            inside
        ),
    }
    return {**found, **FORWARD_NORMS} if inside else found


@cache
def _rounding_of(func: Any) -> _Rounding:
    schema = func._schema
    name = func.overloadpacket.__name__
    # a view has the memory of its input: to round it would round the input again
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    # a view has the numbers of its base, which an error would change in place
    if views or name.removesuffix("_") in SELECTING:
        return _Rounding(False)
    # losses take labels, which are exact, and a slope that changes at 0 does not add up
    elementwise = (
        torch.Tag.pointwise in func.tags
        or "prelu" in name
        or "loss" in name
        or "binary_cross" in name
    )
    # an argument that is written to is a result
    read = [i for i, argument in enumerate(schema.arguments) if argument.alias_info is None]
    return _Rounding(
        results=True,
        arguments=() if elementwise else tuple(read),
        within_one=name.removesuffix("_") in WITHIN_ONE,
        cancels=name in CANCELLING,
        shifted=name == SHIFTED,
        largest=name == LARGEST,
    )


# Gradients of parts of a window, and their rounding errors.


Part = tuple[range, float]
"""Some items, and the factor of their loss's gradient in the window's gradient."""


def shared(instance: Instance, window: range, cuts: Sequence[range]) -> list[Part]:
    """Return parts of a window's items, each with the factor of its gradient in the window's
    gradient.
    """
    # the objective of the whole window is no sum of those of its micro-batches
    if instance.problem.reduction == "batch":
        return [(window, 1.0)]
    if instance.problem.reduction == "sum":
        return [(cut, 1.0) for cut in cuts]
    total = float(instance.count(instance.batch(window)))
    return [(cut, float(instance.count(instance.batch(cut))) / total) for cut in cuts]


class Computation:
    """Computes gradients of an instance's loss over parts of its items, in one precision."""

    def __init__(
        self,
        instance: Instance,
        model: torch.nn.Module,
        dtype: torch.dtype,
        compute: Compute = None,
    ) -> None:
        """Prepare the computation.

        Args:
            instance: the instance whose items and loss are used.
            model: a model in `dtype`; its parameters are perturbed and restored.
            dtype: dtype of parameters and floating-point data.
            compute: autocast dtype of the losses, or None.
        """
        self.instance = instance
        self._model = model
        self._dtype = dtype
        self._compute = compute
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        self._batches: dict[range, Batch] = {}
        self._guarded = False

    def on_cpu(self, *parts: Part) -> Computation:
        """Return this computation on the CPU, or itself where the problem computes a part on its
        own device only.

        There a value that rounding moves out of a loss's range raises an exception. A CUDA kernel
        asserts instead, and every later CUDA call of the process fails.
        """
        if self._is_on_cpu:
            return self
        instance = self.instance.on_cpu()
        try:
            model = instance.model(self._dtype)
            model.load_state_dict(self._model.state_dict())
            found = Computation(
                instance,
                model,
                self._dtype,
                self._compute,
            )
            found.gradient(*parts)
        except (RuntimeError, ValueError):
            return self
        return found

    @property
    def _is_on_cpu(self) -> bool:
        return self.instance.device.type == "cpu"

    def gradient(self, *parts: Part) -> Vector:
        """Return the sum of the parts' gradients, (P,).

        Each loss is multiplied by its factor before backward.
        """
        return self._gradient([(self._batch(items), share) for items, share in parts])

    def rounded_at_random(
        self, parts: Sequence[Part], dtype: torch.dtype, draw: int, *, smallest: float = 0.0
    ) -> Vector:
        """Return the sum of the parts' gradients with every operation rounded at random as in a
        dtype, (P,).

        On another device than the CPU, only the parameters are moved: their values are in no loss's
        range.

        Args:
            parts: the parts of the batch whose gradients are added up.
            dtype: the dtype whose rounding errors are drawn.
            draw: number of the draw.
            smallest: spacing of the smallest numbers, as for `RandomRounding`.
        """
        if not self._is_on_cpu:
            return self._at_moved_values(
                parts,
                dtype,
                draw,
                data=False,
            )
        try:
            # once a draw has needed it, all later ones begin guarded
            for guarded in (self._guarded, True):
                with RandomRounding(
                    draw,
                    dtype,
                    guarded=guarded,
                    smallest=smallest,
                ):
                    found = self.gradient(*parts)
                if guarded or np.isfinite(found).all():
                    return found
                # a mask may hold the largest number, which a rounding error makes infinite
                self._guarded = True
        except (RuntimeError, ValueError):
            # a loss may reject values outside of its range: only parameters and inputs are moved
            # then
            return self._at_moved_values(parts, dtype, draw)
        raise AssertionError("a guarded draw returns")

    def _at_moved_values(
        self, parts: Sequence[Part], dtype: torch.dtype, draw: int, *, data: bool = True
    ) -> Vector:
        generator = torch.Generator().manual_seed(draw)
        eps = torch.finfo(dtype).eps
        batches = [(self._batch(items), share) for items, share in parts]
        values = [p.detach().clone() for p in self._model.parameters()]
        try:
            self._put([_moved(value, eps, generator) for value in values])
            if data:
                # a loss may reject a target outside of its range: only the parameters are moved
                # then
                with suppress(RuntimeError, ValueError):
                    moved = [
                        (map_leaves(lambda t: _moved_data(t, eps, generator), b), share)
                        for b, share in batches
                    ]
                    return self._gradient(moved)
            return self._gradient(batches)
        finally:
            self._put(values)

    def _put(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for p, value in zip(self._model.parameters(), values, strict=True):
                p.copy_(value)

    def _batch(self, items: range) -> Batch:
        if items not in self._batches:
            self._batches[items] = self.instance.batch(items, self._dtype)
        return self._batches[items]

    def _gradient(self, batches: Sequence[tuple[Batch, float]]) -> Vector:
        with autocast_context(self.instance.device, self._compute):
            losses = [
                self.instance.problem.loss(self._model, batch) * share for batch, share in batches
            ]
        # a micro-batch whose items reach no parameter has a loss without a graph
        reaching = [loss for loss in losses if loss.requires_grad]
        found: Sequence[torch.Tensor | None] = [None] * len(self._trainable)
        # autograd.grad raises on a loss that needs no gradient, such as one that reaches no
        # parameter
        if reaching:
            found = torch.autograd.grad(reaching, self._trainable, allow_unused=True)
        parts = [
            torch.zeros(p.numel(), dtype=torch.float64) if g is None else _flat(g)
            for p, g in zip(self._trainable, found, strict=True)
        ]
        flat: Vector = torch.cat(parts).numpy()
        return flat


class RoundingErrors:
    """The rounding errors of the sum of some parts' gradients in a dtype, drawn when they are
    needed and kept.
    """

    def __init__(
        self,
        computation: Computation,
        parts: Sequence[Part],
        dtype: torch.dtype,
        *,
        smallest: float = 0.0,
    ) -> None:
        """Prepare the draws.

        Args:
            computation: the float64 computation; the draws are made on the CPU where the problem
                allows it.
            parts: the parts of the batch whose gradients are computed one by one and added up.
            dtype: the precision whose rounding errors are drawn.
            smallest: spacing of the smallest numbers, as for `RandomRounding`.
        """
        self._computation = computation.on_cpu(*parts)
        self._parts = parts
        self._dtype = dtype
        self._smallest = smallest
        self._kept: dict[tuple[int, int], tuple[Vector, Vector]] = {}

    def noise(self, draws: int = DRAWS) -> Vector:
        """Return a bound on the rounding error, (P,): the largest of the bounds of every `DRAWS`
        draws.

        Where a rounding error takes a value past a kink, such as that of a ReLU, the gradient
        jumps. A few of many draws show it, and their root mean square alone would understate it.
        """
        ends = [(first, min(first + DRAWS, draws)) for first in range(0, draws, DRAWS)]
        return np.max(
            [noise_bound(self._mean_square(*end), end[1] - end[0]) for end in ends], axis=0
        )

    def unevenness(self) -> Vector:
        """Return the largest over the smallest mean square of the groups of `MANY_DRAWS` draws,
        (P,).
        """
        groups = [self._mean_square(first, first + DRAWS) for first in range(0, MANY_DRAWS, DRAWS)]
        return np.max(groups, axis=0) / np.maximum(
            np.min(groups, axis=0), np.finfo(np.float64).tiny
        )

    def likely(self, draws: int) -> Vector:
        """Return a smaller bound, (P,), within which an error is taken as right without further
        draws.

        With four draws, an error at this bound is within the bound of 32 draws, of which they are
        the first, in 91% of cases, and a smaller error more often (`docs/bounds.md`).
        """
        return likely_bound(self._mean_square(0, draws))

    def reach(self, values: Vector) -> npt.NDArray[np.bool_]:
        """Return where the gradient has exactly these values in one of `DRAWS` draws, or without
        any error, (P,).
        """
        found: npt.NDArray[np.bool_] = self._centre == values
        for draw in range(DRAWS):
            found |= self._rounded(draw) == values
        return found

    def _rounded(self, draw: int) -> Vector:
        return self._computation.rounded_at_random(
            self._parts, self._dtype, draw, smallest=self._smallest
        )

    def _mean_square(self, first: int, last: int) -> Vector:
        """Return the mean square of the errors of the draws `first` to `last` - 1, without those
        that overflow, (P,).

        The errors are those of the same framework: a difference between two frameworks is not
        rounding error.
        """
        # the longest run of draws from the same beginning is continued, not begun again
        drawn = max(
            (end for start, end in self._kept if start == first and end <= last), default=first
        )
        nothing = np.zeros_like(self._centre)
        total, number = self._kept.get((first, drawn), (nothing, nothing))
        for draw in range(drawn, last):
            with np.errstate(invalid="ignore", over="ignore"):
                square = (self._rounded(draw) - self._centre) ** 2
            finite = np.isfinite(square)
            total = total + np.where(finite, square, 0.0)
            number = number + finite
        self._kept[first, last] = total, number
        return total / np.maximum(number, 1)

    @cached_property
    def _centre(self) -> Vector:
        return self._computation.gradient(*self._parts)


def cancellation(
    computation: Computation, window: range, cuts: Sequence[range], layout: Layout
) -> Vector:
    """Return a bound on the difference of two float64 sums of a window's items, in any order, (P,).

    Args:
        computation: a computation in float64.
        window: the items of the window.
        cuts: the items of each micro-batch.
        layout: the layout of the gradient.
    """
    instance = computation.instance
    items = [range(i, i + 1) for i in window]
    try:
        sizes = [np.abs(computation.gradient(part)) for part in shared(instance, window, items)]
    except (RuntimeError, ValueError):
        # a user's model may reject a single item, but not a micro-batch
        sizes = [np.abs(computation.gradient(part)) for part in shared(instance, window, cuts)]
    return summation_bound(np.sum(sizes, axis=0), len(window), layout)


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.reshape(-1).to("cpu", torch.float64)


def _moved(tensor: torch.Tensor, eps: float, generator: torch.Generator) -> torch.Tensor:
    """Return the tensor with each element moved by an ulp or two away from zero, towards zero, or
    not at all.
    """
    if not tensor.is_floating_point():
        return tensor
    steps = torch.randint(-1, 2, tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
    return tensor * (1 + eps * steps)


def _moved_data(tensor: torch.Tensor, eps: float, generator: torch.Generator) -> torch.Tensor:
    """Return perturbed data; whole numbers are not moved.

    They may be class labels: a loss that tests whether its target is 1 or -1 would take 1.0001 for
    neither, and the change of its value would not be a rounding error.
    """
    moved = _moved(tensor, eps, generator)
    return (
        torch.where(tensor == tensor.round(), tensor, moved)
        if tensor.is_floating_point()
        else moved
    )


# Whether a computation's numbers fit into the range of a lower precision: a gradient that is finite
# in float64 may overflow in float16 without a fault.


MARGIN = 64.0
"""Factor between the largest number of a precision and results whose intermediate terms may exceed it."""


class _Narrowed(_RoundingMode):
    """A mode that rounds the result of every operation to a dtype of lower precision.

    Attributes:
        left: whether a result came near the largest number of the dtype, or is 0 in the dtype
            alone.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self.left = False

    def _simpler(self) -> dict[Any, Any]:
        return _overflowing()

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the operation and round its results."""
        out = func(*args, **kwargs)
        aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
        if all(alias.is_write for alias in aliases):
            values = out if isinstance(out, list | tuple) else [out]
            for value in values:
                # cuDNN's recurrent operation returns its flat weights, which are the model's
                # parameters
                if aliases or not any(value is argument for argument in args):
                    self._round(value)
        return out

    def _round(self, value: Any) -> None:
        if (
            not isinstance(value, torch.Tensor)
            or value.dtype is not torch.float64
            or not value.numel()
        ):
            return
        limits = torch.finfo(self._dtype)
        sizes = value.abs()
        # masks are made of infinities and of the largest number, in every precision
        infinite = value.isinf() | (sizes == torch.finfo(torch.float64).max)
        self.left |= bool((~infinite & (sizes > limits.max / MARGIN)).any())
        # clamped first: what overflows here has been noted, and an infinity would spread
        rounded = value.clamp(-limits.max, limits.max).to(self._dtype).to(torch.float64)
        value.copy_(torch.where(infinite, value, rounded))


@cache
def _overflowing() -> dict[Any, Any]:
    """Return the operations with an intermediate result that overflows, as functions of simpler
    operations.

    torch's soft margin loss is log(1 + exp(-y x)), which is infinite in bfloat16 from an x of 89.
    The gradient of its binary cross entropy is the incoming one times (p - y) / (p (1 - p)), and
    divided by the number of elements only then.
    """
    aten = torch.ops.aten
    names = ("soft_margin_loss", "soft_margin_loss_backward", "binary_cross_entropy_backward")
    return dict(get_decompositions([getattr(aten, name) for name in names]))


def leaves_range(computation: Computation, parts: Sequence[Part], dtype: torch.dtype) -> bool:
    """Return whether parts of a gradient may be infinite or NaN in a dtype where they are finite,
    or vice versa.

    Args:
        computation: the float64 computation.
        parts: the parts of the batch, whose gradients are computed one by one.
        dtype: the lower precision.
    """
    computation = computation.on_cpu(parts[0])
    for part in parts:
        # before the mode, which would round the batch that the computation keeps
        exact = computation.gradient(part)
        mode = _Narrowed(dtype)
        with mode:
            rounded = computation.gradient(part)
        if mode.left or (np.isfinite(rounded) != np.isfinite(exact)).any():
            return True
    return False
