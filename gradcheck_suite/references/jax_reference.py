"""The large-batch gradient in JAX.

Each layer is one compiled program. For parameters p, input x and an incoming cotangent c it returns y = f(p, x) and
the pullback of c by `jax.vjp`. This module calls the programs forward and then backward through the model: it applies
the chain rule between layers, and JAX differentiates inside each. Random models consist of the same few layers, so
almost nothing is compiled twice. `accumulated.whole_gradient` differentiates the whole model with `jax.grad`. Tests
hold the two equal, and a finding is checked against it before it is reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from gradcheck_suite.references.programs import PROGRAMS, Request
from gradcheck_suite.schema.spec import Layer, Loss, ProblemSpec

ROWS = {None: 48, 1: 144, 0: 256}
"""The smallest leading dimension of a program, by how many trailing axes its layer mixes (`LayerDefinition.axes`)."""
_TARGET_KEYS = ("target", "weight", "other", "variance")


def padded_rows(rows: int, axes: int | None = None) -> int:
    """Return the leading dimension that arrays of `rows` rows are padded to, so that few shapes occur.

    For a hundred rows the overhead of the call exceeds the computation, and every new shape costs a compilation.
    """
    size = ROWS[axes]
    while size < rows:
        size *= 4
    return size


def pad_rows(array: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """Repeat the first row until there are `rows` rows: padding with values of the data never makes a NaN."""
    if len(array) == rows:
        return array
    padded = np.empty((rows, *array.shape[1:]), array.dtype)
    padded[: len(array)], padded[len(array) :] = array, array[0]
    return padded


def _pad_zeros(array: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    if len(array) == rows:
        return array
    padded = np.zeros((rows, *array.shape[1:]))
    padded[: len(array)] = array
    return padded


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


class _Windows:
    """Consecutive windows that go through the model in one batch, and the gradients of each.

    A layer computes each item separately, so one call serves all windows. Only the gradients of its parameters need a
    call for each window.
    """

    def __init__(self, values: Arrays, batch: Arrays, spans: Sequence[slice]) -> None:
        self.values, self.batch, self.spans = values, batch, spans
        self.rows = padded_rows(spans[-1].stop)
        self.gradients: list[Arrays] = [{} for _ in spans]


class _Leaf:
    """One layer at its place in the model."""

    def __init__(self, layer: Layer, signal: Signal, path: str) -> None:
        self.kind = layer_definition(layer)
        self.size_in, self.size_out = signal.size, out_signal(layer, signal).size
        self.keys = extra_keys(layer, signal, path)
        self.prefix = f"{path}."
        self.key = ("layer", layer.kind, layer.options)
        self.program = _layer_program(layer.kind, layer.o)

    def request(self, windows: _Windows, dtype: npt.DTypeLike) -> Request:
        """Return the request to compile the layer's program, for an input of this dtype."""
        x = np.broadcast_to(np.zeros((), dtype), (windows.rows, *self.size_in))
        params, extras = self._params(windows), self._extras(windows)
        return self.key, self.program, (params, self._fold(x), extras, np.broadcast_to(0.0, self._shape(windows.rows)))

    def forward(self, windows: _Windows, x: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Any]:
        """Return the output, and the values that `backward` needs."""
        saved = self._params(windows), x, self._extras(windows)
        y = self._run(saved, np.zeros((len(x), *self.size_out)))[0]
        return self._unfold(y, len(x), self.size_out), saved

    def backward(self, windows: _Windows, saved: Any, cotangent: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Add each window's gradients of the parameters; return the gradient of the input."""
        params, x, extras = saved
        if not params or len(windows.spans) == 1:
            _, into_params, into_x = self._run(saved, cotangent)
            self._add(into_params, windows.gradients[0])
            return self._unfold(into_x, len(x), self.size_in)
        whole = np.zeros((len(x), *self.size_in), x.dtype)
        for span, gradient in zip(windows.spans, windows.gradients, strict=True):
            rows = padded_rows(span.stop - span.start)
            part = params, pad_rows(x[span], rows), {name: pad_rows(a[span], rows) for name, a in extras.items()}
            _, into_params, into_x = self._run(part, _pad_zeros(cotangent[span], rows))
            self._add(into_params, gradient)
            whole[span] = self._unfold(into_x, span.stop - span.start, self.size_in)
        return whole

    def _params(self, windows: _Windows) -> Arrays:
        prefix = self.prefix
        return {n.removeprefix(prefix): v for n, v in windows.values.items() if n.startswith(prefix)}

    def _extras(self, windows: _Windows) -> Arrays:
        return {name: windows.batch[key] for name, key in self.keys.items()}

    def _add(self, into_params: Arrays, gradient: Arrays) -> None:
        for name, value in into_params.items():
            if value.dtype.kind == "f":
                name = self.prefix + name
                gradient[name] = gradient[name] + value if name in gradient else value

    def _run(self, saved: Any, cotangent: npt.NDArray[Any]) -> Any:
        params, x, extras = saved
        cotangent = cotangent.reshape(-1, *self._shape(1)[1:])
        x = self._fold(x)
        return PROGRAMS.call(self.key, self.program, params, x, extras, _pad_zeros(cotangent, len(x)))

    def _shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of the program's output for `rows` items."""
        axes = self.kind.axes
        if axes is None:
            return (rows, *self.size_out)
        folded = math.prod(self.size_in[: len(self.size_in) - axes])
        return (padded_rows(rows * folded, axes), *self.size_out[len(self.size_out) - axes :])

    def _fold(self, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Join the axes that the layer does not mix with the first axis, and pad that axis."""
        axes = self.kind.axes
        if axes is None:
            return x
        x = x.reshape(-1, *self.size_in[len(self.size_in) - axes :])
        return pad_rows(x, padded_rows(len(x), axes))

    @staticmethod
    def _unfold(folded: npt.NDArray[Any], rows: int, size: tuple[int, ...]) -> npt.NDArray[Any]:
        return folded.reshape(-1)[: rows * math.prod(size)].reshape(rows, *size)


class _Residual:
    def __init__(self, inner: _Walk) -> None:
        self.inner = inner

    def forward(self, windows: _Windows, x: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Any]:
        y, saved = self.inner.forward(windows, x)
        return x + y, saved

    def backward(self, windows: _Windows, saved: Any, cotangent: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return cotangent + self.inner.backward(windows, saved, cotangent)


class _Shared:
    def __init__(self, inner: _Walk) -> None:
        self.inner = inner

    def forward(self, windows: _Windows, x: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Any]:
        middle, first = self.inner.forward(windows, x)
        y, second = self.inner.forward(windows, middle)
        return y, (first, second)

    def backward(self, windows: _Windows, saved: Any, cotangent: npt.NDArray[Any]) -> npt.NDArray[Any]:
        first, second = saved
        return self.inner.backward(windows, first, self.inner.backward(windows, second, cotangent))


class _Walk:
    """A chain of layers: forward for the output, backward for the gradient."""

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
        self.size_out = signal.size

    def leaves(self) -> Iterator[_Leaf]:
        """Yield the layers, including those inside others."""
        for node in self.nodes:
            if isinstance(node, _Leaf):
                yield node
            else:
                yield from node.inner.leaves()

    def forward(self, windows: _Windows, x: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], list[Any]]:
        tape = []
        for node in self.nodes:
            x, saved = node.forward(windows, x)
            tape.append(saved)
        return x, tape

    def backward(self, windows: _Windows, tape: list[Any], cotangent: npt.NDArray[Any]) -> npt.NDArray[Any]:
        for node, saved in zip(reversed(self.nodes), reversed(tape), strict=True):
            cotangent = node.backward(windows, saved, cotangent)
        return cotangent


@lru_cache(maxsize=512)
def _walk(problem: ProblemSpec) -> _Walk:
    return _Walk(problem.layers, input_signal(problem.input))


def objective(loss: Loss, out: Any, batch: Any, weight: Any) -> Any:
    """Return (sum of the item losses) / (sum of the counts) for a mean, the sum of the item losses for a sum.

    Args:
        loss: the loss and its reduction.
        out: output of the model, (n, *size).
        batch: the arrays that the loss reads.
        weight: (n,), 1.0 for an item and 0.0 for padding.
    """
    kind = loss_definition(loss)
    total = jnp.sum(weight * kind.jax_items(loss.o, out, batch))
    if loss.reduction == "sum":
        return total
    return total / jnp.sum(weight * kind.jax_counts(loss.o, batch))


def large_batch_gradient(problem: ProblemSpec, values: Arrays, data: Arrays) -> tuple[float, Arrays]:
    """Return the loss of all items in one batch, and its gradient: `large_batch_gradients` of one window."""
    return large_batch_gradients(problem, values, data, [range(len(data["x"]))])[0]


def large_batch_gradients(
    problem: ProblemSpec, values: Arrays, data: Arrays, windows: Sequence[range]
) -> list[tuple[float, Arrays]]:
    """Return, for each window, the loss of all its items in one batch, and its gradient.

    Args:
        problem: a problem whose objective is separable over samples.
        values: parameters and floating buffers by name, float64.
        data: arrays with leading dimension items.
        windows: consecutive ranges of items.

    Returns:
        For each window the loss, and for every name in `values` an array of its shape; those of buffers have no
        meaning.
    """
    found: list[tuple[float, Arrays]] = []
    for group in _groups(windows):
        first, rows = group[0].start, padded_rows(group[-1].stop - group[0].start)
        batch = {name: pad_rows(array[first : group[-1].stop], rows) for name, array in data.items()}
        spans = [slice(window.start - first, window.stop - first) for window in group]
        found += _side_by_side(problem, _Windows(values, batch, spans))
    return found


def _groups(windows: Sequence[range]) -> Iterator[list[range]]:
    """Yield groups of consecutive windows that together fit the smallest programs."""
    group: list[range] = []
    for window in windows:
        if group and window.stop - group[0].start > ROWS[None]:
            yield group
            group = []
        group.append(window)
    yield group


def _side_by_side(problem: ProblemSpec, windows: _Windows) -> Iterator[tuple[float, Arrays]]:
    walk, loss = _walk(problem), problem.loss
    program = jax.value_and_grad(lambda out, targets, weight: objective(loss, out, targets, weight))
    targets = {name: windows.batch[name] for name in _TARGET_KEYS if name in windows.batch}
    key, x = ("loss", loss.kind, loss.options), windows.batch["x"]
    out = np.broadcast_to(0.0, (windows.rows, *walk.size_out))
    requests = [leaf.request(windows, np.float64 if i else x.dtype) for i, leaf in enumerate(walk.leaves())]
    PROGRAMS.prepare([*requests, (key, program, (out, targets, np.zeros(windows.rows)))])
    out, tape = walk.forward(windows, x)
    cotangent, losses = np.zeros_like(out), []
    for span in windows.spans:
        items = span.stop - span.start
        rows = padded_rows(items)
        part = {name: pad_rows(array[span], rows) for name, array in targets.items()}
        weight = (np.arange(rows) < items).astype(np.float64)
        value, into_out = PROGRAMS.call(key, program, pad_rows(out[span], rows), part, weight)
        losses.append(float(value))
        cotangent[span] = into_out[:items]
    walk.backward(windows, tape, cotangent)
    for value, gradient in zip(losses, windows.gradients, strict=True):
        yield value, {n: gradient.get(n, np.zeros_like(v)) for n, v in windows.values.items()}
