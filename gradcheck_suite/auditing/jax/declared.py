"""What a user declares of a loss: an identity in the traced loss, with the count beside it.

It lowers to nothing, and is put in while an audit is open alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from gradcheck_suite.auditing.jax.calls import OBSERVERS
from gradcheck_suite.auditing.jax.losses import DECLARED
from gradcheck_suite.errors import UsageError

objective_p = jex.Primitive(DECLARED)


def declare(loss: Any, count: Any, reduction: str) -> Any:
    """Return a loss that says what it is a mean or a sum of.

    Args:
        loss: a number.
        count: of items; may be traced.
        reduction: `mean` or `sum`.

    Raises:
        UsageError: it is not a number.
    """
    if loss.size != 1:
        raise UsageError("objective: expected a scalar, the loss of one micro-batch")
    if not OBSERVERS:
        return loss
    number = jax.lax.stop_gradient(jnp.asarray(count, jnp.float32).reshape(()))
    return objective_p.bind(loss, number, reduction=reduction)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, reduction: str) -> tuple[Any, Any]:
    return objective_p.bind(*primals, reduction=reduction), tangents[0]


def _batch(values: Sequence[Any], dims: Sequence[Any], *, reduction: str) -> tuple[Any, Any]:
    return objective_p.bind(*values, reduction=reduction), dims[0]


objective_p.def_impl(lambda loss, count, reduction: loss)
objective_p.def_abstract_eval(lambda loss, count, reduction: loss)
mlir.register_lowering(objective_p, lambda context, loss, count, reduction: [loss])
ad.primitive_jvps[objective_p] = _jvp
batching.primitive_batchers[objective_p] = _batch
