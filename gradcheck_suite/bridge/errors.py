"""Errors of the bridge. Each message names the operation, the line that uses it, and what to do."""

from __future__ import annotations

from textwrap import indent

from gradcheck_suite.errors import UsageError


class BridgeError(UsageError):
    """The loss cannot be translated to JAX.

    Attributes:
        reason: why, and what to do, in one line.
        rewrite: lines of Python that help, which end the message; empty where none are known.
    """

    def __init__(self, reason: str, rewrite: str = "") -> None:
        super().__init__(f"{reason}:\n{indent(rewrite, '    ')}" if rewrite else reason)
        self.reason, self.rewrite = " ".join(reason.split()), rewrite


class UnknownOperation(BridgeError):
    """The loss uses an operation that has no JAX implementation."""


class NotExportable(BridgeError):
    """`torch.export` cannot export the loss."""


class RandomnessError(BridgeError):
    """The loss draws random numbers, which differ between torch and JAX."""


class WrongLowering(BridgeError):
    """A registered JAX function failed, or returned another shape or dtype than torch."""
