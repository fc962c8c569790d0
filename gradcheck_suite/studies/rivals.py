"""The rules that the suite's bounds are compared with, applied parameter by parameter as their users apply them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gradcheck_suite.core.comparison import Layout, Vector
from gradcheck_suite.reference.large_batch import Window

ASSERT_CLOSE = {"float64": (1e-7, 1e-7), "float32": (1.3e-6, 1e-5), "bfloat16": (1.6e-2, 1e-5), "float16": (1e-3, 1e-5)}
"""(rtol, atol) that `torch.testing.assert_close` takes for a dtype."""


@dataclass(frozen=True)
class Compared:
    """The gradients of one parameter that these rules compare.

    Attributes:
        observed: (P,): the accumulated gradient, computed in `dtype`.
        large_batch: (P,): the gradient of one large batch, computed in `dtype`.
        exact: (P,): the gradient of one large batch, computed in float64.
        dtype: name of the dtype.
    """

    observed: Vector
    large_batch: Vector
    exact: Vector
    dtype: str


def _close(observed: Vector, expected: Vector, rtol: float, atol: float, *, equal_nan: bool = False) -> bool:
    with np.errstate(invalid="ignore", over="ignore"):
        return bool(np.allclose(observed, expected, rtol=rtol, atol=atol, equal_nan=equal_nan))


def assert_close(compared: Compared) -> bool:
    """Apply `torch.testing.assert_close` at its defaults, against the large batch."""
    return _close(compared.observed, compared.large_batch, *ASSERT_CLOSE[compared.dtype])


def chex_all_close(compared: Compared) -> bool:
    """Apply `chex.assert_trees_all_close` at its defaults (rtol 1e-6, atol 0), against the large batch."""
    return _close(compared.observed, compared.large_batch, 1e-6, 0.0, equal_nan=True)


def nnsmith(compared: Compared) -> bool:
    """Apply NNSmith's rtol 1e-2 and atol 1e-3, against the large batch."""
    return _close(compared.observed, compared.large_batch, 1e-2, 1e-3)


def twice_the_rmse(compared: Compared) -> bool:
    """Allow twice the root mean square error that the large batch itself has against float64."""
    with np.errstate(invalid="ignore", over="ignore"):
        own = np.sqrt(np.mean((compared.observed - compared.exact) ** 2))
        reference = np.sqrt(np.mean((compared.large_batch - compared.exact) ** 2))
    return bool(own <= 2 * reference)


RIVALS: dict[str, Callable[[Compared], bool]] = {
    "torch.testing.assert_close": assert_close,
    "chex.assert_trees_all_close": chex_all_close,
    "twice the reference's rmse": twice_the_rmse,
    "NNSmith 1e-2/1e-3": nnsmith,
}
"""The rules by name: each takes an accumulated gradient and returns whether it passes. The constants are the tools'
defaults, and so is whether two NaN at the same place are equal: only chex says that they are."""


def failed_rules(window: Window, layout: Layout, observed: Vector, dtype: str) -> frozenset[str]:
    """Return the rules that an observed gradient does not pass.

    Args:
        window: the gradient's window. Rules compare with its large batch in the case's dtype, computed as the loop
            computes, and the rule that needs a float64 gradient is given JAX's.
        layout: of the gradient.
        observed: (P,) float64: the gradient.
        dtype: of the case.
    """
    large, exact = window.bound.large_batch, window.expected
    failed: set[str] = set()
    for start, size in zip(layout.offsets, layout.sizes, strict=True):
        part = slice(start, start + size)
        compared = Compared(observed[part], large[part], exact[part], dtype)
        failed |= {name for name, rule in RIVALS.items() if size and name not in failed and not rule(compared)}
    return frozenset(failed)
