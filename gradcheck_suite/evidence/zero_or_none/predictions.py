"""Trajectories of a parameter and its optimizer state, predicted in two ways in exact numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from math import prod
from typing import Any

import numpy as np

from gradcheck_suite.evidence.zero_or_none.laws import Law
from gradcheck_suite.evidence.zero_or_none.recurrences import Array, State, coupled
from gradcheck_suite.numerics.running_errors import DIGITS, Rounded, exact_arithmetic

Numbers = Callable[[Any], Any]
Point = tuple[Array, State]
"""A parameter and its state after a window."""


def exact(values: Any, number: Numbers = Decimal) -> Array:
    """Return an array of the given numbers exactly; None stays."""
    array = np.asarray(values, dtype=object)
    found = np.empty(array.shape, dtype=object)
    for index, value in np.ndenumerate(array):
        found[index] = None if value is None else number(value)
    return found


def _exact_settings(settings: Mapping[str, Any], number: Numbers) -> dict[str, Any]:
    def one(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(one, value))
        return number(value) if isinstance(value, float) else value

    return {name: one(value) for name, value in settings.items()}


def by_recurrence(law: Law, settings: Mapping[str, Any], start: Any, seen: Sequence[Any]) -> list[Point]:
    """Return parameter and state after each window, as `Rounded` numbers: step by step.

    Args:
        law: of the optimizer.
        settings: all of its settings.
        start: the parameter before the first window.
        seen: the gradient that the optimizer finds in each window, or None, which it skips.
    """
    with exact_arithmetic(prec=DIGITS):

        def number(value: Any) -> Rounded:
            return Rounded(Decimal(value))

        s, theta, state, points = _exact_settings(settings, number), exact(start, number), State(), list[Point]()
        for gradient in seen:
            if gradient is not None:
                theta, state = law.step(theta, state, exact(gradient, number), s)
            points.append((theta, state))
        return points


def by_sums(law: Law, settings: Mapping[str, Any], start: Any, seen: Sequence[Any]) -> list[Point]:
    """Return the same as `by_recurrence`, as `Decimal` numbers: from sums over all gradients that are not None."""
    with exact_arithmetic(prec=DIGITS):
        s, state, points = _exact_settings(settings, Decimal), State(), list[Point]()
        thetas, gradients, moves = [exact(start)], list[Array](), list[Array]()
        for gradient in seen:
            if gradient is not None:
                g = exact(gradient)
                if not law.sparse:
                    without_decay = {"maximize": s.get("maximize", False)}
                    g = coupled(thetas[-1], g, without_decay if law.is_decoupled(s) else s)
                gradients.append(g)
                move, state = law.sums(gradients, thetas, s)
                moves.append(move)
                n = len(moves)
                left = [prod(law.factor(j, s) for j in range(i, n + 1)) for i in range(1, n + 2)]
                terms = sum(left[i] * one for i, one in enumerate(moves, 1))
                thetas.append(left[0] * thetas[0] - terms)
            points.append((thetas[-1], state))
        return points
