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


@dataclass(frozen=True, repr=False)
class Plan:
    """How the items of a run are split into micro-batches, windows and epochs.

    Attributes:
        micro_batches: number of items of each micro-batch of one epoch, in order; each at least 1.
        accumulation_steps: number of micro-batches in a window (K), at least 1. The last window of an epoch is shorter
            if K does not divide the number of micro-batches.
        epochs: number of passes over the items, at least 1.
        masked: indices of the micro-batches without valid targets: all their targets are ignored.

    Raises:
        UsageError: a value is out of range, or a window has no valid targets.
    """

    micro_batches: tuple[int, ...]
    accumulation_steps: int
    epochs: int = 1
    masked: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "micro_batches", tuple(self.micro_batches))
        object.__setattr__(self, "masked", tuple(sorted(set(self.masked))))
        if not self.micro_batches or not all(_is_int(n) and n >= 1 for n in self.micro_batches):
            raise UsageError(f"Plan: micro_batches must be positive integers, at least one, got {self.micro_batches}")
        for name in ("accumulation_steps", "epochs"):
            value = getattr(self, name)
            if not _is_int(value) or value < 1:
                raise UsageError(f"Plan: {name} must be a positive integer, got {value!r}")
        if not all(_is_int(j) and 0 <= j < len(self.micro_batches) for j in self.masked):
            raise UsageError(
                f"Plan: masked must be indices of micro-batches below {len(self.micro_batches)}, got {self.masked}"
            )
        for w, window in enumerate(self.windows):
            if set(window) <= set(self.masked):
                raise UsageError(f"Plan: window {w} has no valid targets: all its micro-batches {window} are masked")

    @cached_property
    def windows(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the micro-batches of each window of one epoch."""
        count, k = len(self.micro_batches), self.accumulation_steps
        return tuple(tuple(range(i, min(i + k, count))) for i in range(0, count, k))

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
        return len(self.windows[-1]) < self.accumulation_steps

    def replace(self, **changes: Any) -> Plan:
        """Return the plan with some fields changed."""
        return replace(self, **changes)

    def select(self, kept: Iterable[int]) -> Plan:
        """Return the plan of some of its micro-batches, given by their indices in the order wanted."""
        kept = tuple(kept)
        return self.replace(
            micro_batches=tuple(self.micro_batches[j] for j in kept),
            masked=tuple(i for i, j in enumerate(kept) if j in self.masked),
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
