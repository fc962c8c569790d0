"""One rank: a process that joins the others once, then runs one loop after the other on its micro-batches."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.run.instance import as_changed, instance_of
from gradcheck_suite.run.processes import end_with_parent
from gradcheck_suite.run.ranks import Reply, Request, packed, unpacked
from gradcheck_suite.run.runner import quiet_loops, run_loop, users_line
from gradcheck_suite.run.traffic import counted_collectives

LOOPBACK = {"linux": "lo", "darwin": "lo0"}


def main(connection: Connection, rank: int, world_size: int, backend: str, folder: Path) -> None:
    """Join the group, then answer requests until the parent is gone.

    Args:
        connection: the connection to the parent.
        rank: the rank's place among the others.
        world_size: number of ranks.
        backend: the backend of `torch.distributed`.
        folder: for the file through which the ranks meet, the stack that this one writes when it receives SIGUSR1, and
            its errors.
    """
    end_with_parent(connection)
    with (folder / f"errors-{rank}").open("a") as errors:
        # what torch and gloo write before they end the process says why
        os.dup2(errors.fileno(), 2)
    with (folder / f"stack-{rank}").open("a") as stacks:
        # the handler is C code, so it also writes the stack of a rank that waits inside a collective
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
        reply = _join(rank, world_size, backend, folder)
        connection.send_bytes(packed(reply))
        while True:
            reply = _answer(unpacked(connection.recv_bytes()), rank)
            connection.send_bytes(packed(reply))


def _join(rank: int, world_size: int, backend: str, folder: Path) -> Reply:
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    # programs that torchrun starts find their place in these
    os.environ.update({name: str(number) for name, number in place.items()})
    if name := LOOPBACK.get(sys.platform):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    try:
        # a file needs no port, which another program might have taken
        dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size)
    except Exception as error:
        return Reply(
            None, f"the ranks cannot form a group of {backend}: {' '.join(str(error).split())}", cannot_run=True
        )
    return Reply(None)


def _answer(request: Request, rank: int) -> Reply:
    """Run a loop, and return what it did on this rank."""
    sys.path[:] = request.path
    try:
        loop, problem = request.loop.load(), None if request.problem is None else request.problem.load()
        instance = as_changed(instance_of(request.case, problem), request.scale, request.item_counts)
    except UsageError as error:
        return Reply(None, str(error), cannot_run=isinstance(error, CannotRunHere))
    except (Exception, SystemExit) as error:
        sentence = " ".join(f"{type(error).__name__}: {error}".split())
        return Reply(None, f"rank {rank} cannot import the loop or the problem: {sentence} ({users_line(error)})")
    try:
        with quiet_loops(request.quiet), counted_collectives(request.count_traffic) as collectives:
            # the parent keeps the time: it also sees a rank that waits inside a collective
            outcome = run_loop(loop, instance, time_limit_s=None, rank=rank)
    except CannotRunHere as error:
        return Reply(None, str(error), cannot_run=True)
    outcome.collectives.update(collectives)
    return Reply(outcome)
