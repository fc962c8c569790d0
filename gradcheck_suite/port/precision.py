"""How exactly both sides compute in a lower precision, each against torch in float64.

It is reported, and no fault.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gradcheck_suite.port.jax_program import CAST, LOW, equations_in, line_of
from gradcheck_suite.port.matching import array, outputs_error
from gradcheck_suite.port.pair import default_dtype, flat_output, is_float
from gradcheck_suite.port.search import Repairs
from gradcheck_suite.port.sides import RESOLUTION, Sides
from gradcheck_suite.port.torch_program import as_tensor

MUCH = 8.0
"""Error of the port over torch's own error in the same dtype from which a finding is made."""


def _low_lines(jaxpr: Any, dtype: Any) -> list[str]:
    """Return `file:line` of the equations that cast to a dtype of fewer bits."""
    casts = [e for e in equations_in(jaxpr) if e.primitive.name == CAST]
    fewer = [
        d
        for d in LOW
        if jnp.finfo(d).bits < jnp.finfo(dtype).bits or jnp.finfo(d).eps > jnp.finfo(dtype).eps
    ]
    lines = [line_of(e) for e in casts if np.dtype(e.params["new_dtype"]) in fewer]
    return list(dict.fromkeys(line for line in lines if line))


def precision_findings(sides: Sides, dtype: str) -> Iterator[tuple[str, float, float, str | None]]:
    """Yield (words, error, allowed, `file:line`) on the given inputs.

    It is a finding where the error is not allowed.

    Args:
        sides: of the pair.
        dtype: `float64` for the dtypes that the author's code chooses where it gets float64.
    """
    point = sides.given
    program = sides.jax_program(sides.given)
    exact = Repairs().run(sides.torch_program(sides.given)).outs
    if dtype == "float64":
        before = outputs_error(exact, sides.jax_run(sides.given).outs)
        if sides.bounds(sides.given).rounded and before > RESOLUTION:
            yield (
                "a table of numbers is rounded to float32 on one side at least",
                before,
                RESOLUTION,
                None,
            )
        if not program.is_low or program.random:
            return
        leaves, inputs, targets = sides.arguments(sides.given)
        written = program.as_written(leaves, inputs, targets)
        off = outputs_error(exact, written)
        allowed = sides.bounds(sides.given).outputs
        if off > max(allowed, before):
            lines = _low_lines(program.jaxpr, np.dtype("float64"))
            words = f"the port computes in a lower precision than float64{_at(lines)}"
            most = _worst_cast(sides, lines[:CASTS], exact) if len(lines) > 1 else None
            if most is not None:
                words += f"; most of it at {most.line}, which alone is off by {most.error:.2g}"
            yield words, off, allowed, most.line if most else next(iter(lines), None)
        return
    low = jnp.dtype(dtype)
    module = copy.deepcopy(sides.pair.module).to(getattr(torch, dtype))
    given = [
        t.to(getattr(torch, dtype)) if t.is_floating_point() else t
        for t in map(as_tensor, point.inputs)
    ]
    with torch.no_grad(), default_dtype(getattr(torch, dtype)):
        kept = sides.kept(module(*given, **dict(sides.pair.kwargs)))
    own = outputs_error(exact, [array(t) for t in flat_output(kept)])
    leaves = [jnp.asarray(x, low) if is_float(x) else x for x in sides.leaves]
    inputs = [jnp.asarray(x, low) if is_float(x) else x for x in point.inputs]
    closed = jax.make_jaxpr(
        lambda *x: flat_output(sides.kept(sides.model.call(leaves, list(x))[0]))
    )(*inputs)
    outs = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves(inputs))
    off = outputs_error(exact, [array(o) for o in outs])
    lines = _low_lines(closed.jaxpr, low)
    words = (
        f"in {dtype} the port's error is {off:.2g}, {off / max(own, 1e-300):.2g} times torch's own"
    )
    yield words + _at(lines), off, MUCH * own, next(iter(lines), None)


CASTS = 8
"""Lines with casts that are measured one by one."""


@dataclass(frozen=True)
class _Cast:
    """A line that casts to a lower precision, and the error of the outputs that it makes alone."""

    line: str
    error: float


def _worst_cast(sides: Sides, lines: list[str], exact: list[torch.Tensor]) -> _Cast | None:
    """Return the cast that costs most, None where none of them costs anything by itself."""
    program = sides.jax_program(sides.given)
    arguments = sides.arguments(sides.given)
    casts = [
        _Cast(line, outputs_error(exact, program.with_cast(line, arguments))) for line in lines
    ]
    worst = max(casts, key=lambda one: one.error)
    return worst if worst.error > sides.bounds(sides.given).outputs else None


def _at(lines: list[str]) -> str:
    return f"; it casts to a lower precision at {', '.join(lines[:3])}" if lines else ""
