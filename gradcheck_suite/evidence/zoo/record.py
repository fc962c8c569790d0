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
        loop: the training loop that has it, or a sound one where `problem` has it.
        wanted: the names it may be found under, `kind/diagnosis`; several where a small window shows two faults alike.
        problem: where it takes a model of its own; then only plans are drawn.
        optimizer: where it shows under a real one only.
        dtype: of the drawn cases.
        assumes: what the loop relies on, rightly: the bug is none of these.
        least_micro_batches: fewest micro-batches in a case that shows it at all.
    """

    number: int
    name: str
    citations: tuple[str, ...]
    mechanism: str
    needs: str
    loop: Loop
    wanted: frozenset[str]
    problem: Problem | None = None
    optimizer: str | None = None
    dtype: str = "float64"
    assumes: tuple[str, ...] = ()
    least_micro_batches: int = 1
