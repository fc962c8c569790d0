"""Losses between an output and a target of the same shape."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.catalogue.kinds import Arguments, Arrays, LossKind, Options, Signal, Tensors


def any_float(signal: Signal) -> Sequence[Options]:
    """Return the one variant of a loss that takes every signal of floating values."""
    return () if signal.form == "tokens" else ({},)


def normal_targets(
    signal: Signal, options: Options, rng: np.random.Generator, ignored: npt.NDArray[np.bool_]
) -> Arrays:
    """Return standard normal targets of the signal's shape."""
    return {"target": rng.standard_normal((len(ignored), *signal.size))}


def count_elements(options: Options, batch: Tensors) -> torch.Tensor:
    """Return the number of elements of the target."""
    target = batch["target"]
    return torch.tensor(target.numel(), device=target.device)


def elements_per_item(options: Options, batch: Arguments) -> jax.Array:
    """Return, for each item, the number of elements of its target."""
    target = batch["target"]
    return jax.numpy.full(target.shape[0], float(np.prod(target.shape[1:], dtype=int)))


def _mse(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    return torch.nn.functional.mse_loss(out, batch["target"], reduction=reduction)


def _mse_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
    return ((out - batch["target"]) ** 2).sum(axis=tuple(range(1, out.ndim)))


KINDS = (LossKind("mse", any_float, normal_targets, _mse, count_elements, _mse_items, elements_per_item),)
