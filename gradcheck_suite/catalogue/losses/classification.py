"""Losses over classes. A vector, each position of a sequence and each pixel has one class or one distribution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gradcheck_suite.catalogue.definitions import Arguments, Arrays, LossDefinition, Tensors
from gradcheck_suite.catalogue.losses.common import (
    Bools,
    at_positions,
    class_weights,
    classes_last,
    count_weights,
    never_uniform,
    per_item,
    positions,
    positive,
    rows,
    weight_per_item,
)
from gradcheck_suite.catalogue.signals import FLOATS, Options, Signal, on

F = torch.nn.functional
IGNORE_INDEX = -100
SMOOTHING = (0.0, 0.1)


def skewed_classes(signal: Signal, rng: np.random.Generator, items: int) -> Arrays:
    """Return drawn classes, (n, *positions), each class half as likely as the class before it."""
    odds = 0.5 ** np.arange(signal.features)
    return {"target": rng.choice(signal.features, (items, *positions(signal)), p=odds / odds.sum())}


def ignore_some(rng: np.random.Generator, ignored: Bools) -> Bools:
    """Return a mask of ignored positions, (n, *positions): those given and about a third of the others.

    At least one position of every item that has a valid one stays valid.

    Args:
        rng: the random generator.
        ignored: (n, *positions), the positions that are ignored already.
    """
    flat = ignored.reshape(len(ignored), -1)
    dropped = rng.random(flat.shape) < 1 / 3
    spared = np.where(flat, -1.0, rng.random(flat.shape)).argmax(axis=1)
    dropped[np.arange(len(flat)), spared] = False
    return (flat | dropped).reshape(ignored.shape)


def class_targets(signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools) -> Arrays:
    """Return drawn classes, (n, *positions), some of them `IGNORE_INDEX` if asked for."""
    target = skewed_classes(signal, rng, len(ignored))["target"]
    if options.get("ignore_index"):
        target = np.where(ignore_some(rng, at_positions(signal, ignored)), IGNORE_INDEX, target)
    return {"target": target}


def _cross_entropy(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    logits, target = rows(out), batch["target"]
    return F.cross_entropy(
        logits,
        target.flatten() if out.ndim == 3 else target,
        weight=class_weights(out, logits.shape[1]) if options["class_weights"] else None,
        ignore_index=IGNORE_INDEX,
        label_smoothing=options["label_smoothing"],
        reduction=reduction,
    )


def _nll(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    log_probabilities = F.log_softmax(out, dim=1 if out.ndim == 4 else -1)
    if out.ndim == 3:
        log_probabilities = log_probabilities.transpose(1, 2)
    return F.nll_loss(
        log_probabilities,
        batch["target"],
        weight=class_weights(out, log_probabilities.shape[1]) if options["class_weights"] else None,
        ignore_index=IGNORE_INDEX,
        reduction=reduction,
    )


def _weights(options: Options, classes: int) -> jax.Array:
    return 0.5 + jnp.arange(classes) if options["class_weights"] else jnp.ones(classes)


def _smoothed(options: Options, distribution: jax.Array) -> jax.Array:
    smoothing = options["label_smoothing"]
    return (1 - smoothing) * distribution + smoothing / distribution.shape[-1]


def _cross(options: Options, out: jax.Array, distribution: jax.Array) -> jax.Array:
    """Return -sum_c w_c q_c log p_c, (n, *positions); the last axis of `distribution` q is the classes."""
    log_probabilities = jax.nn.log_softmax(classes_last(out))
    return -(_weights(options, log_probabilities.shape[-1]) * distribution * log_probabilities).sum(axis=-1)


def _cross_entropy_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    target, classes = batch["target"], classes_last(out).shape[-1]
    loss = _cross(options, out, _smoothed(options, jax.nn.one_hot(target, classes, dtype=out.dtype)))
    return per_item(jnp.where(target == IGNORE_INDEX, 0.0, loss))


def _nll_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    return _cross_entropy_items({**options, "label_smoothing": 0.0}, out, batch)


def count_targets(options: Options, batch: Tensors) -> torch.Tensor:
    """Return the number of valid targets, or the sum of their class weights, a scalar."""
    counted = batch["target"][batch["target"] != IGNORE_INDEX]
    if options.get("class_weights"):
        return (0.5 + counted.to(torch.float64)).sum()
    return torch.tensor(counted.numel(), device=counted.device)


def targets_per_item(options: Options, batch: Arguments) -> jax.Array:
    """Return each item's number of valid targets, or the sum of their class weights, (n,)."""
    target = batch["target"]
    share = 0.5 + target if options.get("class_weights") else jnp.ones(target.shape)
    return per_item(jnp.where(target == IGNORE_INDEX, 0.0, share))


