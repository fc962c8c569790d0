"""Pooling of a sequence to one vector: the mean, maximum or last of its valid positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import torch

from gradcheck_suite.catalogue.definitions import Arguments, Implementation, LayerDefinition
from gradcheck_suite.catalogue.pooling import first_maximum
from gradcheck_suite.catalogue.signals import Options, Signal, expect_form, product, vector


class MeanOverTime(torch.nn.Module):
    """Mean of the positions where the mask is True: (n, T, D) and a mask (n, T) to (n, D)."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is None:
            return x.mean(1)
        kept = mask.unsqueeze(-1)
        return x.masked_fill(~kept, 0).sum(1) / kept.sum(1)


class MaxOverTime(torch.nn.Module):
    """Maximum of the positions where the mask is True: (n, T, D) and a mask (n, T) to (n, D).

    Args:
        shared: whether equal maxima share the gradient (`amax`) or the first one gets it (`max`).
    """

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), -torch.inf)
        return x.amax(1) if self.shared else x.max(1).values


class LastStep(torch.nn.Module):
    """Last position where the mask is True: (n, T, D) and a mask (n, T), True on a prefix, to (n, D)."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is None:
            return x[:, -1]
        return x[torch.arange(len(x), device=x.device), mask.sum(1) - 1]


def _mean(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    kept = extras["mask"].astype(x.dtype) if "mask" in extras else jnp.ones(x.shape[:2], x.dtype)
    return jnp.einsum("ntd,nt->nd", x, kept) / kept.sum(1)[:, None]


def _max(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    if "mask" in extras:
        x = jnp.where(extras["mask"][:, :, None], x, -jnp.inf)
    return x.max(1) if options["shared"] else first_maximum(jnp.swapaxes(x, 1, 2))


def _last(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    if "mask" not in extras:
        return x[:, -1]
    position = jnp.arange(x.shape[1])
    last = jnp.where(extras["mask"], position, -1).max(1)
    return jnp.where((position == last[:, None])[:, :, None], x, 0.0).sum(1)


def _kind(
    name: str,
    module: Callable[[Options], torch.nn.Module],
    jax_apply: Implementation,
    options: Sequence[Options] = ({},),
) -> LayerDefinition:
    def variants(signal: Signal) -> Sequence[Options]:
        return options if signal.form == "sequence" else ()

    def out(signal: Signal, options: Options) -> Signal:
        expect_form(signal, name, "sequence")
        return vector(signal.features)

    return LayerDefinition(name, variants, out, lambda signal, options: module(options), jax_apply, uses_mask=True)


KINDS = (
    _kind("mean_over_time", lambda options: MeanOverTime(), _mean),
    _kind("max_over_time", lambda options: MaxOverTime(options["shared"]), _max, product(shared=(False, True))),
    _kind("last_step", lambda options: LastStep(), _last),
)
