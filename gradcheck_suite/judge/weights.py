"""The weight that each micro-batch has in the gradient of a step, and what is right of it.

Accumulation is linear: observed = sum over micro-batches j of weight[j] * S[j], with S[j] the
gradient of micro-batch j's summed loss. The weights are read off exactly by the weight probe, or
solved for by least squares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from gradcheck_suite.core.comparison import WEIGHT_TOLERANCE
from gradcheck_suite.core.faults import FAULTS, FIX, names_of, remedy_of
from gradcheck_suite.core.results import Weight

WHILE_RIGHT = " alone, while "
"""In an explanation between the parameters that are wrong and those that are right."""
ADDED = tuple(10.0**-digits for digits in range(2, 13))
"""What programs add to a count that may be 0."""
MOST_ADDED = 0.01
"""Relative difference of means to which one of these comes."""
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Weights:
    """What one step gave each micro-batch of an epoch.

    Attributes:
        observed: (B,), weight of each micro-batch's summed loss; exactly 0 where nothing of it is
            in the gradient.
        counts: (B,), what each micro-batch's mean divides by.
        window: indices of the micro-batches that this step should have.
        accumulation_steps: K.
        epoch: the epoch of the step, from 0.
        reduction: `"mean"` or `"sum"`.
        items: the number of items of each micro-batch, which its count may differ from; empty where
            unknown.
        beside: what else a loss may count, in words -> (B,) the numbers.
        unread: micro-batches whose weights cannot be read, since nothing that is looked at depends
            on them.
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
    beside: Mapping[str, Sequence[float]] = field(default_factory=dict)
    unread: frozenset[int] = frozenset()
    windows: tuple[tuple[int, ...], ...] = ()
    tolerance: float = WEIGHT_TOLERANCE
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
        """The window's micro-batches whose weights can be read: those with valid targets."""
        return [j for j in self.window if self.counts[j] and j not in self.unread]

    @property
    def foreign(self) -> list[int]:
        """Micro-batches of other windows that are in the gradient."""
        # a micro-batch without valid targets has a gradient of zeros, whatever its weight
        readable = [j for j, n in enumerate(self.counts) if n and j not in self.unread]
        return [j for j in readable if j not in self.window and self.observed[j]]

    @property
    def ratio(self) -> Array:
        """Observed over right weight of the micro-batches inside."""
        return self.observed[self.inside] / self.expected

    @property
    def ratios(self) -> dict[int, float]:
        """Observed over right weight, by micro-batch inside."""
        return dict(zip(self.inside, self.ratio, strict=True))

    @property
    def missing(self) -> list[int]:
        """Micro-batches of the window that are not in the gradient."""
        return [j for j, ratio in self.ratios.items() if not ratio]

    @property
    def held(self) -> list[int]:
        """Micro-batches of any window that are in the gradient, and have valid targets."""
        return [j for j, count in enumerate(self.counts) if count and self.observed[j]]

    @property
    def per_mean(self) -> Array:
        """The weight of the means of the micro-batches inside: that of their sums times what they
        are divided by.
        """
        return self._per_mean(self.added)

    def _per_mean(self, added: float) -> Array:
        return self.observed[self.inside] * np.array([self.counts[j] + added for j in self.inside])

    @property
    def added(self) -> float:
        """What is added to each count so that none divides by 0, where all means have one weight
        with it; else 0.
        """
        means = self._per_mean(0.0)
        if (
            not len(means)
            # an epsilon moves means by less than 1%; what moves them by more is a weight
            or not 0 < np.ptp(means) < MOST_ADDED * np.abs(means).max()
            or self.close(means, means[0])
        ):
            return 0.0
        for one in ADDED:
            means = self._per_mean(one)
            if self.close(means, means[0]):
                return one
        return 0.0

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
        """Return whether weights are equal up to rounding."""
        # relative alone: weights are as small as one over a count of thousands
        return bool(np.allclose(a, b, rtol=self.tolerance, atol=0.0))


