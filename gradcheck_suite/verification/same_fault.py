"""Whether a smaller case shows the fault that a larger one showed, and not another that fits it because it is small."""

from __future__ import annotations

import numpy as np

from gradcheck_suite.diagnosis.gradient import OF_ELEMENTS
from gradcheck_suite.diagnosis.weight_patterns.weights import ALONE, names_of
from gradcheck_suite.diagnosis.wrong_elements.elements import wrong_and_right
from gradcheck_suite.schema.results import Violation

SHOWN_BY_LARGER = frozenset(
    ("no-gradient", "wrong-scale", "partial-gradient", "permuted-gradient", "swapped-gradients", "missing-gradient")
)
"""Diagnoses that a larger case shows as well as a small one. Where it does not, they fit the small one by chance."""
MAY_BE_OF_ELEMENTS = frozenset(("no-gradient", "not-linear", "unequal-items", "unrecognised-weights"))
"""What a weight probe shows of a fault of elements: its parameter has one element for each item."""


def window_shape(violation: Violation) -> tuple[bool, ...]:
    """Return what a fault's name may depend on in the violated window: later, short, of several, of unequal counts.

    A search that wandered off to another fault is repeated with these kept.
    """
    if violation.window is None:
        return ()
    plan = violation.case.plan
    window = plan.windows[violation.window]
    counts = {0 if j in plan.masked else plan.micro_batches[j] for j in window}
    later = bool(violation.epoch or violation.window)
    return later, len(window) < plan.accumulation_steps, len(window) > 1, len(counts) > 1


def is_same_fault(found: Violation, first: Violation) -> bool:
    """Return whether a violation has the kind and the diagnosis of the first; `not-linear` fits most diagnoses."""
    if found.kind != first.kind or not keeps_right_parameters(found, first):
        return False
    return may_be_unnamed(found, first) or found.diagnosis == first.diagnosis


def is_named_otherwise(alone: Violation | None, full: Violation) -> bool:
    """Return whether a case's own gradient gives its fault another name than further runs do.

    A case on which both give the same name explains the fault better: a window of one micro-batch shows a mean of means
    as a wrong factor.

    Args:
        alone: the violation without further runs of the loop.
        full: the violation with them.
    """
    return full.kind == "gradient" and alone is not None and alone.diagnosis not in ("", full.diagnosis)


def is_of_elements(violation: Violation) -> bool:
    """Return whether some elements of parameters are wrong, which a weight probe shows as another fault.

    Its parameter has one element for each item.
    """
    return bool(names_of(violation.diagnosis) & OF_ELEMENTS)


def may_be_unnamed(found: Violation, first: Violation) -> bool:
    """Return whether the first violation has no name, and the other's is none that the first would have shown."""
    return first.diagnosis == "not-linear" and not names_of(found.diagnosis) & SHOWN_BY_LARGER


def keeps_right_parameters(found: Violation, first: Violation) -> bool:
    """Return whether some parameter is right that has a gradient, where the first violation is of others alone."""
    comparison = found.evidence
    if ALONE not in first.explanation or comparison is None:
        return True
    _, right = wrong_and_right(comparison)
    return any(np.any(comparison.layout.part(comparison.expected, name)) for name in right)
