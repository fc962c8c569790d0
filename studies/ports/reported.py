"""Ports of what people reported: faults that show at other sizes, at rare inputs, in schedules, and
in operations that few models have.
"""

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
    layer_norm,
    mean_squares,
    normal,
    pair_of,
)

# Other sizes.


class Distances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 3)

    def forward(self, x):
        t = torch.arange(x.shape[1])
        return torch.einsum("bqd,qkd->bqk", x, self.table((t[None] - t[:, None]).clamp(-6, 6) + 6))


@architecture()
def relative_positions(variant: str) -> Pair:
    def apply(p, x):
        t = jnp.arange(x.shape[1])
        distance = t[None] - t[:, None]
        if variant == "minimum":
            distance = jnp.minimum(jnp.maximum(distance, -6), 6)
        elif variant != "not_clipped":
            distance = jnp.clip(distance, -6, 6)
        return jnp.einsum("bqd,qkd->bqk", x, p["table"]["weight"][distance + 6])

    return pair_of(Distances(), apply, normal(2, 5, 3))


@architecture()
def strided_images(variant: str) -> Pair:
    def apply(p, x):
        if variant == "same":
            return conv(p, x, "SAME", stride=2)
        if variant == "padded_first":
            return conv(p, jnp.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), stride=2)
        return conv(p, x, 1, stride=2)

    return pair_of(nn.Conv2d(2, 3, 3, 2, 1), apply, normal(2, 2, 7, 7))


class ApproximateDistances(Distances):
    def forward(self, x):
        return super().forward(F.gelu(x))


@architecture()
def accepted_gelu(variant: str) -> Pair:
    """A tanh gelu is accepted; what is wrong beside it is found."""

    def apply(p, x):
        t = jnp.arange(x.shape[1])
        distance = t[None] - t[:, None]
        if variant != "not_clipped":
            distance = jnp.clip(distance, -6, 6)
        return jnp.einsum("bqd,qkd->bqk", jax.nn.gelu(x), p["table"]["weight"][distance + 6])

    accept = ("gelu-approximation",)
    return pair_of(ApproximateDistances(), apply, normal(2, 6, 3), accept=accept)


# Rare inputs.


class Limited(nn.Linear):
    def forward(self, x):
        return F.hardtanh(super().forward(x), -2, 2)


@architecture()
def limited(variant: str) -> Pair:
    def apply(p, x):
        high = 3 if variant == "higher" else 2
        return jnp.minimum(jnp.maximum(dense(p, x), -2), high)

    return pair_of(Limited(3, 4), apply, normal(4, 3))


class Tops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2)

    def forward(self, x, target):
        h = self.a(x)
        index = target[:, None].expand(-1, 2)
        zeros = torch.zeros_like(h)
        return zeros.scatter_reduce(0, index, h[: len(target)], "amax", include_self=False)


@architecture()
def segment_maximum(variant: str) -> Pair:
    def apply(p, x, target):
        h = dense(p["a"], x)[: len(target)]
        top = jax.ops.segment_max(h, target, num_segments=len(x))
        return top if variant == "empty" else jnp.where(jnp.isfinite(top), top, 0)

    def draw(seed):
        return normal(4, 3, seed=seed), np.random.default_rng(seed).integers(0, 4, 4)

    return pair_of(Tops(), apply, normal(4, 3), np.array([0, 1, 2, 3]), draw=draw)


class MaskToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(12, 3), nn.Linear(3, 2)

    def forward(self, ids):
        return self.out(self.embed(ids).masked_fill((ids == 11)[..., None], 0.0))


@architecture()
def mask_token(variant: str) -> Pair:
    def apply(p, ids):
        x = p["embed"]["weight"][ids]
        if variant != "not_masked":
            x = x * (ids != 11)[..., None]
        return dense(p["out"], x)

    return pair_of(MaskToken(), apply, np.array([[0, 3, 8, 2], [5, 1, 1, 7]]))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids):
        kept = (ids != 0)[..., None]
        return self.out((self.embed(ids) * kept).sum(1) / kept.sum(1).clamp(min=1))


