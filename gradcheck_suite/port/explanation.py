"""The search for the best explanation: candidates are tried in order until one explains all.

What a candidate is, and what it explains, differs: changes of a torch program, of its gradients, of
an optimizer, of running statistics. How they are searched does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gradcheck_suite.port.budget import Budget

Candidate = TypeVar("Candidate")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Explanation(Generic[Value]):
    """What a candidate explains.

    Attributes:
        value: what was made of the candidate.
        is_whole: whether it explains all: then nothing else is tried.
        rank: of two that explain a part, the one with the larger rank is better, of equal ones the
            first.
    """

    value: Value
    is_whole: bool = True
    rank: Any = 0


def best_explanation(
    candidates: Iterable[Candidate],
    tried: Callable[[Candidate], Explanation[Value] | None],
    budget: Budget,
    is_confirmed: Callable[[Value], bool] = lambda value: True,
) -> Explanation[Value] | None:
    """Return the first explanation of all, else the best of a part, None where there is none.

    Args:
        candidates: the most usual ones first.
        tried: what a candidate explains, None where it explains nothing or does not fit.
        budget: of candidates.
        is_confirmed: whether an explanation holds elsewhere, too; it is asked of those alone that
            would be the best.
    """
    best: Explanation[Value] | None = None
    for candidate in candidates:
        if not budget.spend():
            break
        found = tried(candidate)
        if found is None:
            continue
        is_better = found.is_whole or best is None or found.rank > best.rank
        if not is_better or not is_confirmed(found.value):
            continue
        if found.is_whole:
            return found
        best = found
    return best
