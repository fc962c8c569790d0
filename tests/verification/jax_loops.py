"""Sound loops of JAX, each as somebody would write it: none may be blamed."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from gradcheck_suite import JaxTrainingRun, jax_training_loop


def windows(run):
    batches, k = list(run.batches), run.accumulation_steps
    return [batches[i : i + k] for i in range(0, len(batches), k)]


def item_sums(run, params, batch, weight):
    """Return the summed loss of the items that count, and their count, by `vmap` over items."""

    def item(one):
        one = jax.tree.map(lambda a: a[None], one)
        count = run.count(one) if run.reduction == "mean" else jnp.ones_like(run.count(one))
        return run.loss(params, one) * count, count

    losses, counts = jax.vmap(item)(batch)
    return jnp.where(weight, losses, 0).sum(), jnp.where(weight, counts, 0).sum()


class TrainState(NamedTuple):
    """What flax's TrainState has."""

    params: Any
    opt_state: Any
    grads: Any
    count: Any


@jax_training_loop
def train_state(run: JaxTrainingRun) -> None:
    """Accumulate and apply, as users of flax's TrainState write it.

    Each micro-batch is one compiled call.
    """

    @jax.jit
    def accumulate(state, batch):
        count = run.count(batch) if run.reduction == "mean" else jnp.ones_like(run.count(batch))
        value, grads = jax.value_and_grad(run.loss)(state.params, batch)
        grads = jax.tree.map(lambda a, g: a + (g * count).astype(a.dtype), state.grads, grads)
        return state._replace(grads=grads, count=state.count + count), value

    @jax.jit
    def apply(state):
        divisor = state.count if run.reduction == "mean" else 1
        grads = jax.tree.map(lambda a: (a / divisor).astype(a.dtype), state.grads)
        updates, opt_state = run.optimizer.update(grads, state.opt_state, state.params)
        return TrainState(
            optax.apply_updates(state.params, updates),
            opt_state,
            jax.tree.map(jnp.zeros_like, grads),
            jnp.zeros_like(state.count),
        )

    zeros = jax.tree.map(jnp.zeros_like, run.params)
    count = jnp.zeros_like(run.count(next(iter(run.batches))))
    state = TrainState(run.params, run.optimizer.init(run.params), zeros, count)
    for _ in range(run.epochs):
        for i, batch in enumerate(run.batches):
            state, _ = accumulate(state, batch)
            if (i + 1) % run.accumulation_steps == 0 or i + 1 == len(run.batches):
                state = apply(state)


@jax_training_loop
def whole_window(run: JaxTrainingRun) -> None:
    """Concatenate the window: the large batch itself."""
    step = jax.jit(lambda p, s, b: run.optimizer.update(jax.grad(run.loss)(p, b), s, p))
    params, state = run.params, run.optimizer.init(run.params)
    for _ in range(run.epochs):
        for window in windows(run):
            updates, state = step(
                params, state, jax.tree.map(lambda *a: jnp.concatenate(a), *window)
            )
            params = optax.apply_updates(params, updates)


@jax_training_loop
def flat_vector(run: JaxTrainingRun) -> None:
    """The optimizer has one vector of all parameters.

    The window is differentiated at once, eagerly.
    """
    flat, unravel = ravel_pytree(run.params)
    state = run.optimizer.init(flat)
    for _ in range(run.epochs):
        for window in windows(run):

            def objective(vector, window=window):
                params = unravel(vector)
                if run.reduction == "sum":
                    return sum(run.loss(params, batch) for batch in window)
                counts = [run.count(batch) for batch in window]
                return sum(
                    run.loss(params, b) * n for b, n in zip(window, counts, strict=True)
                ) / sum(counts)

            updates, state = run.optimizer.update(
                jax.grad(objective)(flat).astype(flat.dtype), state
            )
            flat = flat + updates


SOUND = (train_state, whole_window, flat_vector)
