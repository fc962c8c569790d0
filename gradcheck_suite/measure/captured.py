"""A training window captured as a CUDA graph: which resets it allows, and what the optimizer finds after a replay.

A replay runs kernels and no Python. A reset that is kernels (`zero_`) may stand inside the graph or between replays. A
release may stand inside the graph, where it only means that the first backward writes instead of adding; between
replays it takes the gradients' tensors from the parameters, and the next replay fills memory that nobody holds.
See "CUDA Graphs" in the notes of torch's documentation.
"""

from __future__ import annotations

import torch

from gradcheck_suite.measure.models import Size, build, micro_batch
from gradcheck_suite.measure.resets import Mode, prepare

PLACES = ("inside the graph", "between replays")
FINDINGS = ("right", "None", "wrong")
WARM = 3
"""Windows run eagerly on a side stream before a capture, as torch's documentation asks for."""


class CapturedWindow:
    """Forward and backward of a window's micro-batches as one CUDA graph, the reset inside it or before each replay."""

    def __init__(self, mode: Mode, place: str, size: Size, micro_batches: int) -> None:
        self.mode, self.place, self.size, self.micro_batches = mode, place, size, micro_batches
        self.model = build(size, "cuda", torch.float32)
        self.parameters = list(self.model.parameters())
        self.batches = [micro_batch(size, "cuda", torch.float32, j) for j in range(micro_batches)]
        prepare(mode, self.parameters)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                self._window()
        torch.cuda.current_stream().wait_stream(side)
        mode.reset(self.parameters)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            if place == PLACES[0]:
                mode.reset(self.parameters)
            self._accumulate()

    def _accumulate(self) -> None:
        for batch in self.batches:
            self.model(batch).sum().backward()

    def _window(self) -> None:
        self.mode.reset(self.parameters)
        self._accumulate()

    def replay(self) -> None:
        """Run a window: what the reset does between replays, and the graph."""
        if self.place == PLACES[1]:
            self.mode.reset(self.parameters)
        self.graph.replay()

    def finding(self) -> str:
        """Return what `.grad` is after two replays on data other than the captured: right, None or wrong.

        Right is what the same window gives eagerly, in another model, up to rounding.
        """
        for j, batch in enumerate(self.batches):
            batch.copy_(micro_batch(self.size, "cuda", torch.float32, self.micro_batches + j))
        for _ in range(2):
            self.replay()
        eager = build(self.size, "cuda", torch.float32)
        for batch in self.batches:
            eager(batch).sum().backward()
        found = [p.grad for p in self.parameters if p.grad is not None]
        expected = [p.grad for p in eager.parameters() if p.grad is not None]
        if len(found) < len(expected):
            return FINDINGS[1]
        alike = all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(found, expected, strict=True))
        return FINDINGS[0] if alike else FINDINGS[2]
