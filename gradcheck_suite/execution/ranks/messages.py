"""What the parent and the ranks send each other: requests and outcomes."""

from __future__ import annotations

from dataclasses import dataclass

from gradcheck_suite.execution.ranks.sources import Source
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.schema.case import Case


@dataclass(frozen=True)
class Request:
    """What every rank is to run.

    Attributes:
        loop: where the loop is found.
        case: what it trains; its plan has as many ranks as there are.
        problem: where the user's problem is found; None for a generated one.
        quiet: whether to discard what the loop prints.
        path: the parent's `sys.path`.
        scale: factor of the loss.
        item_counts: what each item counts, in place of the case's own counts; None for these.
        count_traffic: whether to count the collectives of the run.
    """

    loop: Source
    case: Case
    problem: Source | None
    quiet: bool
    path: tuple[str, ...]
    scale: float = 1.0
    item_counts: tuple[float, ...] | None = None
    count_traffic: bool = False


@dataclass(frozen=True)
class Reply:
    """What a rank answers.

    Attributes:
        outcome: of the run; None where there is none.
        refused: why the case cannot be run at all, and no loop is to blame; None where it was run.
        cannot_run: whether that is for want of something on this machine.
    """

    outcome: Outcome | None
    refused: str | None = None
    cannot_run: bool = False
