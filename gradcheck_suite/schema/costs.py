"""What a training window does to its gradients in memory, as plain data.

The laws of the reset modes (`gradcheck_suite.loops.laws`) predict it, and the ledger (`gradcheck_suite.measure`)
measures it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Traffic:
    """Operations and the bytes they moved.

    Attributes:
        operations: number of operations, views left out.
        views: number of operations that only made a view or changed metadata.
        read: bytes of the tensors that the operations were given.
        written: bytes of the tensors that they made or changed.
        allocated: bytes of the storages that were allocated.
        freed: bytes of the storages that were freed.
    """

    operations: int = 0
    views: int = 0
    read: int = 0
    written: int = 0
    allocated: int = 0
    freed: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def moved(self) -> int:
        """Bytes read plus bytes written."""
        return self.read + self.written


@dataclass(frozen=True)
class ParameterUse:
    """One parameter in one window.

    Attributes:
        bytes: bytes of its gradient.
        itemsize: bytes of an element.
        reached: number of the window's micro-batches whose loss reaches the parameter.
        reached_in_last_window: whether a micro-batch of the window before reached it.
        reached_before: whether a micro-batch of any earlier window reached it.
    """

    bytes: int
    itemsize: int
    reached: int
    reached_in_last_window: bool
    reached_before: bool


@dataclass(frozen=True)
class WindowUse:
    """One window: its trainable parameters, and whether it is the first window of the run."""

    parameters: tuple[ParameterUse, ...]
    first: bool


@dataclass(frozen=True)
class Cost:
    """What one window does to gradients, from the reset before it to the end of its step.

    Attributes:
        reset: zeroing or releasing the gradients of the window before.
        accumulate: adding each micro-batch's gradients to the sum. The backward makes these gradients, and they are
            released after they were added, in every mode alike: that is not counted.
        handling: what the loop does to gradients between backward and step.
        kept: bytes of gradients alive from the end of the reset to the first backward.
    """

    reset: Traffic
    accumulate: Traffic
    handling: Traffic
    kept: int

    @property
    def moved(self) -> int:
        """Bytes of gradients that the window reads and writes."""
        return self.reset.moved + self.accumulate.moved + self.handling.moved


def uniform_window(
    parameters: int, elements: int, itemsize: int, micro_batches: int, *, first: bool = False
) -> WindowUse:
    """Return a window in which every micro-batch reaches every parameter.

    Args:
        parameters: number of parameters.
        elements: number of elements of all parameters together.
        itemsize: bytes of an element.
        micro_batches: number of micro-batches in the window.
        first: whether it is the first window of a run, which finds no gradients.
    """
    each, left = divmod(elements, parameters)
    sizes = (each + (i < left) for i in range(parameters))
    uses = (ParameterUse(size * itemsize, itemsize, micro_batches, not first, not first) for size in sizes)
    return WindowUse(tuple(uses), first)
