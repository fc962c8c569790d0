"""The losses of `torch.nn.functional`: what each call divides by, read off its arguments.

One row of `LOSSES` for each function. A count stays a tensor where it was computed from tensors, so that a GPU is not
waited for before the optimizer's step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional
from torch.nn._reduction import legacy_get_string

Number = float | torch.Tensor
Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Counted:
    """What one call of a loss function counts.

    Attributes:
        reduction: `"mean"`, `"sum"` or `"none"`.
        divisor: what the call's mean divides by: elements, targets not ignored, or the sum of their class weights.
        rows: the size of the leading dimension, 1 where there is none.
        elements: number of elements of the unreduced loss.
        valid: for `"none"`, which elements of the unreduced loss count; None where all do.
    """

    reduction: str
    divisor: Number
    rows: int
    elements: int
    valid: torch.Tensor | None = None


def _reduction(a: Arguments) -> str:
    if a.get("size_average") is not None or a.get("reduce") is not None:
        return legacy_get_string(a.get("size_average"), a.get("reduce"), emit_warning=False)
    return a["reduction"]


def _rows(x: torch.Tensor) -> int:
    return int(x.shape[0]) if x.dim() else 1


def _all_elements(*names: str) -> Callable[[Arguments], Counted]:
    """The mean divides by the number of elements, arguments broadcast."""

    def count(a: Arguments) -> Counted:
        tensors = [a[name] for name in names if isinstance(a[name], torch.Tensor)]
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
        elements = math.prod(shape)
        return Counted(_reduction(a), float(elements), shape[0] if shape else 1, elements)

    return count


def each(x: torch.Tensor) -> Counted:
    """Return the count of an unreduced loss of the shape of `x`."""
    return Counted("none", float(x.numel()), _rows(x), x.numel())


def _weighted_elements(a: Arguments) -> Counted:
    """As `_all_elements`; with `weight` the mean divides by the sum of the weights."""
    counted = _all_elements("input", "target")(a)
    weight = a.get("weight")
    if weight is None:
        return counted
    return Counted(counted.reduction, weight.detach().sum(), counted.rows, counted.elements)


def _batch(name: str, dims: int) -> Callable[[Arguments], Counted]:
    """The mean divides by the size of the leading dimension; an input of fewer than `dims` dimensions is one item."""

    def count(a: Arguments) -> Counted:
        x = a[name]
        rows = int(x.shape[0]) if x.dim() >= dims else 1
        return Counted(_reduction(a), float(rows), rows, rows)

    return count


def _leading(a: Arguments) -> Counted:
    """The mean divides by all dimensions but the last."""
    x = a["input"]
    rows = math.prod(x.shape[:-1])
    return Counted(_reduction(a), float(rows), _rows(x) if x.dim() > 1 else 1, rows)


def _ctc(a: Arguments) -> Counted:
    x = a["log_probs"]
    rows = int(x.shape[1]) if x.dim() == 3 else 1
    return Counted(a["reduction"], float(rows), rows, rows)


def _kl_div(a: Arguments) -> Counted:
    counted = _all_elements("input", "target")(a)
    if counted.reduction != "batchmean":
        return counted
    # a scalar input is divided by nothing
    divisor = counted.rows if a["input"].dim() else 1
    return Counted("mean", float(divisor), counted.rows, counted.elements)


def _negative_log_likelihood(a: Arguments) -> Counted:
    target, weight = a["target"].detach(), a.get("weight")
    reduction = _reduction(a)
    if target.is_floating_point():
        # class probabilities: the mean divides by the batch, whatever the class weights
        shape = (target.shape[0], *target.shape[2:]) if target.dim() > 1 else ()
        items = math.prod(shape)
        return Counted(reduction, float(items), _rows(target) if target.dim() > 1 else 1, items)
    ignore_index = a.get("ignore_index")
    valid = target != (-100 if ignore_index is None else ignore_index)
    if weight is None:
        divisor: Number = valid.sum()
    else:
        divisor = (weight.detach()[torch.where(valid, target, 0)] * valid).sum()
    return Counted(reduction, divisor, _rows(target), target.numel(), valid if reduction == "none" else None)


LOSSES: dict[str, Callable[[Arguments], Counted]] = {
    "binary_cross_entropy": _all_elements("input", "target"),
    "binary_cross_entropy_with_logits": _all_elements("input", "target"),
    "cosine_embedding_loss": _batch("input1", 2),
    "cross_entropy": _negative_log_likelihood,
    "ctc_loss": _ctc,
    "gaussian_nll_loss": _all_elements("input", "target"),
    "hinge_embedding_loss": _all_elements("input", "target"),
    "huber_loss": _all_elements("input", "target"),
    "kl_div": _kl_div,
    "l1_loss": _weighted_elements,
    "linear_cross_entropy": _negative_log_likelihood,
    "margin_ranking_loss": _all_elements("input1", "input2", "target"),
    "mse_loss": _weighted_elements,
    "multi_margin_loss": _batch("input", 2),
    "multilabel_margin_loss": _batch("input", 2),
    "multilabel_soft_margin_loss": _leading,
    "nll_loss": _negative_log_likelihood,
    "poisson_nll_loss": _all_elements("input", "target"),
    "smooth_l1_loss": _all_elements("input", "target"),
    "soft_margin_loss": _all_elements("input", "target"),
    "triplet_margin_loss": _batch("anchor", 2),
    "triplet_margin_with_distance_loss": _batch("anchor", 2),
}
"""The name of each loss function in `torch.nn.functional` -> what a call of it counts."""

TARGETS = ("target", "targets")
"""The names of the arguments that tell one part of a batch from another."""


@cache
def _signature(name: str) -> inspect.Signature:
    # the function that the audit replaced names the original as `__wrapped__`, which `signature` follows
    return inspect.signature(getattr(functional, name))


def counted(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Counted, Any]:
    """Return what a call of a loss function counts, and its target (None where it has none).

    Args:
        name: of the function in `torch.nn.functional`.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    bound = _signature(name).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    target = next((arguments[key] for key in TARGETS if key in arguments), None)
    return LOSSES[name](arguments), target
