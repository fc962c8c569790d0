"""What reaches `optimizer.step()`, and which other calls of torch a loop makes."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch.optim import lr_scheduler
from torch.utils._pytree import tree_map_only

from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.loops.ranks import uncounted


class TooManySteps(BaseException):
    """The loop stepped far too often. Raised in `optimizer.step()`, so that the loop ends."""


@dataclass(frozen=True)
class Evaluation:
    """What the optimizer found when it called its closure: most call it once a step.

    Attributes:
        gradients: name of each trainable parameter -> a dense copy of its gradient, or None.
        parameters: name of each parameter, frozen ones included -> a copy of its value.
        sparse: name -> a copy in its own layout, for each gradient that is sparse.
        loss: the value that the closure returned; None where there was no closure.
    """

    gradients: dict[str, torch.Tensor | None]
    parameters: dict[str, torch.Tensor]
    sparse: dict[str, torch.Tensor] = field(default_factory=dict)
    loss: Any = None


@dataclass(frozen=True)
class Observation:
    """One `optimizer.step()`.

    Attributes:
        evaluations: one for each call of the closure, in order; at least one.
        after: name of each parameter, frozen ones included -> a copy of its value after the step.
        settings: options of each parameter group, such as the learning rate.
        groups: names of the trainable parameters in each parameter group.
        state: name -> a copy of the optimizer's state for this parameter before the step.
        state_after: the same after the step.
        repeatable: whether the step has the same bits when it is computed again: torch's own code
            called the closure, not a compiled version of it, and no gradient is sparse on a GPU,
            which adds its entries in any order.
        is_computed: whether `after` is computed from what the optimizer returned, as for a loop of
            JAX, so that no fault of the step can show in it.
    """

    evaluations: tuple[Evaluation, ...]
    after: dict[str, torch.Tensor]
    settings: list[dict[str, Any]]
    groups: list[list[str]]
    state: dict[str, Any] = field(default_factory=dict)
    state_after: dict[str, Any] = field(default_factory=dict)
    repeatable: bool = True
    is_computed: bool = False

    @property
    def gradients(self) -> dict[str, torch.Tensor | None]:
        """The gradients that the step used last."""
        return self.evaluations[-1].gradients

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters that these gradients belong to."""
        return self.evaluations[-1].parameters


