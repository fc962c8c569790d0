"""Further JAX references: the whole model differentiated at once, and micro-batches accumulated by `lax.scan`.

Both compile the whole model, which takes half a second each. They are therefore computed only if the torch and the JAX
reference differ, and for a sample of the cases in the properties.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradcheck_suite.catalogue import input_signal, layer_definition, loss_definition, out_signal
from gradcheck_suite.catalogue.build import extra_keys, value_names
from gradcheck_suite.catalogue.definitions import Arguments, Arrays
from gradcheck_suite.catalogue.signals import Signal, feature_axis
from gradcheck_suite.references import programs
from gradcheck_suite.references.jax_objective import objective
from gradcheck_suite.references.padding import pad_rows, padded_rows
from gradcheck_suite.schema.spec import Layer, ProblemSpec, Tie


class _Given(NamedTuple):
    values: Arguments
    batch: Arguments
    ties: Sequence[Tie]


def _apply(
    layers: Iterable[Layer],
    signal: Signal,
    given: _Given,
    x: jax.Array,
    path: str = "",
    start: int = 0,
) -> jax.Array:
    for i, layer in enumerate(layers, start):
        kind, name = layer_definition(layer), f"{path}{i}"
        if kind.parallel:
            outs = [_apply([b], signal, given, x, f"{name}.", j) for j, b in enumerate(layer.layers)]
            x = sum(outs[1:], outs[0]) if kind.wraps == "sum" else jnp.concatenate(outs, feature_axis(signal))
        elif kind.wraps == "residual":
            x = x + _apply(layer.layers, signal, given, x, f"{name}.")
        elif kind.wraps == "shared":
            for _ in range(2):
                x = _apply(layer.layers, signal, given, x, f"{name}.")
        else:
            assert kind.jax_apply is not None
            names = value_names(name, given.values, given.ties)
            extras = {k: given.batch[key] for k, key in extra_keys(layer, signal, name).items()}
            x = kind.jax_apply(layer.o, {own: given.values[n] for own, n in names.items()}, x, extras)
        signal = out_signal(layer, signal)
    return x


def _output(problem: ProblemSpec, values: Arguments, batch: Arguments) -> jax.Array:
    return _apply(problem.layers, input_signal(problem.input), _Given(values, batch, problem.ties), batch["x"])


def whole_gradient(problem: ProblemSpec, values: Arrays, data: Arrays) -> tuple[float, Arrays]:
    """Return what `large_batch_gradient` does, from one `jax.value_and_grad` of the whole model.

    Args:
        problem: the problem that is trained.
        values: parameters and floating buffers by name, float64.
        data: the batch's arrays, each with leading dimension items.
    """
    items = len(data["x"])
    rows = padded_rows(items)
    batch = {name: pad_rows(array, rows) for name, array in data.items()}
    weight = (np.arange(rows) < items).astype(np.float64)

    def value(values: Arguments, batch: Arguments, weight: jax.Array) -> jax.Array:
        return objective(problem.loss, _output(problem, values, batch), batch, weight)

    found, gradient = programs.PROGRAMS.call(
        ("whole", problem), jax.value_and_grad(value), values, batch, weight, store=False
    )
    return float(found), gradient


def accumulated_gradient(problem: ProblemSpec, values: Arrays, data: Arrays, sizes: Sequence[int]) -> Arrays:
    """Return a window's gradient accumulated in JAX: sums and counts over its micro-batches, divided at the end.

    Args:
        problem: the problem that is trained.
        values: parameters and floating buffers by name, float64.
        data: the window's arrays, each with leading dimension items.
        sizes: number of items of each micro-batch; they add up to the number of items in `data`.

    Returns:
        For every name in `values`, an array of its shape.
    """
    rows = padded_rows(max(sizes))
    starts = np.cumsum([0, *sizes])
    cuts = [slice(starts[j], starts[j + 1]) for j in range(len(sizes))]
    stacked = {name: np.stack([pad_rows(array[cut], rows) for cut in cuts]) for name, array in data.items()}
    weights = np.stack([(np.arange(rows) < n).astype(np.float64) for n in sizes])
    loss = loss_definition(problem.loss)

    def total(values: Arguments, batch: Arguments, weight: jax.Array) -> jax.Array:
        return jnp.sum(weight * loss.jax_items(problem.loss.o, _output(problem, values, batch), batch))

    def accumulate(values: Arguments, stacked: Arguments, weights: jax.Array) -> Any:
        def add(carry: Any, micro_batch: Any) -> Any:
            gradient, count = carry
            batch, weight = micro_batch
            part = jax.grad(total)(values, batch, weight)
            count = count + jnp.sum(weight * loss.jax_counts(problem.loss.o, batch))
            return (jax.tree.map(jnp.add, gradient, part), count), None

        start = (jax.tree.map(jnp.zeros_like, values), jnp.zeros(()))
        (gradient, count), _ = jax.lax.scan(add, start, (stacked, weights))
        if problem.loss.reduction == "sum":
            return gradient
        return jax.tree.map(lambda g: g / count, gradient)

    accumulated: Arrays = programs.PROGRAMS.call(("scan", problem), accumulate, values, stacked, weights, store=False)
    return accumulated
