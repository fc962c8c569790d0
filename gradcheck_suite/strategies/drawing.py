"""Numbered cases: each is read from a random stream of its own, and every round of them covers
every focus.

Hypothesis's own generation varies cases that it has drawn, so that many resemble each other. It
uses constants of the loaded modules, so that an unused constant in a user's file changes the cases.
And which kinds occur is left to chance. Here, `fuzz_one_input` reads each case from bytes instead;
only shrinking is Hypothesis's.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import chain, count, islice
from random import Random
from typing import Any, cast
from unittest import SkipTest
from weakref import WeakKeyDictionary

import numpy as np
from hypothesis import HealthCheck, Phase, find, given, reject, seed, settings
from hypothesis import strategies as st
from hypothesis.database import ExampleDatabase
from hypothesis.errors import HypothesisException

from gradcheck_suite.core.case import Case
from gradcheck_suite.strategies.cases import FOCI

STREAM_BYTES = 4096
ATTEMPTS = 8
"""Streams that are tried for one number, until a case comes that no earlier number had."""
MOST_KEPT = 2000
"""Cases of a strategy that are kept in memory."""
AHEAD = 8
"""Number of cases that are prepared before they are judged. The first is not: a fault that it shows ends the search."""


@lru_cache(maxsize=8)
def _focus_order(seed_value: int, turn: int) -> list[int]:
    """Return the places of the focuses in the order of one turn through them."""
    return Random(f"{seed_value}/{turn}").sample(range(len(FOCI)), len(FOCI))


def _stream(seed_value: int, number: int, attempt: int) -> bytes:
    """Return the bytes of a case. `cases()` reads its focus from the first byte."""
    turn, place = divmod(number, len(FOCI))
    # a stream for each number: case 17 is the same whatever is done with the cases before
    return bytes([_focus_order(seed_value, turn)[place]]) + Random(
        f"{seed_value}/{number}/{attempt}"
    ).randbytes(STREAM_BYTES)


_Read = tuple[bytes, Case]
"""A case, and the bytes that it is read from."""
_Drawn = tuple[_Read, Iterator[_Read]]
"""A case, and those that may take its place."""
_Kept = dict[tuple[int, int, int], Case | None]
"""Cases by seed, number and attempt."""
_KEPT: WeakKeyDictionary[st.SearchStrategy[Case], _Kept] = WeakKeyDictionary()
"""The cases that were read from each strategy, for the next loop that is verified: they depend on the bytes alone."""


class RedrawError(Exception):
    """A case that is not to be judged, and in whose place another is drawn."""


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


def _hypothesis_settings(examples: int) -> settings:
    return settings(
        max_examples=max(examples, 1),
        database=_Failing(),
        # a case may compile a program of JAX, which takes seconds
        deadline=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        # no generation: the cases come from the streams
        phases=(Phase.reuse, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed the global random numbers of Python and numpy inside the block, as Hypothesis does for
    each test.
    """
    states = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def run_on_cases(
    judge: Callable[[Case], None],
    drawn: st.SearchStrategy[Case],
    *,
    examples: int,
    seed_value: int,
    prepare: Callable[[Case], None] | None = None,
) -> None:
    """Call `judge` with distinct cases until it raises.

    Then call it with smaller cases, and raise the exception.

    Args:
        judge: called with every case, and while shrinking with further ones. Where it raises
            `RedrawError`, another case is drawn instead, at most `ATTEMPTS` times.
        drawn: the strategy.
        examples: number of cases; fewer are drawn only where the strategy has no more.
        seed_value: the same seed gives the same cases with the same versions of the suite and of
            Hypothesis.
        prepare: called with cases some time before `judge`, to start computing elsewhere what it
            will need.
    """
    received: list[Case] = []
    failure: Exception | None = None
    shrinking = False

    chosen = _hypothesis_settings(examples)

    def judge_drawn(case: Case) -> None:
        try:
            judge(case)
        except RedrawError:
            reject()  # for Hypothesis, a case that is not judged is invalid

    @chosen  # after the seed, which takes the database away
    @seed(seed_value)
    @given(drawn)
    def run(case: Case) -> None:
        if shrinking:
            judge_drawn(case)
        elif failure is not None:
            # for `fuzz_one_input`, which then saves the choices that lead here
            raise failure
        received.append(case)

    fuzz: Callable[[bytes], object] = cast("Any", run).hypothesis.fuzz_one_input

    def read(stream: bytes) -> Case | None:
        fuzz(stream)
        return received.pop() if received else None

    source = _first_of_each_number(read, _KEPT.setdefault(drawn, {}), seed_value, examples)
    for first, others in _prepared(source, prepare):
        for stream, case in chain([first], others):
            try:
                with _seeded():
                    judge(case)
                break
            except RedrawError:
                continue
            except Exception as error:
                failure = error
                with suppress(type(error)):
                    fuzz(stream)  # so that the database has the choices that lead to the case
                shrinking = True
                _shrink(
                    run,
                    judge_drawn,
                    drawn,
                    type(error),
                    chosen,
                )
                raise


