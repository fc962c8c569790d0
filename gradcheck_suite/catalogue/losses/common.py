"""What the losses share: which signals they take, how they draw, what they divide by.

Shapes: n items; `positions` are the axes that hold one prediction each: () for a vector, (T,) for a sequence,
(H, W) for an image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.catalogue.definitions import Arguments, Arrays, Form, Options, Signal, Tensors, product

Variants = Callable[[Signal], Sequence[Options]]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
FLOATS: tuple[Form, ...] = ("vector", "sequence", "image")


def on(*forms: Form, features: int = 1, **choices: Sequence[Any]) -> Variants:
    """Return the variants of a loss that takes signals of these forms with at least so many features."""

    def variants(signal: Signal) -> Sequence[Options]:
        return product(**choices) if signal.form in forms and signal.features >= features else ()

    return variants


def on_floats(**choices: Sequence[Any]) -> Variants:
    """Return the variants of a loss that takes every signal of floating values."""
    return on(*FLOATS, features=1, **choices)


def positions(signal: Signal) -> tuple[int, ...]:
    """Return the axes of an item that hold one prediction each."""
    return signal.size[1:] if signal.form == "image" else signal.size[:-1]


def at_positions(signal: Signal, ignored: Bools) -> Bools:
    """Return which targets do not count, of shape (n, *positions)."""
    where = positions(signal)
    per_item = ignored.reshape(len(ignored), *ignored.shape[1:], *(1,) * (len(where) + 1 - ignored.ndim))
    return np.broadcast_to(per_item, (len(ignored), *where))


def positive(rng: np.random.Generator, *shape: int) -> Floats:
    """Draw weights or variances between 1/4 and 2."""
    return rng.uniform(0.25, 2.0, shape)


def signs(rng: np.random.Generator, *shape: int) -> Floats:
    """Draw targets of -1 and 1, two thirds of them -1."""
    return np.where(rng.random(shape) < 1 / 3, 1.0, -1.0)


def normal_targets(signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools) -> Arrays:
    """Return standard normal targets of the signal's shape."""
    return {"target": rng.standard_normal((len(ignored), *signal.size))}


def sign_targets(signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools) -> Arrays:
    """Return targets of -1 and 1 of the signal's shape."""
    return {"target": signs(rng, len(ignored), *signal.size)}


def count_elements(options: Options, batch: Tensors) -> torch.Tensor:
    """Return the number of elements of the target."""
    target = batch["target"]
    return torch.tensor(target.numel(), device=target.device)


def elements_per_item(options: Options, batch: Arguments) -> jax.Array:
    """Return, for each item, the number of elements of its target."""
    target = batch["target"]
    return jnp.full(target.shape[0], float(np.prod(target.shape[1:], dtype=int)))


def count_items(options: Options, batch: Tensors) -> torch.Tensor:
    """Return the number of items."""
    target = batch["target"]
    return torch.tensor(len(target), device=target.device)


def one_per_item(options: Options, batch: Arguments) -> jax.Array:
    """Return 1 for each item."""
    return jnp.ones(batch["target"].shape[0])


def count_weights(options: Options, batch: Tensors) -> torch.Tensor:
    """Return the sum of the weights that the batch carries, unrounded by a low-precision dtype of theirs."""
    return batch["weight"].sum(dtype=torch.float64)


def weight_per_item(options: Options, batch: Arguments) -> jax.Array:
    """Return, for each item, the sum of its weights."""
    return per_item(batch["weight"])


def per_item(values: jax.Array) -> jax.Array:
    """Sum every axis but the first."""
    return values.reshape(values.shape[0], -1).sum(axis=1)


def never_uniform(signal: Signal, options: Options) -> bool:
    """Return False: the count of an item depends on its data."""
    return False


def rows(out: torch.Tensor) -> torch.Tensor:
    """Return a sequence's output as (n * T, C), the shape in which losses over classes are usually called."""
    return out.flatten(0, 1) if out.ndim == 3 else out


def class_weights(out: torch.Tensor, classes: int) -> torch.Tensor:
    """Return the weight 0.5 + c of each class c, in the output's dtype and on its device."""
    return 0.5 + torch.arange(classes, dtype=out.dtype, device=out.device)


def classes_last(out: jax.Array) -> jax.Array:
    """Return an output with its class axis last: images carry it second."""
    return jnp.moveaxis(out, 1, -1) if out.ndim == 4 else out


def softplus(x: jax.Array) -> jax.Array:
    """Return log(1 + e^x), or x where x is above 20: torch's `softplus` is that function."""
    return jnp.where(x > 20.0, x, jnp.logaddexp(x, 0.0))


def hinge(x: jax.Array) -> jax.Array:
    """Return max(x, 0) with slope 1 at 0, the subgradient of torch's `clamp_min`; `jnp.maximum` takes 1/2."""
    return jnp.where(x >= 0, x, 0.0)
