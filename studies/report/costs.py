"""Sections on what a reset costs: time, memory, traffic, compiled steps, and which mode to choose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gradcheck_suite.core.records import Data, Record
from gradcheck_suite.core.text import counted
from gradcheck_suite.loops.jax_modes import JAX_MODES
from gradcheck_suite.page.content import Cell, Figure, Matrix, Section, Table, sources, table
from gradcheck_suite.page.reading import (
    Facts,
    Part,
    Tone,
    device_name,
    latest,
    matrix_of,
)
from studies.report import charts, faster
from studies.report.measurements import by_device, current
from studies.reset_laws import bytes_saved_by_releasing
from studies.reset_modes import BENCHMARKED

BENCHMARKS = "pytest studies/properties/benchmarks"
INTO = "--bench-records reports"
MIB = 2**20


def _median(row: Data) -> float:
    return float(row["seconds"]["median"])


def _milliseconds(row: Data | None) -> float | None:
    return None if row is None else 1000 * _median(row)


# The section on what releasing saves in a whole step, by size of model, micro-batch and window.


DECISION_COMMAND = f"{BENCHMARKS}/bench_decision.py {INTO}"


def _decision(measured: list[Record]) -> Section | None:
    mine = current(measured, ["step"])
    if not mine:
        return None
    rows = timed_steps(measured)
    devices = by_device(rows)
    bandwidths = {
        r.data["device"]: r.data["bytes_per_second"]
        for r in current(measured)
        if "bytes_per_second" in r.data
    }
    return Section(
        text=(
            (
                "Steps under the two modes alternate: forward and backward of each micro-batch, a"
                " step of AdamW, the reset. Every step starts with flushed caches. A measurement"
                " that other load disturbed is repeated."
            ),
            *(
                faster.summary(of_device, device_name(device))
                for device, of_device in devices.items()
            ),
            (
                "In every row, a release saves the memory of all gradients between steps. It lowers"
                " the peak only where the peak occurs before a backward has made all gradients"
                " again. Pages mapped per step show a cost on a CPU: the next backward maps anew"
                " the memory that a release gave back to the system."
            ),
        ),
        figures=ratio_figures(rows),
        tables=tuple(
            _saved(of_device, device, bandwidths.get(device))
            for device, of_device in devices.items()
        ),
        sources=sources(mine),
        missing=(
            None
            if "cuda" in devices
            else f"Not run on a GPU: `{DECISION_COMMAND} --bench-device cuda` adds its rows."
        ),
    )


def timed_steps(records: Iterable[Record]) -> list[Data]:
    """Return the times of steps of each setting, from the benchmark records of all runs on one
    machine.
    """
    rows = faster.pooled([record.data for record in current(records, ["step"])])
    return sorted(rows, key=lambda d: tuple(d[name] for name in faster.SETTING))


def ratio_figures(rows: Sequence[Data], height: int = 240) -> tuple[Figure, ...]:
    """Return one plot for each device: the time of a step under None over that under `zero_`,
    against the size.
    """
    return tuple(
        _ratio_figure(of_device, device, height) for device, of_device in by_device(rows).items()
    )


def _ratio_figure(rows: Sequence[Data], device: str, height: int) -> Figure:
    shown = [
        _ratio(row)
        for row in sorted(rows, key=lambda row: int(row["parameters"]))
        if not row.get("disturbed")
    ]
    bars = " and middle half (bar)" if any(row["low"] is not None for row in shown) else ""
    return Figure(
        f"ratio-{device}",
        charts.ratio_plot(shown, height),
        f"Time of a step under None over that under zero_ on the {device_name(device)}: "
        + "; ".join(
            f"{row['size']} parameters, {row['setting']}: {row['ratio']:.2f}" for row in shown
        ),
        f"Step time on the {device_name(device)}, None / zero_, in turn: median (point){bars} of"
        " each setting's pairs. A setting: items of a micro-batch, K micro-batches in a step."
        " Below 1 None is faster.",
    )


def _ratio(row: Data) -> dict[str, Any]:
    """Return a point of the plot: 1 less the saved share, as the saving is the median over pairs."""
    zero = float(row["zero"])
    fast, slow = row.get("saved_quartiles") or (None, None)
    parameters, size = int(row["parameters"]), str(row["parameters"])
    for unit, name in ((10**3, " k"), (10**6, " M"), (10**9, " B")):
        if parameters >= 0.95 * unit:
            size = f"{parameters / unit:.3g}{name}"
    return {
        "size": size,
        "setting": f"{counted(row['items'], 'item')}, K = {row['micro_batches']}",
        "ratio": 1 - float(row["saved"]) / zero,
        "low": None if slow is None else 1 - float(slow) / zero,
        "high": None if fast is None else 1 - float(fast) / zero,
    }


def _saved(rows: Sequence[Data], device: str, bandwidth: float | None) -> Table:
    found = faster.step_times(rows)
    return table(
        f"A whole step on the {device_name(device)}, float32: what set_to_none saves",
        [
            {
                "parameters": row["parameters"], "items": row["items"], "K": row["micro_batches"],
                "step under zero_, ms": 1000 * float(row["zero"]),
                "predicted, ms": bandwidth and 1000 * bytes_saved_by_releasing(row["bytes_between"]) / bandwidth,
                "saved, ms": 1000 * float(row["saved"]), "saved, %": 100 * float(row["saved"]) / float(row["zero"]),
                "faster in pairs": f"{row['faster']} of {row['pairs']}", "faster": faster.MODES[better],
                "saved between steps, MiB": float(row["bytes_between"]) / MIB,
                **{
                    f"pages mapped, {mode}": None if count is None else round(count)
                    for mode, count in zip(TRACED, row.get("faults") or (None, None), strict=True)
                },
            }
            for row, better in zip(found.rows, found.faster, strict=True)
        ],
        "Items are those of one micro-batch. K micro-batches make an update, so a small K is a high update frequency. "
        "A negative saving is a cost. Predicted: the bytes that zero_ moves beyond a release (four times the "
        "gradients' bytes) over the copy bandwidth that `bench_modes.py` measured.",
    )  # fmt: skip


DECISION = Part(
    "decision", "cost", "When does releasing pay?", "benchmark", _decision, None,
    f"Steps have not been timed yet: run `{DECISION_COMMAND}`.",
)  # fmt: skip


# The section on the memory that each reset mode needs.


WINDOW = ("device", "parameters", "layout", "dtype", "micro_batches", "mode")
"""What a row is about."""
TRACED = {"zero_": "zero_", "set_to_none": "None"}
"""The modes whose windows are drawn, and what the drawing calls them."""


def _memory(measured: list[Record]) -> Section:
    mine = current(measured)
    rows = [r.data for r in latest(mine, WINDOW)]

    lines = [
        {
            "device": row["device"], "parameters": row["parameters"], "dtype": row["dtype"], "K": row["micro_batches"],
            "mode": row["mode"], "gradients between steps": _mib(row["gradients_between"]),
            "peak by the ledger": _mib(row["peak"]), "resident peak": _mib(row["resident_peak"]),
            **{f"{kind} peak": _mib(cuda.get(f"{kind}_peak")) for kind in ("requested", "allocated", "reserved")},
            "allocations per window": cuda.get("allocations"), "retries": cuda.get("retries"),
            "segments": cuda.get("segments"),
        }
        for row in sorted(rows, key=lambda d: tuple(d[name] for name in WINDOW[:-1]))
        for cuda in (row.get("allocator") or {},)
    ]  # fmt: skip
    return Section(
        text=(
            (
                "Each row was measured in a process of its own. Between steps, zeroing keeps all"
                " gradients alive and releasing none. Whether that lowers the peak depends on when"
                " the peak occurs. With several micro-batches it occurs in a backward, when all"
                " gradients are alive in either mode."
            ),
        ),
        figures=tuple(filter(None, (window_figure(mine), _peaks(rows)))),
        tables=(
            table(
                "Memory of a training window, MiB",
                lines,
                "The ledger counts the bytes of live tensors, parameters included. The resident"
                " peak is the process's, beyond its resident size before the model was built."
                " CUDA's allocator reports the last six columns; its peaks are those above the"
                " context, the libraries' workspaces and the inputs.",
            ),
        ),
        sources=sources(mine),
    )


def _mib(count: float | None) -> float | None:
    return None if count is None else count / MIB


def window_figure(records: Iterable[Record], height: int = 200) -> Figure | None:
    """Return the plot of the bytes alive through one window, `zero_` beside None.

    None without their records. It shows the largest model with the fewest micro-batches, where the
    two modes differ most.
    """
    traced = latest(
        (r for r in records if r.data.get("window") and r.data["mode"] in TRACED), WINDOW
    )
    settings: dict[tuple[int, int], dict[str, Data]] = {}
    for data in (record.data for record in traced):
        modes = settings.setdefault((int(data["parameters"]), -int(data["micro_batches"])), {})
        modes[TRACED[data["mode"]]] = data
    both = {setting: modes for setting, modes in settings.items() if len(modes) == len(TRACED)}
    if not both:
        return None
    setting = max(both)
    shown = {name: both[setting][name] for name in TRACED.values()}
    said = "; ".join(
        f"{name}: peak {data['peak'] / MIB:.1f} MiB, gradients kept after it"
        f" {data['gradients_between'] / MIB:.1f} MiB"
        for name, data in shown.items()
    )
    return Figure(
        "window-memory",
        charts.window_memory_plot({name: data["window"] for name, data in shown.items()}, height),
        f"Bytes alive after each operation of one window. {said}",
        "Bytes of live tensors, counted by the suite's ledger after each operation of one window:"
        f" K = {-setting[1]} micro-batch{'es' * (setting[1] != -1)}, step and reset, {setting[0]:,}"
        f" parameters. {said}.",
    )


def _peaks(rows: Sequence[Data]) -> Figure | None:
    shown = [
        {
            "setting": f"{row['parameters'] / 1e6:.2g} M, K = {row['micro_batches']}",
            "mode": str(row["mode"]),
            "MiB": row["peak"] / MIB,
        }
        for row in sorted(
            rows, key=lambda row: (row["device"], row["parameters"], row["micro_batches"])
        )
        if row["dtype"] == "float32"
    ]
    return Figure(
        "memory-peaks",
        charts.peaks_plot(shown),
        "Peak memory of a window by the ledger: "
        + "; ".join(f"{row['setting']}, {row['mode']}: {row['MiB']:.1f} MiB" for row in shown),
        "Peak of a window by the ledger, parameters included. Models with float32 gradients, by number of parameters.",
    ) if shown else None  # fmt: skip


def _memory_facts(data: Data) -> Facts:
    names = ("mode", "device", "dtype", "parameters", "layout", "micro_batches")
    return {f"{' '.join(str(data[name]) for name in names)}: peak bytes": float(data["peak"])}


MEMORY = Part(
    "memory", "cost", "What each reset mode costs in memory", "memory", _memory, _memory_facts,
    f"Memory has not been measured yet: run `{BENCHMARKS}/bench_memory_modes.py {INTO}`.",
)  # fmt: skip


# The section on the time that each reset mode takes: the modes side by side, predicted and
# measured.


RELEASE = "set_to_none"
MODES = (*(mode.name for mode in BENCHMARKED), *JAX_MODES)
NO_GPU = (
    "There are no records of a CUDA device: nothing below was run on a GPU. On a machine with a"
    f" GPU, `{BENCHMARKS}/bench_modes.py --bench-device cuda {INTO}` makes them."
)
WANTED = 0.85
"""Share of the copy bandwidth that a reset of large gradients should reach."""
Setting = tuple[Any, ...]
"""Parameters, tensors, dtype and micro-batches."""


def _costs(measured: list[Record]) -> Section | None:
    timed = current(measured, ["reset", "backward", "window"])
    names = ("measures", "mode", "dtype", "parameters", "layout", "micro_batches", "device")
    rows = [r.data for r in latest(timed, names)]
    if not rows:
        return None
    steps, parts = by_device(timed_steps(measured)), by_device(_compiled_rows(measured))
    devices = by_device(rows)
    tables: list[Table] = []
    figures: list[Figure] = []
    for device, mine in devices.items():
        tables += [
            _windows(mine, device),
            _compiled_memory(mine, device),
            _resets(mine, device),
            slow_resets(mine, device),
            _device_times(mine, steps.get(device, ()), parts.get(device, ()), device),
        ]
        figures += _reset_figures(mine, device)
    return Section(
        text=(
            "Times are medians. A reset is timed on gradients of ones, with the caches flushed"
            " before every round. "
            + _releases(devices)
            + "A release sets each gradient to None, and the next backward allocates them again."
            " Compare modes by their windows: forward and backward of each micro-batch, and the"
            " reset.",
            (
                "The minimum time of a reset is the bytes that it must write over the bandwidth of"
                " a device copy in the same run. A release writes nothing, so it has no minimum."
            ),
        ),
        figures=tuple(figures),
        tables=tuple(table for table in tables if table.rows),
        sources=sources(timed),
        missing=None if "cuda" in devices else NO_GPU,
    )


def _releases(devices: dict[str, list[Data]]) -> str:
    """Return how long `set_to_none` alone takes, and in how many settings it is the fastest and the
    slowest reset.
    """
    times: list[float] = []
    fastest = slowest = 0
    for modes in (modes for rows in devices.values() for modes in _by_mode(rows, "reset").values()):
        if RELEASE in modes and len(modes) > 1:
            own, others = (
                _median(modes[RELEASE]),
                [_median(row) for name, row in modes.items() if name != RELEASE],
            )
            times.append(own)
            fastest += own < min(others)
            slowest += own > max(others)
    if not times:
        return ""
    return (
        f"{RELEASE} alone takes {1000 * min(times):.3g} to {1000 * max(times):.3g} ms; of"
        f" {len(times)} settings it is the fastest reset in {fastest} and the slowest in"
        f" {slowest}. "
    )


def _host_median(row: Data) -> float:
    """Return the median on the host's clock, on which torch and JAX compare."""
    return float(row["host"]["median"]) if row.get("host") else _median(row)


