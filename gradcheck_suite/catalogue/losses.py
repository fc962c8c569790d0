"""Losses: of values, classes, distributions, margins and several terms, and some that are not
separable over samples.

Shapes: n is the number of items; `positions` are the axes with one prediction each: () for a
vector, (T,) for a sequence, (H, W) for an image. A vector, each position of a sequence and each
pixel has one class or one distribution.

torch's functions are written as their users write them; scripts of counterexamples copy them by
their source. Drawn data may hit kinks: outputs of few digits meet a margin, and an output of
exactly 0 has cosine 0 with every vector. There JAX's functions have torch's derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch
from jax.scipy.special import xlogy

from gradcheck_suite.catalogue.definitions import (
    FLOATS,
    ROWS,
    SHARES_TIES,
    Arguments,
    Arrays,
    Bools,
    Floats,
    Form,
    JaxLoss,
    LossDefinition,
    Options,
    Signal,
    Targets,
    Tensors,
    TorchLoss,
    count_elements,
    elements_per_item,
    feature_axis,
    on,
    vector,
)
from gradcheck_suite.catalogue.positions import EPS
from gradcheck_suite.core.case import read_slopes
from gradcheck_suite.errors import UsageError

F = torch.nn.functional
IGNORE_INDEX = -100
SMOOTHING = (0.0, 0.1)
SECOND = 0.5
"""Weight of the second term of an objective of two terms."""

# Drawn targets


def at_positions(signal: Signal, ignored: Bools) -> Bools:
    """Return the ignored targets, (n, *positions), from those of shape (n,) or (n, T)."""
    where = signal.positions
    per_item = ignored.reshape(
        len(ignored), *ignored.shape[1:], *(1,) * (len(where) + 1 - ignored.ndim)
    )
    return np.broadcast_to(per_item, (len(ignored), *where))


def positive(rng: np.random.Generator, *shape: int) -> Floats:
    """Return weights or variances drawn uniformly between 1/4 and 2."""
    return rng.uniform(0.25, 2.0, shape)


def drawn_signs(rng: np.random.Generator, *shape: int) -> Floats:
    """Return drawn targets of -1 and 1, of which two thirds are -1 on average."""
    return np.where(rng.random(shape) < 1 / 3, 1.0, -1.0)


def normal_targets(
    signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools
) -> Arrays:
    """Return standard normal targets, (n, *size)."""
    return {"target": rng.standard_normal((len(ignored), *signal.size))}


def sign_targets(
    signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools
) -> Arrays:
    """Return targets of -1 and 1, (n, *size)."""
    return {"target": drawn_signs(rng, len(ignored), *signal.size)}


def _with_other(targets: Targets) -> Targets:
    """Return `targets` with a second normal array, (n, *size)."""

    def drawn(signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools) -> Arrays:
        arrays = targets(signal, options, rng, ignored)
        return {**arrays, "other": rng.standard_normal((len(ignored), *signal.size))}

    return drawn


def ignore_some(rng: np.random.Generator, ignored: Bools) -> Bools:
    """Return a mask of ignored positions, (n, *positions): those given and about a third of the
    others.

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


def class_targets(
    signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools
) -> Arrays:
    """Return drawn classes, (n, *positions), some of them `IGNORE_INDEX` if asked for.

    Each class is half as likely as the class before it.
    """
    odds = 0.5 ** np.arange(signal.features)
    target = rng.choice(signal.features, (len(ignored), *signal.positions), p=odds / odds.sum())
    if options.get("ignore_index"):
        target = np.where(ignore_some(rng, at_positions(signal, ignored)), IGNORE_INDEX, target)
    return {"target": target}


def _weighted_class_targets(
    signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools
) -> Arrays:
    # a loss mask gives padding the weight 0
    weight = np.where(
        at_positions(signal, ignored), 0.0, positive(rng, len(ignored), *signal.positions)
    )
    return {**class_targets(signal, options, rng, ignored), "weight": weight}


def _normalised(drawn: Floats, signal: Signal) -> Floats:
    """Return probabilities over the class axis."""
    return drawn / drawn.sum(axis=feature_axis(signal), keepdims=True)


def _distributions(
    signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools
) -> Arrays:
    """Return drawn Dirichlet(1/2, ..., 1/2) probabilities over the class axis."""
    return {"target": _normalised(rng.standard_gamma(0.5, (len(ignored), *signal.size)), signal)}


