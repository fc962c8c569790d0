"""The section on the time that each reset mode takes: the modes side by side, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.loops.modes import BENCHMARKED
from gradcheck_suite.records.columns import counted
from gradcheck_suite.records.store import Record
from gradcheck_suite.report.charts.cost import times_plot
from gradcheck_suite.report.content import Cell, Figure, Section, Table, device_name
from gradcheck_suite.report.provenance import sources
from gradcheck_suite.report.records_view import current, latest
from gradcheck_suite.report.sections.compiled import COMPILED
from gradcheck_suite.report.sections.decision import timed_steps
from gradcheck_suite.report.sections.slow_resets import slow_resets

KEY, TITLE, TAB = "costs", "What each reset mode costs", "cost"
_WHAT = ("measures", "mode", "dtype", "parameters", "layout", "micro_batches", "device")
MEASURES = ("reset", "backward", "window")
RELEASE = "set_to_none"
MODES = (*(mode.name for mode in BENCHMARKED), "jax_scan")
NO_GPU = (
    "There are no records of a CUDA device: nothing below was run on a GPU. On a machine with a GPU, "
    "`pytest properties/benchmarks/bench_modes.py --bench-device cuda --bench-records reports` makes them."
)


def costs(records: Sequence[Record]) -> Section:
    """Return the section on the time that resets take."""
    timed = current(record for record in records if record.data.get("measures") in MEASURES)
    rows = [r.data for r in latest(timed, lambda d: tuple(d.get(name) for name in _WHAT))]
    if not rows:
        return Section(
            KEY,
            TITLE,
            TAB,
            missing="Nothing has been measured yet: run `pytest properties/benchmarks/bench_modes.py "
            "--bench-records reports`.",
        )
    devices = sorted({str(row["device"]) for row in rows})
    compiled = current(record for record in records if record.data.get("measures") in ("compiled", "captured"))
    others = [*timed_steps(records), *(r.data for r in latest(compiled, lambda d: tuple(d.get(n) for n in COMPILED)))]
    tables: list[Table] = []
    figures: list[Figure] = []
    for device in devices:
        mine = [row for row in rows if row["device"] == device]
        tables += [_windows(mine, device), _resets(mine, device), slow_resets(mine, device),
                   _device_times([*mine, *(row for row in others if row["device"] == device)], device)]  # fmt: skip
        figures += _figures(mine, device)
    return Section(
        KEY,
        TITLE,
        TAB,
        (
            "Times are medians. A reset is timed on gradients of ones, with the caches flushed before every round. "
            + _releases(rows)
            + "A release sets each gradient to None, and the next backward allocates them again. Compare modes by "
            "their windows: forward and backward of each micro-batch, and the reset.",
            "The minimum time of a reset is the bytes that it must write over the bandwidth of a device copy in the "
            "same run. A release writes nothing, so it has no minimum.",
        ),
        figures=tuple(figures),
        tables=tuple(table for table in tables if table.rows),
        sources=sources(timed),
        missing=None if "cuda" in devices else NO_GPU,
    )


def _releases(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how long `set_to_none` alone takes, and in how many settings it is the fastest and the slowest reset."""
    times: list[float] = []
    fastest = slowest = 0
    for device in sorted({str(row["device"]) for row in rows}):
        for modes in _by_mode([row for row in rows if row["device"] == device], "reset").values():
            if RELEASE not in modes or len(modes) == 1:
                continue
            own, others = _median(modes[RELEASE]), [_median(row) for name, row in modes.items() if name != RELEASE]
            times.append(own)
            fastest += own < min(others)
            slowest += own > max(others)
    if not times:
        return ""
    return (
        f"{RELEASE} alone takes {1000 * min(times):.3g} to {1000 * max(times):.3g} ms; of {len(times)} settings it is "
        f"the fastest reset in {fastest} and the slowest in {slowest}. "
    )


def _median(row: Mapping[str, Any]) -> float:
    return float(row["seconds"]["median"])


def _host_median(row: Mapping[str, Any]) -> float:
    """Return the median on the host's clock, on which torch and JAX compare."""
    return float(row["host"]["median"]) if row.get("host") else _median(row)


