"""The workers of a campaign: processes on this machine, or Ray; each runs one command line at a time."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from selectors import EVENT_READ, DefaultSelector
from threading import Thread
from typing import Any

from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.run.environment import PROCESSES_VARIABLE, set_precision
from gradcheck_suite.studies.campaigns import OUTPUT, RESULT, Shards

# A worker: a process that runs one shard after another, in one interpreter, so that torch and JAX start once.
#
# It reads one JSON line for each shard from its standard input and answers with one line on its standard output.
# Where that input ends, its driver is gone, and the worker ends at once.


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


# Worker processes on this machine: shards are handed out as workers become free, and again where a worker is lost.


LOSSES = 3
"""Workers that one shard may lose before the campaign gives up: the shard itself ends its process, then."""
WORKER = "gradcheck_suite.studies.campaign_workers"


@dataclass
class _Worker:
    """A worker process, and the shard at which it works; None while it waits."""

    process: subprocess.Popen[str]
    shard: int | None = None


@dataclass
class _Losses:
    """How many workers each shard has lost."""

    by_shard: dict[int, int] = field(default_factory=dict)

    def note(self, shard: int, shards: Shards, commands: Sequence[Sequence[str]]) -> None:
        self.by_shard[shard] = self.by_shard.get(shard, 0) + 1
        if self.by_shard[shard] >= LOSSES:
            where = shards.folder / f"{shard:06d}.partial" / OUTPUT
            raise CannotRunHere(
                f"shard {shard} ended {LOSSES} worker processes, so the campaign stops; what is done is kept. "
                f"It is `gradcheck-suite {' '.join(commands[shard])}`, and what it printed is in {where}"
            )


def run_locally(
    commands: Sequence[Sequence[str]],
    waiting: Iterable[int],
    shards: Shards,
    workers: int,
    progress: Callable[[int], None],
) -> None:
    """Run the waiting shards in so many processes.

    Args:
        commands: the command line of each shard, by number.
        waiting: the numbers of the shards to run.
        shards: where their files go.
        workers: number of processes.
        progress: called with the number of each shard that is done.

    Raises:
        CannotRunHere: a shard ends its worker again and again.
    """
    queue, losses = list(waiting), _Losses()
    pool = [_started() for _ in range(min(workers, len(queue)))]
    try:
        for worker in pool:
            _hand(worker, queue.pop(0), commands, shards)
        set_precision()  # imports torch and JAX for the merge, in the seconds in which the workers import them too
        while any(worker.shard is not None for worker in pool):
            for worker in _ready(pool):
                shard = worker.shard
                assert shard is not None
                assert worker.process.stdout is not None
                answer = worker.process.stdout.readline()
                worker.shard = None
                if answer:
                    shards.finish(shard, int(json.loads(answer)["status"]))
                    progress(shard)
                else:
                    losses.note(shard, shards, commands)
                    queue.insert(0, shard)
                    _ended(worker)
                    worker.process = _started().process
                if queue:
                    _hand(worker, queue.pop(0), commands, shards)
    finally:
        for worker in pool:
            _ended(worker)


def _started() -> _Worker:
    """Start a worker in a process group of its own: Ctrl-C reaches the driver alone, which then ends its workers."""
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    settings: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return _Worker(
        subprocess.Popen([sys.executable, "-m", WORKER], env=environment, start_new_session=True, **settings)
    )


def _hand(worker: _Worker, shard: int, commands: Sequence[Sequence[str]], shards: Shards) -> None:
    folder = shards.partial(shard)
    worker.shard = shard
    assert worker.process.stdin is not None
    # where the worker is gone, its output has ended, which is seen when it is read
    with suppress(BrokenPipeError):
        job = {"command": list(commands[shard]), "folder": str(folder.resolve())}
        print(json.dumps(job), file=worker.process.stdin, flush=True)


def _ready(pool: Sequence[_Worker]) -> list[_Worker]:
    """Wait until a worker has answered or is gone, and return those that have."""
    with DefaultSelector() as selector:
        for worker in pool:
            if worker.shard is not None:
                assert worker.process.stdout is not None
                selector.register(worker.process.stdout, EVENT_READ, worker)
        return [key.data for key, _ in selector.select()]


def _ended(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.wait()
    for stream in (worker.process.stdin, worker.process.stdout):
        if stream is not None:
            with suppress(BrokenPipeError):
                stream.close()


# Shards as tasks of a Ray cluster: a task returns its files, so that the machines need not share a disk.
#
# The user's files must be at the same paths on each machine. Ray is imported here alone.


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""What an HTTP/2 client says first (RFC 9113, section 3.4). A gRPC server, as Ray's is, answers with its settings."""
FRAME_START, FRAME_SETTINGS = 4, 4
"""The bytes of a frame up to its type, and the type of the settings."""
ANSWER_S = 5.0
"""Seconds that a cluster has to answer."""
RETRIES = 3
"""Times that Ray runs a shard again whose worker is lost."""


