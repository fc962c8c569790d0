"""Objectives of several terms with one count, and losses of large logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gradcheck_suite.catalogue.definitions import Arguments, Arrays, LossDefinition, Tensors
from gradcheck_suite.catalogue.losses.classification import (
    IGNORE_INDEX,
    class_targets,
    count_targets,
    ignores_targets,
    skewed_classes,
    targets_per_item,
    uniform_targets,
)
from gradcheck_suite.catalogue.losses.common import Bools, absolute, elementwise, per_item, rows
from gradcheck_suite.catalogue.signals import ROWS, Options, Signal, on

F = torch.nn.functional
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


KINDS = (
    elementwise("mse_and_l1", _mse_and_l1, _mse_and_l1_elements),
    _over_classes("cross_entropy_and_z", _with_z_loss, _with_z_loss_items, ignore_index=(False, True)),
    _over_classes("distillation", _distillation, _distillation_items, _distillation_targets, temperature=(1.0, 4.0)),
    _over_classes("cross_entropy_of_large_logits", _large_logits, _large_logits_items, scale=(100.0, 10000.0)),
)
