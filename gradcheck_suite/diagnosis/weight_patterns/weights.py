"""The weight that each micro-batch has in the gradient of a step, and what is right of it.

Accumulation is linear: observed = sum over micro-batches j of weight[j] * S[j], with S[j] the gradient of micro-batch
j's summed loss. The weights are read off exactly by the weight probe, or solved for by least squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradcheck_suite.schema.results import ItemWeight

ALONE = " alone, while "
"""In an explanation between the parameters that are wrong and those that are right."""
Array = npt.NDArray[np.float64]
TOLERANCE = 1e-9
"""Relative tolerance of weights, where it is not known better; weights are read in float64, which rounds at 1e-16."""


@dataclass(frozen=True)
class Weights:
    """What one step gave each micro-batch of an epoch.

    Attributes:
        observed: (B,), weight of each micro-batch's summed loss; exactly 0 where nothing of it is in the gradient.
        counts: (B,), what each micro-batch's mean divides by.
        window: indices of the micro-batches that this step should have.
        accumulation_steps: K.
        epoch: of the step, from 0.
        reduction: `"mean"` or `"sum"`.
        items: in each micro-batch, which need not be what is counted; empty where they are not known.
        unread: micro-batches whose weights cannot be read, since nothing that is looked at depends on them.
        windows: the windows of an epoch; empty where only this one is known.
        tolerance: relative error of the weights that rounding explains.
        owners: the rank that has each micro-batch; empty for one rank.
        alike: whether all of several ranks have these weights.
    """

    observed: Array
    counts: tuple[float, ...]
    window: tuple[int, ...]
    accumulation_steps: int
    epoch: int
    reduction: str
    items: tuple[int, ...] = ()
    unread: frozenset[int] = frozenset()
    windows: tuple[tuple[int, ...], ...] = ()
    tolerance: float = TOLERANCE
    owners: tuple[int, ...] = ()
    alike: bool = False

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(set(self.owners)) or 1

    def count_of_rank(self, rank: int) -> float:
        """Return what a rank's micro-batches of the window count together."""
        return self.count_of([j for j in self.window if self.owners[j] == rank])

    @property
    def window_count(self) -> float:
        """What the window's mean divides by."""
        return self.count_of(self.window)

    @property
    def expected(self) -> float:
        """The weight that each micro-batch of the window should have."""
        return 1.0 if self.reduction == "sum" else 1.0 / self.window_count

    @property
    def inside(self) -> list[int]:
        """The window's micro-batches whose weights can be read: those that count something."""
        return [j for j in self.window if self.counts[j] and j not in self.unread]

    @property
    def foreign(self) -> list[int]:
        """Micro-batches of other windows that are in the gradient."""
        readable = [j for j, n in enumerate(self.counts) if n and j not in self.unread]
        return [j for j in readable if j not in self.window and self.observed[j]]

    @property
    def ratio(self) -> Array:
        """Observed over right weight of the micro-batches inside."""
        return self.observed[self.inside] / self.expected

    @property
    def per_mean(self) -> Array:
        """The weight of the means of the micro-batches inside: that of their sums times their counts."""
        return self.observed[self.inside] * np.array([self.counts[j] for j in self.inside])

    @property
    def index(self) -> int | None:
        """Which of the windows this is, or None where the others are not known."""
        return self.windows.index(self.window) if self.windows else None

    @property
    def is_right(self) -> bool:
        """Whether the step has what it should."""
        return not self.foreign and self.close(self.ratio, 1.0)

    def count_of(self, micro_batches: Sequence[int]) -> float:
        """Return what these micro-batches count together."""
        return sum(self.counts[j] for j in micro_batches)

    def close(self, a: npt.ArrayLike, b: npt.ArrayLike) -> bool:
        """Return whether weights are equal but for rounding."""
        return bool(np.allclose(a, b, rtol=self.tolerance, atol=0.0))


@dataclass(frozen=True)
class Diagnosis:
    """A named fault.

    Attributes:
        name: such as `mean-of-means`, or `a or b` where the evidence fits both.
        sentence: what the loop did and what to do.
        details: lines for a reader: the numbers that the diagnosis rests on.
        weights: what the step gave each item, by micro-batch, where the diagnosis rests on that.
    """

    name: str
    sentence: str
    details: tuple[str, ...] = ()
    weights: tuple[ItemWeight, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """The faults that it may be."""
        return names_of(self.name)


def names_of(diagnosis: str) -> frozenset[str]:
    """Return the faults that a diagnosis of the form `a or b` leaves open."""
    return frozenset(diagnosis.split(" or "))


def missing_gradient(parameter: str) -> Diagnosis:
    """Return the diagnosis of a parameter whose gradient is None at the step, without a reason."""
    return Diagnosis(
        "missing-gradient",
        f"{parameter}.grad is None at the step, but the window's items reach {parameter}: look for a loss that is not "
        "sent backward, a `no_grad`, a `requires_grad_(False)`, or a reset before the step",
    )


def listed(names: Sequence[object], shown: int = 3) -> str:
    """Return a list in words, cut after a few."""
    text = ", ".join(str(name) for name in names[:shown])
    return text + (f" and {len(names) - shown} more" if len(names) > shown else "")
