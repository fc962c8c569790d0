"""Export of a loss to a graph of ATen operations, by `torch.export`.

Only operations that are missing from the table are decomposed. Where torch has its own derivative formula for an
operation, the table's entry follows that formula's conventions; a decomposition would lose them.
"""

from __future__ import annotations

import io
import logging
import math
import operator
import re
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram, default_decompositions

from gradcheck_suite.bridge import ops as _ops  # noqa: F401  (fills the table)
from gradcheck_suite.bridge.custom_gradients import functions_of, restored
from gradcheck_suite.bridge.errors import NotExportable, RandomnessError, UnknownOperation
from gradcheck_suite.bridge.op_table import lowering_of
from gradcheck_suite.bridge.own_backwards import ACCEPTED, exported_functions
from gradcheck_suite.bridge.rewrites import EXPERTS, LOSS, in_a_copy_of, rewrite_of
from gradcheck_suite.bridge.source_lines import Place, place_of_error, source_line
from gradcheck_suite.execution.batches import leaves, map_leaves
from gradcheck_suite.schema.contract import Batch

LossFunction = Callable[[nn.Module, Batch], torch.Tensor]
_GRAD_MODE = "wrap_with_set_grad_enabled"
_IN_ORDER = "with_effects"


class _LossModule(nn.Module):
    """The loss as a module whose inputs are the batch's tensors, in the order of `leaves`."""

    def __init__(self, model: nn.Module, loss: LossFunction, batch: Batch) -> None:
        super().__init__()
        self.model = model
        self._loss, self._batch = _named_forward(loss), batch

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the loss of the batch made of these tensors."""
        remaining = iter(tensors)
        return self._loss(self.model, map_leaves(lambda _: next(remaining), self._batch))


def _named_forward(function: Any) -> Any:
    """Return a copy of a function named `forward`: export records source lines for frames of that name only."""
    if not isinstance(function, FunctionType):
        return function
    code = function.__code__.replace(co_name="forward")
    copy = FunctionType(code, function.__globals__, "forward", function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@dataclass(frozen=True)
class Exported:
    """An exported loss.

    Attributes:
        program: the exported and decomposed program.
        default_float: torch's default dtype at export, to which some operations convert integers.
    """

    program: ExportedProgram
    default_float: torch.dtype


def export_loss(model: nn.Module, loss: LossFunction, batch: Batch, own_backwards: Collection[type] = ()) -> Exported:
    """Export `loss(model, batch)` at this batch's shapes.

    Args:
        model: a module.
        loss: (model, batch) -> scalar tensor.
        batch: a tree of dicts, lists and tuples of tensors.
        own_backwards: custom functions, beside the accepted ones, whose own backward the graph calls.

    Raises:
        BridgeError: the loss has a gradient hook, or is not a scalar.
        NotExportable: `torch.export` cannot export the loss; the message says what to do.
        UnknownOperation: an operation is not in the table.
        RandomnessError: the loss draws random numbers.
    """
    functions = functions_of(model, loss, batch)
    tensors = tuple(leaves(batch))
    module = _LossModule(model, loss, batch)
    module.training = model.training  # `train()` would change the submodules that are in eval mode
    with _quiet(), _operations_listed_once(), exported_functions(functions, ACCEPTED.union(own_backwards)):
        try:
            program = torch.export.export(module, tensors, strict=False)
        except Exception as error:
            raise _not_exportable(error, model, loss, batch) from error
        for graph_module in _graph_modules(program.graph_module):
            _stop_gradients_without_grad(graph_module)
        program = program.run_decompositions(_decompositions())
    for node in program.graph.nodes:
        _check(node)
    return Exported(program, torch.get_default_dtype())


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress export's deprecation warnings, and the graphs that it logs and prints when it fails."""
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        before, trace = logging.root.manager.disable, logging.getLogger("torch.__trace")
        traced = trace.disabled
        logging.disable(logging.CRITICAL)
        # `logging.disable` does not reach this logger, and pytest prints its output under a failing test
        trace.disabled = True
        try:
            yield
        finally:
            logging.disable(before)
            trace.disabled = traced


@contextmanager
def _operations_listed_once() -> Iterator[None]:
    """Let torch list its composite operations once: it does so three times for each namespace of operations.

    That takes half of the time of a small export (torch 2.13); not reported upstream as far as known.
    """
    with ExitStack() as undo:
        utilities, name = torch._export.utils, "_materialize_cpp_cia_ops"
        if (listing := getattr(utilities, name, None)) is not None:
            setattr(utilities, name, cache(listing))
            undo.callback(setattr, utilities, name, listing)
        yield


def _decompositions() -> Any:
    """Return torch's decompositions of the operations that the table lacks."""
    decompositions = default_decompositions()
    for op in list(decompositions):
        if isinstance(op, torch._ops.OpOverload) and lowering_of(op) is not None:
            del decompositions[op]
    return decompositions


def _graph_modules(root: fx.GraphModule) -> Iterator[fx.GraphModule]:
    for module in root.modules():
        if isinstance(module, fx.GraphModule):
            yield module


