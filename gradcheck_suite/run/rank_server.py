"""The process that imports torch once and forks the ranks from then on, which takes milliseconds.

It computes nothing itself, so that it has no thread that a fork could lose.
"""

from __future__ import annotations

import array
import contextlib
import faulthandler
import importlib
import itertools
import json
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.loops.ranks import is_counted
from gradcheck_suite.run import environment
from gradcheck_suite.run.instance import as_changed, instance_of, leaves
from gradcheck_suite.run.processes import MOST_BYTES
from gradcheck_suite.run.ranks import Reply, Request, packed, unpacked
from gradcheck_suite.run.runner import Outcome, quiet_loops, run_loop, users_line

# Communication of a run: how many collectives, of which kind and of how many bytes.


Traffic = Counter[tuple[str, int]]
NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")
"""Operations of `_c10d_functional` that end or wrap a collective, which was counted at its start."""


@dataclass
class TrafficCount:
    """The collectives that one rank has entered.

    Attributes:
        collectives: (name of the collective, bytes that this rank gives) -> how often.
    """

    collectives: Traffic = field(default_factory=Counter)

    def noted(self, outcome: Outcome) -> Outcome:
        """Return an outcome with these collectives."""
        return replace(outcome, collectives=dict(self.collectives))


class _Counting(TorchDispatchMode):
    """Counts the operations of `c10d`, through which Python and torch's own reducers start collectives."""

    def __init__(self, count: TrafficCount) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_counted() and func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.rpartition("::")[2]
            if name in NO_COLLECTIVES:
                return func(*args, **(kwargs or {}))
            given = args[1] if name.startswith(("_allgather_base", "_reduce_scatter_base")) else args[0]
            size = sum(t.numel() * t.element_size() for t in leaves(given))
            self._count.collectives[name, size] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_traffic(wanted: bool) -> Iterator[TrafficCount]:
    """Count the collectives of the block where this is wanted; nothing is counted otherwise."""
    count = TrafficCount()
    if not wanted:
        yield count
        return
    with _Counting(count):
        yield count


# One rank: a process that joins the others once, then runs one loop after the other on its micro-batches.


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


def main(handle: int, folder: str) -> None:
    """Fork ranks and end them as the parent asks, until it is gone.

    Args:
        handle: the file descriptor of a socket to the parent.
        folder: what is written there is removed at the end, also where the parent was killed.
    """
    environment.set_precision()
    _import_ahead()
    control = socket.socket(fileno=handle)
    ranks: list[int] = []
    try:
        while True:
            data, handles = _receive(control)
            if not data:
                return
            statuses = _end(ranks)
            if handles:
                own, backend = json.loads(data)
                ranks = _fork_all(own, backend, control, [socket.socket(fileno=handle) for handle in handles])
            control.sendall(json.dumps(ranks or statuses).encode())
    except (ConnectionError, KeyboardInterrupt):
        return
    finally:
        _end(ranks)
        shutil.rmtree(folder, ignore_errors=True)
        # unloading torch and jax in order takes a second
        os._exit(0)


def _import_ahead() -> None:
    """Import what loops on several ranks use, before there is a process for each."""
    # DistributedDataParallel imports the first of these when it is first called
    for name in ("torch._dynamo", "torch.distributed.fsdp", "gradcheck_suite.loops.ranks"):
        importlib.import_module(name)


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    kind = array.array("i")
    data, ancillary, _, _ = control.recvmsg(MOST_BYTES, socket.CMSG_SPACE(16 * kind.itemsize))
    for _, _, content in ancillary:
        kind.frombytes(content[: len(content) - len(content) % kind.itemsize])
    return data, list(kind)


def _fork_all(folder: str, backend: str, control: socket.socket, parents: list[socket.socket]) -> list[int]:
    """Fork a rank for each socket to the parent, and return their process ids."""
    places = [Place(rank, len(parents), backend, folder) for rank in range(len(parents))]
    between: list[dict[int, socket.socket]] = [{} for _ in parents]
    for rank, other in itertools.combinations(range(len(parents)), 2):
        between[rank][other], between[other][rank] = socket.socketpair()
    sockets = [control, *parents, *itertools.chain.from_iterable(own.values() for own in between)]
    ranks = [_fork(place, parents[place.rank], [*between[place.rank].values()], sockets) for place in places]
    for own in sockets[1:]:
        own.close()
    return ranks


def _fork(place: Place, parent: socket.socket, others: list[socket.socket], sockets: list[socket.socket]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        for not_own in set(sockets) - {parent, *others}:
            not_own.close()
        serve(place, Connection(parent.detach()), others)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def _end(ranks: list[int]) -> list[int]:
    """End all ranks; return how each ended, as an exit status, or minus the signal's number."""
    # one that has exited by itself keeps its own status
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    ranks.clear()
    return statuses
