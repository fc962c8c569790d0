"""Normalizations as functions of simpler operations, so that each of these is rounded at random.

A normalization gives the same output whatever is added to all of its inputs, so moved inputs alone show no error. Where
the inputs are large and close together, torch's float32 output has the rounding error of their mean, divided by their
standard deviation: 5e-6 for (-6.7251, -6.8569).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensor = torch.Tensor


def _statistics(x: Tensor, axes: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the centred input, the mean, and one over the standard deviation; the last two keep the axes.

    An error of the mean alone would cancel in the variance. Welford's method, which torch uses, multiplies deviations
    from two partial means, each with an error of its own: each value is therefore rounded before it is centred again.
    """
    mean = x.mean([*axes], keepdim=True)
    centred = x - mean
    again = x * 1.0 - mean
    return centred, mean, ((centred * again).mean([*axes], keepdim=True) + eps).rsqrt()


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `aten.native_layer_norm`: the output, the mean and one over the standard deviation."""
    centred, mean, scale = _statistics(x, range(x.dim() - len(shape), x.dim()), eps)
    out = centred * scale
    out = out if weight is None else out * weight
    return out if bias is None else out + bias, mean, scale


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, channels: int, size: int, groups: int, eps: float
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
    """Compute `aten.native_batch_norm`, as `x * scale + shift`; the running statistics stay as they are."""
    across = [1, -1, *[1] * (x.dim() - 2)]
    if training or running_mean is None or running_var is None:
        _, mean, scale = _statistics(x, [axis for axis in range(x.dim()) if axis != 1], eps)
        kept = mean.reshape(-1), scale.reshape(-1)
    else:
        mean, scale = running_mean.reshape(across), (running_var.reshape(across) + eps).rsqrt()
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

    torch on the CPU stores them in the dtype of the input. In bfloat16 a mean of 1 is off by up to 0.002, and so is
    every value of its channel, times 10 where the standard deviation is 0.1: the results do not add up to 0.

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
