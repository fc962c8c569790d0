"""The laws of the reset modes: what one window does to its gradients in memory, worked out from
sizes alone.

The laws assume dense gradients that autograd can take as they are: of the parameter's own strides,
and held by nothing else. `add_` reads two operands and writes one, `zero_` writes one, and taking a
gradient moves nothing. The ledger measures the same quantities, and
`studies/properties/test_cost_laws.py` requires equality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class MemoryTraffic:
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

    def __add__(self, other: MemoryTraffic) -> MemoryTraffic:
        return MemoryTraffic(
            *(getattr(self, f.name) + getattr(other, f.name) for f in fields(self))
        )

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
        accumulate: adding each micro-batch's gradients to the sum. The backward makes these
            gradients, and they are released after they were added, in every mode alike: that is not
            counted.
        handling: what the loop does to gradients between backward and step.
        kept: bytes of gradients alive from the end of the reset to the first backward.
    """

    reset: MemoryTraffic
    accumulate: MemoryTraffic
    handling: MemoryTraffic
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
    uses = (
        ParameterUse(size * itemsize, itemsize, micro_batches, not first, not first)
        for size in sizes
    )
    return WindowUse(tuple(uses), first)


Law = Callable[[WindowUse], Cost]

FLOAT32_ITEMSIZE = 4


def _bytes(parameters: Iterable[ParameterUse]) -> int:
    return sum(p.bytes for p in parameters)


def _additions(counts: Iterable[tuple[ParameterUse, int]]) -> MemoryTraffic:
    """Return what adding gradients to sums of the same dtype moves, `count` times for each
    parameter.
    """
    total = MemoryTraffic()
    for p, count in counts:
        total += MemoryTraffic(operations=count, read=2 * count * p.bytes, written=count * p.bytes)
    return total


def zeroed(window: WindowUse) -> Cost:
    """Keep each gradient from the first backward that reaches its parameter.

    Zero it, then add K times.
    """
    kept = [p for p in window.parameters if p.reached_before]
    added = (
        (p, p.reached if p.reached_before else max(p.reached - 1, 0)) for p in window.parameters
    )
    return Cost(
        reset=MemoryTraffic(operations=len(kept), written=_bytes(kept)),
        accumulate=_additions(added),
        handling=MemoryTraffic(),
        kept=_bytes(kept),
    )


def zeroed_at_once(window: WindowUse) -> Cost:
    """Do what `zeroed` does, with one call for all gradients of one dtype and device."""
    cost = zeroed(window)
    return replace(cost, reset=replace(cost.reset, operations=min(1, cost.reset.operations)))


def released(window: WindowUse) -> Cost:
    """Free each gradient; take the gradient of the first micro-batch that reaches its parameter,
    add K - 1 times.
    """
    return Cost(
        reset=MemoryTraffic(freed=_bytes(p for p in window.parameters if p.reached_in_last_window)),
        accumulate=_additions((p, max(p.reached - 1, 0)) for p in window.parameters),
        handling=MemoryTraffic(),
        kept=0,
    )


def flat_buffer(window: WindowUse) -> Cost:
    """Keep all gradients in one buffer from the start of the run.

    Zero it with one call, then add K times.
    """
    size = _bytes(window.parameters)
    return Cost(
        reset=MemoryTraffic() if window.first else MemoryTraffic(operations=1, written=size),
        accumulate=_additions((p, p.reached) for p in window.parameters),
        handling=MemoryTraffic(),
        kept=size,
    )


def stepped_in_backward(window: WindowUse) -> Cost:
    """Step on each gradient and free it as soon as the last micro-batch's was added: none is left
    to reset.
    """
    return replace(released(window), reset=MemoryTraffic())


def main_gradients(window: WindowUse) -> Cost:
    """Add each micro-batch's gradient to a sum in float32 or wider, and free it.

    At the end of a window the sums are rounded to the parameters' dtype, which is a copy only where
    that is narrower. A sum is kept from the first addition on.
    """
    reset, accumulate, handling, kept = MemoryTraffic(), MemoryTraffic(), MemoryTraffic(), 0
    for p in window.parameters:
        wide = p.bytes // p.itemsize * max(FLOAT32_ITEMSIZE, p.itemsize)
        rounded = p.bytes if p.itemsize < FLOAT32_ITEMSIZE else 0
        accumulate += MemoryTraffic(
            operations=p.reached, read=p.reached * (wide + p.bytes), written=p.reached * wide
        )
        if p.reached_in_last_window:
            reset += MemoryTraffic(operations=1, written=wide, freed=rounded)
        if p.reached and p.itemsize < FLOAT32_ITEMSIZE:
            handling += MemoryTraffic(operations=1, read=wide, written=rounded, allocated=rounded)
        if p.reached_before:
            kept += wide
    return Cost(reset, accumulate, handling, kept)


def bytes_saved_by_releasing(gradient_bytes: int, micro_batches: int = 1) -> int:
    """Return the bytes that a window moves less when it releases gradients than when it zeroes
    them.

    Zeroing writes every gradient once more, and one more addition reads two operands and writes
    one: four times the gradients' bytes for any number of micro-batches.

    Args:
        gradient_bytes: bytes of one gradient of all parameters.
        micro_batches: number of micro-batches in the window.
    """
    window = uniform_window(1, gradient_bytes, 1, micro_batches)
    return zeroed(window).moved - released(window).moved
