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
    eager: bool
    objectives: tuple[str, ...]


@dataclass(frozen=True)
class AuditOptions:
    """How a run is audited.

    Attributes:
        steps: number of optimizer steps to judge; None for all.
        every: the first window and every `every`-th after it are computed again.
        accept: diagnoses that are reported as accepted and not as violations: `NAME`, or `NAME@FILE:LINE` for one
            place.
        accumulation_steps: K, where the user states it.
        without: instruments that are switched off.
        stop_on_violation: whether the first violation ends the run.
        jax: whether JAX is asked about the first window that is computed again.
        eager: whether what `torch.compile` compiles runs eagerly, so that its losses can be read.
        objectives: `FILE:LINE=COUNT`: what the mean divides by of the loss that goes backward at a line, an expression
            of the names there.
    """

    steps: int | None = None
    every: int = 10
    accept: tuple[str, ...] = ()
    accumulation_steps: int | None = None
    without: tuple[str, ...] = ()
    stop_on_violation: bool = False
    jax: bool = False
    eager: bool = False
    objectives: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("steps", "every", "accumulation_steps"):
            value = getattr(self, name)
            if value is None and name != "every":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"audit: {name} must be a positive integer, got {value!r}")
        for name in ("accept", "without", "objectives"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        if wrong := sorted(set(self.without) - set(INSTRUMENTS)):
            raise UsageError(f"audit: without takes {', '.join(INSTRUMENTS)}; got {wrong[0]!r}")
        for given in self.objectives:
            place, _, count = given.partition("=")
            if not count or not place.rpartition(":")[2].isdigit():
                raise UsageError(
                    f"audit: objectives takes FILE:LINE=COUNT, such as 'train.py:40=mask.sum()'; got {given!r}"
                )
        if self.jax and "batch" in self.without:
            raise UsageError("audit: JAX is asked about a window that is computed again, so leave `batch` switched on")

    def accepts(self, diagnosis: str, where: str | None) -> bool:
        """Return whether a violation is accepted."""
        for accepted in self.accept:
            name, _, place = accepted.partition("@")
            if name == diagnosis and (not place or (where is not None and place in where)):
                return True
        return False


def _names(option: str, given: Any) -> tuple[str, ...]:
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Iterable):
        raise UsageError(f"audit: {option} takes names, got {given!r}")
    return tuple(str(name) for name in given)
