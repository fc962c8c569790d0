"""Losses of predicted distributions: the Kullback-Leibler divergence and negative log-likelihoods."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.scipy.special import xlogy

from gradcheck_suite.catalogue.definitions import Arguments, Arrays, LossDefinition, Tensors
from gradcheck_suite.catalogue.losses.common import (
    Bools,
    count_elements,
    count_items,
    elements_per_item,
    normal_targets,
    one_per_item,
    per_item,
    positive,
    softplus,
)
from gradcheck_suite.catalogue.signals import FLOATS, Options, Signal, on, product

F = torch.nn.functional
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


KINDS = (
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
