"""The time that releasing saves in a whole step, by size of model, items in a micro-batch and micro-batches.

    pytest properties/benchmarks/bench_decision.py [--bench-records DIR] [--bench-device cpu|cuda]

Each row becomes a record under `DIR/records/benchmark.jsonl`, from which the report makes its table of whole steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import pytest

from gradcheck_suite.measure.paired_steps import time_paired_steps
from gradcheck_suite.measure.workload import Size

PARAMETERS = {"cpu": (10**5, 10**6, 10**7), "cuda": (10**5, 10**6, 10**7, 10**8, 10**9)}
PAIRS = 21


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device = metafunc.config.getoption("--bench-device")
    metafunc.parametrize("size", [Size(n, "few") for n in PARAMETERS[device]], ids=lambda size: size.name)
    metafunc.parametrize("device", [device])


@pytest.mark.parametrize("micro_batches", [1, 8])
@pytest.mark.parametrize("items", [1, 64])
def test_step(keep: Callable[..., None], size: Size, items: int, micro_batches: int, device: str) -> None:
    found = time_paired_steps(size, items, micro_batches, pairs=PAIRS, device=device)
    keep(
        {
            **asdict(found),
            "better": found.better,
            "measures": "step",
            "mode": "zero_ and set_to_none in turn",
            "dtype": "float32",
            "layout": size.layout,
            "tensors": size.tensors,
            "device": device,
        }
    )
    assert found.bytes_between == 4 * size.total
    assert min(found.zero, found.none) > 0
