"""A torch loss as a graph of ATen operations, with the user's own backward functions kept."""

from __future__ import annotations

import ast
import io
import linecache
import logging
import math
import re
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import cache, partial, reduce
from itertools import count
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import fx, nn
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram, default_decompositions
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gradcheck_suite.bridge import ops as _ops  # noqa: F401  (fills the table)
from gradcheck_suite.bridge.op_table import (
    Array,
    BridgeError,
    NotExportable,
    RandomnessError,
    UnknownOperation,
    is_float,
    lowering_of,
    register_op,
)
from gradcheck_suite.core.contract import Batch
from gradcheck_suite.core.frames import is_outside_torch
from gradcheck_suite.errors import UsageError
from gradcheck_suite.run.functions import Forward, kinds_of, replaced_forwards
from gradcheck_suite.run.instance import map_leaves, tensor_leaves

_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>[^\n]*)'
)


def source_line(node: fx.Node) -> str:
    """Return ` (FILE, line N: code)` of the innermost frame in the user's code, or an empty string."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    if not frames:
        return ""
    frame = ([f for f in frames if is_outside_torch(f["file"])] or frames)[-1]
    return f" ({Path(frame['file']).name}, line {frame['line']}: {frame['code'].strip()})"


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's code, or of a library other than torch.

    Attributes:
        file: its path.
        number: of the line.
        line: its code.
        function: the function's full name, with its module.
    """

    file: str
    number: int
    line: str
    function: str


def place_of_error(error: BaseException) -> SourceLine | None:
    """Return an exception's innermost line in the user's code, or None."""
    # `walk_tb` begins with the outermost frame
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        code = frame.f_code
        if is_outside_torch(code.co_filename):
            line = linecache.getline(code.co_filename, number).strip()
            return SourceLine(
                code.co_filename,
                number,
                line,
                f"{frame.f_globals.get('__name__')}.{code.co_qualname}",
            )
    return None


LOSS = """\
def loss(model, batch):
    # without the labels, the model takes no decision on them
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), ignore_index=-100)"""
EXPERTS = """\
# every expert's share in products of matrices, without a loop over the experts that are hit
model.set_experts_implementation("batched_mm")"""
LOOP = """\
# every part for all rows; rows that do not belong to it have weight 0
for number, part in enumerate(parts):
    belongs = (choice == number).unsqueeze(-1)
    out = out + torch.where(belongs, part(x), 0)"""
ROUNDS = """\
# as many rounds as can occur; a round too many changes nothing
for number in range(most):
    x = torch.where({condition}, one_round(x), x)"""
BRANCHES = """\
# both branches are computed; the gradient follows the one whose condition holds
chosen = torch.where({condition}, value_if_true, value_if_false)"""
ASSERTION = (
    "# an assertion has no gradient: leave it out of the loss, and check the condition where the"
    " batch is drawn"
)
NUMBER = """\
# the number is data: compute it where the batch is drawn, and read it as a tensor in the loss
def batch(items, seed):
    drawn = draw(items, seed)
    return {**drawn, "number": number_of(drawn)}"""
COPY = """\
# in a copy of {name}, which `{name} = copy` puts in its place:
{lines}"""


class _Tensors(ast.NodeTransformer):
    """Turns what decides on a value into what computes with it: `a if c else b`, `and`, `or`,
    `not`, `float`.
    """

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        return _call("where", node.test, node.body, node.orelse)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        # `and` and `or` ask a tensor for its truth, `&` and `|` compute with it
        return _joined(node.values, ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr())

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return _call("logical_not", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        sides = [node.left, *node.comparators]
        pairs = zip(sides, node.ops, sides[1:], strict=False)
        return _joined(
            [ast.Compare(left, [op], [right]) for left, op, right in pairs], ast.BitAnd()
        )

    def visit_Slice(self, node: ast.Slice) -> ast.expr:
        return node  # a length must be a number

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Name("float"), [number]) | ast.Call(
                ast.Attribute(number, "item"), []
            ):
                return ast.Call(ast.Attribute(number, "detach", ast.Load()), [], [])
        return node


