"""The storages that are alive, each with a category, until torch frees them.

A storage counts once, however many views it has, from the moment that an operation returns it until torch frees it,
when the callback of a weak reference runs. This module keeps no storage alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

PARAMETERS = "parameters"
GRADIENTS = "gradients"
STATE = "optimizer state"
ACTIVATIONS = "activations"
TEMPORARIES = "temporaries"
OTHER = "other"
CATEGORIES = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, TEMPORARIES, OTHER)
"""The categories of storages: parameters and buffers; gradients and accumulators; optimizer state; storages that a
forward allocates; storages that a backward, a reset or a step allocates; storages that the loop itself allocates, such
as batches, counts and weighted losses."""


@dataclass(frozen=True)
class Peak:
    """The most bytes that were alive at once.

    Attributes:
        bytes: bytes alive in all categories together.
        by_category: bytes alive by category at that moment.
        phase: the phase of that moment.
        window: the index of the window of that moment.
    """

    bytes: int
    by_category: dict[str, int]
    phase: str
    window: int


@dataclass
class _Entry:
    reference: weakref.ref[torch.UntypedStorage]
    bytes: int
    category: str


class Storages:
    """The storages that are alive, and their bytes by category."""

    def __init__(self, on_free: Callable[[str, int], None]) -> None:
        """Start with no storage.

        Args:
            on_free: called with the category and the bytes of every storage that torch frees, after it was removed.
        """
        self.live = dict.fromkeys(CATEGORIES, 0)
        self._entries: dict[int, _Entry] = {}
        self._on_free = on_free

    @property
    def total(self) -> int:
        """Bytes alive."""
        return sum(self.live.values())

    def category(self, storage: torch.UntypedStorage) -> str | None:
        """Return the category of a storage, or None for a storage that was not added."""
        entry = self._entries.get(storage._cdata)
        return None if entry is None else entry.category

    def add(self, storage: torch.UntypedStorage, category: str) -> int:
        """Add a storage unless it was added before; return the bytes added."""
        if storage._cdata in self._entries:
            return 0
        key, size = storage._cdata, storage.nbytes()
        # a weak reference, since a storage that outlives this object must not keep it alive
        owner = weakref.ref(self)

        def gone(_: object) -> None:
            if (alive := owner()) is not None:
                alive._remove(key)

        self._entries[key] = _Entry(weakref.ref(storage, gone), size, category)
        self.live[category] += size
        return size

    def move(self, storage: torch.UntypedStorage, category: str) -> None:
        """Change the category of a storage that was added."""
        entry = self._entries.get(storage._cdata)
        if entry is not None:
            self.live[entry.category] -= entry.bytes
            self.live[category] += entry.bytes
            entry.category = category

    def measure(self, storage: torch.UntypedStorage) -> int:
        """Return by how many bytes a storage has grown since it was added or last measured."""
        entry = self._entries.get(storage._cdata)
        if entry is None:
            return 0
        growth = storage.nbytes() - entry.bytes
        entry.bytes += growth
        self.live[entry.category] += growth
        return growth

    def close(self) -> None:
        """Stop watching storages; the figures stay as they are."""
        self._entries.clear()

    def _remove(self, key: int) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.live[entry.category] -= entry.bytes
            self._on_free(entry.category, entry.bytes)
