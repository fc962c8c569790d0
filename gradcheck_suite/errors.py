"""Errors for users. Each message states what was expected, what was received, and what to do."""


class GradcheckSuiteError(Exception):
    """Base class of the errors that the suite raises for its users."""


class UsageError(GradcheckSuiteError, ValueError):
    """Bad usage or bad input.

    The command line prints the message as one line and exits with status 2.
    """


class CannotRunHere(UsageError):
    """A valid request that this machine or installation cannot run."""


class ViolationFound(GradcheckSuiteError, AssertionError):
    """A loop or a run is violated: what `result.raise_for_violation()` raises."""
