"""What is measured: a model of linear weights, its micro-batches, an optimizer and a reset mode."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from studies.reset_modes import ResetMode

TENSORS = {"many": 100, "few": 2}
BATCH = 8
"""Items in a micro-batch: few, so that a backward spends its time mostly on the weights and their gradients."""


@dataclass(frozen=True)
class Size:
    """A number of parameters and of the tensors that hold them.

    Attributes:
        parameters: number of parameters asked for; `total` is the closest number that square
            matrices give.
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
        """The size in short, such as `1e+06-many`."""
        return f"{self.parameters:.0e}-{self.layout}"

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one gradient of all parameters."""
        return self.total * dtype.itemsize


def build(size: Size, device: str, dtype: torch.dtype) -> torch.nn.Sequential:
    """Return a chain of square linear layers.

    Each averages its inputs, which keeps signals and gradients in range.
    """
    shape = (size.width, size.width)
    layers = (
        torch.nn.Linear(*shape, bias=False, device=device, dtype=dtype) for _ in range(size.tensors)
    )
    model = torch.nn.Sequential(*layers)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1 / size.width)
    return model


def micro_batch(
    size: Size, device: str, dtype: torch.dtype, index: int = 0, items: int = BATCH
) -> torch.Tensor:
    """Return one micro-batch's inputs, (items, width), between 0 and 1."""
    generator = torch.Generator().manual_seed(index)
    return torch.rand(items, size.width, generator=generator).to(device, dtype)


@dataclass(frozen=True)
class Workload:
    """A model in training under one reset mode.

    Attributes:
        mode: the reset mode; it has a reset.
        model: the model.
        batches: micro-batches of a window, each (items, width).
        parameters: the model's parameters.
        optimizer: AdamW with a learning rate that changes next to nothing: the work is the same,
            and no value overflows.
    """

    mode: ResetMode
    model: torch.nn.Module
    batches: list[torch.Tensor]
    parameters: list[torch.nn.Parameter]
    optimizer: torch.optim.Optimizer

    def fill_gradients(self) -> None:
        """Give every parameter a gradient of ones in the storage that the mode works on, so that no
        zeros are timed.
        """
        if self.mode.preallocate is not None:
            self.mode.preallocate(self.parameters)
            for p in self.parameters:
                assert p.grad is not None
                p.grad.fill_(1)
        else:
            for p in self.parameters:
                p.grad = torch.ones_like(p)

    def reset(self) -> None:
        """Reset the gradients."""
        assert self.mode.reset is not None, f"{self.mode.name} has no reset of its own"
        self.mode.reset(self.parameters, self.optimizer)

    def accumulate(self) -> None:
        """Run forward and backward of each micro-batch."""
        for batch in self.batches:
            self.model(batch).sum().backward()

    def window(self) -> None:
        """Run one window without a step: forward and backward of each micro-batch, then the reset."""
        self.accumulate()
        self.reset()

    def step(self) -> None:
        """Run one window with its step: forward and backward of each micro-batch, the step, the
        reset.
        """
        self.accumulate()
        self.optimizer.step()
        self.reset()


def workload(mode: ResetMode, model: torch.nn.Module, batches: list[torch.Tensor]) -> Workload:
    """Return a model in training under a mode, with gradients of ones."""
    parameters = list(model.parameters())
    made = Workload(mode, model, batches, parameters, torch.optim.AdamW(parameters, lr=1e-12))
    made.fill_gradients()
    return made


def sized_workload(
    mode: ResetMode,
    size: Size,
    micro_batches: int,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    items: int = BATCH,
) -> Workload:
    """Return a model of a size in training under a mode, with gradients of ones.

    Args:
        mode: the reset mode.
        size: size of the model.
        micro_batches: number of micro-batches in a window.
        device: `"cpu"` or `"cuda"`.
        dtype: dtype of weights and data.
        items: number of items in each micro-batch.
    """
    batches = [micro_batch(size, device, dtype, j, items) for j in range(micro_batches)]
    return workload(mode, build(size, device, dtype), batches)
