"""Tensors as Python source that evaluates to exactly the same numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import torch

WIDTH = 132


def literal(value: Any, indent: int = 0, before: int = 0) -> str:
    """Return a number or nested lists of numbers as source, on several lines where one is too long.

    Args:
        value: the data; `nan` and `inf` come out by name.
        indent: of the line that the text begins on.
        before: number of characters before it on that line.
    """
    text = repr(value)
    if not isinstance(value, list) or indent + before + len(text) <= WIDTH:
        return text
    inside = " " * (indent + 4)
    if any(isinstance(entry, list) for entry in value):
        lines = [f"{inside}{literal(entry, indent + 4, 1)}," for entry in value]
    else:
        lines = textwrap.wrap(text[1:-1] + ",", WIDTH, initial_indent=inside, subsequent_indent=inside)
    return "\n".join(["[", *lines, f"{' ' * indent}]"])


def values(tensor: torch.Tensor) -> Any:
    """Return a tensor's entries as nested lists of Python numbers, without rounding: float64 has every float value."""
    tensor = tensor.detach().cpu()
    return (tensor.to(torch.float64) if tensor.is_floating_point() else tensor).tolist()


def tensor_text(tensor: torch.Tensor, indent: int) -> str:
    """Return the call of `torch.tensor` that makes an equal tensor of floats, integers or booleans on the device."""
    options = ", dtype=DTYPE, device=DEVICE" if tensor.is_floating_point() else ", device=DEVICE"
    return f"torch.tensor({literal(values(tensor), indent, 32 + len(options))}{options})"


def table(name: str, entries: Mapping[str, Any]) -> str:
    """Return the assignment of a dict to a name, each entry on a line of its own."""
    lines = [f'    "{key}": {literal(value, 4, len(key) + 5)},' for key, value in entries.items()]
    return "\n".join([f"{name} = {{", *lines, "}"])
