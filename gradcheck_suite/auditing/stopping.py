"""How an audit ends a run where its user asks for that."""

from __future__ import annotations


class StoppedOnViolation(BaseException):
    """Ends a run at its first violation.

    No `Exception`, so that a program that catches those ends all the same.
    """
