"""Where torch and JAX choose a derivative: kinks, ties and limits, and what each of them returns
there.

A row is computed by running both frameworks. Nothing here says what they should return, except the
one-sided derivatives at a kink, which come from mathematics. Must not import the report or the
command line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.core.results import json_number
from studies.atlas_points import Point, number

Numbers = npt.NDArray[np.float64]
_NEAR = 1e-4
"""Relative distance within which a gradient counts as one of the candidates; they are far apart, rounding is not."""


def convention(
    point: Point, of_torch: Sequence[Numbers], of_jax: Sequence[Numbers], *, agree: bool
) -> str:
    """Return which derivative torch and JAX choose, and why they differ by definition where the
    point says so.
    """
    torch_choice, jax_choice = _choice(point, of_torch), _choice(point, of_jax)
    if agree:
        return f"both: {torch_choice}"
    words = (
        f"both: {torch_choice}"
        if torch_choice == jax_choice
        else f"torch: {torch_choice}; JAX: {jax_choice}"
    )
    if torch_choice == jax_choice:
        words = f"{words}, but the numbers differ"
    return f"{words} ({point.note})" if point.note else words


def _choice(point: Point, gradient: Sequence[Numbers]) -> str:
    if point.sides is not None:
        return _side(float(gradient[0][0]), *point.sides)
    if point.tied:
        return _share(gradient[0][list(point.tied)])
    return "gradient " + ", ".join(_numbers(part) for part in gradient)


def _side(found: float, left: float, right: float) -> str:
    """Return which of the one-sided derivatives a derivative is."""
    if math.isnan(found):
        return "NaN"
    if _near(left, right):
        return (
            f"the derivative, {number(left)}"
            if _near(found, left)
            else f"{number(found)}, not {number(left)}"
        )
    candidates = {
        "the left derivative": left,
        "the right derivative": right,
        "the mean of both sides": (left + right) / 2,
        "zero": 0.0,
    }
    named = [name for name, value in candidates.items() if _near(found, value)]
    return f"{named[0]}, {number(found)}" if named else f"{number(found)}, neither side"


def _share(parts: Numbers) -> str:
    """Return how the gradient is shared among tied elements."""
    if np.isnan(parts).any():
        return "NaN"
    if not parts.any():
        return "zero to every tied element"
    nonzero = np.flatnonzero(parts)
    if len(nonzero) == 1:
        place = {0: "first", 1: "2nd", 2: "3rd"}.get(int(nonzero[0]), f"{nonzero[0] + 1}th")
        place = "last" if nonzero[0] == len(parts) - 1 else place
        return f"all to the {place} of the tied elements"
    if np.allclose(parts, parts[0], rtol=_NEAR):
        return (
            "the whole gradient to each tied element"
            if _near(float(parts[0]), 1.0)
            else "split evenly among ties"
        )
    return "shares " + _numbers(parts)


def _numbers(parts: Numbers) -> str:
    finite = [abs(part) for part in parts if math.isfinite(part)]
    smallest = 1e-6 * max(finite, default=0.0)
    listed = [number(0.0 if abs(part) <= smallest else float(part)) for part in parts]
    return listed[0] if len(listed) == 1 else f"[{', '.join(listed)}]"


def _near(x: float, y: float) -> bool:
    if not (math.isfinite(x) and math.isfinite(y)):
        return x == y or (math.isnan(x) and math.isnan(y))
    return abs(x - y) <= _NEAR * max(abs(x), abs(y))


jax.config.update("jax_enable_x64", True)

DTYPES = ("float64", "float32")
ROUNDING = 1024
"""Unit roundoffs, relative to the larger of the two numbers and 1, that two results may differ by and still agree."""

_TOGETHER = 16
_QUICKLY: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


@dataclass(frozen=True)
class Outcome:
    """What one framework returns at a point.

    Attributes:
        value: the operation's result, flattened.
        gradient: the gradient of the result's sum, one flat array per input; zeros where the
            framework has none.
    """

    value: Numbers
    gradient: tuple[Numbers, ...]

    def to_json(self) -> dict[str, Any]:
        """Return both as JSON-ready data; NaN and infinities are strings."""
        return {"value": _listed(self.value), "gradient": [_listed(part) for part in self.gradient]}


@dataclass(frozen=True)
class Row:
    """A point in one dtype, as both frameworks compute it.

    Attributes:
        point: the point.
        dtype: one of `DTYPES`.
        device: where torch computed it; JAX computes on the CPU.
        torch: what torch returns.
        jax: what JAX returns.
        agree: whether values and gradients are equal but for rounding, with NaN at the same places.
        convention: the derivative that each of them chooses, in words.
    """

    point: Point
    dtype: str
    device: str
    torch: Outcome
    jax: Outcome
    agree: bool
    convention: str

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON-ready data."""
        return {
            "operation": self.point.operation,
            "point": self.point.at,
            "dtype": self.dtype,
            "device": self.device,
            "torch": self.torch.to_json(),
            "jax": self.jax.to_json(),
            "agree": self.agree,
            "convention": self.convention,
        }


