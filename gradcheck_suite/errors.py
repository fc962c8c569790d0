"""The errors a user can meet. Each message says what was expected, what came, and what to do."""


class GradcheckSuiteError(Exception):
    """Base of every error the suite raises on purpose."""


class UsageError(GradcheckSuiteError, ValueError):
    """Bad usage or bad input: the command line prints it as one line and exits with status 2."""


class CannotRunHere(UsageError):
    """What was asked for is sound but this machine or installation cannot run it."""
