"""What the bridge says when it cannot carry a model over to JAX. Each message says what to do."""

from __future__ import annotations

from gradcheck_suite.errors import UsageError


class BridgeError(UsageError):
    """The loss cannot be carried over to JAX."""


class UnknownOperation(BridgeError):
    """The loss uses an operation that is not in the table."""


class NotExportable(BridgeError):
    """`torch.export` does not take the loss."""


class RandomnessError(BridgeError):
    """The loss draws random numbers: torch's and JAX's would never be the same."""


class WrongLowering(BridgeError):
    """A lowering returned another shape or dtype than torch does."""
