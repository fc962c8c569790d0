"""Run the commands of a part on a device: side by side in each stage, until the part's time is
over.

`python -m studies gpu` calls it. What the commands print goes to one log line by line, so that a
run that is killed loses at most a line.

    python -m studies.tests.device_run build/gpu reports

then appends the records to those that are kept, with this checkout's commit where the other machine
had none.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from gradcheck_suite.core.records import append_line, read_lines, records_path, this_commit
from studies.records import KINDS

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = "studies/properties/benchmarks"
SCRIPT = "studies/tests/training_script.py"
MARGIN = 0.07
"""Share of a stage's time that pytest leaves to the test that is running, before it is stopped from outside."""
STOPPING = 15.0
"""Seconds from the request to stop until a command is killed."""


@dataclass(frozen=True)
class Task:
    """One command of Python.

    Attributes:
        name: what it is called in the log.
        command: its arguments, with `{device}`, `{records}` and `{minutes}` to be filled in.
        status: the expected exit status.
        says: what its output must have, beside the expected status.
    """

    name: str
    command: str
    status: int = 0
    says: str = ""


@dataclass(frozen=True)
class Stage:
    """Commands that run side by side, and their share of the part's time.

    What they leave goes to later stages.
    """

    share: int
    tasks: tuple[Task, ...]


def _pytest(name: str, what: str, processes: int = 0) -> Task:
    """Return a run of pytest; at least one test must pass, since all may be skipped."""
    spread = f" -n {processes}" if processes and find_spec("xdist") else ""
    return Task(
        name,
        f"-m pytest -v -p no:cacheprovider --minutes {{minutes}} {what}{spread}",
        says=" passed",
    )


def _benchmark(name: str, file: str, processes: int = 0) -> Task:
    return _pytest(
        name,
        f"{BENCHMARKS}/{file} --bench-device {{device}} --bench-records {{records}}",
        processes,
    )


def stages(part: str, device: str) -> tuple[Stage, ...]:
    """Return the stages of a part.

    On the CPU, tests of CUDA run on a stand-in for a second device.
    """
    need = "--require-cuda" if device == "cuda" else "-p tests.second_device"
    cuda = f"-m cuda {need} --continue-on-collection-errors"
    verify = "-m gradcheck_suite verify --device {device} --reports {records}"
    judged = [
        Task(f"verify {dtype}", f"{verify} --dtype {dtype} --examples 60")
        for dtype in ("float64", "bfloat16")
    ]
    audit = f"-m gradcheck_suite audit --reports {{records}} {SCRIPT} --device {{device}}"
    parts = {
        "correctness": (
            Stage(1, (
                _pytest("tests", f"tests {cuda}", 2),
                _pytest("properties", f"properties {cuda} --hypothesis-profile gpu", 6),
                *judged,
                Task("audit", audit),
                Task("audit of a fault", f"{audit} --mean-of-means", 1, "mean-of-means"),
            )),
        ),
        "time": (
            Stage(40, (_benchmark("modes of torch", "bench_modes.py -k 'not jax'"),)),
            Stage(25, (_benchmark("compiled and captured", "bench_compiled.py"),)),
            Stage(35, (_benchmark("modes of JAX", "bench_modes.py -k jax"),)),
        ),
        # each row is a process of its own, and the allocator counts for each process
        "memory": (
            Stage(60, (_benchmark("memory", "bench_memory_modes.py --benchmark-disable", 6),)),
            Stage(40, (_benchmark("whole steps", "bench_decision.py"),)),
        ),
    }  # fmt: skip
    return parts[part]


