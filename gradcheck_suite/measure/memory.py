"""What a reset mode costs in memory, measured in a process of its own: what others allocated before cannot hide it.

    python -m gradcheck_suite.measure.memory '{"mode": "zero_", "parameters": 1000000, "layout": "few",
                                             "micro_batches": 4, "dtype": "float32", "device": "cpu"}'

prints one JSON object. On CUDA the allocator counts: allocated and reserved peak, what is alive between steps, calls.
On the CPU the system counts resident pages, where it can (Linux); the ledger counts bytes exactly on both.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gradcheck_suite.errors import UsageError
from gradcheck_suite.measure.ledger import Ledger
from gradcheck_suite.measure.models import Size, build, micro_batch
from gradcheck_suite.measure.resets import MODES, Mode, prepare, window

WARM, MEASURED = 2, 3
"""Windows before the measurement, so that every buffer exists that a mode keeps, and windows measured."""
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Memory:
    """Bytes of one training process, parameters included.

    Attributes:
        peak: most that was alive in a window, in bytes that tensors asked for (the ledger).
        between: alive between a reset and the next forward, likewise.
        gradients_between: gradients' share of that.
        resident_peak: most resident pages of the process above those before the model was built, code already paged
            in by a model of a few parameters; None where unknown.
        allocated_peak: CUDA's allocator, most allocated; None on the CPU.
        reserved_peak: CUDA's allocator, most reserved from the device; None on the CPU.
        allocations: CUDA's allocator, calls per window; None on the CPU.
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
        mode: a name from `costs.resets.MODES`.
        size: of the model.
        micro_batches: in a window.
        dtype: of parameters and data.
        device: `"cpu"` or `"cuda"`.
    """
    if mode not in MODES:
        raise UsageError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
    kind = getattr(torch, dtype)
    few = Size(100, size.layout)
    _runner(MODES[mode], build(few, device, kind), [micro_batch(few, device, kind)])()
    before = _resident("VmRSS")
    model = build(size, device, kind)
    batches = [micro_batch(size, device, kind, j) for j in range(micro_batches)]
    run = _runner(MODES[mode], model, batches)
    for _ in range(WARM):
        run()
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        calls = torch.cuda.memory_stats()["allocation.all.allocated"]
    _forget_peak()
    for _ in range(MEASURED):
        run()
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
    with Ledger(model) as ledger:
        run()
        ledger.end_window()
        live = ledger.live
    return Memory(ledger.peak().bytes, sum(live.values()), live["gradients"], **found)


def _runner(mode: Mode, model: torch.nn.Module, batches: list[torch.Tensor]) -> Callable[[], None]:
    parameters = list(model.parameters())
    prepare(mode, parameters)
    mode.reset(parameters)
    return lambda: window(mode, model, parameters, batches)


def _resident(name: str) -> int | None:
    """Return a figure of this process's memory in bytes, or None where the system does not tell."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def _forget_peak() -> None:
    """Let the peak of resident pages begin anew, where the system allows it."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")


def main(argument: str) -> str:
    """Measure what the JSON object asks for; return it with the figures."""
    asked = json.loads(argument)
    size = Size(asked["parameters"], asked["layout"])
    found = measure(asked["mode"], size, asked["micro_batches"], asked["dtype"], asked["device"])
    return json.dumps({**asked, "parameters": size.total, "tensors": size.tensors, **asdict(found)})


if __name__ == "__main__":
    print(main(sys.argv[1]))
