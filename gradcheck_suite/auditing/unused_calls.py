"""Calls of a module that no backward pass has reached, though other calls of the same line were
reached in the same window: what they were given is in no gradient.

As where a running loss is detached, or where all micro-batches but the last run under `no_grad`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from gradcheck_suite.auditing.places import Place
from gradcheck_suite.core.findings import Occurrence, finding
from gradcheck_suite.core.text import counted

MOST_WINDOWS = 100
"""Windows of a run whose calls are counted."""
FEWEST_WINDOWS = 2
"""Windows that show it: a single one may be a micro-batch that was left out on purpose."""


@dataclass(frozen=True)
class CalledAt:
    """A module at a line that calls it.

    Attributes:
        module: its identity: a line may call a critic with what a generator gives it.
        place: of the call.
    """

    module: int
    place: Place


class UnusedCalls:
    """Counts the calls of modules that train, at each line and after each number of steps.

    A call is counted at once, and its gradient may come in a later window.
    """

    def __init__(self) -> None:
        self._made: defaultdict[CalledAt, Counter[int]] = defaultdict(Counter)
        self._reached: defaultdict[CalledAt, Counter[int]] = defaultdict(Counter)
        self._steps = set[int]()

    def made(self, called: CalledAt, steps: int) -> bool:
        """Count a call, and return whether it is asked for when its gradient comes.

        Args:
            called: of what module, and where.
            steps: that the run had made when it was called.
        """
        if steps not in self._steps and len(self._steps) >= MOST_WINDOWS:
            return False
        self._steps.add(steps)
        self._made[called][steps] += 1
        return True

    def reached(self, called: CalledAt, steps: int) -> None:
        """Count a call whose gradient has come, once."""
        self._reached[called][steps] += 1

    def findings(self, steps: int) -> Iterator[Occurrence]:
        """Yield a finding for each line.

        Args:
            steps: that the run has made: the calls after the last one have no window.
        """
        places = {called.place for called in self._made}
        for called, made in self._made.items():
            reached = self._reached[called]
            windows = [at for at in made if 0 < reached[at] < made[at] and at < steps]
            if len(windows) < FEWEST_WINDOWS:
                continue
            number = sum(made[at] for at in windows)
            lost = number - sum(reached[at] for at in windows)
            said = (
                f"{lost} of {counted(number, 'call')} of a module here led to no backward pass, in"
                f" {counted(len(windows), 'window')}: what they were given is in no gradient"
            )
            yield finding("unused-call", said, called.place.apart_from(places))