@dataclass(frozen=True)
class Diagnosis:
    """A named fault.

    Attributes:
        name: such as `mean-of-means`, or `a or b` where the evidence fits both.
        sentence: what the loop did.
        details: lines for a reader: the numbers that the diagnosis rests on.
        weights: what the step gave each item, by micro-batch, where the diagnosis rests on that.
        causes: causes of the faults for which the table of faults has remedies of their own.
        refutes_weights: whether the weights that a probe shows do not give the gradient of the
            case, so that no name of weights stands for it.
    """

    name: str
    sentence: str
    details: tuple[str, ...] = ()
    weights: tuple[Weight, ...] = ()
    causes: tuple[str, ...] = ()
    refutes_weights: bool = False

    def __post_init__(self) -> None:
        """Expect a name of the table, empty where none is given, and causes of its row."""
        assert not self.name or self.names <= FAULTS.keys(), (
            f"{self.name}: no row in core/faults.py"
        )
        # a cause chooses a remedy, so each must be one of a row that is named
        rows = [FAULTS[name] for name in self.names if name]
        known = set(chain.from_iterable(row.causes for row in rows))
        assert known.issuperset(self.causes), (
            f"{self.name}: no such cause in core/faults.py: {self.causes}"
        )

    @property
    def names(self) -> frozenset[str]:
        """The faults that it may be."""
        return names_of(self.name)

    def explanation(self, *, jax: bool = False) -> str:
        """Return what the loop did and what to do, in the words of PyTorch or of JAX; empty where
        the fault has no name.
        """
        return (
            f"{self.sentence}{FIX}{remedy_of(self.name, self.causes, jax=jax)}"
            if self.name
            else self.sentence
        )


def any_of(diagnoses: Iterable[Diagnosis]) -> Diagnosis:
    """Return the diagnosis that leaves several open: their names, sentences and causes, each once."""
    diagnoses = list(diagnoses)
    names = dict.fromkeys(chain.from_iterable(one.name.split(" or ") for one in diagnoses))
    sentences = dict.fromkeys(one.sentence for one in diagnoses)
    causes = dict.fromkeys(chain.from_iterable(one.causes for one in diagnoses))
    return Diagnosis(" or ".join(names), "; or: ".join(sentences), causes=tuple(causes))


def missing_gradient(parameter: str) -> Diagnosis:
    """Return the diagnosis of a parameter whose gradient is None at the step, without a reason."""
    return Diagnosis(
        "no-gradient",
        f"the gradient of {parameter} is None at the step, but the window's items reach"
        f" {parameter}",
    )


def none_and_not_zeros(parameter: str) -> Diagnosis:
    """Return the diagnosis of a parameter whose right gradient is zeros, and None at the step."""
    return Diagnosis(
        "no-gradient",
        f"the gradient of {parameter} is None at the step, where backward leaves zeros: the"
        f" window's items reach {parameter}. On zeros, momentum, averages and weight decay move a"
        " parameter; on None it stays where it is",
        causes=("by-value",),
    )


def poisoned_by(window: int) -> Diagnosis:
    """Return the diagnosis of a NaN or infinity that an earlier window left behind."""
    return Diagnosis(
        "poisoned-by-earlier-window",
        f"the reference gradient of window {window} is NaN or infinite, and the reset left that"
        " behind in this window: it scaled the gradients and did not clear them",
    )


def not_linear(why: str) -> Diagnosis:
    """Return the diagnosis of a gradient that no known fault explains."""
    return Diagnosis(
        "not-linear", f"the gradient is wrong, and not by weights of its micro-batches: {why}"
    )


def factor_text(factor: float) -> str:
    """Return a factor; one near to 1 by its distance from it."""
    off = factor - 1
    return f"1 {'+' if off > 0 else '-'} {abs(off):.3g}" if 0 < abs(off) < 1e-5 else f"{factor:.6g}"


def first_of(names: Sequence[object], shown: int = 3) -> str:
    """Return a list in words, cut after a few."""
    text = ", ".join(str(name) for name in names[:shown])
    return text + (f" and {len(names) - shown} more" if len(names) > shown else "")


# Which micro-batches of the window are in the gradient, and how often: none, one, some, or some
# several times.


Steps = Sequence[Weights]


def places(w: Weights, chosen: Callable[[float], bool]) -> tuple[int, ...]:
    """Return which of the window's micro-batches have a ratio that is chosen, by their place in the
    window.
    """
    return tuple(w.window.index(j) for j, ratio in w.ratios.items() if chosen(float(ratio)))


def dropped_text(w: Weights, wrong: Steps) -> str:
    """Return which micro-batches are missing."""
    return f"micro-batches {w.missing} of the window are not in the gradient{_in_common(wrong)}"


