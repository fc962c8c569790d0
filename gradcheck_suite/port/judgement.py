"""How far the judgement of a pair has come: what each stage leaves for those behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gradcheck_suite.core.options import PortOptions
from gradcheck_suite.port.budget import Budget
from gradcheck_suite.port.changes import Hypothesis
from gradcheck_suite.port.drawn_inputs import run_with, special
from gradcheck_suite.port.mapping import StateMap
from gradcheck_suite.port.pair import Port
from gradcheck_suite.port.report import PortReport
from gradcheck_suite.port.result import PortFinding
from gradcheck_suite.port.rounding import rounding_bounds
from gradcheck_suite.port.search import Repairs
from gradcheck_suite.port.sides import Point, Sides
from gradcheck_suite.port.torch_program import OperationCall, TorchProgram, TorchRun


@dataclass(frozen=True)
class Repair:
    """A change of torch, and the finding that it explains."""

    hypothesis: Hypothesis
    finding: PortFinding


@dataclass(frozen=True)
class Opaque:
    """An input at which the port's values were put in place of torch's, and the calls where."""

    point: Point
    calls: tuple[int, ...]


@dataclass
class Judgement:
    """A pair, and what was found of it so far.

    Attributes:
        pair: in float64.
        sides: of the pair.
        options: of the comparison.
        report: what is said.
        budget: of the whole judgement.
        repairs: of torch, by what was found: the judgement goes on behind it.
        repaired: each of them with its finding, in their order.
        unloaded: tensors of torch that reach no leaf.
        opaque: where the port's values stand for torch's, None where every difference is explained.
        is_explained: whether the outputs, and the loss, are those of the port by now.
    """

    pair: Port
    sides: Sides
    options: PortOptions
    report: PortReport
    budget: Budget
    repairs: Repairs = field(default_factory=Repairs)
    repaired: list[Repair] = field(default_factory=list)
    unloaded: set[str] = field(default_factory=set)
    opaque: Opaque | None = None
    is_explained: bool = False

    @property
    def map(self) -> StateMap:
        """Which tensor of torch each leaf comes from."""
        return self.sides.map

    @property
    def program(self) -> TorchProgram:
        """The torch program at the given inputs."""
        return self.sides.torch_program(self.sides.given)

    def allowed(self, point: Point) -> float:
        """Return the relative difference of outputs that rounding explains."""
        return rounding_bounds(self.sides, point).outputs

    def run(self, point: Point) -> TorchRun:
        """Return torch's run at a point, repaired."""
        return run_with(self.repairs, self.sides, point)

    def repair(self, hypothesis: Hypothesis, finding: PortFinding) -> None:
        """Repair torch by what explains a finding."""
        self.repaired.append(Repair(hypothesis, finding))
        self.repairs = self.repairs.with_change(hypothesis)

    def keep_repairs(self, number: int) -> None:
        """Take back all but the first of the repairs."""
        self.repaired = self.repaired[:number]
        self.repairs = repairs_of(self.repaired)

    def if_no_input(self, point: Point) -> str:
        """Return what is special in a drawn input, and how to exclude it."""
        own = special(point, self.sides.given)
        key = "draw" if point.shapes == self.sides.given.shapes else "sizes"
        words = "; both sides agree at the given inputs, and differ at drawn ones"
        words += f": {own}" if own else ""
        if self.pair.draw is not None:
            return words
        return f"{words}. If these are no inputs of the model, exclude them by `{key}`"


def repairs_of(repaired: Sequence[Repair]) -> Repairs:
    """Return the changes of some repairs, one after the other."""
    found = Repairs()
    for repair in repaired:
        found = found.with_change(repair.hypothesis)
    return found


def named(call: OperationCall) -> str:
    """Return a call of torch in words, with its line where it is known."""
    return f"{call.label} as at {call.where}" if call.where else call.label


def lines(torch: str | None, jax: str | None = None) -> dict[str, Any]:
    """Return the lines of a finding by side, None where one is not known."""
    return {"torch": torch or None, "jax": jax or None}
