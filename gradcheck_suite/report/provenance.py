"""Where figures come from: command, commit, date and machine, and whether the code has changed since."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gradcheck_suite.records.sources import code_digest
from gradcheck_suite.records.store import Record


@dataclass(frozen=True)
class Source:
    """A run, or several of the same command at the same commit.

    Attributes:
        kind: of the records.
        command: that made the records.
        commit: of the repository, nine digits; empty where it is unknown.
        date: the day of the newest record; empty where it is unknown.
        machine: the processor, its cores and the devices.
        records: how many there are.
        older: whether the code that the figures speak of is another one today, or may be.
        unclean: whether the working tree had uncommitted changes.
    """

    kind: str
    command: str
    commit: str
    date: str
    machine: str
    records: int = 1
    older: bool = False
    unclean: bool = False


def sources(records: Iterable[Record]) -> tuple[Source, ...]:
    """Return the runs behind some records, the newest first."""
    groups: dict[tuple[str, str, str, bool, bool, str], list[Record]] = {}
    for record in records:
        older = record.judge != code_digest(record.kind)
        run = (record.kind, record.command, record.commit[:9])
        groups.setdefault((*run, older, record.clean is False, machine(record.environment)), []).append(record)
    found = [
        Source(kind, command, commit, max(r.time for r in group)[:10], where, len(group), older, unclean)
        for (kind, command, commit, older, unclean, where), group in groups.items()
    ]
    return tuple(sorted(found, key=lambda source: source.date, reverse=True))


def machine(environment: Mapping[str, Any]) -> str:
    """Return the machine of an environment in a few words; empty where it is unknown."""
    if not environment:
        return ""
    devices = environment.get("devices") or {}
    accelerators = [str(d) for d in devices.get("torch", ()) if str(d) != "cpu"]
    processor, cores = environment.get("processor", "unknown processor"), environment.get("processor_count", "?")
    versions = environment.get("versions") or {}
    torch = f"torch {versions['torch']}" if versions.get("torch") else ""
    return ", ".join(filter(None, (*accelerators, f"{processor}, {cores} cores", torch)))
