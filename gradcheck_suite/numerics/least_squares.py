"""Solving for the weights of micro-batches: observed = sum over j of weight[j] * gradient[j]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradcheck_suite.numerics.comparison import Vector

CONDITION = 1e-7
"""Singular values below this share of the largest are left out: with them the weights would have fewer than half of
the digits of float64."""


@dataclass(frozen=True)
class Fit:
    """The least-squares weights and their residual.

    Attributes:
        weights: (B,) float64: the weight of each micro-batch.
        determined: whether the solution is unique.
        exact: whether rounding explains the residual of every element.
        residual: the largest |observed - fit|.
    """

    weights: npt.NDArray[np.float64]
    determined: bool
    exact: bool
    residual: float


def fit_weights(observed: Vector, gradients: npt.NDArray[np.float64], allowed: Vector) -> Fit:
    """Fit weights by least squares.

    Each micro-batch's gradient is first scaled to length 1, so that `CONDITION` does not remove a small one.

    Args:
        observed: (P,) finite: the observed gradient.
        gradients: (B, P) finite: each micro-batch's gradient.
        allowed: (P,): the largest error of `observed` that rounding explains.
    """
    sizes = np.linalg.norm(gradients, axis=1)
    present = sizes > 0
    weights = np.zeros(len(gradients))
    if not present.any():
        residual = np.abs(observed)
        return Fit(weights, False, bool((residual <= allowed).all()), float(residual.max(initial=0.0)))
    columns = (gradients[present] / sizes[present, None]).T
    left, values, right = np.linalg.svd(columns, full_matrices=False)
    kept = values > CONDITION * values[0]
    solution = right[kept].T @ ((left[:, kept].T @ observed) / values[kept])
    weights[present] = solution / sizes[present]
    residual = np.abs(observed - weights @ gradients)
    # the fit itself has rounding errors, which appear in the residual
    rounding = 64 * np.finfo(np.float64).eps * np.abs(weights[:, None] * gradients).sum(axis=0) / values[kept].min()
    return Fit(
        weights,
        determined=bool(kept.sum() == present.sum()),
        exact=bool((residual <= allowed + rounding).all()),
        residual=float(residual.max()),
    )
