"""How the audit decides: rows of one form, each with the question that it asks of the evidence, and
one loop over them.

To add a diagnosis, a finding or a reason: its row in `core/faults.py` or `core/findings.py`, and a
`Rule` with one predicate in the table of what it is read from (`RULES` of `sums.py`, `READINGS` of
`scales.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, TypeVar

from gradcheck_suite.auditing.places import Place
from gradcheck_suite.core.faults import FAULTS
from gradcheck_suite.core.findings import FINDINGS, Occurrence, finding

E = TypeVar("E")
"""The evidence that the rules of a table read."""


@dataclass(frozen=True)
class Change:
    """What changed `.grad` or parameters, and where.

    Attributes:
        what: a `reset`, an `edit` or a `division` of `.grad`, a `write` to parameters or a state, or
            a `checkpoint`.
        lines: that may have done it, a few at most; the one of a single line is known.
    """

    what: Literal["reset", "edit", "division", "write", "checkpoint"]
    lines: Sequence[str]

    @property
    def line(self) -> str | None:
        """The line, where it is known; it may begin with a library's for one of the user's."""
        return self.lines[0] if len(self.lines) == 1 else None

    def __str__(self) -> str:
        is_reset = self.what == "reset"
        done = "`.grad` was reset" if is_reset else "`.grad` was changed"
        if self.what == "write":
            done = "parameters may have been written"
        lines = " or ".join(line.partition(" < ")[0] for line in self.lines)
        return f" ({done} at {lines})"


@dataclass(frozen=True)
class StepFault:
    """What is wrong with a window.

    Attributes:
        name: the diagnosis.
        sentence: what is wrong.
        key: of a parameter that shows it, or None.
        keys: of the parameters that are hit, where others are not.
        kind: the part of the promise.
        causes: of the fault, for which the table of faults has remedies of their own.
        change: what is to be changed, and where.
    """

    name: str
    sentence: str
    key: int | None = None
    keys: Sequence[int] = ()
    kind: str = "gradient"
    causes: tuple[str, ...] = ()
    change: Change | None = None


@dataclass(frozen=True)
class Sighting:
    """What a predicate found.

    Attributes:
        numbers: for the braces in the sentence of the rule.
        more: what follows that sentence.
        key: of a parameter that shows it, or None.
        keys: of the parameters that are hit, where others are not.
        change: what is to be changed, and where.
        where: the place, where it is not that of the backward pass.
        remedy: what to do, in place of that of the row; None for that.
        weights: the passes and coefficients that are judged beside those of the step.
    """

    numbers: Mapping[str, object] = field(default_factory=dict)
    more: str = ""
    key: int | None = None
    keys: Sequence[int] = ()
    change: Change | None = None
    where: Place | str | None = None
    remedy: str | None = None
    weights: Mapping[tuple[int, int], float] = field(default_factory=dict)


SEEN = Sighting()
"""That a rule holds, with nothing to add."""


@dataclass(frozen=True)
class Need(Generic[E]):
    """A piece of evidence that rules may ask for.

    Attributes:
        reason: that is given where it is missing, a row of `core/findings.py`.
        says: the sentence.
        lacks: whether it is missing.
        remedy: what to do, in place of that of the row; None for that.
    """

    reason: str
    says: str
    lacks: Callable[[E], bool]
    remedy: str | None = None

    @property
    def found(self) -> Occurrence:
        """The reason."""
        return finding(self.reason, self.says, remedy=self.remedy)


@dataclass(frozen=True)
class Rule(Generic[E]):
    """One thing that evidence may show.

    Attributes:
        name: of the rule.
        called: the diagnosis of `core/faults.py`, or the finding of `core/findings.py`.
        holds: returns what it found, or whether it holds where there is nothing to add.
        says: the sentence; braces take the numbers of the sighting.
        needs: the evidence without which it cannot be told.
        before: the rules that it outranks: where it holds, they are not asked.
        causes: of the fault, for which its row has remedies of their own.
        kind: the part of the promise that the fault breaks.
        is_silent: whether the program may do it, and nothing is to be said of this window.
    """

    name: str
    called: str
    holds: Callable[[E], Sighting | bool | None]
    says: str = ""
    needs: Sequence[Need[E]] = ()
    before: Sequence[str] = ()
    causes: tuple[str, ...] = ()
    kind: str = "gradient"
    is_silent: bool = False

    def __post_init__(self) -> None:
        """Expect a name of the tables."""
        assert self.called in FAULTS or self.called in FINDINGS, (
            f"{self.name}: no row {self.called}"
        )

    @property
    def is_fault(self) -> bool:
        """Whether it is a fault, and no finding."""
        return self.called in FAULTS

    def fault(self, seen: Sighting = SEEN) -> StepFault:
        """Return the fault as it was seen."""
        said = f"{self.says.format(**seen.numbers)}{seen.more}{seen.change or ''}"
        return StepFault(
            self.called,
            said,
            key=seen.key,
            keys=seen.keys,
            kind=self.kind,
            causes=self.causes,
            change=seen.change,
        )

    def finding(self, seen: Sighting = SEEN) -> Occurrence:
        """Return the finding as it was seen."""
        said = f"{self.says.format(**seen.numbers)}{seen.more}"
        return finding(self.called, said, seen.where, seen.remedy)


@dataclass(frozen=True)
class Held(Generic[E]):
    """A rule that holds, and what it found."""

    rule: Rule[E]
    seen: Sighting


@dataclass(frozen=True)
class Decided(Generic[E]):
    """What a table says of some evidence.

    Attributes:
        held: the rules that hold and that no other one outranks, in the order of the table.
        missing: the evidence that was asked for and is missing, where nothing holds that takes the
            place of what needs it.
    """

    held: Sequence[Held[E]] = ()
    missing: Need[E] | None = None

    @property
    def fault(self) -> Held[E] | None:
        """The fault that stands: the first one of the table."""
        return next((one for one in self.held if one.rule.is_fault), None)

    @property
    def findings(self) -> Sequence[Held[E]]:
        """What else holds, in the order of the table."""
        return [one for one in self.held if not one.rule.is_fault]

    def get(self, name: str) -> Held[E] | None:
        """Return the rule of a name, where it holds."""
        return next((one for one in self.held if one.rule.name == name), None)


def decide(rules: Sequence[Rule[E]], evidence: E) -> Decided[E]:
    """Ask each rule of a table whether it holds.

    A rule that holds takes those that it outranks out of the question. What a rule needs and the
    evidence lacks is a reason for `unjudged`, unless a fault or what outranks others holds.
    """
    outranked = set[str]()
    held = list[Held[E]]()
    missing: Need[E] | None = None
    for rule in rules:
        if rule.name in outranked:
            continue
        lacking = next((need for need in rule.needs if need.lacks(evidence)), None)
        if lacking is not None:
            missing = missing or lacking
        elif seen := rule.holds(evidence):
            outranked.update(rule.before)
            held.append(Held(rule, seen if isinstance(seen, Sighting) else SEEN))
    is_settled = any(one.rule.is_fault or one.rule.before for one in held)
    return Decided(held, None if is_settled else missing)


def names(rules: Sequence[Rule[E]]) -> tuple[str, ...]:
    """Return the names of rules."""
    return tuple(rule.name for rule in rules)


def in_order(
    *rules: Rule[E], below: Sequence[str] = (), of_faults: Sequence[str] = ()
) -> tuple[Rule[E], ...]:
    """Return rules of which the first one that holds stands.

    Args:
        rules: the surest first.
        below: rules that each of them outranks, too.
        of_faults: rules that only the faults of them outrank.
    """
    found = list[Rule[E]]()
    for at, rule in enumerate(rules):
        before = (*names(rules[at + 1 :]), *below)
        found.append(replace(rule, before=(*before, *of_faults) if rule.is_fault else before))
    return tuple(found)
