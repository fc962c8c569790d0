"""The names of an optimizer's parameters, from the modules that hold them."""

from __future__ import annotations

import torch

from gradcheck_suite.live.recording.objects import living
from gradcheck_suite.live.recording.passes import Watched

WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that wrappers of models add."""


def _from_modules() -> dict[int, str]:
    """Return the longest name that a module has for each parameter: the outermost module gives it."""
    names: dict[int, str] = {}
    for module in living(torch.nn.Module):
        if "_parameters" in module.__dict__:
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if len(name) > len(names.get(id(parameter), "")):
                    names[id(parameter)] = name
    return names


def parameter_name(state: Watched, key: int) -> str:
    """Return the name of a parameter: the one in its model, else its place in the optimizer.

    Looking through all modules takes a while and is done once for an optimizer.
    """
    if key not in state.names:
        found = _from_modules()
        optimizer = state.optimizer()
        for i, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
            for j, parameter in enumerate(group["params"]):
                name = found.get(id(parameter), f"param_groups[{i}]['params'][{j}]")
                for prefix in WRAPPERS:
                    name = name.removeprefix(prefix)
                state.names[id(parameter)] = name
    return state.names.get(key, "?")
