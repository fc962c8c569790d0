"""Batches as pairs (x, y), for trainers that call `criterion(model(x), y)` themselves.

A problem has one loss of a model and a batch. It is taken apart by calling it with another model: one that only notes
what it is called with gives x, and one that only returns a given output gives the criterion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.execution.batches import leaves, map_leaves
from gradcheck_suite.schema.contract import Batch

Loss = Callable[[Any, Batch], torch.Tensor]
NEEDED = "run.pairs and run.criterion need a loss that calls its model once, as model(x)"


class _CalledError(BaseException):
    """Carries what a loss calls its model with. It is no `Exception`, so that a loss does not catch it."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__()
        self.given, self.keywords = args, keywords


def _note(*args: Any, **keywords: Any) -> Any:
    raise _CalledError(*args, **keywords)


class _Given:
    """A model that returns a given output, once."""

    def __init__(self, output: Any) -> None:
        self._output, self._called = output, False

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if self._called:
            raise CannotRunHere(f"{NEEDED}; this one calls its model several times: use run.loss(model, batch)")
        self._called = True
        return self._output


def model_input(loss: Loss, batch: Batch) -> Any:
    """Return what a loss calls its model with.

    Raises:
        CannotRunHere: the loss does not call its model as `model(x)`.
    """
    try:
        loss(_note, batch)
    except _CalledError as called:
        if len(called.given) == 1 and not called.keywords:
            return called.given[0]
        raise CannotRunHere(f"{NEEDED}; this one passes other arguments: use run.loss(model, batch)") from None
    except Exception as error:
        raise CannotRunHere(f"{NEEDED}; this one raises {error!r} first: use run.loss(model, batch)") from None
    raise CannotRunHere(f"{NEEDED}; this one does not call it: use run.loss(model, batch)")


class Pairs:
    """The batches of a loss as pairs."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._batch: Batch = None
        self._target: torch.Tensor | None = None

    def pair(self, batch: Batch) -> tuple[Any, Any]:
        """Return what the model is called with, and the rest: the one other tensor, or else the whole batch."""
        with torch.no_grad():
            x = model_input(self._loss, batch)
        others = [leaf for leaf in leaves(batch) if leaf is not x]
        if len(others) != 1 or len(others) == len(list(leaves(batch))):
            return x, batch
        self._batch, self._target = batch, others[0]
        return x, others[0]

    def criterion(self, output: Any, y: Any) -> torch.Tensor:
        """Return the loss of a model's output and the y of a pair, or of an output and a batch."""
        batch = y
        if self._target is not None and isinstance(y, torch.Tensor):
            target = self._target
            # the loss calls the model that returns the output: what it calls it with does not matter
            batch = map_leaves(lambda leaf: y if leaf is target else None, self._batch)
        return self._loss(_Given(output), batch)

    def over(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader of the same micro-batches as pairs."""
        collate = loader.collate_fn
        return DataLoader(
            loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=lambda items: self.pair(collate(items))
        )