def repeated_text(w: Weights, wrong: Steps) -> str:
    """Return which micro-batches are there several times, how often, and which are missing."""
    more = {j: ratio for j, ratio in w.ratios.items() if ratio > 1 and not w.close(ratio, 1)}
    twice = list(more)
    gone = w.missing
    times = sorted({f"{ratio:.6g}" for ratio in more.values()})
    message = f"micro-batches {twice} of the window are in the gradient {' or '.join(times)} times"
    message = message.replace(" 2 times", " twice")
    return f"{message}{f', and {gone} not at all' if gone else ''}{_in_common(wrong)}"


def _in_common(wrong: Steps) -> str:
    """Return the size that all wrong micro-batches of several steps have and no right one, as a
    part of a sentence.
    """
    if len(wrong) < 2 or not all(w.items for w in wrong):
        return ""
    of_right = set[int]()
    of_wrong = set[int]()
    for w in wrong:
        for j, ratio in w.ratios.items():
            found = of_right if w.close(ratio, 1.0) else of_wrong
            found.add(w.items[j])
    if len(of_wrong) != 1 or of_wrong & of_right or not of_right:
        return ""
    (size,) = of_wrong
    return (
        f"; in {len(wrong)} wrong steps they all have {size} item{'s' if size > 1 else ''}, and no"
        " right one has"
    )


# The weights that known faults without a free number give, to be tried on a gradient.


def trial_weights(w: Weights) -> Iterator[Array]:
    """Yield (B,) weights of micro-batches that a known fault gives in a step, `w` being of that
    step.
    """
    right = [_of_window(w, i) for i in range(len(w.windows))]
    own = right[w.index or 0]
    yield from _weights_of_other_windows(w, right)
    size = len(w.window)
    numbers = (w.accumulation_steps, size, w.window_count, w.world_size)
    # numbers of the run may be equal: each factor is tried once
    for factor in {float(n) for n in numbers} - {1.0}:
        yield own * factor
        yield own / factor
    yield -own
    yield from _of_means(w, own)
    yield from _weights_of_ranks(w, own)
    if size > 1:
        for j in w.inside:
            single = _only(own, j)
            yield own + single
            yield size * single


def _only(weights: Array, micro_batch: int) -> Array:
    """Return weights of which one micro-batch has its own, and all others 0."""
    single = np.zeros_like(weights)
    single[micro_batch] = weights[micro_batch]
    return single


def _weights_of_other_windows(w: Weights, right: Sequence[Array]) -> Iterator[Array]:
    """Yield another window's weights, or the own ones with what others left behind."""
    index = w.index or 0
    own = right[index]
    for i, other in enumerate(right):
        if i != index:
            yield other
    # left over from the step before, from all before, or from the next
    steps = [*right] * w.epoch + [*right[:index]]
    if steps:
        yield own + steps[-1]
        yield own + np.sum(steps, axis=0)
    yield own + right[(index + 1) % len(right)]


def _of_means(w: Weights, own: Array) -> Iterator[Array]:
    """Yield the weights of means that weigh alike, and those of one micro-batch or of all others."""
    # a count of 0 belongs to weights of 0, which stay 0
    counts = np.array([n or 1.0 for n in w.counts])
    means = np.where(own != 0, 1 / counts, 0.0)
    shares = {1.0, 1 / w.accumulation_steps, 1 / len(w.window)}
    for base in (own, *(share * means for share in shares)):
        if base is not own:
            yield base
        if len(w.window) > 1:
            for j in w.inside:
                single = _only(base, j)
                yield single
                yield base - single


def _weights_of_ranks(w: Weights, own: Array) -> Iterator[Array]:
    """Yield the weights of one rank alone, and those of ranks that divide by their own counts."""
    for rank in set(w.owners):
        yield np.where(np.array(w.owners) == rank, own, 0.0)
    if w.owners and w.reduction == "mean":
        # a rank without valid targets divides by nothing that matters
        of_ranks = np.array([w.count_of_rank(rank) or 1.0 for rank in w.owners])
        yield np.where(own != 0, 1 / of_ranks, 0.0)
        yield np.where(own != 0, 1 / of_ranks, 0.0) / w.world_size


def _of_window(w: Weights, window: int) -> Array:
    members = [j for j in w.windows[window] if w.counts[j]]
    values = np.zeros(len(w.counts))
    values[members] = 1.0 if w.reduction == "sum" else 1.0 / w.count_of(members)
    return values
