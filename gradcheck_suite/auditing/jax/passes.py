"""The gradients of a run of JAX that may still be part of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gradcheck_suite.auditing.jax.replay import MarkEvent
from gradcheck_suite.auditing.jax.windows import (
    MOST_AGE,
    MOST_OPEN,
    Column,
    StepGradients,
    gradient_columns,
    is_same_point,
    mixes,
    select,
)
from gradcheck_suite.auditing.places import Place

Shapes = tuple[tuple[int, ...], ...]
MIXED = 1e-3
"""By how much an item may change with another row of its batch, relative to the largest one."""


@dataclass(eq=False)
class Points:
    """The parameters that gradients of one place were taken by.

    Attributes:
        first: the first gradient.
        last: the last one.
        is_moving: whether some parameters were others than the first.
    """

    first: Column
    is_moving: bool = False

    def __post_init__(self) -> None:
        self.last = self.first


@dataclass(eq=False)
class OpenPasses:
    """Gradients that were computed, the latest last, and what is known of their places.

    Attributes:
        number: of gradients so far.
        columns: those that may still be part of a step.
        mixed: the numbers of those whose items depend on other rows.
        points: place and shapes -> the parameters that gradients were taken by.
    """

    number: int = 0
    columns: list[Column] = field(default_factory=list)
    mixed: set[int] = field(default_factory=set)
    points: dict[tuple[Place, Shapes], Points] = field(default_factory=dict)

    def read(self, event: MarkEvent) -> list[Column]:
        """Return the columns of a gradient that has just been computed."""
        self.number += 1
        return gradient_columns(event, self.number)

    def add(self, found: Sequence[Column]) -> None:
        """Keep the columns of a gradient."""
        # a script that evaluates gradients and never steps must not fill the memory
        self.columns = [*self.columns, *found][-MOST_OPEN:]
        first = found[0]
        points = self.points.setdefault((first.mark.place, first.mark.shapes), Points(first))
        if mixes(first, points.last) > MIXED:
            self.mixed.add(self.number)
        points.last = first
        points.is_moving = points.is_moving or not is_same_point(points.first, first)

    def own(self, shapes: Sequence[tuple[int, ...]]) -> list[Column]:
        """Return the gradients, or parts of them, that have some shapes."""
        parts = (select(one, shapes) for one in self.columns)
        return [one for one in parts if one is not None]

    def drop(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Forget the gradients of some shapes."""
        self.columns = [one for one in self.columns if select(one, shapes) is None]

    def remove(self, columns: Sequence[Column]) -> None:
        """Forget some gradients."""
        self.columns = [one for one in self.columns if one not in columns]

    def consume(self, optimizer: int, columns: Iterable[Column]) -> None:
        """Note that an optimizer has stepped on some gradients."""
        numbers = {column.number for column in columns}
        for column in self.columns:
            if column.number in numbers:
                column.consumers.add(optimizer)

    def settle(self, optimizer: int, window: StepGradients, used: Iterable[Column]) -> None:
        """Note which gradients a step has used, and keep those that may be of another one."""
        numbers = {column.number for column in (*used, *window.lost)}
        kept = []
        for column in self.columns:
            if select(column, window.step.shapes) is None:
                kept.append(column)
                continue
            if column.number in numbers:
                column.consumers.add(optimizer)
            column.age += 1
            # a gradient whose every leaf this optimizer was given has no part left for another one
            whole = column.mark.shapes == tuple(window.step.shapes)
            if column.age < MOST_AGE and not (whole and column.consumers):
                kept.append(column)
        self.columns = kept
