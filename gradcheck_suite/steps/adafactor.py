"""Adafactor, which keeps the second moment of a matrix as the product of two vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradcheck_suite.steps.chains import Transformation, framed
from gradcheck_suite.steps.counterpart import Counterpart


def _over_matrices(function: Callable[..., Any], leaf: jax.Array) -> Callable[..., Any]:
    """Return a function of one matrix, applied to every matrix of the last two dimensions of a leaf."""
    for _ in range(leaf.ndim - 2):
        function = jax.vmap(function)
    return function


def _scale_by_factors(decay: Any, smallest: Any) -> optax.GradientTransformation:
    """Return torch's division by the factored second moment, on the moments of `scale_by_factored_rms`."""
    inner = optax.scale_by_factored_rms(
        decay_rate=decay,
        min_dim_size_to_factor=1,
        epsilon=0.0,
        decay_rate_fn=lambda step, exponent: 1.0 - (jnp.asarray(step, jnp.float64) + 1.0) ** exponent,
    )

    def direction(gradient: jax.Array, state: Any) -> jax.Array:
        moment = state.v
        if gradient.ndim > 1:
            # the rows of optax are the means over the larger dimension, those of torch the means over the last one
            wide = gradient.shape[-1] >= gradient.shape[-2]
            down, across = (state.v_row, state.v_col) if wide else (state.v_col, state.v_row)
            mean = jnp.maximum(down.mean(-1, keepdims=True), smallest)[..., None]
            moment = down[..., :, None] * across[..., None, :] / mean
        return gradient * jax.lax.rsqrt(jnp.maximum(moment, smallest**2))

    def init(params: Any) -> tuple[Any, ...]:
        return tuple(_over_matrices(inner.init, leaf)(leaf) for leaf in jax.tree.leaves(params))

    def advance(gradients: Any, states: tuple[Any, ...], params: Any = None) -> tuple[Any, tuple[Any, ...]]:
        leaves, tree = jax.tree.flatten(gradients)
        moved = tuple(
            _over_matrices(lambda g, s: inner.update(g, s, g)[1], g)(g, s) for g, s in zip(leaves, states, strict=True)
        )
        return jax.tree.unflatten(tree, map(direction, leaves, moved)), moved

    return optax.GradientTransformation(init, advance)


def _adafactor(
    *, lr: Any, beta2_decay: Any, eps: tuple[Any, Any], d: Any, weight_decay: Any, maximize: Any
) -> Transformation:
    core = optax.chain(
        _scale_by_factors(beta2_decay, eps[0]),
        optax.clip_by_block_rms(d),
        optax.scale_by_param_block_rms(min_scale=eps[1]),
        optax.scale_by_schedule(lambda count: jnp.minimum(lr, 1.0 / jnp.sqrt(count + 1.0))),
    )
    # torch's decay is by lr, also where the step is shorter than lr
    return framed(core, 1.0, weight_decay=lr * weight_decay, decoupled=True, maximize=maximize)


ADAFACTOR = Counterpart(
    "Adafactor",
    "scale_by_factored_rms, clip_by_block_rms, scale_by_param_block_rms",
    (
        "torch bounds the second moment from below, optax adds epsilon to the squared gradient",
        "torch factors every matrix of the last two dimensions; optax the two largest dimensions, if both reach 128",
        "the rate is at most 1 / sqrt(t) in torch",
        "optax computes the decay of the moments in float32, also for float64 parameters",
        "decay times lr in torch, alone in optax.adafactor",
    ),
    "torch/optim/_adafactor.py _single_tensor_adafactor; optax/_src/factorized.py scale_by_factored_rms",
    _adafactor,
    ({}, {"lr": 0.8, "d": 1.5}, {"weight_decay": 0.1, "beta2_decay": -0.5}, {"maximize": True}),
    decoupled=True,
)
