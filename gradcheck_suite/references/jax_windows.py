"""Windows that go through a model in JAX in one batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gradcheck_suite.catalogue.definitions import Arrays
from gradcheck_suite.references.padding import padded_rows


class Windows:
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
