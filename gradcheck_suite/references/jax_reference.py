"""The large-batch gradient in JAX.

Each layer is one compiled program that returns, for its parameters p, input x and an incoming cotangent c, both
y = f(p, x) and the pullback of c, as `jax.vjp` derives it. A gradient is then a walk down the layers and back up
again: the chain rule between layers, JAX's differentiation inside each. Random models are made of the same few
layers over and over, so almost nothing is ever compiled twice. `whole_gradient` differentiates the model in one piece
with `jax.grad`; tests hold the two equal, and it is asked again before anything is blamed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from gradcheck_suite.catalogue import input_signal, layer_definition, loss_definition, out_signal
from gradcheck_suite.catalogue.build import extra_keys
from gradcheck_suite.catalogue.definitions import Arguments, Arrays
from gradcheck_suite.catalogue.signals import Signal
from gradcheck_suite.references.programs import PROGRAMS
from gradcheck_suite.schema.spec import Layer, Loss, ProblemSpec

ROWS = {None: 96, 1: 288, 0: 512}
"""The smallest leading dimension of a program, by how many trailing axes its layer mixes (`LayerDefinition.axes`)."""
_TARGET_KEYS = ("target", "weight", "other", "variance")
_NO_ARRAYS: Arrays = {}


def padded_rows(rows: int, axes: int | None = None) -> int:
    """Return the leading dimension that arrays of `rows` rows are padded to, so that few shapes occur.

    Few shapes are worth more than small ones: a program of a hundred rows runs in the time of its call, and another
    program costs a compilation.
    """
    size = ROWS[axes]
    while size < rows:
        size *= 4
    return size


def pad_rows(array: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """Repeat the first row until there are `rows`: padding with real values never makes a NaN of its own."""
    if len(array) == rows:
        return array
    return np.concatenate([array, np.broadcast_to(array[:1], (rows - len(array), *array.shape[1:]))])


def _layer_program(kind_name: str, options: Mapping[str, Any]) -> Any:
    meaning = layer_definition(Layer(kind_name)).jax_apply
    assert meaning is not None

    def both(params: Arguments, x: jax.Array, extras: Arguments, cotangent: jax.Array) -> Any:
        if jnp.issubdtype(x.dtype, jnp.floating):
            y, pullback = jax.vjp(lambda p, x: meaning(options, p, x, extras), params, x)
            return y, *pullback(cotangent)
        y, pullback = jax.vjp(lambda p: meaning(options, p, x, extras), params)
        return y, *pullback(cotangent), x

    return both


class _Leaf:
    """One layer at its place in the model."""

    def __init__(self, layer: Layer, signal: Signal, path: str) -> None:
        self.layer, self.path = layer, path
        self.kind = layer_definition(layer)
        self.size = out_signal(layer, signal).size
        self.keys = extra_keys(layer, signal, path)
        self.prefix = f"{path}."
        self.key = ("layer", layer.kind, layer.options)
        self.program = _layer_program(layer.kind, layer.o)

    def forward(self, values: Arrays, x: npt.NDArray[Any], batch: Arrays) -> tuple[npt.NDArray[Any], Any]:
        params = {n.removeprefix(self.prefix): v for n, v in values.items() if n.startswith(self.prefix)}
        extras = {name: batch[key] for name, key in self.keys.items()}
        axes = self.kind.axes
        shape = x.shape
        if axes is not None:
            x = x.reshape(-1, *shape[len(shape) - axes :])
            x = pad_rows(x, padded_rows(len(x), axes))
        out_shape: tuple[int, ...] = (shape[0], *self.size)
        flat_shape = out_shape if axes is None else (len(x), *out_shape[len(out_shape) - axes :])
        saved = (params, x, extras, shape, flat_shape)
        y = self._run(saved, np.zeros(flat_shape))[0]
        rows = math.prod(out_shape) // max(1, math.prod(flat_shape[1:]))
        return y[:rows].reshape(out_shape), saved

    def backward(self, saved: Any, cotangent: npt.NDArray[Any], gradient: Arrays) -> npt.NDArray[Any]:
        _, _, _, shape, flat_shape = saved
        flat = cotangent.reshape(-1, *flat_shape[1:])
        if len(flat) < flat_shape[0]:
            flat = np.concatenate([flat, np.zeros((flat_shape[0] - len(flat), *flat_shape[1:]))])
        _, into_params, into_x = self._run(saved, flat)
        for name, value in into_params.items():
            if value.dtype.kind == "f":
                name = self.prefix + name
                gradient[name] = gradient[name] + value if name in gradient else value
        return into_x.reshape(-1)[: math.prod(shape)].reshape(shape)

    def _run(self, saved: Any, cotangent: npt.NDArray[Any]) -> Any:
        params, x, extras, _, _ = saved
        return PROGRAMS.call(self.key, self.program, params, x, extras, cotangent)


class _Residual:
    def __init__(self, inner: _Walk) -> None:
        self.inner = inner

    def forward(self, values: Arrays, x: npt.NDArray[Any], batch: Arrays) -> tuple[npt.NDArray[Any], Any]:
        y, saved = self.inner.forward(values, x, batch)
        return x + y, saved

    def backward(self, saved: Any, cotangent: npt.NDArray[Any], gradient: Arrays) -> npt.NDArray[Any]:
        return cotangent + self.inner.backward(saved, cotangent, gradient)


class _Shared:
    def __init__(self, inner: _Walk) -> None:
        self.inner = inner

    def forward(self, values: Arrays, x: npt.NDArray[Any], batch: Arrays) -> tuple[npt.NDArray[Any], Any]:
        middle, first = self.inner.forward(values, x, batch)
        y, second = self.inner.forward(values, middle, batch)
        return y, (first, second)

    def backward(self, saved: Any, cotangent: npt.NDArray[Any], gradient: Arrays) -> npt.NDArray[Any]:
        first, second = saved
        return self.inner.backward(first, self.inner.backward(second, cotangent, gradient), gradient)


class _Walk:
    """A chain of layers, walked down for the output and up for the gradient."""

    def __init__(self, layers: Iterable[Layer], signal: Signal, path: str = "") -> None:
        self.nodes: list[_Leaf | _Residual | _Shared] = []
        for i, layer in enumerate(layers):
            kind = layer_definition(layer)
            if kind.wraps is None:
                self.nodes.append(_Leaf(layer, signal, f"{path}{i}"))
            else:
                inner = _Walk(layer.layers, signal, f"{path}{i}.")
                self.nodes.append(_Residual(inner) if kind.wraps == "residual" else _Shared(inner))
            signal = out_signal(layer, signal)

    def forward(self, values: Arrays, x: npt.NDArray[Any], batch: Arrays) -> tuple[npt.NDArray[Any], list[Any]]:
        tape = []
        for node in self.nodes:
            x, saved = node.forward(values, x, batch)
            tape.append(saved)
        return x, tape

    def backward(self, tape: list[Any], cotangent: npt.NDArray[Any], gradient: Arrays) -> npt.NDArray[Any]:
        for node, saved in zip(reversed(self.nodes), reversed(tape), strict=True):
            cotangent = node.backward(saved, cotangent, gradient)
        return cotangent


@lru_cache(maxsize=512)
def _walk(problem: ProblemSpec) -> _Walk:
    return _Walk(problem.layers, input_signal(problem.input))


def objective(loss: Loss, out: Any, batch: Any, weight: Any) -> Any:
    """Return (sum of the item losses) / (sum of the counts), or the sum alone.

    Args:
        loss: which loss and reduction.
        out: output of the model, (n, *size).
        batch: the arrays the loss reads.
        weight: (n,), 1.0 for an item and 0.0 for padding.
    """
    kind = loss_definition(loss)
    total = jnp.sum(weight * kind.jax_items(loss.o, out, batch))
    if loss.reduction == "sum":
        return total
    return total / jnp.sum(weight * kind.jax_counts(loss.o, batch))


def large_batch_gradient(
    problem: ProblemSpec, values: Arrays, data: Arrays, *, reduction: str | None = None
) -> tuple[float, Arrays]:
    """Return the loss of all items in one batch, and its gradient.

    Args:
        problem: what is trained.
        values: parameters and floating buffers by name, float64.
        data: the batch's arrays, each with leading dimension items.
        reduction: in place of the problem's own.

    Returns:
        The loss, and for every name in `values` an array of its shape (a buffer's is not meaningful).
    """
    items = len(data["x"])
    rows = padded_rows(items)
    batch = {name: pad_rows(array, rows) for name, array in data.items()}
    walk = _walk(problem)
    out, tape = walk.forward(values, batch["x"], batch)
    loss = problem.loss if reduction is None else Loss(problem.loss.kind, **{**problem.loss.o, "reduction": reduction})
    targets = {name: batch[name] for name in _TARGET_KEYS if name in batch}
    weight = (np.arange(rows) < items).astype(np.float64)
    value, cotangent = PROGRAMS.call(
        ("loss", loss.kind, loss.options),
        jax.value_and_grad(lambda out, targets, weight: objective(loss, out, targets, weight)),
        out,
        targets,
        weight,
    )
    gradient: Arrays = {}
    walk.backward(tape, cotangent, gradient)
    return float(value), {n: gradient.get(n, np.zeros_like(v)) for n, v in values.items()}
