"""The time of a step: clocks, bandwidth, launches, and steps measured in pairs."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from studies.reset_modes import RESET_MODES
from studies.workload import Size, sized_workload


class DeviceStamp:
    """A CUDA event on the current stream.

    The difference of two is the device's time between them, in seconds. So it is a `timer` that
    pytest-benchmark accepts without patching: its results subtract to seconds.
    """

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, earlier: DeviceStamp) -> float:
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1000  # milliseconds to seconds


def settle(device: str) -> None:
    """Wait until the device has finished all work queued so far; nothing to wait for on a CPU.

    A round is timed right only if the queue is empty when it starts. Otherwise the host's clock
    also counts what was queued before the round, such as the flush of the caches, and the device
    hides the time that the host needs to launch kernels behind that earlier work. See
    https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution
    """
    if device == "cuda":
        torch.cuda.synchronize()


def timer(device: str, clock: str = "device") -> Callable[[], Any]:
    """Return the timer for a device.

    Args:
        device: `"cpu"` or `"cuda"`.
        clock: `"device"` for CUDA events, `"host"` for the host's clock after the device has
            finished. On the CPU both are the host's clock.
    """
    if device == "cpu":
        return time.perf_counter
    return DeviceStamp if clock == "device" else _host_seconds_after_device


def _host_seconds_after_device() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


@dataclass(frozen=True)
class Timing:
    """Quartiles of one duration over several rounds, in seconds."""

    q1: float
    median: float
    q3: float


def quartiles(seconds: Sequence[float]) -> Timing:
    """Return the quartiles of some durations, interpolated linearly between the ordered values."""
    return Timing(*(float(q) for q in np.percentile(seconds, (25, 50, 75))))


def timed(
    run: Callable[[], Any],
    setup: Callable[[], Any],
    rounds: int,
    device: str,
    clock: str = "device",
) -> list[float]:
    """Return the seconds that `run` takes in each round, on one clock.

    Args:
        run: what is timed.
        setup: called before each round and not timed; the device finishes it before the round
            starts.
        rounds: number of rounds.
        device: `"cpu"` or `"cuda"`.
        clock: as for `timer`.
    """
    stamp = timer(device, clock)
    seconds = []
    for _ in range(rounds):
        setup()
        settle(device)
        start = stamp()
        run()
        seconds.append(stamp() - start)
    return seconds


COPY_BYTES = {"cpu": 2**28, "cuda": 2**31}
"""Bytes of one copy, far beyond every cache."""
REPEATS = 7


def copy_bandwidth(device: str, timer: Callable[[], Any]) -> float:
    """Return bytes per second, read and written, of a device-to-device copy: the median of several."""
    elements = COPY_BYTES[device] // 4
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES[device] / median_seconds(lambda: target.copy_(source), timer)


def fill_bandwidth(device: str, timer: Callable[[], Any]) -> float:
    """Return bytes per second that `zero_` of one large tensor writes: the median of several."""
    target = torch.ones(COPY_BYTES[device] // 4, device=device)
    return COPY_BYTES[device] / median_seconds(target.zero_, timer)


def memset_bandwidth() -> float:
    """Return bytes per second that the C library's `memset` writes, on one thread of the CPU."""
    target = torch.ones(COPY_BYTES["cpu"] // 4)
    return COPY_BYTES["cpu"] / median_seconds(
        lambda: ctypes.memset(target.data_ptr(), 0, COPY_BYTES["cpu"]), time.perf_counter
    )


def median_seconds(run: Callable[[], Any], timer: Callable[[], Any]) -> float:
    """Return the median of several times of one call, after two that are not timed."""
    seconds = []
    for _ in range(REPEATS + 2):
        start = timer()
        run()
        seconds.append(timer() - start)
    return median(seconds[2:])


def flush(device: str) -> Callable[[], None]:
    """Return a function that evicts everything else from the caches and waits until the device is
    idle.
    """
    scratch = torch.zeros(COPY_BYTES[device] // 8, device=device)

    def run() -> None:
        scratch.add_(1)
        settle(device)

    return run


ALLOCATOR_VARIABLES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@cache
def device_info(device: str) -> dict[str, Any]:
    """Return what identifies a device, as JSON-ready data.

    Args:
        device: `"cpu"` or `"cuda"`.
    """
    info: dict[str, Any] = {
        "device": device,
        "last_level_cache_bytes": cache_bytes(device),
        "torch_threads": torch.get_num_threads(),
    }
    if device == "cpu":
        return {**info, "vector_instructions": torch.backends.cpu.get_cpu_capability()}
    found = torch.cuda.get_device_properties(0)
    return {
        **info,
        "gpu": found.name,
        "compute_capability": f"{found.major}.{found.minor}",
        "gpu_memory_bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "allocator": torch.cuda.memory.get_allocator_backend(),
        "allocator_settings": {
            name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ
        },
    }


def cache_bytes(device: str) -> int | None:
    """Return the bytes of the last cache before memory (L2 of a GPU), None where the system does
    not tell.
    """
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).L2_cache_size)
    sizes = []
    for path in _CACHES.glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else int(text))
    return max(sizes, default=None)


