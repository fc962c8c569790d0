"""The error of a reference that cannot be computed."""


class CannotJudgeError(Exception):
    """The case itself cannot run here: the plain large batch fails before any loop is involved."""