def run(points: Sequence[Point], dtypes: Iterable[str] = DTYPES, device: str = "cpu") -> list[Row]:
    """Return the row of each point in each dtype, point by point.

    Args:
        points: some of `POINTS`.
        dtypes: some of `DTYPES`.
        device: the device that torch computes on.
    """
    by_dtype = {dtype: zip(points, _in_jax(points, dtype), strict=True) for dtype in dtypes}
    rows = {
        dtype: [
            _row(point, dtype, device, _in_torch(point, dtype, device), found)
            for point, found in pairs
        ]
        for dtype, pairs in by_dtype.items()
    }
    return [row for of_point in zip(*rows.values(), strict=True) for row in of_point]


def agrees(mine: Numbers, other: Numbers, dtype: str) -> bool:
    """Return whether two arrays are equal but for `ROUNDING`, with NaN and infinities at the same
    places.
    """
    if mine.shape != other.shape:
        return False
    scale = np.maximum(np.maximum(np.abs(mine), np.abs(other)), 1.0)
    with np.errstate(invalid="ignore"):
        near = np.abs(mine - other) <= ROUNDING * np.finfo(dtype).eps * np.where(
            np.isfinite(scale), scale, 0.0
        )
    return bool(np.all(near | (mine == other) | (np.isnan(mine) & np.isnan(other))))


def _row(point: Point, dtype: str, device: str, of_torch: Outcome, of_jax: Outcome) -> Row:
    agree = agrees(of_torch.value, of_jax.value, dtype) and all(
        agrees(mine, other, dtype)
        for mine, other in zip(of_torch.gradient, of_jax.gradient, strict=True)
    )
    words = convention(point, of_torch.gradient, of_jax.gradient, agree=agree)
    return Row(point, dtype, device, of_torch, of_jax, agree, words)


def _in_torch(point: Point, dtype: str, device: str) -> Outcome:
    inputs = [
        torch.tensor(x, dtype=getattr(torch, dtype), device=device, requires_grad=True)
        for x in point.inputs
    ]
    value = point.torch(*inputs)
    gradients = [torch.zeros_like(x) for x in inputs]
    if value.requires_grad:
        gradients = list(
            torch.autograd.grad(value, inputs, torch.ones_like(value), materialize_grads=True)
        )
    return Outcome(
        _flat(value.detach().cpu()), tuple(_flat(gradient.cpu()) for gradient in gradients)
    )


def _in_jax(points: Sequence[Point], dtype: str) -> list[Outcome]:
    """Return the outcome of each point.

    `_TOGETHER` of them are one program, since compiling is most of the time.
    """
    found: list[Outcome] = []
    with jax.default_device(jax.devices("cpu")[0]):
        for first in range(0, len(points), _TOGETHER):
            found += _compiled_together(points[first : first + _TOGETHER], dtype)
    return found


def _compiled_together(points: Sequence[Point], dtype: str) -> list[Outcome]:
    def differentiate(
        every: list[tuple[jax.Array, ...]],
    ) -> list[tuple[jax.Array, tuple[jax.Array, ...]]]:
        found = []
        for point, inputs in zip(points, every, strict=True):
            value, pullback = jax.vjp(point.jax, *inputs)
            found.append((value, pullback(jnp.ones_like(value))))
        return found

    every = [tuple(jnp.asarray(x, dtype) for x in point.inputs) for point in points]
    program = jax.jit(differentiate).lower(every).compile(compiler_options=_QUICKLY)
    return [
        Outcome(_flat(value), tuple(map(_flat, gradient))) for value, gradient in program(every)
    ]


def _flat(values: Any) -> Numbers:
    return np.asarray(values, dtype=np.float64).reshape(-1)


def _listed(values: Numbers) -> list[float | str | None]:
    return [json_number(float(value)) for value in values]