@architecture()
def padded_bag(variant: str) -> Pair:
    def apply(p, ids):
        kept = (ids != 0)[..., None]
        total = (p["embed"]["weight"][ids] * kept).sum(1)
        count = kept.sum(1)
        if variant == "length":
            return dense(p["out"], total / ids.shape[1])
        return dense(p["out"], total / (count if variant == "no_limit" else jnp.maximum(count, 1)))

    return pair_of(Bag(), apply, np.array([[3, 8, 1, 0], [2, 5, 4, 7], [1, 0, 0, 0]]))


class Kept(nn.Linear):
    def forward(self, x):
        values, places = x.topk(2, -1)
        return super().forward(torch.zeros_like(x).scatter(-1, places, values))


@architecture()
def largest_kept(variant: str) -> Pair:
    def apply(p, x):
        values, places = jax.lax.top_k(x, 2)
        if variant == "threshold":
            return dense(p, jnp.where(x >= values[..., -1:], x, 0))
        if variant == "last_of_ties":
            places = x.shape[1] - 1 - jax.lax.top_k(x[:, ::-1], 2)[1]
        return dense(p, x * jax.nn.one_hot(places, x.shape[1], dtype=x.dtype).sum(-2))

    return pair_of(Kept(4, 3), apply, normal(3, 4))


class Masked(nn.Linear):
    """Keeps what is not below the second largest element."""

    def forward(self, x):
        return super().forward(x.masked_fill(x < x.topk(2, -1).values[..., -1:], 0))


@architecture()
def largest_masked(variant: str) -> Pair:
    def apply(p, x):
        values, places = jax.lax.top_k(x, 2)
        if variant == "by_position":
            return dense(p, x * jax.nn.one_hot(places, x.shape[1], dtype=x.dtype).sum(-2))
        return dense(p, jnp.where(x >= values[..., -1:], x, 0))

    return pair_of(Masked(4, 3), apply, normal(3, 4))


class Ranked(nn.Linear):
    def forward(self, x):
        return super().forward(x * x.sort(dim=-1, stable=True, descending=True).indices)


@architecture()
def ranked(variant: str) -> Pair:
    def apply(p, x):
        if variant == "turned":
            return dense(p, x * jnp.argsort(x, stable=True)[..., ::-1])
        return dense(p, x * jnp.argsort(-x, stable=True))

    return pair_of(Ranked(4, 3), apply, normal(3, 4))


class Chosen(nn.Linear):
    """Takes two of four numbers that are equal as often as not."""

    def forward(self, x):
        x = super().forward(x).relu().round()
        return torch.zeros_like(x).scatter(-1, x.topk(2, -1).indices, 1.0)


@architecture()
def chosen(variant: str) -> Pair:
    def apply(p, x):
        x = jnp.round(jax.nn.relu(dense(p, x)))
        values, places = jax.lax.top_k(x, 2)
        if variant == "threshold":
            return (x >= values[..., -1:]).astype(x.dtype)
        return jax.nn.one_hot(places, x.shape[1], dtype=x.dtype).sum(-2)

    return pair_of(Chosen(3, 4), apply, normal(3, 3))


