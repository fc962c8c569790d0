"""Calls of losses in a running script: where they stand, and what their graph says of their weights."""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import os
import sys
import sysconfig
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn import functional
from torch.nn._reduction import legacy_get_string
from torch.utils.hooks import unserializable_hook

from gradcheck_suite.core.comparison import UNIT_ROUNDOFF

# The modules and optimizers of a program that were made before it was watched.


def _subclasses(kind: type) -> set[type]:
    children: list[type] = type.__subclasses__(kind)
    return {kind}.union(*map(_subclasses, children))


def living(kind: type) -> list[Any]:
    """Return every object of a class that the garbage collector knows; lazy proxies are not touched."""
    kinds = _subclasses(kind)
    return [thing for thing in gc.get_objects() if type(thing) in kinds]


# Places in the user's program, read off the stack: `train.py:12`.


_TORCH = os.path.dirname(torch.__file__) + os.sep
_SUITE = str(Path(__file__).parent) + os.sep
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class Place:
    """A place in the program.

    Attributes:
        line: `file:line` of the innermost frame outside torch and the suite.
        path: `file:line` of every frame of the user's own files, innermost first.
    """

    line: str
    path: tuple[str, ...]


NOWHERE = Place("?", ())


@lru_cache(maxsize=4096)
def _kind(filename: str) -> str:
    """Return `skip`, `library` or `user` for a source file."""
    if filename.startswith(("<frozen", "<eval_with_key>", _TORCH, _SUITE)) or filename == contextlib.__file__:
        return "skip"
    return "library" if filename.startswith(_INSTALLED) else "user"


@lru_cache(maxsize=4096)
def _shown(filename: str) -> str:
    try:
        relative = os.path.relpath(filename)
    except ValueError:
        return filename
    return filename if relative.startswith("..") else relative


DENOMINATOR = "num_items_in_batch"
"""The argument in which transformers' Trainer hands a loss the count of the window, over all its micro-batches."""


def declared_denominator() -> Any:
    """Return the count that a trainer has handed to the function that calls a loss, or None."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(8):
        if frame is None:
            break
        if DENOMINATOR in frame.f_code.co_varnames:
            return frame.f_locals.get(DENOMINATOR)
        frame = frame.f_back
    return None


def here() -> Place:
    """Return the place in the user's program that runs; frames of torch and of the suite are left out."""
    frame: FrameType | None = sys._getframe(1)
    line, path = "", []
    while frame is not None:
        filename = frame.f_code.co_filename
        kind = _kind(filename)
        if kind != "skip":
            if not line:
                line = f"{_shown(filename)}:{frame.f_lineno}"
            if kind == "user":
                path.append(f"{_shown(filename)}:{frame.f_lineno}")
        frame = frame.f_back
    return Place(line, tuple(path)) if line else NOWHERE


# The scalar end of an autograd graph: which recognised losses a tensor is made of, and what else.


SCALAR_NODES = {
    f"{name}Backward{version}"
    for version in (0, 1)
    for name in (
        *("Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Mean", "Sum", "Dot", "Pow", "Exp", "Cumsum", "ClampMin"),
        *("Stack", "Cat", "Where", "Index", "MaskedSelect", "MaskedFill", "MaskedScatter"),
        *("Select", "Slice", "Split", "Unbind"),
        *("ToCopy", "Clone", "View", "UnsafeView", "ReshapeAlias", "Expand", "Squeeze", "Unsqueeze", "Permute", "T"),
        *("Transpose", "Alias", "NanToNum"),
    )
}
"""Arithmetic between the results of losses and what goes backward."""
REDUCTIONS = ("MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1")
OPAQUE = ("torch::autograd::AccumulateGrad", "CheckpointFunctionBackward")
"""Nodes that say nothing about a loss: parameters, and regions that are computed again in backward."""
LOG_PROBABILITIES = ("ChunkedLogProbFunctionBackward",)
"""Functions of other packages whose first result is the log-probability of each target: trl's fused head and loss."""
MAX_NODES = 2000


KEY = "gradcheck_suite call"
"""The entry of a node's metadata that refers to the call that made it, weakly: a reference from the call to the node
would be a cycle through C++ that keeps the graph of a loss that never goes backward."""


def mark(node: Any, call: Any) -> None:
    """Note which call made the result that a node belongs to."""
    node.metadata[KEY] = weakref.ref(call)


@dataclass
class Reached:
    """What a node is made of by arithmetic.

    Attributes:
        calls: recognised calls of losses.
        log_probabilities: nodes that compute the log-probability of each target.
        other: the name of the first node that is none of these.
        summands: call -> node of the elements that a mean, sum or dot product adds up and that the call is part of,
            such as the product of an unreduced loss and the weights of its samples.
    """

    calls: list[Any] = field(default_factory=list)
    log_probabilities: list[Any] = field(default_factory=list)
    other: str | None = None
    summands: dict[Any, Any] = field(default_factory=dict)


def reached(node: Any) -> Reached:
    """Return what a node is made of.

    Args:
        node: of the tensor that goes backward.
    """
    found = Reached()
    queue: list[tuple[Any, Any]] = [(node, None)]
    seen: dict[Any, Any] = {}
    added_twice = False
    while queue and len(seen) < MAX_NODES:
        current, summand = queue.pop()
        if current is None or current in seen:
            added_twice |= current is not None and seen[current] is not summand
            continue
        seen[current] = summand
        name, reference = current.name(), current.metadata.get(KEY)
        if reference is not None:
            call = reference()
            found.calls.append(call)
            if call is not None and summand is not None and summand is not current:
                found.summands[call] = summand
        elif name in SCALAR_NODES:
            below = current if name == "DotBackward0" else summand
            queue.extend((child, child if name in REDUCTIONS else below) for child, _ in current.next_functions)
        elif name in LOG_PROBABILITIES:
            found.log_probabilities.append(current)
        elif name not in OPAQUE:
            found.other = found.other or name
    if added_twice:
        # elements that several sums share have no common weight
        found.summands.clear()
    return found


