"""The large-batch gradient in JAX.

Each layer is one compiled program. For parameters p, input x and an incoming cotangent c it returns y = f(p, x) and
the pullback of c by `jax.vjp`. `jax_layers` calls the programs forward and then backward through the model: it
applies the chain rule between layers, and JAX differentiates inside each. Random models consist of the same few
layers, so almost nothing is compiled twice. `accumulated.whole_gradient` differentiates the whole model with
`jax.grad`. Tests hold the two equal, and a finding is checked against it before it is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from gradcheck_suite.catalogue import input_signal
from gradcheck_suite.catalogue.definitions import Arrays
from gradcheck_suite.references import programs
from gradcheck_suite.references.jax_layers import Walk
from gradcheck_suite.references.jax_objective import Objective
from gradcheck_suite.references.jax_windows import Windows
from gradcheck_suite.references.kept_gradients import KeptGradients
from gradcheck_suite.references.padding import ROWS, pad_rows, padded_rows
from gradcheck_suite.schema.spec import ProblemSpec


@lru_cache(maxsize=512)
def _walk(problem: ProblemSpec) -> tuple[Walk, Objective]:
    return Walk(problem.layers, input_signal(problem.input), ties=problem.ties), Objective(problem.loss)


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
    """`large_batch_gradients`, of which the programs are loaded or compiled by other threads until `result`.

    Gradients that are kept in a file need no program.
    """

    def __init__(self, problem: ProblemSpec, values: Arrays, data: Arrays, windows: Sequence[range]) -> None:
        """Start; the arguments are those of `large_batch_gradients`."""
        self._kept = KeptGradients(problem, values, data, windows)
        self._found = self._kept.read()
        if self._found is not None:
            return
        self._walk, self._objective = _walk(problem)
        self._groups: list[Windows] = []
        for group in _groups(windows):
            first, rows = group[0].start, padded_rows(group[-1].stop - group[0].start)
            batch = {name: pad_rows(array[first : group[-1].stop], rows) for name, array in data.items()}
            spans = [slice(window.start - first, window.stop - first) for window in group]
            self._groups.append(Windows(values, batch, spans))
        for side_by_side in self._groups:
            requests = [leaf.request(side_by_side) for leaf in self._walk.leaves()]
            programs.PROGRAMS.prepare([*requests, self._objective.request(side_by_side, self._walk.size_out)])

    def result(self) -> list[tuple[float, Arrays]]:
        """Return what `large_batch_gradients` returns; only once."""
        if self._found is not None:
            return self._found
        found: list[tuple[float, Arrays]] = []
        for windows in self._groups:
            out, tape = self._walk.forward(windows, windows.batch["x"])
            losses, cotangent = self._objective.gradients(windows, out)
            self._walk.add_gradients(windows, tape, cotangent)
            for value, gradient in zip(losses, windows.gradients, strict=True):
                found.append((value, {n: gradient.get(n, np.zeros_like(v)) for n, v in windows.values.items()}))
        self._kept.write(found)
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
