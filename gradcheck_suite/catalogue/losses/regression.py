"""Losses between an output and a target of the same shape."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gradcheck_suite.catalogue.definitions import Arguments, Arrays, LossDefinition, Tensors
from gradcheck_suite.catalogue.losses.common import (
    Bools,
    absolute,
    count_weights,
    elementwise,
    never_uniform,
    normal_targets,
    positive,
    weight_per_item,
)
from gradcheck_suite.catalogue.signals import FLOATS, Options, Signal, on

F = torch.nn.functional


def _mse(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return F.mse_loss(out, batch["target"], reduction=reduction)


def _mse_elements(out: jax.Array, target: jax.Array) -> jax.Array:
    return (out - target) ** 2


def _l1(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return F.l1_loss(out, batch["target"], reduction=reduction)


def _l1_elements(out: jax.Array, target: jax.Array) -> jax.Array:
    return absolute(out - target)


def _smooth_l1(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return F.smooth_l1_loss(out, batch["target"], beta=options["beta"], reduction=reduction)


def _smooth_l1_elements(out: jax.Array, target: jax.Array, beta: float) -> jax.Array:
    error = jnp.abs(out - target)
    return jnp.where(error < beta, error**2 / (2 * beta), error - beta / 2)


def _huber(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return F.huber_loss(out, batch["target"], delta=options["delta"], reduction=reduction)


def _huber_elements(out: jax.Array, target: jax.Array, delta: float) -> jax.Array:
    error = jnp.abs(out - target)
    return jnp.where(error < delta, error**2 / 2, delta * (error - delta / 2))


def _weighted_targets(signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools) -> Arrays:
    return {**normal_targets(signal, options, rng, ignored), "weight": positive(rng, len(ignored))}


def _weighted_mse(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    weight = batch["weight"]
    total = (weight * F.mse_loss(out, batch["target"], reduction="none").flatten(1).mean(1)).sum()
    return total / weight.sum() if reduction == "mean" else total


def _weighted_mse_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    error = (out - batch["target"]) ** 2
    return batch["weight"] * error.reshape(error.shape[0], -1).mean(axis=1)


KINDS = (
    elementwise("mse", _mse, _mse_elements),
    elementwise("l1", _l1, _l1_elements),
    elementwise("smooth_l1", _smooth_l1, _smooth_l1_elements, beta=(1.0, 0.25)),
    elementwise("huber", _huber, _huber_elements, delta=(1.0, 0.25)),
    LossDefinition(
        "weighted_mse",
        on(*FLOATS),
        _weighted_targets,
        _weighted_mse,
        count_weights,
        _weighted_mse_items,
        weight_per_item,
        uniform=never_uniform,
    ),
)
