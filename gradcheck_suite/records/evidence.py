"""The evidence of a violation as plain data: the elements of the gradient that differ, as many as a page can show."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradcheck_suite.numerics.comparison import Comparison, Vector, elementwise_error
from gradcheck_suite.schema.results import json_number

SIDE = 24
"""Rows and columns of a parameter's elements that are kept, around the worst one."""
MOST = 4
"""Parameters whose elements are kept: those with the largest errors over their bounds."""


def evidence_to_json(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the wrong parameters, the worst first, with their elements seen as a matrix.

    Of a parameter with more than two dimensions the last ones are joined. `rows` and `columns` say which elements are
    kept: from the first index up to, without, the second.
    """
    layout = comparison.layout
    with np.errstate(invalid="ignore", divide="ignore"):
        error = elementwise_error(comparison.observed.copy(), comparison.expected)
        ratio: Vector = np.divide(error, comparison.allowed, out=np.zeros_like(error), where=error > 0)
    worst = {name: float(part.max()) for name in layout.names if (part := ratio[layout.elements(name)]).size}
    wrong = sorted((name for name, value in worst.items() if value > 1), key=lambda name: -worst[name])
    return [_parameter(comparison, name, layout.part(ratio, name)) for name in wrong[:MOST]]


def _parameter(comparison: Comparison, name: str, ratio: Vector) -> dict[str, Any]:
    layout = comparison.layout
    shape = layout.shapes[layout.names.index(name)]
    matrix = ratio.reshape(shape[0] if len(shape) > 1 else 1, -1)
    row, column = np.unravel_index(int(np.argmax(matrix)), matrix.shape)
    rows, columns = _around(int(row), matrix.shape[0]), _around(int(column), matrix.shape[1])

    def kept(vector: Vector) -> list[list[float | str | None]]:
        part = layout.part(vector, name).reshape(matrix.shape)[rows, columns]
        return [[json_number(float(value)) for value in line] for line in part]

    return {
        "parameter": name,
        "shape": list(shape),
        "missing": name in comparison.missing,
        "wrong": int(np.count_nonzero(ratio > 1)),
        "rows": [rows.start, rows.stop],
        "columns": [columns.start, columns.stop],
        "expected": kept(comparison.expected),
        "observed": kept(comparison.observed),
        "allowed": kept(comparison.allowed),
    }


def _around(index: int, size: int) -> slice:
    """Return at most `SIDE` indices around one, all of them where they are no more."""
    start = max(0, min(index - SIDE // 2, size - SIDE))
    return slice(start, min(size, start + SIDE))
