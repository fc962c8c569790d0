"""Plans: the micro-batches, windows and epochs of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from gradcheck_suite.errors import UsageError

ALWAYS_WRITTEN = ("micro_batches", "accumulation_steps", "epochs", "masked")
"""The fields that JSON and repr state even where they have their default."""


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Plan:
    """How the items of a run are split into micro-batches, windows and epochs.

    Attributes:
        micro_batches: number of items of each micro-batch of one epoch, in order; each at least 1.
        accumulation_steps: number of micro-batches in a window (K), at least 1. The last window of an epoch is shorter
            if K does not divide the number of micro-batches.
        epochs: number of passes over the items, at least 1.
        masked: indices of the micro-batches without valid targets: all their targets are ignored.
        ranks: number of micro-batches that each rank gets in an epoch, each at least 1; empty for one rank. A rank's
            window has `accumulation_steps` micro-batches or what is left, possibly none. `micro_batches` lists the
            first window's micro-batches of rank 0, then those of rank 1 and so on, then the second window's.

    Raises:
        UsageError: a value is out of range, or a window has no valid targets.
    """

    micro_batches: tuple[int, ...]
    accumulation_steps: int
    epochs: int = 1
    masked: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "micro_batches", tuple(self.micro_batches))
        object.__setattr__(self, "ranks", () if len(self.ranks) == 1 else tuple(self.ranks))
        object.__setattr__(self, "masked", tuple(sorted(set(self.masked))))
        if not self.micro_batches or not all(_is_int(n) and n >= 1 for n in self.micro_batches):
            raise UsageError(f"Plan: micro_batches must be positive integers, at least one, got {self.micro_batches}")
        for name in ("accumulation_steps", "epochs"):
            value = getattr(self, name)
            if not _is_int(value) or value < 1:
                raise UsageError(f"Plan: {name} must be a positive integer, got {value!r}")
        if not all(_is_int(n) and n >= 1 for n in self.ranks) or (
            self.ranks and sum(self.ranks) != len(self.micro_batches)
        ):
            raise UsageError(
                f"Plan: ranks must be positive integers that add up to the {len(self.micro_batches)} micro-batches, "
                f"got {self.ranks}"
            )
        if not all(_is_int(j) and 0 <= j < len(self.micro_batches) for j in self.masked):
            raise UsageError(
                f"Plan: masked must be indices of micro-batches below {len(self.micro_batches)}, got {self.masked}"
            )
        for w, window in enumerate(self.windows):
            if set(window) <= set(self.masked):
                raise UsageError(f"Plan: window {w} has no valid targets: all its micro-batches {window} are masked")

    @property
    def world_size(self) -> int:
        """The number of ranks that train together."""
        return len(self.ranks) or 1

    @cached_property
    def _parts(self) -> tuple[tuple[range, ...], ...]:
        """For each window the indices of each rank's micro-batches in it."""
        k, left, start = self.accumulation_steps, self.ranks or (len(self.micro_batches),), 0
        parts: list[tuple[range, ...]] = []
        while any(left):
            ends = tuple(accumulate((min(n, k) for n in left), initial=start))
            parts.append(tuple(map(range, ends, ends[1:])))
            left, start = tuple(n - min(n, k) for n in left), ends[-1]
        return tuple(parts)

    @cached_property
    def windows(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the micro-batches of each window of one epoch, over all ranks."""
        return tuple(tuple(range(parts[0].start, parts[-1].stop)) for parts in self._parts)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The rank that gets each micro-batch."""
        return tuple(rank for parts in self._parts for rank, part in enumerate(parts) for _ in part)

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the indices of the micro-batches that a rank gets in an epoch, in order."""
        return tuple(j for parts in self._parts for j in parts[rank])

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The index of the first item of each micro-batch."""
        return tuple(accumulate(self.micro_batches[:-1], initial=0))

    def items(self, micro_batch: int) -> range:
        """Return the indices of the items of a micro-batch."""
        return range(self.starts[micro_batch], self.starts[micro_batch] + self.micro_batches[micro_batch])

    def window_items(self, window: int) -> range:
        """Return the indices of the items of a window."""
        members = self.windows[window]
        return range(self.items(members[0]).start, self.items(members[-1]).stop)

    @property
    def total_items(self) -> int:
        """The number of items in one epoch."""
        return sum(self.micro_batches)

    @property
    def steps(self) -> int:
        """The number of optimizer steps that a loop must take: one per window of every epoch."""
        return self.epochs * len(self.windows)

    @property
    def step_limit(self) -> int:
        """The number of optimizer steps after which a loop is stopped: more than two per micro-batch."""
        return 2 * self.epochs * len(self.micro_batches) + 8

    @property
    def has_short_window(self) -> bool:
        """Whether the last window of an epoch has fewer than `accumulation_steps` micro-batches."""
        return len(self.windows[-1]) < self.accumulation_steps * self.world_size

    @property
    def has_idle_rank(self) -> bool:
        """Whether some rank has no micro-batch in the last window of an epoch, while others have some."""
        return not all(self._parts[-1])

    def replace(self, **changes: Any) -> Plan:
        """Return the plan with some fields changed."""
        return replace(self, **changes)

    def select(self, kept: Iterable[int]) -> Plan:
        """Return the plan of some of its micro-batches, given by their indices in the order wanted.

        Each goes to the rank that it had. A rank that keeps none is left out.
        """
        kept = tuple(kept)
        if self.ranks:
            counts = [sum(self.owners[j] == rank for j in kept) for rank in range(self.world_size)]
            given = [iter([j for j in kept if self.owners[j] == rank]) for rank, n in enumerate(counts) if n]
            ranks = tuple(n for n in counts if n)
            owners = Plan((1,) * len(kept), self.accumulation_steps, ranks=ranks).owners
            kept = tuple(next(given[owner]) for owner in owners)
        else:
            ranks = ()
        return self.replace(
            micro_batches=tuple(self.micro_batches[j] for j in kept),
            masked=tuple(i for i, j in enumerate(kept) if j in self.masked),
            ranks=ranks,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data.

        A field that is not among `ALWAYS_WRITTEN` is left out where it has its default, so that a field which is added
        later changes no stored case and no digest.
        """
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, (value, default) in values.items()
            if name in ALWAYS_WRITTEN or value != default
        }

    def __repr__(self) -> str:
        return f"Plan({', '.join(f'{name}={getattr(self, name)!r}' for name in self.to_json())})"


def plan_from_json(data: Any) -> Plan:
    """Return the plan of JSON data.

    Raises:
        UsageError: the data is not a plan; the message says why.
    """
    if not isinstance(data, Mapping):
        raise UsageError(f"plan: expected an object, got {data!r}")
    known = {field.name: field for field in fields(Plan)}
    missing = {name for name, field in known.items() if field.default is MISSING} - data.keys()
    unknown = data.keys() - known.keys()
    if missing or unknown:
        raise UsageError(f"plan: missing {sorted(missing)}, unknown {sorted(unknown)}")
    for name, value in data.items():
        if str(known[name].type).startswith("tuple") and not isinstance(value, list):
            raise UsageError(f"plan: {name} must be a list, got {value!r}")
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
    return Plan(**values)
