"""The violations that were printed while the run went on.

Text, JSON, page, annotations and SARIF show the same object: what was printed is not renamed when
later windows are judged. Printing waits until that is unlikely to be wanted. A violation that the
windows of the whole run explain after all is none: it leaves the result, since a false alarm is
worse than a line that is taken back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from gradcheck_suite.core.results import Violation


class Told:
    """The violations that were printed."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str | None], Violation] = {}

    def has(self, diagnosis: str) -> bool:
        """Return whether a violation of a diagnosis was printed."""
        return any(one == diagnosis for one, _ in self._by_key)

    def add(self, violation: Violation) -> None:
        """Note that a violation was printed."""
        self._by_key.setdefault((violation.diagnosis, violation.where), violation)

    def final(self, found: Iterable[Violation]) -> list[Violation]:
        """Return the violations of the run, in the order of their steps: what was printed, with the
        number of its steps, and what was not printed yet.
        """
        now = {(one.diagnosis, one.where): one for one in found}
        places = {(one.step, one.loss or one.where) for one in now.values()}
        stands = [
            _counted(one, now[key]) if key in now else one
            for key, one in self._by_key.items()
            if key in now or (one.step, one.loss or one.where) in places
        ]
        # the windows of these have another name now, which is not told after the first one
        renamed = {
            (one.step, one.loss or one.where) for key, one in self._by_key.items() if key not in now
        }
        others = [
            one
            for key, one in now.items()
            if key not in self._by_key and (one.step, one.loss or one.where) not in renamed
        ]
        return sorted(
            (*stands, *others), key=lambda one: math.inf if one.step is None else one.step
        )


def _counted(told: Violation, now: Violation) -> Violation:
    error = now.gradient_error if told.gradient_error is None else told.gradient_error
    return replace(told, occurrences=now.occurrences, gradient_error=error)
