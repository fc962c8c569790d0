"""Worker processes on this machine: shards are handed out as workers become free, and again where a worker is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from gradcheck_suite.cli.campaigns.folder import OUTPUT, Shards
from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.execution.environment import set_precision

LOSSES = 3
"""Workers that one shard may lose before the campaign gives up: the shard itself ends its process, then."""
WORKER = "gradcheck_suite.cli.campaigns.worker"


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
