"""The rules that the suite's bounds are compared with, applied parameter by parameter as their users apply them."""

from __future__ import annotations

from gradcheck_suite.numerics.baselines import RIVALS, Compared
from gradcheck_suite.numerics.comparison import Layout, Vector
from gradcheck_suite.references.window import Window


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