def _call(function: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(
        ast.Attribute(ast.Name("torch", ast.Load()), function, ast.Load()), list(arguments), []
    )


def _joined(parts: list[ast.expr], operator: ast.operator) -> ast.expr:
    return reduce(lambda left, right: ast.BinOp(left, operator, right), parts)


def _computed(code: str) -> str:
    return ast.unparse(ast.fix_missing_locations(_Tensors().visit(ast.parse(code))))


def rewrite_of(line: str) -> str:
    """Return lines of Python that take no decision on data, in place of a line that does."""
    try:
        # a header needs a body, and `elif` would need an `if`
        (statement,) = ast.parse(
            f"{line.removeprefix('el')} pass" if line.endswith(":") else line
        ).body
    except (SyntaxError, ValueError):
        return NUMBER
    match statement:
        case ast.For(iter=ast.Call(ast.Name("range"), [*_, end])):
            return ROUNDS.format(condition=f"number < {ast.unparse(end)}")
        case ast.For():
            return LOOP
        case ast.While(test):
            return ROUNDS.format(condition=_computed(ast.unparse(test)))
        case ast.If(test):
            return BRANCHES.format(condition=_computed(ast.unparse(test)))
        case ast.Assert():
            return ASSERTION
    computed = _computed(line)
    return NUMBER if computed == ast.unparse(ast.parse(line)) else computed


_CUSTOM_OPERATION = "GeneratedBackwardFor_"
"""Prefix of the functions that torch makes of custom operations."""
_ADVICE = (
    "torch.export keeps only the forward, so JAX would differentiate that and rightly disagree. "
    "Check this loop without JAX, or change the gradient by an operation of the forward"
)


class _HookRecorder(TorchFunctionMode):
    """Records whether the forward registers a hook on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.hooked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.hooked = self.hooked or func is torch.Tensor.register_hook
        return func(*args, **(kwargs or {}))


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore the buffers and torch's random state afterwards."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _refuse_changing_hooks(
    model: nn.Module, loss: Callable[..., torch.Tensor], batch: Batch
) -> None:
    """Refuse a module whose backward hook changes a gradient.

    One that only looks at it is no matter.
    """
    hooked = {
        name: m for name, m in model.named_modules() if m._backward_hooks or m._backward_pre_hooks
    }
    wanted = [p for p in model.parameters() if p.requires_grad]

    def gradient() -> list[torch.Tensor]:
        # the program's own gradients, which are put back below
        kept = [p.grad for p in wanted]
        for p in wanted:
            p.grad = None
        with restored(model), torch.enable_grad():
            # not `torch.autograd.grad`, which reentrant checkpointing refuses
            loss(model, map_leaves(torch.clone, batch)).backward()
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in wanted]
        for p, grad in zip(wanted, kept, strict=True):
            p.grad = grad
        return found

    for name, module in hooked.items():
        with (
            mock.patch.object(module, "_backward_hooks", OrderedDict()),
            mock.patch.object(module, "_backward_pre_hooks", OrderedDict()),
        ):
            without = gradient()
        if not all(
            map(partial(torch.allclose, rtol=1e-12, atol=0.0, equal_nan=True), gradient(), without)
        ):
            raise BridgeError(
                f"the module {name!r} has a backward hook that changes a gradient: {_ADVICE}"
            )


def custom_code_of(
    model: nn.Module, loss: Callable[..., torch.Tensor], batch: Batch
) -> frozenset[type]:
    """Run the loss once in torch and return the classes of its custom functions, custom operations
    left out.

    Args:
        model: the model; its buffers and torch's random state are restored.
        loss: (model, batch) -> scalar tensor.
        batch: a tree of dicts, lists and tuples of tensors.

    Raises:
        BridgeError: the loss is not a floating-point scalar, or has a gradient hook, which the
            message names.
    """
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise BridgeError(f"the parameter {name!r} has a gradient hook: {_ADVICE}")
    recorder = _HookRecorder()
    # the caller may have gradients off, and hooks are registered only where there are some
    with restored(model), recorder, torch.enable_grad():
        value = loss(model, map_leaves(torch.clone, batch))
    if recorder.hooked:
        raise BridgeError(f"the forward registers a gradient hook on a tensor: {_ADVICE}")
    if not isinstance(value, torch.Tensor) or value.ndim or not value.is_floating_point():
        got = (
            f"a {value.dtype} tensor of shape {list(value.shape)}"
            if isinstance(value, torch.Tensor)
            else repr(value)
        )
        raise BridgeError(
            f"the loss must be one scalar tensor of floating point, got {got}: reduce it with"
            " .mean() or .sum()"
        )
    _refuse_changing_hooks(model, loss, batch)
    return frozenset(
        kind for kind in kinds_of([value]) if not kind.__name__.startswith(_CUSTOM_OPERATION)
    )


ACCEPTED: set[type] = set()
"""Custom functions whose backward differs from the derivative of their forward on purpose: it is called in torch."""
_FunctionT = TypeVar("_FunctionT", bound=type)
_CALLS: dict[int, tuple[Any, list[Any], Any]] = {}
_NUMBERS = count()
_TENSOR = object()


def accept_backward(function: _FunctionT) -> _FunctionT:
    """Declare that the backward of a custom function differs from the derivative of its forward on
    purpose.

    As a decorator, or as a call beside a `Problem` whose model uses the function::

        @accept_backward
        class Rounded(torch.autograd.Function): ...

    Args:
        function: a subclass of `torch.autograd.Function`, which is returned as it is.

    Raises:
        UsageError: it is something else.
    """
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise UsageError(
            f"accept_backward: expected a subclass of torch.autograd.Function, got {function!r}:"
            " pass the class whose backward differs from the derivative of its forward on purpose"
        )
    ACCEPTED.add(function)
    return function


def _is_real(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def real_results(out: Any) -> list[torch.Tensor]:
    """Return the tensors of floating point among what a custom function returned."""
    results = out if isinstance(out, tuple) else (out,)
    return [x for x in results if _is_real(x)]


class _WithoutDetaching(TorchFunctionMode):
    """Ignores `detach` and `no_grad`, which have no meaning in a custom forward: it runs without
    gradients anyway.

    The graph would keep them: JAX would find no derivative of what is detached, nor of anything
    after a `no_grad`, at whose end gradients stay off as they were before it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.detach:
            return args[0]
        if func is torch._C._set_grad_enabled:
            return None
        return func(*args, **(kwargs or {}))


def _differentiated(forward: Forward, first: int) -> Forward:
    def exported(*arguments: Any) -> Any:
        with _WithoutDetaching():
            out = forward(*arguments)
        if first:
            # checkpointing packs what is saved under `no_grad`, whose end the graph would lack
            arguments[0].to_save = None
        return out

    return exported


def _with_its_backward(kind: type) -> Any:
    def made(forward: Forward, first: int) -> Forward:
        def exported(*arguments: Any) -> Any:
            leaves, spec = pytree.tree_flatten(list(arguments[first:]))
            # clones: the forward may write to its arguments
            tensors = [x.clone() for x in leaves if isinstance(x, torch.Tensor)]
            number = next(_NUMBERS)
            _CALLS[number] = (
                kind,
                [_TENSOR if isinstance(x, torch.Tensor) else x for x in leaves],
                spec,
            )
            out = _differentiated(forward, first)(*arguments)
            if first:
                arguments[0].dirty_tensors = None  # what is returned is no longer what it wrote to
            tied = iter(torch.ops.gradcheck_suite.own_backward(real_results(out), tensors, number))
            results = out if isinstance(out, tuple) else (out,)
            # whole numbers have no gradient, and stay as the forward gave them
            after = tuple(next(tied) if _is_real(x) else x for x in results)
            return after if isinstance(out, tuple) else after[0]

        return exported

    return made


@contextmanager
def exported_functions(functions: Collection[type], own: Collection[type]) -> Iterator[None]:
    """Let `torch.export` see the forwards of custom functions while this is open.

    Args:
        functions: those whose forward JAX differentiates.
        own: those whose own backward is called.
    """
    replacements: list[tuple[type, Any]] = [
        (kind, _differentiated) for kind in functions if kind not in own
    ]
    replacements += [(kind, _with_its_backward(kind)) for kind in functions if kind in own]
    with replaced_forwards(replacements), ExitStack() as saving:
        for kind, _ in replacements:
            if kind.setup_context is not torch.autograd.Function.setup_context:  # type: ignore[attr-defined]
                saves_nothing = staticmethod(lambda ctx, inputs, output: None)
                saving.enter_context(mock.patch.object(kind, "setup_context", saves_nothing))
        yield


@torch.library.custom_op("gradcheck_suite::own_backward", mutates_args=())
def _own_backward(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], number: int
) -> list[torch.Tensor]:
    """Return the outputs of a custom function; the operation ties them to the function's inputs."""
    return [x.clone() for x in outputs]


