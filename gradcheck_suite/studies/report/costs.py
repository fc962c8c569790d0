"""Sections on what a reset costs: time, memory, traffic, compiled steps, and which mode to choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.core.records import Record
from gradcheck_suite.core.text import counted
from gradcheck_suite.loops.laws import bytes_saved_by_releasing
from gradcheck_suite.loops.reset_modes import BENCHMARKED
from gradcheck_suite.page.content import MODES as CONTENT_MODES
from gradcheck_suite.page.content import (
    SETTING,
    Cell,
    Figure,
    Matrix,
    Section,
    Table,
    device_name,
    pooled,
    sources,
    step_times,
    summary,
)
from gradcheck_suite.studies.report.charts import peaks_plot, ratio_plot, times_plot, window_memory_plot
from gradcheck_suite.studies.report.verdicts import current, latest

# Resets slower than a copy of the same bytes, and why: the time of the filling itself, or overhead beyond it.


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


# The section on reset modes under `torch.compile` and in CUDA graphs.


TURNS = "step, experts by turns"
COMPILED_KEY, COMPILED_TITLE, COMPILED_TAB = "compiled", "Compiled steps and captured graphs", "cost"
COMPILED_COMMAND = "pytest properties/benchmarks/bench_compiled.py --bench-records reports"
NOT_CAPTURED = (
    f"No CUDA graph was captured. `{COMPILED_COMMAND} --bench-device cuda` captures them and records which reset "
    "leaves the right gradients after a replay."
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
        return Section(
            COMPILED_KEY,
            COMPILED_TITLE,
            COMPILED_TAB,
            missing=f"Nothing was compiled or captured yet: run `{COMPILED_COMMAND}`.",
        )
    rows = [r.data for r in latest(mine, lambda d: tuple(d.get(name) for name in COMPILED))]
    windows = [
        r.data for r in current(records) if r.data.get("measures") == "window" and r.data.get("dtype") == "float32"
    ]
    tables = (_compiled([row for row in rows if row["measures"] == "compiled"]), _captured(rows, windows))
    return Section(
        COMPILED_KEY,
        COMPILED_TITLE,
        COMPILED_TAB,
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


# The section on what releasing saves in a whole step, by size of model, micro-batch and window.


DECISION_KEY, DECISION_TITLE, DECISION_TAB = "decision", "When does releasing pay?", "cost"
DECISION_COMMAND = "pytest properties/benchmarks/bench_decision.py --bench-records reports"
DECISION_MIB = 2**20


def decision(records: Sequence[Record]) -> Section:
    """Return the section on the time of a step under either mode."""
    mine = current_steps(records)
    if not mine:
        return Section(
            DECISION_KEY,
            DECISION_TITLE,
            DECISION_TAB,
            missing=f"Steps have not been timed yet: run `{DECISION_COMMAND}`.",
        )
    rows = timed_steps(mine)
    devices = sorted({str(row["device"]) for row in rows})
    bandwidths = {
        r.data["device"]: r.data["bytes_per_second"] for r in current(records) if "bytes_per_second" in r.data
    }
    return Section(
        DECISION_KEY,
        DECISION_TITLE,
        DECISION_TAB,
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
        missing=None
        if "cuda" in devices
        else f"Not run on a GPU: `{DECISION_COMMAND} --bench-device cuda` adds its rows.",
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
                CONTENT_MODES[faster],
                float(row["bytes_between"]) / DECISION_MIB,
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


# The section on the memory that each reset mode needs.


MEMORY_KEY, MEMORY_TITLE, MEMORY_TAB = "memory", "What each reset mode costs in memory", "cost"
MEMORY_MIB = 2**20
TRACED = {"zero_": "zero_", "set_to_none": "None"}
"""The modes whose windows are drawn, and what the drawing calls them."""
_MEMORY_WHAT = ("device", "parameters", "layout", "dtype", "micro_batches", "mode")


def memory(records: Sequence[Record]) -> Section:
    """Return the table of peaks and of the bytes alive between steps."""
    command = "pytest properties/benchmarks/bench_memory_modes.py --bench-records reports"
    if not records:
        return Section(
            MEMORY_KEY, MEMORY_TITLE, MEMORY_TAB, missing=f"Memory has not been measured yet: run `{command}`."
        )
    records = current(records)
    rows = [r.data for r in latest(records, lambda d: tuple(d[name] for name in _MEMORY_WHAT))]
    lines = []
    for row in sorted(rows, key=lambda d: tuple(d[name] for name in _MEMORY_WHAT[:-1])):
        allocator = row.get("allocator") or {}
        bytes_ = (
            row["gradients_between"],
            row["peak"],
            row["resident_peak"],
            *(allocator.get(f"{kind}_peak") for kind in ("requested", "allocated", "reserved")),
        )
        mib = (None if value is None else value / MEMORY_MIB for value in bytes_)
        counts = (allocator.get(name) for name in ("allocations", "retries", "segments"))
        setting = (row["device"], row["parameters"], row["dtype"], row["micro_batches"], row["mode"])
        lines.append((*setting, *mib, *counts))
    return Section(
        MEMORY_KEY,
        MEMORY_TITLE,
        MEMORY_TAB,
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
    newest = {tuple(d[name] for name in _MEMORY_WHAT): d for d in traced}.values()
    settings: dict[tuple[int, int], dict[str, Mapping[str, Any]]] = {}
    for data in newest:
        settings.setdefault((int(data["parameters"]), -int(data["micro_batches"])), {})[str(data["mode"])] = data
    both = {setting: modes for setting, modes in settings.items() if len(modes) == len(TRACED)}
    if not both:
        return None
    setting = max(both)
    peaks = {mode: both[setting][mode]["peak"] / MEMORY_MIB for mode in TRACED}
    kept = {mode: both[setting][mode]["gradients_between"] / MEMORY_MIB for mode in TRACED}
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
            "MiB": row["peak"] / MEMORY_MIB,
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


# The ledger of communication: the collectives and bytes of each window, as predicted and as counted.


TRAFFIC_KEY, TRAFFIC_TITLE, TRAFFIC_TAB = "traffic", "What several ranks send to each other", "cost"
COLUMNS = ("wrapper", "reset mode", "ranks", "K", "collectives", "bytes", "of which", "collectives predicted",
           "bytes predicted", "as predicted")  # fmt: skip


def traffic(records: Sequence[Record]) -> Section | None:
    """Return the section on communication; None where nothing was counted."""
    if not records:
        return None
    newest = latest(records, lambda d: (d["loop"], d["ranks"], d["accumulation_steps"]))
    datas = [record.data for record in newest]
    agree = sum(as_predicted(data) for data in datas)
    text = (
        "Ranks are the processes that train together. A collective is one exchange between all of them, such as an "
        "all-reduce, which adds up gradients. A window has K micro-batches on each rank. A loop that communicates once "
        "per window takes as many collectives for K = 4 as for K = 1; under fully_shard (fsdp2) every micro-batch also "
        "gathers the parameters.",
        f"Counted on rank 0, on a model of five float64 parameters; {agree} of {len(datas)} windows take exactly the "
        "collectives and bytes that the wrapper's algorithm predicts.",
    )
    table = Table(
        "Collectives and bytes of each window, for each wrapper and reset mode",
        COLUMNS,
        tuple(_row(data) for data in datas),
        "Bytes are those that rank 0 gives to its collectives.",
    )
    return Section(
        TRAFFIC_KEY, TRAFFIC_TITLE, TRAFFIC_TAB, text, (_matrix(datas),), tables=(table,), sources=sources(newest)
    )


def total(kinds: Mapping[str, Any]) -> tuple[float, float]:
    """Return the number of collectives of all kinds, and their bytes."""
    return sum(float(number) for number, _ in kinds.values()), sum(float(size) for _, size in kinds.values())


def as_predicted(data: Mapping[str, Any]) -> bool:
    """Return whether a window takes exactly the collectives and bytes that its wrapper's law predicts."""
    counted, law = ({kind: tuple(both) for kind, both in data[which].items()} for which in ("observed", "predicted"))
    return bool(counted == law)


