"""`gradcheck_suite.objective`: what a loss is a mean of, in a program of torch or of JAX.

It imports neither: the loss says which one the program uses.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

from gradcheck_suite.errors import UsageError


def objective(loss: Any, *, count: Any, reduction: Literal["mean", "sum"] = "mean") -> Any:
    """Declare what a loss is a mean of, where the audit cannot read it; return the loss.

    Without an open audit this does nothing. In JAX it stands inside of the function that is
    differentiated.

    Args:
        loss: a scalar tensor, or a number of JAX.
        count: what its mean divides by; for `"sum"`, the number of items.
        reduction: `"mean"` or `"sum"`.

    Raises:
        UsageError: `reduction` is neither, or `loss` is no scalar.
    """
    if reduction not in ("mean", "sum"):
        raise UsageError(f"objective: reduction must be 'mean' or 'sum', got {reduction!r}")
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(loss, jax.Array):
        from gradcheck_suite.auditing.jax.declared import declare

        return declare(loss, count, reduction)
    if "torch" not in sys.modules:
        raise UsageError("objective: expected a scalar tensor, the loss of one micro-batch")
    from gradcheck_suite.auditing import context

    return context.objective(loss, count=count, reduction=reduction)
