"""The process that imports torch once and forks the ranks from then on, which takes milliseconds.

It computes nothing itself, so that it has no thread that a fork could lose.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import os
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection

from gradcheck_suite.execution import environment
from gradcheck_suite.execution.ranks import member
from gradcheck_suite.execution.ranks.messages import packed, unpacked

MOST_BYTES = 65536


def main(handle: int) -> None:
    """Fork ranks and end them as the parent asks, until it is gone.

    Args:
        handle: the file descriptor of a socket to the parent.
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
                folder, backend = unpacked(data)
                ranks = [
                    _fork(member.Place(rank, len(handles), backend, folder), own, [control.fileno(), *handles])
                    for rank, own in enumerate(handles)
                ]
                for own in handles:
                    os.close(own)
            control.sendall(packed((ranks, statuses)))
    except (ConnectionError, KeyboardInterrupt):
        return
    finally:
        _end(ranks)
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


def _fork(place: member.Place, own: int, others: list[int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        for handle in others:
            if handle != own:
                os.close(handle)
        member.serve(place, Connection(own))
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
