"""The options of an audit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypedDict

from gradcheck_suite.errors import UsageError

INSTRUMENTS = ("weights", "sums", "batch")
"""What can be switched off by `without`: the weights of items, the sums of arrivals, the window again in one batch."""


class AuditFields(TypedDict, total=False):
    """The fields of `AuditOptions`, by name."""

    steps: int | None
    every: int
    accept: tuple[str, ...]
    accumulation_steps: int | None
    without: tuple[str, ...]
    stop_on_violation: bool
    jax: bool


@dataclass(frozen=True)
class AuditOptions:
    """How a run is audited.

    Attributes:
        steps: number of optimizer steps to judge; None for all.
        every: the first window and every `every`-th after it are computed again.
        accept: diagnoses that are reported as accepted and not as violations.
        accumulation_steps: K, where the user states it.
        without: instruments that are switched off.
        stop_on_violation: whether the first violation ends the run.
        jax: whether JAX is asked about the first window that is computed again.
    """

    steps: int | None = None
    every: int = 10
    accept: tuple[str, ...] = ()
    accumulation_steps: int | None = None
    without: tuple[str, ...] = ()
    stop_on_violation: bool = False
    jax: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "every", "accumulation_steps"):
            value = getattr(self, name)
            if value is None and name != "every":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"audit: {name} must be a positive integer, got {value!r}")
        for name in ("accept", "without"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        if wrong := sorted(set(self.without) - set(INSTRUMENTS)):
            raise UsageError(f"audit: without takes {', '.join(INSTRUMENTS)}; got {wrong[0]!r}")
        if self.jax and "batch" in self.without:
            raise UsageError("audit: JAX is asked about a window that is computed again, so leave `batch` switched on")


def _names(option: str, given: Any) -> tuple[str, ...]:
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Iterable):
        raise UsageError(f"audit: {option} takes names, got {given!r}")
    return tuple(str(name) for name in given)
