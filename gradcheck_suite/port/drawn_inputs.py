"""The search for inputs on which two sides differ that agree at the given ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
from hypothesis import Phase, errors, find, settings
from hypothesis import strategies as st

from gradcheck_suite.core.options import PortOptions
from gradcheck_suite.core.text import counted
from gradcheck_suite.errors import UsageError
from gradcheck_suite.port.budget import Budget
from gradcheck_suite.port.changes import is_refusal, of_ours
from gradcheck_suite.port.drawing import (
    KINDS,
    author_strategy,
    described,
    drawn_point,
    spans_of,
)
from gradcheck_suite.port.matching import array, outputs_error
from gradcheck_suite.port.rare_inputs import other_orders, rare_points
from gradcheck_suite.port.rounding import rounding_bounds
from gradcheck_suite.port.search import Repairs
from gradcheck_suite.port.sides import Point, Sides
from gradcheck_suite.port.sizes import (
    Axis,
    Resize,
    groups,
    is_made_for,
    is_sized,
    numbers_in,
    resizes,
)
from gradcheck_suite.port.sizes import varied as in_words
from gradcheck_suite.port.torch_program import TorchRun

SHRINKS = 60
"""Inputs that are asked about to make one smaller."""
REFUSALS = 3
"""Sizes of some axes that torch refuses in a row before no further ones are drawn."""
SHAPES = ((120, 18), (300, 10), (1000, 6))
"""Operations of the larger program, and shapes that are drawn of one of so many: each is compiled."""
FEWEST = 4
"""Shapes that are drawn of a larger program."""


@dataclass
class DifferingInput:
    """A drawn input on which the two sides differ.

    Attributes:
        point: the input.
        words: what the port does there, where it returns nothing that can be compared.
        cause: of that; empty where values are compared.
    """

    point: Point
    words: str = ""
    cause: str = ""


@dataclass
class DrawnInputs:
    """Draws inputs and asks both sides.

    Attributes:
        sides: of the pair.
        repairs: of torch: the differences that are accepted.
        options: number of inputs, and seed.
        budget: of the judgement.
        asked: inputs that both sides took.
        refused: number of inputs that torch refused.
        notes: what else was seen.
    """

    sides: Sides
    repairs: Repairs
    options: PortOptions
    budget: Budget
    asked: list[Point] = field(default_factory=list)
    refused: int = 0
    notes: list[str] = field(default_factory=list)
    _found: DifferingInput | None = None
    _is_taken: bool = False

    def search(self) -> DifferingInput | None:
        """Return the smallest drawn input on which the two sides differ, or None."""
        pair = self.sides.pair
        base = self.sides.given
        budget = self.budget.of(10 * (self.options.examples + SHRINKS))
        strategy = (
            self._own_strategy(base, budget)
            if pair.draw is None
            else author_strategy(base, pair.draw)
        )
        if self._found is not None or strategy is None:
            return self._described()
        budget = self.budget.of(self.options.examples + SHRINKS)

        def differs(point: Point) -> bool:
            found = self._difference(point) if budget.spend() else None
            if found is None:
                return False
            self._found = found
            return True

        phases = (Phase.generate, Phase.shrink)
        count = self.options.examples
        how = settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=phases,
        )
        # flaky where the budget was spent while Hypothesis shrank
        with suppress(errors.NoSuchExample, errors.Flaky):
            find(
                strategy,
                differs,
                settings=how,
                random=Random(self.options.seed),
            )
        return self._described()

    @property
    def words(self) -> str:
        """What was drawn, and what of it varied."""
        shapes = {p.shapes for p in self.asked}
        words = f"{counted(len(self.asked), 'drawn input')} of {counted(len(shapes), 'shape')}"
        spans = in_words([self.sides.given, *self.asked])
        refused = f"{self.refused} refused by torch" if self.refused else ""
        more = "; ".join(part for part in (spans, refused) if part)
        return f"{words} ({more})" if more else words

    def _described(self) -> DifferingInput | None:
        found = self._found
        if found is not None:
            point = found.point
            found.point = Point(point.inputs, point.targets, described(point))
        return found

    def _own_strategy(self, base: Point, budget: Budget) -> Any:
        """Ask about every size by itself; return a strategy of those that torch takes, with other
        numbers.
        """
        program = self.sides.torch_program(base)
        spans = spans_of(program, base)
        for kind in KINDS[1:]:
            self._found = self._difference(drawn_point(base, (), kind, 1, spans))
            if self._found is not None:
                return None
        # last of the given sizes: where something rare happens, gradients are not compared
        for point in rare_points(program, base, [*self.sides.points[1:], *self.asked]):
            self._found = self._difference(point)
            if self._found is not None:
                return None
        taken: list[tuple[Resize, ...]] = [()]
        for resized in self._sizes(base):
            if not budget.spend() or len({p.shapes for p in self.asked}) >= self._most_shapes:
                break
            before = len(self.asked)
            self._found = self._difference(drawn_point(base, resized, "other", 1, spans))
            if self._found is not None:
                return None
            self._is_taken = len(self.asked) > before
            if self._is_taken and resized[0].size:
                taken.append(resized)
        return st.builds(
            drawn_point,
            st.just(base),
            resizes=st.sampled_from(taken),
            kind=st.sampled_from(KINDS),
            number=st.integers(0, 999),
            spans=st.just(spans),
        )

    @property
    def _most_shapes(self) -> int:
        given = self.sides.given
        calls = len(self.sides.torch_program(given).calls)
        size = max(calls, len(self.sides.jax_program(given).all_equations))
        return next((shapes for most, shapes in SHAPES if size <= most), FEWEST)

    def _sizes(self, base: Point) -> Iterator[tuple[Resize, ...]]:
        """Yield other sizes, each by itself, and last those that were taken together."""
        numbers = numbers_in(self.sides.torch_program(base), self.sides.jax_program(base))
        turns = [resizes(base, axes, numbers) for axes in groups(base)]
        refused = [0] * len(turns)
        first: dict[int, Resize] = {}
        while min(refused, default=REFUSALS) < REFUSALS:
            # every group in turn: the shapes that are drawn are limited
            for number, turn in enumerate(turns):
                resize = next(turn, None) if refused[number] < REFUSALS else None
                if resize is None:
                    refused[number] = REFUSALS
                elif resize.size > 1 or number in first:
                    # an axis of one element may be broadcast, which says nothing
                    self._is_taken = False
                    yield (resize,)
                    refused[number] = 0 if self._is_taken else refused[number] + 1
                    if self._is_taken and resize.size:
                        first.setdefault(number, resize)
        together = _disjoint(first.values())
        if len(together) > 1:
            yield tuple(together)

    def _difference(self, point: Point) -> DifferingInput | None:
        """Return how the sides differ at an input, None where they agree or torch refuses it."""
        sides = self.sides
        base = self.sides.given
        if not is_made_for(sides.pair.sizes, base, point):
            return None
        run = self._torch_run(point)
        if run is None:
            self.refused += 1
            return None
        try:
            program = sides.jax_program(point)
        except UsageError as error:
            return self._raised(point, str(error))
        outs, loss = program.ends(*sides.arguments(point))
        mine = [tuple(o.shape) for o in run.outs]
        theirs = [tuple(o.shape) for o in outs]
        if [int(np.prod(s)) for s in mine] != [int(np.prod(s)) for s in theirs]:
            words = f"outputs of shapes {_shown(theirs)} where torch returns {_shown(mine)}"
            return DifferingInput(point, words, "shape")
        self.asked.append(point)
        off = outputs_error(run.outs, outs)
        # a loss may have the number of rows written in
        if point.shapes == base.shapes and sides.pair.torch_loss is not None:
            off = max(off, loss_error(run, loss))
        if (
            off <= rounding_bounds(sides, base).outputs
            or off <= rounding_bounds(sides, point).outputs
        ):
            return None
        return None if self._is_other_order(point, run, outs) else DifferingInput(point)

    def _is_other_order(self, point: Point, run: TorchRun, outs: Sequence[Any]) -> bool:
        """Return whether the port has equal elements in another order, of which torch promises
        none.
        """
        program = self.sides.torch_program(point)
        allowed = rounding_bounds(self.sides, point).outputs
        others = (self.repairs.with_change(one).run(program) for one in other_orders(program, run))
        return any(outputs_error(other.outs, outs) <= allowed for other in others)

    def _torch_run(self, point: Point) -> TorchRun | None:
        """Return torch's run, None where torch refuses an input or it is out of its domain."""
        try:
            run = run_with(self.repairs, self.sides, point)
        except Exception as error:
            if not is_refusal(error):
                self._note(f"a drawn input could not be tried: {of_ours(error)}")
            return None
        if self.sides.pair.draw is not None:  # what the author draws is in the domain
            return run
        floats = [o for o in run.outs if o.is_floating_point()]
        return run if all(bool(torch.isfinite(o).all()) for o in floats) else None

    def _raised(self, point: Point, error: str) -> DifferingInput | None:
        shapes = _shown([np.shape(x) for x in point.inputs if is_sized(x)])
        words = f"{error}, at inputs of shapes {shapes}, which torch takes"
        if any(not np.size(x) for x in point.inputs if is_sized(x)):
            self._note(words)  # nobody trains on nothing
            return None
        return DifferingInput(point, words, "raises")

    def _note(self, words: str) -> None:
        if words not in self.notes:
            self.notes.append(words)