@_own_backward.register_fake
def _(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], number: int
) -> list[torch.Tensor]:
    return [torch.empty_like(x) for x in outputs]


@register_op("gradcheck_suite.own_backward")
def own_backward(outputs: list[Array], inputs: list[Array], number: int) -> list[Array]:
    """Return the outputs; their derivative with respect to the inputs is torch's backward."""
    call = _CALLS[number]

    @jax.custom_vjp
    def tied(outputs: list[Array], inputs: list[Array]) -> list[Array]:
        return outputs

    def backward(inputs: list[Array], cotangents: list[Array]) -> Any:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs if is_float(x)]
        found = iter(
            jax.pure_callback(lambda *given: _in_torch(call, *given), shapes, inputs, cotangents)
        )
        # the cotangent of whole numbers has a dtype of its own
        gradients = [
            next(found) if is_float(x) else np.zeros(x.shape, jax.dtypes.float0) for x in inputs
        ]
        return [jnp.zeros_like(c) for c in cotangents], gradients

    tied.defvjp(lambda outputs, inputs: (outputs, inputs), backward)
    # the graph's lists are no pytrees for JAX
    return tied(list(outputs), list(inputs))


def _tensor(array: Any) -> torch.Tensor:
    numbers = np.array(array)
    if numbers.dtype == jnp.bfloat16:
        return torch.from_numpy(numbers.astype(np.float32)).bfloat16()
    return torch.from_numpy(numbers)


