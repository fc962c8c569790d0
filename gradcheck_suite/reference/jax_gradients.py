"""The large-batch gradient in JAX: layers, objective and padding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from gradcheck_suite.catalogue.definitions import Arguments, Arrays, Signal, feature_axis
from gradcheck_suite.catalogue.losses import class_axis
from gradcheck_suite.catalogue.tables import (
    extra_keys,
    input_signal,
    jax_output,
    layer_definition,
    loss_definition,
    objective,
    out_signal,
    value_names,
)
from gradcheck_suite.core.case import Layer, Loss, ProblemSpec, Tie
from gradcheck_suite.reference import programs
from gradcheck_suite.reference.evaluation import ProgramRequest

ROWS = {None: 48, 1: 576, 0: 1920}
"""The smallest leading dimension of a program, by how many trailing axes its layer mixes (`LayerDefinition.axes`)."""


def padded_rows(rows: int, axes: int | None = None) -> int:
    """Return the leading dimension that arrays of `rows` rows are padded to, so that few shapes
    occur.

    For a hundred rows the overhead of the call exceeds the computation, and every new shape costs a
    compilation.
    """
    size = ROWS[axes]
    while size < rows:
        size *= 4
    return size


def pad_rows(array: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """Repeat the first row until there are `rows` rows: padding with values of the data never makes
    a NaN.
    """
    if len(array) == rows:
        return array
    padded = np.empty((rows, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    padded[len(array) :] = array[0]
    return padded


def pad_zeros(array: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """Add rows of zeros until there are `rows` rows: a cotangent of zeros contributes nothing."""
    if len(array) == rows:
        return array
    padded = np.zeros((rows, *array.shape[1:]))
    padded[: len(array)] = array
    return padded


class Windows:
    """Consecutive windows that go through the model in one batch, and the gradients of each.

    A layer computes each item separately, so one call serves all windows. Only the gradients of its
    parameters need a call for each window.
    """

    def __init__(self, values: Arrays, batch: Arrays, spans: Sequence[slice]) -> None:
        self.values = values
        self.batch = batch
        self.spans = spans
        self.rows = padded_rows(spans[-1].stop)
        self.gradients: list[Arrays] = [{} for _ in spans]


# The chain rule between layers, each of which is one compiled program that JAX differentiates.
#
# For parameters p, input x and an incoming cotangent c, a program returns y = f(p, x) and the
# pullback of c. Random models consist of the same few layers, so almost nothing is compiled twice.
# Tests hold the result equal to `whole_gradient`, and a finding is checked against it before it is
# reported.


def _layer_program(kind_name: str, options: Mapping[str, Any]) -> Any:
    meaning = layer_definition(Layer(kind_name)).jax_apply
    assert meaning is not None

    def both(params: Arguments, x: jax.Array, extras: Arguments, cotangent: jax.Array) -> Any:
        # tokens have no gradient: JAX would return float0, which is no number
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
        self.size_in = signal.size
        self.size_out = out_signal(layer, signal).size
        self.dtype = np.dtype(np.int64 if signal.form == "tokens" else np.float64)
        self.keys = extra_keys(layer, signal, path)
        self.path = path
        self.ties = ties
        self.key = ("layer", layer.kind, layer.options)
        self.program = _layer_program(layer.kind, layer.o)
        self._requests: dict[Any, tuple[ProgramRequest, npt.NDArray[Any]]] = {}

    def request(self, windows: Windows) -> ProgramRequest:
        """Return the request for the layer's program on the rows of these windows."""
        x = np.broadcast_to(np.zeros((), self.dtype), (windows.rows, *self.size_in))
        return self._request(
            windows.rows, self._params(windows), self._fold(x), self._extras(windows)
        )[0]

    def forward(self, windows: Windows, x: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Any]:
        """Return the output, and the values that `backward` needs."""
        saved = self._params(windows), x, self._extras(windows)
        y = self._run(saved, None)[0]
        return self._unfold(y, len(x), self.size_out), saved

    def backward(
        self, windows: Windows, saved: Any, cotangent: npt.NDArray[Any]
    ) -> npt.NDArray[Any]:
        """Add each window's gradients of the parameters; return the gradient of the input."""
        params, x, extras = saved
        # the gradient of the input needs no window: rows do not mix
        if not params or len(windows.spans) == 1:
            into_params, into_x = self._run(saved, cotangent)[1:]
            self._add(into_params, windows, windows.gradients[0])
            return self._unfold(into_x, len(x), self.size_in)
        whole = np.zeros((len(x), *self.size_in), x.dtype)
        for span, gradient in zip(windows.spans, windows.gradients, strict=True):
            rows = padded_rows(span.stop - span.start)
            part = (
                params,
                pad_rows(x[span], rows),
                {name: pad_rows(a[span], rows) for name, a in extras.items()},
            )
            into_params, into_x = self._run(part, pad_zeros(cotangent[span], rows))[1:]
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
            # JAX's gradient of an integer buffer has the dtype float0
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
            return programs.PROGRAMS.evaluate(
                request,
                params,
                x,
                extras,
                zeros,
                is_telling=False,
            )
        cotangent = cotangent.reshape(-1, *self._shape(1)[1:])
        return programs.PROGRAMS.evaluate(
            request,
            params,
            x,
            extras,
            pad_zeros(cotangent, len(x)),
        )

    def _request(
        self, rows: int, params: Arrays, x: npt.NDArray[Any], extras: Arrays
    ) -> tuple[ProgramRequest, npt.NDArray[Any]]:
        """Return the request for so many rows and a cotangent of zeros; `x` is folded."""
        found = self._requests.get((rows, x.shape))
        if found is None:
            zeros = np.zeros(self._shape(rows))
            request = ProgramRequest.of(self.key, self.program, params, x, extras, zeros)
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


