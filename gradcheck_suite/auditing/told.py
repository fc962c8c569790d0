"""The violations that were printed while the run went on.

Text, JSON, page, annotations and SARIF show the same object: what was printed is not renamed when
later windows are judged. Printing waits until that is unlikely to be wanted. A violation that the
windows of the whole run explain after all is none: it leaves the result, since a false alarm is
worse than a line that is taken back.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TextIO

from gradcheck_suite.core.results import Violation
from gradcheck_suite.core.text import say


def tell(lines: Sequence[str], standard_error: TextIO) -> None:
    """Print lines on standard error, which a notebook would show as an error, so there on standard
    output.

    They begin on a fresh line: a progress bar of the program may stand in the last one.
    """
    in_notebook = type(standard_error).__module__.startswith("ipykernel")
    with contextlib.suppress(OSError, ValueError):  # full, or closed by the program
        say(
            list(lines) if in_notebook else ["", *lines],
            sys.stdout if in_notebook else standard_error,
        )


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
        places = {_window_of(one) for one in now.values()}
        stands = [
            _counted(one, now[key]) if key in now else one
            for key, one in self._by_key.items()
            if key in now or _window_of(one) in places
        ]
        # the windows of these have another name now, which is not told after the first one
        renamed = {_window_of(one) for key, one in self._by_key.items() if key not in now}
        others = [
            one
            for key, one in now.items()
            if key not in self._by_key and _window_of(one) not in renamed
        ]
        return sorted(
            (*stands, *others), key=lambda one: math.inf if one.step is None else one.step
        )


def _window_of(violation: Violation) -> tuple[int | None, str | None]:
    """Return the step and the loss that a violation is about, whatever it is called."""
    return violation.step, violation.loss or violation.where


def _counted(told: Violation, now: Violation) -> Violation:
    error = now.gradient_error if told.gradient_error is None else told.gradient_error
    return replace(told, occurrences=now.occurrences, gradient_error=error)
