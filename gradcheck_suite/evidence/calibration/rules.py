"""Applying the rival rules to a window's gradient, parameter by parameter, as their users do."""

from __future__ import annotations

from gradcheck_suite.numerics.baselines import RIVALS, Compared
from gradcheck_suite.numerics.comparison import Layout, Vector
from gradcheck_suite.references.reference import Window


def blaming(window: Window, layout: Layout, observed: Vector, dtype: str) -> frozenset[str]:
    """Return the rules that an observed gradient does not pass.

    Args:
        window: whose gradient it is. Rules compare with its large batch in the case's dtype, computed as the loop
            computes, and the one that wants a float64 gradient is given JAX's.
        layout: of the gradient.
        observed: (P,).
        dtype: of the case.
    """
    large, exact = window.large_batch, window.expected
    found = set()
    for start, size in zip(layout.offsets, layout.sizes, strict=True):
        part = slice(start, start + size)
        compared = Compared(observed[part], large[part], exact[part], dtype)
        found |= {name for name, rule in RIVALS.items() if size and name not in found and not rule(compared)}
    return frozenset(found)
