"""Whole training steps under `zero_` and under `set_to_none`, timed in turn.

The two modes alternate step by step, so that other load on the machine slows both alike. A measurement that other load
disturbed all the same is noticed and repeated. As for windows, every step starts with flushed caches on an idle device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import torch

from gradcheck_suite.loops.modes import RESET_MODES
from gradcheck_suite.measure.bandwidth import flush
from gradcheck_suite.measure.clock import quartiles, settle, timer
from gradcheck_suite.measure.machine import cache_bytes, regime
from gradcheck_suite.measure.profile import profiled
from gradcheck_suite.measure.workload import Size, sized_workload

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
        saved: median over the pairs of the seconds that releasing saves; negative where it costs time.
        saved_quartiles: first and third quartile of the same differences.
        faster: number of pairs in which releasing was faster.
        pairs: number of pairs whose two steps took different times; the others say nothing.
        bytes_between: bytes of gradients that `zero_` keeps between steps and a release does not.
        faults: pages that the system mapped per step, under `zero_` and under `set_to_none`; None where unknown. Memory
            that a release gives back to the system is mapped anew by the next backward.
        host: median seconds of a step on the host's clock, under `zero_` and under `set_to_none`.
        busy: seconds of one more step in which kernels ran, likewise; None on a CPU.
        attempts: measurements taken; all but the last were disturbed by other load.
        disturbed: what shows that the last was disturbed too, and that these figures mean nothing; None otherwise.
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
        """Return the figures as the data of a benchmark record, which `records.step_times` reads."""
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


def time_paired_steps(size: Size, items: int, micro_batches: int, *, pairs: int, device: str = "cpu") -> PairedSteps:
    """Time steps of AdamW under both modes in turn; repeat while other load disturbs them.

    Args:
        size: size of the model, whose weights are float32.
        items: number of items in a micro-batch.
        micro_batches: number of micro-batches between two updates.
        pairs: number of pairs of steps to time, after `WARM` pairs that are not timed.
        device: `"cpu"` or `"cuda"`.
    """
    steps = {
        name: sized_workload(RESET_MODES[name], size, micro_batches, device=device, items=items).step
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
        faults=None if resource is None else (fmean(t.faults for t in zeros), fmean(t.faults for t in nones)),
        host=(median(t.host for t in zeros), median(t.host for t in nones)),
        busy=None if device == "cpu" else (profiled(steps[ZERO], device).busy, profiled(steps[NONE], device).busy),
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
        device: `"cpu"` or `"cuda"`. Whether a process that waits for a GPU uses a processor depends on the driver.
    """
    waiting = median(1 - min(1.0, t.processor / t.host) if t.host else 0.0 for t in steps)
    if device == "cpu" and waiting > WAITING:
        return f"the process waited for a processor in {waiting:.0%} of a step's time"
    spread, step = quartiles(saved), median(t.seconds for t in steps)
    if spread.q3 - spread.q1 > SPREAD * step:
        return f"the middle half of the paired differences spans {(spread.q3 - spread.q1) / step:.0%} of a step"
    return None


def _in_turn(steps: dict[str, Callable[[], None]], pairs: int, device: str) -> dict[str, list[StepTime]]:
    """Return the timed steps of each mode."""
    clock, flush_caches = timer(device), flush(device)
    found: dict[str, list[StepTime]] = {name: [] for name in steps}
    turns = list(steps)
    for _ in range(WARM + pairs):
        for name in turns:
            flush_caches()
            faults, host, processor, start = _page_faults(), time.perf_counter(), time.process_time(), clock()
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
    """Return the number of pages that the system has mapped for this process without reading a disk; 0 if unknown."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_minflt