class _Branches:
    """Branches that receive the same input and join, by addition or along an axis.

    A residual connection is the sum of an empty chain and the chain inside.
    """

    def __init__(self, branches: list[Walk], axis: int | None) -> None:
        self.inner = branches
        self.axis = axis

    def forward(self, windows: Windows, x: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Any]:
        outs, saved = zip(*(branch.forward(windows, x) for branch in self.inner), strict=True)
        return (
            sum(outs[1:], outs[0]) if self.axis is None else np.concatenate(outs, self.axis)
        ), saved

    def backward(
        self, windows: Windows, saved: Any, cotangent: npt.NDArray[Any]
    ) -> npt.NDArray[Any]:
        parts = [cotangent] * len(self.inner)
        if self.axis is not None:
            ends = np.cumsum(
                [branch.size_out[self.axis - 1 if self.axis > 0 else -1] for branch in self.inner]
            )
            parts = np.split(cotangent, ends[:-1], self.axis)
        into_x = [
            b.backward(windows, tape, part)
            for b, tape, part in zip(self.inner, saved, parts, strict=True)
        ]
        return sum(into_x[1:], into_x[0])


class Walk:
    """A chain of layers: forward for the output, backward for the gradient."""

    def __init__(
        self,
        layers: Iterable[Layer],
        signal: Signal,
        path: str = "",
        ties: Sequence[Tie] = (),
        start: int = 0,
    ) -> None:
        self.nodes: list[_Leaf | _Branches | Walk] = []
        for i, layer in enumerate(layers, start):
            kind = layer_definition(layer)
            if kind.wraps is None:
                self.nodes.append(
                    _Leaf(
                        layer,
                        signal,
                        f"{path}{i}",
                        ties,
                    )
                )
            elif kind.parallel:
                branches = [
                    Walk(
                        [branch],
                        signal,
                        f"{path}{i}.",
                        ties,
                        b,
                    )
                    for b, branch in enumerate(layer.layers)
                ]
                self.nodes.append(
                    _Branches(branches, feature_axis(signal) if kind.wraps == "concat" else None)
                )
            else:
                inner = Walk(
                    layer.layers,
                    signal,
                    f"{path}{i}.",
                    ties,
                )
                residual = _Branches([Walk([], signal), inner], None)
                # a shared chain is run twice
                self.nodes += [residual] if kind.wraps == "residual" else [inner, inner]
            signal = out_signal(layer, signal)
        self.size_out = signal.size

    def leaves(self) -> Iterator[_Leaf]:
        """Yield the layers, including those inside others."""
        for node in self.nodes:
            if isinstance(node, _Leaf):
                yield node
            elif isinstance(node, _Branches):
                yield from chain.from_iterable(inner.leaves() for inner in node.inner)
            else:
                yield from node.leaves()

    def forward(self, windows: Windows, x: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], list[Any]]:
        """Return the output of the last layer, and the values that `backward` needs."""
        tape = []
        for node in self.nodes:
            x, saved = node.forward(windows, x)
            tape.append(saved)
        return x, tape

    def backward(
        self, windows: Windows, tape: list[Any], cotangent: npt.NDArray[Any], first: int = 0
    ) -> npt.NDArray[Any]:
        """Add each window's gradients of the parameters, from the last node to the first.

        Return that of its input.
        """
        for node, saved in zip(reversed(self.nodes[first:]), reversed(tape[first:]), strict=True):
            cotangent = node.backward(windows, saved, cotangent)
        return cotangent

    def add_gradients(self, windows: Windows, tape: list[Any], cotangent: npt.NDArray[Any]) -> None:
        """Add each window's gradients of the parameters, without the pass through layers before the
        first of them.
        """
        fixed = [
            isinstance(node, _Leaf) and not saved[0]
            for node, saved in zip(self.nodes, tape, strict=True)
        ]
        self.backward(windows, tape, cotangent, fixed.index(False) if False in fixed else len(tape))


