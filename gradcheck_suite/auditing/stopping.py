"""How an audit ends a run where its user asks for that, and what ends a run from outside."""

from __future__ import annotations


class Terminated(BaseException):
    """What ends a run that a signal ends: its last window is not complete."""


class StoppedOnViolation(BaseException):
    """Ends a run at its first violation.

    No `Exception`, so that a program that catches those ends all the same.
    """


def in_words(error: BaseException | None) -> str:
    """Return the exception that ended a run in words, `""` where none of the program's did."""
    return f"{type(error).__name__}: {error}" if isinstance(error, Exception) else ""