def _by_mode(rows: Sequence[Data], measures: str) -> dict[Setting, dict[str, Data]]:
    found: dict[Setting, dict[str, Data]] = {}
    for row in rows:
        if row["measures"] == measures:
            key = (row["parameters"], row["layout"], row["dtype"], row["micro_batches"])
            found.setdefault(key, {})[str(row["mode"])] = row
    return dict(
        sorted(found.items(), key=lambda item: (item[0][2], item[0][3], item[0][1], item[0][0]))
    )


def _windows(rows: Sequence[Data], device: str) -> Table:
    lines = [
        (*setting, *(1000 * _host_median(modes[mode]) if mode in modes else None for mode in MODES))
        for setting, modes in _by_mode(rows, "window").items()
    ]
    return Table(
        f"One window on the {device_name(device)}, ms",
        ("parameters", "tensors", "dtype", "K", *MODES),
        tuple(lines),
        "On the host's clock, until the device has finished. The modes were timed one after the"
        " other, so other load can exceed the difference between two of them; under 'When does"
        " releasing pay?' they alternate. The modes of JAX run the same window under `jit`:"
        " jax_scan_carry is one program, with the last gradients donated to it; the others call a"
        " program for each micro-batch, which waits for Python in between.",
    )


def _compiled_memory(rows: Sequence[Data], device: str) -> Table:
    """Return the bytes of a window in JAX by XLA's account, beside the ledger's peak of torch's two
    ways to reset.
    """
    modes = ("zero_", RELEASE, *JAX_MODES)

    def peak(row: Data | None) -> float | None:
        if row is None or not row.get("xla_memory_bytes"):
            return None if row is None or not row.get("memory") else _mib(row["memory"]["peak"])
        parts = row["xla_memory_bytes"]
        return _mib(parts["argument"] + parts["output"] - parts["alias"] + parts["temp"])

    lines = [
        (*setting, *(peak(found.get(mode)) for mode in modes))
        for setting, found in _by_mode(rows, "window").items()
        if any(peak(found.get(mode)) is not None for mode in JAX_MODES)
    ]
    return Table(
        f"Peak memory of one window on the {device_name(device)}, MiB",
        ("parameters", "tensors", "dtype", "K", *modes),
        tuple(lines),
        "torch: live tensors by the ledger, without the inputs. JAX: arguments, outputs that take"
        " no argument's buffer, and temporaries of the compiled program, by its"
        " `memory_analysis()`, with its inputs. Without a donated buffer, the old sum and the new"
        " one are alive together.",
    )


