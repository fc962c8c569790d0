"""How long the first verdict takes, and eight modes, with nothing on disk: XLA alone, and numpy
that XLA checks, in one run.

Processor time, which other processes of a busy machine hardly change, of a command in one process:
imports, the verdict and XLA's check included. Run it by itself: `pytest
studies/properties/benchmarks/bench_first_verdict.py`.

Where the processor's seconds of `verify zero_` went on 2026-11-29 (two shared x86-64 cores, load 6,
nothing on disk, torch 2.13.0, jax 0.10.2; each second is 1.5 of an idle machine's or so):

    until the verdict, one process                                         10.5
        python, numpy, torch (1.8), JAX (0.8), Hypothesis, scipy            2.4
        JAX derives 205 programs                                            2.2
        the loop: 214 runs, 2,874 micro-batches forward and backward        1.9
        a fresh model, the observer, what a loop changes of torch           1.0
        200 cases are drawn                                                 0.6
        references of torch and numpy, and the judgement                    2.4
    XLA's check of 205 programs                                             6.9   9.6 before
        JAX lowers the equations that it has derived                        1.6   2.6 derived again
        XLA compiles them                                                   4.7
        numpy computes them once more; seven times for 6 of the 205         0.2   1.4 all seven times

The second process is forked after the imports, and no longer imports all again (2.9 s). Its check is
made by several threads after the last loop: one lowers while XLA compiles for another. Of each
further mode's 3.5 s, 2.0 are in the process that runs the loop and 1.5 in the one that judges.
Against the commit before, alternated, both processes (three pairs, load 5 to 7): until the verdict
13.2, 14.7, 19.1 -> 10.2, 11.1, 12.1 s; in all 21.6, 24.5, 29.0 -> 16.7, 18.2, 21.1; eight modes, one
pair, 54.3 -> 49.9, and 43.7 in a further run.

Five seconds until the verdict and 14 s for eight modes on two cores are 10 and 28 s of an idle
processor, 15 and 42 of these. The first verdict is below. Eight modes have a floor of 28: imports
2.4, derivation 2.2, XLA's check 6.9 and 8 times 2.1 for torch's own forward, backward and data
loader. What is left of 44 to 50 is a fresh model for each of 1,712 runs, what they may change of
torch, 200 drawn cases and the judgement.

The path of the clock, computed from the processes' own seconds and not measured idle: imports 2.3
and the process that judges 5.4 are 7.7 of these until the verdict, 5.1 of an idle machine; eight
modes add 7 times 1.6 and XLA's 6.9 in that process, 25.8 and 17. Fourteen would ask for 21: for XLA's
check and the judgement in equal parts in both processes, and a fifth less of all else.

What was tried and takes no less: 24 programs compiled as one (8 take two thirds of the time of
eight); XLA without fusion, at level 1, or with its fusion emitters (two to five times as long);
`jax_use_direct_linearize` off, no tracebacks, `jax.disable_jit` while JAX derives (2.2 to 2.4 s
each); a look at torch's functions after each run only, not before it too.
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
