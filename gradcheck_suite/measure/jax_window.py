"""The same window in JAX: `lax.scan` under `jit` accumulates micro-batches, the gradients' buffers are donated.

JAX has no reset mode: the sum starts from zeros inside the program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcheck_suite.measure.bandwidth import COPY_BYTES
from gradcheck_suite.measure.workload import BATCH, Size


def compiled_window(size: Size, micro_batches: int, dtype: str, device: jax.Device) -> tuple[Any, tuple[Any, ...]]:
    """Compile one window.

    Returns:
        The compiled program, which returns the gradients and the losses, and its arguments: the weights, the batches
        (micro_batches, BATCH, width), and the gradients of the window before, whose buffers it takes.
    """
    kind = jnp.dtype(dtype)

    def loss(weights: Any, batch: jax.Array) -> jax.Array:
        for w in weights:
            batch = batch @ w.T
        return batch.sum()

    def window(weights: Any, batches: jax.Array, old: Any) -> Any:
        def add(total: Any, batch: jax.Array) -> Any:
            value, gradient = jax.value_and_grad(loss)(weights, batch)
            return jax.tree.map(jnp.add, total, gradient), value

        start = jax.tree.map(jnp.zeros_like, old)
        # without the losses among the results, XLA would leave out the last layer's forward
        return jax.lax.scan(add, start, batches)

    with jax.default_device(device):
        shape = (size.width, size.width)
        weights = tuple(jnp.full(shape, 1 / size.width, kind) for _ in range(size.tensors))
        batches = jnp.asarray(np.random.default_rng(0).random((micro_batches, BATCH, size.width)), kind)
        old = tuple(jnp.zeros(shape, kind) for _ in range(size.tensors))
        # no value of the donated gradients is read, so that JAX would drop the argument and allocate others
        program = jax.jit(window, donate_argnums=2, keep_unused=True).lower(weights, batches, old).compile()
    return program, (weights, batches, old)


def runner(program: Any, arguments: tuple[Any, ...]) -> Callable[[], None]:
    """Return a function that runs one window and waits for it; each run donates the gradients of the run before."""
    weights, batches, old = arguments
    kept = [old]

    def run() -> None:
        kept[0], _ = jax.block_until_ready(program(weights, batches, kept[0]))

    return run


def flush_caches(device: jax.Device) -> Callable[[], None]:
    """Return a function that evicts everything else from a device's caches, on JAX's stream, and waits for it."""
    scratch = [
        jax.device_put(np.zeros(COPY_BYTES["cpu" if device.platform == "cpu" else "cuda"] // 8, np.float32), device)
    ]
    add = jax.jit(lambda x: x + 1, donate_argnums=0)

    def run() -> None:
        scratch[0] = jax.block_until_ready(add(scratch[0]))

    return run


def memory_bytes(program: Any) -> dict[str, int]:
    """Return the bytes that XLA reports for the program's arguments, outputs, aliases and temporaries."""
    analysis = program.memory_analysis()
    return {
        name: int(getattr(analysis, f"{name}_size_in_bytes"))
        for name in ("argument", "output", "alias", "temp")
        if analysis is not None
    }