def regime(gradient_bytes: int, cache_size: int | None) -> str:
    """Return where gradients of some bytes fit: `"in cache"`, `"out of cache"`, or `"unknown"`.

    Gradients that fit the cache are reset at the cache's bandwidth unless it is flushed, larger
    ones at the memory's.
    """
    if cache_size is None:
        return "unknown"
    return "in cache" if gradient_bytes <= cache_size else "out of cache"


def _driver() -> str:
    """Return the NVIDIA driver's version, or why it is unknown."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return done.stdout.strip()


CHUNK = 65536
"""Elements of a tensor that one block of a `torch._foreach_*` call handles.

Source: https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/MultiTensorApply.cuh"""


@dataclass(frozen=True)
class LaunchLimits:
    """The most tensors and blocks of one launch, for a call on one list of tensors."""

    tensors: int
    blocks: int


SMALL, LARGE = LaunchLimits(110, 320), LaunchLimits(770, 2240)
"""The limits of kernels with 4 KB of arguments, and of those with 32 KB, which some versions of torch use."""


INDEXED = 2**31 - 1
"""The largest byte offset in a tensor that one kernel over its elements handles."""


def fill_launches(elements: int, itemsize: int) -> int:
    """Return how many kernels fill one contiguous tensor, which is halved until byte offsets fit 32
    bits.

    Source: `gpu_kernel` in
    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/Loops.cuh and
    `can_use_32bit_indexing` in
    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/TensorIterator.cpp

    Args:
        elements: number of elements.
        itemsize: bytes of an element.
    """
    if not elements:
        return 0
    if 1 + (elements - 1) * itemsize <= INDEXED:
        return 1
    return fill_launches(elements // 2, itemsize) + fill_launches(
        elements - elements // 2, itemsize
    )


def foreach_launches(elements: Iterable[int], limits: LaunchLimits = SMALL) -> int:
    """Return how many kernels one call launches.

    Args:
        elements: number of elements of each tensor, in the call's order.
        limits: of one launch.
    """
    launches = tensors = blocks = 0
    for count in elements:
        if not count:
            continue
        chunks = -(-count // CHUNK)
        tensors += 1
        while chunks:
            taken = min(chunks, limits.blocks - blocks)
            blocks, chunks = blocks + taken, chunks - taken
            if blocks == limits.blocks or (tensors == limits.tensors and not chunks):
                launches += 1
                # a tensor that is not finished goes into the next launch
                blocks, tensors = (0, 1 if chunks else 0)
    return launches + (blocks > 0)


MAX_ENTRIES = 4
_NO_OPERATION = re.compile(r"cu(da)?[A-Z]\w*|([A-Z]\w+ )+[A-Z]\w+")
"""Names of calls to CUDA's libraries, such as the wait at the end (`cudaDeviceSynchronize`), and of what the profiler
itself costs (`Activity Buffer Request`)."""


@dataclass(frozen=True)
class Profile:
    """One profiled run.

    Attributes:
        operations: torch's operations with the most self time: name, calls, microseconds on the
            host and on the device.
        kernels: kernels, copies and memsets that the device ran; None on a CPU.
        busy: seconds in which the device ran them, the gaps between them left out; None on a CPU.
    """

    operations: list[dict[str, Any]]
    kernels: int | None = None
    busy: float | None = None


def profiled(run: Callable[[], Any], device: str) -> Profile:
    """Run once under the profiler, which slows the run down: time it before, not meanwhile.

    Args:
        run: the function to profile.
        device: `"cpu"` or `"cuda"`.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities, acc_events=True) as found:
        run()
        if device == "cuda":
            torch.cuda.synchronize()
    return Profile(
        operations(found.key_averages()), *(device_work(found.events()) if device == "cuda" else ())
    )


