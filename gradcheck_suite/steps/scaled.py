"""Adagrad, RMSprop and Adadelta: gradients divided by the root of a sum or an average of their squares."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax

from gradcheck_suite.steps.chains import Transformation, framed, per_leaf, updates_from_state
from gradcheck_suite.steps.counterpart import Counterpart


def _adagrad(
    *,
    lr: Any,
    lr_decay: Any,
    weight_decay: Any,
    initial_accumulator_value: Any,
    eps: Any,
    maximize: Any,
) -> Transformation:
    def outside(gradients: Any, updates: Any, state: Any) -> Any:
        """Move epsilon out of the root: g / sqrt(s) becomes g / (sqrt(s) + eps)."""

        def of(update: Any, squares: Any) -> Any:
            root = jnp.sqrt(squares)
            return update * (root / (root + eps))

        return per_leaf(of, updates, state.sum_of_squares)

    core = updates_from_state(optax.scale_by_rss(initial_accumulator_value, eps=0.0), outside)
    return framed(core, lambda count: lr / (1.0 + count * lr_decay), weight_decay=weight_decay, maximize=maximize)


def _rmsprop(
    *,
    lr: Any,
    alpha: Any,
    eps: Any,
    weight_decay: Any,
    momentum: Any,
    centered: bool,
    maximize: Any,
) -> Transformation:
    scale = optax.scale_by_stddev if centered else optax.scale_by_rms
    core = optax.chain(scale(decay=alpha, eps=eps, eps_in_sqrt=False), optax.trace(decay=momentum))
    return framed(core, lr, weight_decay=weight_decay, maximize=maximize)


def _adadelta(*, lr: Any, rho: Any, eps: Any, weight_decay: Any, maximize: Any) -> Transformation:
    return framed(optax.scale_by_adadelta(rho=rho, eps=eps), lr, weight_decay=weight_decay, maximize=maximize)


ADAGRAD = Counterpart(
    "Adagrad",
    "scale_by_rss",
    (
        "epsilon outside the root in torch, inside in optax",
        "epsilon 1e-10 and an accumulator that begins at 0 in torch; 1e-7 and 0.1 in optax.adagrad",
        "lr_decay, which optax.adagrad does not have",
    ),
    "torch/optim/adagrad.py _single_tensor_adagrad; optax/_src/transform.py scale_by_rss",
    _adagrad,
    ({}, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}, {"weight_decay": 0.1}, {"maximize": True, "eps": 1e-2}),
    ("single", "foreach", "fused"),
)
RMSPROP = Counterpart(
    "RMSprop",
    "scale_by_rms, scale_by_stddev, trace",
    (
        "epsilon outside the root in torch, inside by default in optax.rmsprop",
        "decay of the squares 0.99 in torch, 0.9 in optax.rmsprop",
        "momentum before the learning rate in torch, after it in optax.rmsprop: the same while the rate stays",
    ),
    "torch/optim/rmsprop.py _single_tensor_rmsprop; optax/_src/transform.py scale_by_rms, scale_by_stddev",
    _rmsprop,
    (
        {},
        {"momentum": 0.9},
        {"centered": True, "alpha": 0.9},
        {"centered": True, "momentum": 0.5, "alpha": 0.9, "weight_decay": 0.1},
        {"weight_decay": 0.1, "maximize": True, "eps": 1e-2},
    ),
)
ADADELTA = Counterpart(
    "Adadelta",
    "scale_by_adadelta",
    ("the formulas are the same; optax.adadelta has no maximize",),
    "torch/optim/adadelta.py _single_tensor_adadelta; optax/_src/transform.py scale_by_adadelta",
    _adadelta,
    ({}, {"rho": 0.7, "lr": 0.5}, {"weight_decay": 0.1}, {"maximize": True}),
)
