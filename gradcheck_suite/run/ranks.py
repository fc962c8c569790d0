"""A loop on several ranks: messages to them, the pool that keeps them, a run over all of them, and what they send."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from gradcheck_suite.core.case import Case, Input, Layer, Loss, Plan, ProblemSpec
from gradcheck_suite.core.contract import DEFAULT_TIME_LIMIT, Loop, Problem
from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.loops.ranks import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    OF_ACTIVATIONS,
    RANK_LOOPS,
    REDUCE_SCATTER,
    Kinds,
    Sharing,
    predicted,
)
from gradcheck_suite.run.instance import Instance, generated_instance
from gradcheck_suite.run.observer import Evaluation, Observation, same_tree
from gradcheck_suite.run.processes import STARTUP_S as PROCESSES_STARTUP_S
from gradcheck_suite.run.processes import Source, source_of, take_server
from gradcheck_suite.run.runner import Outcome, is_quiet, run_loop
from gradcheck_suite.run.time_limits import IDLE, STARTING, STARTUP_S, rest_of_limit

# Messages between processes of the suite, with tensors as numpy arrays.
#
# `pickle` takes a tenth of a millisecond for a tensor, since it goes through the file format of `torch.save`; an
# array takes a few microseconds.


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            plain, is_bfloat16 = value.detach().cpu(), value.dtype is torch.bfloat16
            array = (plain.view(torch.int16) if is_bfloat16 else plain).numpy()
            return _tensor, (array, is_bfloat16, value.device.type)
        return NotImplemented


def _tensor(array: Any, is_bfloat16: bool, device: str) -> torch.Tensor:
    # a tensor shares the memory of its array, which a pickled one may not write to
    tensor = torch.from_numpy(np.require(array, requirements="W"))
    return (tensor.view(torch.bfloat16) if is_bfloat16 else tensor).to(device)


def packed(message: Any) -> bytes:
    """Return a message as bytes."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(message)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """Return the message of some bytes, which a process that this program has started, or its parent, has sent."""
    return pickle.loads(data)


# What the parent and the ranks send each other: requests and outcomes.


@dataclass(frozen=True)
class Request:
    """What every rank is to run.

    Attributes:
        loop: where the loop is found.
        case: what it trains; its plan has as many ranks as there are.
        problem: where the user's problem is found; None for a generated one.
        quiet: whether to discard what the loop prints.
        path: the parent's `sys.path`.
        scale: factor of the loss.
        item_counts: what each item counts, in place of the case's own counts; None for these.
        count_traffic: whether to count the collectives of the run.
    """

    loop: Source
    case: Case
    problem: Source | None
    quiet: bool
    path: tuple[str, ...]
    scale: float = 1.0
    item_counts: tuple[float, ...] | None = None
    count_traffic: bool = False


@dataclass(frozen=True)
class Reply:
    """What a rank answers.

    Attributes:
        outcome: of the run; None where there is none.
        refused: why the case cannot be run at all, and no loop is to blame; None where it was run.
        cannot_run: whether that is for want of something on this machine.
    """

    outcome: Outcome | None
    refused: str | None = None
    cannot_run: bool = False


# How long the parent waits for ranks, and where the ones are that do not answer.
#
# A rank that waits inside a collective runs no Python code, so no alarm can stop it: the parent looks at it from
# outside.


STILL_S = 1.5
"""Seconds in which ranks that wait for each other forever use no processor."""
PAUSE_S = 0.25
WAITING = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/", "/torch/_ops.py")
"""Places of torch in which a rank waits for the others."""
_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)')


class Patience:
    """The time that ranks have for one case.

    Attributes:
        pause: seconds until it is to be asked again.
        deadlock: whether it ended because ranks wait for each other, and not because of the time limit.
    """

    def __init__(self, pids: Sequence[int], folder: Path, time_limit_s: float | None) -> None:
        """Start the time.

        Args:
            pids: the ranks' process ids.
            folder: with the files that ranks write their stacks to.
            time_limit_s: the limit, None for none.
        """
        self._pids, self._folder, self._limit = list(pids), folder, time_limit_s
        self.pause, self.deadlock = PAUSE_S, False
        self._first = self._began = self._still_since = time.monotonic()
        self._at_start = self._last = self._processor()

    def is_over(self, open_ranks: Sequence[int]) -> bool:
        """Return whether no answer is to be expected any more from the ranks that have not answered yet."""
        now, used = time.monotonic(), self._processor()
        if sum(used) - sum(self._last) > IDLE * PAUSE_S:
            self._still_since, self._last = now, used
        if now - self._still_since > STILL_S:
            self.deadlock = all(_waits(self.stack(rank)) for rank in open_ranks)
            self._still_since = now
        return self.deadlock or self._is_late(now, used, open_ranks)

    def _is_late(self, now: float, used: list[float], open_ranks: Sequence[int]) -> bool:
        passed = now - self._began
        if self._limit is None or passed < self._limit:
            return False
        if any(mark in self.stack(rank) for rank in open_ranks for mark in STARTING) and now - self._first < STARTUP_S:
            self._began, self._at_start = now, used
            return False
        # ranks that wait for one which computes are not idle
        computed = max(b - a for a, b in zip(self._at_start, used, strict=True))
        return not rest_of_limit(self._limit, passed, computed)

    def stack(self, rank: int) -> str:
        """Return the Python stack of a rank, its innermost call first; empty where it has ended."""
        file = self._folder / f"stack-{rank}"
        try:
            file.write_text("")
            os.kill(self._pids[rank], signal.SIGUSR1)
            for _ in range(100):
                time.sleep(0.005)
                if (text := file.read_text()).endswith("\n"):
                    return text
        except OSError:
            pass
        return ""

    def _processor(self) -> list[float]:
        return [_processor_s(pid) for pid in self._pids]


def place_of(stack: str) -> str:
    """Return where a rank is, such as `all_reduce (my_loop.py, line 12)`."""
    frames = [match.groupdict() for match in _FRAME.finditer(stack)]
    if not frames:
        return "an unknown place"
    foreign = ("/torch/", "/gradcheck_suite/run/", "<frozen")
    own = next((f for f in frames if not any(mark in f["file"] for mark in foreign)), frames[-1])
    inner = [f for f in frames[: frames.index(own)] if "/torch/" in f["file"] and f["name"] != "wrapper"]
    where = f"{Path(own['file']).name}, line {own['line']}"
    return f"{inner[-1]['name']} ({where})" if inner else where


def _waits(stack: str) -> bool:
    first = _FRAME.search(stack)
    return first is not None and any(place in first["file"] for place in WAITING)


def _processor_s(pid: int) -> float:
    """Return the processor seconds of a process so far; where the system does not tell, of this moment."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        # a process that has ended uses none; elsewhere than on Linux every rank seems to compute
        return 0.0 if Path("/proc/self/stat").exists() else time.monotonic()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# The parent's side of the ranks: starts them, hands them cases, keeps the time, and starts them again where needed.


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
            reply = _received(connection) if connection.poll(PROCESSES_STARTUP_S) else None
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


