"""What reaches `optimizer.step()`: every parameter's gradient, copied at that moment.

A step that is handed a closure (as Lightning's are) computes its gradients inside: they are copied once it has run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


class TooManySteps(BaseException):
    """The loop stepped far more often than it should; raised out of its `step` so that it ends."""


@dataclass(frozen=True)
class Observation:
    """One `optimizer.step()`.

    Attributes:
        gradients: parameter name -> a dense copy of its gradient, or None. Trainable parameters only.
        parameters: parameter name -> a copy of its value before the step; only kept for a real optimizer.
        settings: of each parameter group (learning rate and so on); only kept for a real optimizer.
    """

    gradients: dict[str, torch.Tensor | None]
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    settings: list[dict[str, Any]] = field(default_factory=list)


class Observer:
    """Hangs on an optimizer's public step hook and copies what it sees."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, limit: int, trajectory: bool = False
    ) -> None:
        """Watch an optimizer.

        Args:
            model: whose trainable parameters are watched.
            optimizer: whose steps are watched.
            limit: steps after which the loop is stopped.
            trajectory: whether to keep parameter values and settings as well.
        """
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.observations: list[Observation] = []
        self.exceeded = False
        self._limit, self._trajectory = limit, trajectory
        self._handle = optimizer.register_step_pre_hook(self._see)

    def _see(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if len(self.observations) >= self._limit:
            # written down too, since a loop may catch whatever is raised inside it
            self.exceeded = True
            raise TooManySteps
        # the first argument is the optimizer itself
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._note(optimizer)
            return None
        return args[:1], {**kwargs, "closure": self._noted_after(closure, optimizer)}

    def _noted_after(self, closure: Callable[[], Any], optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
        """Return the closure, which notes the step down once it has run for the first time."""
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
        """Stop watching."""
        self._handle.remove()


def dense_copy(gradient: torch.Tensor) -> torch.Tensor:
    """Return a copy of a gradient, dense where it is sparse."""
    dense = gradient.detach()
    return dense.to_dense().clone() if dense.is_sparse else dense.clone()
