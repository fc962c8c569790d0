"""What each reset mode costs in memory, each measured in a fresh process, beside what the ledger
counts.

    pytest studies/properties/benchmarks/bench_memory_modes.py [--bench-device cpu|cuda]
    [--bench-records reports]

Time is measured separately (`bench_modes.py`), since measuring memory slows a run down. The time
that pytest-benchmark prints here is that of the processes.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from studies.memory import BLOCK, LARGE
from studies.reset_modes import BENCHMARKED
from studies.workload import BATCH, Size

SIZES = {
    "cpu": [Size(n, "few") for n in (10**6, 10**7)],
    "cuda": [Size(n, "few") for n in (10**7, 10**8, 10**9)]
    + [Size(n, "many") for n in (10**5, 10**7, 10**8)],
}
DTYPES = {"cpu": ("float32",), "cuda": ("float32", "bfloat16")}
MICRO_BATCHES = (1, 4)
SLACK = 48 * 2**20
"""Bytes of resident pages that a process may need beside its tensors, for code and for the allocator."""
SECONDS = 60
"""Time limit of one process."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device = metafunc.config.getoption("--bench-device")
    metafunc.parametrize("dtype", DTYPES[device])
    metafunc.parametrize("size", SIZES[device], ids=lambda size: size.name)
    metafunc.parametrize("device", [device])


def _measured(mode: str, size: Size, micro_batches: int, dtype: str, device: str) -> dict[str, Any]:
    asked = {
        "mode": mode,
        "parameters": size.parameters,
        "layout": size.layout,
        "micro_batches": micro_batches,
        "dtype": dtype,
        "device": device,
    }
    command = [sys.executable, "-m", "studies.memory", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
def test_memory(
    benchmark: Any,
    keep: Callable[..., None],
    size: Size,
    micro_batches: int,
    dtype: str,
    device: str,
) -> None:
    """Between steps all gradients or none are alive, and the modes' peaks differ by what the ledger
    counts.
    """
    found: dict[str, Any] = {}
    benchmark.extra_info.update(measures="memory", modes=found)

    def measured() -> None:
        for mode in BENCHMARKED:
            found[mode.name] = _measured(mode.name, size, micro_batches, dtype, device)
            keep(found[mode.name], kind="memory")

    benchmark.pedantic(measured)
    for mode in BENCHMARKED:
        assert found[mode.name]["gradients_between"] == (
            0 if mode.releases else size.bytes(getattr(torch, dtype))
        )
    if device == "cuda":
        for name, row in found.items():
            assert_peaks_differ_as_counted(row, found["set_to_none"], name)
    for name, row in found.items():
        if row["resident_peak"] is not None:
            assert row["resident_peak"] + SLACK >= row["peak"], f"{name}: {row}"


def assert_peaks_differ_as_counted(
    row: dict[str, Any], released: dict[str, Any], name: str
) -> None:
    """Hold the allocator's peaks above those of `set_to_none` to the ledger's: requests exactly,
    blocks as rounded.

    The gradient of the sum has strides of 0, and the last layer's matrix products copy it, which
    the ledger does not see. With one micro-batch, only modes that keep gradients have their peak at
    that layer; with more, all have.
    """
    width, itemsize = (
        math.isqrt(row["parameters"] // row["tensors"]),
        getattr(torch, row["dtype"]).itemsize,
    )
    copied = (
        BATCH * width * itemsize if row["micro_batches"] == 1 and row["gradients_between"] else 0
    )
    counted = row["peak"] - released["peak"] + copied
    requested, allocated = (
        row["allocator"][f"{kind}_peak"] - released["allocator"][f"{kind}_peak"]
        for kind in ("requested", "allocated")
    )
    assert requested == counted, (
        f"{name}: {requested=} but {counted=} bytes above set_to_none: {row}"
    )
    # every tensor alive at the peak may be rounded up: gradients, parameters, and a few more
    tensors = 2 * row["tensors"] + 8
    rounding = tensors * (
        BLOCK + (LARGE if itemsize * row["parameters"] // row["tensors"] > LARGE else 0)
    )
    assert abs(allocated - counted) <= rounding, (
        f"{name}: {allocated=} but {counted=} bytes above set_to_none: {row}"
    )