# Steps that ranks share out among them, as `ZeroRedundancyOptimizer` does: each rank's optimizer has a few
# parameters.
#
# Put together, they are one step on all parameters.


_T = TypeVar("_T")


def _owners(steps: Sequence[Observation]) -> dict[str, int] | None:
    """Return the one rank whose optimizer has each parameter; None where ranks do not share parameters out."""
    parts = [[name for group in step.groups for name in group] for step in steps]
    owners = {name: rank for rank, part in enumerate(parts) for name in part}
    same_groups = len({len(step.groups) for step in steps}) == 1
    return owners if owners and same_groups and sum(map(len, parts)) == len(owners) else None


def _together(steps: Sequence[Observation]) -> list[Observation]:
    """Return each rank's step with what the rank that steps on a parameter has of it."""
    owners = _owners(steps)
    if owners is None:
        return list(steps)

    def owned(own: dict[str, _T], parts: Sequence[dict[str, _T]]) -> dict[str, _T]:
        found = {name: parts[owners[name]] if name in owners else own for name in {**own, **owners}}
        return {name: part[name] for name, part in found.items() if name in part}

    def evaluation(rank: int, index: int) -> Evaluation:
        each = [step.evaluations[min(index, len(step.evaluations) - 1)] for step in steps]
        return replace(each[rank], gradients=owned(each[rank].gradients, [e.gradients for e in each]))

    order = list(steps[0].after)
    groups = [
        sorted(chain.from_iterable(parts), key=order.index) for parts in zip(*(s.groups for s in steps), strict=True)
    ]
    return [
        replace(
            step,
            evaluations=tuple(evaluation(rank, index) for index in range(len(step.evaluations))),
            groups=groups,
            after=owned(step.after, [s.after for s in steps]),
            state=owned(step.state, [s.state for s in steps]),
            state_after=owned(step.state_after, [s.state_after for s in steps]),
        )
        for rank, step in enumerate(steps)
    ]


