"""Rows of the benchmarks: that other load is noticed, and what pytest-benchmark writes and
compares.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradcheck_suite.loops.jax_modes import JAX_MODES
from studies.properties.benchmarks import timing

BENCHMARKS = Path(timing.__file__).parent


@pytest.mark.parametrize(
    ("device", "disturbed", "attempts"),
    [("cpu", 0, 1), ("cpu", 2, 3), ("cpu", 9, 4), ("cuda", 9, 1)],
)
def test_rounds_in_which_the_process_waited_for_a_processor_are_timed_again(
    monkeypatch, device, disturbed, attempts
):
    """Planted: another process has the processor for three quarters of the time, in the first
    measurements.
    """
    clock = SimpleNamespace(now=0.0, processor=0.0, measurements=0)
    times = SimpleNamespace(perf_counter=lambda: clock.now, process_time=lambda: clock.processor)
    monkeypatch.setattr(timing, "time", times)
    monkeypatch.setattr(timing, "timed", lambda run, setup, rounds, device: again(run, rounds))

    def again(run, rounds):
        clock.measurements += 1
        for _ in range(rounds):
            run()
        return [float(clock.measurements)] * rounds

    def pedantic(run, setup, rounds, warmup_rounds):
        stats.data += again(run, rounds)

    def work():
        clock.now += 1
        clock.processor += 0.25 if clock.measurements <= disturbed else 1

    stats = SimpleNamespace(data=[])
    benchmark = SimpleNamespace(
        pedantic=pedantic, extra_info={}, enabled=True, stats=SimpleNamespace(stats=stats)
    )
    timing.pedantic(benchmark, work, work, 5, device)
    assert clock.measurements == attempts
    assert stats.data == [float(attempts)] * 5  # those of the last measurement
    assert benchmark.extra_info == {"waiting": 0.75 if attempts <= disturbed else 0.0}


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    # pytest-benchmark is switched off where pytest-xdist says that it runs several workers
    alone = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")
    }
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=BENCHMARKS.parents[2], env=alone
    )


@pytest.mark.full
def test_pytest_benchmark_writes_and_compares_the_rows_of_each_mode(tmp_path):
    file, rows = str(BENCHMARKS / "bench_modes.py"), ("-k", "1e+06-few and float32")
    out = tmp_path / "out.json"
    first = _bench(
        file,
        *rows,
        f"--benchmark-json={out}",
        "--benchmark-autosave",
        f"--benchmark-storage={tmp_path}",
    )
    assert first.returncode == 0, first.stdout
    found = json.loads(out.read_text())
    machine = found["machine_info"]["gradcheck_suite"]
    assert {"versions", "processor", "device", "last_level_cache_bytes"} <= machine.keys()
    modes = {"zero_", "zero_grad_foreach", "flat_buffer", "set_to_none"}
    windows = {
        b["extra_info"]["mode"]: b
        for b in found["benchmarks"]
        if b["extra_info"]["measures"] == "window"
    }
    assert windows.keys() == {*modes, *JAX_MODES}
    for mode in modes:
        row = windows[mode]["extra_info"]
        assert row["memory"]["gradients_between"] == (
            0 if mode == "set_to_none" else row["gradient_bytes"]
        )
        assert row["memory"]["peak"] > 2 * row["gradient_bytes"]
        assert row["host"].keys() == {"q1", "median", "q3"}
        assert row["regime"] == "in cache"
        assert {"q1", "median", "q3"} <= windows[mode]["stats"].keys()
    second = _bench(
        file,
        *rows,
        "--benchmark-compare",
        f"--benchmark-storage={tmp_path}",
        "--benchmark-columns=median",
    )
    assert second.returncode == 0, second.stdout
    assert "(0001_" in second.stdout
    assert "(NOW)" in second.stdout


FAILS = """
def test_row(benchmark):
    benchmark.pedantic(sum, ((1, 2),), rounds=3)
    benchmark.extra_info["kept"] = True
    assert False

def test_never_run():
    assert False
"""


@pytest.mark.full
def test_rows_survive_a_failing_assertion_and_the_end_of_the_time(tmp_path):
    (tmp_path / "test_fails.py").write_text(FAILS)
    out = tmp_path / "out.json"
    # the options of the root belong to its conftest, which pytest loads for a path below the root
    # alone
    done = _bench("-p", "conftest", str(tmp_path), "--minutes=0", f"--benchmark-json={out}")
    assert done.returncode == 2, done.stdout
    assert "--minutes 0 are over, before" in done.stdout
    (row,) = json.loads(out.read_text())["benchmarks"]
    assert row["extra_info"]["kept"]
