"""What a gradient that does not grow with the loss shows: a threshold, a normalization, or a term that is added.

The same loop runs with the loss 2**-20 times as large. What it does to the gradient of that is compared with what it
does to the gradient itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradcheck_suite.diagnosis.weight_patterns.weights import Diagnosis
from gradcheck_suite.numerics.comparison import Vector
from gradcheck_suite.schema.weight_probe import SMALL_SCALE

EXACT = 1e-9
"""Share of the largest element up to which two gradients are taken for equal."""
SECOND_ORDER = 1e-3
"""Share of an error 2**-20 times as large that rounding of the gradient itself may change."""
ONCE = "once, after the window's last backward, and switch that off for the verification"


def is_linear(observed: Vector, with_small_loss: Vector, tolerance: float = EXACT) -> bool:
    """Return whether the gradient with the small loss is the gradient, as much smaller as the loss."""
    return _near(with_small_loss / SMALL_SCALE, observed, max(tolerance, EXACT))


def _of_second_order(expected: Vector, observed: Vector, with_small_loss: Vector) -> Diagnosis | None:
    """Name a term that grows with the square of the loss, which a relative tolerance takes for none, or None."""
    extra = observed - expected
    if extra.any() and _near(with_small_loss / SMALL_SCALE - expected, SMALL_SCALE * extra, SECOND_ORDER):
        return Diagnosis(
            "added-term",
            "a term that grows with the square of the loss is added to the gradient (up to "
            f"{np.abs(extra).max():.3g}): a penalty on gradients that is no part of the objective, or a loss times "
            "itself",
        )
    return None


def explain_size(
    expected: Vector,
    observed: Vector,
    with_small_loss: Vector,
    parameters: Vector | None = None,
    tolerance: float = EXACT,
) -> Diagnosis | None:
    """Name a fault that depends on the gradient's size, or None.

    Args:
        expected: (P,) the right gradient.
        observed: (P,) the loop's.
        with_small_loss: (P,) the loop's with a loss 2**-20 times as large.
        parameters: (P,) the parameters' values, where they are not all 0.
        tolerance: relative error of the gradients that rounding explains.
    """
    exact = max(tolerance, EXACT)
    if not all(np.isfinite(values).all() for values in (expected, observed, with_small_loss)):
        return None
    if found := _of_second_order(expected, observed, with_small_loss):
        return found
    if _near(with_small_loss / SMALL_SCALE, expected, exact):
        return _of_large_gradients(expected, observed, exact)
    if _near(with_small_loss, observed, exact):
        sizes, what = np.abs(observed[observed != 0]), _norm(observed)
        if len(sizes) > 1 and _is_one_size(sizes):
            # where all right elements have one size, a division by it leaves signs, too
            only_signs = "" if _is_one_size(np.abs(expected[observed != 0])) else ": only signs are left"
            what = f"every element is {sizes[0]:.3g}, 0 or -{sizes[0]:.3g}{only_signs}"
        return Diagnosis(
            "normalised",
            "a loss 2**-20 times as large gives the same gradient, so it is divided by its own size or reduced to its "
            f"signs ({what}): do so {ONCE}",
        )
    extra, small_extra = observed - expected, with_small_loss - SMALL_SCALE * expected
    if extra.any() and _near(extra, small_extra, exact):
        return Diagnosis("added-term", _added_text(extra, parameters))
    lost = (observed == 0) & (expected != 0)
    rest = ~lost
    if lost.any() and _near(observed[rest], expected[rest], exact) and not with_small_loss[lost].any():
        largest = np.abs(expected[lost]).max()
        return Diagnosis(
            "flushed-to-zero",
            f"small elements are 0 ({np.count_nonzero(lost)} of {len(lost)}, the largest of them {largest:.3g}), and "
            "with a loss 2**-20 times as large more of them are: look for a threshold, a sparse communication or a "
            "format with a narrow exponent",
        )
    return None


def _of_large_gradients(expected: Vector, observed: Vector, exact: float) -> Diagnosis:
    """Name what is wrong with large gradients alone."""
    if np.linalg.norm(observed) > np.linalg.norm(expected):
        return Diagnosis(
            "not-linear",
            "large gradients alone are wrong, and too large, since with a loss 2**-20 times as large the gradient "
            "is right: look for what depends on the gradient's size",
        )
    if not observed.any():
        return Diagnosis(
            "skipped-by-size",
            "the gradient is 0, and with a loss 2**-20 times as large it is right: what leaves out a loss or a "
            "gradient above some size must be switched off for the verification",
        )
    off = ~np.isclose(observed, expected, rtol=exact, atol=exact * np.abs(expected).max())
    if not observed[off].any():
        return Diagnosis(
            "skipped-by-size",
            f"{np.count_nonzero(off)} of {len(off)} elements are 0, and with a loss 2**-20 times as large they are "
            "right: something sets large gradients to 0, or some gradients by chance",
        )
    return Diagnosis(
        "clipped",
        "large gradients alone are wrong, since with a loss 2**-20 times as large the gradient is right: "
        f"{_threshold(expected, observed)}; clip {ONCE}",
    )


def _near(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], tolerance: float = EXACT) -> bool:
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max(initial=0.0)))


def _is_one_size(sizes: Vector) -> bool:
    return _near(sizes, np.full_like(sizes, sizes[0]))


def _norm(gradient: Vector) -> str:
    return f"its norm is {np.linalg.norm(gradient):.4g}"


def _threshold(expected: Vector, observed: Vector) -> str:
    pivot = int(np.argmax(np.abs(expected)))
    factor = observed[pivot] / expected[pivot]
    if _near(observed, factor * expected):
        cut = observed[observed != 0]
        how = "by norm or by value" if _is_one_size(np.abs(cut)) else "by norm"
        return f"the whole gradient is {factor:.3g} times the right one, and {_norm(observed)}, as after clipping {how}"
    off = np.abs(observed - expected) > EXACT * np.abs(expected).max()
    sizes = np.abs(observed[off])
    if _is_one_size(sizes) and (np.abs(expected[off]) > sizes).all():
        return f"{np.count_nonzero(off)} of {len(off)} elements are cut at {sizes[0]:.3g}, as after clipping by value"
    return "contributions or parameters are clipped each by itself, or the sum before it is complete"


def _added_text(extra: Vector, parameters: Vector | None) -> str:
    if parameters is not None and parameters.any():
        noise = EXACT * np.abs(extra).max()
        there = (np.abs(extra) > noise) & (parameters != 0)
        if there.any():
            factor = float(np.median(extra[there] / parameters[there]))
            # one element is a multiple of any other: it shows decay by a round factor alone
            telling = np.count_nonzero(there) > 1 or np.isclose(factor, float(f"{factor:.2g}"), rtol=1e-6, atol=0)
            if telling and _near(extra[there], factor * parameters[there]) and (np.abs(extra[~there]) <= noise).all():
                return (
                    f"{factor:.3g} times the parameter is added to the gradient, whatever the loss: weight decay or "
                    "the gradient of a penalty; leave it to the optimizer, or make it part of the objective"
                )
    return (
        f"a term that does not depend on the loss is added to the gradient (up to {np.abs(extra).max():.3g}): noise, a "
        "penalty that is no part of the objective, or what was in .grad before"
    )
