"""How a loop of JAX starts the sum of a window anew: the counterparts of torch's reset modes.

JAX has no `.grad` that is reset: a sum is an array, and a window begins with another one. optax and jax are imported
when a loop runs, since the package is imported without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from gradcheck_suite.core.contract import FINITE_GRADIENTS, JaxTrainingRun, jax_training_loop

Sum = tuple[Any, Any]
"""The sum of the summed losses' gradients so far, a pytree, and that of the counts."""


def summed_parts(run: JaxTrainingRun) -> tuple[Callable[..., Sum], Callable[..., Any]]:
    """Return (params, batch) -> the gradient of the summed loss and the count; (sum) -> the window's gradient."""
    import jax
    import jax.numpy as jnp

    def part(params: Any, batch: Any) -> Sum:
        count = run.count(batch) if run.reduction == "mean" else jnp.ones((), run.count(batch).dtype)
        gradient = jax.grad(run.loss)(params, batch)
        return jax.tree.map(lambda g: (g * count).astype(g.dtype), gradient), count

    def mean(total: Any, count: Any) -> Any:
        if run.reduction == "sum":
            return total
        return jax.tree.map(lambda a: (a / count).astype(a.dtype), total)

    return part, mean


def windows_of(run: JaxTrainingRun) -> list[list[Any]]:
    """Return the windows of one epoch, the last one possibly shorter."""
    batches, k = list(run.batches), run.accumulation_steps
    return [batches[i : i + k] for i in range(0, len(batches), k)]


Reset = Callable[[Any, Any], Any]
"""(the sum of the last window, whether a window begins) -> the sum that the next micro-batch is added to."""


def _accumulate(run: JaxTrainingRun, reset: Reset, *, donate: bool = False) -> None:
    """Train: one compiled function adds a micro-batch to the sum, which `reset` has started anew at each window."""
    import jax
    import jax.numpy as jnp
    import optax

    part, mean = summed_parts(run)

    @partial(jax.jit, donate_argnums=(0,) if donate else ())
    def add(kept: Sum, params: Any, batch: Any, first: Any) -> Sum:
        return jax.tree.map(jnp.add, reset(kept, first), part(params, batch))

    params, state = run.params, run.optimizer.init(run.params)
    kept = jax.tree.map(jnp.zeros_like, (params, part(params, next(iter(run.batches)))[1]))
    for _ in range(run.epochs):
        for window in windows_of(run):
            for number, batch in enumerate(window):
                kept = add(kept, params, batch, number == 0)
            updates, state = run.optimizer.update(mean(*kept), state, params)
            params = optax.apply_updates(params, updates)


@jax_training_loop
def jax_zeros_like(run: JaxTrainingRun) -> None:
    """JAX: `tree.map(zeros_like)` makes new zeros at the start of each window."""
    import jax
    import jax.numpy as jnp

    _accumulate(run, lambda kept, first: jax.lax.cond(first, partial(jax.tree.map, jnp.zeros_like), lambda k: k, kept))


@jax_training_loop
def jax_where(run: JaxTrainingRun) -> None:
    """JAX: `jnp.where(first, 0, sum)` selects zeros at the start of each window."""
    import jax
    import jax.numpy as jnp

    _accumulate(run, lambda kept, first: jax.tree.map(lambda a: jnp.where(first, jnp.zeros_like(a), a), kept))


@jax_training_loop(assumes=(FINITE_GRADIENTS,))
def jax_times_zero(run: JaxTrainingRun) -> None:
    """JAX: the sum is multiplied by 0, as optax.MultiSteps does, so that a NaN or an infinity stays."""
    import jax

    _accumulate(run, lambda kept, first: jax.tree.map(lambda a: ((1 - first) * a).astype(a.dtype), kept))


@jax_training_loop
def jax_donated(run: JaxTrainingRun) -> None:
    """JAX: the sum's buffer is donated (`donate_argnums`), and zeros are written over it."""
    import jax
    import jax.numpy as jnp

    def zeros(kept: Sum, first: Any) -> Sum:
        return jax.tree.map(lambda a: jnp.where(first, jnp.zeros_like(a), a), kept)

    _accumulate(run, zeros, donate=True)


@jax_training_loop
def jax_scan_carry(run: JaxTrainingRun) -> None:
    """JAX: each window is one `lax.scan` whose carry starts at zeros, over micro-batches of one size at a time."""
    import jax
    import jax.numpy as jnp
    import optax

    part, mean = summed_parts(run)

    @jax.jit
    def scanned(start: Sum, params: Any, stacked: Any) -> Sum:
        def add(kept: Sum, batch: Any) -> tuple[Sum, None]:
            return jax.tree.map(jnp.add, kept, part(params, batch)), None

        kept, _ = jax.lax.scan(add, start, stacked)
        return kept

    params, state = run.params, run.optimizer.init(run.params)
    zeros = jax.tree.map(jnp.zeros_like, (params, part(params, next(iter(run.batches)))[1]))
    for _ in range(run.epochs):
        for window in windows_of(run):
            kept = zeros
            for run_of_equals in _of_one_size(window):
                kept = scanned(kept, params, jax.tree.map(lambda *a: jnp.stack(a), *run_of_equals))
            updates, state = run.optimizer.update(mean(*kept), state, params)
            params = optax.apply_updates(params, updates)


def _of_one_size(window: Sequence[Any]) -> list[list[Any]]:
    """Return the micro-batches of a window in runs of one size: what is scanned over has one shape."""
    import jax

    return [list(alike) for _, alike in groupby(window, lambda batch: [a.shape for a in jax.tree.leaves(batch)])]


JAX_MODES = {loop.__name__: loop for loop in (jax_zeros_like, jax_where, jax_times_zero, jax_donated, jax_scan_carry)}
"""The modes by name, in the order in which they are shown."""