def _matrix(datas: Sequence[Mapping[str, Any]]) -> Matrix:
    """Return the collectives and bytes by wrapper and K; all reset modes of a wrapper are in one cell."""
    cells: dict[str, dict[tuple[int, int], list[Mapping[str, Any]]]] = {}
    for data in datas:
        wrapper, place = _parts(data)[0], (int(data["ranks"]), int(data["accumulation_steps"]))
        cells.setdefault(wrapper, {}).setdefault(place, []).append(data)
    places = sorted({place for row in cells.values() for place in row})
    return Matrix(
        "Collectives and bytes of a window, on every reset mode of the wrapper; green: exactly as predicted",
        "wrapper",
        tuple(f"{ranks} ranks, K = {k}" for ranks, k in places),
        tuple((name, tuple(_cell(row.get(place, ())) for place in places)) for name, row in cells.items()),
    )


def _cell(datas: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[str, ...]]:
    said = dict.fromkeys("{:g} collectives, {:g} bytes".format(*total(data["observed"])) for data in datas)
    if not said:
        return "none", ("not counted",)
    return "good" if all(map(as_predicted, datas)) else "bad", tuple(said)


def _parts(data: Mapping[str, Any]) -> tuple[str, str]:
    wrapper, _, mode = str(data["loop"]).partition("/")
    return wrapper, mode


def _row(data: Mapping[str, Any]) -> tuple[str | int | float, ...]:
    of = ", ".join(f"{number:g} {kind} ({size:g} bytes)" for kind, (number, size) in data["observed"].items())
    return (
        *_parts(data),
        int(data["ranks"]),
        int(data["accumulation_steps"]),
        *total(data["observed"]),
        of,
        *total(data["predicted"]),
        "yes" if as_predicted(data) else "no",
    )


# The section on the time that each reset mode takes: the modes side by side, predicted and measured.


COSTS_KEY, COSTS_TITLE, COSTS_TAB = "costs", "What each reset mode costs", "cost"
_COSTS_WHAT = ("measures", "mode", "dtype", "parameters", "layout", "micro_batches", "device")
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
    rows = [r.data for r in latest(timed, lambda d: tuple(d.get(name) for name in _COSTS_WHAT))]
    if not rows:
        return Section(
            COSTS_KEY,
            COSTS_TITLE,
            COSTS_TAB,
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
        COSTS_KEY,
        COSTS_TITLE,
        COSTS_TAB,
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
