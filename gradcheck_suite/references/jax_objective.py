"""The objective of a window in JAX, and the compiled program of its gradient by the model's output."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from gradcheck_suite.catalogue import loss_definition
from gradcheck_suite.catalogue.definitions import Arguments, Arrays
from gradcheck_suite.references import programs
from gradcheck_suite.references.jax_windows import Windows
from gradcheck_suite.references.padding import ROWS
from gradcheck_suite.references.programs import Request, to_numpy
from gradcheck_suite.schema.spec import Loss

_TARGET_KEYS = ("target", "weight", "other", "variance")


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


class Objective:
    """The loss of every window in one program: `objective` for each, and its gradient by the model's output."""

    def __init__(self, loss: Loss) -> None:
        options = tuple(option for option in loss.options if option[0] != "reduction")
        self.key, self.program = ("losses", loss.kind, options), _loss_program(loss)
        self.mean = np.asarray(loss.reduction == "mean")
        self._requests: dict[Any, Request] = {}

    def request(self, windows: Windows, size: tuple[int, ...]) -> Request:
        """Return the request for the program on the rows of these windows; `size` is that of an item's output."""
        found = self._requests.get(windows.rows)
        if found is None:
            out = np.broadcast_to(0.0, (windows.rows, *size))
            arguments = out, self._targets(windows), windows.numbers(), self.mean
            found = self._requests[windows.rows] = Request.of(self.key, self.program, *arguments)
        return found

    def gradients(self, windows: Windows, out: npt.NDArray[Any]) -> tuple[list[float], npt.NDArray[Any]]:
        """Return each window's loss, and the gradient by the model's output, (rows, *size)."""
        request = self.request(windows, out.shape[1:])
        found = programs.PROGRAMS.run(request, out, self._targets(windows), windows.numbers(), self.mean)
        losses, into_out = to_numpy(found)
        return losses[: len(windows.spans)].tolist(), into_out

    @staticmethod
    def _targets(windows: Windows) -> Arrays:
        return {name: windows.batch[name] for name in _TARGET_KEYS if name in windows.batch}