def _numbers(tensor: torch.Tensor) -> Any:
    # no JAX array: a callback must not wait for JAX
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().float().numpy().astype(jnp.bfloat16)
    return tensor.detach().numpy()


def _in_torch(call: tuple[Any, list[Any], Any], inputs: Any, cotangents: Any) -> list[Any]:
    """Return what the backward of a custom function makes of some cotangents, for each input of
    floating point.
    """
    kind, others, spec = call
    tensors = [_tensor(x) for x in inputs]
    wanted = [x.requires_grad_() for x in tensors if x.is_floating_point()]
    # the function may write to its arguments, of which the gradient is wanted
    remaining = (x.clone() for x in tensors)
    with torch.enable_grad():
        out = kind.apply(
            *pytree.tree_unflatten([next(remaining) if x is _TENSOR else x for x in others], spec)
        )
    pairs = [
        (x, _tensor(c))
        for x, c in zip(real_results(out), cotangents, strict=True)
        if x.requires_grad
    ]
    real = [x for x, _ in pairs]
    weights = [c for _, c in pairs]
    return [
        _numbers(g)
        for g in torch.autograd.grad(
            real, wanted, weights, allow_unused=True, materialize_grads=True
        )
    ]


LossFunction = Callable[[nn.Module, Batch], torch.Tensor]
_GRAD_MODE = "wrap_with_set_grad_enabled"
_IN_ORDER = "with_effects"
_CORE = (
    "_batch_norm_with_update_functional",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "elu",
    "gelu",
    "native_batch_norm",
    "native_group_norm",
    "native_layer_norm",
    "slice_scatter",
    "tril_indices",
    "triu_indices",
    "unfold",
    "upsample_bicubic2d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
)
"""Operations that `torch.export` leaves whole, and whose decomposition in torch has the same derivative."""


