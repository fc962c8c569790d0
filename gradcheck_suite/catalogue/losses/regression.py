"""Losses between an output and a target of the same shape."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gradcheck_suite.catalogue.definitions import Arguments, Arrays, LossDefinition, Options, Signal, Tensors
from gradcheck_suite.catalogue.losses.common import (
    Bools,
    count_elements,
    count_weights,
    elements_per_item,
    never_uniform,
    normal_targets,
    on_floats,
    per_item,
    positive,
    weight_per_item,
)

F = torch.nn.functional


def _mse(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return F.mse_loss(out, batch["target"], reduction=reduction)


def _mse_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    return per_item((out - batch["target"]) ** 2)


def _l1(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return F.l1_loss(out, batch["target"], reduction=reduction)


def _l1_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    return per_item(jnp.abs(out - batch["target"]))


def _smooth_l1(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return F.smooth_l1_loss(out, batch["target"], beta=options["beta"], reduction=reduction)


def _smooth_l1_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    error, beta = jnp.abs(out - batch["target"]), options["beta"]
    return per_item(jnp.where(error < beta, error**2 / (2 * beta), error - beta / 2))


def _huber(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return F.huber_loss(out, batch["target"], delta=options["delta"], reduction=reduction)


def _huber_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    error, delta = jnp.abs(out - batch["target"]), options["delta"]
    return per_item(jnp.where(error < delta, error**2 / 2, delta * (error - delta / 2)))


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
    LossDefinition("mse", on_floats(), normal_targets, _mse, count_elements, _mse_items, elements_per_item),
    LossDefinition("l1", on_floats(), normal_targets, _l1, count_elements, _l1_items, elements_per_item),
    LossDefinition(
        "smooth_l1",
        on_floats(beta=(1.0, 0.25)),
        normal_targets,
        _smooth_l1,
        count_elements,
        _smooth_l1_items,
        elements_per_item,
    ),
    LossDefinition(
        "huber",
        on_floats(delta=(1.0, 0.25)),
        normal_targets,
        _huber,
        count_elements,
        _huber_items,
        elements_per_item,
    ),
    LossDefinition(
        "weighted_mse",
        on_floats(),
        _weighted_targets,
        _weighted_mse,
        count_weights,
        _weighted_mse_items,
        weight_per_item,
        uniform=never_uniform,
    ),
)
