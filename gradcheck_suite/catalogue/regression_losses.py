"""Losses over values and distributions, losses that add up others, and kinds that are not separable over samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.scipy.special import xlogy

from gradcheck_suite.catalogue.activations import EPS
from gradcheck_suite.catalogue.classification_losses import (
    IGNORE_INDEX,
    Bools,
    absolute,
    class_targets,
    count_elements,
    count_items,
    count_targets,
    count_weights,
    elements_per_item,
    elementwise,
    ignores_targets,
    never_uniform,
    normal_targets,
    one_per_item,
    per_item,
    positive,
    rows,
    skewed_classes,
    softplus,
    targets_per_item,
    uniform_targets,
    weight_per_item,
)
from gradcheck_suite.catalogue.definitions import (
    FLOATS,
    ROWS,
    Arguments,
    Arrays,
    LayerDefinition,
    LossDefinition,
    Options,
    Signal,
    Tensors,
    keeps_signal,
    on,
    product,
)
from gradcheck_suite.errors import UsageError

# Losses between an output and a target of the same shape.


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


REGRESSION_KINDS = (
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


# Losses of predicted distributions: the Kullback-Leibler divergence and negative log-likelihoods.


POISSON_EPS = 1e-8
SMALLEST_VARIANCE = 0.125


def _kl_targets(signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools) -> Arrays:
    """Return drawn probabilities over the class axis, none below about 1/100, or their logarithms."""
    drawn = positive(rng, len(ignored), *signal.size) ** 2
    probabilities = drawn / drawn.sum(axis=1 if signal.form == "image" else -1, keepdims=True)
    return {"target": np.log(probabilities) if options["log_target"] else probabilities}


def _kl_div(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    log_probabilities = F.log_softmax(out, dim=1 if out.ndim == 4 else -1)
    target, log_target = batch["target"], options["log_target"]
    if reduction == "mean" and not options["batchmean"]:
        # `reduction="mean"` computes this mean, too, and warns at every call
        return F.kl_div(log_probabilities, target, reduction="none", log_target=log_target).mean()
    reduction = "batchmean" if reduction == "mean" else reduction
    return F.kl_div(log_probabilities, target, reduction=reduction, log_target=log_target)


def _kl_div_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    log_probabilities, target = jax.nn.log_softmax(out, axis=1 if out.ndim == 4 else -1), batch["target"]
    if options["log_target"]:
        return per_item(jnp.exp(target) * (target - log_probabilities))
    return per_item(xlogy(target, target) - target * log_probabilities)


def _kl_count(options: Options, batch: Tensors) -> torch.Tensor:
    return count_items(options, batch) if options["batchmean"] else count_elements(options, batch)


def _kl_counts(options: Options, batch: Arguments) -> jax.Array:
    return one_per_item(options, batch) if options["batchmean"] else elements_per_item(options, batch)


def _event_counts(signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools) -> Arrays:
    return {"target": rng.poisson(1.5, (len(ignored), *signal.size)).astype(np.float64)}


def _poisson_nll(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    log_input = options["log_input"]
    rate = out if log_input else F.softplus(out)
    return F.poisson_nll_loss(rate, batch["target"], log_input=log_input, eps=POISSON_EPS, reduction=reduction)


def _poisson_nll_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    target = batch["target"]
    if options["log_input"]:
        return per_item(jnp.exp(out) - target * out)
    rate = softplus(out)
    return per_item(rate - target * jnp.log(rate + POISSON_EPS))


def _gaussian_variants(signal: Signal) -> list[Options]:
    if signal.form == "tokens":
        return []
    return product(learned_variance=(False, True) if signal.features % 2 == 0 else (False,))


def _gaussian_targets(signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools) -> Arrays:
    if options["learned_variance"]:
        return normal_targets(signal.with_features(signal.features // 2), options, rng, ignored)
    targets = normal_targets(signal, options, rng, ignored)
    return {**targets, "variance": positive(rng, len(ignored), *signal.size)}


def _gaussian_nll(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    if not options["learned_variance"]:
        return F.gaussian_nll_loss(out, batch["target"], batch["variance"], reduction=reduction)
    mean, raw = out.chunk(2, dim=1 if out.ndim == 4 else -1)
    return F.gaussian_nll_loss(mean, batch["target"], F.softplus(raw) + SMALLEST_VARIANCE, reduction=reduction)


def _gaussian_nll_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    if options["learned_variance"]:
        mean, raw = jnp.split(out, 2, axis=1 if out.ndim == 4 else -1)
        variance = softplus(raw) + SMALLEST_VARIANCE
    else:
        mean, variance = out, batch["variance"]
    return per_item((jnp.log(variance) + (mean - batch["target"]) ** 2 / variance) / 2)


PROBABILISTIC_KINDS = (
    LossDefinition(
        "kl_div",
        on(*FLOATS, min_features=2, batchmean=(True, False), log_target=(False, True)),
        _kl_targets,
        _kl_div,
        _kl_count,
        _kl_div_items,
        _kl_counts,
    ),
    LossDefinition(
        "poisson_nll",
        on(*FLOATS, log_input=(True, False)),
        _event_counts,
        _poisson_nll,
        count_elements,
        _poisson_nll_items,
        elements_per_item,
    ),
    LossDefinition(
        "gaussian_nll",
        _gaussian_variants,
        _gaussian_targets,
        _gaussian_nll,
        count_elements,
        _gaussian_nll_items,
        elements_per_item,
    ),
)


# Objectives of several terms with one count, and losses of large logits.


SECOND = 0.5
"""Weight of the second term."""


def _mse_and_l1(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    target = batch["target"]
    return F.mse_loss(out, target, reduction=reduction) + SECOND * F.l1_loss(out, target, reduction=reduction)


def _mse_and_l1_elements(out: jax.Array, target: jax.Array) -> jax.Array:
    return (out - target) ** 2 + SECOND * absolute(out - target)


def _with_z_loss(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    """Return the cross entropy and the penalty on log(Z)^2 of A. Chowdhery et al. 2022 (PaLM), section 5."""
    logits, target = rows(out), batch["target"].flatten()
    penalty = logits.logsumexp(1)[target != IGNORE_INDEX] ** 2
    cross_entropy = F.cross_entropy(logits, target, ignore_index=IGNORE_INDEX, reduction=reduction)
    return cross_entropy + SECOND * (penalty.mean() if reduction == "mean" else penalty.sum())


def _with_z_loss_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    target, log_z = batch["target"], jax.nn.logsumexp(out, axis=-1)
    chosen = jnp.take_along_axis(out, jnp.where(target == IGNORE_INDEX, 0, target)[..., None], axis=-1)[..., 0]
    return per_item(jnp.where(target == IGNORE_INDEX, 0.0, log_z - chosen + SECOND * log_z**2))


def _distillation_targets(signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools) -> Arrays:
    teacher = rng.standard_normal((len(ignored), *signal.size))
    return {**skewed_classes(signal, rng, len(ignored)), "other": teacher}


def _distillation(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    """Return the cross entropy and the divergence from a teacher of G. Hinton et al. 2015, section 2."""
    student, teacher, temperature = rows(out), rows(batch["other"]), options["temperature"]
    log_student, log_teacher = ((logits / temperature).log_softmax(1) for logits in (student, teacher))
    soft = F.kl_div(log_student, log_teacher, log_target=True, reduction="sum")
    soft = soft / len(student) if reduction == "mean" else soft
    return F.cross_entropy(student, batch["target"].flatten(), reduction=reduction) + temperature**2 * soft


def _distillation_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    temperature = options["temperature"]
    hard = -jnp.take_along_axis(jax.nn.log_softmax(out), batch["target"][..., None], axis=-1)[..., 0]
    log_student, log_teacher = (jax.nn.log_softmax(logits / temperature) for logits in (out, batch["other"]))
    soft = (jnp.exp(log_teacher) * (log_teacher - log_student)).sum(axis=-1)
    return per_item(hard + temperature**2 * soft)


def _large_logits(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return F.cross_entropy(options["scale"] * rows(out), batch["target"].flatten(), reduction=reduction)


def _large_logits_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    log_probabilities = jax.nn.log_softmax(options["scale"] * out)
    return per_item(-jnp.take_along_axis(log_probabilities, batch["target"][..., None], axis=-1)[..., 0])


def _over_classes(
    name: str,
    torch_loss: Callable[[Options, torch.Tensor, Tensors, str], torch.Tensor],
    jax_items: Callable[[Options, jax.Array, Arguments], jax.Array],
    targets: Callable[[Signal, Options, np.random.Generator, Bools], Arrays] = class_targets,
    **choices: Any,
) -> LossDefinition:
    """Return a loss over classes that divides by the number of valid targets."""
    return LossDefinition(
        name,
        on(*ROWS, min_features=2, **choices),
        targets,
        torch_loss,
        count_targets,
        jax_items,
        targets_per_item,
        maskable=ignores_targets,
        uniform=uniform_targets,
    )


COMBINED_KINDS = (
    elementwise("mse_and_l1", _mse_and_l1, _mse_and_l1_elements),
    _over_classes("cross_entropy_and_z", _with_z_loss, _with_z_loss_items, ignore_index=(False, True)),
    _over_classes("distillation", _distillation, _distillation_items, _distillation_targets, temperature=(1.0, 4.0)),
    _over_classes("cross_entropy_of_large_logits", _large_logits, _large_logits_items, scale=(100.0, 10000.0)),
)


# Layers and losses that are not separable over samples, such as batch norm and in-batch negatives.
#
# No accumulation over micro-batches equals the large batch of such a problem. The strategies draw these kinds only
# for `problems(accumulable=False)`, to test that the forward-only check detects each of them before a loop is blamed.
# They have no JAX implementation, since their gradients are never compared.


class SequenceBatchNorm(torch.nn.BatchNorm1d):
    """`BatchNorm1d` over (n, T, D)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def _batch_norm(signal: Signal, options: Options) -> torch.nn.Module:
    module = {"vector": torch.nn.BatchNorm1d, "sequence": SequenceBatchNorm, "image": torch.nn.BatchNorm2d}
    return module[signal.form](signal.features, eps=EPS)