# run_decompositions drops no_grad regions (torch 2.13); not reported upstream as far as known
def _stop_gradients_without_grad(graph_module: fx.GraphModule) -> None:
    """Detach the arguments of every operation inside a `no_grad` region: decomposition drops such regions."""
    for node in list(graph_module.graph.nodes):
        if getattr(node.target, "__name__", "") != _GRAD_MODE or node.args[0]:
            continue
        region = getattr(graph_module, node.args[1].target)
        for inner in list(region.graph.nodes):
            if inner.op != "call_function" or inner.target is operator.getitem:
                continue
            if not isinstance(inner.target, torch._ops.OpOverload):
                continue
            detached = partial(_detached, region.graph)
            with region.graph.inserting_before(inner):
                inner.args = fx.map_arg(inner.args, detached)
                inner.kwargs = fx.map_arg(inner.kwargs, detached)
        region.recompile()


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return node
    detached = graph.call_function(torch.ops.aten.detach.default, (node,))
    detached.meta = dict(node.meta)
    return detached


def operation_of(node: fx.Node) -> Any:
    """Return what a call calls: of an operation that export keeps in order by a token, the operation."""
    return node.args[1] if getattr(node.target, "__name__", "") == _IN_ORDER else node.target


def _check(node: fx.Node) -> None:
    """Raise an error for an operation that has no JAX implementation."""
    op = operation_of(node)
    if node.op != "call_function" or not isinstance(op, torch._ops.OperatorBase):
        return
    name = _name(op)
    if isinstance(op, torch._ops.OpOverload):
        if lowering_of(op) is not None:
            return
        if torch.Tag.nondeterministic_seeded in op.tags:
            raise RandomnessError(random_message(f"{name} draws random numbers", node))
    register = f"register one with @gradcheck_suite.bridge.register_op({name!r}) on a function of JAX arrays, or "
    advice = f"{register if isinstance(op, torch._ops.OpOverload) else ''}replace the operation"
    raise UnknownOperation(f"the bridge has no JAX implementation of {name}{source_line(node)}: {advice}")


def random_message(what: str, node: fx.Node) -> str:
    """Return the message of a `RandomnessError`."""
    return (
        f"{what}{source_line(node)}: torch and JAX would draw different numbers. Set its probability to 0, "
        "or make the random numbers part of the batch"
    )


def _name(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else f"torch.ops.higher_order.{target}"


def _not_exportable(error: Exception, model: nn.Module, loss: LossFunction, batch: Batch) -> NotExportable:
    text = " ".join(str(error).split())
    kind = type(error).__name__
    depends = "DataDependent" in kind or "data-dependent" in text.lower() or "unbacked" in text.lower()
    place, rewrite = place_of_error(error), ""
    if any(frame.name == "_detect_is_causal_mask" for frame in traceback.extract_tb(error.__traceback__)):
        advice = (
            "torch.nn's transformer compares the values of its mask with a causal one: say which it is, with is_causal "
            "(of nn.Transformer tgt_is_causal, src_is_causal) beside the mask"
        )
    elif depends:
        advice = (
            "the loss takes a Python decision (if, while, int(), an index) on the values of tensors, which JAX would "
            "not repeat. Write it with torch.where or masks, or compute the decision in Problem.batch"
        )
        if place is not None:
            rewrite = _rewrite(place, model, loss, batch)
    elif "fake tensor in the exported program" in text:
        advice = "tensor.data cannot be exported: write tensor.detach()"
    else:
        advice = "make the loss exportable (torch.export.export with strict=False), or check this loop without JAX"
    reason = re.split(r"(?<=[.:)]) (?=[A-Z(])", text, maxsplit=1)[0].rstrip(". ")
    where = "" if place is None else f" ({Path(place.file).name}, line {place.number}: {place.line})"
    return NotExportable(f"torch.export does not take this loss{where}: {kind}: {reason[:200]}; {advice}", rewrite)


def _rewrite(place: Place, model: nn.Module, loss: LossFunction, batch: Batch) -> str:
    """Return the lines that help where a loss takes a decision at a place."""
    if "expert" in place.line and hasattr(model, "set_experts_implementation"):
        return EXPERTS
    if _of_logits_helps(model, loss, batch):
        return LOSS
    lines = rewrite_of(place.line)
    return in_a_copy_of(place.function, lines) if place.is_a_librarys and "<" not in place.function else lines


def _of_logits_helps(model: nn.Module, loss: LossFunction, batch: Batch) -> bool:
    """Return whether the model has logits whose loss, as in `LOSS`, is the same and can be exported."""
    if not (isinstance(batch, dict) and "labels" in batch):
        return False
    names: dict[str, Any] = {"torch": torch}
    exec(LOSS, names)
    try:
        with restored(model):
            values = [function(model, map_leaves(torch.clone, batch)).item() for function in (names["loss"], loss)]
        module = _LossModule(model, names["loss"], batch)
        torch.export.export(module, tuple(leaves(batch)), strict=False)
    except Exception:  # any: the model is unknown
        return False
    return math.isclose(*values, rel_tol=1e-5)
