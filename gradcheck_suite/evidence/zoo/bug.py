"""What a known bug is, as the zoo keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from gradcheck_suite.schema.contract import Loop, Problem


@dataclass(frozen=True)
class Bug:
    """A bug that was reported in public, re-created in a few lines.

    Attributes:
        number: of its entry in the corpus, from 1.
        name: of the mechanism, such as `"mean-of-means"`; unique.
        citations: where it was reported, such as `"transformers#24725"`.
        mechanism: what goes wrong, in one or two sentences.
        needs: what a case must have to show it.
        loop: the training loop that has the bug, or a sound loop where `problem` has it.
        wanted: the diagnoses that it may get, `kind/diagnosis`; several where a small window shows two faults alike.
        problem: a model that shows the bug; None for the random ones. With a problem, only plans are drawn.
        assumes: what the loop rightly relies on, names from `ASSUMPTIONS`.
        least_micro_batches: fewest micro-batches of a case that shows the bug.
    """

    number: int
    name: str
    citations: tuple[str, ...]
    mechanism: str
    needs: str
    loop: Loop
    wanted: frozenset[str]
    problem: Problem | None = None
    assumes: tuple[str, ...] = ()
    least_micro_batches: int = 1
