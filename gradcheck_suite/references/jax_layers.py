"""The chain rule between layers, each of which is one compiled program that JAX differentiates.

`Walk.forward` calls the programs from the first layer to the last, and `Walk.backward` from the last to the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from gradcheck_suite.catalogue import layer_definition, out_signal
from gradcheck_suite.catalogue.build import extra_keys, value_names
from gradcheck_suite.catalogue.definitions import Arguments, Arrays
from gradcheck_suite.catalogue.signals import Signal, feature_axis
from gradcheck_suite.references import programs
from gradcheck_suite.references.jax_windows import Windows
from gradcheck_suite.references.padding import pad_rows, pad_zeros, padded_rows
from gradcheck_suite.references.programs import Request, to_numpy
from gradcheck_suite.schema.spec import Layer, Tie


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

    def __init__(self, layer: Layer, signal: Signal, path: str, ties: Sequence[Tie]) -> None:
        self.kind = layer_definition(layer)
        self.size_in, self.size_out = signal.size, out_signal(layer, signal).size
        self.dtype = np.dtype(np.int64 if signal.form == "tokens" else np.float64)
        self.keys = extra_keys(layer, signal, path)
        self.path, self.ties = path, ties
        self.key = ("layer", layer.kind, layer.options)
        self.program = _layer_program(layer.kind, layer.o)
        self._requests: dict[Any, tuple[Request, npt.NDArray[Any]]] = {}

    def request(self, windows: Windows) -> Request:
        """Return the request for the layer's program on the rows of these windows."""
        x = np.broadcast_to(np.zeros((), self.dtype), (windows.rows, *self.size_in))
        return self._request(windows.rows, self._params(windows), self._fold(x), self._extras(windows))[0]

    def forward(self, windows: Windows, x: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Any]:
        """Return the output, and the values that `backward` needs."""
        saved = self._params(windows), x, self._extras(windows)
        y = np.asarray(self._run(saved, None)[0])
        return self._unfold(y, len(x), self.size_out), saved

    def backward(self, windows: Windows, saved: Any, cotangent: npt.NDArray[Any]) -> npt.NDArray[Any]:
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
            into_params, into_x = to_numpy(self._run(part, pad_zeros(cotangent[span], rows))[1:])
            self._add(into_params, windows, gradient)
            whole[span] = self._unfold(into_x, span.stop - span.start, self.size_in)
        return whole

    def _params(self, windows: Windows) -> Arrays:
        return {own: windows.values[name] for own, name in self._names(windows).items()}

    def _names(self, windows: Windows) -> dict[str, str]:
        return value_names(self.path, windows.values, self.ties)

    def _extras(self, windows: Windows) -> Arrays:
        return {name: windows.batch[key] for name, key in self.keys.items()}

    def _add(self, into_params: Arrays, windows: Windows, gradient: Arrays) -> None:
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
            return programs.PROGRAMS.run(request, params, x, extras, zeros)
        cotangent = cotangent.reshape(-1, *self._shape(1)[1:])
        return programs.PROGRAMS.run(request, params, x, extras, pad_zeros(cotangent, len(x)))

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
    def __init__(self, inner: Walk) -> None:
        self.inner = inner

    def forward(self, windows: Windows, x: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Any]:
        y, saved = self.inner.forward(windows, x)
        return x + y, saved

    def backward(self, windows: Windows, saved: Any, cotangent: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return cotangent + self.inner.backward(windows, saved, cotangent)


class _Shared:
    def __init__(self, inner: Walk) -> None:
        self.inner = inner

    def forward(self, windows: Windows, x: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Any]:
        middle, first = self.inner.forward(windows, x)
        y, second = self.inner.forward(windows, middle)
        return y, (first, second)

    def backward(self, windows: Windows, saved: Any, cotangent: npt.NDArray[Any]) -> npt.NDArray[Any]:
        first, second = saved
        return self.inner.backward(windows, first, self.inner.backward(windows, second, cotangent))


class _Branches:
    """Branches that receive the same input and join, by addition or along an axis."""

    def __init__(self, branches: list[Walk], axis: int | None) -> None:
        self.inner, self.axis = branches, axis

    def forward(self, windows: Windows, x: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Any]:
        outs, saved = zip(*(branch.forward(windows, x) for branch in self.inner), strict=True)
        return sum(outs[1:], outs[0]) if self.axis is None else np.concatenate(outs, self.axis), saved

    def backward(self, windows: Windows, saved: Any, cotangent: npt.NDArray[Any]) -> npt.NDArray[Any]:
        parts = [cotangent] * len(self.inner)
        if self.axis is not None:
            ends = np.cumsum([branch.size_out[self.axis - 1 if self.axis > 0 else -1] for branch in self.inner])
            parts = np.split(cotangent, ends[:-1], self.axis)
        into_x = [b.backward(windows, tape, part) for b, tape, part in zip(self.inner, saved, parts, strict=True)]
        return sum(into_x[1:], into_x[0])


class Walk:
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
                branches = [Walk([branch], signal, f"{path}{i}.", ties, b) for b, branch in enumerate(layer.layers)]
                self.nodes.append(_Branches(branches, feature_axis(signal) if kind.wraps == "concat" else None))
            else:
                inner = Walk(layer.layers, signal, f"{path}{i}.", ties)
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

    def forward(self, windows: Windows, x: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], list[Any]]:
        """Return the output of the last layer, and the values that `backward` needs."""
        tape = []
        for node in self.nodes:
            x, saved = node.forward(windows, x)
            tape.append(saved)
        return x, tape

    def backward(self, windows: Windows, tape: list[Any], cotangent: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Add each window's gradients of the parameters; return the gradient of the input of the first layer."""
        return self._backward(windows, tape, cotangent, 0)

    def add_gradients(self, windows: Windows, tape: list[Any], cotangent: npt.NDArray[Any]) -> None:
        """Add each window's gradients of the parameters, without the pass through layers before the first of them."""
        first = next((i for i, saved in enumerate(tape) if not self._is_fixed(i, saved)), len(tape))
        self._backward(windows, tape, cotangent, first)

    def _is_fixed(self, index: int, saved: Any) -> bool:
        """Return whether a node is a single layer without parameters and buffers."""
        return isinstance(self.nodes[index], _Leaf) and not saved[0]

    def _backward(self, windows: Windows, tape: list[Any], cotangent: npt.NDArray[Any], first: int) -> npt.NDArray[Any]:
        for node, saved in zip(reversed(self.nodes[first:]), reversed(tape[first:]), strict=True):
            cotangent = node.backward(windows, saved, cotangent)
        return cotangent