def _disjoint(taken: Iterable[Resize]) -> list[Resize]:
    """Return those of some resizes that are of other axes than those before them."""
    found = list[Resize]()
    used = set[Axis]()
    for resize in taken:
        if used.isdisjoint(resize.axes):
            found.append(resize)
            used.update(resize.axes)
    return found


def run_with(repairs: Repairs, sides: Sides, point: Point) -> TorchRun:
    """Return torch's run at a point, repaired.

    Repairs are by index of a call: the calls must be those at the given inputs.

    Raises:
        ValueError: they are not.
    """
    first = sides.torch_program(sides.given).calls
    program = sides.torch_program(point)
    if repairs.changes and [c.name for c in first] != [c.name for c in program.calls]:
        raise ValueError("another program at these inputs")
    return repairs.run(program)


def loss_error(run: TorchRun, observed: float) -> float:
    """Return the relative error of the port's loss.

    Where torch's is no number, nothing is expected.
    """
    return outputs_error([run.loss], [observed]) if torch.isfinite(run.loss) else 0.0


def _shown(shapes: Sequence[tuple[int, ...]]) -> str:
    return " and ".join(str(tuple(int(n) for n in s)) for s in shapes) or "()"


def special(point: Point, base: Point) -> str:
    """Return what a drawn input has that the given one has not, in words."""
    found = []
    for place, (new, old) in enumerate(zip(point.inputs, base.inputs, strict=True)):
        if not is_sized(new):
            continue
        fresh = np.asarray(new)
        given = np.asarray(old)
        if fresh.shape != given.shape:
            found.append(f"input {place} is of shape {fresh.shape} for {given.shape}")
        elif fresh.dtype.kind in "iu" and fresh.size:
            found += _special_ids(fresh, given, place)
        elif fresh.dtype.kind == "f" and fresh.size and np.isfinite(given).all():
            most = float(np.abs(fresh).max())
            before = float(np.abs(given).max())
            if _has_equal(fresh) and not _has_equal(given):
                found.append(f"input {place} has equal elements")
            elif most > 1.2 * before:
                found.append(
                    f"input {place} reaches {most:.3g} where the given one has {before:.3g}"
                )
    return ", ".join(found)


