"""What the mappings share: the frame around an optimizer's core, and updates computed from an optax state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Transformation = Any
"""An `optax.GradientTransformationExtraArgs`; optax has no types that a checker reads."""
Rate = Any
"""A learning rate: a number, or a function of the number of steps before."""


def framed(
    core: optax.GradientTransformation,
    lr: Rate,
    *,
    weight_decay: Any = 0.0,
    decoupled: Any = False,
    maximize: Any = False,
) -> Transformation:
    """Return an optimizer's core between what torch does before and after it.

    Args:
        core: gradient -> direction.
        lr: the learning rate.
        weight_decay: factor of the parameters that is added to the gradient or, decoupled, to the direction.
        decoupled: 1 where the decay bypasses the core, else 0.
        maximize: 1 where the gradient is negated, before the decay is added, else 0.
    """
    return optax.chain(
        optax.scale(1.0 - 2.0 * maximize),
        optax.add_decayed_weights(weight_decay * (1.0 - decoupled)),
        core,
        optax.add_decayed_weights(weight_decay * decoupled),
        optax.scale_by_learning_rate(lr),
    )


def updates_from_state(
    inner: optax.GradientTransformation, update: Callable[[Any, Any, Any], Any]
) -> optax.GradientTransformation:
    """Return a transformation with the state of another one and updates of its own.

    Args:
        inner: keeps the moments.
        update: (gradients, updates of `inner`, its new state) -> updates.
    """

    def advance(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = inner.update(gradients, state, params)
        return update(gradients, updates, state), state

    return optax.GradientTransformation(inner.init, advance)


def per_leaf(function: Callable[..., jax.Array], *trees: Any) -> Any:
    """Apply a function to the corresponding leaves of some trees."""
    return jax.tree.map(function, *trees)


def corrected(decay: Any, count: Any) -> Any:
    """Return the bias correction of a moving average that began at zero, 1 - decay**count."""
    return 1.0 - jnp.asarray(decay, jnp.float64) ** count


def in_float32(value: Any) -> jax.Array:
    """Round to float32, in which torch keeps the scalars of a state whatever the dtype of the parameters."""
    return jnp.asarray(value).astype(jnp.float32).astype(jnp.float64)