class Reversal(torch.autograd.Function):
    """Turns the gradient round, as domain-adversarial networks do."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -0.5 * g


class Adversarial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features, self.domain = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.domain(Reversal.apply(self.features(x).tanh()))


@jax.custom_vjp
def reversal(x):
    return x


reversal.defvjp(lambda x: (x, None), lambda _, g: (-0.5 * g,))


@architecture()
def adversarial(variant: str) -> Pair:
    def apply(p, x):
        x = jnp.tanh(dense(p["features"], x))
        return dense(p["domain"], x if variant == "not_reversed" else reversal(x))

    return pair_of(Adversarial(), apply, normal(3, 4))


class AdaptiveNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.style, self.conv = nn.Linear(3, 8), nn.Conv2d(2, 4, 1)

    def forward(self, x, style):
        y = self.conv(x)
        scale, shift = self.style(style)[..., None, None].chunk(2, 1)
        variance = y.var((2, 3), keepdim=True, correction=0)
        return (1 + scale) * (y - y.mean((2, 3), keepdim=True)) / (variance + 1e-5).sqrt() + shift


@architecture()
def adaptive_norm(variant: str) -> Pair:
    def apply(p, x, style):
        y = jnp.einsum("bihw,oi->bohw", x, p["conv"]["weight"][..., 0, 0])
        y = y + p["conv"]["bias"][:, None, None]
        scale, shift = jnp.split(dense(p["style"], style)[..., None, None], 2, 1)
        mean = y.mean((2, 3), keepdims=True)
        variance = (y**2).mean((2, 3), keepdims=True) - mean**2
        root = jnp.sqrt(variance + 1e-5)
        if variant == "epsilon_outside":
            root = jnp.sqrt(variance) + 1e-5
        return (1 + scale) * (y - mean) / root + shift

    return pair_of(AdaptiveNorm(), apply, normal(2, 2, 3, 4), normal(2, 3))


class SubPixel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Conv2d(3, 12, 1), nn.Conv2d(3, 2, 1)

    def forward(self, x):
        return self.out(nn.functional.pixel_shuffle(self.up(x), 2).relu())


@architecture()
def sub_pixel(variant: str) -> Pair:
    def conv(p, x):
        return x @ p["weight"][..., 0, 0].T + p["bias"]

    def apply(p, x):
        y = conv(p["up"], x.transpose(0, 2, 3, 1))
        rows, height, width, _ = y.shape
        if variant == "depth_to_space":  # as TensorFlow orders the channels
            y = y.reshape(rows, height, width, 2, 2, 3).transpose(0, 1, 3, 2, 4, 5)
        else:
            y = y.reshape(rows, height, width, 3, 2, 2).transpose(0, 1, 4, 2, 5, 3)
        y = jax.nn.relu(y.reshape(rows, 2 * height, 2 * width, 3))
        return conv(p["out"], y).transpose(0, 3, 1, 2)

    return pair_of(SubPixel(), apply, normal(2, 3, 5, 4))


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 1)

    def forward(self, x):
        return self.a(x).sigmoid()


@architecture()
def labels_at_one(variant: str) -> Pair:
    """Targets are at the end of the domain of the binary cross entropy."""

    def loss(p, y):
        part = 0.5 if variant == "half_of_zeros" else 1.0
        return -(y * jnp.log(p) + part * (1 - y) * jnp.log1p(-p)).mean()

    return pair_of(
        Labelled(),
        lambda p, x: jax.nn.sigmoid(dense(p["a"], x)),
        normal(4, 3),
        targets=(np.array([[0], [1], [1], [0]], np.float32),),
        torch_loss=F.binary_cross_entropy,
        jax_loss=loss,
    )


# Orders of elements.


class Shuffled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(6, 6, 1, groups=3), nn.Conv2d(6, 6, 3, padding=1, groups=6)

    def forward(self, x):
        return self.b(F.channel_shuffle(self.a(x), 3))


@architecture()
def shuffled(variant: str) -> Pair:
    def apply(p, x):
        h = conv(p["a"], x, groups=3)
        groups = (2, 3) if variant == "inverse" else (3, 2)
        parts = h.reshape(h.shape[0], *groups, *h.shape[2:])
        h = parts.swapaxes(1, 2).reshape(h.shape)
        return conv(p["b"], h, 1, groups=6)

    return pair_of(Shuffled(), apply, normal(2, 6, 4, 5))


class Filter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 2))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.w), n=x.shape[-1])


@architecture()
def spectral_filter(variant: str) -> Pair:
    def apply(p, x):
        sign = -1 if variant == "conjugated" else 1
        w = jax.lax.complex(p["w"][:, 0], sign * p["w"][:, 1])
        norm = "ortho" if variant == "orthonormal" else None
        back = "ortho" if variant == "both_orthonormal" else None
        there = back or norm
        return jnp.fft.irfft(jnp.fft.rfft(x, norm=there) * w, n=x.shape[-1], norm=back)

    return pair_of(Filter(), apply, normal(3, 7), sizes={1: 7})


class Gates(nn.Linear):
    def forward(self, x):
        best, places = super().forward(x).softmax(-1).topk(2)
        return best / best.sum(-1, keepdim=True), places


@architecture()
def gates(variant: str) -> Pair:
    def apply(p, x):
        best, places = jax.lax.top_k(jax.nn.softmax(dense(p, x)), 2)
        if variant != "not_divided":
            best = best / best.sum(-1, keepdims=True)
        if variant == "index":
            places = places + 1
        return (best,) if variant == "one_output" else (best, places)

    return pair_of(Gates(3, 4), apply, normal(4, 3))


# State that is not trained.


class Observed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("obs_mean", torch.zeros(3))
        self.register_buffer("obs_std", torch.ones(3))

    def forward(self, x):
        return super().forward((x - self.obs_mean) / self.obs_std)


@architecture()
def observations(variant: str) -> Pair:
    def apply(p, x):
        if variant == "left_out":
            return dense(p, x)
        centred = x - p["obs_mean"]
        scale = p["obs_std"] if variant == "multiplied" else 1 / p["obs_std"]
        return dense(p, centred * scale)

    return pair_of(Observed(), apply, normal(4, 3))


# Recurrences.


class Wkv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.u, self.w = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
        self.k, self.v = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        k, v, w = self.k(x), self.v(x), -self.w.exp()
        total = weight = torch.zeros_like(k[:, 0])
        out = []
        for t in range(x.shape[1]):
            now = (self.u + k[:, t]).exp()
            out.append((total + now * v[:, t]) / (weight + now))
            total = w.exp() * total + k[:, t].exp() * v[:, t]
            weight = w.exp() * weight + k[:, t].exp()
        return torch.stack(out, 1)


@architecture()
def receptance(variant: str) -> Pair:
    def apply(p, x):
        k, v, w = dense(p["k"], x), dense(p["v"], x), -jnp.exp(p["w"])
        t = jnp.arange(x.shape[1])
        behind = (t[:, None] - t)[..., None]
        steps = behind if variant == "one_step_more" else behind - 1
        past = k[:, None] + steps * w
        now = k if variant == "no_bonus" else k + p["u"]
        score = jnp.where(behind > 0, past, jnp.where(behind == 0, now[:, None], -jnp.inf))
        return (jax.nn.softmax(score, 2) * v[:, None]).sum(2)

    return pair_of(Wkv(), apply, normal(2, 4, 3))


class Averaged(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        out = [x[:, 0]]
        for t in range(1, x.shape[1]):
            out.append(0.7 * out[-1] + 0.3 * x[:, t])
        return torch.stack(out, 1)


@architecture()
def moving_average(variant: str) -> Pair:
    def apply(p, x):
        x = dense(p, x).swapaxes(0, 1)
        keep = 0.3 if variant == "weights" else 0.7

        def step(h, row):
            h = keep * h + (1 - keep) * row
            return h, h

        start = jnp.zeros_like(x[0]) if variant == "from_zero" else x[0]
        if variant == "float32":  # the carry is of a dtype by name
            start = start.astype(jnp.float32)
            x = x.astype(jnp.float32)
        return jax.lax.scan(step, start, x)[1].swapaxes(0, 1)

    return pair_of(Averaged(3, 4), apply, normal(2, 5, 3))


class Backwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 3)
        self.rnn = nn.RNN(3, 2, batch_first=True, bidirectional=True)

    def forward(self, ids):
        lengths = (ids != 0).sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(ids), lengths, batch_first=True, enforce_sorted=False
        )
        return nn.utils.rnn.pad_packed_sequence(
            self.rnn(packed)[0], batch_first=True, total_length=ids.shape[1]
        )[0]


@architecture()
def packed_directions(variant: str) -> Pair:
    def run(p, x, end, real, reverse):
        bias = p[f"bias_ih_l0{end}"] + p[f"bias_hh_l0{end}"]

        def step(h, given):
            row, is_real = given
            new = jnp.tanh(row @ p[f"weight_ih_l0{end}"].T + h @ p[f"weight_hh_l0{end}"].T + bias)
            new = new if variant == "through_padding" else jnp.where(is_real, new, h)
            return new, new

        steps = x.swapaxes(0, 1), real.swapaxes(0, 1)
        return jax.lax.scan(step, jnp.zeros((len(x), 2), x.dtype), steps, reverse=reverse)[1]

    def apply(p, ids):
        x = p["embed"]["weight"][ids]
        count = jnp.maximum((ids != 0).sum(1), 1)
        real = (jnp.arange(ids.shape[1]) < count[:, None])[..., None]
        both = [run(p["rnn"], x, end, real, end != "") for end in ("", "_reverse")]
        return jnp.where(real, jnp.concatenate(both, -1).swapaxes(0, 1), 0)

    def draw(seed):
        rng = np.random.default_rng(seed)
        return (np.where(np.arange(5) < rng.integers(1, 6, (2, 1)), rng.integers(1, 6, (2, 5)), 0),)

    return pair_of(Backwards(), apply, np.array([[1, 2, 3, 4, 5], [3, 1, 0, 0, 0]]), draw=draw)


# Graphs.


class EdgeSoftmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score, self.out = nn.Linear(3, 1), nn.Linear(3, 2)

    def forward(self, x, source, target):
        score = self.score(x[source])
        low = torch.full((len(x), 1), -torch.inf, dtype=x.dtype)
        top = low.scatter_reduce(0, target[:, None], score.detach(), "amax")
        weight = (score - top[target]).exp()
        weight = weight / torch.zeros_like(top).index_add(0, target, weight)[target]
        return self.out(torch.zeros_like(x).index_add(0, target, weight * x[source]))


@architecture()
def edge_softmax(variant: str) -> Pair:
    edges = np.array([0, 1, 2, 3, 1, 2, 0]), np.array([0, 1, 2, 3, 0, 3, 2])

    def apply(p, x, source, target):
        n = len(x)
        score = dense(p["score"], x[source])
        at = source if variant == "over_sources" else target
        top = jax.lax.stop_gradient(jax.ops.segment_max(score, at, num_segments=n))
        weight = jnp.exp(score - top[at])
        weight = weight / jax.ops.segment_sum(weight, at, num_segments=n)[at]
        return dense(p["out"], jax.ops.segment_sum(weight * x[source], target, num_segments=n))

    def draw(seed):
        return normal(4, 3, seed=seed), *edges

    return pair_of(EdgeSoftmax(), apply, normal(4, 3), *edges, draw=draw)


# Gradients.


class Forces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.b(torch.tanh(self.a(x))).sum()
        return -torch.autograd.grad(energy, x, create_graph=True)[0]


@architecture()
def forces(variant: str) -> Pair:
    def apply(p, x):
        def energy(x):
            return dense(p["b"], jnp.tanh(dense(p["a"], x))).sum()

        slope = jax.grad(energy)(x)
        return slope if variant == "sign" else -slope

    return pair_of(Forces(), apply, normal(4, 3))


class Distance(nn.Linear):
    def forward(self, x, y):
        return (super().forward(x) - super().forward(y)).square().mean()


@architecture()
def perceptual(variant: str) -> Pair:
    @jax.custom_vjp
    def closed(x):
        return x

    closed.defvjp(lambda x: (x, None), lambda _, g: (jnp.zeros_like(g),))

    def apply(p, x, y):
        first = closed(x) if variant == "closed" else x
        return ((dense(p, first) - dense(p, y)) ** 2).mean()

    return pair_of(Distance(3, 4), apply, normal(4, 3), normal(4, 3, seed=1))


# Schedules.


def warmup(steps: int, rate: float = 0.1):
    return lambda n: rate * min((n + 1) / steps, 1)


def stepped(make, rates):
    """Return torch's optimizer with a learning rate for each step."""

    def optimizer(parameters):
        chosen = make(list(parameters))
        schedule = torch.optim.lr_scheduler.LambdaLR(chosen, rates)
        chosen.register_step_post_hook(lambda *_: schedule.step())
        return chosen

    return optimizer