def _resets(rows: Sequence[Data], device: str) -> Table:
    return table(
        f"The reset alone on the {device_name(device)}",
        [
            {
                "parameters": row["parameters"], "tensors": row["layout"], "dtype": row["dtype"], "mode": row["mode"],
                "ms": 1000 * _median(row), "minimum, ms": 1000 * least if least else None,
                "share of copy bandwidth": least / _median(row) if least else None,
            }
            for modes in _by_mode(rows, "reset").values()
            for row in modes.values()
            for least in (float(row["predicted_bytes"]) / float(row["bytes_per_second"]),)
        ],
        "The flush does not empty every cache, so resets of small gradients can be faster than the minimum.",
    )  # fmt: skip


def slow_resets(rows: Sequence[Data], device: str) -> Table:
    """Return the table of resets below `WANTED`, each with its main cost and its most expensive
    operation.
    """
    lines: list[dict[str, Cell]] = []
    slow = []
    for row in rows:
        if (
            row["measures"] != "reset"
            or not row["predicted_bytes"]
            or not row.get("filled_per_second")
        ):
            continue
        seconds, size = _median(row), float(row["predicted_bytes"])
        filling, share = (
            size / float(row["filled_per_second"]),
            size / float(row["bytes_per_second"]) / seconds,
        )
        if share >= WANTED:
            continue
        operations = row.get("profile") or []
        calls = max((int(entry["calls"]) for entry in operations), default=1)
        dear = (
            f"{e['name']} x{e['calls']}, {e['host_us'] + e['device_us']:.0f} us" for e in operations
        )
        slow.append(row)
        lines.append({
            "parameters": row["parameters"], "tensors": row["layout"], "dtype": row["dtype"], "mode": row["mode"],
            "share of copy": share, "share of one large zero_": filling / seconds, "calls": calls,
            "us per call beyond filling": 1e6 * max(0.0, seconds - filling) / calls,
            "main cost": "filling" if filling >= seconds / 2 else "overhead",
            "most expensive operation (warm caches)": next(dear, ""),
        })  # fmt: skip
    return table(
        f"Resets below {WANTED:.0%} of copy bandwidth on the {device_name(device)}, and why",
        lines,
        (
            "Main cost: filling, where one large zero_ of as many bytes takes half of the time or"
            f" more; otherwise overhead, which is all time beyond that. {_speeds(slow)}"
            if slow
            else ""
        ),
    )


