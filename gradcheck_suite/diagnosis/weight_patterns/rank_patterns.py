"""The patterns of weights that faults between ranks give.

They hold for the gradient of any rank: none asks which one it is. They are more special than the patterns of one rank,
which describe micro-batches in an order that those of several ranks do not have. Where all ranks have the same wrong
gradient, it was added up over them, and what is missing in it is missing for another reason.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gradcheck_suite.diagnosis.weight_patterns.patterns import Pattern
from gradcheck_suite.diagnosis.weight_patterns.presence import Steps
from gradcheck_suite.diagnosis.weight_patterns.weights import Array, Weights, listed

REDUCE_ONCE = "add up the gradients of all ranks once, after the last backward of the window and before the step"
GLOBAL_COUNT = "add up the counts over all ranks (all_reduce) and divide every rank's summed losses by the total"


def _owned(w: Weights) -> Array:
    """Return the rank of each micro-batch inside the window."""
    return np.array([w.owners[j] for j in w.inside])


def _several(w: Weights) -> bool:
    """Whether micro-batches of several ranks can be read in the window."""
    return len(set(_owned(w))) > 1


def _unequal(w: Weights) -> bool:
    return len({w.count_of_rank(rank) for rank in set(_owned(w))}) > 1


def _ranks_means(share: Callable[[Weights], float]) -> Callable[[Weights], bool]:
    """Whether each rank's own mean has a weight."""

    def fits(w: Weights) -> bool:
        if w.foreign or w.reduction == "sum" or not len(w.inside):
            return False
        return w.close(w.observed[w.inside], [share(w) / w.count_of_rank(rank) for rank in _owned(w)])

    return fits


def _busy(w: Weights) -> int:
    """Return the number of ranks that count something in the window."""
    return len(set(_owned(w)))


def _only_one_rank(w: Weights) -> int | None:
    """Return the rank whose micro-batches alone are in its gradient, or None."""
    present = set(_owned(w)[w.ratio != 0])
    if w.alike or w.foreign or len(present) != 1:
        return None
    (rank,) = present
    return int(rank) if np.all(w.ratio[_owned(w) == rank]) else None


def _complete_rank(w: Weights) -> int | None:
    """Return the rank whose micro-batches are all in its gradient, where some of the other ranks' are missing; or None.

    Those that were not averaged over ranks weigh as many times too much as there are ranks.
    """
    if w.alike or w.foreign:
        return None
    right, gone = np.isclose(w.ratio, 1, rtol=w.tolerance, atol=0), w.ratio == 0
    whole = right | np.isclose(w.ratio, w.world_size, rtol=w.tolerance, atol=0)

    def is_complete(rank: int) -> bool:
        own = _owned(w) == rank
        return bool(np.all(whole[own]) and np.all((right | gone)[~own]) and np.any(gone[~own]))

    complete = [int(rank) for rank in set(_owned(w)) if is_complete(int(rank))]
    return complete[0] if len(complete) == 1 else None


def _dropped_ranks(w: Weights) -> list[int]:
    """Return the ranks of which nothing is in the gradient, where all of the others' is right and was added up."""
    ranks = sorted(set(_owned(w)))
    dropped = [int(rank) for rank in ranks if not np.any(w.ratio[_owned(w) == rank])]
    # a gradient of one rank alone was added up only if all ranks have it
    if w.foreign or len(ranks) - len(dropped) < (1 if w.alike else 2):
        return []
    return dropped if w.close(w.ratio[~np.isin(_owned(w), dropped)], 1.0) else []


def _said_dropped(w: Weights, wrong: Steps) -> str:
    ranks = ", ".join(map(str, _dropped_ranks(w)))
    said = f"no micro-batch of rank {ranks} is in the gradient, and all of the others are: look for "
    if not w.alike:
        return f"{said}a process group that does not have all ranks"
    return f"{said}a broadcast in place of an all-reduce, a reduction that is no sum, a rank that adds zeros"


def _reduced_again(w: Weights) -> bool:
    """Whether each of a rank's micro-batches weighs as many times the next one of its as there are ranks."""
    if w.foreign or not len(w.inside):
        return False
    powers = np.zeros(len(w.inside))
    for rank in set(_owned(w)):
        own = np.flatnonzero(_owned(w) == rank)
        powers[own] = np.arange(len(own))[::-1]
    scaled = w.ratio / float(w.world_size) ** powers
    return bool(np.all(scaled != 0)) and w.close(scaled, scaled[0])