@architecture()
def warmups(variant: str) -> Pair:
    late = optax.linear_schedule(0.0, 0.1, 4)
    right = optax.linear_schedule(0.025, 0.1, 3)
    optimizer = stepped(lambda p: torch.optim.SGD(p, 0.1), lambda n: min((n + 1) / 4, 1))
    rate = late if variant == "late" else right
    if variant == "joined":
        rate = optax.join_schedules([right, optax.constant_schedule(0.1)], [3])
    return pair_of(
        nn.Linear(3, 2),
        dense,
        normal(4, 3),
        torch_optimizer=optimizer,
        jax_optimizer=optax.sgd(rate),
    )


@architecture()
def grouped_warmups(variant: str) -> Pair:
    def groups(parameters):
        decayed = {"params": parameters[:1], "weight_decay": 0.1}
        return torch.optim.AdamW([decayed, {"params": parameters[1:], "weight_decay": 0.0}], lr=0.1)

    steps = 2 if variant == "short_and_late" else 4
    optimizer = stepped(groups, lambda n: min((n + 1) / steps, 1))
    rate = optax.linear_schedule(0.1 / steps, 0.1, steps - 1)
    if variant in ("late", "short_and_late"):
        rate = optax.linear_schedule(0.0, 0.1, steps)
    mask = lambda p: {"weight": True, "bias": False}  # noqa: E731 - one use
    adamw = optax.adamw(rate, weight_decay=0.1, mask=None if variant == "all_decayed" else mask)
    return pair_of(
        nn.Linear(3, 2), dense, normal(4, 3), torch_optimizer=optimizer, jax_optimizer=adamw
    )


