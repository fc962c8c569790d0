"""Checks of a model's parameters after a run: unchanged shapes and dtypes, and values that only the optimizer moved.

Stand-alone scripts copy these functions, which therefore need torch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from gradcheck_suite.execution.observer import Observation

Structure = dict[str, tuple[torch.nn.Parameter, dict[str, object]]]


def structure(model: torch.nn.Module) -> Structure:
    """Return each parameter with its shape, dtype, device and requires_grad, which a loop must not change."""
    return {
        name: (p, {"shape": tuple(p.shape), "dtype": p.dtype, "device": p.device, "requires_grad": p.requires_grad})
        for name, p in model.named_parameters()
    }


def structure_changes(before: Structure, after: Structure) -> str | None:
    """Return how the loop changed the model's parameters apart from their values, or None."""
    changes = [f"removed {name}" for name in before.keys() - after.keys()]
    changes += [f"added {name}" for name in after.keys() - before.keys()]
    for name in before.keys() & after.keys():
        (old, was), (new, now) = before[name], after[name]
        if old is not new:
            changes.append(f"replaced {name} by another parameter")
        changes += [f"changed {name}.{what} from {was[what]} to {now[what]}" for what in was if was[what] != now[what]]
    return ", ".join(sorted(changes)) or None


def replayed(
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    start: Mapping[str, torch.Tensor],
    observations: Iterable[Observation],
) -> dict[str, torch.Tensor]:
    """Return the parameters after an optimizer's steps on the observed gradients, with the observed settings.

    Args:
        make_optimizer: parameters -> the optimizer.
        start: parameter name -> its value before the first step.
        observations: one per step, in order.
    """
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    optimizer = make_optimizer(list(parameters.values()))
    for observation in observations:
        for name, p in parameters.items():
            seen = observation.gradients[name]
            p.grad = None if seen is None else seen.clone()
        for group, settings in zip(optimizer.param_groups, observation.settings, strict=False):
            group.update(settings)
        optimizer.step()
    return {name: p.detach() for name, p in parameters.items()}


def drift(observed: torch.Tensor, expected: torch.Tensor, steps: int) -> tuple[float, float]:
    """Return a parameter's largest |observed - expected|, and the bound on its rounding error after some steps.

    The error is NaN if an element of either is.
    """
    if not expected.numel():
        return 0.0, 0.0
    want = expected.to(torch.float64)
    error = float((observed.to(torch.float64) - want).abs().max())
    return error, 64 * torch.finfo(observed.dtype).eps * max(1.0, float(want.abs().max())) * steps