def with_all_parts(outcomes: list[Outcome]) -> list[Outcome]:
    """Return the outcomes of ranks, in which steps that they share out are put together, and whether they are alike."""
    if len({len(outcome.observations) for outcome in outcomes}) != 1:
        return outcomes
    steps = [_together(of_ranks) for of_ranks in zip(*(o.observations for o in outcomes), strict=True)]
    alike = all(same_tree(other.gradients, step[0].gradients) for step in steps for other in step[1:])
    return [
        replace(o, observations=[step[rank] for step in steps], alike=alike and bool(steps))
        for rank, o in enumerate(outcomes)
    ]


# A loop run on all ranks of a case.


def run_ranks(
    loop: Loop,
    instance: Instance,
    *,
    time_limit_s: float | None = DEFAULT_TIME_LIMIT,
    count_traffic: bool = False,
) -> list[Outcome]:
    """Run a loop on an instance, on each rank of its plan, and return what each did.

    One rank is this process. Several are processes of their own, which import the loop.

    Args:
        loop: the subject.
        instance: what it trains.
        time_limit_s: seconds after which it is stopped.
        count_traffic: whether to count the collectives, which takes longer; one rank has none.

    Raises:
        UsageError: the ranks cannot import the loop.
        CannotRunHere: the ranks cannot start, or the loop cannot import what it needs.
    """
    case = instance.case
    if case.plan.world_size == 1:
        return [run_loop(loop, instance, time_limit_s=time_limit_s)]
    request = replace(
        _request(loop, case, instance.users_problem),
        scale=instance.scale,
        item_counts=instance.item_counts,
        count_traffic=count_traffic,
    )
    with kept_ranks():
        pool = pool_of(case.plan.world_size, case.device)
        outcomes = pool.run(request, time_limit_s)
        ended = [outcome for outcome in outcomes if (outcome.raised or "").startswith(f"{ENDED} by ")]
        if any(not outcome.mismatched for outcome in ended):
            # by the kernel for want of memory, by somebody, by gloo where a connection is lost: a loop that ends its
            # process by itself does it again
            outcomes = pool.run(request, time_limit_s)
        return with_all_parts(outcomes)


def run_ranks_ahead(loop: Loop, case: Case, problem: Problem | None) -> None:
    """Let the ranks of a case run a loop while this process does other things; `run_ranks` returns the outcomes.

    Args:
        loop: the subject.
        case: what it trains.
        problem: the user's problem that `case.problem` names, if it is not a generated one.
    """
    if case.plan.world_size > 1:
        pool_of(case.plan.world_size, case.device).run_ahead(_request(loop, case, problem))


def _request(loop: Loop, case: Case, problem: Problem | None) -> Request:
    return Request(
        loop=source_of(loop, "the loop"),
        case=case,
        problem=None if problem is None else source_of(problem, "the problem of"),
        quiet=is_quiet(),
        path=tuple(sys.path),
    )


# Communication of a loop on several ranks: how many collectives, and of how many bytes, each window takes.
#
# A loop that adds up gradients once per window communicates as much for every number of accumulation steps.


STEPS = (1, 4)
"""The numbers of accumulation steps that are compared."""
FEW, MANY = 4, 6
"""Numbers of windows: their difference leaves out what a run communicates once, which takes up to three windows."""
NAMES = {
    "allreduce_": ALL_REDUCE,
    "all_reduce": OF_ACTIVATIONS,
    "_allgather_base_": ALL_GATHER,
    "_reduce_scatter_base_": REDUCE_SCATTER,
    "broadcast_": BROADCAST,
}
"""Operation of `c10d`, or of `_c10d_functional` as split layers use it -> the collective's name."""
ITEMS = 2
"""Items of each micro-batch."""
WHY_IT_GROWS = {
    frozenset({ALL_GATHER}): "every micro-batch gathers the sharded parameters, and each window adds up gradients once",
    frozenset({OF_ACTIVATIONS}): "every micro-batch adds up activations over the ranks that share the model",
}
"""Collectives that a window takes more of with more micro-batches -> why, where that is the wrapper's way."""
PLAIN = ProblemSpec(Input("vector", size=4), (Layer("linear", bias=True, features=1),), Loss("mse", reduction="mean"))
"""A model of two parameters that every micro-batch reaches."""


@dataclass(frozen=True)
class Traffic:
    """What rank 0 communicates in each window.

    Attributes:
        accumulation_steps: K of the windows.
        kinds: name of each collective that it enters -> how often, and the bytes that it gives to all of these.
    """

    accumulation_steps: int
    kinds: Mapping[str, tuple[float, float]]

    @property
    def collectives(self) -> float:
        """Number of collectives."""
        return sum(number for number, _ in self.kinds.values())

    @property
    def bytes(self) -> float:
        """Bytes that the rank gives to them."""
        return sum(size for _, size in self.kinds.values())

    @property
    def text(self) -> str:
        """The two numbers in words."""
        return f"{self.collectives:g} collectives of {self.bytes:g} bytes"


