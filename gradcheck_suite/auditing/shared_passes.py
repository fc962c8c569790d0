"""Gradients that a pass has brought to one optimizer's parameters and that were reset, where another
optimizer has stepped on the same pass.

A generator's loss leaves a gradient in the discriminator, since it goes through it: that one is reset
on purpose. Where the parameters that were reset come before all those that were stepped on, nothing
needs a gradient there: either it was meant for a step and is lost, or the input of what follows could
be detached. Where the loss of another pass trains the first ones through the second ones, as that of
a generator trains it through the discriminator, what is reset is the adversary's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gradcheck_suite.auditing.evidence import WindowEvidence, columns_where
from gradcheck_suite.auditing.places import Place
from gradcheck_suite.auditing.replay import NEGLIGIBLE
from gradcheck_suite.auditing.sums import where_reset
from gradcheck_suite.core.findings import Occurrence, finding

if TYPE_CHECKING:
    # a run of JAX alone never imports torch
    from gradcheck_suite.auditing.known_graphs import Uses

FEWEST_WINDOWS = 2
"""Windows that lose a pass of one line, from which on that is no single decision of the program's."""


@dataclass
class SharedPass:
    """The passes of a line, which one optimizer has stepped on and another one has lost.

    Attributes:
        where: the reset, or the step where that is not known.
        lost: keys of the parameters whose gradient was reset.
        stepped: keys of the parameters that were stepped on.
        names: of the parameters whose gradient was reset.
        windows: that have lost one.
    """

    where: str
    lost: Sequence[int]
    stepped: Collection[int]
    names: str
    windows: int = 0


class SharedPasses:
    """Takes the windows of all optimizers.

    Args:
        owners: gives the optimizers that have stepped on a parameter.
        names: gives the names of a few parameters.
    """

    def __init__(
        self,
        owners: Callable[[int], Collection[int]],
        names: Callable[[Sequence[int]], str],
    ) -> None:
        self._owners = owners
        self._names = names
        self._trained_by: defaultdict[int, set[int]] = defaultdict(set)
        self._found: dict[tuple[int, Place], SharedPass | None] = {}
        self._windows: defaultdict[int, int] = defaultdict(int)

    def take(self, evidence: WindowEvidence) -> None:
        """Take a window."""
        optimizer = evidence.window.optimizer
        self._windows[optimizer] += 1
        trained = self._trained_by[optimizer]
        for column in columns_where(evidence.in_sum):
            trained.update(evidence.record(column).arrivals)
        lost = evidence.seen & ~evidence.in_sum & ~evidence.null & ~evidence.by_hand
        several = {evidence.pass_of(column).site: column for column in columns_where(lost)}
        for place, column in several.items():
            key = optimizer, place
            if key not in self._found:
                self._look_at(evidence, column)
            if (found := self._found.get(key)) is not None:
                found.windows += 1

    def _look_at(self, evidence: WindowEvidence, column: int) -> None:
        """Note whether parameters that a pass reaches were reset though the step of another optimizer
        did not need their gradients; nothing where that is not known yet.
        """
        window = evidence.window
        optimizer = window.optimizer
        others = window.seen[evidence.indices[column]].keys() - {optimizer}
        record = evidence.record(column)
        rows = evidence.reached[:, column]
        is_left = np.abs(evidence.coefficients[:, column]) >= NEGLIGIBLE
        lost = [evidence.keys[int(row)] for row in np.flatnonzero(rows & ~is_left)]
        stepped = {key for key in record.arrivals if not others.isdisjoint(self._owners(key))}
        if not record.uses.keys() >= {*lost, *stepped}:
            return
        place = evidence.pass_of(column).site
        # what is partly there was not reset as a whole, and what others have stepped on is not lost
        if not lost or is_left.any() or not stepped.isdisjoint(lost):
            self._found[optimizer, place] = None
        elif _come_before(lost, stepped, record.uses):
            change = where_reset(evidence, [column])
            line = None if change is None else change.line
            self._found[optimizer, place] = SharedPass(
                line or str(window.step.place),
                lost,
                stepped,
                # a program that has ended has let its modules go, and their names with them
                names=self._names(lost),
            )
        else:
            self._found[optimizer, place] = None

    def findings(self) -> Iterator[tuple[Occurrence, int]]:
        """Yield a finding for each line that loses passes, and the number of windows."""
        for (optimizer, place), found in self._found.items():
            if found is None or found.windows < FEWEST_WINDOWS or self._is_adversary(found):
                continue
            said = (
                f"the gradient of {found.names} from backward() at {place} was reset before their"
                f" optimizer stepped, in {found.windows} of {self._windows[optimizer]} windows;"
                " another optimizer stepped on that pass, and no loss trains them through what it"
                " stepped on"
            )
            yield finding("reset-shared-pass", said, found.where), found.windows

    def _is_adversary(self, found: SharedPass) -> bool:
        """Return whether another pass trains what was reset through what was stepped on."""
        owners = set[int]().union(*map(self._owners, found.lost))
        return any(not self._trained_by[owner].isdisjoint(found.stepped) for owner in owners)


def _come_before(first: Collection[int], then: Collection[int], uses: Mapping[int, Uses]) -> bool:
    """Return whether a program uses some parameters for the last time before it uses others: then no
    gradient of the latter ones goes through them.
    """
    return max(uses[key].last for key in first) < min(uses[key].first for key in then)