def _has_equal(value: np.ndarray[Any, Any]) -> bool:
    return len(np.unique(value)) < value.size


def _special_ids(fresh: np.ndarray[Any, Any], given: np.ndarray[Any, Any], place: int) -> list[str]:
    own = set(fresh.reshape(-1).tolist())
    before = set(given.reshape(-1).tolist())
    found = []
    if more := sorted(own - before):
        shown = ", ".join(map(str, more[:4]))
        found.append(f"input {place} has {shown}, which the given one has not")
    whole = before == set(range(min(before), max(before) + 1)) and len(before) > 1
    if whole and (gone := sorted(before - own)):
        shown = ", ".join(map(str, gone[:4]))
        found.append(f"input {place} has no {shown} (such as a node without an incoming edge)")
    return found


def nonfinite(expected: Sequence[Any], observed: Sequence[Any]) -> str:
    """Return in words where one side's outputs are no numbers and the other's are."""
    for mine, other in zip(expected, observed, strict=False):
        wanted = array(mine)
        found = array(other)
        if found.shape != wanted.shape or wanted.dtype.kind != "f":
            continue
        same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
        odd = ~same & ~(np.isfinite(wanted) & np.isfinite(found))
        if odd.any():
            at = tuple(np.argwhere(odd)[0])
            where = counted(int(odd.sum()), "element")
            return f"the port gives {found[at]:g} at {where}, torch {wanted[at]:.6g}"
    return ""