def _speeds(rows: Sequence[Data]) -> str:
    """Return the speeds of a copy, of one large `zero_` and of memset in the runs of some rows."""

    def speed(name: str) -> str:
        found = sorted(
            {f"{float(row[name]) / 1e9:.1f}" for row in rows if row.get(name)}, key=float
        )
        return f"{found[0]} GB/s" if len(found) == 1 else f"{found[0]} to {found[-1]} GB/s"

    text = (
        f"In these runs a copy read and wrote {speed('bytes_per_second')} together, and one zero_"
        f" of a tensor far larger than the caches wrote {speed('filled_per_second')}"
    )
    if any(row.get("memset_per_second") for row in rows):
        text += f"; the C library's memset, on one thread, wrote {speed('memset_per_second')}"
    return text + "."


def _device_times(
    rows: Sequence[Data], steps: Sequence[Data], parts: Sequence[Data], device: str
) -> Table:
    """Return the table of the three times of whatever a GPU was timed with, and of the kernels that
    were launched.
    """
    lines: list[tuple[Cell, ...]] = []

    def add(
        row: Data, what: str, mode: str, times: Iterable[float | None], kernels: int | None
    ) -> None:
        about = (
            what,
            int(row["parameters"]),
            str(row["layout"]),
            str(row["dtype"]),
            int(row["micro_batches"]),
            mode,
        )
        lines.append(
            (
                *about,
                str(row["regime"]),
                *(t if t is None else 1000 * float(t) for t in times),
                kernels,
            )
        )

    def add_window(row: Data) -> None:
        if row.get("host") and row["device"] != "cpu":
            times = (_host_median(row), _median(row), row.get("busy_seconds"))
            add(row, _what(row), str(row["mode"]), times, row.get("kernels"))

    for row in rows:
        add_window(row)
    for row in steps:
        each = zip(
            row.get("host") or (), (row["zero"], row["none"]), row.get("busy") or (), strict=False
        )
        for mode, times in zip(("zero_", "set_to_none"), each, strict=False):
            add(row, f"step, {counted(row['items'], 'item')}", mode, times, None)
    for row in parts:
        add_window(row)
    return Table(
        f"Host, device and kernels on the {device_name(device)}",
        ("what", "parameters", "tensors", "dtype", "K", "mode", "gradients", "host, ms", "device, ms", "kernels, ms",
         "kernels"),
        tuple(lines),
        "Host: until the device has finished. Device: between two events on its stream, the gaps while it waits for "
        "the host included; JAX has no events, so that both are the host's time. Kernels: the time in which some "
        "kernel ran, by the profiler; a captured window is not profiled.",
    )  # fmt: skip