@architecture()
def cosines(variant: str) -> Pair:
    def rate(n):
        return (n + 1) / 2 if n < 2 else 0.5 * (1 + np.cos(np.pi * (n - 2) / 6))

    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)

    late = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 8)

    def right(n):
        return late(n + 1) if variant == "one_ahead" else jnp.where(n < 2, 0.05 * (n + 1), late(n))

    chosen = late if variant == "late" else right
    return pair_of(
        nn.Linear(3, 2),
        dense,
        normal(4, 3),
        torch_optimizer=stepped(adamw, rate),
        jax_optimizer=optax.adamw(chosen, b2=0.95, weight_decay=0.0),
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)

    def forward(self, ids):
        return self.embed(ids) @ self.embed.weight.T


@architecture()
def tied_warmup(variant: str) -> Pair:
    def apply(p, ids):
        table = p["embed"]["weight"]
        return table[ids] @ table.T

    rate = optax.linear_schedule(0.025, 0.1, 3)
    if variant == "late":
        rate = optax.linear_schedule(0.0, 0.1, 4)
    optimizer = stepped(
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0), lambda n: min((n + 1) / 4, 1)
    )
    return pair_of(
        Tied(),
        apply,
        np.array([[0, 1], [2, 2]]),
        torch_optimizer=optimizer,
        jax_optimizer=optax.adamw(rate, weight_decay=0.0),
    )