def _negatives(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    scores = out @ batch["target"].T
    return F.cross_entropy(scores, torch.arange(len(out), device=out.device), reduction=reduction)


def _product(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    mean = out.mean() * (1 + batch["target"].mean())
    return mean if reduction == "mean" else mean * len(out)


def _standardised(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    target = batch["target"]
    target = (target - target.mean(0)) / (target.var(0, correction=0) + EPS).sqrt()
    errors = ((out - target) ** 2).mean(1)
    return errors.mean() if reduction == "mean" else errors.sum()


def _count(options: Options, batch: Tensors) -> torch.Tensor:
    return torch.tensor(float(len(batch["target"])))


def _no_item_losses(options: Options, *arrays: jax.Array | Arguments) -> jax.Array:
    raise UsageError("a loss that is not separable over samples has no item losses")


def _loss(name: str, torch_loss: object) -> LossDefinition:
    return LossDefinition(
        name,
        on("vector"),
        normal_targets,
        torch_loss,  # type: ignore[arg-type]
        _count,
        _no_item_losses,
        _no_item_losses,
        drawn=False,
    )


LAYERS = (
    LayerDefinition(
        "batch_norm_train", on(*FLOATS), keeps_signal("batch_norm_train", *FLOATS), _batch_norm, trainable=True
    ),
)
LOSSES = (
    _loss("in_batch_negatives", _negatives),
    _loss("product_of_means", _product),
    _loss("standardised_targets", _standardised),
)