def _longer(w: Weights) -> bool:
    owners = list(_owned(w))
    return any(owners.count(rank) > 1 for rank in set(owners))


def _some_of_others(w: Weights) -> bool:
    """Whether micro-batches of several ranks are in the gradient, though not all of them."""
    return len(set(_owned(w)[w.ratio != 0])) > 1 and not np.all(w.ratio)


def _said_alone(w: Weights, wrong: Steps) -> str:
    return (
        f"only rank {_only_one_rank(w)}'s micro-batches are in the gradient: it was not added up over the ranks; look "
        "for a last micro-batch whose forward runs under no_sync (DistributedDataParallel decides in the forward "
        "whether backward reduces), a rank that leaves out its all-reduce, one that is not "
        f"waited for, a buffer that is no longer the gradient's; {REDUCE_ONCE}"
    )


def _said_partly(w: Weights, wrong: Steps) -> str:
    missing = [j for j, ratio in zip(w.inside, w.ratio, strict=True) if not ratio]
    some = f"micro-batches {listed(missing)} of other ranks are"
    if len(missing) == 1:
        some = f"micro-batch {missing[0]} of another rank is"
    return (
        f"rank {_complete_rank(w)}'s micro-batches are all in the gradient, and {some} not: the gradients were added "
        f"up at another time than after the last backward; {REDUCE_ONCE}"
    )


def by_rank(wrong: Steps) -> tuple[Pattern, ...]:
    """Return the pattern of weights that micro-batches' ranks determine, where they do."""
    longest = max(wrong, key=lambda w: len(w.inside))
    if longest.foreign or not _several(longest):
        return ()
    factors = {rank: float(longest.ratio[_owned(longest) == rank][0]) for rank in sorted(set(_owned(longest)))}
    scaled = {rank: factor for rank, factor in factors.items() if not longest.close(factor, 1.0)}
    if not scaled or len(scaled) == len(factors) or not all(scaled.values()):
        return ()
    said = " and ".join(f"those of rank {rank} weigh {factor:.6g} times" for rank, factor in scaled.items())
    return (
        Pattern(
            "wrong-scale",
            lambda w: not w.foreign and w.close(w.ratio, [factors.get(rank, np.nan) for rank in _owned(w)]),
            lambda w, wrong: (
                f"of the window's micro-batches {said} what they should, and the other ranks' are right: look for what "
                "a rank does to its losses or gradients before the gradients are added up"
            ),
            2,
            informs=_longer,
        ),
    )


RANKS: tuple[Pattern, ...] = (
    Pattern("not-reduced", lambda w: _only_one_rank(w) is not None, _said_alone, -1, informs=_several),
    Pattern("dropped-rank", lambda w: bool(_dropped_ranks(w)), _said_dropped, -1),
    Pattern("partly-reduced", lambda w: _complete_rank(w) is not None, _said_partly, -1, informs=_some_of_others),
    *(
        Pattern(
            "mean-of-means",
            _ranks_means(share),
            lambda w, wrong, text=text: (  # type: ignore[misc]
                f"each rank's mean has weight {text}, whatever its count, as where ranks divide by their own counts "
                f"and gradients are averaged: {GLOBAL_COUNT}"
            ),
            -1,
            informs=_unequal,
        )
        for share, text in (
            (lambda w: 1 / w.world_size, "one over the number of ranks"),
            (lambda w: 1 / _busy(w), "one over the number of ranks that have targets"),
        )
    ),
    Pattern(
        "local-count",
        _ranks_means(lambda w: 1.0),
        lambda w, wrong: f"each rank divides by its own count, and the gradients are added up: {GLOBAL_COUNT}",
        -1,
        informs=_unequal,
    ),
    Pattern(
        "reduced-repeatedly",
        _reduced_again,
        lambda w, wrong: (
            f"each of a rank's micro-batches weighs {w.world_size} times its next one: the running sum goes through an "
            f"all-reduce at every micro-batch, which adds up what is already the sum of all ranks; {REDUCE_ONCE}"
        ),
        -1,
        informs=_longer,
    ),
)
"""Patterns of a window that several ranks share; they apply where the owners of micro-batches are known."""
