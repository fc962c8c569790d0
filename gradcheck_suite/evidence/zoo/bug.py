"""What a bug of the zoo is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gradcheck_suite.schema.contract import Loop, Problem


@dataclass(frozen=True)
class Bug:
    """A bug in a few lines: one that was reported in public, or one that was planted to tell similar faults apart.

    Attributes:
        name: of the mechanism, such as `"mean-of-means"`; unique.
        mechanism: what goes wrong, in one or two sentences.
        needs: what a case must have to show it.
        loop: the training loop that has the bug, or a sound loop where `problem` has it.
        wanted: the diagnoses that it may get, `kind/diagnosis`; several where a small window shows two faults alike.
        number: of its entry in the corpus, from 1; None if it is not in the corpus.
        citations: where it was reported, such as `"transformers#24725"`; empty if it was planted.
        problem: a model that shows the bug; None for the random ones. With a problem, only plans are drawn.
        assumes: what the loop rightly relies on, names from `ASSUMPTIONS`.
        least_micro_batches: fewest micro-batches of a case that shows the bug.
        says: what the explanation must contain, one of these texts; empty if the name suffices.
        ranks: number of ranks that it needs.
    """

    name: str
    mechanism: str
    needs: str
    loop: Loop
    wanted: frozenset[str]
    number: int | None = None
    citations: tuple[str, ...] = ()
    problem: Problem | None = None
    assumes: tuple[str, ...] = ()
    least_micro_batches: int = 1
    says: tuple[str, ...] = ()
    ranks: int = 1


bug_of_two_ranks = partial(Bug, ranks=2)
"""Return a bug that two ranks show; takes the other attributes of `Bug`."""
