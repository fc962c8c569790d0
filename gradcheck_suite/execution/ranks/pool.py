"""The parent's side of the ranks: starts them, hands them cases, keeps the time, and starts them again where needed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.execution.packing import packed, unpacked
from gradcheck_suite.execution.ranks.launch import STARTUP_S, take_server
from gradcheck_suite.execution.ranks.messages import Reply, Request
from gradcheck_suite.execution.ranks.waiting import Patience, place_of
from gradcheck_suite.execution.runner import Outcome

LAST_LINES = 10
MISMATCH = "collective mismatch"
"""What gloo says when it ends a process whose collective is not that of the other rank."""
ENDED = "its process ended"


class Pool:
    """Ranks that live from case to case.

    Attributes:
        world_size: number of ranks.
        backend: of `torch.distributed`.
    """

    def __init__(self, world_size: int, backend: str) -> None:
        """Start the server; the ranks start with the first request."""
        self.world_size, self.backend = world_size, backend
        self._server = take_server()
        self._ranks: list[Connection] = []
        self._pids: list[int] = []
        self._generation = 0
        self._waiting: deque[Request | None] = deque()
        """The requests that have no answer yet, in order; None for one whose answer is not wanted any more."""
        self._early: list[tuple[Request, list[Outcome]]] = []
        """Answers to requests that were run ahead, and that came before they were asked for."""

    def run_ahead(self, request: Request) -> None:
        """Let ranks that have started run a request, whose outcomes `run` will be asked for."""
        if self._ranks:
            self._send(request)

    def forget(self) -> None:
        """Drop the outcomes of requests that were run ahead."""
        self._early.clear()
        self._waiting = deque([None] * len(self._waiting))

    def run(self, request: Request, time_limit_s: float | None) -> list[Outcome]:
        """Return what a loop did on each rank.

        Raises:
            UsageError: the loop or the problem cannot be imported by the ranks, or the case cannot be built.
            CannotRunHere: the ranks cannot start, or the loop cannot run here.
        """
        for place, (asked, outcomes) in enumerate(self._early):
            if asked == request:
                del self._early[place]
                return outcomes
        while True:
            if not self._ranks:
                self._start()
            if request not in self._waiting:
                self._send(request)
            first = self._waiting.popleft()
            try:
                outcomes = self._answers(time_limit_s)
            except UsageError:
                if first == request:
                    raise
                continue  # it is raised again where that request is asked for
            if first == request:
                return outcomes
            if first is not None:
                self._early.append((first, outcomes))

    def _send(self, request: Request) -> None:
        message = packed(request)
        self._waiting.append(request)
        try:
            for connection in self._ranks:
                with contextlib.suppress(BrokenPipeError, ConnectionError):
                    connection.send_bytes(message)
        except BaseException:
            self.stop()
            raise

    def _answers(self, time_limit_s: float | None) -> list[Outcome]:
        """Return what a loop did with the first request that has no answer yet."""
        answers: list[Outcome | None] = [None] * self.world_size
        try:
            patience = Patience(self._pids, self._folder, time_limit_s)
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

    @property
    def _folder(self) -> Path:
        """For what the ranks write that run now."""
        return self._server.folder / str(self._generation)

    def stop(self) -> list[int]:
        """End the ranks, which start again with the next request; return their exit statuses."""
        for connection in self._ranks:
            connection.close()
        self._ranks, self._pids = [], []
        self._waiting.clear()
        return self._server.end_ranks()

    def _died(self, rank: int) -> Outcome:
        """Return the outcome of a rank that has ended, with the last lines that it wrote."""
        written = (self._folder / f"errors-{rank}").read_text(errors="replace")
        return Outcome([], {}, {}, raised=ENDED, trace="\n".join(written.splitlines()[-LAST_LINES:]))

    def _start(self) -> None:
        self._generation += 1
        self._folder.mkdir()
        pairs = [socket.socketpair() for _ in range(self.world_size)]
        self._pids = self._server.fork(self._folder, self.backend, [theirs for _, theirs in pairs])
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

    def close(self) -> None:
        """End all processes."""
        for connection in self._ranks:
            connection.close()
        self._server.close()


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


def forget_ahead() -> None:
    """Drop what ranks have run ahead, as `Pool.forget` does."""
    for pool in _pools.values():
        pool.forget()


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
