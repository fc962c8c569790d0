"""What each reset mode costs in memory."""

from __future__ import annotations

from collections.abc import Sequence

from gradcheck_suite.records.store import Record
from gradcheck_suite.report.content import Section, Table, commands_of
from gradcheck_suite.report.records_view import latest

KEY, TITLE = "memory", "What each reset mode costs in memory"
MIB = 2**20
_WHAT = ("device", "parameters", "layout", "dtype", "micro_batches", "mode")


def memory(records: Sequence[Record]) -> Section:
    """Return the table of peaks and of what is alive between steps."""
    command = "pytest properties/benchmarks/bench_memory_modes.py --bench-records reports"
    if not records:
        return Section(KEY, TITLE, missing=f"Memory has not been measured yet: run `{command}`.")
    rows = [r.data for r in latest(records, lambda d: tuple(d[name] for name in _WHAT))]
    lines = []
    for row in sorted(rows, key=lambda d: tuple(d[name] for name in _WHAT[:-1])):
        bytes_ = (
            row["gradients_between"],
            row["peak"],
            row["resident_peak"],
            row["allocated_peak"],
            row["reserved_peak"],
        )
        mib = (None if value is None else value / MIB for value in bytes_)
        lines.append(
            (
                row["device"],
                row["parameters"],
                row["dtype"],
                row["micro_batches"],
                row["mode"],
                *mib,
                row["allocations"],
            )
        )
    return Section(
        KEY,
        TITLE,
        (
            "Each row is a process of its own. Zeroing keeps all gradients between steps, releasing none; whether that "
            "lowers the peak depends on where the peak is: with several micro-batches it falls in a backward, when the "
            "sums are there in either mode.",
        ),
        (
            Table(
                "Memory of a training window, MiB",
                ("device", "parameters", "dtype", "K", "mode", "gradients between steps", "peak by the ledger",
                 "resident peak", "allocated peak", "reserved peak", "allocations per window"),
                tuple(lines),
                "The ledger counts the bytes of tensors alive, parameters included. Resident pages are the process's, "
                "above what it had before the model; the last three columns are CUDA's allocator.",
            ),
        ),
        commands=commands_of(records),
    )  # fmt: skip
