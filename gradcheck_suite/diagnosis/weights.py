"""Reading a wrong gradient: which weight each micro-batch was given, and what fault gives such weights.

Accumulation is linear: observed = sum over micro-batches j of weight[j] * S[j], with S[j] the gradient of micro-batch
j's summed loss. The weights are read off exactly by the weight read-out probe, or solved for by least squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TOLERANCE = 1e-6
"""Relative; weights are read in float64, where rounding is 1e-15 and faults are ratios of small integers."""


@dataclass(frozen=True)
class Weights:
    """What one step gave each micro-batch of an epoch.

    Attributes:
        observed: (B,), weight of each micro-batch's summed loss.
        counts: (B,), what each micro-batch's mean divides by.
        window: indices of the micro-batches that this step should have.
        accumulation_steps: K.
        epoch: of the step, from 0.
        reduction: `"mean"` or `"sum"`.
        items: in each micro-batch, which need not be what is counted; empty where they are not known.
        total: the window's count, where some of it is in micro-batches that are not looked at.
    """

    observed: npt.NDArray[np.float64]
    counts: tuple[float, ...]
    window: tuple[int, ...]
    accumulation_steps: int
    epoch: int
    reduction: str
    items: tuple[int, ...] = ()
    total: float | None = None

    @property
    def window_count(self) -> float:
        """What the window's mean divides by."""
        return sum(self.counts[j] for j in self.window) if self.total is None else self.total

    @property
    def expected(self) -> float:
        """The weight that each micro-batch of the window should have."""
        return 1.0 if self.reduction == "sum" else 1.0 / self.window_count


@dataclass(frozen=True)
class Diagnosis:
    """A named fault.

    Attributes:
        name: such as `mean-of-means`.
        sentence: what the loop did and what to do.
        details: lines for a reader: the numbers that the diagnosis rests on.
    """

    name: str
    sentence: str
    details: tuple[str, ...] = ()


def _close(a: npt.ArrayLike, b: npt.ArrayLike) -> bool:
    return bool(np.allclose(a, b, rtol=TOLERANCE, atol=0.0))


def named_factor(factor: float, weights: Weights) -> str:
    """Return what a factor is in terms of the run, as the end of a sentence; empty where it is none of these."""
    short, k = len(weights.window), weights.accumulation_steps
    total = weights.window_count
    names = [
        (k, f"accumulation_steps = {k}"),
        (1 / k, f"1/accumulation_steps = 1/{k}"),
        (total, f"the window's count, {total:g}"),
        (1 / total, f"one over the window's count, 1/{total:g}"),
    ]
    if short != k:
        names = [
            (short / k, f"the short window's micro-batches over accumulation_steps, {short}/{k}"),
            (k / short, f"accumulation_steps over the short window's micro-batches, {k}/{short}"),
            (short, f"the short window's micro-batches, {short}"),
            (1 / short, f"one over the short window's micro-batches, 1/{short}"),
            *names,
        ]
    if weights.items and weights.items != weights.counts and weights.reduction == "mean":
        items = sum(weights.items[j] for j in weights.window)
        over = f"the window's count over that and its items together, {total:g}/({total:g} + {items})"
        names.append((total / (total + items), f"{over}: one target too many is counted for every item"))
    # small windows make several names the same number: all of them are said, none is guessed
    fitting = [name for value, name in names if _close(factor, value)]
    return f", which is {' or '.join(fitting)}" if fitting else ""


def diagnose(weights: Weights) -> Diagnosis:
    """Name the fault that gives such weights; `unrecognised-weights` where no known one does."""
    inside = [j for j in weights.window if weights.counts[j]]
    ratio = weights.observed[inside] / weights.expected
    counts = np.array([weights.counts[j] for j in inside])
    outside = [j for j in range(len(weights.counts)) if j not in weights.window and weights.counts[j]]
    foreign = [j for j in outside if abs(weights.observed[j]) > TOLERANCE * weights.expected]
    if foreign:
        return Diagnosis(
            "stale-window",
            f"micro-batches {foreign} belong to other windows and are still in the gradient: "
            "reset the gradients once after every step, the short last window's too",
        )
    if weights.epoch and _close(ratio, weights.epoch + 1):
        return Diagnosis(
            "stale-window",
            "the same window's gradient from earlier epochs is still in it: reset the gradients once after every step",
        )
    return _diagnose_window(ratio, counts, inside, weights)


