"""Batches: pytrees of tensors, the items that they are cut from, and the loader that yields them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from gradcheck_suite.schema.contract import Batch


def map_leaves(function: Callable[[torch.Tensor], Any], batch: Batch) -> Batch:
    """Apply a function to every tensor of a pytree of dicts, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {name: map_leaves(function, value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_leaves(function, value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_leaves(function, value) for value in batch)
    return batch


def leaves(batch: Batch) -> Iterator[torch.Tensor]:
    """Yield the tensors of a pytree."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from leaves(value)


def named_leaves(batch: Batch, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a pytree with their places in it, such as `x` or `inputs.0`."""
    if isinstance(batch, torch.Tensor):
        yield name or "the batch", batch
    elif isinstance(batch, dict | list | tuple):
        for key, value in batch.items() if isinstance(batch, dict) else enumerate(batch):
            yield from named_leaves(value, f"{name}.{key}" if name else str(key))


def to_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return a pytree with its floating-point tensors in a dtype and the others unchanged."""
    return map_leaves(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)


class Items(Dataset[Any]):
    """The items of one epoch. A list of indices selects a batch, which is a copy, so that a loop may change it."""

    def __init__(self, data: Batch) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(next(leaves(self._data)))

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: Iterable[int]) -> Batch:
        chosen = torch.as_tensor(list(indices))
        return map_leaves(lambda tensor: tensor[chosen.to(tensor.device)], self._data)


class MicroBatchSampler(BatchSampler):
    """The micro-batches of one epoch in order, as lists of item indices; `batch_size` is that of the largest.

    Attributes:
        passes: number of passes that were begun.
    """

    def __init__(self, items: Items, micro_batches: Iterable[range]) -> None:
        self.micro_batches = [list(indices) for indices in micro_batches]
        self.passes = 0
        super().__init__(SequentialSampler(items), max(map(len, self.micro_batches), default=1), drop_last=False)

    def __iter__(self) -> Iterator[list[int]]:
        self.passes += 1
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)


def loader_over(data: Batch, micro_batches: Iterable[range]) -> DataLoader[Any]:
    """Return a loader whose passes yield the micro-batches of these items, in order."""
    items = Items(data)
    return DataLoader(items, batch_sampler=MicroBatchSampler(items, micro_batches), collate_fn=_unchanged)


def epoch_of(loader: DataLoader[Any]) -> Callable[[], int]:
    """Return a function that returns the index of the pass over a loader of `loader_over`."""
    sampler = loader.batch_sampler
    assert isinstance(sampler, MicroBatchSampler)
    return lambda: sampler.passes - 1


def _unchanged(batch: Batch) -> Batch:
    return batch
