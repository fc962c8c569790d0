"""Loops of JAX on two devices by `shard_map`, of which one has three quarters of each window's
items.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, PartitionSpec

from gradcheck_suite import JaxTrainingRun, jax_training_loop
from tests.verification.jax_loops import item_sums, windows

ALL, DEALT = PartitionSpec(), PartitionSpec("devices")


def two_devices():
    return jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))


def dealt(window):
    """Return a window in one batch of which one device has a quarter, padded to as many rows, and
    weights.
    """
    whole = jax.tree.map(lambda *parts: jnp.concatenate(parts), *window)
    items = len(jax.tree.leaves(whole)[0])
    rows = items - items // 4
    padding = 2 * rows - items
    return jax.tree.map(lambda a: jnp.concatenate([a, a[:padding]]), whole), jnp.arange(
        2 * rows
    ) < items


def train(run, reduce, *, inside=False):
    """Train with `reduce(sum of this device, its count)` in each device.

    Args:
        run: the training run.
        reduce: makes a gradient of what a device has.
        inside: whether the optimizer is called in every device, or once after them.
    """

    def part(params, state, batch, weights):
        total, count = jax.grad(lambda p: item_sums(run, p, batch, weights), has_aux=True)(params)
        gradient = jax.tree.map(lambda g: reduce(run, g, count).astype(g.dtype), total)
        return run.optimizer.update(gradient, state, params) if inside else (gradient, state)

    sharded = jax.jit(
        jax.shard_map(
            part,
            mesh=two_devices(),
            in_specs=(ALL, ALL, DEALT, DEALT),
            out_specs=(ALL, ALL),
            check_vma=False,
        )
    )
    params, state = run.params, run.optimizer.init(run.params)
    for _ in range(run.epochs):
        for window in windows(run):
            updates, state = sharded(params, state, *dealt(window))
            if not inside:
                updates, state = run.optimizer.update(updates, state, params)
            params = optax.apply_updates(params, updates)


def by_counts(run, total, count):
    whole = jax.lax.psum(total, "devices")
    return whole / jax.lax.psum(count, "devices") if run.reduction == "mean" else whole


@jax_training_loop
def sums_and_counts(run: JaxTrainingRun) -> None:
    train(run, by_counts)


@jax_training_loop
def sums_and_counts_inside(run: JaxTrainingRun) -> None:
    train(run, by_counts, inside=True)


@jax_training_loop
def mean_of_devices(run: JaxTrainingRun) -> None:
    """`pmean` of each device's mean, whatever it counts."""
    train(
        run,
        lambda run, total, count: (
            jax.lax.pmean(total / jnp.maximum(count, 1e-9), "devices")
            if run.reduction == "mean"
            else jax.lax.psum(total, "devices")
        ),
    )


@jax_training_loop
def local_counts_inside(run: JaxTrainingRun) -> None:
    """Each device divides the sum of all by its own count, and steps by itself."""
    train(
        run,
        lambda run, total, count: (
            jax.lax.psum(total, "devices") / (2 * count)
            if run.reduction == "mean"
            else jax.lax.psum(total, "devices")
        ),
        inside=True,
    )
