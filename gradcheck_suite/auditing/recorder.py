"""The recorder of a live run: what the replaced functions of torch report, put together into windows.

Nothing here judges. An error of the recorder is noted as a finding and never raised into the user's program.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import Any

import torch
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import TensorWeakRef

from gradcheck_suite.auditing import losses
from gradcheck_suite.auditing import losses as calls
from gradcheck_suite.auditing.losses import LOSSES, NOWHERE, Call, Place, declared_denominator, here, living, reached
from gradcheck_suite.auditing.passes import Forward, Forwards, Gate, Pass, Watched, sketch, supported

# The accumulation steps that a trainer is configured with, read off the stack at a step; no trainer is imported.
#
# A window is held only to a number that the trainer divides by. transformers' Trainer keeps the window's own length
# in `current_gradient_accumulation_steps` since transformers#39659, and divides by that: a short window there says
# nothing about K.


def _of_transformers(trainer: Any) -> Any:
    steps = trainer.args.gradient_accumulation_steps
    return steps if getattr(trainer, "current_gradient_accumulation_steps", steps) == steps else None


def _of_lightning(trainer: Any) -> Any:
    return trainer.accumulate_grad_batches


TRAINERS: dict[str, Callable[[Any], Any]] = {
    "accelerate.optimizer": lambda optimizer: optimizer.gradient_state.num_steps,
    "lightning.pytorch.trainer.trainer": _of_lightning,
    "pytorch_lightning.trainer.trainer": _of_lightning,
    "transformers.trainer": _of_transformers,
}
"""The module of a trainer's methods -> how to read its accumulation steps off `self`."""


def configured_steps() -> int | None:
    """Return the accumulation steps of the outermost trainer that runs, or None where there is none or it has 1."""
    found: Any = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        read = TRAINERS.get(frame.f_globals.get("__name__", ""))
        if read is not None and (owner := frame.f_locals.get("self")) is not None:
            with contextlib.suppress(AttributeError):  # another class of that module, or another release
                found = read(owner)
        frame = frame.f_back
    return found if type(found) is int and found > 1 else None


Judge = Callable[[Watched, Place], None]


def _in_backward() -> int:
    # the public API does not tell; torch/utils/checkpoint.py reads the same
    return torch._C._current_graph_task_id()


