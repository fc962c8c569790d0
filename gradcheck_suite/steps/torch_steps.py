"""The same steps by torch: one optimizer, in each implementation that torch has of its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradcheck_suite.steps.counterpart import Counterpart
from gradcheck_suite.steps.trajectory import Numbers

Gradient = Callable[[int, list[torch.Tensor]], list[torch.Tensor]]
IMPLEMENTATIONS: dict[str, Mapping[str, Any]] = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
"""torch's implementations of a step, and the arguments that choose them."""


@dataclass(frozen=True)
class Steps:
    """Some steps of a torch optimizer, in float64 whatever the dtype that they were computed in.

    Attributes:
        settings: of the optimizer's parameter group, with an epsilon of None replaced by what it stands for.
        start: the parameters before the first step.
        gradients: of each step, one array for each parameter.
        parameters: after each step, flattened, (steps, parameters).
    """

    settings: dict[str, Any]
    start: list[Numbers]
    gradients: list[list[Numbers]]
    parameters: Numbers


def take_steps(
    counterpart: Counterpart,
    settings: Mapping[str, Any],
    start: Sequence[torch.Tensor],
    gradient: Gradient,
    steps: int,
    *,
    implementation: str = "single",
) -> Steps:
    """Take some steps of a torch optimizer.

    Args:
        counterpart: names the optimizer.
        settings: arguments of its class; what is left out has its default.
        start: the parameters; their dtype is that of the steps.
        gradient: (index of the step, parameters) -> their gradients, as tensors of the same dtype, sparse or dense.
        steps: number of steps.
        implementation: one of `counterpart.implementations`.
    """
    parameters = [torch.nn.Parameter(p.clone()) for p in start]
    chosen = IMPLEMENTATIONS[implementation] if len(counterpart.implementations) > 1 else {}
    optimizer = getattr(torch.optim, counterpart.torch)(parameters, **settings, **chosen)
    seen, after = [], []
    for index in range(steps):
        gradients = gradient(index, [p.detach() for p in parameters])
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g
        seen.append([_wide(g.to_dense() if g.is_sparse else g) for g in gradients])
        # of a closure, L-BFGS reads the loss alone, which its tolerances look at
        optimizer.step(lambda: 1.0)
        after.append(np.concatenate([_wide(p.detach()).reshape(-1) for p in parameters]))
    (group,) = optimizer.param_groups
    return Steps(settings_of(group, start[0].dtype), [_wide(p) for p in start], seen, np.stack(after))


def settings_of(group: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the settings of a parameter group of a dtype, with those that are None replaced by what they stand for."""
    found = {name: value for name, value in group.items() if name != "params"}
    eps = found.get("eps")
    if isinstance(eps, tuple) and eps[0] is None:
        found["eps"] = (torch.finfo(dtype).eps, *eps[1:])
    return found


def _wide(tensor: torch.Tensor) -> Numbers:
    wide: Numbers = tensor.detach().to("cpu", torch.float64).numpy()
    return wide
