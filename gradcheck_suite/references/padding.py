"""Pads the leading dimension of the arrays that compiled programs receive, so that few shapes occur."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

ROWS = {None: 48, 1: 144, 0: 256}
"""The smallest leading dimension of a program, by how many trailing axes its layer mixes (`LayerDefinition.axes`)."""


def padded_rows(rows: int, axes: int | None = None) -> int:
    """Return the leading dimension that arrays of `rows` rows are padded to, so that few shapes occur.

    For a hundred rows the overhead of the call exceeds the computation, and every new shape costs a compilation.
    """
    size = ROWS[axes]
    while size < rows:
        size *= 4
    return size


def pad_rows(array: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """Repeat the first row until there are `rows` rows: padding with values of the data never makes a NaN."""
    if len(array) == rows:
        return array
    padded = np.empty((rows, *array.shape[1:]), array.dtype)
    padded[: len(array)], padded[len(array) :] = array, array[0]
    return padded


def pad_zeros(array: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """Add rows of zeros until there are `rows` rows: a cotangent of zeros contributes nothing."""
    if len(array) == rows:
        return array
    padded = np.zeros((rows, *array.shape[1:]))
    padded[: len(array)] = array
    return padded
