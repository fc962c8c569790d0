"""Bugs of loops of JAX: wrappers of optimizers, constants of a trace, carries, donated buffers.

All are planted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gradcheck_suite.core.contract import (
    EQUAL_BATCHES,
    FINITE_GRADIENTS,
    JaxTrainingRun,
    jax_training_loop,
)
from gradcheck_suite.loops.jax_modes import summed_parts, windows_of
from gradcheck_suite.loops.trainers.adapters.optax_loops import train_with_multi_steps
from studies.zoo.bug import bug

# Loops of which one part is wrong: how a window's gradient is made, how it is applied.


def train_with(
    run: JaxTrainingRun,
    gradient: Callable[[Any, list[Any]], Any],
    *,
    forget: bool = False,
    whole: bool = False,
) -> None:
    """Train with `gradient(params, window)`.

    Args:
        run: the training run.
        gradient: of a window.
        forget: whether each window starts with a new state of the optimizer.
        whole: whether short windows are left out.
    """
    import optax

    params, state = run.params, run.optimizer.init(run.params)
    for window in (window for _ in range(run.epochs) for window in windows_of(run)):
        if whole and len(window) < run.accumulation_steps:
            continue
        if forget:
            state = run.optimizer.init(params)
        updates, state = run.optimizer.update(gradient(params, window), state, params)
        params = optax.apply_updates(params, updates)


def sums_of(run: JaxTrainingRun) -> Callable[..., Any]:
    """Return (params, window) -> the summed losses' gradient and the count, added up in one
    compiled function.
    """
    part, _ = summed_parts(run)
    compiled = jax.jit(part)

    def sums(params: Any, window: list[Any], start: Any = None) -> Any:
        for batch in window:
            found = compiled(params, batch)
            start = found if start is None else jax.tree.map(jnp.add, start, found)
        return start

    return sums


def _over(run: JaxTrainingRun, total: Any, count: Any) -> Any:
    return (
        total
        if run.reduction == "sum"
        else jax.tree.map(lambda a: (a / count).astype(a.dtype), total)
    )


@bug(
    "gradient/mean-of-means, step-count/wrong-windows, gradient/wrong-scale",
    needs="unequal micro-batches",
)
@jax_training_loop
def jax_multi_steps(run: JaxTrainingRun) -> None:
    """`optax.MultiSteps` averages the means of K micro-batches, whatever they count, and ends no
    short window.
    """
    train_with_multi_steps(run)


@bug(
    "step-count/wrong-windows, step-count/tail-dropped",
    needs="a short window",
    assumes=(EQUAL_BATCHES,),
)
@jax_training_loop
def jax_multi_steps_tail(run: JaxTrainingRun) -> None:
    """`optax.MultiSteps` goes on with a short last window in the next epoch."""
    train_with_multi_steps(run, use_grad_mean=run.reduction == "mean")


@bug("gradient/wrong-scale", needs="2 windows of unequal counts")
@jax_training_loop
def jax_traced_count(run: JaxTrainingRun) -> None:
    """The count of the first window is read when the step is traced, and is a constant of the
    compiled function.
    """
    sums, first = sums_of(run), []

    def gradient(params: Any, window: list[Any]) -> Any:
        total, count = sums(params, window)
        first.append(count)
        return _over(run, total, first[0])

    train_with(run, gradient)


@bug("gradient/wrong-count", needs="unequal micro-batches")
@jax_training_loop
def jax_first_count(run: JaxTrainingRun) -> None:
    """Each micro-batch's mean is weighted by the count of the window's first one, as
    `vmap(in_axes=None)` does.
    """
    sums = sums_of(run)

    def gradient(params: Any, window: list[Any]) -> Any:
        means = jax.tree.map(
            lambda *g: sum(g), *[_over(run, *sums(params, [batch])) for batch in window]
        )
        return _over(run, means, sum(run.count(batch) for batch in window) / run.count(window[0]))

    train_with(run, gradient)


@bug("gradient/stale-window", needs="2 windows, or 2 epochs")
@jax_training_loop
def jax_never_reset(run: JaxTrainingRun) -> None:
    """The carry of the sum goes into the next window."""
    sums, kept = sums_of(run), [None]

    def gradient(params: Any, window: list[Any]) -> Any:
        _, count = sums(params, window)
        kept[0] = sums(params, window, kept[0])
        return _over(run, kept[0][0], count)  # type: ignore[index]

    train_with(run, gradient)


@bug("non-finite/poisoned-by-earlier-window", needs="a window whose gradient is NaN or infinite")
@jax_training_loop
def jax_times_zero_for_ever(run: JaxTrainingRun) -> None:
    """The sum is reset by a multiplication by 0, and 0 * NaN is NaN."""
    sums, kept = sums_of(run), [None]

    def gradient(params: Any, window: list[Any]) -> Any:
        start = None if kept[0] is None else jax.tree.map(lambda a: a * 0, kept[0])
        kept[0] = sums(params, window, start)
        return _over(run, *kept[0])  # type: ignore[misc]

    train_with(run, gradient)


@bug("raised/raised", needs="2 micro-batches in a window")
@jax_training_loop
def jax_donated_again(run: JaxTrainingRun) -> None:
    """The first gradient's buffer is donated to the addition, and read again afterwards."""
    sums = sums_of(run)
    add = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0)

    def gradient(params: Any, window: list[Any]) -> Any:
        first = found = sums(params, window[:1])
        for batch in window[1:]:
            found = add(found, sums(params, [batch]))
        # reads it for a log
        assert jax.tree.all(jax.tree.map(lambda a: jnp.isfinite(a).any() | True, first))
        return _over(run, *found)

    train_with(run, gradient)


