"""A call of a loss as it is in the gradient of a step: its count, and the weight of each item."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace

from gradcheck_suite.live.recording.calls import Received

TOLERANCE = 1e-6
"""Relative difference of weights that is nobody's fault: counts and quotients are often computed in float32."""
ROUNDINGS = 16
"""Roundings between a loss and what goes backward: scaling, division by counts, a sum of losses, a cast."""


@dataclass(frozen=True)
class Term:
    """One call of a loss, as it is in the gradient of a step.

    Attributes:
        name: of the loss function.
        line: `file:line` of the call.
        path: `file:line` of the user's frames, innermost first.
        reduction: of the call.
        count: what a mean divides by; the items with a weight for `"none"`, the targets for `"sum"`.
        rows: size of the leading dimension.
        elements: of the unreduced loss.
        weight: of each item in `.grad`.
        spread: largest relative difference of the weights of two items of this call.
        micro_batch: index of the backward pass in the window.
        ordinal: index among the calls of this line in this pass.
        target: storage address, first byte and last byte of the target, or None.
        unit: unit roundoff of the cotangent.
        declared: the count by which the trainer has the window divided, or None.
        summed: the term of the elements that a reduction adds up, which the user has made of an unreduced loss, such as
            its products with weights of the samples; None where there are none, or their own weights differ.
        sample_weights: of such a term, the sum of those weights.
    """

    name: str
    line: str
    path: tuple[str, ...]
    reduction: str
    count: float
    rows: int
    elements: int
    weight: float
    spread: float
    micro_batch: int
    ordinal: int
    target: tuple[int, int, int] | None
    unit: float
    declared: float | None = None
    summed: Term | None = None
    sample_weights: float = 0.0

    @property
    def tolerance(self) -> float:
        """Relative difference of weights that rounding explains."""
        return max(TOLERANCE, ROUNDINGS * self.unit)


def term(received: Received, micro_batch: int, factor: float) -> Term:
    """Return what a cotangent says, with the weights multiplied by the factor with which the pass is in `.grad`."""
    call, low, high = received.call, float(received.low), float(received.high)
    counted = call.counted
    count = float(received.items)
    if counted.reduction == "none" and count == 0:
        low = high = 0.0
    largest = max(abs(low), abs(high))
    found = Term(
        name=call.name,
        line=call.place.line,
        path=call.place.path,
        reduction=counted.reduction,
        count=count,
        rows=counted.rows,
        elements=counted.elements,
        weight=high * factor,
        spread=abs(high - low) / largest if largest else 0.0,
        micro_batch=micro_batch,
        ordinal=received.ordinal,
        target=call.target,
        unit=received.unit,
        declared=None if call.declared is None else float(call.declared),
    )
    return replace(found, summed=_summed(found, received, factor))


def _summed(found: Term, received: Received, factor: float) -> Term | None:
    """Return the term of the elements that a reduction adds up, where these weigh the same."""
    of = received.summands
    if of is None or not of.high or not near(float(of.low), float(of.high), found.tolerance):
        return None
    weight, total = float(of.high), float(of.total)
    return replace(found, weight=weight * factor, spread=0.0, elements=of.elements, sample_weights=total / weight)


def near(a: float, b: float, tolerance: float) -> bool:
    """Return whether two numbers are equal up to a relative tolerance."""
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


def group(terms: Iterable[Term], key: Callable[[Term], Hashable]) -> dict[Hashable, list[Term]]:
    """Return the terms by a key, in their order."""
    groups: dict[Hashable, list[Term]] = {}
    for one in terms:
        groups.setdefault(key(one), []).append(one)
    return groups
