"""What reaches `optimizer.step()`: every parameter's gradient, copied at that moment."""

from __future__ import annotations

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

    def _see(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if len(self.observations) >= self._limit:
            # written down too, since a loop may catch whatever is raised inside it
            self.exceeded = True
            raise TooManySteps
        gradients = {name: None if p.grad is None else _copy(p.grad) for name, p in self.parameters.items()}
        if not self._trajectory:
            self.observations.append(Observation(gradients))
            return
        values = {name: p.detach().clone() for name, p in self.parameters.items()}
        settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self.observations.append(Observation(gradients, values, settings))

    def close(self) -> None:
        """Stop watching."""
        self._handle.remove()


def _copy(gradient: torch.Tensor) -> torch.Tensor:
    dense = gradient.detach()
    return dense.to_dense().clone() if dense.is_sparse else dense.clone()
