"""What a reset mode costs in memory, measured in a process of its own, where no earlier allocation
can hide it.

    python -m studies.memory '{"mode": "zero_", "parameters": 1000000, "layout": "few",
                                             "micro_batches": 4, "dtype": "float32", "device":
                                             "cpu"}'

prints one JSON object. On CUDA, torch's allocator counts, above what it held before the model was
built. On the CPU the system counts resident pages, where it can (Linux). The ledger counts bytes
exactly on both. See
https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_stats.html
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from gradcheck_suite.errors import UsageError
from studies.ledger import GRADIENTS, Ledger
from studies.reset_modes import RESET_MODES, ResetMode
from studies.workload import Size, Workload, sized_workload

WARM, MEASURED = 2, 3
"""Windows before the measurement, after which every buffer that a mode keeps exists, and windows measured."""
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class AllocatorPeak:
    """What CUDA's allocator handed out in some windows, above what it held before the model was
    built.

    Attributes:
        requested_peak: the most bytes that tensors asked for.
        allocated_peak: the most bytes allocated, with what `BLOCK` and `LARGE` say is added to each
            request.
        reserved_peak: the most bytes held from the device, free blocks included.
        allocations: allocations per window.
        retries: attempts that failed until cached blocks were given back to the device.
        segments: pieces of device memory held at the end.
    """

    requested_peak: int
    allocated_peak: int
    reserved_peak: int
    allocations: float
    retries: int
    segments: int


BLOCK, LARGE = 512, 2**20
"""CUDA's allocator rounds every request up to a multiple of `BLOCK` bytes. A request of more than `LARGE` bytes may get
a block with up to `LARGE` bytes more, which are not split off. Source: `should_split` in
https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp"""
Baseline = Mapping[str, int] | None
"""What the allocator held at some moment; None on the CPU, whose allocator keeps no counts."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one training process: parameters, gradients and activations, without the inputs.

    Attributes:
        peak: the most bytes alive in a window, as tensors asked for them (counted by the ledger).
        between: bytes alive between a reset and the next forward (counted by the ledger).
        gradients_between: bytes of gradients in `between`.
        resident_peak: the most resident bytes of the process above those before the model was
            built; the process has run a model of a few parameters before, so that the code is paged
            in; None on CUDA and where unknown.
        allocator: what CUDA's allocator counted; None on the CPU.
        window: bytes alive after each operation of one window, by category, and last those after
            its reset (counted by the ledger).
    """

    peak: int
    between: int
    gradients_between: int
    resident_peak: int | None = None
    allocator: AllocatorPeak | None = None
    window: Mapping[str, Sequence[int]] = field(default_factory=dict)


def window_memory(work: Workload) -> tuple[int, dict[str, list[int]]]:
    """Return the peak of one window in bytes, and those alive after each operation and its reset by
    category.

    The window starts as every window but the first does, after a reset.
    """
    work.reset()
    with Ledger(work.model, moments=True) as ledger:
        work.window()
        ledger.end_window()
    return ledger.peak().bytes, {
        name: [moment[name] for moment in ledger.moments] for name in ledger.live
    }


def measure(mode: str, size: Size, micro_batches: int, dtype: str, device: str) -> Memory:
    """Measure one mode in this process, which should have done nothing else.

    Args:
        mode: the name of a reset mode that has a reset.
        size: size of the model.
        micro_batches: number of micro-batches in a window.
        dtype: dtype of parameters and data.
        device: `"cpu"` or `"cuda"`.

    Raises:
        UsageError: the mode is unknown.
    """
    modes = {name: mode for name, mode in RESET_MODES.items() if mode.reset is not None}
    if mode not in modes:
        raise UsageError(f"mode must be one of {', '.join(modes)}; got {mode!r}")
    kind = getattr(torch, dtype)
    baseline = allocator_baseline(modes[mode], size, device, kind)
    before = _resident("VmRSS")
    work = sized_workload(modes[mode], size, micro_batches, device=device, dtype=kind)
    work.reset()
    for _ in range(WARM):
        work.window()
    _forget_peak()
    allocator = allocator_peak(work, baseline)
    after = _resident("VmHWM")
    resident = None if before is None or after is None or device == "cuda" else after - before
    peak, window = window_memory(work)
    live = {name: values[-1] for name, values in window.items()}
    return Memory(peak, sum(live.values()), live[GRADIENTS], resident, allocator, window)


def allocator_baseline(mode: ResetMode, size: Size, device: str, dtype: torch.dtype) -> Baseline:
    """Return what the allocator holds now, after giving back every block that nobody uses.

    None on the CPU. A model of a few parameters runs first: the context, the workspaces of the
    libraries and their code are no cost of the mode.
    """
    sized_workload(mode, Size(100, size.layout), 1, device=device, dtype=dtype).window()
    if device == "cpu":
        return None
    gc.collect()  # an earlier workload that is freed later would lower the peak
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return dict(torch.cuda.memory_stats())


def allocator_peak(work: Workload, baseline: Baseline) -> AllocatorPeak | None:
    """Run `MEASURED` windows and return what the allocator counted above the baseline and the
    inputs; None on the CPU.

    Args:
        work: built since the baseline; it has run a window before, so that what it keeps exists.
        baseline: as `allocator_baseline` returned it.
    """
    if baseline is None:
        for _ in range(MEASURED):
            work.window()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_stats()
    for _ in range(MEASURED):
        work.window()
    torch.cuda.synchronize()
    end = torch.cuda.memory_stats()
    requested = sum(batch.nbytes for batch in work.batches)
    allocated = sum(-(-batch.nbytes // BLOCK) * BLOCK for batch in work.batches)

    def peak(name: str) -> int:
        return int(end[f"{name}_bytes.all.peak"] - baseline.get(f"{name}_bytes.all.current", 0))

    allocations = "allocation.all.allocated"
    return AllocatorPeak(
        requested_peak=peak("requested") - requested,
        allocated_peak=peak("allocated") - allocated,
        reserved_peak=peak("reserved"),
        allocations=(end[allocations] - start[allocations]) / MEASURED,
        retries=int(end["num_alloc_retries"] - start["num_alloc_retries"]),
        segments=int(end["segment.all.current"]),
    )


def _resident(name: str) -> int | None:
    """Return a figure of this process's memory in bytes, or None where the system does not report
    it.
    """
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next(
        (1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None
    )


def _forget_peak() -> None:
    """Reset the peak of resident pages, where the system allows it."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")


def main(argument: str) -> str:
    """Measure what a JSON object asks for; return that object with the figures added."""
    asked = json.loads(argument)
    size = Size(asked["parameters"], asked["layout"])
    found = measure(asked["mode"], size, asked["micro_batches"], asked["dtype"], asked["device"])
    return json.dumps({**asked, "parameters": size.total, "tensors": size.tensors, **asdict(found)})


if __name__ == "__main__":
    print(main(sys.argv[1]))
