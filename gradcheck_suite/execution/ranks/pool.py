"""The parent's side of the ranks: starts them, hands them cases, keeps the time, and starts them again where needed."""

from __future__ import annotations

import array
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.execution.ranks.messages import Reply, Request, packed, unpacked
from gradcheck_suite.execution.ranks.waiting import Patience, place_of
from gradcheck_suite.execution.runner import Outcome

LAST_LINES = 10
STARTUP_S = 120.0
"""Seconds within which the ranks must have started: the first time, torch is imported."""
MISMATCH = "collective mismatch"
"""What gloo says when it ends a process whose collective is not that of the other rank."""
ENDED = "its process ended"
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from gradcheck_suite.execution.ranks.server import main; main(int(sys.argv[2]))"
)


class Pool:
    """Ranks that live from case to case.

    Attributes:
        world_size: number of ranks.
        backend: of `torch.distributed`.
    """

    def __init__(self, world_size: int, backend: str) -> None:
        """Start the server; the ranks start with the first request."""
        self.world_size, self.backend = world_size, backend
        self._folder = Path(tempfile.mkdtemp(prefix="gradcheck-suite-ranks-"))
        self._control, theirs = socket.socketpair()
        # a process group of its own: Ctrl-C reaches the parent alone, which then ends the others
        self._server = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(sys.path), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._ranks: list[Connection] = []
        self._pids: list[int] = []
        self._generation = 0

    def run(self, request: Request, time_limit_s: float | None) -> list[Outcome]:
        """Return what a loop did on each rank.

        Raises:
            UsageError: the loop or the problem cannot be imported by the ranks, or the case cannot be built.
            CannotRunHere: the ranks cannot start, or the loop cannot run here.
        """
        if not self._ranks:
            self._start()
        answers: list[Outcome | None] = [None] * self.world_size
        try:
            message = packed(request)
            for connection in self._ranks:
                with contextlib.suppress(BrokenPipeError, ConnectionError):
                    connection.send_bytes(message)
            patience = Patience(self._pids, self._folder / str(self._generation), time_limit_s)
            while (open_ranks := [r for r, answer in enumerate(answers) if answer is None]) and not patience.is_over(
                open_ranks
            ):
                ready = wait([self._ranks[r] for r in open_ranks], patience.pause)
                for rank in (r for r in open_ranks if self._ranks[r] in ready):
                    reply = _received(self._ranks[rank])
                    answers[rank] = self._died(rank) if reply is None else _outcome_of(reply)
        except BaseException:
            # ranks that are in the middle of a case know nothing of the next one
            self.stop()
            raise
        if all(answer is not None and answer.raised is None for answer in answers):
            return [answer for answer in answers if answer is not None]
        stacks = [patience.stack(r) if answer is None else "" for r, answer in enumerate(answers)]
        statuses = self.stop()
        return [
            (_hung(answers, stacks, patience) if answer is None else _with_status(answer, statuses[rank]))
            for rank, answer in enumerate(answers)
        ]

    def stop(self) -> list[int]:
        """End the ranks, which start again with the next request; return their exit statuses."""
        for connection in self._ranks:
            connection.close()
        self._ranks, self._pids = [], []
        return self._command(b"end", [])[1]

    def _died(self, rank: int) -> Outcome:
        """Return the outcome of a rank that has ended, with the last lines that it wrote."""
        written = (self._folder / str(self._generation) / f"errors-{rank}").read_text(errors="replace")
        return Outcome([], {}, {}, raised=ENDED, trace="\n".join(written.splitlines()[-LAST_LINES:]))

    def _start(self) -> None:
        self._generation += 1
        folder = self._folder / str(self._generation)
        folder.mkdir()
        pairs = [socket.socketpair() for _ in range(self.world_size)]
        self._pids, _ = self._command(packed((str(folder), self.backend)), [theirs for _, theirs in pairs])
        self._ranks = [Connection(ours.detach()) for ours, _ in pairs]
        for _, theirs in pairs:
            theirs.close()
        for connection in self._ranks:
            reply = _received(connection) if connection.poll(STARTUP_S) else None
            if reply is None or reply.refused:
                self.stop()
                raise CannotRunHere(
                    f"{self.world_size} ranks cannot start: "
                    + (reply.refused if reply and reply.refused else "a rank ended, or did not answer, at its start")
                )

    def _command(self, data: bytes, sockets: list[socket.socket]) -> tuple[list[int], list[int]]:
        """Send the server a command with the ranks' sockets; return the ranks' process ids and exit statuses."""
        handles = array.array("i", [s.fileno() for s in sockets])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handles)] if sockets else []
        try:
            self._control.sendmsg([data], ancillary)
            self._control.settimeout(STARTUP_S)
            answer = self._control.recv(65536)
        except (OSError, ConnectionError):
            answer = b""
        if not answer:
            raise CannotRunHere(
                f"{self.world_size} ranks cannot start: the process that starts them ended with status "
                f"{self._server.poll()}"
            )
        pids, statuses = unpacked(answer)
        return pids, statuses

    def close(self) -> None:
        """End all processes."""
        for connection in self._ranks:
            connection.close()
        self._control.close()
        try:
            self._server.wait(5)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