def operations(averages: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the operations with the most self time, from the profiler's averages by name.

    A kernel has an entry of its own, which repeats the device's time of its operation, and does not
    count.
    """
    entries = [
        {
            "name": event.key,
            "calls": int(event.count),
            "host_us": round(float(event.self_cpu_time_total), 1),
            "device_us": round(float(event.self_device_time_total), 1),
        }
        for event in averages
        if event.device_type == DeviceType.CPU and not _NO_OPERATION.fullmatch(event.key)
    ]
    entries.sort(key=lambda entry: entry["host_us"] + entry["device_us"], reverse=True)
    return entries[:MAX_ENTRIES]


def device_work(events: Any) -> tuple[int, float]:
    """Return how many of the profiler's events ran on the device, and the seconds that they cover
    together.

    An operation's own event is the host's and repeats its kernels' time, so it does not count.
    Kernels that overlap, on several streams, count once.
    """
    spans = sorted(
        (float(e.time_range.start), float(e.time_range.end))
        for e in events
        if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)
    )
    busy, until = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return len(spans), busy / 1e6  # microseconds to seconds


try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

PARAMETERS = {"cpu": (10**5, 10**6, 10**7), "cuda": (10**5, 10**6, 10**7, 10**8, 10**9)}
ITEMS, MICRO_BATCHES = (1, 64), (1, 8)
"""The settings that are measured: numbers of parameters, items of a micro-batch, micro-batches of a step."""
PAIRS = 21
WARM = 3
"""Pairs of steps that run before the first timed pair."""
ATTEMPTS = 4
"""Measurements of one setting before it is marked as disturbed."""
WAITING = 0.1
"""Share of a step's time on the host's clock that the process may spend waiting for a processor. A process that has the
machine to itself waits next to nothing."""
SPREAD = 0.5
"""Interquartile range of the paired differences, in medians of a step, above which the differences have no centre."""
ZERO, NONE = "zero_", "set_to_none"


@dataclass(frozen=True)
class PairedSteps:
    """Times of steps under `zero_` and under `set_to_none`, in pairs.

    Attributes:
        parameters: number of parameters of the model.
        items: number of items in a micro-batch.
        micro_batches: number of micro-batches between two updates.
        zero: median seconds of a step under `zero_`.
        none: median seconds of a step under `set_to_none`.
        saved: median over the pairs of the seconds that releasing saves; negative where it costs
            time.
        saved_quartiles: first and third quartile of the same differences.
        faster: number of pairs in which releasing was faster.
        pairs: number of pairs whose two steps took different times; the others say nothing.
        bytes_between: bytes of gradients that `zero_` keeps between steps and a release does not.
        faults: pages that the system mapped per step, under `zero_` and under `set_to_none`; None
            where unknown. Memory that a release gives back to the system is mapped anew by the next
            backward.
        host: median seconds of a step on the host's clock, under `zero_` and under `set_to_none`.
        busy: seconds of one more step in which kernels ran, likewise; None on a CPU.
        attempts: measurements taken; all but the last were disturbed by other load.
        disturbed: what shows that the last was disturbed too, and that these figures mean nothing;
            None otherwise.
    """

    parameters: int
    items: int
    micro_batches: int
    zero: float
    none: float
    saved: float
    saved_quartiles: tuple[float, float]
    faster: int
    pairs: int
    bytes_between: int
    faults: tuple[float, float] | None = None
    host: tuple[float, float] | None = None
    busy: tuple[float | None, float | None] | None = None
    attempts: int = 1
    disturbed: str | None = None

    def to_row(self, size: Size, device: str) -> dict[str, Any]:
        """Return the figures as the data of a benchmark record, which `report.faster` reads."""
        return {
            **asdict(self),
            "measures": "step",
            "mode": "zero_ and set_to_none in turn",
            "dtype": "float32",
            "layout": size.layout,
            "tensors": size.tensors,
            "device": device,
            "regime": regime(self.bytes_between, cache_bytes(device)),
        }


def time_paired_steps(
    size: Size, items: int, micro_batches: int, *, pairs: int, device: str = "cpu"
) -> PairedSteps:
    """Time steps of AdamW under both modes in turn; repeat while other load disturbs them.

    The two modes alternate step by step, so that other load on the machine slows both alike. Every
    step starts with flushed caches on an idle device.

    Args:
        size: size of the model, whose weights are float32.
        items: number of items in a micro-batch.
        micro_batches: number of micro-batches between two updates.
        pairs: number of pairs of steps to time, after `WARM` pairs that are not timed.
        device: `"cpu"` or `"cuda"`.
    """
    steps = {
        name: (
            sized_workload(RESET_MODES[name], size, micro_batches, device=device, items=items).step
        )
        for name in (ZERO, NONE)
    }
    attempts = 0
    while True:
        attempts += 1
        times = _in_turn(steps, pairs, device)
        zeros, nones = times[ZERO], times[NONE]
        saved = [a.seconds - b.seconds for a, b in zip(zeros, nones, strict=True)]
        disturbed = disturbance(zeros + nones, saved, device)
        if disturbed is None or attempts == ATTEMPTS:
            break
    spread = quartiles(saved)
    return PairedSteps(
        parameters=size.total,
        items=items,
        micro_batches=micro_batches,
        zero=median(t.seconds for t in zeros),
        none=median(t.seconds for t in nones),
        saved=spread.median,
        saved_quartiles=(spread.q1, spread.q3),
        faster=sum(s > 0 for s in saved),
        pairs=sum(s != 0 for s in saved),
        bytes_between=size.bytes(torch.float32),
        faults=(
            None
            if resource is None
            else (fmean(t.faults for t in zeros), fmean(t.faults for t in nones))
        ),
        host=(median(t.host for t in zeros), median(t.host for t in nones)),
        busy=(
            None
            if device == "cpu"
            else (profiled(steps[ZERO], device).busy, profiled(steps[NONE], device).busy)
        ),
        attempts=attempts,
        disturbed=disturbed,
    )


@dataclass(frozen=True)
class StepTime:
    """One step.

    Attributes:
        seconds: on the device's clock.
        host: seconds on the host's clock, from the start until the device has finished.
        processor: seconds of processor time that the process used meanwhile, all threads together.
        faults: pages that the system mapped.
    """

    seconds: float
    host: float
    processor: float
    faults: int = 0


def disturbance(steps: list[StepTime], saved: list[float], device: str = "cpu") -> str | None:
    """Return what shows that other load disturbed a measurement, or None.

    Args:
        steps: all steps.
        saved: the differences between the two steps of each pair, in seconds.
        device: `"cpu"` or `"cuda"`. Whether a process that waits for a GPU uses a processor depends
            on the driver.
    """
    waiting = median(1 - min(1.0, t.processor / t.host) if t.host else 0.0 for t in steps)
    if device == "cpu" and waiting > WAITING:
        return f"the process waited for a processor in {waiting:.0%} of a step's time"
    spread, step = quartiles(saved), median(t.seconds for t in steps)
    if spread.q3 - spread.q1 > SPREAD * step:
        return (
            f"the middle half of the paired differences spans {(spread.q3 - spread.q1) / step:.0%}"
            " of a step"
        )
    return None


def _in_turn(
    steps: dict[str, Callable[[], None]], pairs: int, device: str
) -> dict[str, list[StepTime]]:
    """Return the timed steps of each mode."""
    clock, flush_caches = timer(device), flush(device)
    found: dict[str, list[StepTime]] = {name: [] for name in steps}
    turns = list(steps)
    for _ in range(WARM + pairs):
        for name in turns:
            flush_caches()
            faults, host, processor, start = (
                _page_faults(),
                time.perf_counter(),
                time.process_time(),
                clock(),
            )
            steps[name]()
            seconds = clock() - start
            settle(device)
            found[name].append(
                StepTime(
                    seconds,
                    time.perf_counter() - host,
                    time.process_time() - processor,
                    _page_faults() - faults,
                )
            )
        turns.reverse()  # a step finds what the step before it left in the allocator
    return {name: times[WARM:] for name, times in found.items()}


def _page_faults() -> int:
    """Return the number of pages that the system has mapped for this process without reading a
    disk; 0 if unknown.
    """
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_minflt
