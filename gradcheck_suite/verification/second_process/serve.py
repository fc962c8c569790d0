"""The second process: judges the runs that its parent sends, until the parent is gone."""

from __future__ import annotations

import gc
import os
import select
import threading
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from gradcheck_suite.diagnosis.further_runs.loop_runner import LoopRunner
from gradcheck_suite.execution import environment
from gradcheck_suite.execution.devices import one_thread
from gradcheck_suite.execution.instance import Instance
from gradcheck_suite.execution.packing import packed, unpacked
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.references.kept_gradients import use_kept_gradients
from gradcheck_suite.references.reference import REFERENCES
from gradcheck_suite.verification.check import check_run
from gradcheck_suite.verification.second_process.messages import Answer, Run


class NeedsLoopError(Exception):
    """A fault is to be named by further runs of the loop, which this process does not have."""


class _WithoutLoop(LoopRunner):
    def run(self, instance: Instance) -> Outcome | None:
        raise NeedsLoopError


def _no_loop(_: object) -> None:
    raise NeedsLoopError


def answer_to(run: Run) -> Answer:
    """Return the verdict on a run, or None where the parent has to judge it itself."""

    def runner(rank: int, alike: bool) -> LoopRunner:
        return _WithoutLoop(_no_loop, assumes=run.terms.assumes, rank=rank, alike=alike)

    try:
        verdict = check_run(lambda _: [run.outcome], run.case, run.terms, runner)
    except Exception:
        return None  # the parent meets it too, and reports it
    return None if verdict.violation or verdict.finding else verdict


def main(handle: int) -> None:
    """Answer until the parent is gone.

    Args:
        handle: the file descriptor of a socket to the parent.
    """
    connection, waiting = Connection(handle), deque[Run]()
    threading.Thread(target=_end_with_parent, args=(handle,), daemon=True).start()
    try:
        environment.prepare()
        use_kept_gradients()
        with one_thread(), suppress(EOFError, OSError):
            torch.optim.SGD([torch.zeros(1)])  # imports `torch._dynamo`, which takes a second
            gc.freeze()
            connection.send_bytes(str(os.getpid()).encode())
            while True:
                while not waiting or connection.poll(0):
                    run = _received(connection)
                    if run is None:
                        while waiting:
                            waiting.popleft()
                            connection.send_bytes(packed(None))
                    else:
                        waiting.append(run)
                connection.send_bytes(packed(answer_to(waiting.popleft())))
    finally:
        # unloading torch and jax in order takes a second
        os._exit(0)


def _end_with_parent(handle: int) -> None:
    """Wait until no process has the other end of the socket, and end this one, whatever it works on."""
    parent = select.poll()
    parent.register(handle, select.POLLHUP)
    parent.poll()
    os._exit(0)


def _received(connection: Connection) -> Run | None:
    """Return the next run, or None where those that wait are to be dropped.

    Other threads load or compile the programs of JAX that judge it.
    """
    run: Run | None = unpacked(connection.recv_bytes())
    if run is not None:
        with suppress(Exception):  # a case that cannot be built is reported where its turn comes
            REFERENCES.prepare(run.case)
    return run