class StepObserver:
    """Records an `Observation` for every step of an optimizer, by its public step hooks."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, limit: int
    ) -> None:
        """Start observing.

        Args:
            model: the model whose parameters are observed.
            optimizer: the optimizer whose steps are observed.
            limit: number of steps after which the loop is stopped.
        """
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.observations: list[Observation] = []
        self.exceeded = False
        self._model = model
        self._limit = limit
        self._all = dict(model.named_parameters())
        self._names = {id(p): name for name, p in self.parameters.items()}
        self.last = {name: p.detach().clone() for name, p in self._all.items()}
        self.start = self.last
        self._state_after = self._state(optimizer)
        self._evaluations: list[Evaluation] = []
        self._before: dict[str, Any] = {}
        self.beginning = Observation(
            (), self.start, **self._settings(optimizer), state_after=self._state_after
        )
        self._open = False
        self._handles = [
            optimizer.register_step_pre_hook(self._enter),
            optimizer.register_step_post_hook(self._leave),
        ]

    def values(self) -> dict[str, torch.Tensor]:
        """Return copies of all parameters.

        One that has not changed since the last call is not copied again.
        """
        found = {}
        for name, p in self._all.items():
            old = self.last[name]
            found[name] = old if _is_copy(old, p) else p.detach().clone()
        self.last = found
        return found

    def _enter(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if len(self.observations) >= self._limit:
            # recorded as well, since a loop may catch the exception
            self.exceeded = True
            raise TooManySteps
        # where a step calls another one, as that of a subclass does, the inner one has the
        # arithmetic
        self._evaluations = []
        self._open = True
        # Hooks that a loop registers later may still edit gradients: a closure is called after all
        # of them, and before the optimizer reads a gradient. The first argument is the optimizer
        # itself.
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        return args[:1], {**kwargs, "closure": self._recorded(closure, optimizer)}

    def _recorded(
        self, closure: Callable[[], Any] | None, optimizer: torch.optim.Optimizer
    ) -> Callable[[], Any]:
        """Return a closure that calls the given one, if any, and records what the optimizer then
        finds.
        """
        if closure is None and isinstance(optimizer, torch.optim.LBFGS):
            raise CannotRunHere(
                "optimizer lbfgs computes the loss again in each step: it needs a loop that calls "
                "run.optimizer.step(closure), as the built-in loop `closure` does"
            )
        # torch wraps the `step` of each class, to profile it and to call the hooks
        own = inspect.unwrap(type(optimizer).step).__code__

        def run() -> Any:
            loss = None if closure is None else closure()
            is_own = not torch.compiler.is_compiling() and sys._getframe(1).f_code is own
            self._evaluate(optimizer, loss, is_own=is_own)
            return loss

        return run

    def _evaluate(
        self, optimizer: torch.optim.Optimizer, loss: Any = None, *, is_own: bool = True
    ) -> None:
        sparse = {
            name: p.grad.detach().clone()
            for name, p in self.parameters.items()
            if p.grad is not None and p.grad.layout is not torch.strided
        }
        if not self._evaluations:
            self._before = {
                **self._settings(optimizer),
                "state": self._state(optimizer),
                "repeatable": (
                    is_own and all(gradient.device.type == "cpu" for gradient in sparse.values())
                ),
            }
        gradients = self._gradients()
        self._evaluations.append(
            Evaluation(
                gradients,
                self.values(),
                sparse,
                copied_tensors(loss),
            )
        )

    def _gradients(self) -> dict[str, torch.Tensor | None]:
        return {
            name: None if p.grad is None else dense_copy(p.grad)
            for name, p in self.parameters.items()
        }

    def _settings(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        groups = optimizer.param_groups
        return {
            "settings": [
                copied_tensors({key: value for key, value in group.items() if key != "params"})
                for group in groups
            ],
            "groups": [
                [self._names[id(p)] for p in group["params"] if id(p) in self._names]
                for group in groups
            ],
        }

    def _state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {
            name: copied_tensors(optimizer.state[p])
            for name, p in self.parameters.items()
            # the state is a defaultdict: reading an entry would make an empty one
            if p in optimizer.state
        }

    def _leave(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._open:
            return
        if not self._evaluations:
            # another hook has replaced the closure; torch's optimizers leave gradients as they are
            known = self.last
            self._evaluate(optimizer)
            self._evaluations = [replace(self._evaluations[0], parameters=known)]
            self._before["state"] = self._state_after
        elif not self._before["repeatable"] and not all(
            map(same_tree, self._gradients().values(), self._evaluations[-1].gradients.values())
        ):
            # another hook has put a closure around this one, and edited gradients when this one had
            # returned
            self._evaluations.append(replace(self._evaluations[-1], gradients=self._gradients()))
        after = self.values()
        self._state_after = self._state(optimizer)
        self.observations.append(
            Observation(
                tuple(self._evaluations), after, **self._before, state_after=self._state_after
            )
        )
        self._evaluations = []
        self._before = {}
        self._open = False

    def close(self) -> None:
        """Stop observing."""
        for handle in self._handles:
            handle.remove()


def dense_copy(gradient: torch.Tensor) -> torch.Tensor:
    """Return a dense copy of a gradient."""
    dense = gradient.detach()
    return dense.to_dense().clone() if dense.is_sparse else dense.clone()


def copied_tensors(value: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples with copies of their tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: copied_tensors(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied_tensors(inner) for inner in value)
    return value


def _is_copy(copy: torch.Tensor, original: torch.Tensor) -> bool:
    return copy.stride() == original.stride() and is_same_tensor(copy, original.detach())


def is_same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, device, shape and values.

    NaN is the same as NaN.
    """
    if (one.dtype, one.device, one.shape) != (other.dtype, other.device, other.shape):
        return False
    # momentum of sparse gradients is sparse
    one, other = (t if t.layout is torch.strided else t.to_dense() for t in (one, other))
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def same_tree(one: Any, other: Any) -> bool:
    """Return whether nested dicts, lists and tuples of tensors and other values are the same."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return is_same_tensor(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_tree(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_tree, one, other))
    # NaN is not equal to itself: L-BFGS keeps the loss, which is NaN where a micro-batch has no
    # valid target
    return type(one) is type(other) and (bool(one == other) or (one != one and other != other))


# Stand-alone scripts copy these two functions, which therefore need torch alone.


Structure = dict[str, tuple[torch.Tensor, dict[str, object]]]


def structure(model: torch.nn.Module) -> Structure:
    """Return each parameter with its shape, dtype, device and requires_grad, which a loop must not
    change.
    """
    return {
        name: (
            p,
            {
                "shape": tuple(p.shape),
                "dtype": p.dtype,
                "device": p.device,
                "requires_grad": p.requires_grad,
            },
        )
        for name, p in model.named_parameters()
    }


def structure_changes(before: Structure, after: Structure) -> str | None:
    """Return how the loop changed the model's parameters apart from their values, or None."""
    changes = [f"removed {name}" for name in before.keys() - after.keys()]
    changes += [f"added {name}" for name in after.keys() - before.keys()]
    cause = ""
    for name in before.keys() & after.keys():
        old, was = before[name]
        new, now = after[name]
        if old is not new:
            changes.append(f"replaced {name} by another parameter")
            # a module takes no plain tensor for a parameter, but torch itself leaves some there
            # (pytorch#164759)
            if not isinstance(new, torch.nn.Parameter):
                cause = (
                    "; torch.func.functional_call does this to a module that the model holds under"
                    " two names (pytorch#164759): pass tie_weights=False, and a tied parameter once"
                    " for each module"
                )
        changes += [
            f"changed {name}.{what} from {was[what]} to {now[what]}"
            for what in was
            if was[what] != now[what]
        ]
    return ", ".join(sorted(changes)) + cause or None


