"""The time that releasing saves in a whole step, by size of model, items in a micro-batch and
micro-batches.

    pytest studies/properties/benchmarks/bench_decision.py [--bench-records DIR] [--bench-device
    cpu|cuda]

Each row becomes a record under `DIR/records/benchmark.jsonl`, from which the report makes its table
of whole steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from studies.step_times import ITEMS, MICRO_BATCHES, PAIRS, PARAMETERS, time_paired_steps
from studies.workload import Size


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device = metafunc.config.getoption("--bench-device")
    metafunc.parametrize(
        "size", [Size(n, "few") for n in PARAMETERS[device]], ids=lambda size: size.name
    )
    metafunc.parametrize("device", [device])


@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
@pytest.mark.parametrize("items", ITEMS)
def test_step(
    benchmark: Any,
    keep: Callable[..., None],
    size: Size,
    items: int,
    micro_batches: int,
    device: str,
) -> None:
    """Keep a row whose `extra_info` has the times.

    The time that pytest-benchmark prints is that of all pairs.
    """
    found = benchmark.pedantic(
        time_paired_steps, (size, items, micro_batches), {"pairs": PAIRS, "device": device}
    )
    benchmark.extra_info.update(found.to_row(size, device))
    if found.disturbed:
        pytest.fail(
            f"{found.disturbed}, in each of {found.attempts} measurements: nothing recorded. Run it on its own"
        )
    keep(found.to_row(size, device))
    assert found.bytes_between == 4 * size.total
    assert min(found.zero, found.none) > 0