# The losses of `torch.nn.functional`: what each call divides by, read off its arguments.
#
# One row of `LOSSES` for each function. A count stays a tensor where it was computed from tensors, so that a GPU is
# not waited for before the optimizer's step.


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


# Calls of loss functions, and the cotangents that backward hands to their results.
#
# A mean that divides by n and receives the cotangent c weighs each of its items c / n, a sum weighs each c. An
# unreduced loss receives a cotangent for each element: the weight itself. Where the user has multiplied its elements
# by weights of the samples, the cotangent of the products is the weight of each sample beside those.


DECLARED = "objective"
"""The name of a call that `gradcheck_suite.objective` declares."""


@dataclass(eq=False)
class Call:
    """One call of a loss function whose result requires a gradient.

    Attributes:
        name: of the function.
        place: of the call.
        counted: what it counts.
        target: storage address, first byte and last byte of the target: parts of one tensor are told from whole ones.
        declared: the count by which the trainer has it divided, or None where that is not known.
        inner: whether the call is part of another one that was declared, or of a gradient that is not accumulated.
    """

    name: str
    place: Place
    counted: Counted
    target: tuple[int, int, int] | None
    inner: bool = False
    declared: Any = None
    summand: torch.Tensor | None = None


@dataclass(eq=False)
class Summands:
    """The cotangent of the elements that a reduction adds up, and that an unreduced loss is part of.

    Attributes:
        low: its smallest element.
        high: its largest element.
        elements: number of its elements.
        total: sum of the cotangent of the loss: `high` times the sum of the samples' weights.
    """

    low: Number
    high: Number
    elements: int
    total: Number


@dataclass(eq=False)
class Received:
    """The cotangent that one backward pass handed to a call.

    Attributes:
        call: the call.
        low: the smallest weight of an item that is not 0; with `high` equal where all items weigh the same.
        high: the largest weight of an item.
        items: what the weights are spread over: the divisor of a mean, the elements with a weight for `"none"`.
        unit: unit roundoff of the cotangent.
        ordinal: index of the call among those of its line in this backward pass, in the order of the calls.
        summands: of an unreduced loss whose elements the user has multiplied before a reduction.
    """

    call: Call
    low: Number
    high: Number
    items: Number
    unit: float
    ordinal: int = field(default=0)
    summands: Summands | None = None

    def settle(self) -> None:
        """Turn what is on a device into numbers; waits for the device."""
        self.low, self.high, self.items = float(self.low), float(self.high), float(self.items)
        if (of := self.summands) is not None:
            of.low, of.high, of.total = float(of.low), float(of.high), float(of.total)


def target_place(target: Any) -> tuple[int, int, int] | None:
    """Return where a target lies in memory: storage address, first byte, last byte; None where it has none."""
    if type(target) is not torch.Tensor or target.layout != torch.strided or not target.numel():
        return None
    first = int(target.storage_offset() * target.element_size())
    last = first + sum((n - 1) * s for n, s in zip(target.shape, target.stride(), strict=True)) * target.element_size()
    return target.untyped_storage().data_ptr(), first, int(last)


def received(call: Call, cotangent: torch.Tensor) -> Received:
    """Read the weights of a call's items off the cotangent of its result."""
    g = cotangent.detach()
    unit = UNIT_ROUNDOFF.get(str(g.dtype).removeprefix("torch."), UNIT_ROUNDOFF["float32"])
    counted = call.counted
    if counted.reduction == "none" and g.dim():
        weighted = g != 0
        if counted.valid is not None:
            weighted &= counted.valid.reshape(g.shape)
        infinity = torch.full((), torch.inf, dtype=g.dtype, device=g.device)
        high = torch.where(weighted, g, -infinity).max()
        low = torch.where(weighted, g, infinity).min()
        found = Received(call, low, high, weighted.sum(), unit)
        if (of := call.summand) is not None and of.numel():
            elements = of.numel() if of.dim() else counted.elements
            found.summands = Summands(of.min(), of.max(), elements, g.sum())
        return found
    weight: Number = g if g.device.type != "cpu" else float(g)
    divisor = counted.divisor if g.device.type != "cpu" else float(counted.divisor)
    if counted.reduction == "mean":
        weight = weight / divisor if isinstance(divisor, torch.Tensor) or divisor else 0.0
    return Received(call, weight, weight, divisor, unit)


def watch(output: torch.Tensor, call: Call, receive: Callable[[Call, torch.Tensor], None]) -> None:
    """Call `receive` with the cotangent of a call's result in every backward pass that reaches it."""

    @unserializable_hook  # type: ignore[untyped-decorator]
    def hook(cotangent: torch.Tensor) -> None:
        receive(call, cotangent)

    mark(output.grad_fn, call)
    output.register_hook(hook)


def watch_summands(node: Any, call: Call) -> None:
    """Note the cotangent of a node's result in the next backward pass, for a call that the result is made of."""

    def hook(cotangents: Any) -> None:
        handle.remove()
        call.summand = None if cotangents[0] is None else cotangents[0].detach()

    handle = node.register_prehook(hook)
