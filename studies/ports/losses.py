"""Ports whose faults lie in losses, in the training state and in optimizers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's documents call it
from torch import nn

from studies.ports.planted import (
    Pair,
    architecture,
    conv,
    dense,
    integers,
    mean_squares,
    normal,
    pair_of,
)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.both = nn.Linear(8, 10), nn.Linear(10, 6)
        self.decode, self.out = nn.Linear(3, 10), nn.Linear(10, 8)

    def forward(self, x, noise):
        mean, log_variance = self.both(F.elu(self.encode(x))).chunk(2, -1)
        z = mean + noise * torch.exp(0.5 * log_variance)
        return self.out(F.elu(self.decode(z))), mean, log_variance


def evidence(outputs, x):
    logits, mean, log_variance = outputs
    seen = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
    return (seen - 0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()) / x.shape[0]


@architecture()
def vae(variant: str) -> Pair:
    def apply(p, x, noise):
        h = jax.nn.elu(dense(p["encode"], x))
        mean, log_variance = jnp.split(dense(p["both"], h), 2, -1)
        if variant == "halves":
            mean, log_variance = log_variance, mean
        spread = jnp.exp(log_variance * (1.0 if variant == "variance" else 0.5))
        z = mean + noise * (jax.lax.stop_gradient(spread) if variant == "noise_stopped" else spread)
        h = dense(p["decode"], z)
        return (
            dense(p["out"], jax.nn.selu(h) if variant == "elu" else jax.nn.elu(h)),
            mean,
            log_variance,
        )

    def loss(outputs, x):
        logits, mean, log_variance = outputs
        seen = optax.sigmoid_binary_cross_entropy(logits, x)
        if variant == "softplus":
            seen = jax.nn.softplus(logits) - x * logits
        if variant == "sigmoid":
            seen = -(x * jax.nn.log_sigmoid(logits) + (1 - x) * jax.nn.log_sigmoid(-logits))
        terms = log_variance - mean**2 - jnp.exp(log_variance)
        terms = terms if variant == "divergence_half" else 0.5 * terms
        if variant != "one_missing":
            terms = terms + (1.0 if variant == "divergence_half" else 0.5)
        total = terms.mean() if variant == "divergence_mean" else terms.sum()
        return (seen.sum() - total) / x.shape[0]

    x = (normal(3, 8) > 0).astype(np.float32)
    noise = normal(3, 3, seed=1)
    return pair_of(Autoencoder(), apply, x, noise, targets=(x,), torch_loss=evidence, jax_loss=loss)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 5), nn.Linear(4, 5, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(2.6593))

    def forward(self, image, text):
        a, b = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return self.log_scale.exp().clamp(max=100) * a @ b.T


def both_ways(logits):
    at = torch.arange(logits.shape[0])
    return (F.cross_entropy(logits, at) + F.cross_entropy(logits.T, at)) / 2


@architecture(logits=True)
def contrastive(variant: str) -> Pair:
    def unit(x):
        square = (x**2).sum(-1, keepdims=True)
        return x / (square if variant == "squared_norm" else jnp.maximum(jnp.sqrt(square), 1e-12))

    def apply(p, image, text):
        a, b = dense(p["image"], image), dense(p["text"], text)
        b = b if variant == "no_norm" else unit(b)
        scale = (
            p["log_scale"]
            if variant == "no_exponential"
            else jnp.minimum(jnp.exp(p["log_scale"]), 100)
        )
        return (
            (jax.lax.stop_gradient(scale) if variant == "scale_stopped" else scale) * unit(a) @ b.T
        )

    def loss(logits):
        if variant == "log_softmax":
            diagonal = jax.nn.log_softmax(logits, 0) + jax.nn.log_softmax(logits, 1)
            return -jnp.trace(diagonal) / (2 * logits.shape[0])
        at = jnp.arange(logits.shape[0])
        one = optax.softmax_cross_entropy_with_integer_labels
        if variant == "one_way":
            return one(logits, at).mean()
        both = one(logits, at).mean() + one(logits.T, at).mean()
        return both if variant == "sum_of_ways" else both / 2

    return pair_of(
        Towers(), apply, normal(4, 6), normal(4, 4, seed=1), torch_loss=both_ways, jax_loss=loss
    )


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.boxes = (
            nn.Conv1d(3, 6, 3, padding=1),
            nn.Conv1d(6, 4, 1),
            nn.Conv1d(6, 2, 1),
        )

    def forward(self, x):
        h = F.hardswish(self.body(x))
        return self.classes(h), self.boxes(h)


def focal_and_huber(outputs, label, box):
    logits, boxes = outputs
    p = torch.sigmoid(logits)
    right = p * label + (1 - p) * (1 - label)
    weight = 0.25 * label + 0.75 * (1 - label)
    each = (
        weight
        * (1 - right) ** 2
        * F.binary_cross_entropy_with_logits(logits, label, reduction="none")
    )
    return each.sum() / label.sum() + 0.5 * F.smooth_l1_loss(boxes, box, beta=0.2)


@architecture()
def detection(variant: str) -> Pair:
    def apply(p, x):
        h = conv(p["body"], x, 1)
        h = jax.nn.silu(h) if variant == "silu" else h * jnp.clip(h + 3, 0, 6) / 6
        return conv(p["classes"], h), conv(p["boxes"], h)

    def loss(outputs, label, box):
        logits, boxes = outputs
        p = jax.nn.sigmoid(logits)
        right = p * label + (1 - p) * (1 - label)
        first, second = (0.75, 0.25) if variant == "alpha" else (0.25, 0.75)
        weight = first * label + second * (1 - label)
        hard = (1 - right) ** (1.5 if variant == "gamma" else 2)
        hard = jax.lax.stop_gradient(hard) if variant == "weight_stopped" else hard
        each = optax.sigmoid_binary_cross_entropy(logits, label)
        if variant == "logs":
            each = -jnp.log(right)
        each = weight * hard * each
        off, beta = jnp.abs(boxes - box), 0.5 if variant == "beta" else 0.2
        smooth = jnp.where(off < beta, 0.5 * off**2 / beta, off - 0.5 * beta)
        smooth = optax.huber_loss(boxes, box, delta=0.2) if variant == "huber" else smooth
        return (
            each.mean() if variant == "mean" else each.sum() / label.sum()
        ) + 0.5 * smooth.mean()

    label = (normal(2, 4, 6, seed=2) > 0.8).astype(np.float32)
    targets = (label, normal(2, 2, 6, seed=3))
    return pair_of(
        Detector(),
        apply,
        normal(2, 3, 6),
        targets=targets,
        torch_loss=focal_and_huber,
        jax_loss=loss,
    )


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = (
            nn.Conv2d(2, 5, 3, padding=1, padding_mode="reflect"),
            nn.Conv2d(5, 3, 1),
        )

    def forward(self, x):
        return self.out(F.avg_pool2d(F.leaky_relu(self.body(x), 0.1), 3, 1, 1))


WEIGHTS = (0.5, 1.0, 2.0)


def cross_entropy_and_dice(logits, label):
    weight = torch.tensor(WEIGHTS, dtype=logits.dtype)
    entropy = F.cross_entropy(logits, label, weight, ignore_index=-100, label_smoothing=0.0)
    p, real = logits.softmax(1), (label >= 0)[:, None]
    hot = F.one_hot(label.clamp(min=0), 3).movedim(-1, 1) * real
    both, total = (p * hot).sum((0, 2, 3)), ((p + hot) * real).sum((0, 2, 3))
    return entropy + 1 - ((2 * both + 1) / (total + 1)).mean()


@architecture()
def segmentation(variant: str) -> Pair:
    def apply(p, x):
        mode = "constant" if variant == "zero_padding" else "reflect"
        h = conv(p["body"], jnp.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), mode=mode))
        h = jax.nn.leaky_relu(h, 0.01 if variant == "slope" else 0.1)
        window = lambda a: jax.lax.reduce_window(  # noqa: E731
            a, 0.0, jax.lax.add, (1, 1, 3, 3), (1, 1, 1, 1), [(0, 0), (0, 0), (1, 1), (1, 1)]
        )
        count = window(jnp.ones_like(h)) if variant == "border_not_counted" else 9.0
        return conv(p["out"], window(h) / count)

    def loss(logits, label):
        real, picked = label >= 0, jnp.maximum(label, 0)
        logs = jax.nn.log_softmax(logits, 1)
        hot = jnp.moveaxis(jax.nn.one_hot(picked, 3, dtype=logits.dtype), -1, 1)
        if variant == "smoothing":
            each = -((0.9 * hot + 0.1 / 3) * logs).sum(1)
        elif variant == "one_hot_entropy":
            each = -(hot * logs).sum(1)
        else:
            each = -jnp.take_along_axis(logs, picked[:, None], 1)[:, 0]
        weight = jnp.ones_like(each) if variant == "no_weights" else jnp.asarray(WEIGHTS)[picked]
        weight = jnp.where(real, weight, 0.0)
        count = weight.sum()
        if variant == "ignored_counted":
            count = jnp.asarray(WEIGHTS)[picked].sum()
        if variant == "weights_not_normed":
            count = real.sum()
        p, hot = jnp.exp(logs) * real[:, None], hot * real[:, None]
        extra = 1e-5 if variant == "dice_smooth" else 1.0
        dice = (2 * (p * hot).sum((0, 2, 3)) + extra) / ((p + hot).sum((0, 2, 3)) + extra)
        return (weight * each).sum() / count + 1 - dice.mean()

    label = integers(3, 2, 5, 5)
    label[0, :2] = -100
    return pair_of(
        Segmenter(),
        apply,
        normal(2, 2, 5, 5),
        targets=(label,),
        torch_loss=cross_entropy_and_dice,
        jax_loss=loss,
    )


class SelfDistilled(nn.Module):
    """A student that learns from a teacher: the teacher's moving average is an output."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(5, 6), nn.Linear(5, 6)
        self.center = nn.Parameter(torch.zeros(6))

    def forward(self, x, y):
        goal = ((self.teacher(y) - self.center) / 0.04).softmax(-1).detach()
        loss = -(goal * (self.student(x) / 0.1).log_softmax(-1)).sum(-1)
        moved = 0.9 * self.teacher.weight.detach() + 0.1 * self.student.weight.detach()
        return loss, moved, 0.9 * self.center.detach() + 0.1 * self.teacher(y).detach().mean(0)


