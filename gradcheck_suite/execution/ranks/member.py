"""One rank: a process that joins the others once, then runs one loop after the other on its micro-batches."""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.execution.instance import as_changed, instance_of
from gradcheck_suite.execution.packing import packed, unpacked
from gradcheck_suite.execution.quiet import quiet_loops
from gradcheck_suite.execution.ranks.messages import Reply, Request
from gradcheck_suite.execution.ranks.traffic import counted_traffic
from gradcheck_suite.execution.runner import run_loop
from gradcheck_suite.execution.tracebacks import users_line

LOOPBACK = {"linux": "lo", "darwin": "lo0"}


@dataclass(frozen=True)
class Place:
    """A rank's place among the others.

    Attributes:
        rank: its index.
        world_size: number of ranks.
        backend: of `torch.distributed`.
        folder: with the file through which the ranks meet, and the stacks that they write.
    """

    rank: int
    world_size: int
    backend: str
    folder: str

    @property
    def stack_file(self) -> Path:
        """The file that the rank writes its stack to when it receives SIGUSR1."""
        return Path(self.folder) / f"stack-{self.rank}"


def serve(place: Place, connection: Connection, others: Sequence[socket.socket]) -> None:
    """Join the group, then answer requests until the parent is gone.

    Args:
        place: the rank's place.
        connection: to the parent.
        others: a socket to each other rank.
    """
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def receive() -> None:
        while True:
            try:
                requests.put(connection.recv_bytes())
            except (EOFError, OSError):
                # a rank that waits for another one, or runs a loop that never ends, ends here too
                os._exit(0)

    with (Path(place.folder) / f"errors-{place.rank}").open("a") as errors:
        # what torch and gloo write before they end the process says why
        os.dup2(errors.fileno(), 2)
    with place.stack_file.open("a") as stacks:
        # the handler is C code, so it also writes the stack of a rank that waits inside a collective
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
        threading.Thread(target=receive, daemon=True).start()
        try:
            _join(place)
        except Exception as error:
            reason = f"the ranks cannot form a group of {place.backend}: {' '.join(str(error).split())}"
            connection.send_bytes(packed(Reply(None, reason, cannot_run=True)))
            return
        connection.send_bytes(packed(Reply(None)))
        while True:
            reply = _answer(unpacked(requests.get()), place)
            connection.send_bytes(packed(reply))
            if not _all_went_well(reply, others):
                threading.Event().wait()  # until the parent, which has the replies, ends the ranks


def _all_went_well(reply: Reply, others: Sequence[socket.socket]) -> bool:
    """Return whether no rank failed on a case, when all have finished it.

    Requests may be waiting. A rank that began the next one earlier would meet the others in collectives of this one.
    """
    went_well = b"1" if reply.outcome is not None and reply.outcome.raised is None else b"0"
    try:
        for other in others:
            other.sendall(went_well)
        return {went_well, *(other.recv(1) for other in others)} == {b"1"}
    except ConnectionError:
        return False  # a rank that has ended


def _join(place: Place) -> None:
    # programs that torchrun starts find their place in these
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.rank),
        LOCAL_WORLD_SIZE=str(place.world_size),
    )
    if name := LOOPBACK.get(sys.platform):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    torch.set_num_threads(1)
    if place.backend == "nccl":
        torch.cuda.set_device(place.rank)
    # a file needs no port, which another program might have taken
    dist.init_process_group(
        place.backend, init_method=f"file://{place.folder}/meeting", rank=place.rank, world_size=place.world_size
    )


def _answer(request: Request, place: Place) -> Reply:
    """Run a loop, and return what it did on this rank."""
    sys.path[:] = request.path
    try:
        loop, problem = request.loop.load(), None if request.problem is None else request.problem.load()
        instance = as_changed(instance_of(request.case, problem), request.scale, request.item_counts)
    except UsageError as error:
        return Reply(None, str(error), cannot_run=isinstance(error, CannotRunHere))
    except (Exception, SystemExit) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return Reply(None, f"rank {place.rank} cannot import the loop or the problem: {said} ({users_line(error)})")
    try:
        with quiet_loops(request.quiet), counted_traffic(request.count_traffic) as traffic:
            # the parent keeps the time: it also sees a rank that waits inside a collective
            outcome = run_loop(loop, instance, time_limit_s=None, rank=place.rank)
    except CannotRunHere as error:
        return Reply(None, str(error), cannot_run=True)
    return Reply(traffic.noted(outcome))
