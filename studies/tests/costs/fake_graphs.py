"""CUDA graphs played on the CPU: a capture records operations with their tensors, a replay runs
them on these tensors.

As on a GPU, a replay runs no Python: what a reset does to `.grad` during the capture is not done
again, and results go to the memory in which they were at the capture. Streams only note who waited
for whom.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Stream:
    """A stream, and whether another one has waited for its work."""

    def __init__(self) -> None:
        self.pending = False

    def wait_stream(self, other: Stream) -> None:
        """Wait for the work of another stream."""
        other.pending = False


class Graph(TorchDispatchMode):
    """A graph; as a mode it records, and each operation runs once during the capture."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operation."""
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            self.operations.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operations again; results overwrite those of the run before."""
        for func, args, kwargs, out in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.copy_(new)


def install(monkeypatch) -> None:
    """Put fake graphs and streams in the place of `torch.cuda`'s."""
    main, others = Stream(), list[Stream]()

    def made() -> Stream:
        others.append(Stream())
        return others[-1]

    @contextmanager
    def stream(which: Stream) -> Iterator[None]:
        yield
        which.pending = True

    @contextmanager
    def graph(captured: Graph) -> Iterator[None]:
        if any(other.pending for other in others):
            raise RuntimeError("captured while a side stream still works")
        with captured:
            yield

    monkeypatch.setattr(torch.cuda, "Stream", made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
