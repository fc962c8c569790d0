"""Programs that XLA checks, several of them compiled as one.

XLA takes 10 to 20 ms for each program beside what its operations take, and JAX takes as long to
begin to lower it. Eight programs in one take half of the time of eight. A file for each says in
which stored program it is, so that a later process, which may check others beside it, finds it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from gradcheck_suite.reference.evaluation import ProgramRequest, Sample, Tree

MOST = 8
"""Number of programs that are compiled as one; 24 take as long each."""


class Store(Protocol):
    """Programs in memory and on disk."""

    def run(self, request: ProgramRequest, *arguments: Tree, few: bool = False) -> Tree:
        """Run a program, which is compiled and stored where there is none."""

    def path(self, key: Any) -> Path | None:
        """Return where what belongs to a key is stored, or None for no store."""

    def load(self, path: Path | None) -> Callable[..., Any] | None:
        """Return a stored program, or None where there is none."""

    def keep(self, path: Path, payload: bytes) -> None:
        """Store a file."""

    def payload(self, path: Path) -> bytes | None:
        """Return a stored file's contents; None where there is none that can be trusted."""


@dataclass(frozen=True)
class _Place:
    """Where a program is stored.

    Attributes:
        file: the name of the file with the programs that were compiled as one.
        index: of the program among them.
    """

    file: str
    index: int

    def packed(self) -> bytes:
        """Return the contents of the file that says so."""
        return f"{self.file} {self.index}".encode()

    @classmethod
    def unpacked(cls, payload: bytes) -> _Place | None:
        """Return the place of a file's contents; None where the file is damaged."""
        try:
            file, index = payload.decode().split()
            return cls(file, int(index))
        except ValueError:
            return None


def _as_one(samples: Sequence[Sample]) -> ProgramRequest:
    """Return the request for a program that returns what each of these returns."""
    # not the requests' own functions: JAX has derived these already
    functions = [sample.program.traced for sample in samples]

    def all_of_them(*arguments: Tree) -> Tree:
        return tuple(function(*own) for function, own in zip(functions, arguments, strict=True))

    return ProgramRequest(
        ("together", *(sample.request.key for sample in samples)),
        all_of_them,
        tuple(sample.request.arguments for sample in samples),
    )


class Together:
    """Runs calls of programs that are compiled, and stored, as one."""

    def __init__(self, store: Store) -> None:
        """Load nothing yet.

        Args:
            store: has the programs.
        """
        self._store = store
        self._loaded: dict[str, Callable[..., Any] | None] = {}

    def results(self, samples: Sequence[Sample]) -> list[Tree]:
        """Return what XLA computes for each of these calls."""
        stored = defaultdict[str, dict[int, int]](dict)
        fresh: list[int] = []
        for number, sample in enumerate(samples):
            place = self._place(sample)
            if place is None:
                fresh.append(number)
            else:
                stored[place.file][place.index] = number
        found: dict[int, Tree] = {}
        # each file once, though several of the calls are in it
        for file, members in stored.items():
            program = self._loaded[file]
            assert program is not None
            found |= _results(
                program, {i: samples[n].arguments for i, n in members.items()}, members
            )
        if fresh:
            chosen = [samples[number] for number in fresh]
            found |= dict(zip(fresh, self._compiled(chosen), strict=True))
        return [found[number] for number in range(len(samples))]

    def _place(self, sample: Sample) -> _Place | None:
        """Return where a call's program is stored; None where it is to be compiled."""
        path = self._store.path(("in", sample.request.key))
        payload = None if path is None else self._store.payload(path)
        place = None if payload is None else _Place.unpacked(payload)
        if path is None or place is None:
            return None
        if place.file not in self._loaded:
            # None is kept as well: a file that is gone is not looked for again
            self._loaded[place.file] = self._store.load(path.parent / place.file)
        return None if self._loaded[place.file] is None else place

    def _compiled(self, samples: Sequence[Sample]) -> Sequence[Tree]:
        request = _as_one(samples)
        results: Sequence[Tree] = self._store.run(
            request, *(sample.arguments for sample in samples), few=True
        )
        path = self._store.path(request.key)
        # a program that calls LAPACK is not stored
        if path is not None and path.exists():
            for index, sample in enumerate(samples):
                own = self._store.path(("in", sample.request.key))
                if own is not None:
                    self._store.keep(own, _Place(path.name, index).packed())
        return results


def _results(
    program: Callable[..., Any], arguments: dict[int, Tree], numbers: dict[int, int]
) -> dict[int, Tree]:
    """Return what programs that are compiled as one return, by the numbers of their calls.

    Args:
        program: all of them, as it was loaded.
        arguments: of those that are called, by their place; the others get zeros.
        numbers: the numbers of the calls, by place.
    """
    shapes: Any = program.args_info[0]  # type: ignore[attr-defined]  # of a compiled program
    every = [
        arguments[index]
        if index in arguments
        else jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), own)
        for index, own in enumerate(shapes)
    ]
    results = program(*every)
    return {number: results[index] for index, number in numbers.items()}
