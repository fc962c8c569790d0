"""What the parent sends to the second process, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.results import Verdict
from gradcheck_suite.verification.check import Terms


@dataclass(frozen=True)
class Run:
    """A run of a loop on a generated problem, to be judged.

    Attributes:
        case: what the loop was run on.
        outcome: what it did.
        terms: what it is judged by.
    """

    case: Case
    outcome: Outcome
    terms: Terms


Answer = Verdict | None
"""A verdict without violation or finding; None where the parent has to judge the run itself."""
DROP = None
"""What the parent sends where it wants no verdict on the runs that wait. Each is answered by None."""
