"""What is replaced in torch for as long as an audit lasts.

The loss functions are replaced in `torch.nn.functional` and wherever a module had imported them by name. An active
`TorchFunctionMode` would see the same calls, but Dynamo traces into it and fails to compile. The replacements step
aside while torch compiles or scripts a function, so a compiled region computes what it always did, unseen.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional

from gradcheck_suite.live.recording.losses import LOSSES
from gradcheck_suite.live.recording.recorder import Recorder


def _transformed(outputs: Any) -> bool:
    """Whether the results belong to a transformation of torch.func, which calls `torch.autograd.grad` itself."""
    first = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
    return isinstance(first, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(first)


class Patches:
    """The replaced attributes of one audit."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self.active = False

    @property
    def watching(self) -> bool:
        """Whether calls are noted: not while torch compiles, nor while a window is computed again."""
        return self.active and not self._recorder.muted and not torch.compiler.is_compiling()

    def install(self) -> None:
        """Replace the functions."""
        self.active = True
        losses = {name: getattr(functional, name) for name in LOSSES if hasattr(functional, name)}
        wrappers = {name: self._loss(name, function) for name, function in losses.items()}
        for name, wrapper in wrappers.items():
            self._replace(functional, name, wrapper)
        by_identity = {id(function): wrappers[name] for name, function in losses.items()}
        clip = torch.nn.utils.clip_grad_norm_
        by_identity[id(clip)] = self._clip(clip)
        for place in (torch.nn.utils, torch.nn.utils.clip_grad):
            self._replace(place, "clip_grad_norm_", by_identity[id(clip)])
        self._replace_imported(by_identity)
        self._replace(torch.autograd, "backward", self._backward(torch.autograd.backward, accumulates=True))
        self._replace(torch.autograd, "grad", self._backward(torch.autograd.grad, accumulates=False))
        self._replace(torch.jit, "script", self._script(torch.jit.script))
        optimizer = torch.optim.Optimizer
        self._replace(optimizer, "add_param_group", self._add_param_group(optimizer.add_param_group))
        scaler = torch.amp.GradScaler
        self._replace(scaler, "step", self._scaler_step(scaler.step))

    def remove(self) -> None:
        """Put the functions back."""
        self.active = False
        for holder, name, original, replacement in reversed(self._replaced):
            if holder.__dict__.get(name) is replacement:
                setattr(holder, name, original)
        self._replaced.clear()

    def _replace(self, holder: Any, name: str, replacement: Any) -> None:
        self._replaced.append((holder, name, holder.__dict__[name], replacement))
        setattr(holder, name, replacement)

    def _replace_imported(self, by_identity: dict[int, Any]) -> None:
        """Replace the functions in modules that did `from torch.nn.functional import ...` before the audit."""
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if type(names) is not dict or getattr(module, "__name__", "torch").split(".")[0] == "torch":
                continue
            for name, value in list(names.items()):
                if type(value) is FunctionType and id(value) in by_identity:
                    self._replace(module, name, by_identity[id(value)])

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Put the originals back for a while."""
        for holder, name, original, _ in self._replaced:
            setattr(holder, name, original)
        try:
            yield
        finally:
            for holder, name, _, replacement in self._replaced:
                setattr(holder, name, replacement)

    def _loss(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        patches, recorder = self, self._recorder

        @functools.wraps(function)
        def loss(*args: Any, **kwargs: Any) -> Any:
            if not patches.watching:
                return function(*args, **kwargs)
            return recorder.call_loss(name, function, args, kwargs)

        return loss

    def _backward(self, function: Callable[..., Any], *, accumulates: bool) -> Callable[..., Any]:
        patches, recorder = self, self._recorder

        @functools.wraps(function)
        def backward(*args: Any, **kwargs: Any) -> Any:
            roots = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
            if not patches.watching or _transformed(roots):
                return function(*args, **kwargs)
            with recorder.backward(roots, accumulates=accumulates):
                return function(*args, **kwargs)

        return backward

    def _clip(self, function: Callable[..., Any]) -> Callable[..., Any]:
        patches, recorder = self, self._recorder

        @functools.wraps(function)
        def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            if not patches.watching:
                return function(parameters, max_norm, *args, **kwargs)
            kept = parameters if isinstance(parameters, torch.Tensor) else list(parameters)
            norm = function(kept, max_norm, *args, **kwargs)
            with recorder.guarded("gradient clipping"):
                recorder.note_clip(kept, norm, max_norm)
            return norm

        return clip_grad_norm_

    def _script(self, function: Callable[..., Any]) -> Callable[..., Any]:
        patches = self

        @functools.wraps(function)
        def script(*args: Any, _frames_up: int = 0, **kwargs: Any) -> Any:
            # torch looks up the names that a class uses in its caller's frame, which is now one further up
            with patches._aside():
                return function(*args, _frames_up=_frames_up + 1, **kwargs)

        return script

    def _add_param_group(self, function: Callable[..., Any]) -> Callable[..., Any]:
        patches, recorder = self, self._recorder

        @functools.wraps(function)
        def add_param_group(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = function(optimizer, *args, **kwargs)
            if patches.active:
                with recorder.guarded("an optimizer"):
                    recorder.watch(optimizer)
            return result

        return add_param_group

    def _scaler_step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        patches, recorder = self, self._recorder

        @functools.wraps(function)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not patches.active:
                return function(scaler, optimizer, *args, **kwargs)
            state = recorder.state(optimizer)
            before = -1 if state is None else state.steps
            result = function(scaler, optimizer, *args, **kwargs)
            recorder.skip_step(optimizer, before)
            return result

        return step