def _what(row: Data) -> str:
    """Return what a row timed: for a window of which a part is compiled or captured, with that
    part.
    """
    if row["measures"] == "captured":
        return f"captured window, reset {row['place']}"
    if row["measures"] == "compiled":
        return f"window with its step, {'compiled' if row['compiled'] else 'eager'} {row['part']}"
    return str(row["measures"])


def _reset_figures(rows: Sequence[Data], device: str) -> list[Figure]:
    resets = [
        {
            "mode": mode,
            "layout": f"{layout} tensors",
            "x": int(parameters),
            "y": 1000 * _median(row),
        }
        for (parameters, layout, dtype, _), modes in _by_mode(rows, "reset").items()
        if dtype == "float32"
        for mode, row in modes.items()
    ]
    name = device_name(device)
    figure = Figure(
        f"resets-{device}",
        charts.times_plot(resets, x="parameters", y="ms"),
        "Time of a reset against the number of parameters, one line per mode, float32 on the"
        f" {name}",
        f"The reset alone on the {name}, float32. A release makes one call per tensor and moves no"
        " bytes.",
    )
    return [figure] if resets else []


def _benchmark_facts(data: Data) -> Facts:
    names = ("measures", "mode", "device", "dtype", "parameters", "layout", "items", "micro_batches", "part",
             "compiled")  # fmt: skip
    what = " ".join(
        f"{n} {data[n]}" if n in names[4:] else str(data[n])
        for n in names
        if data.get(n) is not None
    )
    if data.get("measures") == "step":
        return {
            f"{what}: saved by None, share of the step": float(data["saved"]) / float(data["zero"])
        }
    return {f"{what}: seconds": _median(data)} if isinstance(data.get("seconds"), dict) else {}


