"""Observation of optimizer steps: the gradients and parameters that each step starts from, and what it leaves behind.

Hooks that a loop registers after the observer's may still edit gradients. The observer therefore passes every step a
closure of its own: the optimizer calls it after all hooks have run and before it reads a gradient. A closure that the
loop passes, as Lightning does, is called first. Where an optimizer calls it several times, as L-BFGS does, each call is
recorded.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gradcheck_suite.errors import CannotRunHere


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
        repeatable: whether the step has the same bits when it is computed again: torch's own code called the closure,
            not a compiled version of it, and no gradient is sparse on a GPU, which adds its entries in any order.
    """

    evaluations: tuple[Evaluation, ...]
    after: dict[str, torch.Tensor]
    settings: list[dict[str, Any]]
    groups: list[list[str]]
    state: dict[str, Any] = field(default_factory=dict)
    state_after: dict[str, Any] = field(default_factory=dict)
    repeatable: bool = True

    @property
    def gradients(self) -> dict[str, torch.Tensor | None]:
        """The gradients that the step used last."""
        return self.evaluations[-1].gradients

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters that these gradients belong to."""
        return self.evaluations[-1].parameters


class Observer:
    """Records an `Observation` for every step of an optimizer, by its public step hooks."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, limit: int) -> None:
        """Start observing.

        Args:
            model: the model whose parameters are observed.
            optimizer: the optimizer whose steps are observed.
            limit: number of steps after which the loop is stopped.
        """
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.observations: list[Observation] = []
        self.exceeded = False
        self._model, self._limit, self._all = model, limit, dict(model.named_parameters())
        self._names = {id(p): name for name, p in self.parameters.items()}
        self.last = {name: p.detach().clone() for name, p in self._all.items()}
        self.start = self.last
        self._state_after = self.start_state = self._state(optimizer)
        self._evaluations: list[Evaluation] = []
        self._before: dict[str, Any] = {}
        self._open = False
        self._handles = [
            optimizer.register_step_pre_hook(self._enter),
            optimizer.register_step_post_hook(self._leave),
        ]

    def values(self) -> dict[str, torch.Tensor]:
        """Return copies of all parameters; one that has not changed since the last call is not copied again."""
        old = self.last
        self.last = {n: old[n] if _is_copy(old[n], p) else p.detach().clone() for n, p in self._all.items()}
        return self.last

    def _enter(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if len(self.observations) >= self._limit:
            # recorded as well, since a loop may catch the exception
            self.exceeded = True
            raise TooManySteps
        # where a step calls another one, as that of a subclass does, the inner one has the arithmetic
        self._evaluations, self._open = [], True
        # the first argument is the optimizer itself
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        return args[:1], {**kwargs, "closure": self._recorded(closure, optimizer)}

    def _recorded(self, closure: Callable[[], Any] | None, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
        """Return a closure that calls the given one, if any, and records what the optimizer then finds."""
        if closure is None and isinstance(optimizer, torch.optim.LBFGS):
            raise CannotRunHere(
                "optimizer lbfgs computes the loss again in each step: it needs a loop that calls "
                "run.optimizer.step(closure), as the built-in loop `closure` does"
            )
        own = inspect.unwrap(type(optimizer).step).__code__

        def run() -> Any:
            loss = None if closure is None else closure()
            is_own = not torch.compiler.is_compiling() and sys._getframe(1).f_code is own
            self._evaluate(optimizer, loss, is_own=is_own)
            return loss

        return run

    def _evaluate(self, optimizer: torch.optim.Optimizer, loss: Any = None, *, is_own: bool = True) -> None:
        sparse = {
            name: p.grad.detach().clone()
            for name, p in self.parameters.items()
            if p.grad is not None and p.grad.layout is not torch.strided
        }
        if not self._evaluations:
            self._before = {
                "settings": [
                    copied({name: value for name, value in group.items() if name != "params"})
                    for group in optimizer.param_groups
                ],
                "groups": [
                    [self._names[id(p)] for p in group["params"] if id(p) in self._names]
                    for group in optimizer.param_groups
                ],
                "state": self._state(optimizer),
                "repeatable": is_own and all(gradient.device.type == "cpu" for gradient in sparse.values()),
            }
        gradients = self._gradients()
        self._evaluations.append(Evaluation(gradients, self.values(), sparse, copied(loss)))

    def _gradients(self) -> dict[str, torch.Tensor | None]:
        return {name: None if p.grad is None else dense_copy(p.grad) for name, p in self.parameters.items()}

    def _state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {name: copied(optimizer.state[p]) for name, p in self.parameters.items() if p in optimizer.state}

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
            # another hook has put a closure around this one, and edited gradients when this one had returned
            self._evaluations.append(replace(self._evaluations[-1], gradients=self._gradients()))
        after, self._state_after = self.values(), self._state(optimizer)
        self.observations.append(
            Observation(tuple(self._evaluations), after, **self._before, state_after=self._state_after)
        )
        self._evaluations, self._before, self._open = [], {}, False

    def close(self) -> None:
        """Stop observing."""
        for handle in self._handles:
            handle.remove()


def dense_copy(gradient: torch.Tensor) -> torch.Tensor:
    """Return a dense copy of a gradient."""
    dense = gradient.detach()
    return dense.to_dense().clone() if dense.is_sparse else dense.clone()


def copied(value: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples with copies of their tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: copied(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(inner) for inner in value)
    return value


def _is_copy(copy: torch.Tensor, original: torch.Tensor) -> bool:
    return copy.stride() == original.stride() and is_same(copy, original.detach())


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, device, shape and values; NaN is the same as NaN."""
    if (one.dtype, one.device, one.shape) != (other.dtype, other.device, other.shape):
        return False
    # momentum of sparse gradients is sparse
    one, other = (t if t.layout is torch.strided else t.to_dense() for t in (one, other))
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def same_tree(one: Any, other: Any) -> bool:
    """Return whether nested dicts, lists and tuples of tensors and other values are the same."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return is_same(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_tree(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_tree, one, other))
    # NaN is not equal to itself: L-BFGS keeps the loss, which is NaN where a micro-batch has no valid target
    return type(one) is type(other) and (bool(one == other) or (one != one and other != other))
