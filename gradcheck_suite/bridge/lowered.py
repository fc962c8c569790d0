"""An exported loss as a JAX function: its graph, executed with the table's JAX implementations."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, OutputKind

from gradcheck_suite.bridge.dtypes import Array, default_float_is, to_array
from gradcheck_suite.bridge.errors import BridgeError
from gradcheck_suite.bridge.exporting import Exported, LossFunction, export_loss
from gradcheck_suite.bridge.graph_calls import graph_calls, low_precision_operations, run_graph_call
from gradcheck_suite.execution.batches import leaves
from gradcheck_suite.references.programs import PROGRAMS, device
from gradcheck_suite.schema.contract import Batch

Arrays = dict[str, Array]
_PREFIX = "model."


class Lowered:
    """A loss in JAX: `lowered(parameters, buffers, inputs) -> (loss, new_buffers)`.

    Attributes:
        parameters: names of the parameters, as in `named_parameters`: one name per tensor.
        trainable: names of the parameters that require a gradient.
        buffers: names of the buffers.
        operations: number of ATen operations in the loss.
        narrow: operations whose results are floats of less than 64 bits, each with its source line. The model asks for
            that precision (`.float()` in a norm, a loss, a rotary embedding); torch and JAX agree only to it.
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
        self._calls = tuple(graph_calls(program.graph_module))
        self.operations = sum(call.is_op for call in self._calls)
        self.narrow = low_precision_operations(self._calls)
        self._text = f"{program.graph} {program.graph_signature} {self.trainable} {self._inputs}"
        self._needs_values = any(call.is_dynamic for call in self._calls)

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
            elif spec.kind is InputKind.TOKEN:
                self._constants[name] = to_array(torch.zeros(0))
            else:
                raise BridgeError(
                    f"the loss uses {spec.target!r}, a {spec.kind.name.lower()} that JAX has no counterpart of: "
                    "use tensors, numbers, strings and containers of them"
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
        """Return the loss, a scalar, and the buffers after the forward, by name.

        Args:
            parameters: name -> array, of the module's dtypes and shapes.
            buffers: name -> array.
            inputs: the batch's tensors, in the order of `gradcheck_suite.execution.instance.leaves`.
        """
        with default_float_is(self._default_float):
            values: dict[Any, Any] = dict(self._constants)
            for name, source in self._inputs:
                if isinstance(source, int):
                    values[name] = inputs[source]
                else:
                    values[name] = parameters[source] if source in parameters else buffers[source]
            for call in self._calls:
                values[call.node.name] = run_graph_call(call, values)
            after = dict(buffers)
            for name, value in self._outputs.items():
                after[name] = values[value.name]
            return values[self._loss.name], after

    @cached_property
    def gradient_function(self) -> Callable[..., Any]:
        """`f(trainable, others, inputs) -> ((loss, new_buffers), gradients)`, for `jax.jit` or as it is."""

        def loss(trainable: Arrays, others: tuple[Arrays, Arrays], inputs: Sequence[Array]) -> Any:
            frozen, buffers = others
            return self({**frozen, **trainable}, buffers, inputs)

        return jax.value_and_grad(loss, has_aux=True)

    @cached_property
    def _foreign(self) -> tuple[int, ...]:
        """Ids of the functions registered by users: their names do not identify what they compute."""
        own = f"{__package__}.ops."
        functions = [call.function for call in self._calls if call.is_op]
        return tuple(id(function) for function in functions if not function.__module__.startswith(own))

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        """A key of the computation that is the same in every process."""
        digest = hashlib.sha256(f"{_source_digest()} {torch.__version__} {self._default_float} {self._text}".encode())
        for name, constant in sorted(self._constants.items()):
            digest.update(f"{name} {constant.dtype} {constant.shape}".encode() + np.asarray(constant).tobytes())
        return "bridge", digest.hexdigest(), self._foreign

    def _compiled(self, arguments: tuple[Any, ...]) -> Any:
        if not self._needs_values:
            try:
                return PROGRAMS.call(self._key, self.gradient_function, *arguments, store=not self._foreign)
            except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
                self._needs_values = True  # a shape or a Python number depends on values
        return self.gradient_function(*arguments)

    def value_and_gradient(
        self, parameters: Mapping[str, Any], buffers: Mapping[str, Any], inputs: Sequence[Any], *, jit: bool = True
    ) -> tuple[float, dict[str, npt.NDArray[Any]], dict[str, npt.NDArray[Any]]]:
        """Return the loss, the gradient of every trainable parameter, and the new buffers, as numpy arrays.

        The gradient of a parameter that the loss does not reach is zeros.

        Args:
            parameters: name -> array, of the module's dtypes and shapes.
            buffers: name -> array.
            inputs: the batch's tensors, in the order of `gradcheck_suite.execution.instance.leaves`.
            jit: whether to compile the program, which takes seconds; compiled programs are kept on disk. A program
                whose shapes depend on values is never compiled.
        """
        with jax.default_device(device()):
            trainable = {name: parameters[name] for name in self.trainable}
            frozen = {name: value for name, value in parameters.items() if name not in trainable}
            arguments = trainable, (frozen, dict(buffers)), tuple(inputs)
            (loss, after), gradient = self._compiled(arguments) if jit else self.gradient_function(*arguments)
        # JAX's gradient of a complex parameter is the conjugate of torch's
        gradient = {name: np.conj(np.asarray(g)) for name, g in gradient.items()}
        return float(loss), gradient, {name: np.asarray(b) for name, b in after.items()}


@cache
def _source_digest() -> str:
    """Return a digest of the bridge's source: a changed bridge must not reuse compiled programs."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
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
    """Return the arguments of `Lowered`: parameters and buffers by name and the batch's tensors, as JAX arrays."""
    with jax.default_device(device()):
        parameters = {name: to_array(p) for name, p in model.named_parameters()}
        buffers = {name: to_array(b) for name, b in model.named_buffers()}
        return parameters, buffers, [to_array(t) for t in leaves(batch)]


def lower(model: nn.Module, loss: LossFunction, batch: Batch, *, own_backwards: Collection[type] = ()) -> Lowered:
    """Translate `loss(model, batch)` to JAX, for this batch's shapes.

    Args:
        model: a module in the mode and the dtype in which it is trained. A tensor with several names stays shared.
        loss: (model, batch) -> scalar tensor.
        batch: a tree of dicts, lists and tuples of tensors; anything else in it is a constant.
        own_backwards: custom `autograd.Function`s whose own backward is called, as that of those for which
            `accept_backward` was called. JAX differentiates the forward of all others.

    Raises:
        BridgeError: the loss cannot be translated; the message says why and what to do.
    """
    with jax.default_device(device()):
        return Lowered(export_loss(model, loss, batch, own_backwards), model)


def jax_gradient(
    model: nn.Module, loss: LossFunction, batch: Batch, *, jit: bool = True
) -> dict[str, npt.NDArray[Any]]:
    """Return the gradient of `loss(model, batch)` for every trainable parameter, computed by JAX alone.

    The module and its buffers are left unchanged. The arguments and errors are those of `lower`; `jit` says whether to
    compile the program.
    """
    return lower(model, loss, batch).value_and_gradient(*arguments_of(model, batch), jit=jit)[1]