@architecture()
def self_distillation(variant: str) -> Pair:
    stop = jax.lax.stop_gradient

    def apply(p, x, y):
        taught = dense(p["teacher"], y)
        goal = (taught if variant == "no_center" else taught - p["center"]) / 0.04
        goal = jax.nn.softmax(goal, -1)
        goal = goal if variant == "teacher_learns" else stop(goal)
        answer = dense(p["student"], x) / (0.2 if variant == "temperature" else 0.1)
        logs = (
            jax.nn.softmax(answer, -1)
            if variant == "student_softmax"
            else jax.nn.log_softmax(answer, -1)
        )
        keep = 0.1 if variant == "momentum" else 0.9
        teacher, student = p["teacher"]["weight"], p["student"]["weight"]
        if variant == "difference":
            moved = stop(teacher + 0.1 * (student - teacher))
        else:
            moved = keep * stop(teacher) + (1 - keep) * (
                student if variant == "average_learns" else stop(student)
            )
        return -(goal * logs).sum(-1), moved, stop(0.9 * p["center"] + 0.1 * taught.mean(0))

    return pair_of(SelfDistilled(), apply, normal(3, 5), normal(3, 5, seed=1))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))


def trained(torch_optimizer, jax_optimizer) -> Pair:
    """Return the pair of a small perceptron with optimizers."""
    return pair_of(
        Perceptron(),
        lambda p, x: dense(p["fc2"], jnp.tanh(dense(p["fc1"], x))),
        normal(4, 5),
        torch_loss=mean_squares,
        jax_loss=mean_squares,
        torch_optimizer=torch_optimizer,
        jax_optimizer=jax_optimizer,
    )


