"""The verdict on a port: a result whose violations are differences. Imports neither framework."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from gradcheck_suite.core.causes import causes_of, remedy
from gradcheck_suite.core.faults import FIX
from gradcheck_suite.core.formats import Accepted, Notice
from gradcheck_suite.core.results import (
    Command,
    DifferenceKind,
    Result,
    Violation,
    json_number,
    result_html,
)
from gradcheck_suite.core.text import counted

_VALUE = re.compile(r", observed [^,]* instead of ([\w.+-]+)(?= \(|$)")
"""The value that torch has, in the sentence of a finding."""
_OF_TORCH = ("pass torch's ", "use torch's ")
_BY_VALUE = {
    ("gelu-approximation", "none"): "pass approximate=False",
    ("gelu-approximation", "tanh"): "pass approximate=True",
}
Kind = DifferenceKind
MODEL = "the model"
"""The place of a difference that is in no single module."""


@dataclass(frozen=True)
class PortFinding(Violation):
    """One difference between the torch model and its port.

    Of a violation's attributes it has `kind`, `diagnosis` (the cause), `explanation`, `where` (the
    port's line, which is to be changed), `error` and `allowed`. `error` is the largest difference
    relative to the largest number of the same array, and `allowed` what rounding explains of it.

    Attributes:
        module: path of the torch module, `loss` or `optimizer`; empty for the whole model.
        torch: `file:line` of the torch operation, or None.
    """

    kind: Kind
    module: str = ""
    torch: str | None = None
    command: Command = field(default="port", repr=False)

    @classmethod
    def of(
        cls,
        kind: Kind,
        place: str,
        cause: str,
        words: str,
        *,
        torch: str | None = None,
        jax: str | None = None,
        error: float | None = None,
        allowed: float | None = None,
    ) -> PortFinding:
        """Return a difference, with what to do about it where the cause is known.

        Args:
            kind: what differs.
            place: path of the torch module, `loss` or `optimizer`; empty for the whole model.
            cause: a name of `core.causes.CAUSES`, several joined by ` and `, or `unknown`.
            words: one sentence with the numbers.
            torch: `file:line` of the torch operation, or None.
            jax: `file:line` of the port's operation, or None.
            error: the relative difference, or None.
            allowed: what rounding explains of it, or None.
        """
        return cls(
            kind,
            cause,
            _explanation(cause, words),
            where=jax,
            error=error,
            allowed=allowed,
            module=place,
            torch=torch,
        )

    def renamed(self, cause: str, words: str) -> PortFinding:
        """Return the difference with another cause."""
        return replace(self, diagnosis=cause, explanation=_explanation(cause, words))

    # The names that the JSON has, which is fixed.

    @property
    def place(self) -> str:
        """Path of the torch module, `loss` or `optimizer`; empty for the whole model."""
        return self.module

    @property
    def cause(self) -> str:
        """The name of the cause, or `unknown`."""
        return self.diagnosis

    @property
    def words(self) -> str:  # type: ignore[override] # one sentence, as the JSON has it
        """One sentence with the numbers."""
        return self.sentence

    @property
    def jax(self) -> str | None:
        """`file:line` of the port's operation, or None."""
        return self.where

    @property
    def remedy(self) -> str:
        """What to do, with torch's value where it is known; nothing where the cause is unknown."""
        return self.fix

    # What a violation is asked for.

    @property
    def title(self) -> str:
        """Place, cause and kind."""
        return f"{self.module or MODEL}: {self.diagnosis} ({self.kind})"

    @property
    def places(self) -> dict[str, str | None]:
        """The two lines, that of the port first: it is to be changed."""
        return {"JAX": self.where, "torch": self.torch}

    @property
    def line(self) -> str | None:
        """The port's line: that of torch is right."""
        return self.where

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Where it is and how large, as pairs of a name and a text."""
        pairs = [*self.places.items(), ("off by", self.size)]
        return [(name, text) for name, text in pairs if text]

    @property
    def size(self) -> str:
        """How large the difference is; empty where there is no number."""
        if self.error is None or self.allowed is None or not math.isfinite(self.error):
            return ""
        return f"{self.error:.2g} of the largest number, {self.allowed:.1g} allowed"

    @property
    def shown(self) -> list[str]:
        """The difference in words, one line each."""
        where = " <-> ".join(part for part in (self.torch, self.where) if part)
        below = [self.sentence]
        if where:
            below.append(where)
        if self.size:
            below.append(f"off by {self.size}")
        if self.fix:
            below.append(f"fix: {self.fix}")
        return [self.title, *(f"  {line}" for line in below)]

    @property
    def notice(self) -> Notice:
        """The difference as CI systems show it."""
        level: Literal["warning", "error"] = "warning" if self.kind == "precision" else "error"
        text = f"{self.module or MODEL}: {self.sentence}"
        return Notice(
            level,
            self.diagnosis,
            text,
            self.fix,
            self.line,
            self.reason,
        )

    def accepted_by(self, entries: Iterable[Accepted]) -> list[Accepted]:
        """Return the entries that accept the difference: of several causes, each of them."""
        known = list(entries)
        found = list[Accepted]()
        for name in causes_of(self.diagnosis):
            part = replace(self, diagnosis=name)
            fits = [one for one in known if part.is_accepted_by(str(one))]
            # an accepted cause must not hide another one of the same place
            if not fits:
                return []
            found += fits
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the difference as JSON-ready data."""
        return {
            "kind": self.kind,
            "place": self.module,
            "cause": self.diagnosis,
            "words": self.sentence,
            "torch": self.torch,
            "jax": self.where,
            "error": json_number(self.error),
            "allowed": json_number(self.allowed),
        }


