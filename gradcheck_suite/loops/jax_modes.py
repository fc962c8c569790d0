"""How a loop of JAX starts the sum of a window anew: the counterparts of torch's reset modes.

JAX has no `.grad` that is reset: a sum is an array, and a window begins with another one. optax and
jax are imported when a loop runs, since the package is imported without them.
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
    """Return two functions: (params, batch) -> the gradient of the summed loss and the count; (the
    sum of both over a window) -> the window's gradient.
    """
    import jax
    import jax.numpy as jnp

    def part(params: Any, batch: Any) -> Sum:
        count = (
            run.count(batch) if run.reduction == "mean" else jnp.ones((), run.count(batch).dtype)
        )
        # the gradient of the mean times its count is that of the sum: sums are added up, whatever
        # they count
        gradient = jax.grad(run.loss)(params, batch)
        return jax.tree.map(lambda g: (g * count).astype(g.dtype), gradient), count

    def mean(total: Any, count: Any) -> Any:
        if run.reduction == "sum":
            return total
        return jax.tree.map(lambda a: (a / count).astype(a.dtype), total)

    return part, mean


def windows_of(run: JaxTrainingRun) -> list[list[Any]]:
    """Return the windows of one epoch, the last one possibly shorter."""
    batches = list(run.batches)
    k = run.accumulation_steps
    return [batches[i : i + k] for i in range(0, len(batches), k)]


Reset = Callable[[Any, Any], Any]
"""(the sum of the last window, whether a window begins) -> the sum that the next micro-batch is added to."""


def _new_zeros(kept: Any, first: Any) -> Any:
    import jax
    import jax.numpy as jnp

    # `cond` computes one branch alone, where `where` computes both
    return jax.lax.cond(first, partial(jax.tree.map, jnp.zeros_like), lambda k: k, kept)


def _selected_zeros(kept: Any, first: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda a: jnp.where(first, jnp.zeros_like(a), a), kept)


def _times_zero(kept: Any, first: Any) -> Any:
    import jax

    # `first` is a Python bool that is traced: 1 less a bool is an int32, and the product may be
    # promoted
    return jax.tree.map(lambda a: ((1 - first) * a).astype(a.dtype), kept)


RESETS: dict[str, tuple[Reset, bool]] = {
    "jax_zeros_like": (_new_zeros, False),
    "jax_where": (_selected_zeros, False),
    "jax_times_zero": (_times_zero, False),
    "jax_donated": (_selected_zeros, True),
}
"""Mode -> its reset, and whether the last sum's buffer is donated to the function that adds a micro-batch."""


def adder(mode: str, part: Callable[..., Any]) -> Any:
    """Return the compiled function that adds a micro-batch to the sum: (sum, params, batch, first)
    -> sum.

    Args:
        mode: a name in `RESETS`.
        part: (params, batch) -> what the micro-batch adds.
    """
    import jax
    import jax.numpy as jnp

    reset, donate = RESETS[mode]

    def add(kept: Any, params: Any, batch: Any, first: Any) -> Any:
        return jax.tree.map(jnp.add, reset(kept, first), part(params, batch))

    return jax.jit(add, donate_argnums=(0,) if donate else ())


def _accumulate(run: JaxTrainingRun, mode: str) -> None:
    """Train: one compiled function adds a micro-batch to the sum, which it has started anew at each
    window.
    """
    import jax
    import jax.numpy as jnp
    import optax

    part, mean = summed_parts(run)
    add = adder(mode, part)
    params = run.params
    state = run.optimizer.init(run.params)
    # the count's dtype is only known from a count
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
    _accumulate(run, "jax_zeros_like")


@jax_training_loop
def jax_where(run: JaxTrainingRun) -> None:
    """JAX: `jnp.where(first, 0, sum)` selects zeros at the start of each window."""
    _accumulate(run, "jax_where")


@jax_training_loop(assumes=(FINITE_GRADIENTS,))
def jax_times_zero(run: JaxTrainingRun) -> None:
    """JAX: the sum is multiplied by 0, as optax.MultiSteps does, so that a NaN or an infinity
    stays.
    """
    _accumulate(run, "jax_times_zero")


@jax_training_loop
def jax_donated(run: JaxTrainingRun) -> None:
    """JAX: the sum's buffer is donated (`donate_argnums`), and zeros are written over it."""
    _accumulate(run, "jax_donated")


@jax_training_loop
def jax_scan_carry(run: JaxTrainingRun) -> None:
    """JAX: each window is one `lax.scan` whose carry starts at zeros, over micro-batches of one
    size at a time.
    """
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

    params = run.params
    state = run.optimizer.init(run.params)
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

    return [
        list(alike)
        for _, alike in groupby(window, lambda batch: [a.shape for a in jax.tree.leaves(batch)])
    ]


JAX_MODES = {
    loop.__name__: loop
    for loop in (jax_zeros_like, jax_where, jax_times_zero, jax_donated, jax_scan_carry)
}
"""The modes by name, in the order in which they are shown."""
