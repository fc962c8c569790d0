"""A loop on several ranks: the pool that keeps them, a run over all of them, a rank, and what they
communicate.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from gradcheck_suite.core.case import Case, Input, Layer, Loss, Plan, ProblemSpec
from gradcheck_suite.core.contract import DEFAULT_TIME_LIMIT, Loop, Problem, is_jax
from gradcheck_suite.core.frames import Owner, owner_of
from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.loops.ranks import is_counted
from gradcheck_suite.run.instance import Instance, as_changed, instance_of, tensor_leaves
from gradcheck_suite.run.losses import LossRecorder
from gradcheck_suite.run.observer import Evaluation, Observation, same_tree
from gradcheck_suite.run.processes import (
    STARTUP_S,
    Importable,
    end_with_parent,
    source_of,
    take_template,
)
from gradcheck_suite.run.runner import Outcome, is_quiet, quiet_loops, run_loop, users_line
from gradcheck_suite.run.time_limits import IDLE, STARTING, Allowance


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays: a few microseconds each, where the file format of `torch.save`
    takes a hundred.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            # numpy has no bfloat16: its bits go as those of an int16
            plain = value.detach().cpu()
            is_bfloat16 = value.dtype is torch.bfloat16
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
    """Return the message of some bytes, which a process that this program has started, or its
    parent, has sent.
    """
    return pickle.loads(data)


@dataclass(frozen=True)
class Request:
    """What every rank is to run.

    Attributes:
        loop: how a rank finds the loop.
        case: what it trains; its plan has as many ranks as there are.
        problem: how a rank finds the user's problem; None for a generated one.
        quiet: whether to discard what the loop prints.
        path: the parent's `sys.path`.
        scale: factor of the loss.
        item_counts: what each item counts, in place of the case's own counts; None for these.
        count_traffic: whether to count the collectives of the run.
        record_losses: whether each rank records what it computes its losses from.
    """

    loop: Importable
    case: Case
    problem: Importable | None
    quiet: bool
    path: tuple[str, ...]
    scale: float = 1.0
    item_counts: tuple[float, ...] | None = None
    count_traffic: bool = False
    record_losses: bool = False


@dataclass(frozen=True)
class Reply:
    """What a rank answers.

    Attributes:
        outcome: what the loop did; None where the rank has no outcome.
        refused: why the case cannot be run at all, and no loop is to blame; None where it was run.
        cannot_run: whether that is for want of something on this machine.
    """

    outcome: Outcome | None
    refused: str | None = None
    cannot_run: bool = False


STILL_S = 1.5
"""Seconds in which ranks that wait for each other forever use no processor."""
PAUSE_S = 0.25
WAITING = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/", "/torch/_ops.py")
"""Places of torch in which a rank waits for the others."""
_RUN = str(Path(__file__).parent)
_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)')


class Patience:
    """The time that ranks have for one case.

    A rank that waits inside a collective runs no Python code, so no alarm can stop it: the parent
    looks at it from outside.

    Attributes:
        deadlock: whether it ended because ranks wait for each other, and not because of the time
            limit.
    """

    def __init__(self, pids: Sequence[int], folder: Path, time_limit_s: float | None) -> None:
        """Start the time.

        Args:
            pids: the ranks' process ids.
            folder: with the files that ranks write their stacks to.
            time_limit_s: the limit, None for none.
        """
        self._pids = pids
        self._folder = folder
        self.deadlock = False
        self._began = self._still_since = time.monotonic()
        self._last = self._processor()
        self._allowance = None if time_limit_s is None else Allowance(time_limit_s, self._last)

    def is_over(self, open_ranks: Sequence[int]) -> bool:
        """Return whether no answer is to be expected any more from the ranks that have not answered
        yet.
        """
        now = time.monotonic()
        used = self._processor()
        # ranks that wait inside a collective use next to no processor; one that computes moves the
        # clock on
        if sum(used) - sum(self._last) > IDLE * PAUSE_S:
            self._still_since = now
            self._last = used
        if now - self._still_since > STILL_S:
            # one rank that sleeps or reads a file is no deadlock: the others wait for it
            self.deadlock = all(_waits(self.stack(rank)) for rank in open_ranks)
            self._still_since = now

        def has_loaded() -> bool:
            # asked where the time is over alone: each stack takes a signal to a rank
            stacks = [self.stack(rank) for rank in open_ranks]
            return any(any(mark in stack for stack in stacks) for mark in STARTING)

        allowance = self._allowance
        return self.deadlock or bool(
            allowance and allowance.is_over(now - self._began, used, has_loaded)
        )

    def stack(self, rank: int) -> str:
        """Return the Python stack of a rank, its innermost call first; empty where it has ended."""
        file = self._folder / f"stack-{rank}"
        with contextlib.suppress(OSError):
            file.write_text("")
            os.kill(self._pids[rank], signal.SIGUSR1)
            # half a second: a process that is stopped or swapped out does not answer a signal at
            # once
            for _ in range(100):
                time.sleep(0.005)
                if (text := file.read_text()).endswith("\n"):
                    return text
        return ""

    def _processor(self) -> list[float]:
        """Return the processor seconds of each rank so far.

        Where the system does not tell, the time.
        """
        if not Path("/proc/self/stat").exists():
            # elsewhere than on Linux every rank seems to compute
            return [time.monotonic()] * len(self._pids)
        found = []
        for pid in self._pids:
            fields = ["0"] * 13  # of a process that has ended
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            # user and system time, fields 14 and 15 of proc(5): the two before the name are cut off
            found.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
        return found


def _waits(stack: str) -> bool:
    """Whether the innermost call of a rank waits for other ranks."""
    innermost = _FRAME.search(stack)
    return innermost is not None and any(place in innermost["file"] for place in WAITING)


def _is_of_loop(file: str) -> bool:
    # built-in loops are the suite's, too
    runs = file.startswith(_RUN)
    return not runs and owner_of(file) not in (Owner.TORCH, Owner.MACHINERY)


def place_of(stack: str) -> str:
    """Return where a rank is, such as `all_reduce (my_loop.py, line 12)`."""
    frames = [match.groupdict() for match in _FRAME.finditer(stack)]
    if not frames:
        return "an unknown place"
    own = next((frame for frame in frames if _is_of_loop(frame["file"])), frames[-1])
    before = frames[: frames.index(own)]
    # torch wraps its collectives to log them; the wrapper's name says nothing
    inner = [f for f in before if owner_of(f["file"]) is Owner.TORCH and f["name"] != "wrapper"]
    where = f"{Path(own['file']).name}, line {own['line']}"
    return f"{inner[-1]['name']} ({where})" if inner else where


LAST_LINES = 10
MISMATCH = ("collective mismatch", "gloo::EnforceNotMet")
"""What gloo says when it ends a process whose collective is not that of the other rank."""
ENDED = "its process ended"


class Pool:
    """Ranks that live from case to case, and run one request at a time.

    Attributes:
        world_size: number of ranks.
        backend: the backend of `torch.distributed`.
    """

    def __init__(self, world_size: int, backend: str) -> None:
        """Start the process that forks them; the ranks start with the first request."""
        self.world_size = world_size
        self.backend = backend
        self._template = take_template()
        self._ranks: list[Connection] = []
        self._pids: list[int] = []
        self._folder = self._template.folder
        self._sent: list[Request | None] = []
        """The request that ranks run, if any; None for one whose outcomes are not wanted any more."""
        self._waiting: deque[Request] = deque()
        self._early: list[tuple[Request, list[Outcome]]] = []
        """Outcomes of requests that were run ahead, and that came before they were asked for."""

    def run_ahead(self, request: Request) -> None:
        """Let ranks that have started run a request, whose outcomes `run` will be asked for."""
        if self._ranks:
            self._waiting.append(request)
            self._send()

    def forget(self) -> None:
        """Drop the outcomes of requests that were run ahead."""
        self._early.clear()
        self._waiting.clear()
        self._sent = [None] * len(self._sent)

    def run(self, request: Request, time_limit_s: float | None) -> list[Outcome]:
        """Return what a loop did on each rank.

        Raises:
            UsageError: the loop or the problem cannot be imported by the ranks, or the case cannot
                be built.
            CannotRunHere: the ranks cannot start, or the loop cannot run here.
        """
        for place, (asked, outcomes) in enumerate(self._early):
            if asked == request:
                del self._early[place]
                return outcomes
        while True:
            if not self._ranks:
                self._start()
            # it may have been sent ahead, and run already
            if request not in (*self._sent, *self._waiting):
                self._waiting.append(request)
            self._send()
            sent = self._sent[0]
            try:
                outcomes = self._answers(time_limit_s)
            except UsageError:
                if sent == request:
                    raise
                continue  # it is raised again where that request is asked for
            if sent == request:
                return outcomes
            if sent is not None:
                self._early.append((sent, outcomes))

    def _send(self) -> None:
        """Send the next request, unless one is running: a rank must not meet the others in
        collectives of this one.
        """
        if self._sent or not self._waiting:
            return
        self._sent.append(self._waiting.popleft())
        message = packed(self._sent[0])
        try:
            for connection in self._ranks:
                # a rank that has ended is noticed where its answer is awaited
                with contextlib.suppress(ConnectionError):
                    connection.send_bytes(message)
        except BaseException:
            self.stop()
            raise

    def _answers(self, time_limit_s: float | None) -> list[Outcome]:
        """Return what a loop did with the request that ranks run."""
        patience = Patience(self._pids, self._folder, time_limit_s)
        try:
            answers = self._awaited(patience)
        except BaseException:
            # ranks that are in the middle of a case know nothing of the next one
            self.stop()
            raise
        done = [answer for answer in answers if answer is not None and answer.raised is None]
        if len(done) == self.world_size:
            self._sent.clear()
            self._send()
            return done
        # before the ranks are ended: a process that is gone has no stack
        stacks = [patience.stack(r) if answer is None else "" for r, answer in enumerate(answers)]
        # after one rank has failed, the others may wait for it in a collective: all of them start
        # anew
        statuses = self.stop()
        hung = _hung(answers, stacks, patience)
        return [
            hung if answer is None else _with_status(answer, status)
            for answer, status in zip(answers, statuses, strict=True)
        ]

    def _awaited(self, patience: Patience) -> list[Outcome | None]:
        """Return each rank's outcome; None for one that has not ended when the patience is over."""
        answers: list[Outcome | None] = [None] * self.world_size
        while True:
            open_ranks = [r for r, answer in enumerate(answers) if answer is None]
            if not open_ranks or patience.is_over(open_ranks):
                return answers
            # the connection of a rank that has ended is ready, too: it has nothing to read
            ready = wait([self._ranks[r] for r in open_ranks], PAUSE_S)
            for rank in open_ranks:
                if self._ranks[rank] in ready:
                    answers[rank] = self._outcome(rank)

    def _outcome(self, rank: int) -> Outcome:
        """Return a rank's outcome; for one that has ended, the last lines that it wrote."""
        reply = _received(self._ranks[rank])
        if reply is None:
            written = (self._folder / f"errors-{rank}").read_text(errors="replace")
            return Outcome(
                [], {}, {}, raised=ENDED, trace="\n".join(written.splitlines()[-LAST_LINES:])
            )
        if reply.outcome is None:
            raise (CannotRunHere if reply.cannot_run else UsageError)(reply.refused)
        return reply.outcome

    def stop(self) -> list[int]:
        """End the ranks, which start again with the next request; return their exit statuses."""
        for connection in self._ranks:
            connection.close()
        self._ranks = []
        self._pids = []
        self._sent.clear()
        self._waiting.clear()
        return self._template.end()

    def _start(self) -> None:
        # a new folder for each start: the file through which ranks meet must not be one that
        # earlier ranks have met at
        self._folder = Path(tempfile.mkdtemp(dir=self._template.folder))
        places = [
            (rank, self.world_size, self.backend, self._folder) for rank in range(self.world_size)
        ]
        self._pids, self._ranks = self._template.fork(__name__, places)
        for connection in self._ranks:
            reply = _received(connection) if connection.poll(STARTUP_S) else None
            if reply is None or reply.refused:
                self.stop()
                why = (reply and reply.refused) or "a rank ended, or did not answer, at its start"
                raise CannotRunHere(f"{self.world_size} ranks cannot start: {why}")

    def close(self) -> None:
        """End all processes."""
        for connection in self._ranks:
            connection.close()
        self._template.close()


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
    # Windows has neither
    if not hasattr(os, "fork") or not hasattr(socket, "send_fds"):
        raise CannotRunHere(
            f"{world_size} ranks need os.fork and Unix sockets, which this system lacks: use one"
            " rank"
        )
    if not dist.is_available():
        raise CannotRunHere(
            f"this build of torch {torch.__version__} has no torch.distributed: use one rank"
        )
    backend = "gloo" if device == "cpu" else "nccl"
    if not getattr(dist, f"is_{backend}_available")():
        raise CannotRunHere(
            f"{world_size} ranks on {device} need the backend {backend}, which torch"
            f" {torch.__version__} lacks"
        )
    if device == "cuda" and torch.cuda.device_count() < world_size:
        raise CannotRunHere(
            f"{world_size} ranks on cuda need a GPU each, and torch sees"
            f" {torch.cuda.device_count()}: use fewer ranks, or --device cpu"
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


def _with_status(outcome: Outcome, status: int) -> Outcome:
    if outcome.raised != ENDED:
        return outcome
    how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
    if not any(mark in outcome.trace for mark in MISMATCH):
        return replace(outcome, raised=f"{ENDED} {how}")
    sentence = (
        "the collective that it was in got data of another size: another rank was in another"
        " collective"
    )
    return replace(outcome, raised=f"{ENDED} {how}: {sentence}", mismatched=True)


def _hung(answers: list[Outcome | None], stacks: list[str], patience: Patience) -> Outcome:
    """Return the outcome of a rank that did not answer: where every rank is."""
    told = []
    for other, answer in enumerate(answers):
        if answer is None:
            told.append(
                f"rank {other} {'waits in' if patience.deadlock else 'is in'}"
                f" {place_of(stacks[other])}"
            )
        else:
            told.append(f"rank {other} has {'returned' if answer.raised is None else 'failed'}")
    trace = "".join(
        f"rank {r}, innermost call first:\n{stack}" for r, stack in enumerate(stacks) if stack
    )
    return Outcome(
        [],
        {},
        {},
        raised=", ".join(told),
        trace=trace,
        timed_out=True,
        deadlock=patience.deadlock,
    )


_T = TypeVar("_T")


def _owner_of_each(steps: Sequence[Observation]) -> dict[str, int] | None:
    """Return the one rank whose optimizer has each parameter.

    None where ranks do not share parameters out.
    """
    parts = [list(chain.from_iterable(step.groups)) for step in steps]
    owners: dict[str, int] = {}
    for rank, part in enumerate(parts):
        owners |= dict.fromkeys(part, rank)
    same_groups = len({len(step.groups) for step in steps}) == 1
    # a parameter that two ranks have is not shared out: each steps on its own copy
    return owners if owners and same_groups and sum(map(len, parts)) == len(owners) else None


def _merged_steps(steps: Sequence[Observation]) -> list[Observation]:
    """Return each rank's step with what the rank that steps on a parameter has of it.

    Ranks may share a step out, as under `ZeroRedundancyOptimizer`: each rank's optimizer has a few
    parameters.
    """
    owners = _owner_of_each(steps)
    if owners is None:
        return list(steps)

    def owned(own: dict[str, _T], parts: Sequence[dict[str, _T]]) -> dict[str, _T]:
        found = {name: parts[owners[name]] if name in owners else own for name in {**own, **owners}}
        return {name: part[name] for name, part in found.items() if name in part}

    def evaluation(rank: int, index: int) -> Evaluation:
        # an optimizer with a closure evaluates as often as it needs, on each rank
        each = [step.evaluations[min(index, len(step.evaluations) - 1)] for step in steps]
        return replace(
            each[rank], gradients=owned(each[rank].gradients, [e.gradients for e in each])
        )

    order = list(steps[0].after)
    groups = [
        sorted(chain.from_iterable(parts), key=order.index)
        for parts in zip(*(s.groups for s in steps), strict=True)
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
    """Return the outcomes of ranks, in which steps that they share out are put together, and
    whether they are alike.
    """
    # steps are matched by their number, which needs as many on each rank
    if len({len(outcome.observations) for outcome in outcomes}) != 1:
        return outcomes
    steps = [
        _merged_steps(of_ranks)
        for of_ranks in zip(*(o.observations for o in outcomes), strict=True)
    ]
    alike = all(
        all(same_tree(other.gradients, first.gradients) for other in others)
        for first, *others in steps
    )
    return [
        replace(o, observations=[step[rank] for step in steps], alike=alike and bool(steps))
        for rank, o in enumerate(outcomes)
    ]


def run_ranks(
    loop: Loop,
    instance: Instance,
    *,
    time_limit_s: float | None = DEFAULT_TIME_LIMIT,
    count_traffic: bool = False,
    record_losses: bool = False,
) -> list[Outcome]:
    """Run a loop on an instance, on each rank of its plan, and return what each did.

    One rank is this process. Several are processes of their own, which import the loop.

    Args:
        loop: the subject.
        instance: what it trains.
        time_limit_s: seconds after which it is stopped.
        count_traffic: whether to count the collectives, which takes longer; one rank has none.
        record_losses: whether to record what the losses are computed from, which takes longer; a
            loop of JAX has no such record.

    Raises:
        UsageError: the ranks cannot import the loop.
        CannotRunHere: the ranks cannot start, or the loop cannot import what it needs.
    """
    case = instance.case
    if is_jax(loop):
        # compiles, and torch loops need none of it
        from gradcheck_suite.run.jax_run import run_jax_loop

        return run_jax_loop(loop, instance, time_limit_s=time_limit_s)
    if case.plan.world_size == 1:
        return [_run_loop(loop, instance, record_losses=record_losses, time_limit_s=time_limit_s)]
    request = replace(
        _request(loop, case, instance.users_problem),
        scale=instance.scale,
        item_counts=instance.item_counts,
        count_traffic=count_traffic,
        record_losses=record_losses,
    )
    with kept_ranks():
        pool = pool_of(case.plan.world_size, case.device)
        outcomes = pool.run(request, time_limit_s)
        ended = [
            outcome for outcome in outcomes if (outcome.raised or "").startswith(f"{ENDED} by ")
        ]
        if any(not outcome.mismatched for outcome in ended):
            # by the kernel for want of memory, by somebody, by gloo where a connection is lost: a
            # loop that ends its process by itself does it again
            outcomes = pool.run(request, time_limit_s)
        return with_all_parts(outcomes)


def _run_loop(
    loop: Loop,
    instance: Instance,
    *,
    record_losses: bool,
    time_limit_s: float | None,
    rank: int = 0,
) -> Outcome:
    """Run a loop in this process, as one rank, and record its losses if that is wanted."""
    if not record_losses:
        return run_loop(
            loop,
            instance,
            time_limit_s=time_limit_s,
            rank=rank,
        )
    recorder = LossRecorder(instance, rank)
    with recorder.counting_steps():
        outcome = run_loop(
            loop,
            recorder.instance,
            time_limit_s=time_limit_s,
            rank=rank,
        )
    return replace(outcome, losses=recorder.losses())


def run_ranks_ahead(loop: Loop, case: Case, problem: Problem | None) -> None:
    """Let the ranks of a case run a loop while this process does other things.

    `run_ranks` returns the outcomes.

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


# One rank: a process that joins the others once, then runs one loop after the other on its
# micro-batches.


LOOPBACK = {"linux": "lo", "darwin": "lo0"}


def main(connection: Connection, rank: int, world_size: int, backend: str, folder: Path) -> None:
    """Join the group, then answer requests until the parent is gone.

    Args:
        connection: the connection to the parent.
        rank: the rank's place among the others.
        world_size: number of ranks.
        backend: the backend of `torch.distributed`.
        folder: for the file through which the ranks meet, the stack that this one writes when it
            receives SIGUSR1, and its errors.
    """
    end_with_parent(connection)
    with (folder / f"errors-{rank}").open("a") as errors:
        # what torch and gloo write before they end the process says why
        os.dup2(errors.fileno(), 2)
    with (folder / f"stack-{rank}").open("a") as stacks:
        # the handler is C code, so it also writes the stack of a rank that waits inside a
        # collective
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
        reply = _join(rank, world_size, backend, folder)
        connection.send_bytes(packed(reply))
        while True:
            reply = _answer(unpacked(connection.recv_bytes()), rank)
            connection.send_bytes(packed(reply))


def _join(rank: int, world_size: int, backend: str, folder: Path) -> Reply:
    place = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": world_size,
    }
    # programs that torchrun starts find their place in these
    os.environ.update({name: str(number) for name, number in place.items()})
    if name := LOOPBACK.get(sys.platform):
        # gloo binds to the address that the host's name resolves to, which need not be one of this
        # machine: https://docs.pytorch.org/docs/stable/distributed.html (GLOO_SOCKET_IFNAME)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    # ranks share the processors
    torch.set_num_threads(1)
    if backend == "nccl":
        # NCCL refuses two ranks on one GPU
        torch.cuda.set_device(rank)
    try:
        # a file needs no port, which another program might have taken
        dist.init_process_group(
            backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size
        )
    except Exception as error:
        return Reply(
            None,
            f"the ranks cannot form a group of {backend}: {' '.join(str(error).split())}",
            cannot_run=True,
        )
    return Reply(None)


def _answer(request: Request, rank: int) -> Reply:
    """Run a loop, and return what it did on this rank."""
    # a script's folder may have been put on the path after the ranks were forked
    sys.path[:] = request.path
    try:
        loop = request.loop.load()
        problem = None if request.problem is None else request.problem.load()
        instance = as_changed(
            instance_of(request.case, problem), request.scale, request.item_counts
        )
    except UsageError as error:
        return Reply(None, str(error), cannot_run=isinstance(error, CannotRunHere))
    except (Exception, SystemExit) as error:
        sentence = " ".join(f"{type(error).__name__}: {error}".split())
        return Reply(
            None,
            f"rank {rank} cannot import the loop or the problem: {sentence} ({users_line(error)})",
        )
    try:
        with quiet_loops(request.quiet), counted_collectives(request.count_traffic) as collectives:
            # the parent keeps the time: it also sees a rank that waits inside a collective
            outcome = _run_loop(
                loop, instance, record_losses=request.record_losses, time_limit_s=None, rank=rank
            )
    except CannotRunHere as error:
        return Reply(None, str(error), cannot_run=True)
    outcome.collectives.update(collectives)
    return Reply(outcome)


# How many collectives, and of how many bytes, each window takes. A loop that adds up gradients once
# per window communicates as much for every number of accumulation steps.


OF_ACTIVATIONS = "all-reduce of activations"
ALL_REDUCE = "all-reduce"
ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"
BROADCAST = "broadcast"
Kinds = dict[str, tuple[float, float]]
"""Name of a collective -> how often a window takes it, and the bytes that a rank gives to all of these."""
STEPS = (1, 4)
"""The numbers of accumulation steps that are compared."""
FEW = 4
MANY = 6
"""Numbers of windows: their difference leaves out what a run communicates once, which takes up to three windows."""
NAMES = {
    "allreduce_": ALL_REDUCE,
    "all_reduce": OF_ACTIVATIONS,
    "_allgather_base_": ALL_GATHER,
    "_reduce_scatter_base_": REDUCE_SCATTER,
    "broadcast_": BROADCAST,
}
"""Operation of `c10d`, or of `_c10d_functional` as split layers use it -> the collective's name."""
ENDS = ("wait_tensor", "_wrap_tensor_autograd")
"""Operations of `_c10d_functional` that end or wrap a collective, which was counted at its start."""
ITEMS = 2
"""Items of each micro-batch."""
WHY_IT_GROWS = {
    frozenset(
        {ALL_GATHER}
    ): "every micro-batch gathers the sharded parameters, and each window adds up gradients once",
    frozenset(
        {OF_ACTIVATIONS}
    ): "every micro-batch adds up activations over the ranks that share the model",
}
"""Collectives that a window takes more of with more micro-batches -> why, where that is the wrapper's way."""
PLAIN = ProblemSpec(
    Input("vector", size=4),
    (Layer("linear", bias=True, features=1),),
    Loss("mse", reduction="mean"),
)
"""A model of two parameters that every micro-batch reaches."""


Collectives = Counter[tuple[str, int]]
"""(operation, bytes that this rank gives to it) -> how often the rank has entered it."""


class _Counting(TorchDispatchMode):
    """Counts the operations of `c10d`, through which Python and torch's own reducers start
    collectives.
    """

    def __init__(self, found: Collectives) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        if is_counted() and func.namespace in ("c10d", "_c10d_functional") and name not in ENDS:
            # these two are called with the output first
            given = (
                args[1] if name.startswith(("_allgather_base", "_reduce_scatter_base")) else args[0]
            )
            self._found[name, sum(t.numel() * t.element_size() for t in tensor_leaves(given))] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted_collectives(wanted: bool) -> Iterator[Collectives]:
    """Count the collectives of the block where this is wanted; nothing is counted otherwise."""
    found: Collectives = Counter()
    if not wanted:
        yield found
        return
    with _Counting(found):
        yield found


@dataclass(frozen=True)
class Traffic:
    """What rank 0 communicates in each window.

    Attributes:
        accumulation_steps: K of the windows.
        kinds: name of each collective that it enters -> how often, and the bytes that it gives to
            all of these.
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
    """Return a sentence about the communication of each window, and whether it grows with the
    accumulation steps.
    """
    first = found[0]
    last = found[-1]
    sentence = f"each window takes {first.text} on every rank"
    grown = {
        kind
        for kind in {**first.kinds, **last.kinds}
        if first.kinds.get(kind) != last.kinds.get(kind)
    }
    if not grown:
        return f"{sentence}, whatever its number of micro-batches"
    why = WHY_IT_GROWS.get(
        frozenset(grown),
        "the loop communicates at every micro-batch; once per window is enough, such as under"
        " no_sync",
    )
    return (
        f"{sentence} with accumulation_steps = {first.accumulation_steps}, and {last.text} with "
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
        totals = [
            _totals(loop, instance_of_plan(plan_of_windows(k, n, ranks)), time_limit_s)
            for n in (FEW, MANY)
        ]
        if totals[0] is None or totals[1] is None:
            return ()
        found.append(Traffic(k, _per_window(totals[0], totals[1])))
    return tuple(found)


def plan_of_windows(k: int, windows: int, ranks: int) -> Plan:
    """Return a plan of full windows of k micro-batches on each rank, `ITEMS` items each."""
    return Plan((ITEMS,) * (k * windows * ranks), k, ranks=(k * windows,) * ranks)


def _per_window(few: Kinds, many: Kinds) -> Kinds:
    """Return what each window adds, from the totals of two runs."""
    found = {}
    for kind, totals in many.items():
        number, size = (
            (more - less) / (MANY - FEW)
            for less, more in zip(few.get(kind, (0, 0)), totals, strict=True)
        )
        # what both runs take the same number of times is taken once, and not by each window
        if number:
            found[kind] = (number, size)
    return found


def _totals(loop: Loop, instance: Instance, time_limit_s: float | None) -> Kinds | None:
    """Return the collectives of a run by kind, of rank 0; None where a rank fails."""
    outcomes = run_ranks(
        loop,
        instance,
        time_limit_s=time_limit_s,
        count_traffic=True,
    )
    if any(outcome.raised is not None for outcome in outcomes):
        return None
    found: dict[str, tuple[float, float]] = {}
    for (operation, size), times in sorted(outcomes[0].collectives.items()):
        kind = NAMES.get(operation, operation)
        number, total = found.get(kind, (0, 0))
        found[kind] = (number + times, total + size * times)
    return found