def _device_times(rows: Sequence[Mapping[str, Any]], device: str) -> Table:
    """Return the table of the three times of whatever a GPU was timed with, and of the kernels that were launched."""
    lines: list[tuple[Cell, ...]] = []
    for row in rows:
        about = (int(row["parameters"]), str(row["layout"]), str(row["dtype"]), int(row["micro_batches"]))
        if row["measures"] == "step":
            modes = ("zero_", "set_to_none") if row.get("busy") else ()
            steps = zip(modes, row.get("host") or (), (row["zero"], row["none"]), row.get("busy") or (), strict=False)
            lines += [
                (
                    f"step, {counted(row['items'], 'item')}",
                    *about,
                    mode,
                    str(row["regime"]),
                    *(1000 * t for t in times),
                    None,
                )
                for mode, *times in steps
            ]
        elif row.get("host") and row["device"] != "cpu":
            busy = None if row.get("busy_seconds") is None else 1000 * float(row["busy_seconds"])
            lines.append(
                (_what(row), *about, str(row["mode"]), str(row["regime"]), 1000 * _host_median(row),
                 1000 * _median(row), busy, row.get("kernels"))
            )  # fmt: skip
    return Table(
        f"Host, device and kernels on the {device_name(device)}",
        ("what", "parameters", "tensors", "dtype", "K", "mode", "gradients", "host, ms", "device, ms", "kernels, ms",
         "kernels"),
        tuple(lines),
        "Host: until the device has finished. Device: between two events on its stream, the gaps while it waits for "
        "the host included; JAX has no events, so that both are the host's time. Kernels: the time in which some "
        "kernel ran, by the profiler; a captured window is not profiled.",
    )  # fmt: skip


def _what(row: Mapping[str, Any]) -> str:
    """Return what a row timed: for a window of which a part is compiled or captured, with that part."""
    if row["measures"] == "captured":
        return f"captured window, reset {row['place']}"
    if row["measures"] == "compiled":
        return f"window with its step, {'compiled' if row['compiled'] else 'eager'} {row['part']}"
    return str(row["measures"])


def _by_mode(rows: Sequence[Mapping[str, Any]], measures: str) -> dict[tuple[Any, ...], dict[str, Mapping[str, Any]]]:
    found: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if row["measures"] == measures:
            key = (row["parameters"], row["layout"], row["dtype"], row["micro_batches"])
            found.setdefault(key, {})[str(row["mode"])] = row
    return dict(sorted(found.items(), key=lambda item: (item[0][2], item[0][3], item[0][1], item[0][0])))


def _windows(rows: Sequence[Mapping[str, Any]], device: str) -> Table:
    lines: list[tuple[Cell, ...]] = []
    for (parameters, layout, dtype, micro_batches), modes in _by_mode(rows, "window").items():
        shown = [1000 * _host_median(modes[m]) if m in modes else None for m in MODES]
        lines.append((int(parameters), str(layout), str(dtype), int(micro_batches), *shown))
    return Table(
        f"One window on the {device_name(device)}, ms",
        ("parameters", "tensors", "dtype", "K", *MODES),
        tuple(lines),
        "On the host's clock, until the device has finished. The modes were timed one after the other, so other load "
        "can exceed the difference between two of them; under 'When does releasing pay?' they alternate. "
        "jax_scan is the same window in JAX: `lax.scan` under `jit` with donated buffers; it has no reset.",
    )


def _resets(rows: Sequence[Mapping[str, Any]], device: str) -> Table:
    lines: list[tuple[Cell, ...]] = []
    for (parameters, layout, dtype, _), modes in _by_mode(rows, "reset").items():
        for mode, row in modes.items():
            floor = float(row["predicted_bytes"]) / float(row["bytes_per_second"])
            lines.append(
                (
                    int(parameters),
                    str(layout),
                    str(dtype),
                    mode,
                    1000 * _median(row),
                    1000 * floor if floor else None,
                    floor / _median(row) if floor else None,
                )
            )
    return Table(
        f"The reset alone on the {device_name(device)}",
        ("parameters", "tensors", "dtype", "mode", "ms", "minimum, ms", "share of copy bandwidth"),
        tuple(lines),
        "The flush does not empty every cache, so resets of small gradients can be faster than the minimum.",
    )


def _figures(rows: Sequence[Mapping[str, Any]], device: str) -> list[Figure]:
    resets = [
        {"mode": mode, "layout": f"{layout} tensors", "x": int(parameters), "y": 1000 * _median(row)}
        for (parameters, layout, dtype, _), modes in _by_mode(rows, "reset").items()
        if dtype == "float32"
        for mode, row in modes.items()
    ]
    if not resets:
        return []
    return [
        Figure(
            f"resets-{device}",
            times_plot(resets, x="parameters", y="ms"),
            f"Time of a reset against the number of parameters, one line per mode, float32 on the "
            f"{device_name(device)}",
            f"The reset alone on the {device_name(device)}, float32. A release makes one call per tensor and moves no "
            "bytes.",
        )
    ]
