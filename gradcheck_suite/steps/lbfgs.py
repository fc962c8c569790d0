"""L-BFGS without a line search: one iteration a step."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax

from gradcheck_suite.steps.chains import Transformation, per_leaf, updates_from_state
from gradcheck_suite.steps.counterpart import Counterpart


def _lbfgs(*, lr: Any, history_size: int) -> Transformation:
    def shortened(gradients: Any, updates: Any, state: Any) -> Any:
        """Divide the first step by the sum of absolute values, where optax divides by the norm."""
        total = optax.tree.sum(per_leaf(jnp.abs, gradients))
        first = state.count == 1
        return per_leaf(lambda g, u: jnp.where(first, g * jnp.minimum(1.0, 1.0 / total), u), gradients, updates)

    core = updates_from_state(optax.scale_by_lbfgs(memory_size=history_size), shortened)
    return optax.chain(core, optax.scale_by_learning_rate(lr))


LBFGS = Counterpart(
    "LBFGS",
    "scale_by_lbfgs",
    ("torch shortens the first step by the sum of absolute values of the gradient, optax by its norm",),
    "torch/optim/lbfgs.py step; optax/_src/transform.py scale_by_lbfgs",
    _lbfgs,
    ({"max_iter": 1, "lr": 0.5, "history_size": 3}, {"max_iter": 1, "lr": 0.1, "history_size": 3}),
    ("single",),
    outside="the line search, the tolerances, and pairs (y, s) with y·s at most 1e-10, which torch does not store",
)
