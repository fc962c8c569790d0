"""The engine of a campaign: each shard is one command line in a process of its own, and their files
are merged.

A shard depends on what is asked and on its seeds alone, so the records are the same whatever the
number of workers. Must not judge anything itself.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from gradcheck_suite.cli import CommandLine, exit_status, run
from gradcheck_suite.core.records import records_path, write_text
from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.run.environment import PROCESSES_VARIABLE
from gradcheck_suite.run.processes import Template, end_with_parent

Json = dict[str, Any]
STATUS = "status"
RESULT = "result.json"
OUTPUT = "output.txt"
COUNTEREXAMPLES = "counterexamples"
COULD_NOT_RUN = (exit_status.BAD_USAGE, exit_status.BUG, exit_status.INTERRUPTED)
"""Exit statuses of shards that have not done their work."""


@dataclass(frozen=True)
class Shard:
    """A part of a campaign: a command line.

    Attributes:
        program: that runs it.
        words: the command and its arguments, without the paths that it writes to.
        writes_json: whether the command takes `--json`.
    """

    program: CommandLine
    words: tuple[str, ...]
    writes_json: bool = True

    def __str__(self) -> str:
        return shlex.join([self.program.name, *self.words])


@dataclass(frozen=True)
class Shards:
    """The shards of one campaign on disk.

    Attributes:
        folder: of the campaign; it has one folder for each shard that is done, named by its number.
    """

    folder: Path

    def place(self, number: int) -> Path:
        """Return a shard's folder."""
        return self.folder / f"{number:06d}"

    def partial_place(self, number: int) -> Path:
        """Return the folder that a shard is written to before it is done."""
        return self.folder / f"{number:06d}.partial"

    def partial(self, number: int) -> Path:
        """Return that folder, empty."""
        # files of an attempt that was killed would be taken for the new one's
        shutil.rmtree(path := self.partial_place(number), ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def finish(self, number: int, status: int) -> None:
        """Note a shard's exit status, and put its folder in place in one step."""
        partial = self.partial_place(number)
        (partial / STATUS).write_text(f"{status}\n")
        # where it is, it failed or a file of it was cut short
        shutil.rmtree(self.place(number), ignore_errors=True)
        # atomic on one file system: a folder without the suffix is complete
        partial.rename(self.place(number))

    def remove(self) -> None:
        """Remove all of them, and the folder of campaigns where no other one is under way."""
        shutil.rmtree(self.folder, ignore_errors=True)
        # another campaign's shards keep the folder: `rmdir` refuses one that is not empty
        with suppress(OSError):
            self.folder.parent.rmdir()

    def done(self, number: int) -> bool:
        """Return whether a shard is done: one that failed is not, nor is one with a file that is
        cut short.
        """
        try:
            if self.status(number) in COULD_NOT_RUN:
                return False
            # read only to see that the file is whole; a power cut leaves files of the right name
            # and no content
            self.result(number)
            for path in self.place(number).rglob("*.jsonl"):
                for line in path.read_text().splitlines():
                    json.loads(line)
        except (OSError, ValueError):
            return False
        return True

    def status(self, number: int) -> int:
        """Return the exit status of a shard that is done."""
        return int((self.place(number) / STATUS).read_text())

    def result(self, number: int) -> dict[str, Any]:
        """Return what a shard wrote by `--json`; empty where it wrote nothing."""
        path = self.place(number) / RESULT
        document: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        return document

    def lines(self, number: int, kind: str) -> list[str]:
        """Return the lines that a shard recorded."""
        return _lines(records_path(self.place(number), kind))

    def output(self, number: int) -> list[str]:
        """Return the lines that a shard printed."""
        return _lines(self.place(number) / OUTPUT)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def merge(shards: Shards, numbers: range, reports: Path, kinds: tuple[str, ...]) -> None:
    """Append the shards' records and copy their counterexamples, in the order of the shards.

    A line that is there already is not appended again, so an interrupted merge can be repeated.

    Args:
        shards: all done.
        numbers: of the shards.
        reports: where the records go.
        kinds: of the records that are appended.
    """
    for kind in kinds:
        path = records_path(reports, kind)
        old = _lines(path)
        known = set(old)
        lines = chain.from_iterable(shards.lines(number, kind) for number in numbers)
        new = [line for line in lines if line not in known]
        # the file is written whole, under another name and then renamed, so a merge is never half
        # appended
        if new:
            write_text(path, "".join(f"{line}\n" for line in (*old, *new)))
    for number in numbers:
        if (own := shards.place(number) / COUNTEREXAMPLES).is_dir():
            shutil.copytree(own, reports / COUNTEREXAMPLES, dirs_exist_ok=True)


LOSSES = 3
"""Processes that one shard may lose before the campaign gives up: the shard itself ends its process, then."""
ANSWER_S = 30
"""Seconds that a cluster of Ray has to answer; Ray itself tries for minutes."""


def run_shard(shard: Shard, folder: Path) -> int:
    """Run a shard's command line in this process, with all its files under `folder`, and return its
    exit status.
    """
    os.environ[PROCESSES_VARIABLE] = "1"  # there is a worker for each processor
    paths = ["--reports", str(folder)]
    if shard.writes_json:
        paths += ["--json", str(folder / RESULT)]
    before = sys.argv
    # the command that records tell, which has no path of this run
    sys.argv = [shard.program.name, *shard.words]
    try:
        return run([*shard.words, *paths], shard.program)
    finally:
        sys.argv = before


def main(connection: Connection, shard: Shard, folder: Path) -> None:
    """Run a shard in a process of its own, and send its exit status.

    Args:
        connection: to the driver of the campaign.
        shard: to run.
        folder: for its files and what it prints.
    """
    end_with_parent(connection)
    with (folder / OUTPUT).open("w") as output:
        for stream in (1, 2):
            # the descriptors and not `sys.stdout`: what C code and child processes print belongs
            # there too
            os.dup2(output.fileno(), stream)
    status = run_shard(shard, folder)
    # `os._exit` below flushes nothing
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(status)
    # whatever the loop has left behind, such as a thread, ends here
    os._exit(0)


def run_locally(
    asked: Sequence[Shard],
    waiting: Sequence[int],
    shards: Shards,
    workers: int,
    progress: Callable[[], None],
) -> None:
    """Run the waiting shards, so many at a time.

    Args:
        asked: each shard, by number.
        waiting: the numbers of the shards to run.
        shards: where their files go.
        workers: number of shards at a time.
        progress: called after each shard.

    Raises:
        CannotRunHere: a shard ends its process again and again.
    """
    free: SimpleQueue[Template] = SimpleQueue()

    def work(number: int) -> None:
        template = free.get()
        # a process may be lost to the system's memory killer, which says nothing about the shard
        for _ in range(LOSSES):
            _, (connection,) = template.fork(
                __name__, [(asked[number], shards.partial(number).resolve())]
            )
            with connection, suppress(EOFError, OSError):
                shards.finish(number, connection.recv())
                free.put(template)
                return
        where = shards.partial_place(number) / OUTPUT
        raise CannotRunHere(
            f"shard {number} ended {LOSSES} worker processes, so the campaign stops; what is done"
            f" is kept. It is `{asked[number]}`, and what it printed is in {where}"
        )

    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        # shards that run end with their templates, so that threads which wait for them do
        for _ in range(min(workers, len(waiting))):
            free.put(stack.enter_context(closing(Template("gradcheck_suite.verification.verify"))))
        jobs = [pool.submit(work, number) for number in waiting]
        # registered last and so called first: no waiting shard starts while the templates are
        # closed
        stack.callback(lambda: [job.cancel() for job in jobs])
        for job in as_completed(jobs):
            # raises here what the thread has raised
            job.result()
            progress()


def files_of_shard(shard: Shard) -> tuple[int, dict[str, bytes]]:
    """Run a shard in a temporary folder.

    Return its exit status, and its files by their path within the folder. So the machines of a
    cluster need not share a disk.
    """
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        status = run_shard(shard, top)
        files = {
            str(path.relative_to(top)): path.read_bytes()
            for path in top.rglob("*")
            if path.is_file()
        }
    return status, files


def run_on_ray(
    asked: Sequence[Shard],
    waiting: Sequence[int],
    shards: Shards,
    workers: int,
    progress: Callable[[], None],
    address: str | None = None,
) -> None:
    """Run the waiting shards as tasks of Ray, which is imported here alone.

    The user's files must be at the same paths on each of its machines.

    Args:
        asked: each shard, by number.
        waiting: the numbers of the shards to run.
        shards: where their files go.
        workers: processors of the local cluster; a cluster that is joined has its own.
        progress: called after each shard.
        address: of a cluster to join; None starts one here.

    Raises:
        CannotRunHere: Ray is not installed, the cluster does not answer, or a shard ends its worker
            again and again.
    """
    # before the import of ray, which takes a second, and whose client would wait for minutes
    _expect_listener(address)
    try:
        import ray
    except ImportError:
        raise CannotRunHere(
            "--engine ray: ray is not installed: pip install 'gradcheck-suite[ray]'"
        ) from None
    _expect_cluster(address)
    try:
        cluster = (
            # a cluster that is joined refuses `num_cpus`: its own machines say how many they have
            {"address": address} if address else {"num_cpus": workers, "include_dashboard": False}
        )
        ray.init(**cluster, logging_level="error", log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise CannotRunHere(
            f"--engine ray: no cluster could be {'joined' if address else 'started'} ({reason})"
        ) from None
    try:
        task = ray.remote(num_cpus=1, max_retries=LOSSES)(files_of_shard)
        running = {task.remote(asked[number]): number for number in waiting}
        while running:
            # one at a time, in the order in which they end, so that what is done is on disk when
            # the driver stops
            (done, *_), _ = ray.wait(list(running), num_returns=1)
            number = running.pop(done)
            try:
                status, files = ray.get(done)
            # Ray raises it after the last retry
            except ray.exceptions.WorkerCrashedError:
                raise CannotRunHere(
                    f"shard {number} ended {1 + LOSSES} worker processes of Ray: run"
                    f" {asked[number]} by itself"
                ) from None
            folder = shards.partial(number)
            for name, content in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
            shards.finish(number, status)
            progress()
    finally:
        ray.shutdown()


def _expect_listener(address: str | None) -> None:
    """Refuse an address at which nothing listens; `auto` is left to Ray."""
    if address in (None, "auto"):
        return
    host, _, port = str(address).rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"--address: expected HOST:PORT, ray://HOST:PORT or auto; got {address!r}")
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except OSError as error:
        said = error.strerror or error
        raise CannotRunHere(f"--address {address}: no Ray cluster answers there ({said})") from None


def _expect_cluster(address: str | None) -> None:
    """Refuse an address at which something else than Ray listens: another process joins first,
    which can be ended.
    """
    joins = f"import ray; ray.init({address!r}, logging_level='error', log_to_driver=False)"
    try:
        if address is not None:
            subprocess.run(
                # its status is ignored: a refusal is reported by `ray.init` below, with Ray's own
                # reason
                [sys.executable, "-Pc", joins],
                timeout=ANSWER_S,
                capture_output=True,
                check=False,
            )
    except subprocess.TimeoutExpired:
        raise CannotRunHere(
            f"--address {address}: no Ray cluster answers there within {ANSWER_S} s"
        ) from None
