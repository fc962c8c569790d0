"""Tensors as text that Python reads back to the very same numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import torch

WIDTH = 132


def literal(value: Any, indent: int = 0, before: int = 0) -> str:
    """Return numbers or nested lists of them as text, on several lines where one is too long.

    Args:
        value: the data; `nan` and `inf` come out by name.
        indent: of the line that the text begins on.
        before: length of what stands before it on that line.
    """
    text = repr(value)
    if not isinstance(value, list) or indent + before + len(text) <= WIDTH:
        return text
    inside = " " * (indent + 4)
    if any(isinstance(entry, list) for entry in value):
        lines = [f"{inside}{literal(entry, indent + 4)}," for entry in value]
    else:
        lines = textwrap.wrap(text[1:-1] + ",", WIDTH, initial_indent=inside, subsequent_indent=inside)
    return "\n".join(["[", *lines, f"{' ' * indent}]"])


def values(tensor: torch.Tensor) -> Any:
    """Return a tensor's entries as nested lists of Python numbers; floating ones exactly, as float64 holds them all."""
    tensor = tensor.detach().cpu()
    return (tensor.to(torch.float64) if tensor.is_floating_point() else tensor).tolist()


def tensor_text(tensor: torch.Tensor, dtype: str, indent: int) -> str:
    """Return the call that makes a tensor again.

    Args:
        tensor: of numbers or truth values.
        dtype: the script's arguments for floating tensors, others keep their own.
        indent: of the line that the call stands on.
    """
    named = f", {dtype}" if tensor.is_floating_point() else dtype.partition("dtype=DTYPE")[2]
    return f"torch.tensor({literal(values(tensor), indent, 32 + len(named))}{named})"


def table(name: str, entries: Mapping[str, Any]) -> str:
    """Return the assignment of a dict to a name, one entry after the other."""
    lines = [f'    "{key}": {literal(value, 4, len(key) + 5)},' for key, value in entries.items()]
    return "\n".join([f"{name} = {{", *lines, "}"])
