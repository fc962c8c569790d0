"""The laws of the reset modes: what one window does to gradients, worked out from sizes alone.

The laws assume dense gradients that autograd can take as they are: of the parameter's own strides, and held by nothing
else. `add_` reads two operands and writes one, `zero_` writes one, and taking a gradient moves nothing. The ledger
(`gradcheck_suite.measure.ledger`) measures the same quantities, and `properties/test_cost_laws.py` requires equality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from gradcheck_suite.schema.costs import Cost, ParameterUse, Traffic, WindowUse, uniform_window

Law = Callable[[WindowUse], Cost]

FLOAT32_ITEMSIZE = 4


def _bytes(parameters: Iterable[ParameterUse]) -> int:
    return sum(p.bytes for p in parameters)


def _additions(counts: Iterable[tuple[ParameterUse, int]]) -> Traffic:
    """Return what adding gradients to sums of the same dtype moves, `count` times for each parameter."""
    total = Traffic()
    for p, count in counts:
        total += Traffic(operations=count, read=2 * count * p.bytes, written=count * p.bytes)
    return total


def zeroed(window: WindowUse) -> Cost:
    """Keep each gradient from the first backward that reaches its parameter; zero it, then add K times."""
    kept = [p for p in window.parameters if p.reached_before]
    added = ((p, p.reached if p.reached_before else max(p.reached - 1, 0)) for p in window.parameters)
    return Cost(
        reset=Traffic(operations=len(kept), written=_bytes(kept)),
        accumulate=_additions(added),
        handling=Traffic(),
        kept=_bytes(kept),
    )


def zeroed_at_once(window: WindowUse) -> Cost:
    """Do what `zeroed` does, with one call for all gradients of one dtype and device."""
    cost = zeroed(window)
    return replace(cost, reset=replace(cost.reset, operations=min(1, cost.reset.operations)))


def released(window: WindowUse) -> Cost:
    """Free each gradient; take the gradient of the first micro-batch that reaches its parameter, add K - 1 times."""
    return Cost(
        reset=Traffic(freed=_bytes(p for p in window.parameters if p.reached_in_last_window)),
        accumulate=_additions((p, max(p.reached - 1, 0)) for p in window.parameters),
        handling=Traffic(),
        kept=0,
    )


def flat_buffer(window: WindowUse) -> Cost:
    """Keep all gradients in one buffer from the start of the run; zero it with one call, then add K times."""
    size = _bytes(window.parameters)
    return Cost(
        reset=Traffic() if window.first else Traffic(operations=1, written=size),
        accumulate=_additions((p, p.reached) for p in window.parameters),
        handling=Traffic(),
        kept=size,
    )


def stepped_in_backward(window: WindowUse) -> Cost:
    """Step on each gradient and free it as soon as the last micro-batch's was added: none is left to reset."""
    return replace(released(window), reset=Traffic())


def main_gradients(window: WindowUse) -> Cost:
    """Add each micro-batch's gradient to a sum in float32 or wider, and free it.

    At the end of a window the sums are rounded to the parameters' dtype, which is a copy only where that is narrower. A
    sum is kept from the first addition on.
    """
    reset, accumulate, handling, kept = Traffic(), Traffic(), Traffic(), 0
    for p in window.parameters:
        wide = p.bytes // p.itemsize * max(FLOAT32_ITEMSIZE, p.itemsize)
        rounded = p.bytes if p.itemsize < FLOAT32_ITEMSIZE else 0
        accumulate += Traffic(operations=p.reached, read=p.reached * (wide + p.bytes), written=p.reached * wide)
        if p.reached_in_last_window:
            reset += Traffic(operations=1, written=wide, freed=rounded)
        if p.reached and p.itemsize < FLOAT32_ITEMSIZE:
            handling += Traffic(operations=1, read=wide, written=rounded, allocated=rounded)
        if p.reached_before:
            kept += wide
    return Cost(reset, accumulate, handling, kept)


def bytes_saved_by_releasing(gradient_bytes: int, micro_batches: int = 1) -> int:
    """Return the bytes that a window moves less when it releases gradients than when it zeroes them.

    Zeroing writes every gradient once more, and one more addition reads two operands and writes one: four times the
    gradients' bytes for any number of micro-batches.

    Args:
        gradient_bytes: bytes of one gradient of all parameters.
        micro_batches: number of micro-batches in the window.
    """
    window = uniform_window(1, gradient_bytes, 1, micro_batches)
    return zeroed(window).moved - released(window).moved
