"""Observation of optimizer steps: a copy of every parameter's gradient at each step.

A step with a closure, as in Lightning, computes its gradients inside: they are copied after the closure has run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


class TooManySteps(BaseException):
    """The loop stepped far too often. Raised in `optimizer.step()`, so that the loop ends."""


@dataclass(frozen=True)
class Observation:
    """One `optimizer.step()`.

    Attributes:
        gradients: name of each trainable parameter -> a dense copy of its gradient, or None.
        parameters: name -> a copy of the parameter before the step; empty unless the trajectory is kept.
        settings: options of each parameter group, such as the learning rate; empty unless the trajectory is kept.
    """

    gradients: dict[str, torch.Tensor | None]
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    settings: list[dict[str, Any]] = field(default_factory=list)


class Observer:
    """Records an `Observation` for every step of an optimizer, by its public step hook."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, limit: int, trajectory: bool = False
    ) -> None:
        """Start observing.

        Args:
            model: the model whose trainable parameters are observed.
            optimizer: the optimizer whose steps are observed.
            limit: number of steps after which the loop is stopped.
            trajectory: whether to record parameter values and settings, too.
        """
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.observations: list[Observation] = []
        self.exceeded = False
        self._limit, self._trajectory = limit, trajectory
        self._handle = optimizer.register_step_pre_hook(self._see)

    def _see(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if len(self.observations) >= self._limit:
            # recorded as well, since a loop may catch the exception
            self.exceeded = True
            raise TooManySteps
        # the first argument is the optimizer itself
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._note(optimizer)
            return None
        return args[:1], {**kwargs, "closure": self._noted_after(closure, optimizer)}

    def _noted_after(self, closure: Callable[[], Any], optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
        """Return the closure, extended to record the step after its first run."""
        noted = False

        def run() -> Any:
            nonlocal noted
            loss = closure()
            if not noted:
                noted = True
                self._note(optimizer)
            return loss

        return run

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = {name: None if p.grad is None else dense_copy(p.grad) for name, p in self.parameters.items()}
        if not self._trajectory:
            self.observations.append(Observation(gradients))
            return
        values = {name: p.detach().clone() for name, p in self.parameters.items()}
        settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self.observations.append(Observation(gradients, values, settings))

    def close(self) -> None:
        """Stop observing."""
        self._handle.remove()


def dense_copy(gradient: torch.Tensor) -> torch.Tensor:
    """Return a dense copy of a gradient."""
    dense = gradient.detach()
    return dense.to_dense().clone() if dense.is_sparse else dense.clone()
