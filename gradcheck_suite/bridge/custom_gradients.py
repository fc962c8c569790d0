"""Detection of custom backwards and gradient hooks, which `torch.export` drops.

A custom `autograd.Function` or a gradient hook changes the gradient and leaves no trace in the exported graph. JAX
would differentiate the forward alone and rightly disagree with torch. The loss is therefore run once in torch, and a
custom backward or hook is reported by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from gradcheck_suite.bridge.errors import BridgeError
from gradcheck_suite.execution.batches import map_leaves
from gradcheck_suite.schema.contract import Batch

ALLOWED = ("CheckpointFunctionBackward", "GeneratedBackwardFor_")
"""Prefixes of permitted functions: checkpointing, which recomputes the forward, and custom operations."""
_ADVICE = (
    "torch.export keeps only the forward, so JAX would differentiate that and rightly disagree. "
    "Check this loop without JAX, or write the operation so that its gradient follows from its forward "
    "(x + (round(x) - x).detach())"
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
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore the buffers and torch's random state afterwards."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def refuse_custom_gradients(model: nn.Module, loss: Callable[..., torch.Tensor], batch: Batch) -> None:
    """Run the loss once in torch and reject custom backwards and gradient hooks.

    Args:
        model: the model; its buffers and torch's random state are restored.
        loss: (model, batch) -> scalar tensor.
        batch: a tree of dicts, lists and tuples of tensors.

    Raises:
        BridgeError: the loss is not a floating-point scalar, or has a custom backward or a gradient hook, which the
            message names.
    """
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise BridgeError(f"the parameter {name!r} has a gradient hook: {_ADVICE}")
    recorder = _HookRecorder()
    with _restored(model), recorder, torch.enable_grad():
        value = loss(model, map_leaves(torch.clone, batch))
    if recorder.hooked:
        raise BridgeError(f"the forward registers a gradient hook on a tensor: {_ADVICE}")
    if not isinstance(value, torch.Tensor) or value.ndim or not value.is_floating_point():
        got = f"a {value.dtype} tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise BridgeError(
            f"the loss must be one scalar tensor of floating point, got {got}: reduce it with .mean() or .sum()"
        )
    for node in _ancestors(value.grad_fn):
        if isinstance(node, BackwardCFunction) and not type(node).__name__.startswith(ALLOWED):
            name = type(node).__name__.removesuffix("Backward")
            raise BridgeError(f"{name} is an autograd.Function with a backward of its own: {_ADVICE}")


def _ancestors(node: Any) -> Iterator[Any]:
    seen, pending = set(), [node]
    while pending:
        current = pending.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        yield current
        pending.extend(parent for parent, _ in current.next_functions)
