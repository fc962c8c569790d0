"""Margin losses, between classes, between vectors or from a threshold.

Drawn data may hit their kinks: outputs of few digits meet a margin, and an output of exactly 0 has cosine 0 with every
vector. There the functions for JAX have torch's derivative.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gradcheck_suite.catalogue.definitions import Arguments, Arrays, LossDefinition, Tensors
from gradcheck_suite.catalogue.losses.classification import skewed_classes
from gradcheck_suite.catalogue.losses.common import (
    Bools,
    class_weights,
    count_elements,
    count_items,
    elements_per_item,
    elementwise,
    hinge,
    normal_targets,
    one_per_item,
    per_item,
    rows,
    sign_targets,
    signs,
)
from gradcheck_suite.catalogue.signals import FLOATS, Options, Signal, on

F = torch.nn.functional
COSINE_EPS = float(np.float32(1e-12))
"""torch's addend to both squared norms of a cosine embedding: a float32 constant for every dtype."""
TRIPLET_EPS = 1e-6
"""torch's addend to every difference in a triplet's distances."""


def _hinge_embedding(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return F.hinge_embedding_loss(out, batch["target"], margin=options["margin"], reduction=reduction)


def _hinge_embedding_elements(out: jax.Array, target: jax.Array, margin: float) -> jax.Array:
    return jnp.where(target == 1, out, hinge(margin - out))


def _soft_margin(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return F.soft_margin_loss(out, batch["target"], reduction=reduction)


def _soft_margin_elements(out: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.logaddexp(-target * out, 0.0)


def _classes(signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools) -> Arrays:
    return skewed_classes(signal, rng, len(ignored))


def _multi_margin(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return F.multi_margin_loss(
        rows(out),
        batch["target"].flatten(),
        p=options["p"],
        margin=options["margin"],
        weight=class_weights(out, out.shape[-1]) if options["class_weights"] else None,
        reduction=reduction,
    )


def _multi_margin_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    classes = out.shape[-1]
    right = jax.nn.one_hot(batch["target"], classes, dtype=out.dtype)
    score = (right * out).sum(axis=-1, keepdims=True)
    over = options["margin"] - score + out
    # at 0 the derivative is 0, unlike that of the other losses with a margin
    loss = ((1 - right) * jnp.where(over > 0, over, 0.0) ** options["p"]).sum(axis=-1) / classes
    # torch's documentation has the weight inside the power, its implementation outside
    return per_item((0.5 + batch["target"]) * loss if options["class_weights"] else loss)


def _with_another(signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools) -> Arrays:
    return {"target": signs(rng, len(ignored)), "other": rng.standard_normal((len(ignored), *signal.size))}


def _cosine(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return F.cosine_embedding_loss(out, batch["other"], batch["target"], margin=options["margin"], reduction=reduction)


def _cosine_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    other = batch["other"]
    squares = ((out**2).sum(axis=-1) + COSINE_EPS) * ((other**2).sum(axis=-1) + COSINE_EPS)
    cosine = (out * other).sum(axis=-1) / jnp.sqrt(squares)
    return jnp.where(batch["target"] == 1, 1 - cosine, hinge(cosine - options["margin"]))


def _pair(signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools) -> Arrays:
    target = normal_targets(signal, options, rng, ignored)["target"]
    return {"target": target, "other": rng.standard_normal(target.shape)}


def _triplet(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return F.triplet_margin_loss(
        out, batch["target"], batch["other"], margin=options["margin"], eps=TRIPLET_EPS, reduction=reduction
    )


def _triplet_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    def distance(to: jax.Array) -> jax.Array:
        return jnp.sqrt(((out - to + TRIPLET_EPS) ** 2).sum(axis=-1))

    return hinge(distance(batch["target"]) - distance(batch["other"]) + options["margin"])


def _ranked(signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools) -> Arrays:
    target = sign_targets(signal, options, rng, ignored)["target"]
    return {"target": target, "other": rng.standard_normal(target.shape)}


def _ranking(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return F.margin_ranking_loss(out, batch["other"], batch["target"], margin=options["margin"], reduction=reduction)


def _ranking_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    return per_item(hinge(options["margin"] - batch["target"] * (out - batch["other"])))


KINDS = (
    elementwise(
        "hinge_embedding", _hinge_embedding, _hinge_embedding_elements, targets=sign_targets, margin=(1.0, 0.5)
    ),
    elementwise("soft_margin", _soft_margin, _soft_margin_elements, targets=sign_targets),
    LossDefinition(
        "multi_margin",
        on("vector", "sequence", min_features=2, p=(1, 2), margin=(1.0,), class_weights=(False, True)),
        _classes,
        _multi_margin,
        count_elements,
        _multi_margin_items,
        elements_per_item,
    ),
    LossDefinition(
        "cosine_embedding",
        # the cosine of vectors of one feature is constant but for its sign
        on("vector", min_features=2, margin=(0.0, 0.25)),
        _with_another,
        _cosine,
        count_items,
        _cosine_items,
        one_per_item,
    ),
    LossDefinition(
        "triplet_margin",
        # with one feature the two distances mostly differ by a constant, and the gradient is 0
        on("vector", min_features=2, margin=(1.0, 0.5)),
        _pair,
        _triplet,
        count_items,
        _triplet_items,
        one_per_item,
    ),
    LossDefinition(
        "margin_ranking",
        on(*FLOATS, margin=(0.0, 0.5)),
        _ranked,
        _ranking,
        count_elements,
        _ranking_items,
        elements_per_item,
    ),
)
