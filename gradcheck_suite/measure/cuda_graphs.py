"""A training window captured as a CUDA graph: which resets it allows, and what the optimizer finds after a replay.

A replay runs kernels and no Python. A reset that consists of kernels (`zero_`) may run inside the graph or between
replays. A release may run inside the graph, where its only effect is that the first backward writes instead of adding.
A release between replays takes the gradients' tensors from the parameters, and the next replay fills memory that no
parameter holds. See https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import torch

from gradcheck_suite.loops.modes import ResetMode
from gradcheck_suite.measure.workload import Size, build, micro_batch, sized_workload

PLACES = ("inside the graph", "between replays")
FINDINGS = ("right", "None", "wrong")
WARM = 3
"""Windows run eagerly on a side stream before a capture, as torch's documentation requires."""


class CapturedWindow:
    """Forward and backward of a window's micro-batches as one CUDA graph, the reset inside it or before each replay."""

    def __init__(self, mode: ResetMode, place: str, size: Size, micro_batches: int, device: str = "cuda") -> None:
        """Warm up and capture.

        Args:
            mode: the reset mode.
            place: where the reset stands, one of `PLACES`.
            size: size of the model.
            micro_batches: number of micro-batches in a window.
            device: where tensors live; anything but CUDA needs a stand-in for `torch.cuda`'s graphs.
        """
        self.place, self.size, self.micro_batches, self.device = place, size, micro_batches, device
        self.workload = sized_workload(mode, size, micro_batches, device=device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                self.workload.reset()
                self.workload.accumulate()
        torch.cuda.current_stream().wait_stream(side)
        self.workload.reset()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            if place == PLACES[0]:
                self.workload.reset()
            self.workload.accumulate()

    def replay(self) -> None:
        """Run a window: the reset if it stands between replays, then the graph."""
        if self.place == PLACES[1]:
            self.workload.reset()
        self.graph.replay()

    def finding(self) -> str:
        """Return what `.grad` is after two replays on data other than the captured data: right, None or wrong.

        Right is what the same window gives eagerly, in another model, up to rounding.
        """
        for j, batch in enumerate(self.workload.batches):
            batch.copy_(micro_batch(self.size, self.device, torch.float32, self.micro_batches + j))
        for _ in range(2):
            self.replay()
        eager = build(self.size, self.device, torch.float32)
        for batch in self.workload.batches:
            eager(batch).sum().backward()
        found = [p.grad for p in self.workload.parameters if p.grad is not None]
        expected = [p.grad for p in eager.parameters() if p.grad is not None]
        if len(found) < len(expected):
            return FINDINGS[1]
        alike = all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(found, expected, strict=True))
        return FINDINGS[0] if alike else FINDINGS[2]
