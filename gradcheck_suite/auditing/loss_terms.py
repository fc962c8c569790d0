"""One term of a loss, in numbers, whichever framework it was read off.

Must import neither torch nor JAX.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gradcheck_suite.core.comparison import LIVE_WEIGHT_TOLERANCE


@dataclass
class Term:
    """One term of a loss, in numbers.

    Attributes:
        expression: the names of its reduction and of its items.
        weight: the factor that reaches each element of what the reduction reduces; None where none
            arrived.
        counts: what it may count -> how many: elements, those with a weight, rows, targets, the sum
            of class weights.
        mean: whether the reduction itself divides.
        deeper: the weight and number of elements under each partial reduction below.
        item: the weight and the number of those elements whose weight is not 0, where it is the
            same for all of them.
        divisions: the lines that multiply or divide the term by a number, where they are known.
        factors: the numbers that the term is multiplied by on its way to the loss, as far as they
            can be read.
        by_data: whether one of them is a tensor of less than double precision: no number of
            Python, but one that is computed, as the count of a mask.
        factor: the product of the numbers that the elements are multiplied by, or divided by, under
            the reduction.
        hides: whether a tensor of weights multiplies the elements, in which a common factor cannot
            be told from them: they are neither 0 and 1 nor, alone or with `factor`, 1 on average.
        tolerance: relative, of the weight.
        opaque: why it cannot be read as a sum over items.
        partial: where it sees items through which no gradient flows: the share of the others, and
            which of the joined tensors is the first of them.
        repeated: whether it has gone backward before.
        of_parameters: whether it is a function of parameters alone, such as a penalty, and has no
            items.
        line: `file:line` of the loss, where it is known.
        rows: the first size of what it reduces; 0 where that is not known.
    """

    expression: tuple[str, ...]
    weight: float | None = None
    counts: dict[str, float] = field(default_factory=dict)
    mean: bool = False
    deeper: tuple[tuple[float, float], ...] = ()
    item: tuple[float, float] | None = None
    factors: tuple[float, ...] = ()
    by_data: bool = False
    divisions: frozenset[str] = frozenset()
    factor: float = 1.0
    hides: bool = False
    tolerance: float = LIVE_WEIGHT_TOLERANCE
    opaque: str | None = None
    partial: tuple[float, int] | None = None
    repeated: bool = False
    of_parameters: bool = False
    line: str | None = None
    rows: int = 0

    @property
    def own(self) -> str:
        """The count that the term's own reduction divides by, or would."""
        first = (
            "counted",
            "elements" if self.mean else "nonzero",
            "weights",
            "nonzero",
            "elements",
        )
        return next(
            (name for name in first if name in self.counts), next(iter(self.counts), "elements")
        )
