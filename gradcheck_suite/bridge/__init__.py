"""The bridge: a user's loss, carried over from torch to JAX, operation by operation.

`torch.export` writes the loss down as a graph of ATen operations; a table says what each is in `jax.numpy`; the
derivative is JAX's alone. Nothing of torch's automatic differentiation is used.
"""

from gradcheck_suite.bridge.errors import (
    BridgeError,
    NotExportable,
    RandomnessError,
    UnknownOperation,
    WrongLowering,
)
from gradcheck_suite.bridge.lowered import Lowered, arguments_of, jax_gradient, lower
from gradcheck_suite.bridge.table import register_op, table

__all__ = [
    "BridgeError",
    "Lowered",
    "NotExportable",
    "RandomnessError",
    "UnknownOperation",
    "WrongLowering",
    "arguments_of",
    "jax_gradient",
    "lower",
    "register_op",
    "table",
]
