"""Accumulation in JAX as optax's and flax's guides write it: `MultiSteps`, `micro_grad`,
`lax.scan`, `TrainState`.

What a guide leaves to its reader, such as the size of the next micro-batch, is what the run hands
out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

from gradcheck_suite.core.contract import JaxTrainingRun, jax_training_loop
from gradcheck_suite.core.text import summary_of
from gradcheck_suite.loops.jax_modes import jax_scan_carry, windows_of
from gradcheck_suite.loops.trainers.trainer import PLANS_OF_JAX, Trainer


def train_with_multi_steps(run: JaxTrainingRun, k: Any = None, **options: Any) -> None:
    """Train with `optax.MultiSteps`, one compiled step for each micro-batch.

    Args:
        run: the training run.
        k: the wrapper's `every_k_schedule`; None for the run's `accumulation_steps`.
        options: other arguments of the wrapper.
    """
    import jax
    import optax

    optimizer = optax.MultiSteps(
        run.optimizer, every_k_schedule=k or run.accumulation_steps, **options
    )

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        updates, state = optimizer.update(jax.grad(run.loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    params = run.params
    state = optimizer.init(run.params)
    for _ in range(run.epochs):
        for batch in run.batches:
            params, state = step(params, state, batch)


@jax_training_loop
def multi_steps(run: JaxTrainingRun) -> None:
    """`optax.MultiSteps` as its documentation shows it."""
    train_with_multi_steps(run)


@jax_training_loop
def multi_steps_schedule(run: JaxTrainingRun) -> None:
    """`optax.MultiSteps` with a function for `every_k_schedule`."""
    import jax.numpy as jnp

    train_with_multi_steps(run, lambda step: jnp.asarray(run.accumulation_steps, step.dtype))


@jax_training_loop
def multi_steps_sum(run: JaxTrainingRun) -> None:
    """`optax.MultiSteps(use_grad_mean=False)`."""
    train_with_multi_steps(run, use_grad_mean=False)


@jax_training_loop
def multi_steps_skip(run: JaxTrainingRun) -> None:
    """`optax.MultiSteps(should_skip_update_fn=skip_not_finite)`."""
    import optax

    train_with_multi_steps(run, should_skip_update_fn=optax.skip_not_finite)


@jax_training_loop
def multi_steps_bfloat16(run: JaxTrainingRun) -> None:
    """`optax.MultiSteps(accumulator_dtype=bfloat16)`."""
    train_with_multi_steps(run, accumulator_dtype="bfloat16")


def _windows_at_once(run: JaxTrainingRun, gradient: Callable[[Any, Any, int], Any]) -> None:
    """Train with the gradient of each window's items in one batch, (params, batch, items of a
    micro-batch) -> it.
    """
    import jax
    import jax.numpy as jnp
    import optax

    params = run.params
    state = run.optimizer.init(run.params)
    windows = chain.from_iterable(windows_of(run) for _ in range(run.epochs))
    for window in windows:
        # the guide has one size of micro-batch: that of the first one is handed on
        items = len(jax.tree.leaves(window[0])[0])
        # `micro_grad` takes a batch apart by itself: it is handed the whole window
        whole = jax.tree.map(lambda *parts: jnp.concatenate(parts), *window)
        updates, state = run.optimizer.update(gradient(params, whole, items), state, params)
        params = optax.apply_updates(params, updates)


def _micro_grad(run: JaxTrainingRun, accumulator: str) -> None:
    import jax
    from optax import microbatching

    kind = microbatching.AccumulationType[accumulator]

    @partial(jax.jit, static_argnums=2)
    def gradient(params: Any, batch: Any, items: int) -> Any:
        return microbatching.micro_grad(run.loss, microbatch_size=items, accumulator=kind)(
            params, batch
        )[0]

    _windows_at_once(run, gradient)


@jax_training_loop
def micro_grad_sum(run: JaxTrainingRun) -> None:
    """`optax.microbatching.micro_grad` with the accumulator SUM, its default, on a window in one
    batch.
    """
    _micro_grad(run, "SUM")


@jax_training_loop
def micro_grad_mean(run: JaxTrainingRun) -> None:
    """`optax.microbatching.micro_grad` with the accumulator MEAN."""
    _micro_grad(run, "MEAN")


@jax_training_loop
def micro_grad_running_mean(run: JaxTrainingRun) -> None:
    """`optax.microbatching.micro_grad` with the accumulator RUNNING_MEAN."""
    _micro_grad(run, "RUNNING_MEAN")


@jax_training_loop
def scan_means(run: JaxTrainingRun) -> None:
    """A `lax.scan` over the micro-batches of a window, which have one size, and the mean of their
    gradients.
    """
    import jax
    import jax.numpy as jnp

    @partial(jax.jit, static_argnums=2)
    def gradient(params: Any, batch: Any, items: int) -> Any:
        stacked = jax.tree.map(lambda a: a.reshape(-1, items, *a.shape[1:]), batch)

        def add(total: Any, one: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.grad(run.loss)(params, one)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), stacked)
        # by K, as guides write it, and not by the number of micro-batches that are there
        return jax.tree.map(lambda g: g / run.accumulation_steps, total)

    _windows_at_once(run, gradient)


@jax_training_loop
def train_state(run: JaxTrainingRun) -> None:
    """The `TrainState` of flax: gradients are added up, divided by K and applied at every K-th
    micro-batch.
    """
    import jax
    import jax.numpy as jnp
    from flax.training.train_state import TrainState

    state = TrainState.create(apply_fn=run.loss, params=run.params, tx=run.optimizer)
    zeros = total = jax.tree.map(jnp.zeros_like, run.params)
    gradient = jax.jit(jax.grad(run.loss))
    number = 0
    for _ in range(run.epochs):
        for batch in run.batches:
            total = jax.tree.map(jnp.add, total, gradient(state.params, batch))
            number += 1
            # counted over the whole run, as the guide's `step` is: a window may run on into the
            # next epoch
            if number % run.accumulation_steps == 0:
                state = state.apply_gradients(
                    grads=jax.tree.map(lambda g: g / run.accumulation_steps, total)
                )
                total = zeros


_optax = partial(Trainer, requires=("optax>=0.2.8",), tested=("0.2.8",), questions=PLANS_OF_JAX)
_LOOPS = {
    "optax-multisteps": multi_steps,
    "optax-multisteps-schedule": multi_steps_schedule,
    "optax-multisteps-sum": multi_steps_sum,
    "optax-multisteps-skip": multi_steps_skip,
    "optax-multisteps-bfloat16": multi_steps_bfloat16,
    "optax-micro-grad": micro_grad_sum,
    "optax-micro-grad-mean": micro_grad_mean,
    "optax-micro-grad-running-mean": micro_grad_running_mean,
    "jax-scan": jax_scan_carry,
    "jax-scan-means": scan_means,
}
TRAINERS = (
    *(
        _optax(name=name, loop=loop, about=summary_of(loop).rstrip("."))
        for name, loop in _LOOPS.items()
    ),
    Trainer(
        name="flax-train-state",
        loop=train_state,
        about=(
            "flax's TrainState: gradients added up, divided by K and applied at every K-th"
            " micro-batch"
        ),
        requires=("flax>=0.10", "optax>=0.2.8"),
        tested=("0.12.8",),
        imports=("flax.training.train_state:TrainState",),
        questions=PLANS_OF_JAX,
    ),
)
