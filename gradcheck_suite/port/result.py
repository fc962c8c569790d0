"""The verdict on a port, in words and as JSON. Imports neither framework."""

from __future__ import annotations

import html
import math
import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from gradcheck_suite.core.formats import Notice
from gradcheck_suite.core.results import json_number
from gradcheck_suite.core.text import counted
from gradcheck_suite.errors import UsageError, ViolationFound
from gradcheck_suite.port.causes import remedy

_VALUE = re.compile(r", observed [^,]* instead of ([\w.+-]+)(?= \(|$)")
"""The value that torch has, in the sentence of a finding."""
_OF_TORCH = ("pass torch's ", "use torch's ")
_BY_VALUE = {
    ("gelu-approximation", "none"): "pass approximate=False",
    ("gelu-approximation", "tanh"): "pass approximate=True",
}
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
        """What to do, with torch's value where it is known; nothing where the cause is unknown."""
        general = remedy(self.cause)
        value = _VALUE.search(self.words)
        if value is None:
            return general
        if (named := _BY_VALUE.get((self.cause, value[1]))) is not None:
            return named
        return f"{general}, {value[1]}" if general.startswith(_OF_TORCH) else general

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
        """Return the verdict and the map as one HTML page, which opens without a network."""
        return _page(self)

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


# The page of a verdict. It has no script, and so needs none of what the other pages are made with.


_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
h1 { font-size: 1.3rem } h2 { font-size: 1.05rem; margin: 1.5rem 0 .3rem }
h1, h2, td, p { overflow-wrap: anywhere }
.verdict { border: 2px solid; border-radius: .3rem; padding: 0 .5rem }
code { font-family: ui-monospace, monospace; font-size: .9em }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .3rem 0 }
dt { opacity: .7 } dd { margin: 0; overflow-wrap: anywhere }
table { border-collapse: collapse } th, td { text-align: left; padding: .15rem 1rem .15rem 0 }
th { border-bottom: 1px solid }
"""


def _page(result: PortResult) -> str:
    """Return a verdict as an HTML page: each difference with its places and its fix, then the map."""
    title = html.escape(f"{result.loop}: {result.verdict}")
    parts = [
        f'<h1><code>{html.escape(result.loop)}</code> <span class="verdict">{result.verdict}</span></h1>'
    ]
    if result.judged:
        parts.append(_paragraph(f"{', '.join(result.judged)} compared, {result.seconds:.1f} s"))
    parts += map(_section, result.findings)
    for title_of, lines in (
        (
            "Accepted",
            [f"{f.cause} at {f.place or 'the model'}: {f.words}" for f in result.accepted],
        ),
        ("Smallest inputs on which they differ", result.smallest),
        ("Not judged", [result.unjudged] if result.unjudged else []),
        ("Self-test", [result.planted] if result.planted and result.holds else []),
        ("Notes", result.notes),
    ):
        if lines:
            parts += [f"<h2>{title_of}</h2>", *map(_paragraph, lines)]
    if result.map:
        parts += [
            "<h2>Where each leaf of the JAX parameters comes from</h2>",
            _map_table(result.map),
        ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body><main>\n{chr(10).join(parts)}\n</main></body></html>\n"
    )


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _section(finding: PortFinding) -> str:
    pairs = [("torch", finding.torch), ("JAX", finding.jax), ("fix", finding.remedy)]
    if finding.error is not None and finding.allowed is not None:
        allowed = f"{finding.error:.2g} of the largest number, {finding.allowed:.1g} allowed"
        pairs.insert(2, ("off by", allowed))
    rows = "".join(f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in pairs if text)
    heading = f"{finding.place or 'the model'}: {finding.cause} ({finding.kind})"
    return f"<h2>{html.escape(heading)}</h2>{_paragraph(finding.words)}<dl>{rows}</dl>"


def _map_table(rows: tuple[MapRow, ...]) -> str:
    cells = "".join(
        f"<tr><td><code>{html.escape(row.leaf)}</code></td><td>{row.how}</td>"
        f"<td><code>{html.escape(_sources(row.torch))}</code></td></tr>"
        for row in rows
    )
    return f"<table><tr><th>leaf</th><th>how</th><th>torch</th></tr>{cells}</table>"


def _sources(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (
        f" and {counted(len(names) - 4, 'tensor')} more" if len(names) > 4 else ""
    )
