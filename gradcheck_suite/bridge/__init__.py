"""The bridge: a user's torch loss as a JAX function, so that JAX differentiates it.

`torch.export` turns the loss into a graph of ATen operations, and a table maps each operation to a
function of `jax.numpy`. JAX's derivative of a loss must use none of torch's: torch differentiates
here only to call a user's own backward and to check it. The bridge must not import `judge`,
`verification` or anything above them: it knows losses, not loops.
"""

from gradcheck_suite.bridge.exporting import accept_backward
from gradcheck_suite.bridge.lowered import (
    Lowered,
    WrongBackward,
    arguments_of,
    jax_gradient,
    lower,
    wrong_backwards,
)
from gradcheck_suite.bridge.op_table import (
    BridgeError,
    NotExportable,
    RandomnessError,
    UnknownOperation,
    WrongLowering,
    register_op,
    table,
)

__all__ = [
    "BridgeError",
    "Lowered",
    "NotExportable",
    "RandomnessError",
    "UnknownOperation",
    "WrongBackward",
    "WrongLowering",
    "accept_backward",
    "arguments_of",
    "jax_gradient",
    "lower",
    "register_op",
    "table",
    "wrong_backwards",
]
