"""Gradients that have lost a mean or a direction, and gradients whose elements belong to other parameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gradcheck_suite.diagnosis.weight_patterns.weights import Diagnosis, listed
from gradcheck_suite.numerics.comparison import Comparison, Vector

Array = npt.NDArray[np.float64]


def part_of(comparison: Comparison, name: str) -> tuple[Array, Array, Array, npt.NDArray[np.bool_]]:
    """Return expected, observed, allowed, and which elements are wrong, of one parameter."""
    layout = comparison.layout
    expected, observed, allowed = (
        layout.part(vector, name) for vector in (comparison.expected, comparison.observed, comparison.allowed)
    )
    return expected, observed, allowed, ~(np.abs(observed - expected) <= allowed)


def projected(comparison: Comparison, wrong: Sequence[str], parameters: Vector | None) -> dict[str, str]:
    """Return for each wrong parameter which part of its gradient has been subtracted, where all are like that."""
    found: dict[str, str] = {}
    zero: list[str] = []
    for name in wrong:
        expected, observed, allowed, _ = part_of(comparison, name)
        values = None if parameters is None else comparison.layout.part(parameters, name)
        if what := projection(expected, observed, 8 * float(allowed.max()), values):
            found[name] = f"{what} has been subtracted from it, and nothing else is wrong"
        elif what := _averaged(expected, observed, 8 * float(allowed.max())):
            found[name] = f"each of its elements is {what} of the right gradient"
        elif (np.abs(observed) <= allowed).all():
            zero.append(name)
    if not found or len(found) + len(zero) < len(wrong):
        return {}
    # a single element is its own mean
    said = next(iter(found.values()))
    return {name: found.get(name, f"{said}, which leaves 0") for name in wrong}


def projection(expected: Array, observed: Array, allowed: float, parameter: Array | None = None) -> str | None:
    """Return which part of a gradient has been subtracted from it: a mean, or what lies along the parameter."""
    if expected.size < 2 or np.abs(observed - expected).max() <= allowed:
        return None

    def lacks(part: Array) -> bool:
        return bool((np.abs(observed + part - expected) <= allowed).all() and (np.abs(part) > allowed).any())

    if lacks(np.full_like(expected, expected.mean())):
        return "the mean of all its elements"
    if expected.ndim > 1:
        inner = tuple(range(1, expected.ndim))
        for axes, which in ((inner, "row"), ((0,), "column")):
            length = np.prod([expected.shape[axis] for axis in axes])
            if length > 1 and lacks(np.broadcast_to(expected.mean(axis=axes, keepdims=True), expected.shape)):
                return f"the mean of each {which}"
    size = 0.0 if parameter is None else float((parameter**2).sum())
    if parameter is not None and size and lacks(parameter * (float((parameter * expected).sum()) / size)):
        return "what lies along the parameter itself"
    return None


def _averaged(expected: Array, observed: Array, allowed: float) -> str | None:
    """Return the mean that every element of a gradient is: of all elements, of its row or of its column."""
    if not (np.abs(observed) > allowed).any():
        return None
    axes: list[tuple[tuple[int, ...], str]] = [(tuple(range(expected.ndim)), "the mean of all elements")]
    if expected.ndim > 1:
        axes += [(tuple(range(1, expected.ndim)), "the mean of its row"), ((0,), "the mean of its column")]
    for over, which in axes:
        mean = np.broadcast_to(expected.mean(axis=over, keepdims=True), expected.shape)
        if (np.abs(mean - expected) > allowed).any() and (np.abs(observed - mean) <= allowed).all():
            return which
    return None


def mixed(comparison: Comparison, wrong: Sequence[str]) -> Diagnosis | None:
    """Return the diagnosis of gradients whose elements have moved to other parameters, or that are mixed; or None."""
    parts = {name: tuple(part.reshape(-1) for part in part_of(comparison, name)) for name in wrong}
    if len(wrong) < 2:
        return None
    expected, observed, allowed, _ = (np.concatenate([parts[name][i] for name in wrong]) for i in range(4))
    if (np.abs(np.sort(observed) - np.sort(expected)) <= allowed.max()).all():
        return Diagnosis(
            "permuted-gradient",
            f"the gradients of {listed(wrong)} together have the right elements, at other places: they are flattened "
            "in one order and taken apart in another; match parameters by name",
        )
    for what in ("mean", "sum"):
        if all(_is_of_all(comparison, name, what) for name in wrong):
            return Diagnosis(
                "mixed-gradients",
                f"each of {listed(wrong)} has the {what} of the gradients of all parameters of its shape: match "
                "parameters by name, not by shape",
            )
    return None


def _is_of_all(comparison: Comparison, name: str, what: str) -> bool:
    """Whether a parameter has the mean or the sum of the gradients of all of its shape, of which there are several."""
    own, seen, allowed, _ = part_of(comparison, name)
    parts = [part_of(comparison, other)[0] for other in comparison.layout.names]
    alike = np.stack([part for part in parts if part.shape == own.shape])
    of_all = alike.mean(0) if what == "mean" else alike.sum(0)
    return len(alike) > 1 and bool((np.abs(seen - of_all) <= len(alike) * allowed.max()).all())