def _explanation(cause: str, words: str) -> str:
    """Return the sentence, and what to do where that is known."""
    fix = _fix(cause, words)
    return f"{words}{FIX}{fix}" if fix else words


def _fix(cause: str, words: str) -> str:
    """Return what to do about a cause, with torch's value where the sentence has it."""
    general = remedy(cause)
    value = _VALUE.search(words)
    if value is None:
        return general
    if (named := _BY_VALUE.get((cause, value[1]))) is not None:
        return named
    return f"{general}, {value[1]}" if general.startswith(_OF_TORCH) else general


@dataclass(frozen=True)
class MapRow:
    """Where one leaf of the JAX parameters comes from.

    Attributes:
        leaf: path of the leaf.
        torch: names of the torch tensors that it has elements of.
        how: `same`, `transposed`, `reshaped`, `stacked`, `sliced`, `permuted`, `linear`, `constant`
            or `unknown`.
    """

    leaf: str
    torch: tuple[str, ...]
    how: str

    @property
    def sources(self) -> str:
        """The first torch tensors, and how many more there are."""
        more = len(self.torch) - 4
        return ", ".join(self.torch[:4]) + (
            f" and {counted(more, 'tensor')} more" if more > 0 else ""
        )


@dataclass(frozen=True)
class PortResult(Result):
    """The verdict on a port: a `Result` whose violations are differences.

    Attributes:
        loop: the pair's name as the user gave it.
        violations: the differences that are not accepted, in the order in which data flows.
        accepted: those that the author or the project accepts.
        precision: what the port computes in a lower precision, which is no fault.
        findings: the violations and `precision`, as the JSON has them.
        map: where each leaf of the JAX parameters comes from.
        seconds: wall-clock seconds.
        judged: what was compared, such as `outputs` and `updates`.
        notes: what else is worth knowing, one sentence each.
        planted: a fault that was planted in this pair and found: the verdict is not blind.
        unjudged: why there is no verdict, or None.
        smallest: the smallest inputs on which the two differ, one line each; empty where they are
            the given ones.
        files: the pair's file, and those of the port's lines.
    """

    violations: tuple[PortFinding, ...] = ()
    accepted: tuple[PortFinding, ...] = ()
    precision: tuple[PortFinding, ...] = ()
    findings: tuple[PortFinding, ...] = field(init=False)
    map: tuple[MapRow, ...] = ()
    judged: tuple[str, ...] = ()  # type: ignore[assignment] # as the JSON has it, which is fixed
    notes: tuple[str, ...] = ()
    planted: str = ""
    smallest: tuple[str, ...] = ()
    command: Command = field(default="port")

    def __post_init__(self) -> None:
        # frozen, as a result is: this is the one field that follows from others
        object.__setattr__(self, "findings", (*self.violations, *self.precision))

    @property
    def verdict(self) -> str:
        """`"holds"`, `"differs"` or `"unjudged"`."""
        found = super().verdict
        # nothing of a port is violated: it may be right by itself
        return "differs" if found == "violated" else found

    @property
    def differences(self) -> tuple[PortFinding, ...]:
        """The violations."""
        return self.violations

    @property
    def finding_notices(self) -> list[Notice]:
        """What is no fault, as CI systems show it."""
        return [one.notice for one in self.precision]

    @property
    def lines(self) -> list[str]:
        """The verdict in words, one line each."""
        head = "DIFFERS" if self.violations else self.verdict
        what = f"  {', '.join(self.judged)} compared" if self.judged else ""
        lines = [f"{self.loop}  {head}{what}, {self.seconds:.1f} s"]
        for one in self.findings:
            lines += ["", *one.shown]
        for one in self.accepted:
            lines.append(f"accepted: {one.diagnosis} at {one.module or MODEL}: {one.sentence}")
        if self.smallest:
            lines += ["", "smallest inputs found on which they differ:"]
            lines += [f"  {line}" for line in self.smallest]
        if self.unjudged is not None and not self.violations:
            lines.append(f"unjudged: {self.unjudged}")
        if self.planted and self.holds:
            lines.append(f"planted: {self.planted}")
        return [*lines, *(f"note: {note}" for note in self.notes)]

    @property
    def map_lines(self) -> list[str]:
        """The map, one line for each leaf."""
        width = max((len(row.leaf) for row in self.map), default=0)
        return [f"{row.leaf:<{width}}  {row.how:<10}  {row.sources}".rstrip() for row in self.map]

    def to_html(self) -> str:
        """Return the verdict and the map as one HTML page, which opens without a network and runs
        no script.
        """
        return _PAGE.format(body=result_html(self))

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON-ready data."""
        return {
            "loop": self.loop,
            "verdict": self.verdict,
            "holds": self.holds,
            "seconds": round(self.seconds, 3),
            "map": [{**asdict(row), "torch": list(row.torch)} for row in self.map],
            "findings": [one.to_json() for one in self.findings],
            "accepted": [one.to_json() for one in self.accepted],
            "judged": list(self.judged),
            "planted": self.planted,
            "notes": list(self.notes),
            "unjudged": self.unjudged,
            "smallest": list(self.smallest),
        }


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>A port</title></head>
<body>
{body}
</body></html>
"""