def files_of_shard(command: Sequence[str]) -> tuple[int, dict[str, bytes]]:
    """Run a shard in a temporary folder; return its exit status, and its files by their path within the folder."""
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        status = run_shard(command, top)
        files = {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}
    return status, files


def expect_answer(address: str) -> None:
    """Refuse an address at which nothing answers as Ray does: Ray itself would try for minutes.

    Args:
        address: `HOST:PORT`, or with a scheme such as `ray://HOST:PORT`; `auto` is left to Ray.

    Raises:
        UsageError: it is no address.
        CannotRunHere: nothing listens there, or something that is no gRPC server.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"--address: expected HOST:PORT, ray://HOST:PORT or auto; got {address!r}")
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_S) as connection:
            connection.sendall(PREFACE)
            with connection.makefile("rb") as stream:
                answer = stream.read(FRAME_START)
        reason = None if answer[3:] == bytes([FRAME_SETTINGS]) else "what listens there is something else"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise CannotRunHere(f"--address {address}: no Ray cluster answers there ({reason})")


def run_on_ray(
    commands: Sequence[Sequence[str]],
    waiting: Iterable[int],
    shards: Shards,
    workers: int,
    progress: Callable[[int], None],
    address: str | None = None,
) -> None:
    """Run the waiting shards as tasks of Ray.

    Args:
        commands: the command line of each shard, by number.
        waiting: the numbers of the shards to run.
        shards: where their files go.
        workers: processors of the local cluster; a cluster that is joined has its own.
        progress: called with the number of each shard that is done.
        address: of a cluster to join; None starts one here.

    Raises:
        CannotRunHere: Ray is not installed, the cluster does not answer, or a shard ends its worker again and again.
    """
    if address is not None:
        expect_answer(address)
    try:
        import ray
    except ImportError:
        raise CannotRunHere("--engine ray: ray is not installed: pip install 'gradcheck-suite[ray]'") from None
    try:
        cluster = {"address": address} if address else {"num_cpus": workers, "include_dashboard": False}
        ray.init(**cluster, logging_level="error", log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise CannotRunHere(
            f"--engine ray: no cluster could be {'joined' if address else 'started'} ({reason})"
        ) from None
    try:
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(files_of_shard)
        running = {task.remote(list(commands[number])): number for number in waiting}
        while running:
            (done, *_), _ = ray.wait(list(running), num_returns=1)
            number = running.pop(done)
            try:
                status, files = ray.get(done)
            except ray.exceptions.WorkerCrashedError:
                command = " ".join(("gradcheck-suite", *commands[number]))
                raise CannotRunHere(
                    f"shard {number} ended {1 + RETRIES} worker processes of Ray: run {command} by itself"
                ) from None
            folder = shards.partial(number)
            for name, content in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
            shards.finish(number, status)
            progress(number)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    serve()
