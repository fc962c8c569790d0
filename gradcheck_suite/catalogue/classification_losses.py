"""Losses over classes: cross entropy, binary and margin losses, and what all losses share.

Must not import a layer family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.catalogue.definitions import (
    FLOATS,
    Arguments,
    Arrays,
    LossDefinition,
    Options,
    Signal,
    Tensors,
    on,
)

# Helpers of the losses: accepted signals, drawn targets, divisors of the mean.
#
# Shapes: n is the number of items; `positions` are the axes with one prediction each: () for a vector, (T,) for a
# sequence, (H, W) for an image.


Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def positions(signal: Signal) -> tuple[int, ...]:
    """Return the lengths of an item's axes that have one prediction each."""
    return signal.size[1:] if signal.form == "image" else signal.size[:-1]


def at_positions(signal: Signal, ignored: Bools) -> Bools:
    """Return the ignored targets, (n, *positions), from those of shape (n,) or (n, T)."""
    where = positions(signal)
    per_item = ignored.reshape(len(ignored), *ignored.shape[1:], *(1,) * (len(where) + 1 - ignored.ndim))
    return np.broadcast_to(per_item, (len(ignored), *where))


def positive(rng: np.random.Generator, *shape: int) -> Floats:
    """Return weights or variances drawn uniformly between 1/4 and 2."""
    return rng.uniform(0.25, 2.0, shape)


def signs(rng: np.random.Generator, *shape: int) -> Floats:
    """Return drawn targets of -1 and 1, of which two thirds are -1 on average."""
    return np.where(rng.random(shape) < 1 / 3, 1.0, -1.0)


def normal_targets(signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools) -> Arrays:
    """Return standard normal targets, (n, *size)."""
    return {"target": rng.standard_normal((len(ignored), *signal.size))}


def sign_targets(signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools) -> Arrays:
    """Return targets of -1 and 1, (n, *size)."""
    return {"target": signs(rng, len(ignored), *signal.size)}


def count_elements(options: Options, batch: Tensors) -> torch.Tensor:
    """Return the number of elements of the target, a scalar."""
    target = batch["target"]
    return torch.tensor(target.numel(), device=target.device)


def elements_per_item(options: Options, batch: Arguments) -> jax.Array:
    """Return the number of elements of each item's target, (n,)."""
    target = batch["target"]
    return jnp.full(target.shape[0], float(np.prod(target.shape[1:], dtype=int)))


def count_items(options: Options, batch: Tensors) -> torch.Tensor:
    """Return the number of items, a scalar."""
    target = batch["target"]
    return torch.tensor(len(target), device=target.device)


def one_per_item(options: Options, batch: Arguments) -> jax.Array:
    """Return ones, (n,)."""
    return jnp.ones(batch["target"].shape[0])


def count_weights(options: Options, batch: Tensors) -> torch.Tensor:
    """Return the sum of the batch's weights in float64, so that a lower precision of the weights does not round it."""
    return batch["weight"].sum(dtype=torch.float64)


def weight_per_item(options: Options, batch: Arguments) -> jax.Array:
    """Return the sum of each item's weights, (n,)."""
    return per_item(batch["weight"])


def per_item(values: jax.Array) -> jax.Array:
    """Return the sum over every axis but the first, (n,)."""
    return values.reshape(values.shape[0], -1).sum(axis=1)


def never_uniform(signal: Signal, options: Options) -> bool:
    """Return False: `uniform` of a loss whose item counts depend on the data."""
    return False


def rows(out: torch.Tensor) -> torch.Tensor:
    """Return a sequence's output as (n * T, C), the shape that class losses are usually called with."""
    return out.flatten(0, 1) if out.ndim == 3 else out


def class_weights(out: torch.Tensor, classes: int) -> torch.Tensor:
    """Return the weight 0.5 + c of each class c, in the output's dtype and on its device."""
    return 0.5 + torch.arange(classes, dtype=out.dtype, device=out.device)


def classes_last(out: jax.Array) -> jax.Array:
    """Return an output with its class axis last; it is the second axis of an image."""
    return jnp.moveaxis(out, 1, -1) if out.ndim == 4 else out


def softplus(x: jax.Array) -> jax.Array:
    """Return torch's `softplus`: log(1 + e^x), and x where x is above 20."""
    return jnp.where(x > 20.0, x, jnp.logaddexp(x, 0.0))


def hinge(x: jax.Array) -> jax.Array:
    """Return max(x, 0) with derivative 1 at 0, as torch's `clamp_min`; the derivative of `jnp.maximum` is 1/2 there."""
    return jnp.where(x >= 0, x, 0.0)


def absolute(x: jax.Array) -> jax.Array:
    """Return |x| with derivative 0 at 0, as torch's `abs` and `l1_loss`; the derivative of `jnp.abs` is 1 there."""
    return jnp.sign(x) * x


def elementwise(
    name: str,
    torch_loss: Callable[[Options, torch.Tensor, Tensors, str], torch.Tensor],
    jax_loss: Callable[..., jax.Array],
    *,
    targets: Callable[[Signal, Options, np.random.Generator, Bools], Arrays] = normal_targets,
    **choices: Any,
) -> LossDefinition:
    """Return a loss that compares output and target element by element; its mean divides by the number of elements.

    Args:
        name: the kind's name in specs.
        torch_loss: (options, output, batch, reduction) -> the scalar loss.
        jax_loss: (output, target, **options) -> the loss of each element, in the output's shape.
        targets: draws the targets.
        choices: values of each option, the simplest first.
    """

    def jax_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
        return per_item(jax_loss(out, batch["target"], **{option: options[option] for option in choices}))

    return LossDefinition(
        name, on(*FLOATS, **choices), targets, torch_loss, count_elements, jax_items, elements_per_item
    )


# Losses over classes. A vector, each position of a sequence and each pixel has one class or one distribution.


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


CLASSIFICATION_KINDS = (
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


# Losses of binary predictions, one for each element.


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


BINARY_KINDS = (
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


# Margin losses, between classes, between vectors or from a threshold.
#
# Drawn data may hit their kinks: outputs of few digits meet a margin, and an output of exactly 0 has cosine 0 with
# every vector. There the functions for JAX have torch's derivative.


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


MARGIN_KINDS = (
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