class _LossModule(nn.Module):
    """The loss as a module whose inputs are the batch's tensors, in the order of `tensor_leaves`."""

    def __init__(self, model: nn.Module, loss: LossFunction, batch: Batch) -> None:
        super().__init__()
        self.model = model
        self._loss = _named_forward(loss)
        self._batch = batch

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the loss of the batch made of these tensors."""
        remaining = iter(tensors)
        return self._loss(self.model, map_leaves(lambda _: next(remaining), self._batch))


def _named_forward(function: Any) -> Any:
    """Return a copy of a function named `forward`: export records source lines for frames of that
    name only.
    """
    if not isinstance(function, FunctionType):
        return function
    code = function.__code__.replace(co_name="forward")
    copy = FunctionType(
        code, function.__globals__, "forward", function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def export_loss(
    model: nn.Module, loss: LossFunction, batch: Batch, own_backwards: Collection[type] = ()
) -> ExportedProgram:
    """Export `loss(model, batch)` at this batch's shapes, to operations of the table.

    Args:
        model: a module.
        loss: (model, batch) -> scalar tensor.
        batch: a tree of dicts, lists and tuples of tensors.
        own_backwards: custom functions, beside the accepted ones, whose own backward the graph
            calls.

    Raises:
        BridgeError: the loss has a gradient hook, or is not a scalar.
        NotExportable: `torch.export` cannot export the loss; the message says what to do.
        UnknownOperation: an operation is not in the table.
        RandomnessError: the loss draws random numbers.
    """
    functions = custom_code_of(model, loss, batch)
    tensors = tuple(tensor_leaves(batch))
    module = _LossModule(model, loss, batch)
    module.training = model.training  # `train()` would change the submodules that are in eval mode
    with (
        _quiet(),
        _operations_listed_once(),
        exported_functions(functions, ACCEPTED.union(own_backwards)),
    ):
        try:
            program = torch.export.export(module, tensors, strict=False)
            # torch 2.9 keeps such a tensor as a constant, where later versions refuse
            if any(isinstance(constant, FakeTensor) for constant in program.constants.values()):
                raise RuntimeError("fake tensor in the exported program")
        except Exception as error:
            raise _not_exportable(error, model, loss, batch) from error
        for graph_module in program.graph_module.modules():
            if isinstance(graph_module, fx.GraphModule):
                _stop_gradients_without_grad(graph_module)
        decompositions = default_decompositions()
        # where torch has its own derivative formula for an operation, the table's entry follows
        # that formula's conventions, which a decomposition would lose
        for op in [
            op for op in decompositions if isinstance(op, torch._ops.OpOverload) and lowering_of(op)
        ]:
            del decompositions[op]
        decompositions.update(get_decompositions([getattr(torch.ops.aten, name) for name in _CORE]))
        program = program.run_decompositions(decompositions)
    for node in program.graph.nodes:
        _check(node)
    return program


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress export's deprecation warnings, and the graphs that it logs and prints when it fails."""
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        trace = logging.getLogger("torch.__trace")
        traced = trace.disabled
        logging.disable(logging.CRITICAL)
        # `logging.disable` does not reach this logger, and pytest prints its output under a failing
        # test
        trace.disabled = True
        try:
            yield
        finally:
            logging.disable(before)
            trace.disabled = traced


@contextmanager
def _operations_listed_once() -> Iterator[None]:
    """Let torch list its composite operations once: it does so three times for each namespace of
    operations.

    That takes half of the time of a small export (torch 2.13); not reported upstream as far as
    known.
    """
    utilities = torch._export.utils
    name = "_materialize_cpp_cia_ops"
    with (
        mock.patch.object(utilities, name, cache(getattr(utilities, name)))
        if hasattr(utilities, name)
        else nullcontext()
    ):
        yield


def _stop_gradients_without_grad(graph_module: fx.GraphModule) -> None:
    """Detach the arguments of every operation inside a `no_grad` region: `run_decompositions` drops
    such regions (torch 2.13); not reported upstream as far as known.
    """
    for node in list(graph_module.graph.nodes):
        # the first argument says whether gradients are on in the region
        if getattr(node.target, "__name__", "") != _GRAD_MODE or node.args[0]:
            continue
        region = getattr(graph_module, node.args[1].target)
        for inner in list(region.graph.nodes):
            if inner.op == "call_function" and isinstance(inner.target, torch._ops.OpOverload):
                with region.graph.inserting_before(inner):
                    inner.args, inner.kwargs = fx.map_arg(
                        (inner.args, inner.kwargs), partial(_detached, region.graph)
                    )
        region.recompile()


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return node
    detached = graph.call_function(torch.ops.aten.detach.default, (node,))
    detached.meta = dict(node.meta)
    return detached


def operation_of(node: fx.Node) -> Any:
    """Return what a call calls: of an operation that export keeps in order by a token, the
    operation.
    """
    return node.args[1] if getattr(node.target, "__name__", "") == _IN_ORDER else node.target