COSTS = Part(
    "costs", "cost", "What each reset mode costs", "benchmark", _costs, _benchmark_facts,
    f"Nothing has been measured yet: run `{BENCHMARKS}/bench_modes.py {INTO}`.",
)  # fmt: skip


# The section on reset modes under `torch.compile` and in CUDA graphs.


TURNS = "step, experts by turns"
COMPILED_COMMAND = f"{BENCHMARKS}/bench_compiled.py {INTO}"
NOT_CAPTURED = (
    f"No CUDA graph was captured. `{COMPILED_COMMAND} --bench-device cuda` captures them and"
    " records which reset leaves the right gradients after a replay."
)
CAPTURED = (
    "A CUDA graph replays kernels, not Python. A reset that consists of kernels may run inside the"
    " graph or between replays. A release between replays takes from the parameters the tensors"
    " that the graph writes to, and the optimizer finds None."
)


def _compiled_rows(measured: Iterable[Record]) -> list[Data]:
    names = ("device", "measures", "part", "compiled", "place", "micro_batches", "mode")
    return [r.data for r in latest(current(measured, ["compiled", "captured"]), names)]


def _compiled(measured: list[Record]) -> Section | None:
    rows = _compiled_rows(measured)
    if not rows:
        return None
    windows = [r.data for r in current(measured) if r.data.get("measures") == "window"]
    captured = _captured([row for row in rows if row["measures"] == "captured"], windows)
    graphs = _graphs([row for row in rows if row["measures"] == "compiled"])
    return Section(
        text=(
            (
                "`torch.compile` makes a version of a function for every set of gradients that are"
                " None. Where each window reaches other parameters, such as experts by turns, a"
                " release makes another set every time: `torch.compile` then compiles the optimizer"
                " step again for each set, up to the limit of 8 versions, and runs it eagerly from"
                " then on. Gradients that are allocated once and zeroed need one version. A"
                " compiled backward needs two versions under a release, one that makes the"
                " gradients and one that adds to them. A compiled forward does not depend on them."
            ),
            *_turns(rows),
            *((CAPTURED,) if captured.rows else ()),
        ),
        tables=tuple(table for table in (graphs, captured) if table.rows),
        sources=sources(current(measured, ["compiled", "captured"])),
        missing=None if captured.rows else NOT_CAPTURED,
    )


