"""Errors of known size that are planted in sound gradients, at several places.

An error of relative size s in a place multiplies what is there by 1 + s or 1 - s and rounds the result to the case's
dtype, since no gradient holds anything else: half of one unit roundoff in an element is no error at all.

An element that is 0 stays 0 under any factor, so errors in one element are planted in others: in the largest one, and
in one drawn from all that are not 0. Among the latter are elements whose parts cancel, down to nothing but rounding;
a rule that finds every small error there blames sound loops as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradcheck_suite.execution.devices import torch_dtype
from gradcheck_suite.numerics.comparison import Layout, Vector


@dataclass(frozen=True)
class Sound:
    """A sound gradient that errors are planted in.

    Attributes:
        observed: (P,), what a sound loop handed its optimizer.
        contributions: of each micro-batch, (P,).
        layout: of the vectors.
        dtype: of the case.
    """

    observed: Vector
    contributions: Sequence[Vector]
    layout: Layout
    dtype: str

    def with_error(self, direction: Vector, size: float) -> Vector:
        """Return the gradient with `size` times a direction added, rounded to the dtype."""
        moved = torch.from_numpy(self.observed + size * direction)
        rounded: Vector = moved.to(torch_dtype(self.dtype)).to(torch.float64).numpy()
        return rounded


Place = Callable[[Sound, np.random.Generator], Vector | None]


def _everywhere(sound: Sound, rng: np.random.Generator) -> Vector | None:
    return sound.observed if sound.observed.any() else None


def _micro_batch(sound: Sound, rng: np.random.Generator) -> Vector | None:
    """One micro-batch counts for 1 + s times what it should."""
    present = [c for c in sound.contributions if c.any()]
    return present[rng.integers(len(present))] if present else None


def _parameter(sound: Sound, rng: np.random.Generator) -> Vector | None:
    layout = sound.layout
    slices = [slice(o, o + s) for o, s in zip(layout.offsets, layout.sizes, strict=True)]
    present = [part for part in slices if sound.observed[part].any()]
    if not present:
        return None
    part = present[rng.integers(len(present))]
    direction = np.zeros_like(sound.observed)
    direction[part] = sound.observed[part]
    return direction


def _largest(sound: Sound, rng: np.random.Generator) -> Vector | None:
    return _one(sound, int(np.argmax(np.abs(sound.observed)))) if sound.observed.any() else None


def _any(sound: Sound, rng: np.random.Generator) -> Vector | None:
    nonzero = np.flatnonzero(sound.observed)
    return _one(sound, int(rng.choice(nonzero))) if len(nonzero) else None


def _one(sound: Sound, index: int) -> Vector:
    direction = np.zeros_like(sound.observed)
    direction[index] = sound.observed[index]
    return direction


PLACES: dict[str, Place] = {
    "everywhere": _everywhere,
    "one parameter": _parameter,
    "one micro-batch": _micro_batch,
    "the largest element": _largest,
    "an element not 0": _any,
}
"""Places of errors: each function returns (P,), the error of size 1, or None where all elements there are 0."""
