"""How long the first verdict takes, and eight modes, with nothing on disk: XLA alone, and numpy
that XLA checks, in one run.

Processor time, which other processes of a busy machine hardly change, of a command in one process:
imports, the verdict and XLA's check included. Run it by itself: `pytest
studies/properties/benchmarks/bench_first_verdict.py`.

Where the processor's seconds of `verify zero_` went on 2026-11-29 (two shared x86-64 cores, load 10,
nothing on disk, torch 2.13.0, jax 0.10.2; each second is 1.5 of an idle machine's or so):

    imports of torch, JAX and Hypothesis                                    4
    loop, references and judgement of 200 cases and the probes              8.4
    XLA's check of 205 programs: JAX lowers them                            3.1   4.9 one by one
                                 XLA compiles them                          4.3   6.7 one by one
                                 numpy computes them six times              1.3

Eight programs that are compiled as one take two thirds of the time of eight; 24 take no less for
each. XLA's options are at their floor: without optimization already, and with any other choice that
was tried (`xla_cpu_use_fusion_emitters`, level 1, no fusion) it takes two to five times as long.
Each further mode takes 3.6 s. Of the samples of eight modes (py-spy) 42% are in the loops, forward
and backward of 2,874 micro-batches in 214 runs of each by torch; 23% around them (a fresh model, the
observer, what a loop may change of torch, the time limit); 21% in the judgement; 13% elsewhere.
Against the commit before (one pair, alternated): 25.1 -> 20.8 s cold,
14.5 -> 12.9 s with the programs on disk; eight modes in two processes, seconds of the clock at load
11: 174.6 -> 150.5 cold, 126.4 -> 120.6 on disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

RUNS = {
    "first verdict, 200 cases": ("verify", "zero_"),
    "first verdict, 50 cases": ("verify", "zero_", "-n", "50"),
    "eight modes": ("verify",),
}


@dataclass(frozen=True)
class Times:
    """What a command took.

    Attributes:
        verdict_s: seconds of the processor until its first verdict.
        processor_s: seconds of the processor until its end.
        clock_s: seconds of the clock until its first verdict.
    """

    verdict_s: float
    processor_s: float
    clock_s: float


def _processor_s(process: int) -> float:
    """Return the seconds of the processor that a process has used (Linux)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _measured(arguments: tuple[str, ...], evaluator: str, cache: Path) -> Times:
    environment = {**os.environ, "GRADCHECK_SUITE_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "gradcheck_suite", *arguments, "--jax", evaluator]
    before, began, clock, verdict = os.times(), time.perf_counter(), 0.0, 0.0
    with subprocess.Popen(
        [*command, "--processes", "1"], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if " holds " in line and not verdict:
                clock = time.perf_counter() - began
                verdict = _processor_s(process.pid)
    after = os.times()
    assert process.returncode == 0
    processor = sum(after[2:4]) - sum(before[2:4])
    return Times(verdict, processor, clock)


@pytest.mark.parametrize("name", RUNS)
def test_first_verdict(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Print what a command takes by XLA alone, then by numpy."""
    found = {by: _measured(RUNS[name], by, tmp_path / by) for by in ("xla", "numpy")}
    with capsys.disabled():
        for by, times in found.items():
            print(
                f"\n{name}, {by}: {times.verdict_s:.1f} s of processor time until the first"
                f" verdict, {times.processor_s:.1f} s in all; {times.clock_s:.1f} s of the clock"
            )
    if name != "eight modes":
        # what XLA checks is compiled after the verdict
        assert found["numpy"].verdict_s < found["xla"].verdict_s
