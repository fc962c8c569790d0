"""The verdict on a port, in words and as JSON. Imports neither framework."""

from __future__ import annotations

import html
import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from gradcheck_suite.core.formats import Notice
from gradcheck_suite.core.results import json_number
from gradcheck_suite.core.text import counted
from gradcheck_suite.errors import UsageError, ViolationFound
from gradcheck_suite.port.causes import remedy

Kind = Literal["load", "forward", "gradient", "update", "state", "precision"]


@dataclass(frozen=True)
class PortFinding:
    """One difference between the torch model and its port.

    Attributes:
        kind: what differs. `precision` is a port that computes in a lower precision, and no fault.
        place: path of the torch module, `loss` or `optimizer`; empty for the whole model.
        cause: a name of `causes.CAUSES`, or `unknown`.
        words: one sentence with the numbers.
        torch: `file:line` of the torch operation, or None.
        jax: `file:line` of the port's operation, or None.
        error: largest difference relative to the largest number of the same array, or None.
        allowed: what rounding explains of it, or None.
    """

    kind: Kind
    place: str
    cause: str
    words: str
    torch: str | None = None
    jax: str | None = None
    error: float | None = None
    allowed: float | None = None

    @property
    def remedy(self) -> str:
        """What to do, or nothing where the cause is unknown."""
        return remedy(self.cause)

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON-ready data."""
        return {
            **asdict(self),
            "error": json_number(self.error),
            "allowed": json_number(self.allowed),
        }

    @property
    def notice(self) -> Notice:
        """The finding as CI systems show it."""
        level: Literal["warning", "error"] = "warning" if self.kind == "precision" else "error"
        return Notice(
            level, self.cause, f"{self.place or 'the model'}: {self.words}", self.remedy, self.jax
        )


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


@dataclass(frozen=True)
class PortResult:
    """The verdict on a port.

    Attributes:
        loop: the pair's name as the user gave it.
        findings: the differences that are not accepted, in the order in which data flows.
        accepted: those whose cause the author accepts.
        map: where each leaf of the JAX parameters comes from.
        seconds: wall-clock seconds.
        judged: what was compared, such as `outputs` and `updates`.
        notes: what else is worth knowing, one sentence each.
        planted: a fault that was planted in this pair and found: the verdict is not blind.
        unjudged: why there is no verdict, or None.
        smallest: the smallest inputs on which the two differ, one line each; empty where they are
            the given ones.
    """

    loop: str
    findings: tuple[PortFinding, ...] = ()
    accepted: tuple[PortFinding, ...] = ()
    map: tuple[MapRow, ...] = ()
    seconds: float = 0.0
    judged: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    planted: str = ""
    unjudged: str | None = None
    smallest: tuple[str, ...] = ()

    @property
    def differences(self) -> tuple[PortFinding, ...]:
        """The findings that are faults: all but those of kind `precision`."""
        return tuple(f for f in self.findings if f.kind != "precision")

    @property
    def verdict(self) -> str:
        """`"holds"`, `"differs"` or `"unjudged"`."""
        if self.differences:
            return "differs"
        return "holds" if self.unjudged is None else "unjudged"

    @property
    def holds(self) -> bool:
        """Whether all that was compared is the same."""
        return self.verdict == "holds"

    @property
    def notices(self) -> list[Notice]:
        """What the result says, as CI systems show it."""
        found = [one.notice for one in self.findings]
        found += [
            replace(one.notice, level="note", accepted="accept of the pair")
            for one in self.accepted
        ]
        unjudged = (
            [Notice("error", "unjudged", self.unjudged)]
            if self.unjudged and not self.differences
            else []
        )
        return [*found, *unjudged]

    @property
    def lines(self) -> list[str]:
        """The verdict in words, one line each."""
        head = {"holds": "holds", "differs": "DIFFERS", "unjudged": "unjudged"}[self.verdict]
        what = f"  {', '.join(self.judged)} compared" if self.judged else ""
        lines = [f"{self.loop}  {head}{what}, {self.seconds:.1f} s"]
        for finding in self.findings:
            lines += ["", *_finding_lines(finding)]
        lines += [
            f"accepted: {f.cause} at {f.place or 'the model'}: {f.words}" for f in self.accepted
        ]
        if self.smallest:
            lines += [
                "",
                "smallest inputs found on which they differ:",
                *(f"  {line}" for line in self.smallest),
            ]
        if self.unjudged is not None and not self.differences:
            lines.append(f"unjudged: {self.unjudged}")
        lines += [f"planted: {self.planted}"] if self.planted and self.holds else []
        return [*lines, *(f"note: {note}" for note in self.notes)]

    @property
    def map_lines(self) -> list[str]:
        """The map, one line for each leaf."""
        width = max((len(row.leaf) for row in self.map), default=0)
        return [
            f"{row.leaf:<{width}}  {row.how:<10}  {_sources(row.torch)}".rstrip()
            for row in self.map
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_html(self) -> str:
        """Return the verdict and the map as one HTML page."""
        lines = [*self.lines, "", "map:", *self.map_lines]
        style = (
            "body{font:14px/1.5"
            " ui-monospace,monospace;margin:2rem;max-width:70rem}pre{white-space:pre-wrap}"
        )
        title = html.escape(f"{self.loop}: {self.verdict}")
        text = html.escape("\n".join(lines))
        head = f'<meta charset="utf-8"><title>{title}</title><style>{style}</style>'
        return (
            "<!doctype html><html"
            f' lang="en"><head>{head}</head><body><pre>{text}</pre></body></html>\n'
        )

    def raise_for_violation(self) -> None:
        """Do nothing where the port is the torch model.

        Raises:
            ViolationFound: they differ; the message is the verdict in words.
            UsageError: nothing could be judged.
        """
        if self.differences:
            raise ViolationFound(str(self))
        if self.unjudged is not None:
            raise UsageError(f"{self.loop}: {self.unjudged}")

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON-ready data."""
        return {
            "loop": self.loop,
            "verdict": self.verdict,
            "holds": self.holds,
            "seconds": round(self.seconds, 3),
            "map": [{**asdict(row), "torch": list(row.torch)} for row in self.map],
            "findings": [finding.to_json() for finding in self.findings],
            "accepted": [finding.to_json() for finding in self.accepted],
            "judged": list(self.judged),
            "planted": self.planted,
            "notes": list(self.notes),
            "unjudged": self.unjudged,
            "smallest": list(self.smallest),
        }


def _finding_lines(finding: PortFinding) -> list[str]:
    where = " <-> ".join(part for part in (finding.torch, finding.jax) if part)
    lines = [
        f"{finding.place or 'the model'}: {finding.cause} ({finding.kind})",
        f"  {finding.words}",
    ]
    lines += [f"  {where}"] if where else []
    if finding.error is not None and finding.allowed is not None and math.isfinite(finding.error):
        lines.append(
            f"  off by {finding.error:.2g} of the largest number, {finding.allowed:.1g} allowed"
        )
    return [*lines, f"  fix: {finding.remedy}"] if finding.remedy else lines


def _sources(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (
        f" and {counted(len(names) - 4, 'tensor')} more" if len(names) > 4 else ""
    )
