"""Check that a loop leaves a model's parameters what they are: the same objects, shapes, dtypes and devices.

Stand-alone scripts copy these functions, which therefore need torch alone.
"""

from __future__ import annotations

import torch

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
