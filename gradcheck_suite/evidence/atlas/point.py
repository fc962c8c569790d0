"""A point of the atlas: an operation in both frameworks, and inputs at which its derivative is a choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch

Torch = Callable[..., torch.Tensor]
Jax = Callable[..., jax.Array]


@dataclass(frozen=True)
class Point:
    """An operation and the inputs at which its derivative is a choice.

    Attributes:
        operation: the operation's name, in torch's words.
        at: the inputs, in words.
        inputs: numbers or nested lists of numbers, each an argument that is differentiated.
        torch: the operation in torch: tensors -> tensor.
        jax: the operation in JAX as its users write it: arrays -> array.
        sides: left and right derivative of a function of one number, from mathematics; None for anything else.
        tied: flat indices, within the first input, of the elements that are equal; empty where none are.
        note: what makes the two frameworks differ by definition; empty where nothing does.
    """

    operation: str
    at: str
    inputs: tuple[Any, ...]
    torch: Torch
    jax: Jax
    sides: tuple[float, float] | None = None
    tied: tuple[int, ...] = ()
    note: str = ""


def kinks(
    operation: str, torch_function: Torch, jax_function: Jax, points: dict[float, tuple[float, float]], note: str = ""
) -> tuple[Point, ...]:
    """Return the points of a function of one number.

    Args:
        operation: the operation's name.
        torch_function: the function in torch.
        jax_function: the function in JAX.
        points: x -> (left derivative, right derivative) at x; NaN where there is none.
        note: what makes the two differ by definition.
    """
    return tuple(
        Point(operation, f"x = {number(x)}", (x,), torch_function, jax_function, sides, note=note)
        for x, sides in points.items()
    )


def ties(
    operation: str, torch_function: Torch, jax_function: Jax, x: Sequence[float], *tied: int, note: str = ""
) -> Point:
    """Return a point whose input has equal elements, those at the indices `tied`."""
    values = ", ".join(map(number, x))
    return Point(operation, f"x = [{values}]", (list(x),), torch_function, jax_function, tied=tied, note=note)


def number(x: float) -> str:
    """Return a number as the table prints it."""
    if math.isnan(x):
        return "NaN"
    if math.isinf(x):
        return "inf" if x > 0 else "-inf"
    return f"{x:.6g}"