# The objective of a window in JAX, and the compiled program of its gradient by the model's output.


_TARGET_KEYS = ("target", "weight", "other", "variance")


def _loss_program(loss: Loss) -> Any:
    kind = loss_definition(loss)

    def terms(out: jax.Array, batch: Arguments) -> tuple[jax.Array, jax.Array, jax.Array]:
        items, pullback = jax.vjp(lambda out: kind.jax_items(loss.o, out, batch), out)
        return items, kind.jax_counts(loss.o, batch), *pullback(jnp.ones_like(items))

    return terms


def parts_as_items(
    array: npt.NDArray[Any], axes: int | None, *, has_classes: bool
) -> npt.NDArray[Any]:
    """Return an array of a loss with each element or position as an item of its own, as
    `LossDefinition.axes` says.
    """
    if axes is None:
        return array
    if axes == 0 or not has_classes:
        return array.reshape(-1)
    last = np.moveaxis(array, class_axis(array), -1)
    return last.reshape(-1, last.shape[-1])


class WindowLosses:
    """The loss of every window: `objective` for each, and its gradient by the model's output.

    One program returns what an item contributes to a sum over items. Numpy divides by the windows'
    counts: an operation takes XLA milliseconds to compile, and numpy microseconds to run.
    """

    def __init__(self, loss: Loss) -> None:
        options = tuple(option for option in loss.options if option[0] != "reduction")
        self.key = ("losses", loss.kind, options)
        self.program = _loss_program(loss)
        self.mean = loss.reduction == "mean"
        self.axes = loss_definition(loss).axes
        self._requests: dict[Any, ProgramRequest] = {}

    def request(self, windows: Windows, size: tuple[int, ...]) -> ProgramRequest:
        """Return the request for the program on the rows of these windows.

        `size` is that of an item's output.
        """
        found = self._requests.get(windows.rows)
        if found is None:
            arguments = (
                self._fold(np.broadcast_to(0.0, (windows.rows, *size))),
                self._targets(windows, 1 + len(size)),
            )
            found = self._requests[windows.rows] = ProgramRequest.of(
                self.key, self.program, *arguments
            )
        return found

    def gradients(
        self, windows: Windows, out: npt.NDArray[Any]
    ) -> tuple[list[float], npt.NDArray[Any]]:
        """Return each window's loss, and the gradient by the model's output, (rows, *size)."""
        request = self.request(windows, out.shape[1:])
        items, counts, into_out = programs.PROGRAMS.evaluate(
            request, self._fold(out), self._targets(windows, out.ndim)
        )
        if self.axes is not None:
            positions = out[0].size // (1 if self.axes == 0 else out.shape[class_axis(out)])
            items, counts = (
                a[: len(out) * positions].reshape(len(out), -1).sum(axis=1) for a in (items, counts)
            )
            into_out = self._unfold(into_out, out)
        # padding contributes nothing, also where an infinite derivative makes 0 * inf = NaN
        losses = []
        gradient = np.zeros_like(into_out)
        with np.errstate(all="ignore"):  # as in XLA
            for span in windows.spans:
                divisor = counts[span].sum() if self.mean else 1.0
                losses.append(float(items[span].sum() / divisor))
                gradient[span] = into_out[span] / divisor
        return losses, gradient

    def _targets(self, windows: Windows, axes: int) -> Arrays:
        """Return the loss's arrays; `axes` is the number of axes of the model's output."""
        found = {name: windows.batch[name] for name in _TARGET_KEYS if name in windows.batch}
        return {
            name: self._fold(array, has_classes=array.ndim == axes) for name, array in found.items()
        }

    def _fold(self, array: npt.NDArray[Any], *, has_classes: bool = True) -> npt.NDArray[Any]:
        folded = parts_as_items(array, self.axes, has_classes=has_classes)
        return array if self.axes is None else pad_rows(folded, padded_rows(len(folded), 0))

    def _unfold(self, folded: npt.NDArray[Any], like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self.axes == 0:
            return folded[: like.size].reshape(like.shape)
        last = np.moveaxis(like, class_axis(like), -1).shape
        return np.moveaxis(folded[: like.size // last[-1]].reshape(last), -1, class_axis(like))


# The large-batch gradient in JAX.


@lru_cache(maxsize=512)
def _walk(problem: ProblemSpec) -> tuple[Walk, WindowLosses]:
    return Walk(problem.layers, input_signal(problem.input), ties=problem.ties), WindowLosses(
        problem.loss
    )


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
        For each window the loss, and for every name in `values` an array of its shape; those of
        buffers have no meaning.
    """
    return StartedGradients(
        problem,
        values,
        data,
        windows,
    ).result()


class StartedGradients:
    """`large_batch_gradients`, of which the programs are loaded or compiled by other threads until
    `result`.
    """

    def __init__(
        self, problem: ProblemSpec, values: Arrays, data: Arrays, windows: Sequence[range]
    ) -> None:
        """Start; the arguments are those of `large_batch_gradients`."""
        self._walk, self._objective = _walk(problem)
        self._groups: list[Windows] = []
        for group in _groups(windows):
            first = group[0].start
            rows = padded_rows(group[-1].stop - group[0].start)
            batch = {
                name: pad_rows(array[first : group[-1].stop], rows) for name, array in data.items()
            }
            spans = [slice(window.start - first, window.stop - first) for window in group]
            self._groups.append(Windows(values, batch, spans))
        for side_by_side in self._groups:
            requests = [leaf.request(side_by_side) for leaf in self._walk.leaves()]
            programs.PROGRAMS.prepare_evaluations(
                [*requests, self._objective.request(side_by_side, self._walk.size_out)]
            )

    def result(self) -> list[tuple[float, Arrays]]:
        """Return what `large_batch_gradients` returns; only once."""
        found: list[tuple[float, Arrays]] = []
        for windows in self._groups:
            out, tape = self._walk.forward(windows, windows.batch["x"])
            losses, cotangent = self._objective.gradients(windows, out)
            self._walk.add_gradients(windows, tape, cotangent)
            for value, gradient in zip(losses, windows.gradients, strict=True):
                found.append(
                    (
                        value,
                        {n: gradient.get(n, np.zeros_like(v)) for n, v in windows.values.items()},
                    )
                )
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


# A further JAX reference: the whole model differentiated at once.
#
# It compiles the whole model, which takes half a second. It is therefore computed only if the torch
# and the JAX reference differ.


def whole_gradient(problem: ProblemSpec, values: Arrays, data: Arrays) -> tuple[float, Arrays]:
    """Return loss and gradient of a batch, as `large_batch_gradients` does, from one
    `jax.value_and_grad`.

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
        return objective(problem.loss, jax_output(problem, values, batch), batch, weight)

    # it is asked for where something is wrong, and hardly twice: no file for it
    found, gradient = programs.PROGRAMS.call(
        ("whole", problem), jax.value_and_grad(value), values, batch, weight, store=False
    )
    return float(found), gradient
