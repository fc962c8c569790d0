"""What a judgement says: the differences, what was compared, and what could not be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gradcheck_suite.core.causes import meaning
from gradcheck_suite.core.formats import Accepted, Judged
from gradcheck_suite.port.result import Kind, MapRow, PortFinding, PortResult


@dataclass
class PortReport:
    """What is said of a pair.

    Attributes:
        entries: what the project accepts.
        notes: what was ignored, and what else was seen.
        findings: the differences.
        accepted: those that the project accepts.
        judged: what was compared.
        unjudged: why there is no verdict without a difference, or None.
        planted: the planted fault that was found.
        smallest: a drawn input of a difference, in words.
        map_rows: which tensors of torch each leaf comes from.
    """

    entries: Sequence[Accepted]
    notes: list[str]
    findings: list[PortFinding] = field(default_factory=list)
    accepted: list[PortFinding] = field(default_factory=list)
    judged: list[str] = field(default_factory=list)
    unjudged: str | None = None
    planted: str = ""
    smallest: tuple[str, ...] = ()
    map_rows: tuple[MapRow, ...] = ()

    def add(
        self, kind: Kind, place: str | None, cause: str, words: str, after: str = "", **more: Any
    ) -> PortFinding:
        """Add a finding, and return it; what its cause means stands behind the words."""
        means = f" ({meaning(cause)})" if meaning(cause) else ""
        finding = PortFinding.of(
            kind,
            place or "",
            cause,
            f"{words}{means}{after}",
            **more,
        )
        known = {(f.kind, f.place, f.cause) for f in (*self.findings, *self.accepted)}
        if (finding.kind, finding.place, finding.cause) in known:
            return finding
        accepting = finding.accepted_by(self.entries)
        if accepting:
            finding = replace(finding, reason=accepting[0].reason)
            self.accepted.append(finding)
        else:
            self.findings.append(finding)
        return finding

    def withdraw(self, gone: Sequence[PortFinding]) -> None:
        """Take findings back: the first of some, and all that came after it."""
        first = gone[0]
        later = self.findings[self.findings.index(first) :] if first in self.findings else []
        self.findings = [f for f in self.findings if f not in later and f not in gone]
        self.accepted = [f for f in self.accepted if f not in gone]

    def note(self, text: str) -> None:
        """Say something beside the findings, once."""
        if text not in self.notes:
            self.notes.append(text)

    def leave_out(self, words: str) -> None:
        """Say what was not judged; without a difference that was found there is no verdict then."""
        self.note(words)
        self.unjudged = self.unjudged or words

    def result(self, label: str, seconds: float) -> PortResult:
        """Return the verdict.

        Args:
            label: the pair's name.
            seconds: that the judgement took.
        """
        found = self.findings
        return PortResult(
            label,
            violations=tuple(one for one in found if one.kind != "precision"),
            precision=tuple(one for one in found if one.kind == "precision"),
            accepted=tuple(self.accepted),
            map=self.map_rows,
            seconds=seconds,
            judged=tuple(self.judged),
            notes=tuple(self.notes),
            planted=self.planted,
            unjudged=self.unjudged,
            smallest=self.smallest,
            files=_files(label, [*found, *self.accepted]),
        )


def _files(label: str, findings: Sequence[PortFinding]) -> tuple[Judged, ...]:
    """Return the files that a verdict speaks of: the pair's own, and those of the lines."""
    places = [label] + [one.where for one in findings if one.where]
    files = dict.fromkeys(place.rpartition(":")[0] for place in places)
    return tuple((file, None) for file in files if file)
