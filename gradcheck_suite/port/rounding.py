"""How far rounding drives the two sides of a pair apart at one point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gradcheck_suite.core.comparison import UNIT_ROUNDOFF
from gradcheck_suite.port.changes import RAISED
from gradcheck_suite.port.jax_program import TABLE_MARGIN, JaxRun, rounding_table
from gradcheck_suite.port.matching import outputs_error
from gradcheck_suite.port.number_sets import Array
from gradcheck_suite.port.search import Repairs
from gradcheck_suite.port.sides import Point, Sides, once
from gradcheck_suite.port.torch_program import TorchProgram, TorchRun

RESOLUTION = 1e-9
"""Relative difference of float64 results that is not looked at. Faults start at 1e-6 (an eps, one item in a million);
forms that are equal but for a threshold, as torch's softplus beyond 20, differ by 1e-10."""
MARGIN = 64.0
"""Multiple of the effect of one rounding of every parameter and input that all further roundings are taken for."""


@dataclass
class Bounds:
    """What rounding explains at one point.

    Attributes:
        outputs: relative difference of an output, and of the loss.
        gradients: name -> largest difference of an element of its gradient.
        rounded: whether part of it comes from tables that were computed in float32.
    """

    outputs: float
    gradients: dict[str, float] = field(default_factory=dict)
    rounded: bool = False

    def widen(
        self,
        off: float,
        before: Mapping[str, Array],
        after: Mapping[str, Array],
        factor: float,
    ) -> None:
        """Allow for what a move of the numbers changed.

        Args:
            off: relative difference of the outputs.
            before: gradients before the move, by name.
            after: gradients after it.
            factor: how often the effect is allowed.
        """
        self.outputs += factor * (off if np.isfinite(off) else 0.0)
        for name in self.gradients:
            if name in before and name in after:
                change = np.abs(after[name] - before[name])
                finite = change[np.isfinite(change)]
                self.gradients[name] += factor * float(finite.max(initial=0.0))


@once
def rounding_bounds(sides: Sides, point: Point) -> Bounds:
    """Return what rounding explains: the effect of moving every number by about its rounding
    error.
    """
    program = sides.torch_program(point)
    run = sides.jax_run(point)
    base, gradients = sides.torch_gradients(program, Repairs())
    bounds = Bounds(RESOLUTION)
    sizes = {n: float(np.abs(g).max(initial=0.0)) for n, g in gradients.items()}
    least = 1e-3 * RESOLUTION * max(sizes.values(), default=0.0) + 1e-300
    bounds.gradients = {n: 10 * RESOLUTION * size + least for n, size in sizes.items()}
    for draw in range(2):
        moved, others = _rounded(sides, program, base, draw)
        bounds.widen(outputs_error(base.outs, moved.outs), gradients, others, MARGIN)
    tables = _tables(sides, program)
    if tables:
        moved, others = sides.torch_gradients(program, Repairs(), tables)
        bounds.widen(outputs_error(base.outs, moved.outs), gradients, others, 1.0)
        bounds.rounded = True
    _widen_by_tables_of_the_port(bounds, sides, point, run)
    return bounds


def _widen_by_tables_of_the_port(bounds: Bounds, sides: Sides, point: Point, run: JaxRun) -> None:
    """Allow for constants that the port has in float32: in its leaves, and in its program."""
    unit = UNIT_ROUNDOFF["float32"]
    program = sides.jax_program(point)
    moved = dict[int, Any]()
    for number, leaf in enumerate(sides.map.leaves):
        if leaf is not None and leaf.is_constant:
            move = rounding_table(sides.leaves[number])[1]
            if move is not None:
                moved[number] = sides.leaves[number] + unit * move
    if not moved and not program.rounded:
        return
    leaves = [moved.get(number, leaf) for number, leaf in enumerate(sides.leaves)]
    shifted = program.run(leaves, *sides.arguments(point)[1:], shift=unit)
    off = outputs_error([*run.outs, run.loss], [*shifted.outs, shifted.loss])
    bounds.widen(
        off + TABLE_MARGIN * unit,
        sides.gradients(run),
        sides.gradients(shifted),
        1.0,
    )
    bounds.rounded = True


def _rounded(
    sides: Sides, program: TorchProgram, base: TorchRun, draw: int
) -> tuple[TorchRun, dict[str, Array]]:
    """Return a run with every number moved by one unit roundoff, and its gradients.

    A roundoff may leave the domain: torch refuses a target above 1 in `binary_cross_entropy`, and
    the arc cosine beyond 1 is NaN. Then numbers stay in the range of their own array, and last only
    parameters are moved.
    """
    for kept in (_anywhere, _inside_of_range):
        try:
            leaves = _rounded_leaves(program, draw, kept)
            run, gradients = sides.torch_gradients(program, Repairs(), leaves)
        except RAISED:
            continue
        if _finite_alike(base, run):
            return run, gradients
    leaves = _rounded_leaves(program, draw, _anywhere)
    of_state = {key: value for key, value in leaves.items() if key[0] == "state"}
    return sides.torch_gradients(program, Repairs(), of_state)


def _rounded_leaves(
    program: TorchProgram,
    draw: int,
    kept: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> dict[Any, torch.Tensor]:
    """Return state and inputs moved by one unit roundoff.

    Args:
        program: of torch.
        draw: seed of the signs.
        kept: (moved, as it was) -> what is taken of an input.
    """
    generator = torch.Generator().manual_seed(draw)
    found: dict[Any, torch.Tensor] = {}
    tied: dict[int, torch.Tensor] = {}
    for key, value in program.leaves().items():
        if not value.is_floating_point():
            continue
        if id(value) not in tied:
            sign = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
            if key[0] != "state":  # equal numbers stay equal: a sort may take the others
                places = torch.unique(value, return_inverse=True)[1]
                sign = sign.reshape(-1)[places]
            moved = value * (1 + sign * 2 * UNIT_ROUNDOFF["float64"])
            tied[id(value)] = moved if key[0] == "state" else kept(moved, value)
        found[key] = tied[id(value)]
    return found


def _tables(sides: Sides, program: TorchProgram) -> dict[Any, torch.Tensor]:
    """Return tables of torch's that were computed in float32 and that the port does not load,
    moved by that.
    """
    used = sides.map.used()
    found = {}
    for (kind, name), value in program.leaves().items():
        free = kind == "state" and name in sides.map.names and name not in sides.map.movable
        if kind == "constant" or (free and not used[sides.map.part(name)].any()):
            move = rounding_table(value.numpy())[1] if value.dtype == torch.float64 else None
            if move is not None:
                found[kind, name] = value + torch.as_tensor(UNIT_ROUNDOFF["float32"] * move)
    return found


def _anywhere(moved: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return moved


def _inside_of_range(moved: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return moved.clamp(value.min(), value.max()) if value.numel() else moved


def _finite_alike(base: TorchRun, run: TorchRun) -> bool:
    """Return whether a run has no number that is not finite where another run has a finite one."""
    pairs = zip([*base.outs, base.loss], [*run.outs, run.loss], strict=True)
    return all(bool((torch.isfinite(new) | ~torch.isfinite(old)).all()) for old, new in pairs)
