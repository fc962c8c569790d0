"""What ends a search: a violation, an error of the user's, or enough cases."""

from __future__ import annotations

from gradcheck_suite.errors import UsageError


class ViolatedError(Exception):
    """Raised at one place only, so that Hypothesis shrinks one fault and not several."""


class StopError(BaseException):
    """Carries a `UsageError` past Hypothesis, which would go on otherwise."""

    def __init__(self, error: UsageError) -> None:
        super().__init__()
        self.error = error


class EnoughError(BaseException):
    """Ends the drawing of cases. It is no `Exception`, so that Hypothesis does not shrink it."""
