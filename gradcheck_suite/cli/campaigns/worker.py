"""A worker: a process that runs one shard after another, in one interpreter, so that torch and JAX start once.

It reads one JSON line for each shard from its standard input and answers with one line on its standard output. Where
that input ends, its driver is gone, and the worker ends at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from gradcheck_suite.cli.campaigns.folder import OUTPUT, RESULT
from gradcheck_suite.execution.environment import PROCESSES_VARIABLE


def run_shard(command: Sequence[str], folder: Path) -> int:
    """Run a shard's command line in this process, with all its files under `folder`, and return its exit status."""
    from gradcheck_suite.cli import run

    os.environ[PROCESSES_VARIABLE] = "1"  # there is a worker for each processor
    paths = ["--reports", str(folder)]
    if command[0] != "calibrate":
        paths += ["--json", str(folder / RESULT)]
    before = sys.argv
    # the command that records tell, which has no path of this run
    sys.argv = ["gradcheck-suite", *command]
    try:
        return run([*command, *paths])
    finally:
        sys.argv = before


def _read(jobs: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)


def serve() -> None:
    """Run shards until the driver is gone."""
    answers = os.fdopen(os.dup(1), "w")
    jobs: SimpleQueue[str] = SimpleQueue()
    Thread(target=_read, args=(jobs,), daemon=True).start()
    while True:
        job = json.loads(jobs.get())
        folder = Path(job["folder"])
        log = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        status = run_shard(job["command"], folder)
        sys.stdout.flush()
        sys.stderr.flush()
        print(json.dumps({"status": status}), file=answers, flush=True)


if __name__ == "__main__":
    serve()
