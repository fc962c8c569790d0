"""Telling what, in place of a sum of the same elements, a reduction over ranks made of their gradients."""

from __future__ import annotations

import numpy as np

from gradcheck_suite.diagnosis.weight_patterns.weights import Diagnosis
from gradcheck_suite.numerics.comparison import Comparison, Vector
from gradcheck_suite.references.window import Window

OPERATIONS = (
    ("MAX", "the largest", lambda rows: rows.max(axis=0)),
    ("MIN", "the smallest", lambda rows: rows.min(axis=0)),
    ("PRODUCT", "the product", lambda rows: rows.prod(axis=0)),
)


def wrong_reduction(window: Window, comparison: Comparison, rank: int, *, alike: bool) -> Diagnosis | None:
    """Return the diagnosis of a gradient that is another combination of the ranks' own, or None.

    The gradient of one rank alone is none: elements of another one must be in it.

    Args:
        window: whose gradient is wrong.
        comparison: of that gradient with the right one.
        rank: whose gradient it is.
        alike: whether all ranks have it.
    """
    owners = window.reference.instance.case.plan.owners
    gradients = np.stack(window.sums()) / window.divisor
    if not np.isfinite(gradients).all() or not np.isfinite(comparison.observed).all():
        return None
    ranks = np.array([owners[j] for j in window.members])
    own = np.stack([gradients[ranks == r].sum(axis=0) for r in range(max(owners) + 1)])
    allowed = 4 * comparison.allowed

    def is_seen(candidate: Vector) -> bool:
        return bool((np.abs(candidate - comparison.observed) <= allowed).all())

    if any(map(is_seen, own)):
        return None
    for name, what, combined in OPERATIONS if alike else ():
        if is_seen(combined(own)):
            return Diagnosis(
                "wrong-operation",
                f"each element is {what} of those of the ranks' own gradients, not their sum: the all-reduce is called "
                f"with ReduceOp.{name}; use ReduceOp.SUM",
            )
    others = own.sum(axis=0) - own[rank]
    got = np.sort(comparison.observed - own[rank]) - np.sort(others)
    if not alike and np.any(np.abs(others) > allowed) and (np.abs(got) <= allowed.max()).all():
        return Diagnosis(
            "permuted-gradient",
            "the other ranks' elements are added to other elements of this one: ranks lay out their gradients, or call "
            "their all-reduces, in different orders, or leave out parameters without a gradient; go through the "
            "parameters in the same order on every rank, all of them",
        )
    return None