def _turns(rows: Sequence[Data]) -> list[str]:
    """Return what the recompilation of the step did to its time, where each window reaches other
    parameters.
    """
    mine = [r for r in rows if r["measures"] == "compiled" and r["part"] == TURNS and r["compiled"]]
    found = []
    for device, of_device in by_device(mine).items():
        modes = {
            str(row["mode"]): f"{_milliseconds(row):.3g} ms ({counted(row['graphs'], 'graph')})"
            for row in of_device
        }
        if {RELEASE, "zero_"} <= modes.keys():
            found.append(
                f"With experts by turns on the {device_name(device)}, a window with its compiled"
                f" step takes {modes[RELEASE]} under set_to_none and {modes['zero_']} under zero_."
                " After a release the optimizer skips the parameters that the window does not use;"
                " after zeroing it steps on them all."
            )
    return found


def _graphs(rows: Sequence[Data]) -> Table:
    settings: dict[tuple[str, ...], dict[bool, Data]] = {}
    for row in rows:
        key = tuple(str(row[name]) for name in ("device", "part", "mode"))
        settings.setdefault(key, {})[bool(row["compiled"])] = row
    return Table(
        "Graphs compiled, and time of a window with its step",
        ("device", "compiled", "mode", "graphs", "eager, ms", "compiled, ms"),
        tuple(
            (
                *key,
                int(pair[True]["graphs"]) if True in pair else None,
                *map(_milliseconds, map(pair.get, (False, True))),
            )
            for key, pair in settings.items()
        ),
        "Graphs are counted after 24 windows, when all compilation is done. In modes that keep"
        " gradients, they exist before the first window. Eager and compiled windows were timed one"
        " after the other, so other load can exceed their difference.",
    )


def _captured(rows: Sequence[Data], windows: Sequence[Data]) -> Table:
    names = ("device", "mode", "parameters", "layout", "micro_batches")
    lines = []
    for row in rows:
        alike = (
            w
            for w in reversed(windows)
            if w.get("dtype") == "float32" and all(w[n] == row[n] for n in names)
        )
        lines.append({
            "K": row["micro_batches"], "mode": row["mode"], "reset": row["place"],
            "gradients after a replay": row["finding"], "replay, ms": _milliseconds(row),
            "eager window, ms": _milliseconds(next(alike, None)),
        })  # fmt: skip
    return table("A window as a CUDA graph", lines)