@contextmanager
def ended_by_a_signal() -> Iterator[None]:
    """Let SIGTERM, as a time limit sends it, end the part as Ctrl-C does: the commands are stopped
    and recorded.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass
class StageRun:
    """The commands of a stage that run.

    Attributes:
        stage: the stage.
        device: `"cuda"` or `"cpu"`.
        out: folder of the records.
        log: file that the commands' output goes to.
        end: when they are stopped, on the clock `time.monotonic`.
        interrupted: whether a signal stopped them.
        processes: that were started.
        lock: of the log.
    """

    stage: Stage
    device: str
    out: Path
    log: TextIO
    end: float
    interrupted: bool = False
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> list[dict[str, Any]]:
        """Return what each command found, as the data of a record and the command, once all have
        ended.
        """
        with ThreadPoolExecutor(len(self.stage.tasks)) as pool:
            found = [pool.submit(self._run, task) for task in self.stage.tasks]
            try:
                while time.monotonic() < self.end and not all(one.done() for one in found):
                    time.sleep(0.1)
            except KeyboardInterrupt:
                self.interrupted, self.end = True, time.monotonic()
            for how in (signal.SIGINT, signal.SIGKILL):
                self._stop(how)
                self._wait(found, time.monotonic() + STOPPING)
            return [one.result() for one in found]

    @staticmethod
    def _wait(found: list[Future[dict[str, Any]]], until: float) -> None:
        while time.monotonic() < until and not all(one.done() for one in found):
            time.sleep(0.1)

    def _stop(self, how: signal.Signals) -> None:
        """Ask the commands to stop, or kill them with every process that they started."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                if how == signal.SIGKILL:
                    os.killpg(process.pid, how)
                elif process.poll() is None:
                    process.send_signal(how)

    def _run(self, task: Task) -> dict[str, Any]:
        began, lines = time.monotonic(), []
        minutes = f"{(self.end - began) * (1 - MARGIN) / 60:.2f}"
        with tempfile.TemporaryDirectory() as folder:
            # verdicts also store cases and scripts; of those the records alone are kept
            records = self.out if BENCHMARKS in task.command else Path(folder)
            words = [
                word.format(device=self.device, records=records, minutes=minutes)
                for word in shlex.split(task.command)
            ]
            with subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process:
                self.processes.append(process)
                for line in _lines(process):
                    lines.append(line)
                    with self.lock:
                        self.log.write(f"{task.name}: {line}\n")
                        self.log.flush()
                status = process.wait()
            if records != self.out:
                keep(records, self.out)
        return {
            "task": task.name,
            "command": "python "
            + task.command.format(device=self.device, records="reports", minutes=minutes),
            **judged(task, status, "\n".join(lines), stopped=time.monotonic() > self.end),
            "seconds": time.monotonic() - began,
        }


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield the lines that a process prints until it has ended.

    What it left behind may keep the pipe open.
    """
    assert process.stdout is not None
    pipe, rest = process.stdout.fileno(), b""
    while True:
        if select.select([pipe], [], [], 0.5)[0]:
            data = os.read(pipe, 2**16)
            if not data:
                break
            *whole, rest = (rest + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
        elif process.poll() is not None:
            break
    if rest:
        yield rest.decode(errors="replace")


def judged(task: Task, status: int, output: str, *, stopped: bool) -> dict[str, Any]:
    """Return the status of a command that has ended, what it came to in words, and whether that was
    expected.
    """
    over = (
        stopped
        or status < 0
        or bool(re.search(r"^!+ .*--minutes .* are over", output, re.MULTILINE))
    )
    counts = re.findall(
        r"^=+ (\d+ (?:passed|failed|skipped|error).*) in [\d.]+s", output, re.MULTILINE
    )
    ended = Counter(re.findall(r" (PASSED|FAILED|ERROR|SKIPPED)\b", output))
    if counts:
        result = counts[-1]
    elif ended:  # a run of pytest that was killed
        result = ", ".join(f"{count} {name.lower()}" for name, count in ended.items())
    else:
        result = f"status {status}" + f", {task.says}" * (bool(task.says) and task.says in output)
    return {
        "status": status,
        "result": result + ", stopped before its end" * over,
        "as_expected": not over and status == task.status and task.says in output,
    }


def keep(found: Path, reports: Path) -> None:
    """Append the records of a run on another machine, made from this checkout, to those of a folder
    of reports.
    """
    for kind in KINDS:
        for _, record in read_lines(records_path(found, kind)):
            commit, command = (
                record["commit"] or this_commit(),
                record["command"].replace(str(found), "reports"),
            )
            append_line(
                records_path(reports, kind), {**record, "commit": commit, "command": command}
            )


if __name__ == "__main__":
    keep(Path(sys.argv[1]), Path(sys.argv[2]))
