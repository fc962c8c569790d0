"""Ports of models of images and sound: convolutions, their norms, resizing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's documents call it
from torch import nn

from studies.ports.planted import (
    Pair,
    Parameters,
    architecture,
    conv,
    dense,
    group_norm,
    layer_norm,
    normal,
    pair_of,
)


class WaveLayer(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.dilated = nn.Conv1d(width, 2 * width, 2, dilation=dilation)
        self.residual, self.skip = nn.Conv1d(width, width, 1), nn.Conv1d(width, width, 1)

    def forward(self, x):
        content, gate = self.dilated(F.pad(x, (self.dilation, 0))).chunk(2, 1)
        h = torch.tanh(content) * torch.sigmoid(gate)
        return x + self.residual(h), self.skip(h)


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, 6, 1), nn.Conv1d(6, 8, 1)
        self.layers = nn.ModuleList(WaveLayer(6, d) for d in (1, 2, 4))

    def forward(self, x):
        x, total = self.first(x), 0
        for layer in self.layers:
            x, skip = layer(x)
            total = total + skip
        return self.last(F.relu(total))


def shifted_sum(p: Parameters, x: jax.Array, dilation: int) -> jax.Array:
    """Return a causal convolution with two taps as the sum of two products."""
    back = jnp.pad(x, ((0, 0), (0, 0), (dilation, 0)))[..., : x.shape[-1]]
    taps = jnp.einsum("oi,nit->not", p["weight"][..., 0], back) + jnp.einsum(
        "oi,nit->not", p["weight"][..., 1], x
    )
    return taps + p["bias"][:, None]


@architecture()
def wavenet(variant: str) -> Pair:
    def apply(p, x):
        x, skips = conv(p["first"], x), []
        for i, d in enumerate((1, 2, 4)):
            q = p["layers"][str(i)]
            if variant == "shifted_sum":
                both = shifted_sum(q["dilated"], x, d)
            else:
                wide = 3 if variant == "dilation" and i == 2 else d
                pads = [(0, wide)] if variant == "padded_right" and i == 1 else [(wide, 0)]
                both = conv(q["dilated"], x, pads, dilation=wide)
            content, gate = jnp.split(both, 2, 1)
            if variant == "halves" and i == 0:
                content, gate = gate, content
            h = jnp.tanh(content) * jax.nn.sigmoid(gate)
            if variant == "one_product":
                joined = {
                    k: jnp.concatenate([q["residual"][k], q["skip"][k]]) for k in ("weight", "bias")
                }
                more, skip = jnp.split(conv(joined, h), 2, 1)
            else:
                more, skip = conv(q["residual"], h), conv(q["skip"], h)
            x = (x + more) * (0.5**0.5 if variant == "residual_scaled" and i == 1 else 1.0)
            skips.append(skip)
        total = sum(skips[1:] if variant == "first_skip" else skips)
        return conv(p["last"], jax.nn.gelu(total) if variant == "gelu" else jax.nn.relu(total))

    return pair_of(WaveNet(), apply, normal(2, 1, 12))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = (
            nn.Conv2d(2, 6, 3, padding=1),
            nn.Conv2d(6, 8, 3, stride=2, padding=1),
        )
        self.norm = nn.GroupNorm(2, 8, eps=1e-5)
        self.up = nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1)
        self.out = nn.Conv2d(12, 2, 1)

    def forward(self, x):
        x = F.silu(self.enter(x))
        return self.out(torch.cat([x, self.up(F.silu(self.norm(self.down(x))))], 1))


@architecture()
def unet(variant: str) -> Pair:
    def up(p, x):
        kernel = p["weight"].swapaxes(0, 1)
        kernel = kernel if variant == "not_flipped" else kernel[..., ::-1, ::-1]
        pads = [(2, 1)] * 2 if variant == "padding" else [(1, 2)] * 2
        out = jax.lax.conv_general_dilated(x, kernel, (1, 1), pads, lhs_dilation=(2, 2))
        return out + p["bias"][:, None, None]

    def norm(p, x):
        if variant == "channels_last":
            y = jnp.moveaxis(x, 1, -1)
            parts = y.reshape(*y.shape[:3], 2, 4)
            mean, mean_square = (
                parts.mean((1, 2, 4), keepdims=True),
                (parts**2).mean((1, 2, 4), keepdims=True),
            )
            y = ((parts - mean) * jax.lax.rsqrt(mean_square - mean**2 + 1e-5)).reshape(y.shape)
            return jnp.moveaxis(y * p["weight"] + p["bias"], -1, 1)
        return group_norm(p, x, 2, 1e-6 if variant == "epsilon" else 1e-5)

    def apply(p, x):
        x = jax.nn.silu(conv(p["enter"], x, 1))
        low = conv(p["down"], x, [(0, 1)] * 2 if variant == "stride_padding" else 1, stride=2)
        high = up(p["up"], jax.nn.silu(norm(p["norm"], low)))
        skip = jax.lax.stop_gradient(x) if variant == "skip_stopped" else x
        parts = [high, skip] if variant == "skip_last" else [skip, high]
        return conv(p["out"], jnp.concatenate(parts, 1))

    return pair_of(UNet(), apply, normal(2, 2, 8, 8))


class StandardConv(nn.Conv2d):
    def forward(self, x):
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias, padding=self.padding)


class BigTransfer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm, self.conv, self.head = (
            nn.GroupNorm(4, 8),
            StandardConv(8, 8, 3, padding=1),
            nn.Linear(8, 5),
        )

    def forward(self, x):
        x = self.stem(x)
        x = x + self.conv(F.relu(self.norm(x)))
        return self.head(F.max_pool2d(x, 3, 2, 1).mean((2, 3)))


@architecture(logits=True)
def weight_standardized(variant: str) -> Pair:
    def standard(w):
        axes = (0, 2, 3) if variant == "over_outputs" else (1, 2, 3)
        mean, ddof = w.mean(axes, keepdims=True), int(variant != "biased")
        if variant == "epsilon_inside":
            return (w - mean) / jnp.sqrt(w.var(axes, ddof=ddof, keepdims=True) + 1e-5)
        spread = w.std(axes, ddof=ddof, keepdims=True) + 1e-5
        return (w - mean) / (
            jax.lax.stop_gradient(spread) if variant == "spread_stopped" else spread
        )

    def apply(p, x):
        x = conv(p["stem"], x, 1)
        h = group_norm(p["norm"], x, 4)
        h = h if variant == "before_relu" else jax.nn.relu(h)
        w = standard(p["conv"]["weight"])
        if variant == "patches":
            cut = jax.lax.conv_general_dilated_patches(h, (3, 3), (1, 1), [(1, 1)] * 2)
            h = (
                jnp.einsum("ok,nkhw->nohw", w.reshape(8, -1), cut)
                + p["conv"]["bias"][:, None, None]
            )
        else:
            h = conv({"weight": w, "bias": p["conv"]["bias"]}, h, 1)
        x = x + (jax.nn.relu(h) if variant == "before_relu" else h)
        low = 0.0 if variant == "pool_zeros" else -jnp.inf
        sides = ((0, 0), (0, 0), (1, 1), (1, 1))
        padded = jnp.pad(x, sides, constant_values=low)
        x = jax.lax.reduce_window(
            padded, -jnp.inf, jax.lax.max, (1, 1, 3, 3), (1, 1, 2, 2), "VALID"
        )
        return dense(p["head"], x.mean((2, 3)))

    return pair_of(BigTransfer(), apply, normal(2, 3, 6, 6))


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(1e-6 * torch.ones(width))

    def forward(self, x):
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.gamma * self.shrink(F.gelu(self.grow(h)))
        return x + h.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = (
            nn.Conv2d(3, 6, 2, stride=2),
            nn.Sequential(*(ConvNextBlock(6) for _ in range(2))),
        )
        self.norm, self.head = nn.LayerNorm(6, eps=1e-6), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.stem(x)).mean((2, 3))))


@architecture(logits=True)
def convnext(variant: str) -> Pair:
    def depthwise(p, x, i):
        w = p["weight"]
        if variant == "flipped":
            w = w[..., ::-1, ::-1]
        if variant == "turned" and i == 1:
            w = w.swapaxes(2, 3)
        if variant == "taps":
            wide = jnp.pad(x, ((0, 0), (0, 0), (2, 2), (2, 2)))
            high, across = x.shape[2:]
            taps = [
                w[:, 0, a, b, None, None] * wide[:, :, a : a + high, b : b + across]
                for a in range(5)
                for b in range(5)
            ]
            return sum(taps) + p["bias"][:, None, None]
        return conv({"weight": w, "bias": p["bias"]}, x, 2, groups=w.shape[0])

    def block(p, x, i):
        h = depthwise(p["depthwise"], x, i).transpose(0, 2, 3, 1)
        h = layer_norm(p["norm"], h, 1e-5 if variant == "epsilon" and i == 0 else 1e-6)
        h = jax.nn.gelu(dense(p["grow"], h), approximate=variant == "tanh_gelu" and i == 1)
        h = dense(p["shrink"], h) * (1.0 if variant == "no_gamma" else p["gamma"])
        return x + h.transpose(0, 3, 1, 2)

    def apply(p, x):
        x = conv(p["stem"], x, stride=2)
        for i in range(2):
            x = block(p["blocks"][str(i)], x, i)
        if variant == "pooled_after":
            return dense(
                p["head"], layer_norm(p["norm"], x.transpose(0, 2, 3, 1), 1e-6).mean((1, 2))
            )
        return dense(p["head"], layer_norm(p["norm"], x.mean((2, 3)), 1e-6))

    return pair_of(ConvNext(), apply, normal(2, 3, 8, 8))