# Operations that few models have.


class Resized(nn.Module):
    def __init__(self, corners: bool) -> None:
        super().__init__()
        self.a, self.corners = nn.Conv2d(2, 2, 1), corners

    def forward(self, x):
        size = 2 * x.shape[2], 2 * x.shape[3]
        return F.interpolate(self.a(x), size, mode="bilinear", align_corners=self.corners)


@architecture()
def resized(variant: str) -> Pair:
    def apply(p, x):
        h = conv(p["a"], x)
        shape = *h.shape[:2], 2 * h.shape[2], 2 * h.shape[3]
        if variant == "nearest":
            return jax.image.resize(h, shape, "nearest")
        if variant == "scale_and_translate":
            zero, scale = jnp.zeros(2), jnp.full(2, 2.0)
            return jax.image.scale_and_translate(h, shape, (2, 3), scale, zero, "linear")
        return jax.image.resize(h, shape, "bilinear")

    return pair_of(Resized(variant == "corners"), apply, normal(2, 2, 4, 5))


class Sampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 3, 1)

    def forward(self, x, grid):
        return F.grid_sample(self.a(x), grid, padding_mode="border", align_corners=False)


@architecture()
def sampled(variant: str) -> Pair:
    def apply(p, x, grid):
        h = conv(p["a"], x)
        size = np.array(h.shape[:1:-1])
        corners = variant == "corners"
        at = (grid + 1) / 2 * (size - 1) if corners else ((grid + 1) * size - 1) / 2
        if variant != "zeros":
            at = jnp.clip(at, 0, size - 1)
        low = jnp.floor(at)

        def value(image, column, row):
            inside = (column >= 0) & (column < size[0]) & (row >= 0) & (row < size[1])
            column = jnp.clip(column, 0, size[0] - 1).astype(int)
            row = jnp.clip(row, 0, size[1] - 1).astype(int)
            return image[:, row, column] * inside

        def of_one(image, at, low):
            total = 0.0
            for dx in (0, 1):
                for dy in (0, 1):
                    column, row = low[..., 0] + dx, low[..., 1] + dy
                    share = (1 - abs(at[..., 0] - column)) * (1 - abs(at[..., 1] - row))
                    total = total + share * value(image, column, row)
            return total

        return jax.vmap(of_one)(h, at, low)

    grid = np.random.default_rng(0).uniform(-1.3, 1.3, (2, 3, 3, 2)).astype(np.float32)
    return pair_of(Sampled(), apply, normal(2, 2, 4, 5), grid)


