"""Custom `autograd.Function`s in an exported graph: their forward, or also a call of their own backward.

A backward that differs from the derivative of the forward on purpose (a straight-through estimator, a bounded slope)
is declared with `accept_backward`. JAX then differentiates the rest of the loss, and calls the backward in torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, TypeVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gradcheck_suite.bridge.dtypes import Array, is_float
from gradcheck_suite.bridge.op_table import register_op
from gradcheck_suite.errors import UsageError
from gradcheck_suite.execution.custom_functions import Forward, replaced_forwards

ACCEPTED: set[type] = set()
_FunctionT = TypeVar("_FunctionT", bound=type)
_CALLS: dict[int, tuple[Any, list[Any], Any]] = {}
_NUMBERS = count()
_TENSOR = object()


def accept_backward(function: _FunctionT) -> _FunctionT:
    """Declare that the backward of a custom function differs from the derivative of its forward on purpose.

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
            f"accept_backward: expected a subclass of torch.autograd.Function, got {function!r}: pass the class whose "
            "backward differs from the derivative of its forward on purpose"
        )
    ACCEPTED.add(function)
    return function


class _WithoutDetaching(TorchFunctionMode):
    """Ignores `detach` and `no_grad`, which have no meaning in a custom forward: it runs without gradients anyway.

    The graph would keep them: JAX would find no derivative of what is detached, nor of anything after a `no_grad`, at
    whose end gradients stay off as they were before it.
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
            _CALLS[number] = kind, [_TENSOR if isinstance(x, torch.Tensor) else x for x in leaves], spec
            out = _differentiated(forward, first)(*arguments)
            if first:
                arguments[0].dirty_tensors = None  # what is returned is no longer what it wrote to
            several = out if isinstance(out, tuple) else (out,)
            real = [i for i, x in enumerate(several) if isinstance(x, torch.Tensor) and x.is_floating_point()]
            tied = torch.ops.gradcheck_suite.own_backward([several[i] for i in real], tensors, number)
            by_index = dict(zip(real, tied, strict=True))
            after = tuple(by_index.get(i, x) for i, x in enumerate(several))
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
    replacements: list[tuple[type, Any]] = [(kind, _differentiated) for kind in functions if kind not in own]
    replacements += [(kind, _with_its_backward(kind)) for kind in functions if kind in own]
    with replaced_forwards(replacements), ExitStack() as saving:
        for kind, _ in replacements:
            if kind.setup_context is not torch.autograd.Function.setup_context:  # type: ignore[attr-defined]
                saving.enter_context(mock.patch.object(kind, "setup_context", staticmethod(_saves_nothing)))
        yield


def _saves_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    pass


@torch.library.custom_op("gradcheck_suite::own_backward", mutates_args=())
def _own_backward(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
    """Return the outputs of a custom function; the operation ties them to the function's inputs."""
    return [x.clone() for x in outputs]


@_own_backward.register_fake
def _(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
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
        found = iter(jax.pure_callback(lambda *given: _in_torch(call, *given), shapes, inputs, cotangents))
        # the cotangent of whole numbers has a dtype of its own
        gradients = [next(found) if is_float(x) else np.zeros(x.shape, jax.dtypes.float0) for x in inputs]
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
    """Return what the backward of a custom function makes of some cotangents, for each input of floating point."""
    kind, others, spec = call
    tensors = [_tensor(x) for x in inputs]
    wanted = [x.requires_grad_() for x in tensors if x.is_floating_point()]
    remaining = (x.clone() for x in tensors)
    with torch.enable_grad():
        out = kind.apply(*pytree.tree_unflatten([next(remaining) if x is _TENSOR else x for x in others], spec))
    several = out if isinstance(out, tuple) else (out,)
    real = [x for x in several if isinstance(x, torch.Tensor) and x.is_floating_point()]
    pairs = [(x, _tensor(c)) for x, c in zip(real, cotangents, strict=True) if x.requires_grad]
    found = torch.autograd.grad([x for x, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True)
    return [_numbers(torch.zeros_like(x) if g is None else g) for x, g in zip(wanted, found, strict=True)]