METHODS = ("unscale_", "step", "update")
"""The methods of a `GradScaler` whose calls are counted."""
_SCHEDULERS = [
    found
    for found in vars(lr_scheduler).values()
    if isinstance(found, type)
    and issubclass(found, lr_scheduler.LRScheduler)
    and "step" in vars(found)
]


class Calls:
    """The calls of gradient scalers and of learning rate schedulers so far.

    Attributes:
        skipped: for each call of `GradScaler.step` that did not step, the number of optimizer steps
            before it. A scaler does not step where a gradient is infinite or NaN.
        scalers: (method, scaler, optimizer) by their ids -> number of calls in each epoch.
        schedulers: scheduler by its id -> number of steps in each epoch.
    """

    def __init__(self) -> None:
        self.skipped: list[int] = []
        self.scalers: dict[tuple[str, int, int], Counter[int]] = defaultdict(Counter)
        self.schedulers: dict[int, Counter[int]] = defaultdict(Counter)
        self._kept: list[Any] = []  # so that no id is used again

    def note_scaler(self, method: str, scaler: Any, arguments: Sequence[Any], epoch: int) -> None:
        """Count one call, which has returned.

        A `step` calls `unscale_` by itself where the loop has not.
        """
        optimizer = (
            arguments[0] if arguments and isinstance(arguments[0], torch.optim.Optimizer) else None
        )
        self.scalers[method, id(scaler), id(optimizer)][epoch] += 1
        self._kept.append((scaler, optimizer))

    def note_scheduler(self, scheduler: Any, epoch: int) -> None:
        """Count a step that has returned.

        The call that a scheduler makes in its constructor does not count.
        """
        if getattr(scheduler, "last_epoch", 0) > 0:
            self.schedulers[id(scheduler)][epoch] += 1
            self._kept.append(scheduler)


