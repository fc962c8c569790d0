"""Resets slower than a copy of the same bytes, and why: the time of the filling itself, or overhead beyond it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.report.content import Cell, Table, device_name

WANTED = 0.85
"""Share of the copy bandwidth that a reset of large gradients should reach."""


def slow_resets(rows: Sequence[Mapping[str, Any]], device: str) -> Table:
    """Return the table of resets below `WANTED`, each with its main cost and its most expensive operation."""
    lines: list[tuple[Cell, ...]] = []
    slow: list[Mapping[str, Any]] = []
    for row in rows:
        if row["measures"] != "reset" or not row["predicted_bytes"] or not row.get("filled_per_second"):
            continue
        seconds, size = float(row["seconds"]["median"]), float(row["predicted_bytes"])
        share = size / float(row["bytes_per_second"]) / seconds
        if share >= WANTED:
            continue
        slow.append(row)
        filling = size / float(row["filled_per_second"])
        operations = row.get("profile") or []
        calls = max((int(entry["calls"]) for entry in operations), default=1)
        lines.append(
            (
                int(row["parameters"]),
                str(row["layout"]),
                str(row["dtype"]),
                str(row["mode"]),
                share,
                filling / seconds,
                calls,
                1e6 * max(0.0, seconds - filling) / calls,
                "filling" if filling >= seconds / 2 else "overhead",
                "; ".join(f"{e['name']} x{e['calls']}, {e['host_us'] + e['device_us']:.0f} us" for e in operations[:1]),
            )
        )
    return Table(
        f"Resets below {WANTED:.0%} of copy bandwidth on the {device_name(device)}, and why",
        ("parameters", "tensors", "dtype", "mode", "share of copy", "share of one large zero_", "calls",
         "us per call beyond filling", "main cost", "most expensive operation (warm caches)"),
        tuple(lines),
        f"Main cost: filling, where one large zero_ of as many bytes takes half of the time or more; otherwise "
        f"overhead, which is all time beyond that. {_speeds(slow)}"
        if slow
        else "",
    )  # fmt: skip


def _speeds(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the speeds of a copy, of one large `zero_` and of memset in the runs of some rows."""

    def speed(name: str) -> str:
        found = sorted({f"{float(row[name]) / 1e9:.1f}" for row in rows if row.get(name)}, key=float)
        return f"{found[0]} GB/s" if len(found) == 1 else f"{found[0]} to {found[-1]} GB/s"

    text = (
        f"In these runs a copy read and wrote {speed('bytes_per_second')} together, and one zero_ of a "
        f"tensor far larger than the caches wrote {speed('filled_per_second')}"
    )
    if any(row.get("memset_per_second") for row in rows):
        text += f"; the C library's memset, on one thread, wrote {speed('memset_per_second')}"
    return text + "."
