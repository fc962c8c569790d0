"""What a reset mode costs in memory, measured in a process of its own, where no earlier allocation can hide it.

    python -m gradcheck_suite.measure.memory '{"mode": "zero_", "parameters": 1000000, "layout": "few",
                                             "micro_batches": 4, "dtype": "float32", "device": "cpu"}'

prints one JSON object. On CUDA, torch's allocator counts: the allocated and the reserved peak, and its calls. On the
CPU the system counts resident pages, where it can (Linux). The ledger counts bytes exactly on both.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gradcheck_suite.errors import UsageError
from gradcheck_suite.loops.modes import RESET_MODES
from gradcheck_suite.measure.ledger import Ledger
from gradcheck_suite.measure.workload import Size, sized_workload

WARM, MEASURED = 2, 3
"""Windows before the measurement, after which every buffer that a mode keeps exists, and windows measured."""
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Memory:
    """Bytes of one training process, parameters included.

    Attributes:
        peak: the most bytes alive in a window, as tensors asked for them (counted by the ledger).
        between: bytes alive between a reset and the next forward (counted by the ledger).
        gradients_between: bytes of gradients in `between`.
        resident_peak: the most resident bytes of the process above those before the model was built; the process has
            run a model of a few parameters before, so that the code is paged in; None where unknown.
        allocated_peak: the most bytes that CUDA's allocator had allocated; None on the CPU.
        reserved_peak: the most bytes that CUDA's allocator had reserved from the device; None on the CPU.
        allocations: calls of CUDA's allocator per window; None on the CPU.
    """

    peak: int
    between: int
    gradients_between: int
    resident_peak: int | None = None
    allocated_peak: int | None = None
    reserved_peak: int | None = None
    allocations: float | None = None


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
    sized_workload(modes[mode], Size(100, size.layout), 1, device=device, dtype=kind).window()
    before = _resident("VmRSS")
    work = sized_workload(modes[mode], size, micro_batches, device=device, dtype=kind)
    work.reset()
    for _ in range(WARM):
        work.window()
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        calls = torch.cuda.memory_stats()["allocation.all.allocated"]
    _forget_peak()
    for _ in range(MEASURED):
        work.window()
    resident = _resident("VmHWM")
    found: dict[str, Any] = {}
    if on_gpu:
        torch.cuda.synchronize()
        found = {
            "allocated_peak": torch.cuda.max_memory_allocated(),
            "reserved_peak": torch.cuda.max_memory_reserved(),
            "allocations": (torch.cuda.memory_stats()["allocation.all.allocated"] - calls) / MEASURED,
        }
    elif before is not None and resident is not None:
        found = {"resident_peak": resident - before}
    with Ledger(work.model) as ledger:
        work.window()
        ledger.end_window()
        live = ledger.live
    return Memory(ledger.peak().bytes, sum(live.values()), live["gradients"], **found)


def _resident(name: str) -> int | None:
    """Return a figure of this process's memory in bytes, or None where the system does not report it."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


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