@contextmanager
def recorded_calls(steps: Callable[[], int], epoch: Callable[[], int]) -> Iterator[Calls]:
    """Record the calls of every scaler and scheduler while the context is active.

    torch has no hook for them, so the methods are replaced meanwhile.

    Args:
        steps: returns the number of optimizer steps so far.
        epoch: returns the epoch of the loop.
    """
    calls = Calls()

    def recorded(method: str, original: Callable[..., Any], *, scales: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = steps()
            result = original(self, *args, **kwargs)
            if not scales:
                calls.note_scheduler(self, epoch())
                return result
            calls.note_scaler(method, self, args or tuple(kwargs.values()), epoch())
            if method == "step" and steps() == before:
                calls.skipped.append(before)
            return result

        return call

    scaler = torch.amp.GradScaler
    # the classes, not the objects: a loop may make either at any time
    places: list[tuple[type, str]] = [(scaler, method) for method in METHODS]
    places += [(scheduler, "step") for scheduler in _SCHEDULERS]
    # A scheduler may inherit the `step` of another one: of a method that is replaced already, each
    # call would be counted twice.
    wrapped = [
        (owner, method, recorded(method, getattr(owner, method), scales=owner is scaler))
        for owner, method in places
    ]
    with ExitStack() as stack:
        for owner, method, call in wrapped:
            stack.enter_context(mock.patch.object(owner, method, call))
        yield calls


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether each rank has only a part of a tensor, as of the `DTensor`s that `fully_shard`
    puts in.
    """
    return hasattr(tensor, "full_tensor")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor gathered from all ranks, or the tensor itself where it is not sharded.

    To gather is a collective, so all ranks have to step as often as each other.
    """
    if not is_sharded(tensor):
        return tensor
    with uncounted():
        full: torch.Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    return full


class RankObserver(StepObserver):
    """Observes a rank of several: parameters, gradients and states are gathered where the loop has
    sharded them.

    Attributes:
        left_behind: names of parameters that have been sharded, and of which the optimizer still
            has the old one.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, limit: int
    ) -> None:
        """Start observing."""
        self.left_behind: tuple[str, ...] = ()
        self._old: dict[str, torch.nn.Parameter] = {}
        super().__init__(model, optimizer, limit=limit)

    def values(self) -> dict[str, torch.Tensor]:
        """Return copies of all parameters."""
        held = self._all
        self._all = {name: whole(p) for name, p in held.items()}  # type: ignore[misc]
        try:
            return super().values()
        finally:
            self._all = held

    def _evaluate(
        self, optimizer: torch.optim.Optimizer, loss: Any = None, *, is_own: bool = True
    ) -> None:
        self._follow()
        groups = optimizer.param_groups
        stepped = set(map(id, chain.from_iterable(group["params"] for group in groups)))
        self.left_behind = tuple(name for name, p in self._old.items() if id(p) in stepped)
        super()._evaluate(optimizer, loss, is_own=is_own)

    def _follow(self) -> None:
        """Observe the parameters that the loop has sharded in place of those that they were made
        of.
        """
        for name, p in self._model.named_parameters():
            if is_sharded(p) and self._all.get(name, p) is not p:
                self._old[name] = self._all[name]
                self._all[name] = p
                if name in self.parameters:
                    self.parameters[name] = p
                    self._names[id(p)] = name

    def _gradients(self) -> dict[str, torch.Tensor | None]:
        return {
            name: None if p.grad is None else dense_copy(whole(p.grad))
            for name, p in self.parameters.items()
        }

    def _state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {
            name: tree_map_only(torch.Tensor, whole, state)
            for name, state in super()._state(optimizer).items()
        }


def as_before_sharding(after: Structure, before: Structure) -> Structure:
    """Return a model's structure in which a sharded parameter is the one that it was made of."""
    return {
        name: (
            before[name]
            if name in before and is_sharded(p) and about == before[name][1]
            else (p, about)
        )
        for name, (p, about) in after.items()
    }
