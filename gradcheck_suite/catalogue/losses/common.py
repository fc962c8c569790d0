"""Helpers of the losses: accepted signals, drawn targets, divisors of the mean.

Shapes: n is the number of items; `positions` are the axes with one prediction each: () for a vector, (T,) for a
sequence, (H, W) for an image.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.catalogue.definitions import Arguments, Arrays, LossDefinition, Tensors
from gradcheck_suite.catalogue.signals import FLOATS, Options, Signal, on

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def positions(signal: Signal) -> tuple[int, ...]:
    """Return the lengths of an item's axes that have one prediction each."""
    return signal.size[1:] if signal.form == "image" else signal.size[:-1]


def at_positions(signal: Signal, ignored: Bools) -> Bools:
    """Return the ignored targets, (n, *positions), from those of shape (n,) or (n, T)."""
    where = positions(signal)
    per_item = ignored.reshape(len(ignored), *ignored.shape[1:], *(1,) * (len(where) + 1 - ignored.ndim))
    return np.broadcast_to(per_item, (len(ignored), *where))


def positive(rng: np.random.Generator, *shape: int) -> Floats:
    """Return weights or variances drawn uniformly between 1/4 and 2."""
    return rng.uniform(0.25, 2.0, shape)


def signs(rng: np.random.Generator, *shape: int) -> Floats:
    """Return drawn targets of -1 and 1, of which two thirds are -1 on average."""
    return np.where(rng.random(shape) < 1 / 3, 1.0, -1.0)


def normal_targets(signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools) -> Arrays:
    """Return standard normal targets, (n, *size)."""
    return {"target": rng.standard_normal((len(ignored), *signal.size))}


def sign_targets(signal: Signal, options: Options, rng: np.random.Generator, ignored: Bools) -> Arrays:
    """Return targets of -1 and 1, (n, *size)."""
    return {"target": signs(rng, len(ignored), *signal.size)}


def count_elements(options: Options, batch: Tensors) -> torch.Tensor:
    """Return the number of elements of the target, a scalar."""
    target = batch["target"]
    return torch.tensor(target.numel(), device=target.device)


def elements_per_item(options: Options, batch: Arguments) -> jax.Array:
    """Return the number of elements of each item's target, (n,)."""
    target = batch["target"]
    return jnp.full(target.shape[0], float(np.prod(target.shape[1:], dtype=int)))


def count_items(options: Options, batch: Tensors) -> torch.Tensor:
    """Return the number of items, a scalar."""
    target = batch["target"]
    return torch.tensor(len(target), device=target.device)


def one_per_item(options: Options, batch: Arguments) -> jax.Array:
    """Return ones, (n,)."""
    return jnp.ones(batch["target"].shape[0])


def count_weights(options: Options, batch: Tensors) -> torch.Tensor:
    """Return the sum of the batch's weights in float64, so that a lower precision of the weights does not round it."""
    return batch["weight"].sum(dtype=torch.float64)


def weight_per_item(options: Options, batch: Arguments) -> jax.Array:
    """Return the sum of each item's weights, (n,)."""
    return per_item(batch["weight"])


def per_item(values: jax.Array) -> jax.Array:
    """Return the sum over every axis but the first, (n,)."""
    return values.reshape(values.shape[0], -1).sum(axis=1)


def never_uniform(signal: Signal, options: Options) -> bool:
    """Return False: `uniform` of a loss whose item counts depend on the data."""
    return False


def rows(out: torch.Tensor) -> torch.Tensor:
    """Return a sequence's output as (n * T, C), the shape that class losses are usually called with."""
    return out.flatten(0, 1) if out.ndim == 3 else out


def class_weights(out: torch.Tensor, classes: int) -> torch.Tensor:
    """Return the weight 0.5 + c of each class c, in the output's dtype and on its device."""
    return 0.5 + torch.arange(classes, dtype=out.dtype, device=out.device)


def classes_last(out: jax.Array) -> jax.Array:
    """Return an output with its class axis last; it is the second axis of an image."""
    return jnp.moveaxis(out, 1, -1) if out.ndim == 4 else out


def softplus(x: jax.Array) -> jax.Array:
    """Return torch's `softplus`: log(1 + e^x), and x where x is above 20."""
    return jnp.where(x > 20.0, x, jnp.logaddexp(x, 0.0))


def hinge(x: jax.Array) -> jax.Array:
    """Return max(x, 0) with derivative 1 at 0, as torch's `clamp_min`; the derivative of `jnp.maximum` is 1/2 there."""
    return jnp.where(x >= 0, x, 0.0)


def absolute(x: jax.Array) -> jax.Array:
    """Return |x| with derivative 0 at 0, as torch's `abs` and `l1_loss`; the derivative of `jnp.abs` is 1 there."""
    return jnp.sign(x) * x


def elementwise(
    name: str,
    torch_loss: Callable[[Options, torch.Tensor, Tensors, str], torch.Tensor],
    jax_loss: Callable[..., jax.Array],
    *,
    targets: Callable[[Signal, Options, np.random.Generator, Bools], Arrays] = normal_targets,
    **choices: Any,
) -> LossDefinition:
    """Return a loss that compares output and target element by element; its mean divides by the number of elements.

    Args:
        name: the kind's name in specs.
        torch_loss: (options, output, batch, reduction) -> the scalar loss.
        jax_loss: (output, target, **options) -> the loss of each element, in the output's shape.
        targets: draws the targets.
        choices: values of each option, the simplest first.
    """

    def jax_items(options: Options, out: jax.Array, batch: Arguments) -> jax.Array:
        return per_item(jax_loss(out, batch["target"], **{option: options[option] for option in choices}))

    return LossDefinition(
        name, on(*FLOATS, **choices), targets, torch_loss, count_elements, jax_items, elements_per_item
    )