class Cumulated(nn.Linear):
    def forward(self, x):
        return super().forward(x).cumsum(1)


@architecture()
def cumulated(variant: str) -> Pair:
    def apply(p, x):
        h = dense(p, x)
        if variant == "associative":
            return jax.lax.associative_scan(jnp.add, h, axis=1)
        if variant == "other_axis":
            return jnp.cumsum(h, 2)
        if variant == "exclusive":
            return jnp.cumsum(h, 1) - h
        if variant == "from_the_end":
            return jnp.flip(jnp.cumsum(jnp.flip(h, 1), 1), 1)
        return jnp.cumsum(h, 1)

    return pair_of(Cumulated(3, 4), apply, normal(2, 5, 3))


class WeightNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 3))
        self.b = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 2))

    def forward(self, x):
        return self.b(F.elu(self.a(x)).transpose(1, 2))


@architecture()
def weight_norms(variant: str) -> Pair:
    def apply(p, x):
        size, direction = (p["a"]["parametrizations"]["weight"][f"original{i}"] for i in (0, 1))
        axes = (2,) if variant == "other_axes" else (1, 2)
        weight = size * direction / jnp.sqrt((direction**2).sum(axes, keepdims=True))
        h = jax.nn.elu(conv({"weight": weight, "bias": p["a"]["bias"]}, x))
        own = p["b"]["parametrizations"]["weight"]
        sigma = own["0"]["_u"] @ own["original"] @ own["0"]["_v"]
        matrix = own["original"] if variant == "not_divided" else own["original"] / sigma
        return h.swapaxes(1, 2) @ matrix.T + p["b"]["bias"]

    return pair_of(WeightNormed().eval(), apply, normal(2, 3, 7))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x):
        a, b, c = self.a(x), self.b(x), self.c(x)
        return torch.lerp(a, b, 0.3), torch.addcmul(a, b, c, value=0.5)


