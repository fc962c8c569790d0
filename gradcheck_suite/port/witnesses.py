"""All numbers of a port: at the point of a search, and where what is found there must hold, too."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from gradcheck_suite.port.matching import Side
from gradcheck_suite.port.pair import is_number, set_state
from gradcheck_suite.port.rounding import RESOLUTION, rounding_bounds
from gradcheck_suite.port.search import Witness
from gradcheck_suite.port.sides import Forward, Point, Sides, once


@once
def port_numbers(sides: Sides, point: Point) -> Side:
    """Return all numbers of the port."""
    return _numbers(sides, point, sides.arguments(point), sides.forward(point))


def _numbers(sides: Sides, point: Point, arguments: Any, ran: Forward) -> Side:
    program = sides.jax_program(point)
    bounds = rounding_bounds(sides, point)
    given = [np.asarray(a) for a in chain.from_iterable(arguments) if is_number(a)]
    more = [
        a.astype(np.float64) if a.dtype.kind == "f" else a for a in (*program.constants, *given)
    ]
    more = [a for a in more if a.dtype.kind in "fiub"]
    tolerance = max(RESOLUTION, bounds.outputs) if bounds.rounded else RESOLUTION
    outs, loss, results = ran
    values = [r.value for r in results]
    equations = [r.equation for r in results]
    return Side(
        [*values, *more],
        [*equations, *[None] * len(more)],
        outs,
        loss,
        tolerance,
    )


def witnesses(sides: Sides, point: Point) -> Iterator[Witness]:
    """Yield other parameters at a point, and the other points: what is said of one holds at all of
    them.
    """
    names = [c.name for c in sides.torch_program(point).calls]
    found = _at_other_state(sides, point)
    if [c.name for c in found.program.calls] == names:
        yield found
    # what a port does may depend on the sizes, as the padding of SAME does
    for other in (p for p in sides.points if p is not point and p.shapes == point.shapes):
        program = sides.torch_program(other)
        if [c.name for c in program.calls] == names:
            allowed = rounding_bounds(sides, other).outputs
            yield Witness(program, port_numbers(sides, other), allowed, same_inputs=False)


@once
def _at_other_state(sides: Sides, point: Point) -> Witness:
    state, leaves = sides.other_state()
    set_state(sides.pair.module, state)
    try:
        program = sides.recorded(point)
    finally:
        set_state(sides.pair.module, sides.state)
    arguments = (leaves, *sides.arguments(point)[1:])
    ran = sides.jax_program(point).forward(*arguments)
    numbers = _numbers(sides, point, arguments, ran)
    return Witness(program, numbers, rounding_bounds(sides, point).outputs)
