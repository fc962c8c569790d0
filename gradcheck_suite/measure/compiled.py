"""Training windows with a part of them compiled, and how many graphs `torch.compile` made for it.

Whether `.grad` is None is something that compiled code is specialised on: where it reads gradients, a reset that
releases them changes what it sees. Where it does not, the modes compile alike.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

import torch

from gradcheck_suite.measure.models import Size, build, micro_batch
from gradcheck_suite.measure.resets import Mode, prepare

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS = ("model", "forward and backward", "step", "step, experts by turns")
"""What is compiled: the model's forward, with the backward eager; both, by compiled autograd; the optimizer's step
where every parameter has a gradient; and where each window reaches one expert of `EXPERTS`."""
VERSIONS = 8
"""Of a function, that `torch.compile` makes before it falls back to eager (`recompile_limit`)."""
EXPERTS = VERSIONS + 4


class Experts(torch.nn.Module):
    """Linear experts of the same shape, one of which a batch is sent through."""

    def __init__(self, width: int, device: str) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(
            torch.nn.Linear(width, width, bias=False, device=device) for _ in range(EXPERTS)
        )
        self.chosen = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Send the batch, (n, width), through the chosen expert."""
        result: torch.Tensor = self.experts[self.chosen](batch)
        return result


def graphs_needed(part: str, mode: Mode) -> int:
    """Return how many graphs a part needs under a mode, from what compiled code is specialised on.

    The forward is one graph, whatever the gradients are. A backward that makes a gradient and one that adds to it are
    two. A step is one, but where another set of gradients is None each time: then one for each set, up to the limit.
    """
    if part == PARTS[1]:
        return 2 if mode.keeps else 3
    return VERSIONS if part == PARTS[3] and not mode.keeps else 1


def graphs() -> int:
    """Return how many graphs were compiled since the last `forget`."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def forget() -> None:
    """Drop everything compiled so far and count from 0."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()


def training(
    part: str,
    mode: Mode,
    size: Size,
    micro_batches: int,
    device: str,
    *,
    compiled: bool,
    backend: str = "inductor",
) -> Callable[[], None]:
    """Return a function that runs the next window: forward and backward of each micro-batch, a step, the reset.

    Args:
        part: of `PARTS`, what is compiled; the same window is run eagerly where `compiled` is false.
        mode: of resetting.
        size: of the model; its weights are float32.
        micro_batches: in a window.
        device: where it runs.
        compiled: whether to compile that part.
        backend: of `torch.compile`; `"eager"` captures graphs and compiles nothing.
    """
    by_turns = part == PARTS[3]
    model: torch.nn.Module = Experts(size.width // 2, device) if by_turns else build(size, device, torch.float32)
    width = size.width // 2 if by_turns else size.width
    batches = [micro_batch(size, device, torch.float32, j)[:, :width] for j in range(micro_batches)]
    parameters = list(model.parameters())
    # a learning rate that changes next to nothing: the work is the same, and no value overflows
    optimizer = torch.optim.AdamW(parameters, lr=1e-12)
    prepare(mode, parameters)
    mode.reset(parameters)

    forward: Callable[[torch.Tensor], torch.Tensor] = model

    def backward(batch: torch.Tensor) -> None:
        forward(batch).sum().backward()

    step: Callable[[], object] = optimizer.step
    if compiled and part == PARTS[0]:
        forward = torch.compile(model, backend=backend)
    elif compiled and part == PARTS[1]:
        with _compiled_autograd():
            backward = torch.compile(backward, backend=backend)
    elif compiled:
        step = torch.compile(optimizer.step, backend=backend)
    windows = count()

    def run() -> None:
        if isinstance(model, Experts):
            model.chosen = next(windows) % EXPERTS
        for batch in batches:
            backward(batch)
        step()
        mode.reset(parameters)

    return run


@contextmanager
def _compiled_autograd() -> Iterator[None]:
    """Let `torch.compile` take the backward in, which it decides when a function is wrapped."""
    from torch._dynamo import config

    before = config.compiled_autograd
    config.compiled_autograd = True
    try:
        yield
    finally:
        config.compiled_autograd = before
