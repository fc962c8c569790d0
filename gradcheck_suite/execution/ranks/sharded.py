"""Observation of parameters that a loop has sharded over ranks, as `fully_shard` does: gathered, they are whole again.

`fully_shard` replaces each parameter of a model by a `DTensor` of the same name. Only a `DTensor` has `full_tensor`,
which is a collective, so all ranks have to step as often as each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from gradcheck_suite.execution.observer import Observer, dense_copy
from gradcheck_suite.execution.parameters import Structure
from gradcheck_suite.loops.ranks.counting import uncounted


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether each rank has only a part of a tensor."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor gathered from all ranks, or the tensor itself where it is not sharded."""
    if not is_sharded(tensor):
        return tensor
    with uncounted():
        full: torch.Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    return full


class RankObserver(Observer):
    """Observes a rank of several: parameters, gradients and states are gathered where the loop has sharded them.

    Attributes:
        left_behind: names of parameters that have been sharded, and of which the optimizer still has the old one.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, limit: int) -> None:
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

    def _evaluate(self, optimizer: torch.optim.Optimizer, loss: Any = None, *, is_own: bool = True) -> None:
        self._follow()
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.left_behind = tuple(name for name, p in self._old.items() if id(p) in stepped)
        super()._evaluate(optimizer, loss, is_own=is_own)

    def _follow(self) -> None:
        """Observe the parameters that the loop has sharded in place of those that they were made of."""
        for name, p in self._model.named_parameters():
            if is_sharded(p) and self._all.get(name, p) is not p:
                self._old[name], self._all[name] = self._all[name], p
                if name in self.parameters:
                    self.parameters[name] = p
                    self._names[id(p)] = name

    def _gradients(self) -> dict[str, torch.Tensor | None]:
        return {name: None if p.grad is None else dense_copy(whole(p.grad)) for name, p in self.parameters.items()}

    def _state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {name: tree_map_only(torch.Tensor, whole, state) for name, state in super()._state(optimizer).items()}


def as_before_sharding(after: Structure, before: Structure) -> Structure:
    """Return a model's structure in which a sharded parameter is the one that it was made of."""
    return {
        name: before[name] if name in before and is_sharded(p) and about == before[name][1] else (p, about)
        for name, (p, about) in after.items()
    }
