"""What changed between two sets of records of any kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gradcheck_suite.core.records import Record
from gradcheck_suite.studies.report.costs import total
from gradcheck_suite.studies.report.verdicts import Records, latest, run_of

SMALLEST = 0.1
"""Relative change of a measured time or size from which it is reported."""


@dataclass(frozen=True)
class Change:
    """One difference between two sets of records.

    Attributes:
        kind: of the records.
        what: the subject, such as a loop with its dtype and device.
        before: what the old records say; None where they do not have it.
        after: what the new records say; None where they do not have it.
    """

    kind: str
    what: str
    before: str | None
    after: str | None


Facts = Mapping[str, str | float]
"""Subject -> what its newest record says: a word, or a measured number."""


def facts(records: Records) -> dict[str, Facts]:
    """Return what the newest records of each kind say."""
    return {kind: read(records.of(kind)) for kind, read in READERS.items()}


def changes(old: Mapping[str, Facts], new: Mapping[str, Facts]) -> list[Change]:
    """Return every difference between the facts of two folders.

    Words differ where they are not equal, measured numbers where they differ by a tenth.
    """
    found = []
    for kind in READERS:
        before, after = old[kind], new[kind]
        for what in dict.fromkeys((*before, *after)):
            if _differ(before.get(what), after.get(what)):
                found.append(Change(kind, what, _shown(before.get(what)), _shown(after.get(what))))
    return found


def lines(found: list[Change]) -> Iterator[str]:
    """Yield the changes as lines, by kind."""
    kind = ""
    for change in found:
        if change.kind != kind:
            kind = change.kind
            yield kind
        if change.before is None:
            yield f"  + {change.what}: {change.after}"
        elif change.after is None:
            yield f"  - {change.what}: was {change.before}"
        else:
            yield f"  {change.what}: {change.before} -> {change.after}"
    if not found:
        yield "nothing changed"


def _differ(before: str | float | None, after: str | float | None) -> bool:
    if isinstance(before, float) and isinstance(after, float):
        return abs(after - before) > SMALLEST * max(abs(before), abs(after))
    return before != after


def _shown(fact: str | float | None) -> str | None:
    return f"{fact:.3g}" if isinstance(fact, float) else fact


def _verdicts(records: list[Record]) -> Facts:
    names = ("loop", "dtype", "device", "optimizer", "problem")
    newest = latest(records, lambda d: tuple(d.get(name) for name in names))
    return {" ".join(str(r.data[n]) for n in names if r.data.get(n)): _verdict(r.data) for r in newest}


def _verdict(data: Mapping[str, Any]) -> str:
    violation = data.get("violation")
    return f"violated ({violation['diagnosis']})" if violation else str(data.get("verdict"))


def _claims(records: list[Record]) -> Facts:
    newest = latest([r for r in records if "number" in r.data], lambda d: d["number"])
    return {f"claim {r.data['number']}": str(r.data["verdict"]) for r in newest}


def _zoo(records: list[Record]) -> Facts:
    newest = latest(records, lambda d: d.get("dtype"))
    return {
        " ".join(filter(None, (str(bug["name"]), r.data.get("dtype")))): f"found {bug['found']} of {bug['runs']}, "
        f"rightly named {bug['rightly_named']}"
        for r in newest
        for bug in r.data["bugs"]
    }


def _calibration(records: list[Record]) -> Facts:
    if not records:
        return {}
    alarms = records[-1].data["alarms"]
    return {f"false alarms {dtype}": f"{len(tally['alarms'])} of {tally['judged']}" for dtype, tally in alarms.items()}


def _trainers(records: list[Record]) -> Facts:
    newest = [r.data for r in latest(records, lambda d: (d["trainer"], d["version"], d["question"]))]
    return {
        f"{d['trainer']} {d['version']}, {d['question']}": _verdict(d["result"]) if d["result"] else "not asked"
        for d in newest
    }


def _bridge(records: list[Record]) -> Facts:
    newest = [r.data for r in latest(records, lambda d: (d["architecture"], d["version"], d["widened"]))]
    return {
        f"{d['architecture']} {d['version']}{' widened' if d['widened'] else ''}": "agrees"
        if d["gradient_error"] <= d["allowed"]
        else "differs"
        for d in newest
    }


def _times(records: list[Record]) -> Facts:
    names = (
        "measures",
        "mode",
        "device",
        "dtype",
        "parameters",
        "layout",
        "items",
        "micro_batches",
        "part",
        "compiled",
    )
    newest = [r.data for r in latest(records, lambda d: tuple(str(d.get(name)) for name in names))]
    found: dict[str, str | float] = {}
    for data in newest:
        what = " ".join(f"{n} {data[n]}" if n in names[4:] else str(data[n]) for n in names if data.get(n) is not None)
        if data.get("measures") == "step":
            found[f"{what}: saved by None, share of the step"] = float(data["saved"]) / float(data["zero"])
        elif isinstance(data.get("seconds"), Mapping):
            found[f"{what}: seconds"] = float(data["seconds"]["median"])
    return found


def _memory(records: list[Record]) -> Facts:
    names = ("mode", "device", "dtype", "parameters", "layout", "micro_batches")
    newest = [r.data for r in latest(records, lambda d: tuple(d.get(name) for name in names))]
    return {f"{' '.join(str(d[n]) for n in names)}: peak bytes": float(d["peak"]) for d in newest}


def _atlas(records: list[Record]) -> Facts:
    rows = records[-1].data.get("rows", ()) if records else ()
    return {
        f"{row.get('operation')} at {row.get('point')} {row.get('dtype')}": f"torch {row.get('torch')}, "
        f"jax {row.get('jax')}"
        for row in rows
    }


def _traffic(records: list[Record]) -> Facts:
    newest = [r.data for r in latest(records, lambda d: (d["loop"], d["ranks"], d["accumulation_steps"]))]
    return {
        f"{d['loop']} on {d['ranks']} ranks, K = {d['accumulation_steps']}": "{:g} collectives of {:g} bytes".format(
            *total(d["observed"])
        )
        for d in newest
    }


def _zero_or_none(records: list[Record]) -> Facts:
    return {
        f"{r.data['optimizer']}, {r.data['variant']}: zeros change": ", ".join(r.data["zero_changes"]) or "nothing"
        for r in records
    }


def _audits(records: list[Record]) -> Facts:
    runs = ((run_of(r.data), _verdict(r.data)) for r in records)
    return {f"{script} on {ranks} ranks" if ranks > 1 else script: verdict for (script, ranks), verdict in runs}


def _steps(records: list[Record]) -> Facts:
    rows = [row for r in records for row in r.data["rows"]]
    return {f"step of {row['torch']}": "agrees with optax" if row["agree"] else "differs from optax" for row in rows}


READERS: Mapping[str, Callable[[list[Record]], Facts]] = {
    "verify": _verdicts,
    "claim": _claims,
    "zoo": _zoo,
    "calibration": _calibration,
    "trainer": _trainers,
    "bridge": _bridge,
    "benchmark": _times,
    "memory": _memory,
    "atlas": _atlas,
    "zero-or-none": _zero_or_none,
    "traffic": _traffic,
    "step": _steps,
    "audit": _audits,
}
