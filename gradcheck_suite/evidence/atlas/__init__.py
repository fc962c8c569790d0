"""Where torch and JAX choose a derivative: kinks, ties and limits, and what each of them returns there.

A row is computed by running both frameworks. Nothing here says what they should return, except the one-sided
derivatives at a kink, which come from mathematics. Must not import the report or the command line.
"""

from __future__ import annotations

from gradcheck_suite.evidence.atlas import (
    activations,
    indexing,
    limits,
    linear_algebra,
    losses,
    pointwise,
    ties,
)
from gradcheck_suite.evidence.atlas.point import Point
from gradcheck_suite.evidence.atlas.rows import DTYPES, Row, run

__all__ = ["DTYPES", "POINTS", "Point", "Row", "run"]

POINTS: tuple[Point, ...] = (
    *activations.POINTS,
    *pointwise.POINTS,
    *ties.POINTS,
    *limits.POINTS,
    *indexing.POINTS,
    *linear_algebra.POINTS,
    *losses.POINTS,
)
"""Every point, in the order of the table."""