def _diagnose_window(
    ratio: npt.NDArray[np.float64], counts: npt.NDArray[np.float64], inside: Sequence[int], weights: Weights
) -> Diagnosis:
    size, k = len(inside), weights.accumulation_steps
    if np.all(ratio == 0):
        return Diagnosis("no-gradient", "nothing of the window is in the gradient: it was reset before the step")
    if _close(ratio, 1.0):
        return Diagnosis(
            "rounded-weights",
            f"the weights are right to {np.abs(ratio - 1).max():.1g} only: counts or their quotients were rounded "
            "to a lower precision than the gradient's; compute them in the loss's dtype or in Python floats",
        )
    if weights.reduction == "mean" and _counts_items(weights, counts, inside):
        return Diagnosis(
            "wrong-count",
            "micro-batches' means are weighted as if every item of theirs counted alike, which here it does not: "
            "weight each by run.count(batch) over the window's count",
        )
    scale = float(ratio.mean())
    if _close(ratio, scale):
        return Diagnosis(
            "wrong-scale",
            f"every item of the window weighs {scale:.6g} times what it should{named_factor(scale, weights)}",
        )
    per_mean = weights.observed[list(inside)] * counts
    share = float(per_mean.mean())
    if _close(per_mean, share):
        return _mean_of_means(share, weights)
    if (step := _geometric(ratio, per_mean, k)) is not None:
        return Diagnosis(
            "rescaled-accumulator",
            f"each micro-batch weighs {step:.6g} times the one before it: "
            "the running sum itself is rescaled at every micro-batch; scale each contribution instead",
        )
    present = [inside[i] for i in range(size) if ratio[i] != 0]
    if present == [inside[-1]]:
        return Diagnosis(
            "reset-inside-window",
            "only the window's last micro-batch is in the gradient: reset once per window, not per micro-batch",
        )
    if present == [inside[0]]:
        return Diagnosis("first-only", "only the window's first micro-batch is in the gradient")
    if missing := [j for j in inside if j not in present]:
        return Diagnosis("dropped-micro-batch", f"micro-batches {missing} of the window are not in the gradient")
    if size > 2 and _close(ratio, np.arange(size, 0, -1)):
        return Diagnosis(
            "running-loss",
            f"the window's micro-batches are in the gradient {size}, {size - 1}, ..., 1 times: "
            "the running sum of the losses goes through backward each time; send each loss through once",
        )
    twice = [inside[i] for i in range(size) if _close(ratio[i], 2.0)]
    if twice and _close([r for r in ratio if not _close(r, 2.0)], 1.0):
        return Diagnosis("repeated-micro-batch", f"micro-batches {twice} of the window are in the gradient twice")
    shown = ", ".join(f"{w:.6g}" for w in weights.observed[list(inside)])
    return Diagnosis(
        "unrecognised-weights",
        f"the window's micro-batches weigh {shown} per count, where {weights.expected:.6g} is right for each",
    )


def _counts_items(weights: Weights, counts: npt.NDArray[np.float64], inside: Sequence[int]) -> bool:
    """Whether means are weighted by their numbers of items, where those are not what the means divide by."""
    if not weights.items:
        return False
    items = np.array([weights.items[j] for j in inside])
    per_mean = weights.observed[list(inside)] * counts
    return _close(per_mean, items / sum(weights.items[j] for j in weights.window))


def _geometric(ratio: npt.NDArray[np.float64], per_mean: npt.NDArray[np.float64], k: int) -> float | None:
    """Return the factor between neighbours where the weights are a geometric sequence; two alone are one only for K."""
    if np.any(ratio == 0):
        return None
    if len(ratio) == 2:
        return float(k) if _close(per_mean, [k**-2, k**-1]) else None
    for values in (ratio, per_mean):
        steps = values[1:] / values[:-1]
        step = float(steps.mean())
        if step > 0 and _close(steps, step):
            return step
    return None


def _mean_of_means(weight: float, weights: Weights) -> Diagnosis:
    short, k = len(weights.window), weights.accumulation_steps
    if weights.reduction == "sum":
        return Diagnosis(
            "mean-of-means",
            f"each micro-batch's mean weighs {weight:.6g} whatever its count, where sums are to be added up: "
            "do not divide a summed loss by the micro-batch's count",
        )
    cure = "divide each summed loss by the window's count (mean loss * count of the micro-batch / count of the window)"
    if _close(weight, 1 / short):
        return Diagnosis("mean-of-means", f"each micro-batch's mean weighs 1/{short} whatever its count: {cure}")
    if _close(weight, 1 / k):
        return Diagnosis(
            "mean-of-means",
            f"each micro-batch's mean weighs 1/{k} whatever its count, in a window of {short}: {cure}",
        )
    if _close(weight, 1.0):
        return Diagnosis(
            "wrong-scale", f"each micro-batch's mean has weight 1, {short} times the mean of means: {cure}"
        )
    return Diagnosis("mean-of-means", f"each micro-batch's mean weighs {weight:.6g} whatever its count: {cure}")
