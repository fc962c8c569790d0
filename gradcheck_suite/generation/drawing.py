"""Numbered cases: each is read from a random stream of its own, and every round of them covers every focus.

Hypothesis's own generation varies cases that it has drawn, so that many resemble each other. It uses constants of the
loaded modules, so that an unused constant in a user's file changes the cases. And which kinds occur is left to chance.
Here, `fuzz_one_input` reads each case from bytes instead; only shrinking is Hypothesis's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import Any, cast
from unittest import SkipTest

from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis import strategies as st
from hypothesis.database import ExampleDatabase
from hypothesis.errors import HypothesisException

from gradcheck_suite.generation.focus import FOCI
from gradcheck_suite.schema.case import Case

STREAM_BYTES = 4096
ATTEMPTS = 8
"""Streams that are tried for one number, until a case comes that no earlier number had."""


def _stream(seed_value: int, number: int, attempt: int) -> bytes:
    """Return the bytes of a case. `cases()` reads its focus from the first byte."""
    turn, place = divmod(number, len(FOCI))
    order = Random(f"{seed_value}/{turn}").sample(range(len(FOCI)), len(FOCI))
    return bytes([order[place]]) + Random(f"{seed_value}/{number}/{attempt}").randbytes(STREAM_BYTES)


class _Failing(ExampleDatabase):
    """The choices of the case that failed: `fuzz_one_input` saves them, `find` reads them."""

    def __init__(self) -> None:
        super().__init__()
        self._saved: set[bytes] = set()

    def save(self, key: bytes, value: bytes) -> None:
        self._saved.add(value)

    def fetch(self, key: bytes) -> Iterable[bytes]:
        # what is found under the primary key counts as shrunk already
        return tuple(self._saved) if key.endswith(b".secondary") else ()

    def delete(self, key: bytes, value: bytes) -> None:
        self._saved.discard(value)


def run_on_cases(
    judge: Callable[[Case], None], drawn: st.SearchStrategy[Case], *, examples: int, seed_value: int
) -> None:
    """Call `judge` with distinct cases until it raises; then call it with smaller cases, and raise the exception.

    Args:
        judge: called with every case, and while shrinking with further ones. Where it calls `hypothesis.reject()`,
            another case is drawn instead, at most `ATTEMPTS` times.
        drawn: the strategy.
        examples: number of cases; fewer are drawn only where the strategy has no more.
        seed_value: the same seed gives the same cases with the same versions of the suite and of Hypothesis.
    """
    seen: set[str] = set()
    shrinking = False
    chosen = settings(
        max_examples=max(examples, 1),
        database=_Failing(),
        deadline=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        phases=(Phase.reuse, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )

    @chosen  # after the seed, which takes the database away
    @seed(seed_value)
    @given(drawn)
    def run(case: Case) -> None:
        if shrinking or case.digest not in seen:
            judge(case)
            seen.add(case.digest)

    fuzz: Callable[[bytes], object] = cast("Any", run).hypothesis.fuzz_one_input
    for number in range(examples):
        before, attempt = len(seen), 0
        while len(seen) == before and attempt < ATTEMPTS:
            try:
                fuzz(_stream(seed_value, number, attempt))
            except HypothesisException:
                raise
            except Exception as error:
                shrinking = True
                _shrink(run, judge, drawn, type(error), chosen)
                raise
            attempt += 1


def _shrink(
    run: Callable[[], None],
    judge: Callable[[Case], None],
    drawn: st.SearchStrategy[Case],
    failure: type[Exception],
    chosen: settings,
) -> None:
    """Call `judge` with smaller and smaller variations of the case in the database that still raise `failure`."""

    def fails(case: Case) -> bool:
        try:
            judge(case)
        except failure:
            return True
        return False

    try:
        try:
            run()
        except SkipTest:
            # pytest's --hypothesis-seed replaces the seed, and hides the database from tests without an own key
            find(drawn, fails, settings=chosen, database_key=b"case")
    except (failure, HypothesisException):
        pass  # a loop may also fail on a case and pass on the same case later: then nothing smaller is found


def draw_cases(drawn: st.SearchStrategy[Case], *, examples: int, seed_value: int) -> list[Case]:
    """Return the cases that `run_on_cases` draws."""
    found: list[Case] = []
    run_on_cases(found.append, drawn, examples=examples, seed_value=seed_value)
    return found