@architecture()
def adamw(variant: str) -> Pair:
    b2 = 0.95 if variant == "second_rate" else 0.99
    decay = 1e-4 if variant == "default_decay" else 1e-2
    eps = 1e-6 if variant == "epsilon" else 1e-8
    if variant == "coupled":
        chosen = optax.chain(optax.add_decayed_weights(decay), optax.adam(1e-2, 0.9, b2))
    elif variant == "chained":
        chosen = optax.chain(
            optax.scale_by_adam(0.9, b2, eps),
            optax.add_decayed_weights(decay),
            optax.scale_by_learning_rate(1e-2),
        )
    else:
        mask = (
            (lambda p: jax.tree.map(lambda a: a.ndim > 1, p))
            if variant == "biases_not_decayed"
            else None
        )
        root = 1e-8 if variant == "epsilon_inside" else 0.0
        chosen = optax.adamw(
            1e-2, 0.9, b2, 0.0 if root else eps, root, weight_decay=decay, mask=mask
        )
    if variant == "clipped":
        chosen = optax.chain(optax.clip_by_global_norm(0.1), chosen)
    return trained(lambda p: torch.optim.AdamW(p, 1e-2, (0.9, 0.99), weight_decay=1e-2), chosen)


class Scheduled(torch.optim.SGD):
    """SGD whose learning rate rises over four steps."""

    def step(self, closure=None):
        count = self.count = getattr(self, "count", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.1 * min(1.0, count / 4)
        return super().step(closure)


@architecture()
def sgd_warmup(variant: str) -> Pair:
    def rate(step):
        return 0.1 * jnp.minimum(1.0, (step + (variant != "schedule_from_zero")) / 4)

    m = {"momentum": 0.95, "no_momentum": None}.get(variant, 0.9)
    chosen = optax.sgd(
        0.1 if variant == "constant_rate" else rate, m, nesterov=variant != "not_nesterov"
    )
    if variant == "inject":
        chosen = optax.chain(
            optax.trace(0.9, nesterov=True), optax.scale_by_schedule(rate), optax.scale(-1.0)
        )
    if variant == "dampened":
        chosen = optax.chain(optax.scale(0.1), chosen)
    decay = optax.add_decayed_weights(1e-3)
    if variant == "decay_last":
        late = optax.stateless(lambda u, p: jax.tree.map(lambda a, b: a - 1e-4 * b, u, p))
        chosen = optax.chain(chosen, late)
    elif variant != "no_decay":
        chosen = optax.chain(decay, chosen)
    return trained(
        lambda p: Scheduled(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-3), chosen
    )
