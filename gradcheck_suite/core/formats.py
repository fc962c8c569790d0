"""Results as CI systems read them: JSON, annotations of GitHub, SARIF 2.1.0.

GitHub: https://docs.github.com/actions/reference/workflow-commands-for-github-actions. SARIF:
https://docs.oasis-open.org/sarif/sarif/v2.1.0/. This module must neither judge nor write to
standard output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from gradcheck_suite.core.causes import meaning, remedy
from gradcheck_suite.core.faults import FAULTS
from gradcheck_suite.core.findings import FINDINGS, FindingKind

FORMATS = {"text": "", "json": "as --json", "github": "annotations", "sarif": "2.1.0"}
"""Format -> what it is, for the help of the commands. `rendered` prints them."""
_AT = re.compile(r"(?P<file>[^\s:][^:]*):(?P<line>\d+)(?=: |$)")


@dataclass(frozen=True)
class Notice:
    """One thing that a result says.

    Attributes:
        level: `error` for what fails the command, `warning` for a finding, `note` for an accepted
            fault.
        rule: the name of the fault, or of what else it is, such as `finding`.
        text: what is wrong.
        fix: what to do; empty where nothing is known to help.
        place: `file:line`, the file as seen from the working directory, or the file alone; None
            where it is unknown.
        accepted: why the project accepts it; None where it does not.
    """

    level: Literal["error", "warning", "note"]
    rule: str
    text: str
    fix: str = ""
    place: str | None = None
    accepted: str | None = None

    @property
    def message(self) -> str:
        """What is wrong, and what to do on a line of its own."""
        return f"{self.text}\nfix: {self.fix}" if self.fix else self.text

    def location(self, folder: Path) -> tuple[str, int | None] | None:
        """Return the file, relative to a folder that contains it, and the line.

        None where no file is known.
        """
        if self.place is None:
            return None
        found = _AT.fullmatch(self.place)
        file, line = (found["file"], int(found["line"])) if found else (self.place, None)
        path = Path(file)
        # CI systems compare with paths of the repository, which have forward slashes on Windows,
        # too
        return (path.relative_to(folder) if path.is_relative_to(folder) else path).as_posix(), line


def place_in(text: str) -> str | None:
    """Return the place that a text begins with, such as `train.py:3` of `train.py:3: why`.

    None where it has none.
    """
    found = _AT.match(text)
    return found[0] if found else None


def json_text(document: Any) -> str:
    """Return a JSON document as files and standard output have it.

    NaN and infinities must be strings already.
    """
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def rendered(
    form: str, document: Mapping[str, Any], notices: Sequence[Notice], folder: Path
) -> str:
    """Return what a command prints in a format other than text.

    Args:
        form: one of `FORMATS`.
        document: that `--json` writes.
        notices: what its results say.
        folder: to which files are relative.
    """
    if form == "json":
        return json_text(document)
    if form == "github":
        return "".join(f"{annotation(notice, folder)}\n" for notice in notices)
    version = str(document["environment"].get("versions", {}).get("gradcheck-suite", "0"))
    return json_text(sarif(notices, folder, version))


# GitHub


_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}


def annotation(notice: Notice, folder: Path) -> str:
    """Return a notice as a workflow command: one line, which the log of a run shows at the line of
    the file.
    """
    file, line = notice.location(folder) or (None, None)
    accepted = "" if notice.accepted is None else f" (accepted: {notice.accepted})"
    properties = {"file": file, "line": line, "title": f"{notice.rule}{accepted}"}
    given = ",".join(
        f"{name}={_property(value)}" for name, value in properties.items() if value is not None
    )
    return f"::{_COMMANDS[notice.level]} {given}::{_data(notice.message)}"


def _data(value: object) -> str:
    # the escapes of GitHub's workflow commands, % first since the others contain it:
    # https://github.com/actions/toolkit/blob/main/packages/core/src/command.ts
    return str(value).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: object) -> str:
    return _data(value).replace(":", "%3A").replace(",", "%2C")


# SARIF


SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)


def sarif(notices: Sequence[Notice], folder: Path, version: str) -> dict[str, Any]:
    """Return notices as a SARIF log of one run, whose rules are the faults and what else was found."""
    # every rule is listed whether it has fired or not, so that a system that keeps rules apart from
    # results knows all of them; others are causes of a port
    others = dict.fromkeys(notice.rule for notice in notices)
    rules = list(dict.fromkeys([*FAULTS, *FINDINGS, *others]))
    driver = {
        "name": "gradcheck-suite",
        "version": version,
        "rules": [_sarif_rule(name) for name in rules],
    }
    results = [_sarif_result(notice, rules.index(notice.rule), folder) for notice in notices]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _sarif_rule(name: str) -> dict[str, Any]:
    if name in FINDINGS:
        return _rule_of_finding(FINDINGS[name])
    if name not in FAULTS:
        return _rule_of_cause(name)
    fault = FAULTS[name]
    remedies = dict.fromkeys(
        [fault.remedy.torch, *(remedy.torch for remedy in fault.causes.values())]
    )
    return {
        "id": name,
        "shortDescription": {"text": fault.meaning},
        "help": {"text": "\n".join(remedies)},
        "properties": {"kind": fault.kind},
    }


def _rule_of_cause(name: str) -> dict[str, Any]:
    """Return the rule of what a port differs by, or of a name that has no row."""
    rule: dict[str, Any] = {"id": name}
    if text := meaning(name):
        rule["shortDescription"] = {"text": text}
    if text := remedy(name):
        rule["help"] = {"text": text}
    return rule


def _rule_of_finding(row: FindingKind) -> dict[str, Any]:
    rule: dict[str, Any] = {
        "id": row.name,
        "shortDescription": {"text": row.meaning},
        "defaultConfiguration": {"level": row.severity},
        "properties": {"kind": row.kind},
    }
    return {**rule, "help": {"text": row.remedy}} if row.remedy else rule


def _sarif_result(notice: Notice, index: int, folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": notice.rule,
        "ruleIndex": index,
        "level": notice.level,
        "message": {"text": notice.message},
    }
    if (location := notice.location(folder)) is not None:
        file, line = location
        # an absolute path is no URI below the source root
        base = {} if file.startswith("/") else {"uriBaseId": "%SRCROOT%"}
        physical: dict[str, Any] = {"artifactLocation": {"uri": quote(file), **base}}
        physical |= {} if line is None else {"region": {"startLine": line}}
        result["locations"] = [{"physicalLocation": physical}]
    if notice.accepted is not None:
        result["suppressions"] = [
            {"kind": "external", "status": "accepted", "justification": notice.accepted}
        ]
    return result


# A project's accepted faults


Judged = tuple[str, range | None]
"""A file that was judged, and which lines of it; None for all."""


@dataclass(frozen=True)
class Accepted:
    """A fault, a finding or a reason that a project lives with, an entry of `accept` in
    `[tool.gradcheck-suite]`.

    Attributes:
        fault: its name.
        file: in which it is, as seen from the working directory; empty for any.
        reason: why it is accepted.
        line: where it is in the file; None for anywhere.
    """

    fault: str
    file: str
    reason: str
    line: int | None = None

    @classmethod
    def read(cls, text: str, reason: str) -> Accepted:
        """Return the entry that `NAME`, `NAME@FILE` or `NAME@FILE:LINE` stands for."""
        name, _, place = text.partition("@")
        file, _, line = place.rpartition(":")
        # a file may have a colon in its name, as a path of Windows has
        if file and line.isdigit():
            return cls(name, file, reason, int(line))
        return cls(name, place, reason)

    def __str__(self) -> str:
        if not self.file:
            return self.fault
        return f"{self.fault}@{self.file}" + ("" if self.line is None else f":{self.line}")


def is_accepted(accepted: str, diagnosis: str, where: str | None, beside: str = "") -> bool:
    """Return whether `NAME`, `NAME@FILE` or `NAME@FILE:LINE` accepts what has a name and places.

    Args:
        accepted: one of these.
        diagnosis: the name of a fault, a finding or a reason.
        where: its places, each `file:line`, joined by ` < `; None where it has none.
        beside: further places that it names, of which the file is taken and the line is not.
    """
    name, _, place = accepted.partition("@")
    lines = (where or "").split(" < ")
    # lines move with every edit above them: an entry may name the file alone
    files = {line.rpartition(":")[0] for line in (*lines, *beside.split(" < "))}
    places = files.union(lines) - {""}
    if name != diagnosis:
        return False
    # an entry may name a file by the end of its path, which is the same on every machine
    return not place or any(one == place or one.endswith(f"/{place}") for one in places)
