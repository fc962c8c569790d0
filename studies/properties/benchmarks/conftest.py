"""Options of the benchmarks, and the fixture that keeps what they measure as records for the
report.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gradcheck_suite.core.records import append_record
from gradcheck_suite.run.environment import environment
from studies.records import KINDS
from studies.step_times import WAITING, device_info


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the benchmarks' options."""
    group = parser.getgroup("gradcheck-suite benchmarks")
    group.addoption(
        "--bench-device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where to measure (default cpu)",
    )
    group.addoption(
        "--bench-records",
        type=Path,
        metavar="DIR",
        help="append each row to DIR/records, which the report reads",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to measure on a device that is not there."""
    if config.getoption("--bench-device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError(
            f"--bench-device cuda: torch {torch.__version__} sees no CUDA device here"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what compiles for seconds last, so that `--minutes` leaves out no other row.

    These are the steps under `torch.compile`, and JAX's windows of many tensors.
    """

    def compiles_long(item: pytest.Item) -> bool:
        name = item.nodeid.rpartition("::")[2]
        return name.startswith("test_compiled") or (
            name.startswith("test_window_in_jax") and "many" in name
        )

    items.sort(key=compiles_long)


_DISTURBED: list[str] = []


@cache
def _environment() -> dict[str, Any]:
    return environment()


@pytest.fixture
def keep(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that appends a finished benchmark, or a dict of figures, to the records
    asked for.
    """
    reports: Path | None = request.config.getoption("--bench-records")

    def append(measured: Any, kind: str = "benchmark") -> None:
        data = (
            measured
            if isinstance(measured, dict)
            else {**measured.extra_info, **_seconds(measured)}
        )
        # whether a process that waits for a GPU uses a processor depends on the driver
        disturbed = data["device"] == "cpu" and data.get("waiting", 0.0) > WAITING
        if disturbed:
            _DISTURBED.append(request.node.name)
        if reports is None:
            return
        if disturbed:
            pytest.fail(
                f"the process waited for a processor in {data['waiting']:.0%} of the time, also when rounds were timed "
                "again: nothing recorded. Run it on an idle machine; `--last-failed` repeats only such rows"
            )
        found = {
            **_environment(),
            "device": device_info(request.config.getoption("--bench-device")),
        }
        append_record(reports, KINDS[kind], data, environment=found)

    return append


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the rows that other load disturbed: pytest-benchmark shows and writes them like the
    others.
    """
    for name in _DISTURBED:
        terminalreporter.write_line(
            f"disturbed by other load, so that its times mean nothing: {name}"
        )


def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
    """Add the device, its driver and its libraries to what `--benchmark-json` says of the machine."""
    machine_info["gradcheck_suite"] = {
        **_environment(),
        **device_info(config.getoption("--bench-device")),
    }


def _seconds(benchmark: Any) -> dict[str, Any]:
    """Return the statistics of a finished benchmark, in seconds."""
    stats = benchmark.stats.stats
    return {
        "seconds": {
            "min": stats.min,
            "q1": stats.q1,
            "median": stats.median,
            "q3": stats.q3,
            "mean": stats.mean,
            "stddev": stats.stddev,
        },
        "rounds": stats.rounds,
    }
