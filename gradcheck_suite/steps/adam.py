"""Adam and its relatives: optax keeps the moments, and the direction follows torch's formula."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradcheck_suite.steps.chains import (
    Transformation,
    corrected,
    framed,
    in_float32,
    per_leaf,
    updates_from_state,
)
from gradcheck_suite.steps.counterpart import Counterpart


def _adam(
    *,
    lr: Any,
    betas: tuple[Any, Any],
    eps: Any,
    weight_decay: Any,
    amsgrad: bool,
    decoupled_weight_decay: Any,
    maximize: Any,
) -> Transformation:
    core = optax.scale_by_adam(*betas, eps=eps)
    if amsgrad:
        inner = optax.scale_by_amsgrad(*betas, bias_correction_nu=False)
        core = updates_from_state(inner, lambda g, u, s: _largest(betas, eps, s))
    return framed(core, lr, weight_decay=weight_decay, decoupled=decoupled_weight_decay, maximize=maximize)


def _largest(betas: tuple[Any, Any], eps: Any, state: Any) -> Any:
    """Correct the largest second moment by the present step's bias, not each by its own."""
    first, second = corrected(betas[0], state.count), corrected(betas[1], state.count)
    return per_leaf(lambda m, v: m / first / (jnp.sqrt(v / second) + eps), state.mu, state.nu_max)


def _adamax(
    *,
    lr: Any,
    betas: tuple[Any, Any],
    eps: Any,
    weight_decay: Any,
    maximize: Any,
) -> Transformation:
    return framed(optax.scale_by_adamax(*betas, eps=eps), lr, weight_decay=weight_decay, maximize=maximize)


class _Products(NamedTuple):
    moments: Any
    product: jax.Array


