"""What holds a reset back from the speed of a copy: the calls, or how fast the device fills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.report.content import Cell, Table, device_name

WANTED = 0.85
"""Share of the copy bandwidth that a reset of large gradients should reach."""


def held_back(rows: Sequence[Mapping[str, Any]], device: str) -> Table:
    """Return the table of resets below `WANTED`, each with what the profiler saw and what follows from it."""
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
        floor, filling = share * seconds, size / float(row["filled_per_second"])
        seen = row.get("profile") or []
        calls = max((int(entry["calls"]) for entry in seen), default=1)
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
                "the fill itself" if filling - floor >= seconds - filling else "the calls",
                "; ".join(f"{e['name']} x{e['calls']}, {e['host_us'] + e['device_us']:.0f} us" for e in seen[:1]),
            )
        )
    return Table(
        f"Resets below {WANTED:.0%} of copy bandwidth on the {device_name(device)}, and what holds "
        "them back",
        ("parameters", "tensors", "dtype", "mode", "share of copy", "share of one large zero_", "calls",
         "us per call beyond filling", "held back by", "profile, hot"),
        tuple(lines),
        "" if last is None else f"Held back by: the larger part of its time beyond a copy's. {_speeds(last)}",
    )  # fmt: skip


def _speeds(row: Mapping[str, Any]) -> str:
    def speed(name: str) -> str:
        return f"{float(row[name]) / 1e9:.1f} GB/s"

    text = (
        f"In the last of these runs a copy moved {speed('bytes_per_second')}, read and written, and one zero_ of a "
        f"tensor far beyond the caches wrote {speed('filled_per_second')}"
    )
    if row.get("memset_per_second"):
        text += (
            f"; the C library's memset, on one thread, {speed('memset_per_second')}. On a CPU an ordinary store reads "
            "its cache line first: a fill then moves two bytes for each that it writes, a copy three for two: about "
            "three quarters of a copy's speed is to be expected. memset avoids that read"
        )
    return text + "."
