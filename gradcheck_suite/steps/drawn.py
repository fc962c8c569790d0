"""Steps on drawn gradients, which need no model: every optimizer on the same shapes, so that few programs compile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gradcheck_suite.steps.counterpart import Counterpart
from gradcheck_suite.steps.torch_steps import Steps, take_steps
from gradcheck_suite.steps.trajectory import Trajectory, follow

STEPS = 6
"""The first five of RAdam are not rectified."""
Shapes = tuple[tuple[int, ...], ...]
SHAPES: Shapes = ((2, 3), (2,), (2, 2), (2,))
"""The parameters of two linear layers."""
MATRICES: Shapes = ((2, 3), (2, 2))


def draw_steps(
    counterpart: Counterpart,
    settings: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    implementation: str = "single",
    seed: int = 0,
    scale: float = 1.0,
    device: str = "cpu",
    shapes: Shapes | None = None,
) -> Steps:
    """Take `STEPS` steps on drawn parameters and gradients.

    The gradients of L-BFGS are those of a convex quadratic function, and those of SparseAdam leave out a row. Others
    have one element of zero in every step, and one whose sign changes.

    Args:
        counterpart: of the optimizer.
        settings: arguments of its class.
        dtype: of parameters and gradients.
        implementation: one of `counterpart.implementations`.
        seed: of the drawn numbers.
        scale: of the gradients.
        device: of the parameters.
        shapes: of the parameters; `SHAPES` if None, and `MATRICES` for Muon.
    """
    drawn = torch.Generator().manual_seed(seed)
    shapes = shapes or (MATRICES if counterpart.torch == "Muon" else SHAPES)

    def normal(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=drawn, dtype=torch.float64)

    start = [normal(shape).to(device, dtype) for shape in shapes]
    curvature = [(0.1 + normal(shape) ** 2).to(device, dtype) for shape in shapes]

    def gradient(step: int, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        if counterpart.torch == "LBFGS":
            return [h * p for h, p in zip(curvature, parameters, strict=True)]
        found = [(scale * normal(shape)).to(device, dtype) for shape in shapes]
        for g in found:
            g.view(-1)[0] = 0
            g.view(-1)[1] = scale * (-1) ** step
            if counterpart.torch == "SparseAdam":
                g[step % len(g)] = 0
        return [g.to_sparse(1) if counterpart.torch == "SparseAdam" else g for g in found]

    return take_steps(counterpart, settings, start, gradient, STEPS, implementation=implementation)


def in_optax(counterpart: Counterpart, steps: Steps, dtype: torch.dtype, implementation: str = "single") -> Trajectory:
    """Take the same steps in optax, with the bound for torch's in some dtype."""
    unit = torch.finfo(dtype).eps / 2
    return follow(counterpart, steps.settings, steps.start, steps.gradients, unit=unit, implementation=implementation)
