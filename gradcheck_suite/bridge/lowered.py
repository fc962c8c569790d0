"""An exported loss as a JAX function: the graph, run operation by operation through the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, OutputKind

from gradcheck_suite.bridge.dtypes import Array, default_float_is, jax_dtype, to_array
from gradcheck_suite.bridge.errors import BridgeError, RandomnessError, WrongLowering
from gradcheck_suite.bridge.exporting import Exported, LossFunction, export_loss, random_message
from gradcheck_suite.bridge.sources import where_from
from gradcheck_suite.bridge.table import lowering_of
from gradcheck_suite.contract import Batch
from gradcheck_suite.references.programs import cpu
from gradcheck_suite.trial import leaves

Arrays = dict[str, Array]
_PREFIX = "model."


@dataclass(frozen=True)
class Step:
    """One operation of the graph, with what JAX does for it."""

    node: fx.Node
    function: Callable[..., Any]
    is_op: bool


class Lowered:
    """A loss in JAX: `lowered(parameters, buffers, inputs) -> (loss, new_buffers)`.

    Attributes:
        parameters: the names of the parameters, each tensor under one name, as `named_parameters` has them.
        trainable: those that require a gradient.
        buffers: the names of the buffers.
        narrow: the operations, with their lines, whose results are floats of less than 64 bits, because the model asks
            for that (`.float()` in a norm, a loss or a rotary embedding): there torch and JAX agree to that precision.
    """

    def __init__(self, exported: Exported, model: nn.Module) -> None:
        self.parameters = tuple(name for name, _ in model.named_parameters())
        self.trainable = tuple(name for name, p in model.named_parameters() if p.requires_grad)
        self.buffers = tuple(name for name, _ in model.named_buffers())
        self._default_float = exported.default_float
        program = exported.program
        self._names = _canonical_names(model)
        self._inputs: list[tuple[str, str | int]] = []
        self._constants: Arrays = {}
        self._read_inputs(program)
        self._outputs, self._loss = self._read_outputs(program)
        self._steps = tuple(_steps(program.graph_module))
        self.narrow = _narrow(self._steps)
        self._attributes = {
            node.target: getattr(program.graph_module, node.target)
            for node in program.graph.nodes
            if node.op == "get_attr"
        }

    def _read_inputs(self, program: Any) -> None:
        position = 0
        for spec in program.graph_signature.input_specs:
            name = spec.arg.name
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and self._known(spec.target):
                self._inputs.append((name, self._names[spec.target.removeprefix(_PREFIX)]))
            elif spec.kind is InputKind.USER_INPUT:
                self._inputs.append((name, position))
                position += 1
            elif spec.kind in (InputKind.CONSTANT_TENSOR, InputKind.BUFFER, InputKind.PARAMETER):
                stored = program.constants if spec.target in program.constants else program.state_dict
                self._constants[name] = to_array(stored[spec.target])
            else:
                raise BridgeError(
                    f"the loss uses {spec.target!r}, a {spec.kind.name.lower()} that JAX has no counterpart of: "
                    "keep to tensors, numbers, strings and containers of them"
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
                    f"the loss writes to the parameter {spec.target.removeprefix(_PREFIX)!r} while it is computed: "
                    "only the optimizer should; compute a new tensor instead"
                )
        if len(losses) != 1 or not isinstance(losses[0], fx.Node) or tuple(losses[0].meta["val"].shape):
            raise BridgeError("the loss must be one scalar tensor: reduce it over the items with .mean() or .sum()")
        return changed, losses[0]

    def __call__(
        self, parameters: Mapping[str, Any], buffers: Mapping[str, Any], inputs: Sequence[Any]
    ) -> tuple[Array, Arrays]:
        """Return the loss and the buffers as they are afterwards.

        Args:
            parameters: name -> array, of the module's dtypes and shapes.
            buffers: name -> array.
            inputs: the batch's tensors, in the order of `gradcheck_suite.trial.leaves`.
        """
        with default_float_is(self._default_float):
            values: dict[Any, Any] = dict(self._constants)
            for name, source in self._inputs:
                if isinstance(source, int):
                    values[name] = inputs[source]
                else:
                    values[name] = parameters[source] if source in parameters else buffers[source]
            for step in self._steps:
                values[step.node.name] = self._run(step, values)
            after = dict(buffers)
            for name, value in self._outputs.items():
                after[name] = values[value.name]
            return values[self._loss.name], after

    def _run(self, step: Step, values: dict[Any, Any]) -> Any:
        node = step.node

        def value_of(argument: fx.Node) -> Any:
            return values[argument.name]

        args, kwargs = fx.map_arg(node.args, value_of), fx.map_arg(node.kwargs, value_of)
        if not step.is_op:
            out = step.function(*args, **kwargs)
        else:
            try:
                out = step.function(*args, **kwargs)
            except RandomnessError as error:
                raise RandomnessError(random_message(str(error), node)) from None
            except BridgeError:
                raise
            except jax.errors.JAXTypeError:
                raise  # a value asked for inside jit: the caller runs the program step by step instead
            except Exception as error:
                raise WrongLowering(
                    f"the lowering of {node.target}{where_from(node)} failed: {type(error).__name__}: {error}"
                ) from error
        _check_kind(node, out)
        return out

    @cached_property
    def gradient_function(self) -> Callable[..., Any]:
        """`f(trainable, others, inputs) -> ((loss, new_buffers), gradients)`, for `jax.jit` or as it is."""

        def loss(trainable: Arrays, others: tuple[Arrays, Arrays], inputs: Sequence[Array]) -> Any:
            frozen, buffers = others
            return self({**frozen, **trainable}, buffers, inputs)

        return jax.value_and_grad(loss, has_aux=True)

    @cached_property
    def _jitted(self) -> Callable[..., Any]:
        return jax.jit(self.gradient_function)

    def value_and_gradient(
        self, parameters: Mapping[str, Any], buffers: Mapping[str, Any], inputs: Sequence[Any], *, jit: bool = False
    ) -> tuple[float, dict[str, npt.NDArray[Any]], dict[str, npt.NDArray[Any]]]:
        """Return the loss, its gradient in every trainable parameter, and the buffers afterwards, in numpy.

        A parameter that the loss does not reach has zeros.

        Args:
            parameters: name -> array.
            buffers: name -> array.
            inputs: the batch's tensors, in order.
            jit: compile the whole (seconds, once for each program) rather than run operation by operation.
        """
        with jax.default_device(cpu()):
            trainable = {name: parameters[name] for name in self.trainable}
            frozen = {name: value for name, value in parameters.items() if name not in trainable}
            function = self._jitted if jit else self.gradient_function
            (loss, after), gradient = function(trainable, (frozen, dict(buffers)), list(inputs))
        # JAX's gradient in a complex number is the conjugate of torch's
        gradient = {name: np.conj(np.asarray(g)) for name, g in gradient.items()}
        return float(loss), gradient, {name: np.asarray(b) for name, b in after.items()}


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """Return, for every name that a parameter or a buffer has, the first name of the same tensor."""
    first: dict[int, str] = {}
    names = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names[name] = first.setdefault(id(tensor), name)
    return names


def _steps(graph_module: fx.GraphModule) -> list[Step]:
    steps = []
    for node in graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        if isinstance(node.target, torch._ops.OpOverload):
            lowering = lowering_of(node.target)
            assert lowering is not None
            steps.append(Step(node, lowering, True))
        else:
            steps.append(Step(node, node.target, False))
    return steps


def _narrow(steps: tuple[Step, ...]) -> tuple[str, ...]:
    found = []
    for step in steps:
        value = step.node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point and value.dtype.itemsize < 8:
            found.append(f"{step.node.target}{where_from(step.node)}")
    return tuple(found)


def _check_kind(node: fx.Node, out: Any) -> None:
    """Hold a result to the shape and the dtype that torch has there."""
    expected = node.meta.get("val")
    if not isinstance(expected, torch.Tensor):
        return
    dtype = jax_dtype(expected.dtype)
    shape = tuple(expected.shape)
    known = all(isinstance(n, int) for n in shape)
    weak = getattr(out, "weak_type", False)
    if getattr(out, "dtype", None) != dtype or (known and tuple(getattr(out, "shape", ())) != shape) or weak:
        got = f"{out.dtype}{list(out.shape)}" if hasattr(out, "dtype") else type(out).__name__
        raise WrongLowering(
            f"the lowering of {node.target}{where_from(node)} gives {got}{' (weakly typed)' if weak else ''} where "
            f"torch gives {dtype}{list(shape)}: correct the function registered for it"
        )


def arguments_of(model: nn.Module, batch: Batch) -> tuple[Arrays, Arrays, list[Array]]:
    """Return a model's parameters and buffers and a batch's tensors as JAX arrays: what `Lowered` is called with."""
    with jax.default_device(cpu()):
        parameters = {name: to_array(p) for name, p in model.named_parameters()}
        buffers = {name: to_array(b) for name, b in model.named_buffers()}
        return parameters, buffers, [to_array(t) for t in leaves(batch)]


def lower(model: nn.Module, loss: LossFunction, batch: Batch) -> Lowered:
    """Carry `loss(model, batch)` over to JAX, at this batch's shapes.

    Args:
        model: in the mode and the dtype that it is trained in; a tensor shared by several names stays shared.
        loss: (model, batch) -> scalar tensor.
        batch: a tree of dicts, lists and tuples of tensors; anything else in it is a constant.

    Raises:
        BridgeError: it cannot be carried over; the message says why and what to do.
    """
    with jax.default_device(cpu()):
        return Lowered(export_loss(model, loss, batch), model)


def jax_gradient(
    model: nn.Module, loss: LossFunction, batch: Batch, *, jit: bool = False
) -> dict[str, npt.NDArray[Any]]:
    """Return the gradient of `loss(model, batch)` in every trainable parameter, differentiated by JAX alone.

    The module is left as it was, its buffers too. Raises what `lower` raises.
    """
    return lower(model, loss, batch).value_and_gradient(*arguments_of(model, batch), jit=jit)[1]