@bug("step-count/tail-dropped", needs="a short window")
@jax_training_loop
def jax_scan_whole_windows(run: JaxTrainingRun) -> None:
    """An epoch is reshaped to (windows, K, ...) for `lax.scan`, which leaves the short last window
    out.
    """
    sums = sums_of(run)
    train_with(run, lambda params, window: _over(run, *sums(params, window)), whole=True)


@bug(
    "gradient/stale-parameters, parameters/parameter-drift",
    needs="2 steps of an optimizer that moves parameters",
)
@jax_training_loop
def jax_closed_over_params(run: JaxTrainingRun) -> None:
    """The compiled gradient closes over the initial parameters, and is not handed those that have
    moved.
    """
    sums = sums_of(run)
    train_with(run, lambda params, window: _over(run, *sums(run.params, window)))


@bug("parameters/optimizer-state-changed", needs="2 steps")
@jax_training_loop
def jax_state_forgotten(run: JaxTrainingRun) -> None:
    """Each window calls the optimizer's `init` again: momentum and averages start anew."""
    sums = sums_of(run)
    train_with(run, lambda params, window: _over(run, *sums(params, window)), forget=True)


@bug(
    "gradient/low-precision, non-finite/low-precision",
    needs="any case",
    assumes=(FINITE_GRADIENTS,),
)
@jax_training_loop(assumes=(FINITE_GRADIENTS,))
def jax_bfloat16_sum(run: JaxTrainingRun) -> None:
    """The sum is kept in bfloat16, where 256 + 1 is 256."""
    sums = sums_of(run)

    def gradient(params: Any, window: list[Any]) -> Any:
        total: Any = None
        for batch in window:
            part, _ = sums(params, [batch])
            low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), part)
            total = low if total is None else jax.tree.map(jnp.add, total, low)
        wide = jax.tree.map(lambda a: a.astype(run.dtype), total)
        return _over(run, wide, sum(run.count(batch) for batch in window))

    train_with(run, gradient)


@bug(
    "gradient/reset-inside-window, gradient/dropped-micro-batch",
    needs="2 micro-batches in a window",
)
@jax_training_loop
def jax_carry_replaced(run: JaxTrainingRun) -> None:
    """What is carried from a micro-batch to the next one is its own gradient, and not the sum."""
    sums = sums_of(run)

    def gradient(params: Any, window: list[Any]) -> Any:
        carried: Any = None
        for batch in window:
            carried = sums(params, [batch])
        return _over(run, carried[0], sum(run.count(batch) for batch in window))

    train_with(run, gradient)


@bug("gradient/dropped-micro-batch", needs="2 micro-batches in a window")
@jax_training_loop
def jax_last_not_added(run: JaxTrainingRun) -> None:
    """A loop to K - 1 adds up all micro-batches but the last one, and the count is that of all."""
    sums = sums_of(run)

    def gradient(params: Any, window: list[Any]) -> Any:
        added = max(1, len(window) - 1)
        total, _ = sums(params, window[:added])
        return _over(run, total, sum(run.count(batch) for batch in window))

    train_with(run, gradient)


@bug(
    "gradient/repeated-micro-batch, gradient/weighted-by-place",
    needs="2 micro-batches in a window",
)
@jax_training_loop
def jax_first_added_twice(run: JaxTrainingRun) -> None:
    """The sum starts at the first micro-batch's gradient, and goes over all micro-batches."""
    sums = sums_of(run)

    def gradient(params: Any, window: list[Any]) -> Any:
        start = sums(params, window[:1])
        total, _ = sums(params, window, start)
        return _over(run, total, sum(run.count(batch) for batch in window))

    train_with(run, gradient)


@bug("gradient/clipped, gradient/normalised", needs="2 micro-batches in a window")
@jax_training_loop
def jax_clipped_in_the_scan(run: JaxTrainingRun) -> None:
    """Each micro-batch's gradient is clipped before it is added up, and not their sum."""
    import optax

    sums = sums_of(run)
    clip = optax.clip_by_global_norm(1e-2)

    def gradient(params: Any, window: list[Any]) -> Any:
        whole = sum(run.count(batch) for batch in window)
        parts = [_over(run, sums(params, [batch])[0], whole) for batch in window]
        clipped = [clip.update(part, clip.init(params))[0] for part in parts]
        return jax.tree.map(lambda *each: sum(each), *clipped)

    train_with(run, gradient)


@bug("step-count/step-per-micro-batch", needs="2 micro-batches in a window")
@jax_training_loop
def jax_updates_added_up(run: JaxTrainingRun) -> None:
    """`optax.apply_every` adds updates up, and not gradients: the optimizer's state moves at each
    micro-batch.
    """
    import optax

    sums = sums_of(run)
    optimizer = optax.chain(run.optimizer, optax.apply_every(run.accumulation_steps))
    params = run.params
    state = optimizer.init(params)
    for window in (window for _ in range(run.epochs) for window in windows_of(run)):
        whole = sum(run.count(batch) for batch in window)
        for batch in window:
            part = _over(run, sums(params, [batch])[0], whole)
            updates, state = optimizer.update(part, state, params)
            params = optax.apply_updates(params, updates)


@bug(
    "parameters/parameter-drift, gradient/stale-parameters",
    needs="2 steps of an optimizer that moves parameters",
)
@jax_training_loop
def jax_updates_thrown_away(run: JaxTrainingRun) -> None:
    """The compiled step returns the optimizer's state alone: its updates are thrown away."""
    sums = sums_of(run)
    params = run.params
    state = run.optimizer.init(params)
    for window in (window for _ in range(run.epochs) for window in windows_of(run)):
        _, state = run.optimizer.update(_over(run, *sums(params, window)), state, params)