_pools: dict[tuple[int, str], Pool] = {}
_holders = 0


@contextlib.contextmanager
def kept_ranks() -> Iterator[None]:
    """Keep ranks that start inside the block until the outermost such block ends."""
    global _holders
    _holders += 1
    try:
        yield
    finally:
        _holders -= 1
        if not _holders:
            while _pools:
                _pools.popitem()[1].close()


def pool_of(world_size: int, device: str) -> Pool:
    """Return the ranks of a case, inside `kept_ranks`.

    Raises:
        CannotRunHere: this machine has not what so many ranks need.
    """
    backend = expect_ranks(world_size, device)
    assert _holders, "ranks start inside kept_ranks alone, which ends them"
    if (world_size, backend) not in _pools:
        _pools[world_size, backend] = Pool(world_size, backend)
    return _pools[world_size, backend]


def expect_ranks(world_size: int, device: str) -> str:
    """Return the backend with which so many ranks can run here.

    Raises:
        CannotRunHere: none can.
    """
    import torch
    import torch.distributed as dist

    if not hasattr(os, "fork") or not hasattr(socket, "send_fds"):
        raise CannotRunHere(f"{world_size} ranks need os.fork and Unix sockets, which this system lacks: use one rank")
    if not dist.is_available():
        raise CannotRunHere(f"this build of torch {torch.__version__} has no torch.distributed: use one rank")
    backend = "gloo" if device == "cpu" else "nccl"
    if not getattr(dist, f"is_{backend}_available")():
        raise CannotRunHere(
            f"{world_size} ranks on {device} need the backend {backend}, which torch {torch.__version__} lacks"
        )
    if device == "cuda" and torch.cuda.device_count() < world_size:
        raise CannotRunHere(
            f"{world_size} ranks on cuda need a GPU each, and torch sees {torch.cuda.device_count()}: use fewer ranks, "
            "or --device cpu"
        )
    return backend


def _received(connection: Connection) -> Reply | None:
    """Return a rank's reply, or None where it has ended."""
    try:
        reply = unpacked(connection.recv_bytes())
    except (EOFError, OSError):
        return None
    assert isinstance(reply, Reply)
    return reply


def _outcome_of(reply: Reply) -> Outcome:
    if reply.outcome is None:
        assert reply.refused is not None
        raise (CannotRunHere if reply.cannot_run else UsageError)(reply.refused)
    return reply.outcome


def _with_status(outcome: Outcome, status: int) -> Outcome:
    if outcome.raised != ENDED:
        return outcome
    how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
    if MISMATCH not in outcome.trace:
        return replace(outcome, raised=f"{ENDED} {how}")
    said = "the collective that it was in got data of another size: another rank was in another collective"
    return replace(outcome, raised=f"{ENDED} {how}: {said}", mismatched=True)


def _hung(answers: list[Outcome | None], stacks: list[str], patience: Patience) -> Outcome:
    """Return the outcome of a rank that did not answer: where every rank is."""
    told = []
    for other, answer in enumerate(answers):
        if answer is None:
            told.append(f"rank {other} {'waits in' if patience.deadlock else 'is in'} {place_of(stacks[other])}")
        else:
            told.append(f"rank {other} has {'returned' if answer.raised is None else 'failed'}")
    trace = "".join(f"rank {r}, innermost call first:\n{stack}" for r, stack in enumerate(stacks) if stack)
    return Outcome(
        [],
        {},
        {},
        raised=", ".join(told),
        trace=trace,
        timed_out=True,
        deadlock=patience.deadlock,
    )