def traffic_text(found: tuple[Traffic, ...]) -> str:
    """Return a sentence about the communication of each window, and whether it grows with the accumulation steps."""
    first, last = found[0], found[-1]
    said = f"each window takes {first.text} on every rank"
    grown = {kind for kind in {**first.kinds, **last.kinds} if first.kinds.get(kind) != last.kinds.get(kind)}
    if not grown:
        return f"{said}, whatever its number of micro-batches"
    why = WHY_IT_GROWS.get(
        frozenset(grown), "the loop communicates at every micro-batch; once per window is enough, such as under no_sync"
    )
    return (
        f"{said} with accumulation_steps = {first.accumulation_steps}, and {last.text} with "
        f"{last.accumulation_steps}: {why}"
    )


def traffic_per_window(
    loop: Loop, instance_of_plan: Callable[[Plan], Instance], ranks: int, time_limit_s: float | None
) -> tuple[Traffic, ...]:
    """Return the communication of a window, for each of `STEPS`; empty where the loop fails.

    Args:
        loop: the subject.
        instance_of_plan: returns what it trains under a plan.
        ranks: number of ranks.
        time_limit_s: seconds after which the loop is stopped.
    """
    found = []
    for k in STEPS:
        totals = [_totals(loop, instance_of_plan(_plan(k, n, ranks)), time_limit_s) for n in (FEW, MANY)]
        if totals[0] is None or totals[1] is None:
            return ()
        found.append(Traffic(k, _per_window(totals[0], totals[1])))
    return tuple(found)


def _plan(k: int, windows: int, ranks: int) -> Plan:
    return Plan((ITEMS,) * (k * windows * ranks), k, ranks=(k * windows,) * ranks)


def _per_window(few: Kinds, many: Kinds) -> Kinds:
    """Return what each window adds, from the totals of two runs."""
    found = {}
    for kind, totals in many.items():
        number, size = ((more - less) / (MANY - FEW) for less, more in zip(few.get(kind, (0, 0)), totals, strict=True))
        if number:
            found[kind] = (number, size)
    return found


def _totals(loop: Loop, instance: Instance, time_limit_s: float | None) -> Kinds | None:
    """Return the collectives of a run by kind, of rank 0; None where a rank fails."""
    outcomes = run_ranks(loop, instance, time_limit_s=time_limit_s, count_traffic=True)
    if any(outcome.raised is not None for outcome in outcomes):
        return None
    found: dict[str, tuple[float, float]] = {}
    for (operation, size), times in sorted(outcomes[0].collectives.items()):
        kind = NAMES.get(operation, operation)
        number, total = found.get(kind, (0, 0))
        found[kind] = (number + times, total + size * times)
    return found


@dataclass(frozen=True)
class TrafficRow:
    """What a window of a built-in loop communicates, on the model `PLAIN`.

    Attributes:
        loop: its name.
        ranks: number of ranks.
        accumulation_steps: micro-batches of each rank in a window.
        observed: counted on rank 0.
        predicted: by the wrapper's law.
    """

    loop: str
    ranks: int
    accumulation_steps: int
    observed: Kinds
    predicted: Kinds


def traffic_rows(
    names: Iterable[str] = tuple(RANK_LOOPS), *, ranks: int = 2, time_limit_s: float | None = 60.0
) -> list[TrafficRow]:
    """Return the communication of built-in loops for several ranks, counted and predicted.

    Args:
        names: of the loops, from `RANK_LOOPS`.
        ranks: number of ranks.
        time_limit_s: seconds after which a loop is stopped.

    Raises:
        CannotRunHere: so many ranks cannot start.
    """
    rows = []
    model = generated_instance(Case(PLAIN, _plan(1, 1, ranks))).run().model
    shapes = [tuple(p.shape) for p in model.parameters()]
    with kept_ranks():
        for name in names:
            loop, wrapper = RANK_LOOPS[name], name.partition("/")[0]
            found = traffic_per_window(loop, lambda plan: generated_instance(Case(PLAIN, plan)), ranks, time_limit_s)
            for traffic in found:
                sharing = Sharing(shapes, 8, ranks, traffic.accumulation_steps, ITEMS)
                expected = predicted(wrapper, sharing)
                rows.append(TrafficRow(name, ranks, traffic.accumulation_steps, dict(traffic.kinds), expected))
    return rows
