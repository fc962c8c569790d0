"""By what hooks of the program change the gradients of parameters.

Some elements of a gradient are copied before the hooks and after them, and those of all parameters
are compared together when the pass has ended: between two kernels Python is several times as slow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.auditing import samples
from gradcheck_suite.auditing.events import PassRecord
from gradcheck_suite.auditing.samples import Raw
from gradcheck_suite.auditing.vectors import Vector

Some = torch.Tensor | npt.NDArray[Any]
"""Some elements: an array where they lay in the memory of the process."""

MOST_RATIOS = 1024
"""Elements of a gradient that tell by what hooks multiply it."""
CLOSE = 1e-8
"""Difference of two factors below which they are the same."""


@dataclass(frozen=True)
class BeforeHooks:
    """A gradient before the program's hooks on its parameter.

    Attributes:
        gradient: where all of it is compared with what leaves the hooks; it is let go of then.
        some: a copy of some elements.
        sampled: a sample, where one was taken.
        address: of its memory; 0 where that is not in the process.
    """

    gradient: torch.Tensor | None
    some: Some
    sampled: Raw | None
    address: int


@dataclass(frozen=True)
class Change:
    """A gradient that the program's hooks on its parameter were called with, of a pass that runs.

    Attributes:
        key: of the parameter.
        record: of the pass.
        before: some elements before the hooks.
        after: the same after them.
        sampled: samples before and after them; None where none were taken.
        times: how often one of the hooks is on the parameter.
        is_other: whether all of it was compared, and is another one.
    """

    key: int
    record: PassRecord
    before: npt.NDArray[Any]
    after: npt.NDArray[Any]
    sampled: tuple[Raw, Raw] | None
    times: int
    is_other: bool


@dataclass(frozen=True)
class Compared:
    """What a change is.

    Attributes:
        change: itself.
        ratio: by which each of the elements was multiplied, NaN where it was 0.
        is_alike: whether these factors are those of the last pass.
        is_same: whether nothing was changed.
    """

    change: Change
    ratio: npt.NDArray[Any]
    is_alike: bool
    is_same: bool

    def vectors(self) -> tuple[Vector, Vector]:
        """Return samples, or else the elements, before and after the hooks."""
        if self.change.sampled is not None:
            then, now = samples.read_samples(self.change.sampled)
            return then, now
        return self.change.before.astype(np.float64), self.change.after.astype(np.float64)


def compare_together(
    changes: Iterable[Change], last: dict[int, npt.NDArray[Any]]
) -> Iterator[Compared]:
    """Compare the changes of the gradients of several parameters.

    Args:
        changes: of parameters that are different ones.
        last: key of a parameter -> the factors of the last pass, where they are known.
    """
    groups: dict[tuple[Any, ...], list[Change]] = {}
    for one in changes:
        ratio = last.get(one.key)
        is_known = ratio is not None and ratio.shape == one.after.shape
        groups.setdefault((one.after.shape, one.after.dtype, is_known), []).append(one)
    for (_, _, is_known), members in groups.items():
        before = np.stack([one.before for one in members])
        after = np.stack([one.after for one in members])
        ratios = _ratios(after, before)
        alike = np.ones(len(members), bool)
        if is_known:
            alike = _are_alike(ratios, np.stack([last[one.key] for one in members]))
        same = ((before == after) | (np.isnan(before) & np.isnan(after))).all(1)
        for i, one in enumerate(members):
            is_same = bool(same[i]) and not one.is_other
            if one.sampled is not None:
                then, now = samples.read_samples(one.sampled)
                is_same = is_same and np.array_equal(then, now, equal_nan=True)
            yield Compared(one, ratios[i], bool(alike[i]), is_same)


# gradients may be infinite, and the script's output stays what it was
@np.errstate(all="ignore")
def _ratios(after: npt.NDArray[Any], before: npt.NDArray[Any]) -> npt.NDArray[Any]:
    found = after / before
    found[before == 0] = np.nan
    return found


@np.errstate(all="ignore")
def _are_alike(ratios: npt.NDArray[Any], last: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return of each row whether its factors are those of the last pass, where both are known."""
    near = np.abs(ratios - last) <= CLOSE + _rounding(ratios.itemsize) * np.abs(last)
    found: npt.NDArray[np.bool_] = (
        near | (ratios == last) | np.isnan(ratios) | np.isnan(last)
    ).all(1)
    return found


def ratio_on_device(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return by what some elements were multiplied, NaN for those that were 0."""
    return torch.where(before != 0, after / before, torch.nan)


def are_alike_on_device(ratio: torch.Tensor, last: Some | None) -> torch.Tensor:
    """Return whether factors of elements are those of the last pass, as a number where they lie."""
    if not isinstance(last, torch.Tensor) or last.shape != ratio.shape:
        return ratio.new_ones(1)
    # without a mask, which would wait for a device
    unknown = ratio.isnan() | last.isnan()
    alike = unknown | torch.isclose(ratio, last, rtol=_rounding(ratio.element_size()), atol=CLOSE)
    return alike.all().reshape(1).to(ratio.dtype)


def _rounding(size: int) -> float:
    return 1e-3 if size > 2 else 2e-2


def some_of(gradient: torch.Tensor) -> Some:
    """Return a copy of some elements of a gradient."""
    if samples.is_plain(gradient):
        found: npt.NDArray[Any] | None = samples.some_of(gradient, MOST_RATIOS)
        if found is not None:
            return found
    number = gradient.numel()
    in_a_row = gradient.is_contiguous() or (
        gradient.dim() == 4 and gradient.is_contiguous(memory_format=torch.channels_last)
    )
    # in the order in which they lie
    flat = gradient.as_strided((number,), (1,)) if in_a_row else gradient.reshape(-1)
    return flat[:: max(1, number // MOST_RATIOS)][:MOST_RATIOS].clone()


def most_alike(hooks: Iterable[Any], own: int) -> int:
    """Return how often one hook is among those of a parameter.

    Args:
        hooks: all that are on it.
        own: how many of these are the audit's.
    """
    found = list(hooks)
    if len(found) <= own + 1:
        return 1
    # of a lambda, each time that it is made is another object of the same code
    counts = Counter(id(getattr(hook, "__code__", hook)) for hook in found)
    return max(counts.values(), default=0)