class Recorder:
    """What has happened since each optimizer's last step.

    Attributes:
        findings: what could not be seen or judged -> how often.
        watched: the optimizers, in the order in which they were found.
        unrecognised: `file:line` of a call of backward -> name of an autograd node there that is no recognised loss.
        muted: whether nothing is recorded, since a window is computed again.
        every: one window in so many is recorded, to be computed again; None for none.
    """

    def __init__(self, judge: Judge, *, weights: bool = True, sums: bool = True, every: int | None = None) -> None:
        self.findings: Counter[str] = Counter()
        self.watched: list[Watched] = []
        self.unrecognised: dict[str, str] = {}
        self.losses_seen = 0
        self.passes_seen = 0
        self.steps_seen = 0
        self.weights, self.sums, self.every = weights, sums, every
        self.muted = False
        self.forwards = Forwards(self._recording, self._receive_output, self.guarded)
        self._judge = judge
        self._gates: dict[int, Gate] = {}
        self._pass: Pass | None = None
        self._depth = 0
        self._task = -1
        self._loss_depth = 0
        self._handles: list[Any] = []

    # Optimizers

    def open(self, *, scan: bool) -> None:
        """Watch the optimizers that exist already, if `scan` says to look for them, and every step of any."""
        self._handles = [
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ]
        if self.every is not None:
            self.forwards.open()
        for optimizer in living(torch.optim.Optimizer) if scan else ():
            if hasattr(optimizer, "param_groups"):
                self.watch(optimizer)

    def close(self) -> None:
        """Remove every hook."""
        self.forwards.close()
        for handle in self._handles:
            handle.remove()
        for gate in self._gates.values():
            gate.close()
        self._gates.clear()

    def watch(self, optimizer: torch.optim.Optimizer) -> Watched:
        """Watch an optimizer, and those of its parameters that are new."""
        state = self.state(optimizer)
        if state is None:
            state = Watched(weakref.ref(optimizer))
            self.watched.append(state)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in state.parameters:
                    self._watch_parameter(state, parameter)
        return state

    def state(self, optimizer: torch.optim.Optimizer) -> Watched | None:
        """Return what is known of an optimizer."""
        return next((state for state in self.watched if state.optimizer() is optimizer), None)

    def _watch_parameter(self, state: Watched, parameter: torch.Tensor) -> None:
        key = id(parameter)
        state.parameters[key] = weakref.ref(parameter)
        if not self.sums and not self.weights and self.every is None:
            return
        gate = self._gates.get(key)
        if gate is None or gate.parameter() is not parameter:
            if not parameter.requires_grad:
                # a frozen parameter gets its hook when it is first trained
                state.parameters.pop(key)
                return
            gate = self._gates[key] = Gate(parameter, self)
        gate.owners.append(state)
        if parameter.grad is not None and supported(parameter.grad):
            state.previous[key] = sketch(parameter.grad)

    # Losses

    def call_loss(self, name: str, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Call a loss function and note the call where its result may go backward."""
        self._loss_depth += 1
        try:
            output = function(*args, **kwargs)
        finally:
            self._loss_depth -= 1
        if self._loss_depth or not self.weights or type(output) is not torch.Tensor or not output.requires_grad:
            return output
        if torch._C._functorch.is_functorch_wrapped_tensor(output):
            self.findings["a loss inside of torch.func is not seen: its weights were not judged"] += 1
            return output
        with self.guarded("a call of a loss"):
            counted, target = losses.counted(name, args, kwargs)
            call = Call(name, here(), counted, calls.target_place(target), declared=declared_denominator())
            self.note_call(output, call)
        return output

    def note_call(self, output: torch.Tensor, call: Call) -> None:
        """Note the call of a loss."""
        self.losses_seen += 1
        calls.watch(output, call, self._receive)

    def declare(self, output: torch.Tensor, call: Call) -> None:
        """Note a loss that the user declares; recognised calls that it is made of are part of it."""
        for other in reached(output.grad_fn).calls:
            if other is not None:
                other.inner = True
        self.note_call(output, call)

    def _receive(self, call: Call, cotangent: torch.Tensor) -> None:
        with self.guarded("a cotangent"):
            backward = self.current_pass()
            if call.inner or backward is None:
                return
            if not backward.accumulates:
                call.inner = True
            ordinal = sum(1 for other in backward.received if other.call.place.line == call.place.line)
            found, call.summand = calls.received(call, cotangent), None
            found.ordinal = ordinal
            backward.received.append(found)

    # Calls of modules

    def due(self, state: Watched) -> bool:
        """Whether the next window of an optimizer is computed again."""
        return self.every is not None and (state.measure or state.steps % self.every == 0)

    def _recording(self) -> bool:
        return not self.muted and (not self.watched or any(map(self.due, self.watched)))

    def _receive_output(self, forward: Forward, index: int, cotangent: torch.Tensor) -> None:
        backward = self.current_pass()
        if backward is not None:
            backward.forwards.setdefault(forward, {})[index] = cotangent

    # Backward passes

    def current_pass(self) -> Pass | None:
        """Return the backward pass that runs; begin one where backward was called in a way that was not seen."""
        if self.muted:
            return None
        task = _in_backward()
        if self._depth == 0 and task != self._task:
            self._task = task
            self._begin(NOWHERE, accumulates=True)
        return self._pass

    @contextmanager
    def backward(self, roots: Any, *, accumulates: bool) -> Iterator[None]:
        """Surround a call of backward or of `torch.autograd.grad`; calls inside another one belong to that."""
        if self._depth == 0:
            with self.guarded("the beginning of a backward pass"):
                self._begin(here(), accumulates=accumulates)
                self._look_at(roots)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                with self.guarded("the end of a backward pass"):
                    self._end()

    def _begin(self, place: Place, *, accumulates: bool) -> None:
        self.forwards.reset()
        self._pass = Pass(self.passes_seen, place, accumulates, steps=self.steps_seen)
        self.passes_seen += 1
        for state in self.watched:
            optimizer = state.optimizer()
            if optimizer is None:
                continue
            if self._depth == 0:
                state.stepping = state.stepping and state.in_closure
            if sum(len(group["params"]) for group in optimizer.param_groups) != len(state.parameters):
                self.watch(optimizer)
        for gate in self._gates.values():
            gate.arrange()

    def _look_at(self, roots: Any) -> None:
        """Note where no recognised loss is part of what goes backward."""
        backward = self._pass
        if backward is None or not self.weights:
            return
        tensors = [roots] if isinstance(roots, torch.Tensor) else list(roots or ())
        for root in tensors:
            node = getattr(root, "grad_fn", None)
            if node is not None:
                found = reached(node)
                for inner in found.log_probabilities:
                    self._watch_log_probabilities(inner, backward.place)
                for call, summand in found.summands.items():
                    calls.watch_summands(summand, call)
                if found.other is not None:
                    backward.unknown = found.other
                    self.unrecognised.setdefault(backward.place.line, found.other)

    def _watch_log_probabilities(self, node: Any, place: Place) -> None:
        """Read the weights off what goes backward into a node that computes the log-probability of each target."""
        name, declared = node.name(), declared_denominator()

        def hook(cotangents: Any) -> None:
            handle.remove()
            if cotangents[0] is not None:
                counted = losses.each(cotangents[0])
                self._receive(Call(name, place, counted, None, declared=declared), -cotangents[0])

        handle = node.register_prehook(hook)
        self.losses_seen += 1

    def _end(self) -> None:
        backward, self._pass = self._pass, None
        if backward is None or not self.sums or not backward.accumulates:
            return
        for state in self.watched:
            if state.detail and state.pending and state.pending[-1] is backward:
                for key, parameter in state.live():
                    if parameter.grad is not None and supported(parameter.grad):
                        backward.after[key] = sketch(parameter.grad)
                        backward.held[key] = TensorWeakRef(parameter.grad)

    def note_clip(self, parameters: Any, norm: Any, largest: float) -> None:
        """Note that the gradients of some parameters were clipped to a largest norm."""
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        keys = frozenset(id(p) for p in tensors)
        for state in self.watched:
            if state.pending and keys & state.parameters.keys():
                state.pending[-1].clips.append((keys, norm, float(largest)))
                return

    def note_unsupported(self, gradient: torch.Tensor) -> None:
        """Note a gradient that cannot be sketched."""
        what = f"{type(gradient).__name__}, {gradient.layout}, {gradient.dtype}, {gradient.device.type}"
        self.findings[f"gradients of a kind that has no sketch ({what}) were not compared with what arrived"] += 1

    # Steps

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        state = self.state(optimizer)
        if state is None:
            state = self.watch(optimizer)
            state.late = True
        if state.stepping:
            # `step` of a subclass that calls the one of its base class
            return None
        state.stepping = True
        place = here()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._step(state, place)
            return None

        def run(*arguments: Any, **keywords: Any) -> Any:
            state.in_closure = True
            try:
                value = closure(*arguments, **keywords)
            finally:
                state.in_closure = False
            self._step(state, place)
            return value

        return args[:1] + args[2:], {**kwargs, "closure": run}

    def _step(self, state: Watched, place: Place) -> None:
        self.steps_seen += 1
        self.forwards.reset()
        self.muted = True
        try:
            with self.guarded("a step"):
                self._judge(state, place)
        finally:
            self.muted = False
            state.steps += 1
            for backward in state.pending:
                backward.consumers.add(id(state))
            state.pending.clear()
            state.overflown = state.late = False

    def _step_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        state = self.state(optimizer)
        if state is not None:
            state.stepping = False

    def skip_step(self, optimizer: torch.optim.Optimizer, steps_before: int) -> None:
        """Forget a window whose step a GradScaler skipped."""
        state = self.state(optimizer)
        if state is not None and state.steps == steps_before and state.pending:
            state.pending.clear()
            state.previous = dict(state.gradients())
            self.findings[
                "a GradScaler skipped a step, since gradients were not finite: that window was not judged"
            ] += 1

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Turn an error of the recorder into a finding."""
        try:
            yield
        except Exception as error:
            if getattr(error, "gradcheck_suite_passes", False):
                raise
            self.findings[f"{what} could not be observed ({type(error).__name__}: {error}); please report it"] += 1


# What is replaced in torch for as long as an audit lasts.
#
# The loss functions are replaced in `torch.nn.functional` and wherever a module had imported them by name. An active
# `TorchFunctionMode` would see the same calls, but Dynamo traces into it and fails to compile. The replacements step
# aside while torch compiles or scripts a function, so a compiled region computes what it always did, unseen.


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
