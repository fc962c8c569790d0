"""Calls of the user's modules that lead to a loss: what is needed to compute a window again.

A call is recorded where no other recorded call surrounds it. Its inputs are kept by reference and the gradient of each
of its outputs by a hook, so that the user's code between a module and a loss need not run again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as module_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils.hooks import unserializable_hook

from gradcheck_suite.live.recording.sketches import Sketch, sketch

TRANSPARENT = ("DistributedDataParallel", "DataParallel")
"""Wrappers whose inner module is recorded instead: to call them again would start a collective."""


@dataclass(eq=False)
class Forward:
    """One call of a module.

    Attributes:
        module: that was called.
        arguments: flat positional and keyword arguments; tensors are detached and share their storage.
        structure: how `arguments` are put together.
        versions: `_version` of each tensor of `arguments` when the module was called, -1 for other values.
        needs_gradient: whether each of `arguments` required a gradient.
        random: states of the random number generators.
        modes: `training` of each submodule.
        autocast: device type, dtype, and whether autocast was on.
        point: fingerprint of the module's parameters.
        compiled: whether the module is compiled.
        outputs: sketch of each output tensor; None for other outputs and for tensors without a gradient.
        scalars: which outputs have no dimension.
    """

    module: torch.nn.Module
    arguments: list[Any]
    structure: Any
    versions: list[int]
    needs_gradient: list[bool]
    random: RandomState
    modes: tuple[bool, ...]
    autocast: tuple[str, torch.dtype, bool]
    point: tuple[Any, ...]
    compiled: bool = False
    outputs: list[Sketch | torch.Tensor | None] = field(default_factory=list)
    scalars: list[bool] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        """Whether an argument was changed in place since the call."""
        return any(
            value._version != version
            for value, version in zip(self.arguments, self.versions, strict=True)
            if isinstance(value, torch.Tensor)
        )


@dataclass(frozen=True)
class RandomState:
    """The states of the generators of torch (CPU and GPUs), numpy and Python."""

    cpu: torch.Tensor
    devices: tuple[torch.Tensor, ...]
    numpy: Any
    python: Any

    @staticmethod
    def now() -> RandomState:
        """Return the present states."""
        used = torch.cuda.is_available() and torch.cuda.is_initialized()
        devices = tuple(torch.cuda.get_rng_state_all()) if used else ()
        return RandomState(torch.get_rng_state(), devices, np.random.get_state(), random.getstate())

    def set(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        if self.devices:
            torch.cuda.set_rng_state_all(list(self.devices))
        np.random.set_state(self.numpy)
        random.setstate(self.python)


def point_of(module: torch.nn.Module) -> tuple[Any, ...]:
    """Return what changes when something writes to a module's parameters: versions, addresses and a few values."""
    parameters = list(module.parameters())
    sample = [p.detach() for p in parameters[:8] if p.device.type == "cpu" and p.numel() and p.layout == torch.strided]
    values = tuple(float(p.as_strided((), ())) for p in sample)
    return sum(p._version for p in parameters), sum(p.data_ptr() for p in parameters), values


def _autocast(module: torch.nn.Module) -> tuple[str, torch.dtype, bool]:
    device = next((p.device.type for p in module.parameters()), "cpu")
    return device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)


class Forwards:
    """Records the calls of modules while `wanted()` says so.

    Attributes:
        copies: whether inputs are copied, since the program changes them in place.
    """

    def __init__(
        self,
        wanted: Callable[[], bool],
        receive: Callable[[Forward, int, torch.Tensor], None],
        guarded: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.copies = False
        self._wanted, self._receive, self._guarded = wanted, receive, guarded
        self._surrounding: torch.nn.Module | None = None
        self._begun: tuple[Any, ...] | None = None
        self._handles: list[Any] = []

    def open(self) -> None:
        """Watch the calls of modules."""
        others = bool(module_hooks._has_any_global_hook())
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, with_kwargs=True),
        ]
        # a compiled module asks for it, and would warn of our hooks (torch/_dynamo/eval_frame.py, no issue known)
        self._asked, module_hooks._has_any_global_hook = module_hooks._has_any_global_hook, lambda: others

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
            # torch 2.13.0 leaves this entry behind (torch/nn/modules/module.py, no issue known)
            module_hooks._global_forward_hooks_with_kwargs.pop(handle.id, None)
        if self._handles:
            module_hooks._has_any_global_hook = self._asked
        self._handles = []

    def reset(self) -> None:
        """Forget a call that has not returned."""
        self._surrounding = self._begun = None

    def _before(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or self._surrounding not in (None, module) or not self._wanted():
            return
        if type(module).__name__ in TRANSPARENT or not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() != -1 or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        if not any(p.requires_grad for p in module.parameters()):
            return
        with self._guarded("a call of a module"):
            self._surrounding = module
            modes = tuple(part.training for part in module.modules())
            self._begun = arguments, RandomState.now(), modes, _autocast(module), point_of(module)

    def _after(self, module: torch.nn.Module, _: Any, keywords: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or module is not self._surrounding:
            return
        begun = self._begun
        self.reset()
        if begun is not None:
            with self._guarded("a call of a module"):
                self._record(module, begun, keywords, output)

    def _record(self, module: torch.nn.Module, begun: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        arguments, random_state, modes, autocast, point = begun
        values, structure = pytree.tree_flatten((arguments, keywords))
        kept = [self._kept(value) for value in values]
        forward = Forward(
            module=module,
            arguments=kept,
            structure=structure,
            versions=[value._version if isinstance(value, torch.Tensor) else -1 for value in kept],
            needs_gradient=[isinstance(value, torch.Tensor) and value.requires_grad for value in values],
            random=random_state,
            modes=modes,
            autocast=autocast,
            point=point,
            compiled=hasattr(module, "_orig_mod"),
        )
        for index, tensor in enumerate(differentiable(output)):
            forward.outputs.append(sketch(tensor))
            forward.scalars.append(tensor.dim() == 0)
            tensor.register_hook(self._hook(forward, index))

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().clone() if self.copies else value.detach()

    def _hook(self, forward: Forward, index: int) -> Callable[[torch.Tensor], None]:
        @unserializable_hook  # type: ignore[untyped-decorator]
        def hook(cotangent: torch.Tensor) -> None:
            self._receive(forward, index, cotangent.detach())

        return hook


def leaves_of(output: Any) -> list[Any]:
    """Return the leaves of a module's output, which may be an object with attributes."""
    leaves: list[Any] = output if isinstance(output, list) else pytree.tree_leaves(output)
    if len(leaves) == 1 and hasattr(leaves[0], "__dict__") and not isinstance(leaves[0], torch.Tensor):
        leaves = pytree.tree_leaves(dict(vars(leaves[0])))
    return leaves


def is_differentiable(leaf: Any) -> bool:
    """Whether a gradient may come through a leaf of a module's output."""
    return type(leaf) is torch.Tensor and leaf.grad_fn is not None


def differentiable(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a module's output through which a gradient may come."""
    return [leaf for leaf in leaves_of(output) if is_differentiable(leaf)]
