"""The models that resets are measured on: weights alone, in many small tensors or in few large ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

TENSORS = {"many": 100, "few": 2}
BATCH = 8
"""Items in a micro-batch: few, so that what a backward costs is mostly the weights and their gradients."""


@dataclass(frozen=True)
class Size:
    """How many parameters there are and in how many tensors.

    Attributes:
        parameters: asked for; `total` is what comes closest in square matrices.
        layout: `"many"` small tensors or `"few"` large ones.
    """

    parameters: int
    layout: str

    @property
    def width(self) -> int:
        """Rows and columns of each weight."""
        return max(1, round(math.sqrt(self.parameters / TENSORS[self.layout])))

    @property
    def tensors(self) -> int:
        """Number of weights."""
        return TENSORS[self.layout]

    @property
    def total(self) -> int:
        """Number of parameters."""
        return self.tensors * self.width**2

    @property
    def name(self) -> str:
        """Such as `1e+06-many`."""
        return f"{self.parameters:.0e}-{self.layout}"

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one gradient of all parameters."""
        return self.total * dtype.itemsize


def build(size: Size, device: str, dtype: torch.dtype) -> torch.nn.Sequential:
    """Return square linear layers in a row, each the mean of its inputs: signals and gradients keep their size."""
    layers = (torch.nn.Linear(size.width, size.width, bias=False, device="meta") for _ in range(size.tensors))
    model = torch.nn.Sequential(*layers).to(dtype).to_empty(device=device)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1 / size.width)
    return model


def micro_batch(size: Size, device: str, dtype: torch.dtype, index: int = 0, items: int = BATCH) -> torch.Tensor:
    """Return one micro-batch's inputs, (items, width), between 0 and 1."""
    generator = torch.Generator().manual_seed(index)
    return torch.rand(items, size.width, generator=generator).to(device, dtype)
