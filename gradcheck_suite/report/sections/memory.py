"""The section on the memory that each reset mode needs."""

from __future__ import annotations

from collections.abc import Sequence

from gradcheck_suite.records.store import Record
from gradcheck_suite.report.content import Section, Table, commands_of
from gradcheck_suite.report.records_view import current, latest

KEY, TITLE = "memory", "What each reset mode costs in memory"
MIB = 2**20
_WHAT = ("device", "parameters", "layout", "dtype", "micro_batches", "mode")


def memory(records: Sequence[Record]) -> Section:
    """Return the table of peaks and of the bytes alive between steps."""
    command = "pytest properties/benchmarks/bench_memory_modes.py --bench-records reports"
    if not records:
        return Section(KEY, TITLE, missing=f"Memory has not been measured yet: run `{command}`.")
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
        (
            "Each row was measured in a process of its own. Between steps, zeroing keeps all gradients alive and "
            "releasing none. Whether that lowers the peak depends on when the peak occurs. With several micro-batches "
            "it occurs in a backward, when all gradients are alive in either mode.",
        ),
        (
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
        commands=commands_of(records),
    )  # fmt: skip
