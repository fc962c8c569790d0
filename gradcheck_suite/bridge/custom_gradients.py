"""What `torch.export` drops of a loss: gradient hooks, and the backwards of custom `autograd.Function`s.

Neither leaves a trace in the exported graph. A hook is refused. Of a custom function JAX differentiates the forward,
and `custom_functions` holds its backward to that; where the two differ on purpose, the graph keeps a call of the
backward itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gradcheck_suite.bridge.errors import BridgeError
from gradcheck_suite.execution.batches import map_leaves
from gradcheck_suite.execution.custom_functions import kinds_of
from gradcheck_suite.schema.contract import Batch

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


def _refuse_changing_hooks(model: nn.Module, loss: Callable[..., torch.Tensor], batch: Batch) -> None:
    """Refuse a module whose backward hook changes a gradient; one that only looks at it is no matter."""
    hooked = {name: m for name, m in model.named_modules() if m._backward_hooks or m._backward_pre_hooks}
    wanted = [p for p in model.parameters() if p.requires_grad]

    def gradient() -> list[torch.Tensor]:
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
        if not all(map(partial(torch.allclose, rtol=1e-12, atol=0.0, equal_nan=True), gradient(), without)):
            raise BridgeError(f"the module {name!r} has a backward hook that changes a gradient: {_ADVICE}")


def functions_of(model: nn.Module, loss: Callable[..., torch.Tensor], batch: Batch) -> frozenset[type]:
    """Run the loss once in torch and return the classes of its custom functions, custom operations left out.

    Args:
        model: the model; its buffers and torch's random state are restored.
        loss: (model, batch) -> scalar tensor.
        batch: a tree of dicts, lists and tuples of tensors.

    Raises:
        BridgeError: the loss is not a floating-point scalar, or has a gradient hook, which the message names.
    """
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise BridgeError(f"the parameter {name!r} has a gradient hook: {_ADVICE}")
    recorder = _HookRecorder()
    with restored(model), recorder, torch.enable_grad():
        value = loss(model, map_leaves(torch.clone, batch))
    if recorder.hooked:
        raise BridgeError(f"the forward registers a gradient hook on a tensor: {_ADVICE}")
    if not isinstance(value, torch.Tensor) or value.ndim or not value.is_floating_point():
        got = f"a {value.dtype} tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise BridgeError(
            f"the loss must be one scalar tensor of floating point, got {got}: reduce it with .mean() or .sum()"
        )
    _refuse_changing_hooks(model, loss, batch)
    return frozenset(kind for kind in kinds_of([value]) if not kind.__name__.startswith(_CUSTOM_OPERATION))