COMPILED = Part(
    "compiled", "cost", "Compiled steps and captured graphs", "benchmark", _compiled, None,
    f"Nothing was compiled or captured yet: run `{COMPILED_COMMAND}`.",
)  # fmt: skip


# The ledger of communication: the collectives and bytes of each window, as predicted and as
# counted.


def _traffic(newest: list[Record]) -> Section:
    datas = [record.data for record in newest]
    agree = sum(as_predicted(data) for data in datas)
    return Section(
        text=(
            "Ranks are the processes that train together. A collective is one exchange between all of them, such as an "
            "all-reduce, which adds up gradients. A window has K micro-batches on each rank. A loop that communicates "
            "once per window takes as many collectives for K = 4 as for K = 1; under fully_shard (fsdp2) every "
            "micro-batch also gathers the parameters.",
            f"Counted on rank 0, on a model of five float64 parameters; {agree} of {len(datas)} windows take exactly "
            "the collectives and bytes that the wrapper's algorithm predicts.",
        ),
        matrices=(_traffic_matrix(datas),),
        tables=(
            table(
                "Collectives and bytes of each window, for each wrapper and reset mode",
                [
                    {
                        "wrapper": _wrapper(d), "reset mode": str(d["loop"]).partition("/")[2], "ranks": d["ranks"],
                        "K": d["accumulation_steps"], "collectives": total(d["observed"])[0],
                        "bytes": total(d["observed"])[1],
                        "of which": ", ".join(f"{n:g} {k} ({b:g} bytes)" for k, (n, b) in d["observed"].items()),
                        "collectives predicted": total(d["predicted"])[0], "bytes predicted": total(d["predicted"])[1],
                        "as predicted": "yes" if as_predicted(d) else "no",
                    }
                    for d in datas
                ],
                "Bytes are those that rank 0 gives to its collectives.",
            ),
        ),
    )  # fmt: skip


def total(kinds: Data) -> tuple[float, float]:
    """Return the number of collectives of all kinds, and their bytes."""
    return sum(float(number) for number, _ in kinds.values()), sum(
        float(size) for _, size in kinds.values()
    )


def as_predicted(data: Data) -> bool:
    """Return whether a window takes exactly the collectives and bytes that its wrapper's law
    predicts.
    """
    observed, law = (
        {kind: tuple(both) for kind, both in data[which].items()}
        for which in ("observed", "predicted")
    )
    return bool(observed == law)


def _wrapper(data: Data) -> str:
    return str(data["loop"]).partition("/")[0]


def _traffic_matrix(datas: Sequence[Data]) -> Matrix:
    """Return the collectives and bytes by wrapper and K.

    All reset modes of a wrapper are in one cell.
    """
    cells: dict[str, dict[tuple[int, int], list[Data]]] = {}
    for data in datas:
        place = (int(data["ranks"]), int(data["accumulation_steps"]))
        cells.setdefault(_wrapper(data), {}).setdefault(place, []).append(data)

    def cell(windows: list[Data] | None) -> Tone:
        said = dict.fromkeys(
            "{:g} collectives, {:g} bytes".format(*total(d["observed"])) for d in windows or ()
        )
        if not windows:
            return "none", ("not counted",)
        return "good" if all(map(as_predicted, windows)) else "bad", tuple(said)

    return matrix_of(
        "Collectives and bytes of a window, on every reset mode of the wrapper; green: exactly as"
        " predicted",
        "wrapper",
        {
            (n, k): f"{n} ranks, K = {k}"
            for n, k in sorted({place for row in cells.values() for place in row})
        },
        cells,
        cell,
    )


def _traffic_facts(data: Data) -> Facts:
    what = f"{data['loop']} on {data['ranks']} ranks, K = {data['accumulation_steps']}"
    return {what: "{:g} collectives of {:g} bytes".format(*total(data["observed"]))}


TRAFFIC = Part(
    "traffic", "cost", "What several ranks send to each other", "traffic", _traffic, _traffic_facts
)
