"""Samples of grouped products: groups along each axis, one of them empty."""

from __future__ import annotations

from typing import Any

import torch


def _whole(*shape: int, seed: int) -> torch.Tensor:
    """Return whole numbers: float32, the widest dtype that torch's operation takes on a CPU, adds them exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).float().requires_grad_()


def grouped_products() -> list[Any]:
    """Return calls of `aten._grouped_mm`, whose strides are multiples of 16 bytes."""
    op = torch.ops.aten._grouped_mm.default
    shapes = (((5, 4), (3, 4, 8)), ((3, 4, 8), (8, 16)), ((4, 16), (16, 8)), ((2, 4, 8), (2, 8, 4)))
    ends = ([2, 2, 5], [4, 4, 16], [4, 4, 16], None)
    return [
        (op, (_whole(*a, seed=1), _whole(*b, seed=2), of and torch.tensor(of, dtype=torch.int32)), {})
        for (a, b), of in zip(shapes, ends, strict=True)
    ]