def _prepared(source: Iterator[_Drawn], prepare: Callable[[Case], None] | None) -> Iterator[_Drawn]:
    """Yield cases, up to `AHEAD` of the following ones prepared.

    As many as were judged before, so none at first.
    """
    waiting: deque[_Drawn] = deque()
    for judged in count():
        ahead = 0 if prepare is None else min(judged, AHEAD)
        for drawn in islice(source, ahead + 1 - len(waiting)):
            if prepare is not None and judged:
                (_, case), _ = drawn
                with _seeded():
                    prepare(case)
            waiting.append(drawn)
        if not waiting:
            return
        yield waiting.popleft()


def _first_of_each_number(
    read: Callable[[bytes], Case | None], kept: _Kept, seed_value: int, examples: int
) -> Iterator[_Drawn]:
    """Yield the first case of each number that differs from all before, and those that may take its
    place.
    """
    seen: set[str] = set()
    for number in range(examples):
        attempts = _distinct(read, kept, seen, seed_value, number)
        if (first := next(attempts, None)) is not None:
            yield first, attempts


def _distinct(
    read: Callable[[bytes], Case | None], kept: _Kept, seen: set[str], seed_value: int, number: int
) -> Iterator[_Read]:
    """Yield the cases of one number that differ from all before.

    Args:
        read: reads a case from bytes; None where they give an invalid one.
        kept: what was read before, to which what is read now is added.
        seen: digests of all cases before, to which those of the new ones are added.
        seed_value: as for `run_on_cases`.
        number: the number of the case.
    """
    for attempt in range(ATTEMPTS):
        stream = _stream(seed_value, number, attempt)
        key = (seed_value, number, attempt)
        # reading a case takes milliseconds, which every further loop of a command is spared
        case = kept[key] if key in kept else read(stream)
        if len(kept) < MOST_KEPT:
            kept[key] = case
        if case is not None and case.digest not in seen:
            seen.add(case.digest)
            yield stream, case


def _shrink(
    run: Callable[[], None],
    judge: Callable[[Case], None],
    drawn: st.SearchStrategy[Case],
    failure: type[Exception],
    chosen: settings,
) -> None:
    """Call `judge` with smaller and smaller variations of the case in the database that still raise
    `failure`.
    """

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
            # pytest's --hypothesis-seed replaces the seed, and hides the database from tests
            # without an own key
            find(
                drawn,
                fails,
                settings=chosen,
                database_key=b"case",
            )
    except (failure, HypothesisException):
        pass  # a loop may also fail on a case and pass on the same case later: then nothing smaller is found


def draw_cases(drawn: st.SearchStrategy[Case], *, examples: int, seed_value: int) -> list[Case]:
    """Return the cases that `run_on_cases` draws."""
    found: list[Case] = []
    run_on_cases(
        found.append,
        drawn,
        examples=examples,
        seed_value=seed_value,
    )
    return found
