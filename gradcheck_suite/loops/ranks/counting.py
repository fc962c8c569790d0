"""Collectives that are no part of a loop's communication: those of the suite, and those that hand out items."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_SUSPENDED = [False]


@contextmanager
def uncounted() -> Iterator[None]:
    """Leave the collectives of the block out of the count."""
    before, _SUSPENDED[0] = _SUSPENDED[0], True
    try:
        yield
    finally:
        _SUSPENDED[0] = before


def is_counted() -> bool:
    """Return whether collectives are the loop's."""
    return not _SUSPENDED[0]
