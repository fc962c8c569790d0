"""Which storages are alive, what they are, and when they go.

A storage is counted once, however many views it has, from the moment that an operation returns it until torch frees it:
a weak reference to it is called back then. Nothing here keeps a storage alive.
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
"""What a storage is: parameters and buffers; gradients and accumulators; optimizer state; what a forward allocates;
what a backward, a reset or a step allocates; what the loop itself allocates: batches, counts, weighted losses."""


@dataclass(frozen=True)
class Peak:
    """The most bytes that were alive at once.

    Attributes:
        bytes: in all categories together.
        by_category: at that moment.
        phase: in which it came.
        window: in which it came.
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
    """The storages that are alive, by category."""

    def __init__(self, on_free: Callable[[str, int], None]) -> None:
        """Start with none.

        Args:
            on_free: called with the category and the bytes of every storage that torch frees, after it was taken off.
        """
        self.live = dict.fromkeys(CATEGORIES, 0)
        self._entries: dict[int, _Entry] = {}
        self._on_free = on_free

    @property
    def total(self) -> int:
        """Bytes alive."""
        return sum(self.live.values())

    def category(self, storage: torch.UntypedStorage) -> str | None:
        """Return what a storage is, or None where it is not known."""
        entry = self._entries.get(storage._cdata)
        return None if entry is None else entry.category

    def add(self, storage: torch.UntypedStorage, category: str) -> int:
        """Count a storage that may be known already; return the bytes that are new."""
        if storage._cdata in self._entries:
            return 0
        key, size = storage._cdata, storage.nbytes()
        # bound to the book weakly: a storage that outlives it must not keep it
        book = weakref.ref(self)

        def gone(_: object) -> None:
            if (alive := book()) is not None:
                alive._remove(key)

        self._entries[key] = _Entry(weakref.ref(storage, gone), size, category)
        self.live[category] += size
        return size

    def move(self, storage: torch.UntypedStorage, category: str) -> None:
        """Say what a known storage has become."""
        entry = self._entries.get(storage._cdata)
        if entry is not None:
            self.live[entry.category] -= entry.bytes
            self.live[category] += entry.bytes
            entry.category = category

    def measure(self, storage: torch.UntypedStorage) -> int:
        """Return by how many bytes a known storage has grown since it was last measured."""
        entry = self._entries.get(storage._cdata)
        if entry is None:
            return 0
        growth = storage.nbytes() - entry.bytes
        entry.bytes += growth
        self.live[entry.category] += growth
        return growth

    def close(self) -> None:
        """Stop watching; the figures stay as they are."""
        self._entries.clear()

    def _remove(self, key: int) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.live[entry.category] -= entry.bytes
            self._on_free(entry.category, entry.bytes)
