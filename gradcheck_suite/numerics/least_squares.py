"""Solving for the weights of micro-batches: observed = sum over j of weight[j] * gradient[j]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradcheck_suite.numerics.comparison import Vector

CONDITION = 1e-7
"""Singular values below this share of the largest do not count: in float64 they would leave the weights fewer than
half of their digits."""


@dataclass(frozen=True)
class Fit:
    """The weights that come closest, and how close they come.

    Attributes:
        weights: (B,).
        determined: whether the gradients tell these weights from all others.
        exact: whether they leave nothing beyond what rounding allows.
        residual: |observed - fit| at its largest.
    """

    weights: npt.NDArray[np.float64]
    determined: bool
    exact: bool
    residual: float


def fit_weights(observed: Vector, gradients: npt.NDArray[np.float64], allowed: Vector) -> Fit:
    """Fit weights by least squares.

    Each micro-batch's gradient is scaled to length 1 first, so that a small one is not taken for none.

    Args:
        observed: (P,), finite.
        gradients: (B, P), each micro-batch's gradient, finite.
        allowed: (P,), what rounding allows of `observed`.
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
    # weights are as exact as the solution is: what they leave may be rounding of the fit itself
    rounding = 64 * np.finfo(np.float64).eps * np.abs(weights[:, None] * gradients).sum(axis=0) / values[kept].min()
    return Fit(
        weights,
        determined=bool(kept.sum() == present.sum()),
        exact=bool((residual <= allowed + rounding).all()),
        residual=float(residual.max()),
    )
