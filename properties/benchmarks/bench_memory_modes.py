"""What each reset mode costs in memory, each measured in a fresh process, beside what the ledger counts.

    pytest properties/benchmarks/bench_memory_modes.py [--bench-device cpu|cuda] [--bench-records reports]

Time is measured separately (`bench_modes.py`), since measuring memory slows a run down.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from gradcheck_suite.loops.modes import BENCHMARKED
from gradcheck_suite.measure.workload import Size

PARAMETERS = {"cpu": (10**6, 10**7), "cuda": (10**6, 10**7, 10**8, 10**9)}
MICRO_BATCHES = (1, 4)
SLACK = 48 * 2**20
"""Bytes of resident pages that a process may need beside its tensors, for code and for the allocator."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device = metafunc.config.getoption("--bench-device")
    metafunc.parametrize("size", [Size(n, "few") for n in PARAMETERS[device]], ids=lambda size: size.name)
    metafunc.parametrize("device", [device])


def _measured(mode: str, size: Size, micro_batches: int, device: str) -> dict[str, Any]:
    asked = {
        "mode": mode,
        "parameters": size.parameters,
        "layout": size.layout,
        "micro_batches": micro_batches,
        "dtype": "float32",
        "device": device,
    }
    command = [sys.executable, "-m", "gradcheck_suite.measure.memory", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
def test_memory(keep: Callable[..., None], size: Size, micro_batches: int, device: str) -> None:
    """Between steps all gradients or none are alive, and the process's peak is not below the ledger's."""
    gradients = 4 * size.total
    for mode in BENCHMARKED:
        found = _measured(mode.name, size, micro_batches, device)
        keep(found, kind="memory")
        assert found["gradients_between"] == (0 if mode.releases else gradients)
        for measured in ("allocated_peak", "resident_peak"):
            if found[measured] is not None:
                slack = SLACK if measured == "resident_peak" else 0
                assert found[measured] + slack >= found["peak"], f"{mode.name}: {found}"
