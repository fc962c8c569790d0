"""The process that imports torch once and forks the ranks from then on, which takes milliseconds.

It computes nothing itself, so that it has no thread that a fork could lose.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import itertools
import json
import os
import shutil
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection

from gradcheck_suite.execution import environment
from gradcheck_suite.execution.ranks import member
from gradcheck_suite.execution.ranks.launch import MOST_BYTES


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
    places = [member.Place(rank, len(parents), backend, folder) for rank in range(len(parents))]
    between: list[dict[int, socket.socket]] = [{} for _ in parents]
    for rank, other in itertools.combinations(range(len(parents)), 2):
        between[rank][other], between[other][rank] = socket.socketpair()
    sockets = [control, *parents, *itertools.chain.from_iterable(own.values() for own in between)]
    ranks = [_fork(place, parents[place.rank], [*between[place.rank].values()], sockets) for place in places]
    for own in sockets[1:]:
        own.close()
    return ranks


def _fork(place: member.Place, parent: socket.socket, others: list[socket.socket], sockets: list[socket.socket]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        for not_own in set(sockets) - {parent, *others}:
            not_own.close()
        member.serve(place, Connection(parent.detach()), others)
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
