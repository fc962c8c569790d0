"""The section on reset modes under `torch.compile` and in CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.records.columns import counted
from gradcheck_suite.records.store import Record
from gradcheck_suite.report.content import Cell, Section, Table, device_name
from gradcheck_suite.report.provenance import sources
from gradcheck_suite.report.records_view import current, latest

TURNS = "step, experts by turns"
KEY, TITLE, TAB = "compiled", "Compiled steps and captured graphs", "cost"
COMMAND = "pytest properties/benchmarks/bench_compiled.py --bench-records reports"
NOT_CAPTURED = (
    f"No CUDA graph was captured. `{COMMAND} --bench-device cuda` captures them and records which reset leaves the "
    "right gradients after a replay."
)
CAPTURED = (
    "A CUDA graph replays kernels, not Python. A reset that consists of kernels may run inside the graph or between "
    "replays. A release between replays takes from the parameters the tensors that the graph writes to, and the "
    "optimizer finds None."
)
COMPILED = ("device", "measures", "part", "compiled", "place", "micro_batches", "mode")


def compiled(records: Sequence[Record]) -> Section:
    """Return the section on the number of graphs that each mode needs, and on `.grad` after a replay."""
    mine = current(record for record in records if record.data.get("measures") in ("compiled", "captured"))
    if not mine:
        return Section(KEY, TITLE, TAB, missing=f"Nothing was compiled or captured yet: run `{COMMAND}`.")
    rows = [r.data for r in latest(mine, lambda d: tuple(d.get(name) for name in COMPILED))]
    windows = [
        r.data for r in current(records) if r.data.get("measures") == "window" and r.data.get("dtype") == "float32"
    ]
    tables = (_compiled([row for row in rows if row["measures"] == "compiled"]), _captured(rows, windows))
    return Section(
        KEY,
        TITLE,
        TAB,
        (
            "`torch.compile` makes a version of a function for every set of gradients that are None. Where each window "
            "reaches other parameters, such as experts by turns, a release makes another set every time: "
            "`torch.compile` then compiles the optimizer step again for each set, up to the limit of 8 versions, and "
            "runs it eagerly from then on. Gradients that are allocated once and zeroed need one version. A compiled "
            "backward needs two versions under a release, one that makes the gradients and one that adds to them. A "
            "compiled forward does not depend on them.",
            *_turns(rows),
            *((CAPTURED,) if tables[1].rows else ()),
        ),
        tables=tuple(table for table in tables if table.rows),
        sources=sources(mine),
        missing=None if tables[1].rows else NOT_CAPTURED,
    )


def _turns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what the recompilation of the step did to its time, where each window reaches other parameters."""
    mine = {
        (str(row["device"]), str(row["mode"])): row
        for row in rows
        if row["measures"] == "compiled" and row["part"] == TURNS and row["compiled"]
    }
    found = []
    for device in sorted({device for device, _ in mine}):
        pair = [mine.get((device, mode)) for mode in ("set_to_none", "zero_")]
        if None not in pair:
            release, zero = (f"{_milliseconds(row):.3g} ms ({counted(row['graphs'], 'graph')})" for row in pair if row)
            found.append(
                f"With experts by turns on the {device_name(device)}, a window with its compiled step takes {release} "
                f"under set_to_none and {zero} under zero_. After a release the optimizer skips the parameters that "
                "the window does not use; after zeroing it steps on them all."
            )
    return found


def _compiled(rows: Sequence[Mapping[str, Any]]) -> Table:
    settings: dict[tuple[str, str, str], dict[bool, Mapping[str, Any]]] = {}
    for row in rows:
        key = (str(row["device"]), str(row["part"]), str(row["mode"]))
        settings.setdefault(key, {})[bool(row["compiled"])] = row
    lines: list[tuple[Cell, ...]] = []
    for (device, part, mode), pair in settings.items():
        eager, made = (_milliseconds(pair.get(which)) for which in (False, True))
        graphs = int(pair[True]["graphs"]) if True in pair else None
        lines.append((device, part, mode, graphs, eager, made))
    return Table(
        "Graphs compiled, and time of a window with its step",
        ("device", "compiled", "mode", "graphs", "eager, ms", "compiled, ms"),
        tuple(lines),
        "Graphs are counted after 24 windows, when all compilation is done. In modes that keep gradients, they exist "
        "before the first window. Eager and compiled windows were timed one after the other, so other load can exceed "
        "their difference.",
    )


def _captured(rows: Sequence[Mapping[str, Any]], windows: Sequence[Mapping[str, Any]]) -> Table:
    lines: list[tuple[Cell, ...]] = []
    for row in rows:
        if row["measures"] != "captured":
            continue
        same = ("device", "mode", "parameters", "layout", "micro_batches")
        eager = next((w for w in reversed(windows) if all(w[n] == row[n] for n in same)), None)
        lines.append(
            (
                int(row["micro_batches"]),
                str(row["mode"]),
                str(row["place"]),
                str(row["finding"]),
                _milliseconds(row),
                _milliseconds(eager),
            )
        )
    return Table(
        "A window as a CUDA graph",
        ("K", "mode", "reset", "gradients after a replay", "replay, ms", "eager window, ms"),
        tuple(lines),
    )


def _milliseconds(row: Mapping[str, Any] | None) -> float | None:
    return None if row is None else 1000 * float(row["seconds"]["median"])
