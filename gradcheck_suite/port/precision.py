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
from gradcheck_suite.port.number_sets import Array
from gradcheck_suite.port.pair import default_dtype, flat_output, is_float
from gradcheck_suite.port.rounding import RESOLUTION, rounding_bounds
from gradcheck_suite.port.search import Repairs
from gradcheck_suite.port.sides import Sides
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


@dataclass(frozen=True)
class Precision:
    """What is computed in a lower precision.

    Attributes:
        words: a sentence.
        error: of the outputs, relative to their largest number.
        allowed: error up to which it is no finding.
        line: `file:line` of the cast that costs most, or of the first one, or None.
    """

    words: str
    error: float
    allowed: float
    line: str | None = None


def precision_findings(sides: Sides, dtype: str) -> Iterator[Precision]:
    """Yield what is computed in a lower precision on the given inputs.

    Args:
        sides: of the pair.
        dtype: `float64` for the dtypes that the author's code chooses where it gets float64.
    """
    exact = Repairs().run(sides.torch_program(sides.given)).outs
    if dtype == "float64":
        yield from _of_chosen_dtypes(sides, exact)
    else:
        yield _of_dtype(sides, dtype, exact)


def _of_chosen_dtypes(sides: Sides, exact: list[torch.Tensor]) -> Iterator[Precision]:
    program = sides.jax_program(sides.given)
    bounds = rounding_bounds(sides, sides.given)
    before = outputs_error(exact, sides.jax_run(sides.given).outs)
    if bounds.rounded and before > RESOLUTION:
        words = "a table of numbers is rounded to float32 on one side at least"
        yield Precision(words, before, RESOLUTION)
    if not program.is_low or program.random:
        return
    off = outputs_error(exact, program.as_written(*sides.arguments(sides.given)))
    if off > max(bounds.outputs, before):
        lines = _low_lines(program.jaxpr, np.dtype("float64"))
        words = f"the port computes in a lower precision than float64{_at(lines)}"
        most = _worst_cast(sides, lines[:CASTS], exact) if len(lines) > 1 else None
        if most is not None:
            words += f"; most of it at {most.line}, which alone is off by {most.error:.2g}"
        line = most.line if most is not None else next(iter(lines), None)
        yield Precision(words, off, bounds.outputs, line)


def _of_dtype(sides: Sides, dtype: str, exact: list[torch.Tensor]) -> Precision:
    """Return the error of the port in a dtype beside torch's own."""
    own = outputs_error(exact, _torch_outputs(sides, getattr(torch, dtype)))
    low = jnp.dtype(dtype)
    leaves = [jnp.asarray(x, low) if is_float(x) else x for x in sides.leaves]
    inputs = [jnp.asarray(x, low) if is_float(x) else x for x in sides.given.inputs]
    closed = jax.make_jaxpr(
        lambda *x: flat_output(sides.outputs.kept(sides.model.call(leaves, list(x))[0]))
    )(*inputs)
    outs = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves(inputs))
    off = outputs_error(exact, [array(o) for o in outs])
    lines = _low_lines(closed.jaxpr, low)
    ratio = off / max(own, 1e-300)
    words = f"in {dtype} the port's error is {off:.2g}, {ratio:.2g} times torch's own"
    return Precision(
        words + _at(lines),
        off,
        MUCH * own,
        next(iter(lines), None),
    )


def _torch_outputs(sides: Sides, low: torch.dtype) -> list[Array]:
    """Return torch's outputs in a lower dtype."""
    module = copy.deepcopy(sides.pair.module).to(low)
    tensors = map(as_tensor, sides.given.inputs)
    given = [t.to(low) if t.is_floating_point() else t for t in tensors]
    with torch.no_grad(), default_dtype(low):
        kept = sides.outputs.kept(module(*given, **dict(sides.pair.kwargs)))
    return [array(t) for t in flat_output(kept)]


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
    return worst if worst.error > rounding_bounds(sides, sides.given).outputs else None


def _at(lines: list[str]) -> str:
    return f"; it casts to a lower precision at {', '.join(lines[:3])}" if lines else ""