def _check(node: fx.Node) -> None:
    """Raise an error for an operation that has no JAX implementation."""
    op = operation_of(node)
    if node.op != "call_function" or not isinstance(op, torch._ops.OperatorBase):
        return
    name = f"torch.ops.higher_order.{op}"
    register = ""
    if isinstance(op, torch._ops.OpOverload):
        if lowering_of(op) is not None:
            return
        if torch.Tag.nondeterministic_seeded in op.tags:
            raise RandomnessError(random_message(f"{op} draws random numbers", node))
        name = str(op)
        register = (
            f"register one with @gradcheck_suite.bridge.register_op({name!r}) on a function of JAX"
            " arrays, or "
        )
    raise UnknownOperation(
        f"the bridge has no JAX implementation of {name}{source_line(node)}: {register}replace the"
        " operation"
    )


def random_message(what: str, node: fx.Node) -> str:
    """Return the message of a `RandomnessError`."""
    return (
        f"{what}{source_line(node)}: torch and JAX would draw different numbers. Set its"
        " probability to 0, or make the random numbers part of the batch"
    )


def _not_exportable(
    error: Exception, model: nn.Module, loss: LossFunction, batch: Batch
) -> NotExportable:
    text = " ".join(str(error).split())
    kind = type(error).__name__
    depends = (
        "DataDependent" in kind or "data-dependent" in text.lower() or "unbacked" in text.lower()
    )
    place = place_of_error(error)
    rewrite = ""
    if any(
        frame.name == "_detect_is_causal_mask"
        for frame in traceback.extract_tb(error.__traceback__)
    ):
        advice = (
            "torch.nn's transformer compares the values of its mask with a causal one: say which it"
            " is, with is_causal (of nn.Transformer tgt_is_causal, src_is_causal) beside the mask"
        )
    elif depends:
        advice = (
            "the loss takes a Python decision (if, while, int(), an index) on the values of"
            " tensors, which JAX would not repeat. Write it with torch.where or masks, or compute"
            " the decision in Problem.batch"
        )
        if place is not None:
            rewrite = _rewrite(place, model, loss, batch)
    elif "fake tensor in the exported program" in text:
        advice = "tensor.data cannot be exported: write tensor.detach()"
    else:
        advice = (
            "make the loss exportable (torch.export.export with strict=False), or check this loop"
            " without JAX"
        )
    reason = re.split(r"(?<=[.:)]) (?=[A-Z(])", text, maxsplit=1)[0].rstrip(". ")
    where = (
        "" if place is None else f" ({Path(place.file).name}, line {place.number}: {place.line})"
    )
    return NotExportable(
        f"torch.export does not take this loss{where}: {kind}: {reason[:200]}; {advice}", rewrite
    )


def _rewrite(place: SourceLine, model: nn.Module, loss: LossFunction, batch: Batch) -> str:
    """Return the lines that help where a loss takes a decision at a place."""
    # transformers' own switch comes before a rewrite of its code
    if "expert" in place.line and hasattr(model, "set_experts_implementation"):
        return EXPERTS
    if _of_logits_helps(model, loss, batch):
        return LOSS
    lines = rewrite_of(place.line)
    installed = {"site-packages", "dist-packages"}.intersection(Path(place.file).parts)
    return (
        COPY.format(name=place.function, lines=lines)
        if installed and "<" not in place.function
        else lines
    )


def _of_logits_helps(model: nn.Module, loss: LossFunction, batch: Batch) -> bool:
    """Return whether the model has logits whose loss, as in `LOSS`, is the same and can be
    exported.
    """
    if not (isinstance(batch, dict) and "labels" in batch):
        return False
    names: dict[str, Any] = {"torch": torch}
    # the text that is recommended is the text that is tried
    exec(LOSS, names)
    try:
        with restored(model):
            values = [
                function(model, map_leaves(torch.clone, batch)).item()
                for function in (names["loss"], loss)
            ]
        module = _LossModule(model, names["loss"], batch)
        torch.export.export(module, tuple(tensor_leaves(batch)), strict=False)
    except Exception:  # any: the model is unknown
        return False
    return math.isclose(*values, rel_tol=1e-5)
