"""The section on what releasing saves in a whole step, by size of model, micro-batch and window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.loops.laws import bytes_saved_by_releasing
from gradcheck_suite.records.columns import counted
from gradcheck_suite.records.step_times import MODES, SETTING, pooled, step_times, summary
from gradcheck_suite.records.store import Record
from gradcheck_suite.report.charts.cost import ratio_plot
from gradcheck_suite.report.content import Cell, Figure, Section, Table, device_name
from gradcheck_suite.report.provenance import sources
from gradcheck_suite.report.records_view import current

KEY, TITLE, TAB = "decision", "When does releasing pay?", "cost"
COMMAND = "pytest properties/benchmarks/bench_decision.py --bench-records reports"
MIB = 2**20


def decision(records: Sequence[Record]) -> Section:
    """Return the section on the time of a step under either mode."""
    mine = current_steps(records)
    if not mine:
        return Section(KEY, TITLE, TAB, missing=f"Steps have not been timed yet: run `{COMMAND}`.")
    rows = timed_steps(mine)
    devices = sorted({str(row["device"]) for row in rows})
    bandwidths = {
        r.data["device"]: r.data["bytes_per_second"] for r in current(records) if "bytes_per_second" in r.data
    }
    return Section(
        KEY,
        TITLE,
        TAB,
        (
            "Steps under the two modes alternate: forward and backward of each micro-batch, a step of AdamW, the "
            "reset. Every step starts with flushed caches. A measurement that other load disturbed is repeated.",
            *(summary([row for row in rows if row["device"] == device], device_name(device)) for device in devices),
            "In every row, a release saves the memory of all gradients between steps. It lowers the peak only where "
            "the peak occurs before a backward has made all gradients again. Pages mapped per step show a cost on a "
            "CPU: the next backward maps anew the memory that a release gave back to the system.",
        ),
        figures=ratio_figures(rows),
        tables=tuple(
            _table([row for row in rows if row["device"] == device], device, bandwidths) for device in devices
        ),
        sources=sources(mine),
        missing=None if "cuda" in devices else f"Not run on a GPU: `{COMMAND} --bench-device cuda` adds its rows.",
    )


def current_steps(records: Sequence[Record]) -> list[Record]:
    """Return the records of timed steps that are shown: those of one machine and one set of versions."""
    return current(record for record in records if record.data.get("measures") == "step")


def timed_steps(records: Sequence[Record]) -> list[Mapping[str, Any]]:
    """Return the times of steps of each setting, from the benchmark records of all runs."""
    rows = pooled([record.data for record in current_steps(records)])
    return sorted(rows, key=lambda d: tuple(d[name] for name in SETTING))


def ratio_figures(rows: Sequence[Mapping[str, Any]], height: int = 240) -> tuple[Figure, ...]:
    """Return one plot for each device: the time of a step under None over that under `zero_`, against the size."""
    return tuple(
        _ratio_figure([row for row in rows if row["device"] == device], device, height)
        for device in sorted({str(row["device"]) for row in rows})
    )


def _ratio_figure(rows: Sequence[Mapping[str, Any]], device: str, height: int) -> Figure:
    shown = [_ratio(row) for row in sorted(rows, key=lambda row: int(row["parameters"])) if not row.get("disturbed")]
    bars = " and middle half (bar)" if any(row["low"] is not None for row in shown) else ""
    return Figure(
        f"ratio-{device}",
        ratio_plot(shown, height),
        f"Time of a step under None over that under zero_ on the {device_name(device)}: "
        + "; ".join(f"{row['size']} parameters, {row['setting']}: {row['ratio']:.2f}" for row in shown),
        f"Step time on the {device_name(device)}, None / zero_, in turn: median (point){bars} of each setting's pairs. "
        "A setting: items of a micro-batch, K micro-batches in a step. Below 1 None is faster.",
    )


def _ratio(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a point of the plot: 1 less the saved share, as the saving is the median over pairs."""
    zero, quartiles = float(row["zero"]), row.get("saved_quartiles")
    low, high = (None, None) if quartiles is None else (1 - float(quartiles[1]) / zero, 1 - float(quartiles[0]) / zero)
    return {
        "size": _size(int(row["parameters"])),
        "setting": f"{counted(row['items'], 'item')}, K = {row['micro_batches']}",
        "ratio": 1 - float(row["saved"]) / zero,
        "low": low,
        "high": high,
    }


def _size(parameters: int) -> str:
    for unit, name in ((10**9, " B"), (10**6, " M"), (10**3, " k")):
        if parameters >= 0.95 * unit:
            return f"{parameters / unit:.3g}{name}"
    return str(parameters)


def _table(rows: Sequence[Mapping[str, Any]], device: str, bandwidths: Mapping[str, float]) -> Table:
    lines: list[tuple[Cell, ...]] = []
    found = step_times(rows)
    for row, faster in zip(found.rows, found.faster, strict=True):
        faults = row.get("faults") or (None, None)
        bandwidth = bandwidths.get(device)
        lines.append(
            (
                int(row["parameters"]),
                int(row["items"]),
                int(row["micro_batches"]),
                1000 * float(row["zero"]),
                None if bandwidth is None else 1000 * bytes_saved_by_releasing(int(row["bytes_between"])) / bandwidth,
                1000 * float(row["saved"]),
                100 * float(row["saved"]) / float(row["zero"]),
                f"{row['faster']} of {row['pairs']}",
                MODES[faster],
                float(row["bytes_between"]) / MIB,
                *(None if count is None else round(count) for count in faults),
            )
        )
    return Table(
        f"A whole step on the {device_name(device)}, float32: what set_to_none saves",
        ("parameters", "items", "K", "step under zero_, ms", "predicted, ms", "saved, ms", "saved, %",
         "faster in pairs", "faster", "saved between steps, MiB", "pages mapped, zero_", "pages mapped, set_to_none"),
        tuple(lines),
        "Items are those of one micro-batch. K micro-batches make an update, so a small K is a high update frequency. "
        "A negative saving is a cost. Predicted: the bytes that zero_ moves beyond a release (four times the "
        "gradients' bytes) over the copy bandwidth that `bench_modes.py` measured.",
    )  # fmt: skip
