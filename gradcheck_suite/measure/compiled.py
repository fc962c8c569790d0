"""Training windows of which a part is compiled, and how many graphs `torch.compile` makes for that part.

`torch.compile` guards on whether `.grad` is None. Where compiled code reads gradients, a reset that releases them
changes what it is specialised on; elsewhere all modes compile alike.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

import torch

from gradcheck_suite.loops.modes import ResetMode
from gradcheck_suite.measure.workload import Size, build, micro_batch, workload

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS = ("model", "forward and backward", "step", "step, experts by turns")
"""The compiled part: the model's forward, with the backward eager; both, by compiled autograd; the optimizer's step
where every parameter has a gradient; the optimizer's step where each window reaches one expert of `EXPERTS`."""
VERSIONS = 8
"""Number of versions of a function that `torch.compile` makes before it falls back to eager (`recompile_limit`)."""
EXPERTS = VERSIONS + 4


class Experts(torch.nn.Module):
    """Linear experts of the same shape. A batch passes through one of them."""

    def __init__(self, width: int, device: str) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(
            torch.nn.Linear(width, width, bias=False, device=device) for _ in range(EXPERTS)
        )
        self.chosen = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the chosen expert's output for the batch, (n, width)."""
        result: torch.Tensor = self.experts[self.chosen](batch)
        return result


def graphs_needed(part: str, mode: ResetMode) -> int:
    """Return how many graphs a part needs under a mode, from what compiled code is specialised on.

    The forward is one graph, whatever the gradients are. A backward that makes a gradient and a backward that adds to
    it are two graphs. A step is one graph for each set of gradients that are None, up to the limit.
    """
    if part == PARTS[1]:
        return 3 if mode.releases else 2
    return VERSIONS if part == PARTS[3] and mode.releases else 1


def graphs() -> int:
    """Return the number of graphs compiled since the last `forget`."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def forget() -> None:
    """Drop all compiled code and count graphs from 0."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()


def training(
    part: str,
    mode: ResetMode,
    size: Size,
    micro_batches: int,
    device: str,
    *,
    compiled: bool,
    backend: str = "inductor",
) -> Callable[[], None]:
    """Return a function that runs the next window: forward and backward of each micro-batch, a step, the reset.

    Args:
        part: the compiled part, of `PARTS`; the same window runs eagerly where `compiled` is false.
        mode: the reset mode.
        size: size of the model; its weights are float32.
        micro_batches: number of micro-batches in a window.
        device: `"cpu"` or `"cuda"`.
        compiled: whether to compile that part.
        backend: backend of `torch.compile`; `"eager"` captures graphs and compiles nothing.
    """
    by_turns = part == PARTS[3]
    model: torch.nn.Module = Experts(size.width // 2, device) if by_turns else build(size, device, torch.float32)
    width = size.width // 2 if by_turns else size.width
    batches = [micro_batch(size, device, torch.float32, j)[:, :width] for j in range(micro_batches)]
    work = workload(mode, model, batches)
    work.reset()

    forward: Callable[[torch.Tensor], torch.Tensor] = model

    def backward(batch: torch.Tensor) -> None:
        forward(batch).sum().backward()

    step: Callable[[], object] = work.optimizer.step
    if compiled and part == PARTS[0]:
        forward = torch.compile(model, backend=backend)
    elif compiled and part == PARTS[1]:
        with _compiled_autograd():
            backward = torch.compile(backward, backend=backend)
    elif compiled:
        step = torch.compile(work.optimizer.step, backend=backend)
    windows = count()

    def run() -> None:
        if isinstance(model, Experts):
            model.chosen = next(windows) % EXPERTS
        for batch in batches:
            backward(batch)
        step()
        work.reset()

    return run


@contextmanager
def _compiled_autograd() -> Iterator[None]:
    """Have `torch.compile` trace the backward too; it reads this setting when it wraps a function."""
    from torch._dynamo import config

    before = config.compiled_autograd
    config.compiled_autograd = True
    try:
        yield
    finally:
        config.compiled_autograd = before
