"""Resets slower than a copy of the same bytes, and why: call overhead or the device's fill bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.report.content import Cell, Table, device_name

WANTED = 0.85
"""Share of the copy bandwidth that a reset of large gradients should reach."""


def slow_resets(rows: Sequence[Mapping[str, Any]], device: str) -> Table:
    """Return the table of resets below `WANTED`, each with its main cost and its most expensive operation."""
    lines: list[tuple[Cell, ...]] = []
    last: Mapping[str, Any] | None = None
    for row in rows:
        if row["measures"] != "reset" or not row["predicted_bytes"] or not row.get("filled_per_second"):
            continue
        seconds, size = float(row["seconds"]["median"]), float(row["predicted_bytes"])
        share = size / float(row["bytes_per_second"]) / seconds
        if share >= WANTED:
            continue
        last = row
        copying, filling = share * seconds, size / float(row["filled_per_second"])
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
                "fill bandwidth" if filling - copying >= seconds - filling else "call overhead",
                "; ".join(f"{e['name']} x{e['calls']}, {e['host_us'] + e['device_us']:.0f} us" for e in operations[:1]),
            )
        )
    return Table(
        f"Resets below {WANTED:.0%} of copy bandwidth on the {device_name(device)}, and why",
        ("parameters", "tensors", "dtype", "mode", "share of copy", "share of one large zero_", "calls",
         "us per call beyond filling", "main cost", "most expensive operation (warm caches)"),
        tuple(lines),
        "" if last is None else f"Main cost: the larger part of the time beyond that of a copy. {_speeds(last)}",
    )  # fmt: skip


def _speeds(row: Mapping[str, Any]) -> str:
    def speed(name: str) -> str:
        return f"{float(row[name]) / 1e9:.1f} GB/s"

    text = (
        f"In the last of these runs a copy read and wrote {speed('bytes_per_second')} together, and one zero_ of a "
        f"tensor far larger than the caches wrote {speed('filled_per_second')}"
    )
    if row.get("memset_per_second"):
        text += (
            f"; the C library's memset, on one thread, wrote {speed('memset_per_second')}. On a CPU an ordinary store "
            "reads its cache line first. A fill then moves two bytes for each byte that it writes, and a copy moves "
            "three bytes for each two that it reads and writes, so a fill reaches about three quarters of a copy's "
            "bandwidth. memset avoids that read"
        )
    return text + "."