def ignores_targets(options: Options) -> bool:
    """Return whether some targets are ignored."""
    # the mean of no valid targets is 0/0, but torch's gradient of an ignored position is 0
    ignores: bool = options.get("ignore_index", False)
    return ignores


def uniform_targets(signal: Signal, options: Options) -> bool:
    """Return whether every item has the same count."""
    varies = ignores_targets(options) and positions(signal) != ()
    return not varies and not options.get("class_weights")


def _distributions(signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools) -> Arrays:
    """Return drawn Dirichlet(1/2, ..., 1/2) probabilities over the class axis."""
    drawn = rng.standard_gamma(0.5, (len(ignored), *signal.size))
    axis = 1 if signal.form == "image" else -1
    return {"target": drawn / drawn.sum(axis=axis, keepdims=True)}


def _soft_cross_entropy(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    logits = rows(out)
    return F.cross_entropy(
        logits,
        rows(batch["target"]),
        weight=class_weights(out, logits.shape[1]) if options["class_weights"] else None,
        label_smoothing=options["label_smoothing"],
        reduction=reduction,
    )


def _soft_cross_entropy_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    return per_item(_cross(options, out, _smoothed(options, classes_last(batch["target"]))))


def _count_positions(options: Options, batch: Tensors) -> torch.Tensor:
    # torch divides by the number of positions even with class weights, which scale the sum only
    target = batch["target"]
    return torch.tensor(target.numel() // target.shape[1 if target.ndim == 4 else -1], device=target.device)


def _positions_per_item(options: Options, batch: Arguments) -> jax.Array:
    return jnp.full(batch["target"].shape[0], float(np.prod(classes_last(batch["target"]).shape[1:-1], dtype=int)))


def _weighted_targets(signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools) -> Arrays:
    # a loss mask gives padding the weight 0
    weight = np.where(at_positions(signal, ignored), 0.0, positive(rng, len(ignored), *positions(signal)))
    return {**skewed_classes(signal, rng, len(ignored)), "weight": weight}


def _weighted_cross_entropy(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    target, weight = batch["target"], batch["weight"]
    if out.ndim == 3:
        target, weight = target.flatten(), weight.flatten()
    loss = F.cross_entropy(rows(out), target, reduction="none")
    if options["gamma"]:
        loss = (1 - torch.exp(-loss)) ** options["gamma"] * loss
    total = (weight * loss).sum()
    return total / weight.sum() if reduction == "mean" else total


def _weighted_cross_entropy_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    log_probabilities = jax.nn.log_softmax(classes_last(out))
    log_p = jnp.take_along_axis(log_probabilities, batch["target"][..., None], axis=-1)[..., 0]
    focus = (1 - jnp.exp(log_p)) ** options["gamma"] if options["gamma"] else 1.0
    return per_item(-batch["weight"] * focus * log_p)


KINDS = (
    LossDefinition(
        "cross_entropy",
        on(*FLOATS, min_features=2, ignore_index=(False, True), label_smoothing=SMOOTHING, class_weights=(False, True)),
        class_targets,
        _cross_entropy,
        count_targets,
        _cross_entropy_items,
        targets_per_item,
        maskable=ignores_targets,
        uniform=uniform_targets,
    ),
    LossDefinition(
        "soft_cross_entropy",
        on(*FLOATS, min_features=2, label_smoothing=SMOOTHING, class_weights=(False, True)),
        _distributions,
        _soft_cross_entropy,
        _count_positions,
        _soft_cross_entropy_items,
        _positions_per_item,
    ),
    LossDefinition(
        "nll",
        on(*FLOATS, min_features=2, ignore_index=(False, True), class_weights=(False, True)),
        class_targets,
        _nll,
        count_targets,
        _nll_items,
        targets_per_item,
        maskable=ignores_targets,
        uniform=uniform_targets,
    ),
    LossDefinition(
        "weighted_cross_entropy",
        on(*FLOATS, min_features=2, gamma=(0.0, 2.0)),
        _weighted_targets,
        _weighted_cross_entropy,
        count_weights,
        _weighted_cross_entropy_items,
        weight_per_item,
        uniform=never_uniform,
    ),
)