def _binary_targets(
    signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools
) -> Arrays:
    """Return drawn targets of 0 and 1, of which three quarters are 0 on average, and element
    weights if asked for.
    """
    shape = (len(ignored), *signal.size)
    arrays: Arrays = {"target": (rng.random(shape) < 0.25).astype(np.float64)}
    return {**arrays, "weight": positive(rng, *shape)} if options.get("weight") else arrays


def _kl_targets(
    signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools
) -> Arrays:
    """Return drawn probabilities over the class axis, none below about 1/100, or their logarithms."""
    probabilities = _normalised(positive(rng, len(ignored), *signal.size) ** 2, signal)
    return {"target": np.log(probabilities) if options["log_target"] else probabilities}


def _gaussian_targets(
    signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools
) -> Arrays:
    if options["learned_variance"]:
        return normal_targets(signal.with_features(signal.features // 2), options, rng, ignored)
    targets = normal_targets(signal, options, rng, ignored)
    return {**targets, "variance": positive(rng, len(ignored), *signal.size)}


def _distillation_targets(
    signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools
) -> Arrays:
    teacher = rng.standard_normal((len(ignored), *signal.size))
    return {**class_targets(signal, options, rng, ignored), "other": teacher}


def _probe_targets(
    signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools
) -> Arrays:
    arrays = {"target": np.ones(len(ignored))}
    if "slopes" in options:
        arrays["weight"] = np.array(read_slopes(options["slopes"], len(ignored)))
    return arrays


# Divisors of the mean


def count_items(options: Options, batch: Tensors) -> torch.Tensor:
    """Return the number of items, a scalar."""
    target = batch["target"]
    return torch.tensor(len(target), device=target.device)


def one_per_item(options: Options, batch: Arguments) -> jax.Array:
    """Return ones, (n,)."""
    return jnp.ones(batch["target"].shape[0])


def count_weights(options: Options, batch: Tensors) -> torch.Tensor:
    """Return the sum of the batch's weights in float64, so that a lower precision of the weights
    does not round it.
    """
    return batch["weight"].sum(dtype=torch.float64)


def weight_per_item(options: Options, batch: Arguments) -> jax.Array:
    """Return the sum of each item's weights, (n,)."""
    return per_item(batch["weight"])


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
    varies = ignores_targets(options) and signal.positions != ()
    return not varies and not options.get("class_weights")


def _count_positions(options: Options, batch: Tensors) -> torch.Tensor:
    # torch divides by the number of positions even with class weights, which scale the sum only
    target = batch["target"]
    return torch.tensor(target.numel() // target.shape[class_axis(target)], device=target.device)


def _positions_per_item(options: Options, batch: Arguments) -> jax.Array:
    return jnp.full(
        batch["target"].shape[0],
        float(np.prod(classes_last(batch["target"]).shape[1:-1], dtype=int)),
    )


def _kl_count(options: Options, batch: Tensors) -> torch.Tensor:
    return count_items(options, batch) if options["batchmean"] else count_elements(options, batch)


def _kl_counts(options: Options, batch: Arguments) -> jax.Array:
    return (
        one_per_item(options, batch) if options["batchmean"] else elements_per_item(options, batch)
    )


# Helpers of the implementations, in torch and in JAX


def class_axis(array: torch.Tensor | jax.Array | npt.NDArray[Any]) -> int:
    """Return the axis of an output that holds the classes: the second one of an image, the last one
    otherwise.
    """
    return 1 if array.ndim == 4 else -1


def rows(out: torch.Tensor) -> torch.Tensor:
    """Return a sequence's output as (n * T, C), the shape that class losses are usually called
    with.
    """
    return out.flatten(0, 1) if out.ndim == 3 else out


def class_weights(options: Options, out: torch.Tensor) -> torch.Tensor | None:
    """Return the weight 0.5 + c of each class c, the second axis of the output.

    None for classes without weights.
    """
    if not options["class_weights"]:
        return None
    return 0.5 + torch.arange(out.shape[1], dtype=out.dtype, device=out.device)


def per_item(values: jax.Array) -> jax.Array:
    """Return the sum over every axis but the first, (n,)."""
    return values.reshape(values.shape[0], -1).sum(axis=1)


def classes_last(out: jax.Array) -> jax.Array:
    """Return an output with its class axis last."""
    return jnp.moveaxis(out, class_axis(out), -1)


def _of_class(values: jax.Array, target: jax.Array) -> jax.Array:
    """Return the values of the target classes, which the last axis holds."""
    return jnp.take_along_axis(values, target[..., None], axis=-1)[..., 0]


def _weights(options: Options, classes: int) -> jax.Array:
    return 0.5 + jnp.arange(classes) if options["class_weights"] else jnp.ones(classes)


def softplus(x: jax.Array) -> jax.Array:
    """Return torch's `softplus`: log(1 + e^x), and x where x is above 20."""
    return jnp.where(x > 20.0, x, jnp.logaddexp(x, 0.0))


def hinge(x: jax.Array) -> jax.Array:
    """Return max(x, 0) with the derivative of torch's `clamp_min` at 0: 1 before torch 2.14, then 0.

    The derivative of `jnp.maximum` is 1/2 there.
    """
    return jnp.where(x > 0 if SHARES_TIES else x >= 0, x, 0.0)


def absolute(x: jax.Array) -> jax.Array:
    """Return |x| with derivative 0 at 0, as torch's `abs` and `l1_loss`.

    The derivative of `jnp.abs` is 1 there.
    """
    return jnp.sign(x) * x


# Losses between an output and a target of the same shape


def _mse(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return F.mse_loss(out, batch["target"], reduction=reduction)


def _l1(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return F.l1_loss(out, batch["target"], reduction=reduction)


def _smooth_l1(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return F.smooth_l1_loss(
        out,
        batch["target"],
        beta=options["beta"],
        reduction=reduction,
    )


def _smooth_l1_in_jax(out: jax.Array, target: jax.Array, beta: float) -> jax.Array:
    error = jnp.abs(out - target)
    return jnp.where(error < beta, error**2 / (2 * beta), error - beta / 2)


def _huber(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return F.huber_loss(
        out,
        batch["target"],
        delta=options["delta"],
        reduction=reduction,
    )


def _mse_and_l1(
    options: Options, out: torch.Tensor, batch: Tensors, reduction: str
) -> torch.Tensor:
    target = batch["target"]
    return F.mse_loss(out, target, reduction=reduction) + SECOND * F.l1_loss(
        out, target, reduction=reduction
    )


def _hinge_embedding(
    options: Options, out: torch.Tensor, batch: Tensors, reduction: str
) -> torch.Tensor:
    return F.hinge_embedding_loss(
        out, batch["target"], margin=options["margin"], reduction=reduction
    )


def _soft_margin(
    options: Options, out: torch.Tensor, batch: Tensors, reduction: str
) -> torch.Tensor:
    return F.soft_margin_loss(out, batch["target"], reduction=reduction)


def _weighted_mse(
    options: Options, out: torch.Tensor, batch: Tensors, reduction: str
) -> torch.Tensor:
    weight = batch["weight"]
    total = (weight * F.mse_loss(out, batch["target"], reduction="none").flatten(1).mean(1)).sum()
    return total / weight.sum() if reduction == "mean" else total


def _weighted_mse_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    error = (out - batch["target"]) ** 2
    return batch["weight"] * error.reshape(error.shape[0], -1).mean(axis=1)


# Losses over classes


def _cross_entropy(
    options: Options, out: torch.Tensor, batch: Tensors, reduction: str
) -> torch.Tensor:
    logits = rows(out)
    target = batch["target"]
    return F.cross_entropy(
        logits,
        target.flatten(0, 1) if out.ndim == 3 else target,
        weight=class_weights(options, logits),
        ignore_index=IGNORE_INDEX,
        label_smoothing=options["label_smoothing"],
        reduction=reduction,
    )


def _cross(options: Options, out: jax.Array, distribution: jax.Array) -> jax.Array:
    """Return -sum_c w_c q_c log p_c, (n, *positions), for a distribution q that is smoothed first;
    classes last.
    """
    smoothing = options["label_smoothing"]
    classes = distribution.shape[-1]
    smoothed = (1 - smoothing) * distribution + smoothing / classes
    return -(_weights(options, classes) * smoothed * jax.nn.log_softmax(classes_last(out))).sum(
        axis=-1
    )


def _is_target(target: jax.Array, classes: int) -> jax.Array:
    """Return for each class, on a last axis, whether it is the target.

    A choice by it leaves the other classes out. The product with a one-hot array does not: 0 times
    an infinite logarithm is NaN, unless XLA's simplifications make a choice of the product.
    """
    return target[..., None] == jnp.arange(classes)


def _cross_entropy_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    target = batch["target"]
    classes = out.shape[class_axis(out)]
    chosen = _is_target(target, classes)
    if options["label_smoothing"]:
        loss = _cross(options, out, chosen.astype(out.dtype))
    else:
        log_p = _weights(options, classes) * jax.nn.log_softmax(classes_last(out))
        loss = -jnp.where(chosen, log_p, 0.0).sum(axis=-1)
    return per_item(jnp.where(target == IGNORE_INDEX, 0.0, loss))


def _soft_cross_entropy_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    return per_item(_cross(options, out, classes_last(batch["target"])))


def _nll(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    log_probabilities = F.log_softmax(out, dim=class_axis(out))
    # nll_loss has the classes on the second axis
    if out.ndim == 3:
        log_probabilities = log_probabilities.transpose(1, 2)
    return F.nll_loss(
        log_probabilities,
        batch["target"],
        weight=class_weights(options, log_probabilities),
        ignore_index=IGNORE_INDEX,
        reduction=reduction,
    )


def _weighted_cross_entropy(
    options: Options, out: torch.Tensor, batch: Tensors, reduction: str
) -> torch.Tensor:
    target = batch["target"]
    weight = batch["weight"]
    if out.ndim == 3:
        target = target.flatten()
        weight = weight.flatten()
    loss = F.cross_entropy(rows(out), target, reduction="none")
    if options["gamma"]:
        loss = (1 - torch.exp(-loss)) ** options["gamma"] * loss
    total = (weight * loss).sum()
    return total / weight.sum() if reduction == "mean" else total


def _weighted_cross_entropy_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    log_p = _of_class(jax.nn.log_softmax(classes_last(out)), batch["target"])
    focus = (1 - jnp.exp(log_p)) ** options["gamma"] if options["gamma"] else 1.0
    return per_item(-batch["weight"] * focus * log_p)


def _with_z_loss(
    options: Options, out: torch.Tensor, batch: Tensors, reduction: str
) -> torch.Tensor:
    """Return the cross entropy and a penalty on log(Z)^2, Z the sum of the exponentials.

    Source: A. Chowdhery et al., PaLM (2022), section 5.
    """
    logits = rows(out)
    target = batch["target"].flatten()
    penalty = logits.logsumexp(1)[target != IGNORE_INDEX] ** 2
    cross_entropy = F.cross_entropy(
        logits,
        target,
        ignore_index=IGNORE_INDEX,
        reduction=reduction,
    )
    return cross_entropy + SECOND * (penalty.mean() if reduction == "mean" else penalty.sum())


def _with_z_loss_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    target = batch["target"]
    log_z = jax.nn.logsumexp(out, axis=-1)
    # JAX returns NaN for an index outside, and the derivative of `where` is NaN where the branch
    # not taken is
    chosen = _of_class(out, jnp.where(target == IGNORE_INDEX, 0, target))
    return per_item(jnp.where(target == IGNORE_INDEX, 0.0, log_z - chosen + SECOND * log_z**2))


def _distillation(
    options: Options, out: torch.Tensor, batch: Tensors, reduction: str
) -> torch.Tensor:
    """Return the cross entropy and the divergence from a teacher's probabilities.

    Source: G. Hinton et al., Distilling the knowledge in a neural network (2015), section 2.
    """
    student = rows(out)
    teacher = rows(batch["other"])
    temperature = options["temperature"]
    log_student, log_teacher = (
        (logits / temperature).log_softmax(1) for logits in (student, teacher)
    )
    soft = F.kl_div(
        log_student,
        log_teacher,
        log_target=True,
        reduction="sum",
    )
    soft = soft / len(student) if reduction == "mean" else soft
    return (
        F.cross_entropy(student, batch["target"].flatten(), reduction=reduction)
        + temperature**2 * soft
    )


def _distillation_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    temperature = options["temperature"]
    hard = -_of_class(jax.nn.log_softmax(out), batch["target"])
    log_student, log_teacher = (
        jax.nn.log_softmax(logits / temperature) for logits in (out, batch["other"])
    )
    soft = (jnp.exp(log_teacher) * (log_teacher - log_student)).sum(axis=-1)
    return per_item(hard + temperature**2 * soft)


def _large_logits(
    options: Options, out: torch.Tensor, batch: Tensors, reduction: str
) -> torch.Tensor:
    return F.cross_entropy(
        options["scale"] * rows(out), batch["target"].flatten(), reduction=reduction
    )


def _large_logits_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    return per_item(-_of_class(jax.nn.log_softmax(options["scale"] * out), batch["target"]))


# Losses of binary predictions, one for each element


CLOSEST = 2.0**-7
"""Distance from 0 or 1 at which a probability is clamped. CLOSEST and 1 - CLOSEST are exact in every dtype."""


def _with_logits(
    options: Options, out: torch.Tensor, batch: Tensors, reduction: str
) -> torch.Tensor:
    pos_weight = None
    if options["pos_weight"]:
        pos_weight = 0.5 + torch.arange(
            out.shape[class_axis(out)], dtype=out.dtype, device=out.device
        )
        pos_weight = pos_weight[:, None, None] if out.ndim == 4 else pos_weight
    return F.binary_cross_entropy_with_logits(
        out, batch["target"], weight=batch.get("weight"), pos_weight=pos_weight, reduction=reduction
    )


def _with_logits_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    target = batch["target"]
    weight_of_yes = jnp.ones(())
    if options["pos_weight"]:
        weight_of_yes = 0.5 + jnp.arange(out.shape[class_axis(out)])
        weight_of_yes = weight_of_yes[:, None, None] if out.ndim == 4 else weight_of_yes
    log_yes = -jnp.logaddexp(-out, 0.0)
    log_no = -jnp.logaddexp(out, 0.0)
    loss = -(weight_of_yes * target * log_yes + (1 - target) * log_no)
    return per_item(batch["weight"] * loss if options["weight"] else loss)


def _bce(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    # torch clamps each logarithm at -100, with another derivative:
    # https://pytorch.org/docs/stable/generated/torch.nn.BCELoss.html
    probability = torch.sigmoid(out).clamp(CLOSEST, 1 - CLOSEST)
    weight = batch.get("weight")
    if weight is None:
        return F.binary_cross_entropy(probability, batch["target"], reduction=reduction)
    # what the function calls after it has asked for the shapes to broadcast, which imports sympy:
    # half a second (torch/nn/functional.py)
    number = {"none": 0, "mean": 1, "sum": 2}[reduction]
    return torch.ops.aten.binary_cross_entropy(probability, batch["target"], weight, number)


def _bce_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    target = batch["target"]
    p = jax.nn.sigmoid(out)
    p = jnp.where(p < CLOSEST, CLOSEST, jnp.where(p > 1 - CLOSEST, 1 - CLOSEST, p))
    loss = -(target * jnp.log(p) + (1 - target) * jnp.log1p(-p))
    return per_item(batch["weight"] * loss if options["weight"] else loss)


def _multilabel(
    options: Options, out: torch.Tensor, batch: Tensors, reduction: str
) -> torch.Tensor:
    weight = class_weights(options, rows(out))
    return F.multilabel_soft_margin_loss(
        out,
        batch["target"],
        weight=weight,
        reduction=reduction,
    )


def _multilabel_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    target = batch["target"]
    classes = out.shape[-1]
    loss = target * jnp.logaddexp(-out, 0.0) + (1 - target) * jnp.logaddexp(out, 0.0)
    return per_item(_weights(options, classes) * loss / classes)


# Losses of predicted distributions: the Kullback-Leibler divergence and negative log-likelihoods


POISSON_EPS = 1e-8
SMALLEST_VARIANCE = 0.125


def _kl_div(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    log_probabilities = F.log_softmax(out, dim=class_axis(out))
    target = batch["target"]
    log_target = options["log_target"]
    if reduction == "mean" and not options["batchmean"]:
        # `reduction="mean"` computes this mean, too, and warns at every call
        return F.kl_div(log_probabilities, target, reduction="none", log_target=log_target).mean()
    reduction = "batchmean" if reduction == "mean" else reduction
    return F.kl_div(
        log_probabilities,
        target,
        reduction=reduction,
        log_target=log_target,
    )


def _kl_div_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    log_probabilities = jax.nn.log_softmax(out, axis=class_axis(out))
    target = batch["target"]
    if options["log_target"]:
        return per_item(jnp.exp(target) * (target - log_probabilities))
    return per_item(xlogy(target, target) - target * log_probabilities)


def _poisson_nll(
    options: Options, out: torch.Tensor, batch: Tensors, reduction: str
) -> torch.Tensor:
    log_input = options["log_input"]
    rate = out if log_input else F.softplus(out)
    return F.poisson_nll_loss(
        rate, batch["target"], log_input=log_input, eps=POISSON_EPS, reduction=reduction
    )


def _poisson_nll_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    target = batch["target"]
    if options["log_input"]:
        return per_item(jnp.exp(out) - target * out)
    rate = softplus(out)
    return per_item(rate - target * jnp.log(rate + POISSON_EPS))


def _gaussian_nll(
    options: Options, out: torch.Tensor, batch: Tensors, reduction: str
) -> torch.Tensor:
    if not options["learned_variance"]:
        return F.gaussian_nll_loss(
            out,
            batch["target"],
            batch["variance"],
            reduction=reduction,
        )
    mean, raw = out.chunk(2, dim=class_axis(out))
    return F.gaussian_nll_loss(
        mean, batch["target"], F.softplus(raw) + SMALLEST_VARIANCE, reduction=reduction
    )


def _gaussian_nll_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    if options["learned_variance"]:
        mean, raw = jnp.split(out, 2, axis=class_axis(out))
        variance = softplus(raw) + SMALLEST_VARIANCE
    else:
        mean = out
        variance = batch["variance"]
    return per_item((jnp.log(variance) + (mean - batch["target"]) ** 2 / variance) / 2)


# Margin losses, between classes, between vectors or from a threshold


COSINE_EPS = float(np.float32(1e-12))
"""torch's addend to both squared norms of a cosine embedding: a float32 constant for every dtype."""
TRIPLET_EPS = 1e-6
"""torch's addend to every difference in a triplet's distances."""


def _multi_margin(
    options: Options, out: torch.Tensor, batch: Tensors, reduction: str
) -> torch.Tensor:
    return F.multi_margin_loss(
        rows(out),
        batch["target"].flatten(),
        p=options["p"],
        margin=options["margin"],
        weight=class_weights(options, rows(out)),
        reduction=reduction,
    )


def _multi_margin_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    classes = out.shape[-1]
    right = _is_target(batch["target"], classes)
    score = jnp.where(right, out, 0.0).sum(axis=-1, keepdims=True)
    over = options["margin"] - score + out
    # at 0 the derivative is 0, unlike that of the other losses with a margin
    above = jnp.where(over > 0, over, 0.0) ** options["p"]
    loss = jnp.where(right, 0.0, above).sum(axis=-1) / classes
    # torch's documentation has the weight inside the power, its implementation outside
    return per_item((0.5 + batch["target"]) * loss if options["class_weights"] else loss)


def _cosine(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return F.cosine_embedding_loss(
        out, batch["other"], batch["target"], margin=options["margin"], reduction=reduction
    )


def _cosine_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    other = batch["other"]
    of_out = (out**2).sum(axis=-1) + COSINE_EPS
    of_other = (other**2).sum(axis=-1) + COSINE_EPS
    cosine = (out * other).sum(axis=-1) / jnp.sqrt(of_out * of_other)
    return jnp.where(batch["target"] == 1, 1 - cosine, hinge(cosine - options["margin"]))


def _triplet(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return F.triplet_margin_loss(
        out,
        batch["target"],
        batch["other"],
        margin=options["margin"],
        eps=TRIPLET_EPS,
        reduction=reduction,
    )


def _triplet_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    def distance(to: jax.Array) -> jax.Array:
        return jnp.sqrt(((out - to + TRIPLET_EPS) ** 2).sum(axis=-1))

    return hinge(distance(batch["target"]) - distance(batch["other"]) + options["margin"])


def _ranking(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return F.margin_ranking_loss(
        out, batch["other"], batch["target"], margin=options["margin"], reduction=reduction
    )


def _ranking_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    return per_item(hinge(options["margin"] - batch["target"] * (out - batch["other"])))


# The loss of the weight probe: an item's loss is its entry of the parameter. With the option
# `slopes` the item losses are multiples of the entries, so that gradients are large, small or not
# finite. With `unit` an item counts that much


def _identity(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    if "slopes" in options:
        out = out[:, 0] * batch["weight"]
    if "unit" in options and reduction == "mean":
        out = out / options["unit"]
    return out.mean() if reduction == "mean" else out.sum()


def _identity_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    return out[:, 0] * batch["weight"] if "slopes" in options else out[:, 0]


def _count_units(options: Options, batch: Tensors) -> torch.Tensor:
    """Return the number of items times what each counts, a scalar."""
    if "unit" in options:
        return torch.tensor(options["unit"] * len(batch["target"]), dtype=torch.float64)
    return torch.tensor(len(batch["target"]), device=batch["target"].device)


def _unit_per_item(options: Options, batch: Arguments) -> jax.Array:
    """Return what each item counts, (n,)."""
    return jnp.full(batch["target"].shape[0], options.get("unit", 1.0))


# Losses that are not separable over samples, such as in-batch negatives.
#
# No accumulation over micro-batches equals the large batch of such a problem. The strategies draw
# these kinds only for `problems(accumulable=False)`, to test that the forward-only check detects
# each of them before a loop is blamed. They have no JAX implementation, since their gradients are
# never compared.


def _negatives(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    scores = out @ batch["target"].T
    return F.cross_entropy(scores, torch.arange(len(out), device=out.device), reduction=reduction)


def _product(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    mean = out.mean() * (1 + batch["target"].mean())
    return mean if reduction == "mean" else mean * len(out)


def _standardised(
    options: Options, out: torch.Tensor, batch: Tensors, reduction: str
) -> torch.Tensor:
    target = batch["target"]
    target = (target - target.mean(0)) / (target.var(0, correction=0) + EPS).sqrt()
    errors = ((out - target) ** 2).mean(1)
    return errors.mean() if reduction == "mean" else errors.sum()


def _no_item_losses(options: Options, *arrays: jax.Array | Arguments) -> jax.Array:
    raise UsageError("a loss that is not separable over samples has no item losses")


# Records


def elementwise(
    name: str,
    torch_loss: TorchLoss,
    jax_loss: Callable[..., jax.Array],
    *,
    targets: Targets = normal_targets,
    **choices: Any,
) -> LossDefinition:
    """Return a loss that compares output and target element by element.

    Its mean divides by the number of elements.

    Args:
        name: the kind's name in specs.
        torch_loss: (options, output, batch, reduction) -> the scalar loss.
        jax_loss: (output, target, **options) -> the loss of each element, in the output's shape.
        targets: draws the targets.
        choices: values of each option, the simplest first.
    """

    def jax_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
        return per_item(
            jax_loss(out, batch["target"], **{option: options[option] for option in choices})
        )

    return LossDefinition(
        name,
        on(*FLOATS, **choices),
        targets,
        torch_loss,
        jax_items,
        axes=0,
    )


def _over_targets(
    name: str,
    torch_loss: TorchLoss,
    jax_items: JaxLoss,
    targets: Targets = class_targets,
    forms: tuple[Form, ...] = ROWS,
    **choices: Any,
) -> LossDefinition:
    """Return a loss over classes that divides by the number of valid targets, or by the sum of
    their weights.
    """
    return LossDefinition(
        name,
        on(*forms, min_features=2, **choices),
        targets,
        torch_loss,
        jax_items,
        count_targets,
        targets_per_item,
        axes=1,
        maskable=ignores_targets,
        uniform=uniform_targets,
    )


_weighted = partial(
    LossDefinition,
    count=count_weights,
    jax_counts=weight_per_item,
    uniform=lambda signal, options: False,
)
_per_position = partial(
    LossDefinition, count=_count_positions, jax_counts=_positions_per_item, axes=1
)
_per_item = partial(LossDefinition, count=count_items, jax_counts=one_per_item)


def _not_separable(name: str, torch_loss: TorchLoss) -> LossDefinition:
    return _per_item(
        name, on("vector"), normal_targets, torch_loss, _no_item_losses, separable=False
    )


KINDS = (
    elementwise("mse", _mse, lambda out, target: (out - target) ** 2),
    elementwise("l1", _l1, lambda out, target: absolute(out - target)),
    elementwise("smooth_l1", _smooth_l1, _smooth_l1_in_jax, beta=(1.0, 0.25)),
    elementwise(
        "huber",
        _huber,
        lambda out, target, delta: delta * _smooth_l1_in_jax(out, target, delta),
        delta=(1.0, 0.25),
    ),
    _weighted(
        "weighted_mse",
        on(*FLOATS),
        lambda signal, o, rng, ignored: {
            **normal_targets(signal, o, rng, ignored),
            "weight": positive(rng, len(ignored)),
        },
        _weighted_mse,
        _weighted_mse_items,
    ),
    _over_targets(
        "cross_entropy",
        _cross_entropy,
        _cross_entropy_items,
        forms=FLOATS,
        ignore_index=(False, True),
        label_smoothing=SMOOTHING,
        class_weights=(False, True),
    ),
    _per_position(
        "soft_cross_entropy",
        on(*FLOATS, min_features=2, label_smoothing=SMOOTHING, class_weights=(False, True)),
        _distributions,
        _cross_entropy,
        _soft_cross_entropy_items,
    ),
    _over_targets(
        "nll",
        _nll,
        lambda o, out, batch: _cross_entropy_items({**o, "label_smoothing": 0.0}, out, batch),
        forms=FLOATS,
        ignore_index=(False, True),
        class_weights=(False, True),
    ),
    _weighted(
        "weighted_cross_entropy",
        on(*FLOATS, min_features=2, gamma=(0.0, 2.0)),
        _weighted_class_targets,
        _weighted_cross_entropy,
        _weighted_cross_entropy_items,
        axes=1,
    ),
    LossDefinition(
        "bce_with_logits",
        on(*FLOATS, pos_weight=(False, True), weight=(False, True)),
        _binary_targets,
        _with_logits,
        _with_logits_items,
        axes=1,
    ),
    LossDefinition(
        "bce", on(*FLOATS, weight=(False, True)), _binary_targets, _bce, _bce_items, axes=0
    ),
    _per_position(
        "multilabel_soft_margin",
        on(*ROWS, class_weights=(False, True)),
        _binary_targets,
        _multilabel,
        _multilabel_items,
    ),
    LossDefinition(
        "kl_div",
        on(*FLOATS, min_features=2, batchmean=(True, False), log_target=(False, True)),
        _kl_targets,
        _kl_div,
        _kl_div_items,
        _kl_count,
        _kl_counts,
    ),
    LossDefinition(
        "poisson_nll",
        on(*FLOATS, log_input=(True, False)),
        lambda signal, o, rng, ignored: {
            "target": rng.poisson(1.5, (len(ignored), *signal.size)).astype(np.float64)
        },
        _poisson_nll,
        _poisson_nll_items,
        axes=0,
    ),
    LossDefinition(
        "gaussian_nll",
        on(
            *FLOATS,
            fits=lambda signal, o: signal.features % 2 == 0 or not o["learned_variance"],
            learned_variance=(False, True),
        ),
        _gaussian_targets,
        _gaussian_nll,
        _gaussian_nll_items,
        axes=1,
    ),
    elementwise(
        "hinge_embedding",
        _hinge_embedding,
        lambda out, target, margin: jnp.where(target == 1, out, hinge(margin - out)),
        targets=sign_targets,
        margin=(1.0, 0.5),
    ),
    elementwise(
        "soft_margin",
        _soft_margin,
        lambda out, target: jnp.logaddexp(-target * out, 0.0),
        targets=sign_targets,
    ),
    LossDefinition(
        "multi_margin",
        on(*ROWS, min_features=2, p=(1, 2), margin=(1.0,), class_weights=(False, True)),
        class_targets,
        _multi_margin,
        _multi_margin_items,
        axes=1,
    ),
    _per_item(
        "cosine_embedding",
        # the cosine of vectors of one feature is constant but for its sign
        on("vector", min_features=2, margin=(0.0, 0.25)),
        _with_other(lambda signal, o, rng, ignored: {"target": drawn_signs(rng, len(ignored))}),
        _cosine,
        _cosine_items,
    ),
    _per_item(
        "triplet_margin",
        # with one feature the two distances mostly differ by a constant, and the gradient is 0
        on("vector", min_features=2, margin=(1.0, 0.5)),
        _with_other(normal_targets),
        _triplet,
        _triplet_items,
    ),
    LossDefinition(
        "margin_ranking",
        on(*FLOATS, margin=(0.0, 0.5)),
        _with_other(sign_targets),
        _ranking,
        _ranking_items,
        axes=0,
    ),
    elementwise(
        "mse_and_l1",
        _mse_and_l1,
        lambda out, target: (out - target) ** 2 + SECOND * absolute(out - target),
    ),
    _over_targets(
        "cross_entropy_and_z", _with_z_loss, _with_z_loss_items, ignore_index=(False, True)
    ),
    _over_targets(
        "distillation",
        _distillation,
        _distillation_items,
        _distillation_targets,
        temperature=(1.0, 4.0),
    ),
    _over_targets(
        "cross_entropy_of_large_logits", _large_logits, _large_logits_items, scale=(100.0, 10000.0)
    ),
    LossDefinition(
        "identity",
        # the readout's output alone: an item must have one entry of the parameter
        lambda signal: ({}, {"slopes": "1 2**10"}, {"unit": 0.25}) if signal == vector(1) else (),
        _probe_targets,
        _identity,
        _identity_items,
        _count_units,
        _unit_per_item,
        drawn=False,
    ),
    _not_separable("in_batch_negatives", _negatives),
    _not_separable("product_of_means", _product),
    _not_separable("standardised_targets", _standardised),
)