@architecture()
def mixed(variant: str) -> Pair:
    def apply(p, x):
        a, b, c = (dense(p[name], x) for name in "abc")
        share = 0.7 if variant == "exchanged" else 0.3
        first = a * (1 - share) + b * share if variant == "shares" else a + share * (b - a)
        return first, 0.5 * b * c if variant == "no_sum" else a + 0.5 * b * c

    return pair_of(Mixed(), apply, normal(4, 3))


class Sorted(nn.Linear):
    def forward(self, x):
        return super().forward(x).topk(3, -1).values


@architecture()
def sorted_values(variant: str) -> Pair:
    def apply(p, x):
        h = dense(p, x)
        if variant == "sort":
            return jnp.flip(jnp.sort(h, -1), -1)[..., :3]
        if variant == "smallest":
            return -jax.lax.top_k(-h, 3)[0]
        values = jax.lax.top_k(h, 3)[0]
        return values[..., ::-1] if variant == "rising" else values

    return pair_of(Sorted(3, 6), apply, normal(4, 3))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        return {"mean": self.a(x), "scale": F.softplus(self.b(x))}


@architecture()
def named_outputs(variant: str) -> Pair:
    def apply(p, x):
        mean, scale = dense(p["a"], x), jax.nn.softplus(dense(p["b"], x))
        if variant == "exchanged":
            return {"mean": scale, "scale": mean}
        if variant == "other_order":
            return {"scale": scale, "mean": mean}
        return {"mean": mean, "scale": scale}

    return pair_of(Named(), apply, normal(4, 3))


class Quantized(nn.Linear):
    def forward(self, x):
        step = self.weight.abs().amax(1, keepdim=True) / 7
        rounded = (self.weight / step).round().clamp(-8, 7) * step
        return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


@architecture()
def quantized(variant: str) -> Pair:
    def apply(p, x):
        w = p["weight"]
        step = jnp.abs(w).max(1, keepdims=True) / 7
        rounded = jnp.clip(jnp.round(w / step), -8, 7) * step
        if variant != "no_straight_through":
            rounded = w + jax.lax.stop_gradient(rounded - w)
        return dense({"weight": rounded, "bias": p["bias"]}, x)

    return pair_of(
        Quantized(4, 3), apply, normal(3, 4), torch_loss=mean_squares, jax_loss=mean_squares
    )


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.ConvTranspose1d(4, 6, 3, 2, 1, output_padding=1), nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(self.up(x).transpose(1, 2))


@architecture()
def upsampled(variant: str) -> Pair:
    def apply(p, x):
        kernel = p["up"]["weight"].swapaxes(0, 1)
        kernel = kernel if variant == "not_flipped" else kernel[..., ::-1]
        pads = [(2, 1)] if variant == "other_end" else [(1, 2)]
        h = jax.lax.conv_general_dilated(x, kernel, (1,), pads, lhs_dilation=(2,))
        h = h + p["up"]["bias"][:, None]
        return layer_norm(p["norm"], h.swapaxes(1, 2))

    return pair_of(Normed(), apply, normal(2, 4, 5))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4, padding_idx=0)

    def forward(self, ids):
        return self.embed(ids).tanh()


@architecture()
def padding_rows(variant: str) -> Pair:
    def apply(p, ids):
        table = p["embed"]["weight"]
        if variant == "where":
            first = (jnp.arange(9) == 0)[:, None]
            table = jnp.where(first, jax.lax.stop_gradient(table), table)
        elif variant != "learned":
            table = table.at[0].set(jax.lax.stop_gradient(table[0]))
        return jnp.tanh(table[ids])

    return pair_of(Words(), apply, integers(9, 3, 5))
