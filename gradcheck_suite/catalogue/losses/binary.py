"""Losses of binary predictions, one for each element."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gradcheck_suite.catalogue.definitions import Arguments, Arrays, LossDefinition, Tensors
from gradcheck_suite.catalogue.losses.common import (
    Bools,
    class_weights,
    count_elements,
    elements_per_item,
    per_item,
    positive,
)
from gradcheck_suite.catalogue.signals import FLOATS, Options, Signal, on

F = torch.nn.functional
CLOSEST = 2.0**-7
"""Distance from 0 or 1 at which a probability is clamped. CLOSEST and 1 - CLOSEST are exact in every dtype."""


def _targets(signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools) -> Arrays:
    """Return drawn targets of 0 and 1, of which three quarters are 0 on average, and element weights if asked for."""
    shape = (len(ignored), *signal.size)
    arrays: Arrays = {"target": (rng.random(shape) < 0.25).astype(np.float64)}
    return {**arrays, "weight": positive(rng, *shape)} if options.get("weight") else arrays


def _with_logits(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    pos_weight = None
    if options["pos_weight"]:
        pos_weight = class_weights(out, out.shape[1 if out.ndim == 4 else -1])
        pos_weight = pos_weight[:, None, None] if out.ndim == 4 else pos_weight
    return F.binary_cross_entropy_with_logits(
        out, batch["target"], weight=batch.get("weight"), pos_weight=pos_weight, reduction=reduction
    )


def _with_logits_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    target, classes = batch["target"], 1 if out.ndim == 4 else out.ndim - 1
    weight_of_yes = jnp.ones(())
    if options["pos_weight"]:
        weight_of_yes = (0.5 + jnp.arange(out.shape[classes])).reshape(-1, *(1,) * (out.ndim - 1 - classes))
    log_yes, log_no = -jnp.logaddexp(-out, 0.0), -jnp.logaddexp(out, 0.0)
    loss = -(weight_of_yes * target * log_yes + (1 - target) * log_no)
    return per_item(batch["weight"] * loss if options["weight"] else loss)


def _bce(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    probability = torch.sigmoid(out).clamp(CLOSEST, 1 - CLOSEST)
    return F.binary_cross_entropy(probability, batch["target"], weight=batch.get("weight"), reduction=reduction)


def _bce_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    target, p = batch["target"], jax.nn.sigmoid(out)
    p = jnp.where(p < CLOSEST, CLOSEST, jnp.where(p > 1 - CLOSEST, 1 - CLOSEST, p))
    loss = -(target * jnp.log(p) + (1 - target) * jnp.log1p(-p))
    return per_item(batch["weight"] * loss if options["weight"] else loss)


def _multilabel(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    weight = class_weights(out, out.shape[-1]) if options["class_weights"] else None
    return F.multilabel_soft_margin_loss(out, batch["target"], weight=weight, reduction=reduction)


def _multilabel_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    target, classes = batch["target"], out.shape[-1]
    loss = target * jnp.logaddexp(-out, 0.0) + (1 - target) * jnp.logaddexp(out, 0.0)
    weight = 0.5 + jnp.arange(classes) if options["class_weights"] else jnp.ones(classes)
    return per_item(weight * loss / classes)


def _count_rows(options: Options, batch: Tensors) -> torch.Tensor:
    target = batch["target"]
    return torch.tensor(target[..., 0].numel(), device=target.device)


def _rows_per_item(options: Options, batch: Arguments) -> jax.Array:
    return elements_per_item(options, {"target": batch["target"][..., 0]})


KINDS = (
    LossDefinition(
        "bce_with_logits",
        on(*FLOATS, pos_weight=(False, True), weight=(False, True)),
        _targets,
        _with_logits,
        count_elements,
        _with_logits_items,
        elements_per_item,
    ),
    LossDefinition(
        "bce", on(*FLOATS, weight=(False, True)), _targets, _bce, count_elements, _bce_items, elements_per_item
    ),
    LossDefinition(
        "multilabel_soft_margin",
        on("vector", "sequence", class_weights=(False, True)),
        _targets,
        _multilabel,
        _count_rows,
        _multilabel_items,
        _rows_per_item,
    ),
)
