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
from gradcheck_suite.catalogue.build import extra_keys, value_names
from gradcheck_suite.catalogue.definitions import Arguments, Arrays
from gradcheck_suite.catalogue.signals import Signal, feature_axis
from gradcheck_suite.references.programs import PROGRAMS, Request, to_numpy
from gradcheck_suite.schema.spec import Layer, Loss, ProblemSpec, Tie

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

    def numbers(self) -> npt.NDArray[np.int64]:
        """Return the number of each item's window, -1 for padding; (rows,)."""
        numbers = np.full(self.rows, -1)
        for number, span in enumerate(self.spans):
            numbers[span] = number
        return numbers


class _Leaf:
    """One layer at its place in the model."""

    def __init__(self, layer: Layer, signal: Signal, path: str, ties: Sequence[Tie]) -> None:
        self.kind = layer_definition(layer)
        self.size_in, self.size_out = signal.size, out_signal(layer, signal).size
        self.dtype = np.dtype(np.int64 if signal.form == "tokens" else np.float64)
        self.keys = extra_keys(layer, signal, path)
        self.path, self.ties = path, ties
        self.key = ("layer", layer.kind, layer.options)
        self.program = _layer_program(layer.kind, layer.o)
        self._requests: dict[Any, tuple[Request, npt.NDArray[Any]]] = {}

    def request(self, windows: _Windows) -> Request:
        """Return the request for the layer's program on the rows of these windows."""
        x = np.broadcast_to(np.zeros((), self.dtype), (windows.rows, *self.size_in))
        return self._request(windows.rows, self._params(windows), self._fold(x), self._extras(windows))[0]

    def forward(self, windows: _Windows, x: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Any]:
        """Return the output, and the values that `backward` needs."""
        saved = self._params(windows), x, self._extras(windows)
        y = np.asarray(self._run(saved, None)[0])
        return self._unfold(y, len(x), self.size_out), saved

    def backward(self, windows: _Windows, saved: Any, cotangent: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Add each window's gradients of the parameters; return the gradient of the input."""
        params, x, extras = saved
        if not params or len(windows.spans) == 1:
            into_params, into_x = to_numpy(self._run(saved, cotangent)[1:])
            self._add(into_params, windows, windows.gradients[0])
            return self._unfold(into_x, len(x), self.size_in)
        whole = np.zeros((len(x), *self.size_in), x.dtype)
        for span, gradient in zip(windows.spans, windows.gradients, strict=True):
            rows = padded_rows(span.stop - span.start)
            part = params, pad_rows(x[span], rows), {name: pad_rows(a[span], rows) for name, a in extras.items()}
            into_params, into_x = to_numpy(self._run(part, _pad_zeros(cotangent[span], rows))[1:])
            self._add(into_params, windows, gradient)
            whole[span] = self._unfold(into_x, span.stop - span.start, self.size_in)
        return whole

    def _params(self, windows: _Windows) -> Arrays:
        return {own: windows.values[name] for own, name in self._names(windows).items()}

    def _names(self, windows: _Windows) -> dict[str, str]:
        return value_names(self.path, windows.values, self.ties)

    def _extras(self, windows: _Windows) -> Arrays:
        return {name: windows.batch[key] for name, key in self.keys.items()}

    def _add(self, into_params: Arrays, windows: _Windows, gradient: Arrays) -> None:
        names = self._names(windows)
        for own, value in into_params.items():
            if value.dtype.kind == "f":
                name = names[own]
                gradient[name] = gradient[name] + value if name in gradient else value

    def _run(self, saved: Any, cotangent: npt.NDArray[Any] | None) -> Any:
        """Return what the program returns; None stands for a cotangent of zeros."""
        params, x, extras = saved
        rows = len(x)
        x = self._fold(x)
        request, zeros = self._request(rows, params, x, extras)
        if cotangent is None:
            return PROGRAMS.run(request, params, x, extras, zeros)
        cotangent = cotangent.reshape(-1, *self._shape(1)[1:])
        return PROGRAMS.run(request, params, x, extras, _pad_zeros(cotangent, len(x)))

    def _request(
        self, rows: int, params: Arrays, x: npt.NDArray[Any], extras: Arrays
    ) -> tuple[Request, npt.NDArray[Any]]:
        """Return the request for so many rows and a cotangent of zeros; `x` is folded."""
        found = self._requests.get((rows, x.shape))
        if found is None:
            zeros = np.zeros(self._shape(rows))
            request = Request.of(self.key, self.program, params, x, extras, zeros)
            found = self._requests[rows, x.shape] = request, zeros
        return found

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


class _Branches:
    """Branches that receive the same input and join, by addition or along an axis."""

    def __init__(self, branches: list[_Walk], axis: int | None) -> None:
        self.inner, self.axis = branches, axis

    def forward(self, windows: _Windows, x: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Any]:
        outs, saved = zip(*(branch.forward(windows, x) for branch in self.inner), strict=True)
        return sum(outs[1:], outs[0]) if self.axis is None else np.concatenate(outs, self.axis), saved

    def backward(self, windows: _Windows, saved: Any, cotangent: npt.NDArray[Any]) -> npt.NDArray[Any]:
        parts = [cotangent] * len(self.inner)
        if self.axis is not None:
            ends = np.cumsum([branch.size_out[self.axis - 1 if self.axis > 0 else -1] for branch in self.inner])
            parts = np.split(cotangent, ends[:-1], self.axis)
        into_x = [b.backward(windows, tape, part) for b, tape, part in zip(self.inner, saved, parts, strict=True)]
        return sum(into_x[1:], into_x[0])


class _Walk:
    """A chain of layers: forward for the output, backward for the gradient."""

    def __init__(
        self, layers: Iterable[Layer], signal: Signal, path: str = "", ties: Sequence[Tie] = (), start: int = 0
    ) -> None:
        self.nodes: list[_Leaf | _Residual | _Shared | _Branches] = []
        for i, layer in enumerate(layers, start):
            kind = layer_definition(layer)
            if kind.wraps is None:
                self.nodes.append(_Leaf(layer, signal, f"{path}{i}", ties))
            elif kind.parallel:
                branches = [_Walk([branch], signal, f"{path}{i}.", ties, b) for b, branch in enumerate(layer.layers)]
                self.nodes.append(_Branches(branches, feature_axis(signal) if kind.wraps == "concat" else None))
            else:
                inner = _Walk(layer.layers, signal, f"{path}{i}.", ties)
                self.nodes.append(_Residual(inner) if kind.wraps == "residual" else _Shared(inner))
            signal = out_signal(layer, signal)
        self.size_out = signal.size

    def leaves(self) -> Iterator[_Leaf]:
        """Yield the layers, including those inside others."""
        for node in self.nodes:
            if isinstance(node, _Leaf):
                yield node
            else:
                for inner in node.inner if isinstance(node, _Branches) else [node.inner]:
                    yield from inner.leaves()

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


def _loss_program(loss: Loss) -> Any:
    kind = loss_definition(loss)

    def gradients(out: jax.Array, batch: Arguments, window: jax.Array, mean: jax.Array) -> tuple[jax.Array, jax.Array]:
        items, pullback = jax.vjp(lambda out: kind.jax_items(loss.o, out, batch), out)
        inside = window == jnp.arange(min(len(window), ROWS[None]))[:, None]
        counts = jnp.where(inside, kind.jax_counts(loss.o, batch), 0.0).sum(1, keepdims=True)
        divisors = jnp.where(inside, counts, 0.0).sum(0)
        padding = window < 0
        factors = jnp.where(padding, 0.0, 1.0 / jnp.where(mean, divisors, 1.0))
        (into_out,) = pullback(factors)
        # where an infinite derivative makes 0 * inf = NaN, padding still contributes nothing
        into_out = jnp.where(padding.reshape(-1, *[1] * (out.ndim - 1)), 0.0, into_out)
        return jnp.where(inside, factors * items, 0.0).sum(1), into_out

    return gradients


class _Objective:
    """The loss of every window in one program: `objective` for each, and its gradient by the model's output."""

    def __init__(self, loss: Loss) -> None:
        options = tuple(option for option in loss.options if option[0] != "reduction")
        self.key, self.program = ("losses", loss.kind, options), _loss_program(loss)
        self.mean = np.asarray(loss.reduction == "mean")
        self._requests: dict[Any, Request] = {}

    def request(self, windows: _Windows, size: tuple[int, ...]) -> Request:
        """Return the request for the program on the rows of these windows; `size` is that of an item's output."""
        found = self._requests.get(windows.rows)
        if found is None:
            out = np.broadcast_to(0.0, (windows.rows, *size))
            arguments = out, self._targets(windows), windows.numbers(), self.mean
            found = self._requests[windows.rows] = Request.of(self.key, self.program, *arguments)
        return found

    def gradients(self, windows: _Windows, out: npt.NDArray[Any]) -> tuple[list[float], npt.NDArray[Any]]:
        """Return each window's loss, and the gradient by the model's output, (rows, *size)."""
        request = self.request(windows, out.shape[1:])
        found = PROGRAMS.run(request, out, self._targets(windows), windows.numbers(), self.mean)
        losses, into_out = to_numpy(found)
        return losses[: len(windows.spans)].tolist(), into_out

    @staticmethod
    def _targets(windows: _Windows) -> Arrays:
        return {name: windows.batch[name] for name in _TARGET_KEYS if name in windows.batch}


@lru_cache(maxsize=512)
def _walk(problem: ProblemSpec) -> tuple[_Walk, _Objective]:
    return _Walk(problem.layers, input_signal(problem.input), ties=problem.ties), _Objective(problem.loss)


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
    return StartedGradients(problem, values, data, windows).result()


class StartedGradients:
    """`large_batch_gradients`, of which the programs are loaded or compiled by other threads until `result`."""

    def __init__(self, problem: ProblemSpec, values: Arrays, data: Arrays, windows: Sequence[range]) -> None:
        """Start; the arguments are those of `large_batch_gradients`."""
        self._walk, self._objective = _walk(problem)
        self._groups: list[_Windows] = []
        for group in _groups(windows):
            first, rows = group[0].start, padded_rows(group[-1].stop - group[0].start)
            batch = {name: pad_rows(array[first : group[-1].stop], rows) for name, array in data.items()}
            spans = [slice(window.start - first, window.stop - first) for window in group]
            self._groups.append(_Windows(values, batch, spans))
        for side_by_side in self._groups:
            requests = [leaf.request(side_by_side) for leaf in self._walk.leaves()]
            PROGRAMS.prepare([*requests, self._objective.request(side_by_side, self._walk.size_out)])

    def result(self) -> list[tuple[float, Arrays]]:
        """Return what `large_batch_gradients` returns; only once."""
        found: list[tuple[float, Arrays]] = []
        for windows in self._groups:
            out, tape = self._walk.forward(windows, windows.batch["x"])
            losses, cotangent = self._objective.gradients(windows, out)
            self._walk.backward(windows, tape, cotangent)
            for value, gradient in zip(losses, windows.gradients, strict=True):
                found.append((value, {n: gradient.get(n, np.zeros_like(v)) for n, v in windows.values.items()}))
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
