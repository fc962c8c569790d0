"""An exported loss as a JAX function: its graph, executed with the table's JAX implementations."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, wraps
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from gradcheck_suite.bridge.exporting import (
    ACCEPTED,
    LossFunction,
    custom_code_of,
    export_loss,
    operation_of,
    random_message,
    real_results,
    restored,
    source_line,
)
from gradcheck_suite.bridge.op_table import (
    Array,
    BridgeError,
    RandomnessError,
    WrongLowering,
    default_float_is,
    is_dynamic,
    jax_dtype,
    lowering_of,
    to_array,
)
from gradcheck_suite.core.contract import Batch
from gradcheck_suite.reference.programs import PROGRAMS, device
from gradcheck_suite.run.functions import Forward, replaced_forwards
from gradcheck_suite.run.instance import map_leaves, tensor_leaves


def _after_token(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Return `with_effects` of an operation: (token, operation, arguments) -> (token, results)."""

    @wraps(lowering)
    def called(token: Any, _: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        out = lowering(*args, **kwargs)
        return (token, *(out if isinstance(out, tuple) else (out,)))

    return called


def _function_of(node: fx.Node) -> Callable[..., Any]:
    """Return the JAX implementation of what a node calls, or the Python function that it calls."""
    op = operation_of(node)
    function: Any = lowering_of(op) if _is_op(node) else node.target
    lowering: Callable[..., Any] = function if op is node.target else _after_token(function)
    return lowering


def _is_op(node: fx.Node) -> bool:
    return isinstance(operation_of(node), torch._ops.OpOverload)


def _low_precision_operations(nodes: Iterable[fx.Node]) -> Iterator[str]:
    """Yield the operations whose results are floats of less than 64 bits, each with its source
    line.
    """
    for node in nodes:
        value = node.meta.get("val")
        if (
            isinstance(value, torch.Tensor)
            and value.dtype.is_floating_point
            and value.dtype.itemsize < 8
        ):
            # `getitem` picks one of several results; the operation is the call that made them
            source = node.args[0] if node.target is operator.getitem else node
            source = source if isinstance(source, fx.Node) else node
            yield f"{source.target}{source_line(source)}"


def _run(node: fx.Node, function: Callable[..., Any], values: dict[str, Any]) -> Any:
    """Return the result of a call, given the results of earlier calls by node name.

    Raises:
        RandomnessError: the operation draws random numbers.
        WrongLowering: the JAX function failed, or its result has another shape or dtype than
            torch's.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: values[argument.name])
    try:
        out = function(*args, **kwargs)
    except RandomnessError as error:
        raise RandomnessError(random_message(str(error), node)) from None
    except (BridgeError, jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        # JAX's are of a decision of Python on a traced value: the caller runs the program without
        # jit instead
        raise
    except Exception as error:
        raise WrongLowering(
            f"the lowering of {node.target}{source_line(node)} failed: {type(error).__name__}:"
            f" {error}"
        ) from error
    _check_shape_and_dtype(node, out)
    return out


def _check_shape_and_dtype(node: fx.Node, out: Any) -> None:
    """Compare a result with the shape and the dtype that torch recorded."""
    expected = node.meta.get("val")
    if not isinstance(expected, torch.Tensor):
        return
    dtype = jax_dtype(expected.dtype)
    shape = tuple(expected.shape)
    # a length that depends on values is a symbol of torch
    known = all(isinstance(n, int) for n in shape)
    # a weakly typed array takes the dtype of what it meets next, where torch's would decide
    weak = getattr(out, "weak_type", False)
    if (
        getattr(out, "dtype", None) != dtype
        or (known and tuple(getattr(out, "shape", ())) != shape)
        or weak
    ):
        got = f"{out.dtype}{list(out.shape)}" if hasattr(out, "dtype") else type(out).__name__
        raise WrongLowering(
            f"the lowering of {node.target}{source_line(node)} gives"
            f" {got}{' (weakly typed)' if weak else ''} where torch gives {dtype}{list(shape)}:"
            " correct the function registered for it"
        )


Arrays = dict[str, Array]
_PREFIX = "model."


class Lowered:
    """A loss in JAX: `lowered(parameters, buffers, inputs) -> (loss, new_buffers)`.

    Attributes:
        parameters: names of the parameters, as in `named_parameters`: one name per tensor.
        trainable: names of the parameters that require a gradient.
        buffers: names of the buffers.
        operations: number of ATen operations in the loss.
        narrow: operations whose results are floats of less than 64 bits, each with its source line.
            The model asks for that precision (`.float()` in a norm, a loss, a rotary embedding);
            torch and JAX agree only to it.
    """

    def __init__(self, program: ExportedProgram, model: nn.Module) -> None:
        self.parameters = tuple(name for name, _ in model.named_parameters())
        self.trainable = tuple(name for name, p in model.named_parameters() if p.requires_grad)
        self.buffers = tuple(name for name, _ in model.named_buffers())
        self._default_float = torch.get_default_dtype()
        self._names = _canonical_names(model)
        self._inputs: list[tuple[str, str | int]] = []
        self._constants: Arrays = {}
        self._read_inputs(program)
        self._outputs, self._loss = self._read_outputs(program)
        nodes = [node for node in program.graph.nodes if node.op == "call_function"]
        operations = [node for node in nodes if _is_op(node)]
        self._calls = [(node, _function_of(node)) for node in nodes]
        self.operations = len(operations)
        self.narrow = tuple(_low_precision_operations(nodes))
        self._text = f"{program.graph} {program.graph_signature} {self.trainable} {self._inputs}"
        self._needs_values = any(is_dynamic(operation_of(node)) for node in operations)
        # functions that users registered: their names do not identify what they compute
        own = f"{__package__}.ops."
        functions = [lowering_of(operation_of(node)) for node in operations]
        self._foreign = tuple(
            id(function) for function in functions if not function.__module__.startswith(own)
        )

    def _read_inputs(self, program: Any) -> None:
        position = 0
        for spec in program.graph_signature.input_specs:
            name = spec.arg.name
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and self._known(spec.target):
                self._inputs.append((name, self._names[spec.target.removeprefix(_PREFIX)]))
            elif spec.kind is InputKind.USER_INPUT:
                self._inputs.append((name, position))
                position += 1
            # a parameter or buffer that is none of the model's belongs to the loss, and is a
            # constant
            elif spec.kind in (InputKind.CONSTANT_TENSOR, InputKind.BUFFER, InputKind.PARAMETER):
                stored = (
                    program.constants if spec.target in program.constants else program.state_dict
                )
                self._constants[name] = to_array(stored[spec.target])
            # a token orders calls that have effects; it has no value
            elif spec.kind is InputKind.TOKEN:
                self._constants[name] = to_array(torch.zeros(0))
            else:
                raise BridgeError(
                    f"the loss uses {spec.target!r}, a {spec.kind.name.lower()} that JAX has no"
                    " counterpart of: use tensors, numbers, strings and containers of them"
                )

    def _known(self, target: str) -> bool:
        return target.removeprefix(_PREFIX) in self._names

    def _read_outputs(self, program: Any) -> tuple[dict[str, Any], Any]:
        (node,) = [n for n in program.graph.nodes if n.op == "output"]
        changed: dict[str, Any] = {}
        losses = []
        for spec, value in zip(program.graph_signature.output_specs, node.args[0], strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                losses.append(value)
            elif spec.kind is OutputKind.BUFFER_MUTATION and self._known(spec.target):
                changed[self._names[spec.target.removeprefix(_PREFIX)]] = value
            elif spec.kind.name == "PARAMETER_MUTATION":
                raise BridgeError(
                    f"the loss writes to the parameter {spec.target.removeprefix(_PREFIX)!r} while"
                    " it is computed: only the optimizer should; compute a new tensor instead"
                )
        if (
            len(losses) != 1
            or not isinstance(losses[0], fx.Node)
            or tuple(losses[0].meta["val"].shape)
        ):
            raise BridgeError(
                "the loss must be one scalar tensor: reduce it over the items with .mean() or"
                " .sum()"
            )
        return changed, losses[0]

    def __call__(
        self, parameters: Mapping[str, Any], buffers: Mapping[str, Any], inputs: Sequence[Any]
    ) -> tuple[Array, Arrays]:
        """Return the loss, a scalar, and the buffers after the forward, by name.

        Args:
            parameters: name -> array, of the module's dtypes and shapes.
            buffers: name -> array.
            inputs: the batch's tensors, in the order of `gradcheck_suite.run.instance.tensor_leaves`.
        """
        with default_float_is(self._default_float):
            given: dict[Any, Any] = {**buffers, **parameters, **dict(enumerate(inputs))}
            values = {**self._constants, **{name: given[source] for name, source in self._inputs}}
            for node, function in self._calls:
                values[node.name] = _run(node, function, values)
            return values[self._loss.name], {
                **buffers,
                **{name: values[x.name] for name, x in self._outputs.items()},
            }

    @cached_property
    def gradient_function(self) -> Callable[..., Any]:
        """`f(trainable, others, inputs) -> ((loss, new_buffers), gradients)`, for `jax.jit` or as
        it is.
        """

        def loss(trainable: Arrays, others: tuple[Arrays, Arrays], inputs: Sequence[Array]) -> Any:
            frozen, buffers = others
            return self({**frozen, **trainable}, buffers, inputs)

        return jax.value_and_grad(loss, has_aux=True)

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        """A key of the computation that is the same in every process."""
        digest = hashlib.sha256(
            f"{_source_digest()} {torch.__version__} {self._default_float} {self._text}".encode()
        )
        for name, constant in sorted(self._constants.items()):
            digest.update(
                f"{name} {constant.dtype} {constant.shape}".encode()
                + np.asarray(constant).tobytes()
            )
        return "bridge", digest.hexdigest(), self._foreign

    def _compiled(self, arguments: tuple[Any, ...]) -> Any:
        if not self._needs_values:
            try:
                return PROGRAMS.call(
                    self._key, self.gradient_function, *arguments, store=not self._foreign
                )
            except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
                self._needs_values = True  # a shape or a Python number depends on values
        return self.gradient_function(*arguments)

    def value_and_gradient(
        self,
        parameters: Mapping[str, Any],
        buffers: Mapping[str, Any],
        inputs: Sequence[Any],
        *,
        jit: bool = True,
    ) -> tuple[float, dict[str, npt.NDArray[Any]], dict[str, npt.NDArray[Any]]]:
        """Return the loss, the gradient of every trainable parameter, and the new buffers, as numpy
        arrays.

        The gradient of a parameter that the loss does not reach is zeros.

        Args:
            parameters: name -> array, of the module's dtypes and shapes.
            buffers: name -> array.
            inputs: the batch's tensors, in the order of `gradcheck_suite.run.instance.tensor_leaves`.
            jit: whether to compile the program, which takes seconds; compiled programs are kept on
                disk. A program whose shapes depend on values is never compiled.
        """
        with jax.default_device(device()):
            trainable = {name: parameters[name] for name in self.trainable}
            frozen = {name: value for name, value in parameters.items() if name not in trainable}
            arguments = trainable, (frozen, dict(buffers)), tuple(inputs)
            (loss, after), gradient = (
                self._compiled(arguments) if jit else self.gradient_function(*arguments)
            )
        # JAX's gradient of a complex parameter is the conjugate of torch's
        gradient = {name: np.conj(np.asarray(g)) for name, g in gradient.items()}
        return float(loss), gradient, {name: np.asarray(b) for name, b in after.items()}


@cache
def _source_digest() -> str:
    """Return a digest of the bridge's source: a changed bridge must not reuse compiled programs."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        # constants are part of the program, and are large: their bytes go into the digest, not into
        # the key
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of the same tensor for every name of a parameter or buffer."""
    first: dict[int, str] = {}
    names = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names[name] = first.setdefault(id(tensor), name)
    return names


def arguments_of(model: nn.Module, batch: Batch) -> tuple[Arrays, Arrays, list[Array]]:
    """Return the arguments of `Lowered`: parameters and buffers by name and the batch's tensors, as
    JAX arrays.
    """
    with jax.default_device(device()):
        parameters = {name: to_array(p) for name, p in model.named_parameters()}
        buffers = {name: to_array(b) for name, b in model.named_buffers()}
        return parameters, buffers, [to_array(t) for t in tensor_leaves(batch)]


def lower(
    model: nn.Module, loss: LossFunction, batch: Batch, *, own_backwards: Collection[type] = ()
) -> Lowered:
    """Translate `loss(model, batch)` to JAX, for this batch's shapes.

    Args:
        model: a module in the mode and the dtype in which it is trained. A tensor with several
            names stays shared.
        loss: (model, batch) -> scalar tensor.
        batch: a tree of dicts, lists and tuples of tensors; anything else in it is a constant.
        own_backwards: custom `autograd.Function`s whose own backward is called, as that of those
            for which `accept_backward` was called. JAX differentiates the forward of all others.

    Raises:
        BridgeError: the loss cannot be translated; the message says why and what to do.
    """
    with jax.default_device(device()):
        return Lowered(export_loss(model, loss, batch, own_backwards), model)


def jax_gradient(
    model: nn.Module, loss: LossFunction, batch: Batch, *, jit: bool = True
) -> dict[str, npt.NDArray[Any]]:
    """Return the gradient of `loss(model, batch)` for every trainable parameter, computed by JAX
    alone.

    The module and its buffers are left unchanged. The arguments and errors are those of `lower`;
    `jit` says whether to compile the program.
    """
    return lower(model, loss, batch).value_and_gradient(*arguments_of(model, batch), jit=jit)[1]


MOST = 4
"""Number of calls of a function that are judged, each of other shapes or other arguments than the ones before."""
RELATIVE = 1e-10
"""Difference that is allowed in float64, over the largest entry of the argument's gradient."""
UNIT = {False: 2.0**-53, True: 2.0**-24}
DRAWS = 5
NOISE = 16.0
"""Number of times that the inputs are moved by one roundoff, and the multiple of what this changes that is allowed."""


@dataclass(frozen=True)
class WrongBackward:
    """A custom function whose backward is not the derivative of its forward.

    Attributes:
        function: the class.
        argument: number of the argument whose gradient differs, the context not counted.
        error: largest difference of an entry, over the largest entry of the two gradients.
        allowed: likewise, what rounding may do.
        factor: the number by which the derivative is multiplied, where that is all, and infinity
            where the derivative is 0; None otherwise.
    """

    function: type
    argument: int
    error: float
    allowed: float
    factor: float | None

    def __str__(self) -> str:
        name = self.function.__name__
        if self.factor == np.inf:
            what = "not 0, and the derivative is"
        elif self.factor == 0:
            what = "0 or None, and the derivative is not"
        elif self.factor is not None and (factor := f"{self.factor:.6g}") != "1":
            what = f"{factor} times the derivative"
        else:
            what = (
                f"off by {self.error:.2g} of its largest entry, where rounding allows"
                f" {self.allowed:.1g}"
            )
        return (
            f"{name}.backward is not the derivative of {name}.forward, which JAX computes: the"
            f" gradient of argument {self.argument} is {what}. If that is on purpose, as in a"
            f" straight-through estimator, call gradcheck_suite.bridge.accept_backward({name})"
        )


def wrong_backwards(
    model: nn.Module, loss: LossFunction, batch: Batch
) -> tuple[WrongBackward, ...]:
    """Return the custom functions of a loss whose backward is not the derivative of their forward,
    one line for each.

    Functions for which `accept_backward` was called are left out, and so are those that cannot be
    called by themselves: they show in the gradient of the whole loss. The arguments and errors are
    those of `lower`.
    """
    functions = custom_code_of(model, loss, batch) - ACCEPTED - {CheckpointFunction}
    if not functions:
        return ()
    calls: dict[str, _FunctionModule] = {}

    def recording(kind: type) -> Any:
        def made(forward: Forward, first: int) -> Forward:
            def recorded(*arguments: Any) -> Any:
                call = _FunctionModule(kind, arguments[first:])
                calls.setdefault(call.signature, call)
                return forward(*arguments)

            return recorded

        return made

    with (
        restored(model),
        replaced_forwards((kind, recording(kind)) for kind in functions),
        torch.enable_grad(),
    ):
        loss(model, map_leaves(torch.clone, batch))
    found: list[WrongBackward] = []
    for kind in sorted(functions, key=lambda kind: kind.__qualname__):
        # one wrong call is enough: the message is about the function
        for call in [call for call in calls.values() if call.kind is kind][:MOST]:
            if wrong := _judged_call(call):
                found.append(wrong)
                break
    return tuple(found)


class _FunctionModule(nn.Module):
    """A call of a custom function in float64, as a module: its parameters are the arguments that
    require a gradient.

    The gradient of a random combination of the outputs is computed by the function's own backward
    and by JAX.
    """

    def __init__(self, kind: Any, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self._leaves, self._spec = pytree.tree_flatten(list(arguments))
        self.kind = kind
        self.numbers = []
        described = []
        for i, value in enumerate(self._leaves):
            if not isinstance(value, torch.Tensor):
                described.append(repr(value))
                continue
            copy = value.detach().clone()
            copy = copy.double() if copy.is_floating_point() else copy
            if value.requires_grad and copy.is_floating_point():
                self.register_parameter(f"argument_{i}", nn.Parameter(copy))
                self.numbers.append(i)
            else:
                self.register_buffer(f"argument_{i}", copy)
            described.append(f"{copy.dtype}{tuple(copy.shape)}{value.requires_grad}")
        # values of tensors are left out: calls of one shape go through the same code, as a rule
        self.signature = f"{id(kind)} {' '.join(described)}"

    def forward(self) -> list[torch.Tensor]:
        """Return the outputs of floating point that are differentiable."""
        leaves = list(self._leaves)
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            # the function may write to it
            leaves[int(name.removeprefix("argument_"))] = tensor.clone()
        return real_results(self.kind.apply(*pytree.tree_unflatten(leaves, self._spec)))


def _combined(call: nn.Module, weights: list[torch.Tensor]) -> torch.Tensor:
    sums = [(out * weight).sum() for out, weight in zip(call(), weights, strict=True)]
    # the outputs may have different dtypes
    return torch.stack([each.double() for each in sums]).sum()


def _own_gradient(
    call: _FunctionModule, weights: list[torch.Tensor]
) -> list[npt.NDArray[np.float64]]:
    wanted = list(call.parameters())
    found = torch.autograd.grad(
        _combined(call, weights), wanted, allow_unused=True, materialize_grads=True
    )
    return [g.numpy() for g in found]


def _judged_call(call: _FunctionModule) -> WrongBackward | None:
    generator = torch.Generator().manual_seed(0)
    try:
        weights = [
            torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) * x.requires_grad
            for x in call()
        ]
        own = _own_gradient(call, weights)
        lowered = lower(call, _combined, weights)
        by_name = lowered.value_and_gradient(*arguments_of(call, weights), jit=False)[1]
        unit = UNIT[bool(lowered.narrow)]
        # by how much the function's own gradient changes where its inputs change by one roundoff
        noise = [0.0] * len(own)
        points = [x.detach().clone() for x in call.parameters()]
        for _ in range(DRAWS):
            with torch.no_grad():
                for x, point in zip(call.parameters(), points, strict=True):
                    x.copy_(
                        point * (1 + unit * torch.randint(-1, 2, point.shape, generator=generator))
                    )
            moved = _own_gradient(call, weights)
            noise = [max(n, _largest(a - b)) for n, a, b in zip(noise, moved, own, strict=True)]
    except (BridgeError, RuntimeError, TypeError, ValueError):
        return None  # it cannot be called by itself
    # each operation in a lower precision rounds once, in torch and in JAX
    relative = max(RELATIVE, 2 * unit * len(lowered.narrow))
    for number, got, name, rounding in zip(
        call.numbers, own, lowered.trainable, noise, strict=True
    ):
        if wrong := _compared_gradient(
            call.kind, number, got, by_name[name], (relative, NOISE * rounding)
        ):
            return wrong
    return None


def _largest(x: npt.NDArray[np.float64]) -> float:
    return float(np.max(np.abs(x), initial=0, where=np.isfinite(x)))


def _compared_gradient(
    kind: type,
    number: int,
    got: npt.NDArray[Any],
    right: npt.NDArray[Any],
    tolerances: tuple[float, float],
) -> WrongBackward | None:
    largest = max(_largest(got), _largest(right))
    allowed = tolerances[0] * largest + tolerances[1]
    with np.errstate(all="ignore"):
        # infinity less infinity is NaN, though both are the same
        same = (got == right) | (np.isnan(got) & np.isnan(right))
        off = np.where(same, 0, np.abs(got - right))
        off = np.where(np.isnan(off), np.inf, off)
        worst = float(np.max(off, initial=0))
        if worst <= allowed:
            return None
        factor: float | None = np.inf
        # the derivative's multiple that fits best, by least squares
        if np.any(right):
            factor = float(np.sum(got * right) / np.sum(right * right))
            factor = factor if np.max(np.abs(got - factor * right)) <= allowed else None
    return WrongBackward(
        kind,
        number,
        worst / (largest or 1.0),
        allowed / (largest or 1.0),
        factor,
    )
