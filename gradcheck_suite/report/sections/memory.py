"""The section on the memory that each reset mode needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.records.store import Record
from gradcheck_suite.report.charts.cost import peaks_plot, window_memory_plot
from gradcheck_suite.report.content import Figure, Section, Table
from gradcheck_suite.report.provenance import sources
from gradcheck_suite.report.records_view import current, latest

KEY, TITLE, TAB = "memory", "What each reset mode costs in memory", "cost"
MIB = 2**20
TRACED = {"zero_": "zero_", "set_to_none": "None"}
"""The modes whose windows are drawn, and what the drawing calls them."""
_WHAT = ("device", "parameters", "layout", "dtype", "micro_batches", "mode")


def memory(records: Sequence[Record]) -> Section:
    """Return the table of peaks and of the bytes alive between steps."""
    command = "pytest properties/benchmarks/bench_memory_modes.py --bench-records reports"
    if not records:
        return Section(KEY, TITLE, TAB, missing=f"Memory has not been measured yet: run `{command}`.")
    records = current(records)
    rows = [r.data for r in latest(records, lambda d: tuple(d[name] for name in _WHAT))]
    lines = []
    for row in sorted(rows, key=lambda d: tuple(d[name] for name in _WHAT[:-1])):
        allocator = row.get("allocator") or {}
        bytes_ = (
            row["gradients_between"],
            row["peak"],
            row["resident_peak"],
            *(allocator.get(f"{kind}_peak") for kind in ("requested", "allocated", "reserved")),
        )
        mib = (None if value is None else value / MIB for value in bytes_)
        counts = (allocator.get(name) for name in ("allocations", "retries", "segments"))
        setting = (row["device"], row["parameters"], row["dtype"], row["micro_batches"], row["mode"])
        lines.append((*setting, *mib, *counts))
    return Section(
        KEY,
        TITLE,
        TAB,
        (
            "Each row was measured in a process of its own. Between steps, zeroing keeps all gradients alive and "
            "releasing none. Whether that lowers the peak depends on when the peak occurs. With several micro-batches "
            "it occurs in a backward, when all gradients are alive in either mode.",
        ),
        figures=tuple(filter(None, (window_figure(records), _peaks(rows)))),
        tables=(
            Table(
                "Memory of a training window, MiB",
                ("device", "parameters", "dtype", "K", "mode", "gradients between steps", "peak by the ledger",
                 "resident peak", "requested peak", "allocated peak", "reserved peak", "allocations per window",
                 "retries", "segments"),
                tuple(lines),
                "The ledger counts the bytes of live tensors, parameters included. The resident peak is the process's, "
                "beyond its resident size before the model was built. CUDA's allocator reports the last six columns; "
                "its peaks are those above the context, the libraries' workspaces and the inputs.",
            ),
        ),
        sources=sources(records),
    )  # fmt: skip


def window_figure(records: Sequence[Record], height: int = 200) -> Figure | None:
    """Return the plot of the bytes alive through one window, `zero_` beside None; None without their records.

    It shows the largest model with the fewest micro-batches, where the two modes differ most.
    """
    traced = [r.data for r in records if r.data.get("window") and r.data["mode"] in TRACED]
    newest = {tuple(d[name] for name in _WHAT): d for d in traced}.values()
    settings: dict[tuple[int, int], dict[str, Mapping[str, Any]]] = {}
    for data in newest:
        settings.setdefault((int(data["parameters"]), -int(data["micro_batches"])), {})[str(data["mode"])] = data
    both = {setting: modes for setting, modes in settings.items() if len(modes) == len(TRACED)}
    if not both:
        return None
    setting = max(both)
    peaks = {mode: both[setting][mode]["peak"] / MIB for mode in TRACED}
    kept = {mode: both[setting][mode]["gradients_between"] / MIB for mode in TRACED}
    said = "; ".join(
        f"{TRACED[mode]}: peak {peaks[mode]:.1f} MiB, gradients kept after it {kept[mode]:.1f} MiB" for mode in TRACED
    )
    return Figure(
        "window-memory",
        window_memory_plot({TRACED[mode]: both[setting][mode]["window"] for mode in TRACED}, height),
        f"Bytes alive after each operation of one window. {said}",
        f"Bytes of live tensors, counted by the suite's ledger after each operation of one window: K = {-setting[1]} "
        f"micro-batch{'es' * (setting[1] != -1)}, step and reset, {setting[0]:,} parameters. {said}.",
    )


def _peaks(rows: Sequence[Mapping[str, Any]]) -> Figure | None:
    shown = [
        {
            "setting": f"{row['parameters'] / 1e6:.2g} M, K = {row['micro_batches']}",
            "mode": str(row["mode"]),
            "MiB": row["peak"] / MIB,
        }
        for row in sorted(rows, key=lambda row: (row["device"], row["parameters"], row["micro_batches"]))
        if row["dtype"] == "float32"
    ]
    if not shown:
        return None
    return Figure(
        "memory-peaks",
        peaks_plot(shown),
        "Peak memory of a window by the ledger: "
        + "; ".join(f"{row['setting']}, {row['mode']}: {row['MiB']:.1f} MiB" for row in shown),
        "Peak of a window by the ledger, parameters included. Models with float32 gradients, by number of parameters.",
    )