def _scale_by_nadam(betas: tuple[Any, Any], eps: Any, momentum_decay: Any) -> optax.GradientTransformation:
    """Return torch's Nesterov Adam on the moments of `scale_by_adam`: its momentum grows with the steps."""
    inner = optax.scale_by_adam(*betas)

    def momentum(count: Any) -> Any:
        return betas[0] * (1.0 - 0.5 * 0.96 ** (count * momentum_decay))

    def advance(gradients: Any, state: _Products, params: Any = None) -> tuple[Any, _Products]:
        _, moments = inner.update(gradients, state.moments, params)
        now, then = momentum(moments.count), momentum(moments.count + 1)
        product = in_float32(state.product * in_float32(now))
        of_gradient, of_mean = (1.0 - now) / (1.0 - product), then / (1.0 - product * then)
        second = corrected(betas[1], moments.count)

        def direction(g: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return (of_gradient * g + of_mean * m) / (jnp.sqrt(v / second) + eps)

        return per_leaf(direction, gradients, moments.mu, moments.nu), _Products(moments, product)

    return optax.GradientTransformation(lambda params: _Products(inner.init(params), jnp.ones(())), advance)


def _nadam(
    *,
    lr: Any,
    betas: tuple[Any, Any],
    eps: Any,
    weight_decay: Any,
    momentum_decay: Any,
    decoupled_weight_decay: Any,
    maximize: Any,
) -> Transformation:
    core = _scale_by_nadam(betas, eps, momentum_decay)
    return framed(core, lr, weight_decay=weight_decay, decoupled=decoupled_weight_decay, maximize=maximize)


def _radam(
    *,
    lr: Any,
    betas: tuple[Any, Any],
    eps: Any,
    weight_decay: Any,
    decoupled_weight_decay: Any,
    maximize: Any,
) -> Transformation:
    def outside(gradients: Any, updates: Any, state: Any) -> Any:
        """Add epsilon to the root before its bias correction: a factor of the rectified direction of optax."""
        second = jnp.sqrt(corrected(betas[1], state.count))
        length = 2.0 / (1.0 - betas[1]) - 1.0
        rectified = length - 2.0 * state.count * (1.0 - second**2) / second**2 > 5.0

        def of(update: jax.Array, v: jax.Array) -> jax.Array:
            root = jnp.sqrt(v)
            return jnp.where(rectified, update * ((root + eps * second) / (root + eps)), update)

        return per_leaf(of, updates, state.nu)

    core = updates_from_state(optax.scale_by_radam(*betas, eps=eps), outside)
    return framed(core, lr, weight_decay=weight_decay, decoupled=decoupled_weight_decay, maximize=maximize)


def _sparse_adam(*, lr: Any, betas: tuple[Any, Any], eps: Any, maximize: Any) -> Transformation:
    inner = optax.scale_by_adam(*betas)

    def advance(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        _, moved = inner.update(gradients, state, params)
        first, second = corrected(betas[0], moved.count), corrected(betas[1], moved.count)
        present = per_leaf(lambda g: (g != 0).any(tuple(range(1, g.ndim)), keepdims=True), gradients)
        mu = per_leaf(jnp.where, present, moved.mu, state.mu)
        nu = per_leaf(jnp.where, present, moved.nu, state.nu)

        def direction(rows: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.where(rows, jnp.sqrt(second) / first * m / (jnp.sqrt(v) + eps), 0.0)

        return per_leaf(direction, present, mu, nu), moved._replace(mu=mu, nu=nu)

    return framed(optax.GradientTransformation(inner.init, advance), lr, maximize=maximize)


_ALL = ("single", "foreach", "fused")
ADAM = Counterpart(
    "Adam",
    "scale_by_adam, scale_by_amsgrad",
    (
        "amsgrad: the largest second moment is taken before its bias correction in torch, after it in optax.amsgrad",
        "decay coupled in torch's Adam; optax.adam has none",
    ),
    "torch/optim/adam.py _single_tensor_adam; optax/_src/transform.py scale_by_adam, scale_by_amsgrad",
    _adam,
    (
        {},
        {"betas": (0.5, 0.8), "eps": 1e-3},
        {"weight_decay": 0.1},
        {"amsgrad": True, "betas": (0.8, 0.6)},
        {"maximize": True, "weight_decay": 0.1},
    ),
    _ALL,
)
ADAMW = Counterpart(
    "AdamW",
    "scale_by_adam, add_decayed_weights",
    ("decay 0.01 in torch, 0.0001 in optax.adamw", "amsgrad as for Adam"),
    "torch/optim/adam.py _single_tensor_adam; optax/_src/alias.py adamw",
    _adam,
    ({}, {"weight_decay": 0.3}, {"amsgrad": True, "betas": (0.8, 0.6)}, {"maximize": True}),
    _ALL,
)
ADAMAX = Counterpart(
    "Adamax",
    "scale_by_adamax",
    ("the formulas are the same; optax.adamax has neither decay nor maximize",),
    "torch/optim/adamax.py _single_tensor_adamax; optax/_src/transform.py scale_by_adamax",
    _adamax,
    ({}, {"betas": (0.7, 0.8), "eps": 1e-3}, {"weight_decay": 0.1}, {"maximize": True}),
)
NADAM = Counterpart(
    "NAdam",
    "scale_by_adam",
    (
        "torch's momentum grows with the steps (momentum_decay); that of optax.nadam is constant",
        "torch keeps the product of momenta in float32, also for float64 parameters",
    ),
    "torch/optim/nadam.py _single_tensor_nadam; optax/_src/transform.py scale_by_adam(nesterov=True)",
    _nadam,
    (
        {},
        {"momentum_decay": 0.5, "betas": (0.7, 0.8)},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"maximize": True},
    ),
)
RADAM = Counterpart(
    "RAdam",
    "scale_by_radam",
    ("epsilon added to the root before its bias correction in torch, after it in optax",),
    "torch/optim/radam.py _single_tensor_radam; optax/_src/transform.py scale_by_radam",
    _radam,
    (
        {},
        {"betas": (0.8, 0.95), "eps": 1e-2},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"maximize": True},
    ),
)
SPARSE_ADAM = Counterpart(
    "SparseAdam",
    "scale_by_adam on the rows that have a gradient",
    (
        "no class in optax: moments and parameters of other rows stay, while the step counts for all rows",
        "epsilon added to the root before its bias correction",
    ),
    "torch/optim/_functional.py sparse_adam; optax/_src/transform.py scale_by_adam",
    _sparse_adam,
    ({}, {"betas": (0.5, 0.8), "eps": 1e-3}, {"maximize": True}),
    ("single",),
)
