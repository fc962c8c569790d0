"""A second process judges runs of loops on generated problems, while this one runs the loop on the
next cases.

What it cannot say `holds` of, this process judges itself, with the same functions. So a verdict
does not depend on whether there is a second process. It runs no user's loop, which may keep
something from one case to the next; the suite's own loops run in whichever process is free.
"""

from __future__ import annotations

import gc
import hashlib
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pickle import PicklingError

from gradcheck_suite.core.case import Case
from gradcheck_suite.core.contract import Loop, Problem
from gradcheck_suite.core.options import NUMPY
from gradcheck_suite.core.results import Verdict
from gradcheck_suite.errors import UsageError
from gradcheck_suite.judge.reruns import LoopRunner
from gradcheck_suite.loops.reset_modes import BUILT_IN
from gradcheck_suite.reference import programs
from gradcheck_suite.reference.evaluation import evaluated_by, evaluator
from gradcheck_suite.reference.large_batch import REFERENCES, CannotJudgeError
from gradcheck_suite.reference.programs import ProgramChecks
from gradcheck_suite.run import environment
from gradcheck_suite.run.instance import Instance, generated_instance, one_thread
from gradcheck_suite.run.processes import end_with_parent
from gradcheck_suite.run.ranks import forget_ahead, packed, run_ranks_ahead, unpacked
from gradcheck_suite.run.runner import Outcome, run_loop
from gradcheck_suite.verification.check import JudgingRules, check_run
from gradcheck_suite.verification.judge_process import NUMBER, JudgeProcess, running_judge


@dataclass(frozen=True)
class LoopRun:
    """A run of a loop on a generated problem, to be judged.

    Attributes:
        case: what the loop was run on.
        outcome: what it did.
        rules: what it is judged by.
        evaluator: what evaluates JAX's derivatives.
    """

    case: Case
    outcome: Outcome
    rules: JudgingRules
    evaluator: str = NUMPY


@dataclass(frozen=True)
class OwnRun:
    """A case that the second process both runs and judges: the loop is one of the suite's own, and
    keeps nothing from one case to the next.

    Attributes:
        case: what the loop is to be run on.
        loop: its name in `BUILT_IN`.
        rules: what it is judged by.
        time_limit_s: seconds after which it is stopped.
        evaluator: what evaluates JAX's derivatives.
    """

    case: Case
    loop: str
    rules: JudgingRules
    time_limit_s: float | None
    evaluator: str

    def run(self) -> LoopRun:
        """Run the loop.

        Raises:
            CannotJudgeError: the case cannot be judged.
            UsageError: the case cannot be built.
        """
        outcome = run_loop(
            BUILT_IN[self.loop], generated_instance(self.case), time_limit_s=self.time_limit_s
        )
        return LoopRun(
            self.case,
            outcome,
            self.rules,
            self.evaluator,
        )


@dataclass(frozen=True)
class CheckPrograms:
    """Asks for XLA's check of the programs that numpy has evaluated in the second process.

    Attributes:
        ends: whether to answer when all are checked; else they are checked beside what follows.
    """

    ends: bool


Answer = Verdict | None
"""A verdict without violation or finding; None where the parent has to judge the run itself."""


class NeedsLoopError(Exception):
    """A fault is to be named by further runs of the loop, which this process does not have."""


class _WithoutLoop(LoopRunner):
    def run(self, instance: Instance) -> Outcome | None:
        raise NeedsLoopError


def _no_loop(_: object) -> None:
    raise NeedsLoopError


def answer_to(run: LoopRun) -> Answer:
    """Return the verdict on a run, or None where the parent has to judge it itself."""

    def runner(rank: int, alike: bool) -> LoopRunner:
        return _WithoutLoop(
            _no_loop,
            assumes=run.rules.assumes,
            rank=rank,
            alike=alike,
        )

    try:
        # as the parent evaluates, so that both processes come to the same verdict
        with evaluated_by(run.evaluator):
            verdict = check_run(lambda _: [run.outcome], run.case, run.rules, runner)
    except (NeedsLoopError, UsageError):
        # the parent meets it too, and reports it. Another exception is a fault of the suite: it
        # ends this process, and the parent meets it where it judges the run itself
        return None
    # a violation is shrunk and explained, for which the parent runs the loop again
    return None if verdict.violation or verdict.finding else verdict


@dataclass(frozen=True)
class _Message:
    """A message of the parent.

    Attributes:
        number: of the message.
        asked: what it asks for.
        digest: of its bytes.
    """

    number: int
    asked: LoopRun | OwnRun | CheckPrograms
    digest: bytes

    @classmethod
    def of(cls, number: int, data: bytes) -> _Message:
        """Return the message of some bytes."""
        return cls(number, unpacked(data), _digest(data))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


MOST_ANSWERS = 4096
"""Number of answers that are kept."""


class _Answers:
    """What was answered to runs.

    A verdict depends on nothing but the run, so two loops that do the same with a case, to the bit,
    have the same: most of the reset modes do, on most cases.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()

    def has(self, message: _Message) -> bool:
        """Whether the run of a message was judged before."""
        return message.digest in self._kept

    def of(self, message: _Message, asked: LoopRun | OwnRun) -> bytes:
        """Return the answer to a message, for the connection.

        Args:
            message: the message.
            asked: what it asks for.
        """
        answer = (
            self._of_own(asked)
            if isinstance(asked, OwnRun)
            else self._of_digest(asked, message.digest)
        )
        return message.number.to_bytes(NUMBER) + answer

    def _of_own(self, asked: OwnRun) -> bytes:
        try:
            run = asked.run()
        except (CannotJudgeError, UsageError):
            return packed(None)  # the parent meets it too, and reports it
        # the bytes that the parent would have sent: a mode that ran there shares the answer
        return self._of_digest(run, _digest(packed(run)))

    def _of_digest(self, run: LoopRun, digest: bytes) -> bytes:
        if digest not in self._kept:
            self._kept[digest] = packed(answer_to(run))
            # the oldest one: loops of one command run on the same cases in the same order
            if len(self._kept) > MOST_ANSWERS:
                self._kept.popitem(last=False)
        return self._kept[digest]


def main(connection: Connection) -> None:
    """Judge the runs that the parent sends, in the second process, until the parent is gone.

    Args:
        connection: the connection to the parent.
    """
    end_with_parent(connection)
    waiting = deque[_Message]()
    answers = _Answers()
    number = 0
    try:
        environment.prepare()
        with one_thread(), suppress(EOFError, OSError):
            gc.freeze()
            # says that it has started: the parent sends nothing before
            connection.send_bytes(str(os.getpid()).encode())
            while True:
                # all messages are read first, so that programs of later runs compile while this one
                # is judged
                while not waiting or connection.poll(0):
                    # an empty message of `JudgeProcess.drop`: no earlier one wants an answer
                    if not (data := connection.recv_bytes()):
                        waiting.clear()
                        continue
                    number += 1
                    waiting.append(_Message.of(number, data))
                    if not answers.has(waiting[-1]):
                        _prepare(waiting[-1].asked)
                message = waiting.popleft()
                asked = message.asked
                if isinstance(asked, LoopRun | OwnRun):
                    connection.send_bytes(answers.of(message, asked))
                elif asked.ends:
                    checks = programs.PROGRAMS.finish_checks()
                    connection.send_bytes(message.number.to_bytes(NUMBER) + packed(checks))
                else:
                    programs.PROGRAMS.check_beside()
    finally:
        # unloading torch and jax in order takes a second
        os._exit(0)


def _prepare(asked: LoopRun | OwnRun | CheckPrograms) -> None:
    """Let other threads load or compile the programs of JAX that judge a run."""
    if isinstance(asked, LoopRun | OwnRun):
        # a case that cannot be built is reported where its turn comes
        with suppress(CannotJudgeError, UsageError), evaluated_by(asked.evaluator):
            REFERENCES.prepare(asked.case)


def check_programs_beside() -> None:
    """Let XLA check the programs that numpy has evaluated, here and in the second process, beside
    what follows.
    """
    if judge := running_judge():
        judge.send(packed(CheckPrograms(ends=False)))
    programs.PROGRAMS.check_beside()


def checked_programs(show: Callable[[int], None] = lambda _: None) -> ProgramChecks:
    """Wait until XLA has checked every program that numpy has evaluated, here and in the second
    process.

    Args:
        show: called with the number of programs of this process that are left.
    """
    judge = running_judge()
    # sent before this process checks its own, so that both work at the same time
    number = judge.send(packed(CheckPrograms(ends=True))) if judge else 0
    own = programs.PROGRAMS.finish_checks(show)
    answer = judge.answer(number) if judge and number else None
    # the other process is gone, with what it had evaluated; the parent has judged those runs itself
    if answer is None:
        return own
    other: ProgramChecks = unpacked(answer)
    # both processes may have evaluated the same program
    differences = dict.fromkeys((*own.differences, *other.differences))
    return ProgramChecks(own.programs + other.programs, tuple(differences))


_left_to_caller = False


@contextmanager
def caller_checks_programs() -> Iterator[None]:
    """Let `verify` return before XLA has checked what numpy has evaluated: who calls it checks all,
    beside the next loop and after the last one.
    """
    global _left_to_caller
    before = _left_to_caller
    _left_to_caller = True
    try:
        yield
    finally:
        _left_to_caller = before


def differences_of_programs() -> tuple[str, ...]:
    """Return what XLA computes otherwise than numpy, unless the caller of `verify` asks for it."""
    return () if _left_to_caller else checked_programs().differences


SLOW_S = 0.1
"""Seconds of a run from which on only one is ahead: the judge waits for the loop then, and a fault ends the search."""


class Prefetcher:
    """The cases of one loop that are prepared.

    Those that the loop has run on already are in the second process.
    """

    def __init__(
        self,
        loop: Loop,
        problem: Problem | None,
        rules: JudgingRules,
        time_limit_s: float | None,
        *,
        runs: bool,
    ) -> None:
        """Prepare nothing yet.

        Args:
            loop: the subject.
            problem: the user's problem that it trains, if any.
            rules: what it is judged by.
            time_limit_s: seconds after which it is stopped on one case.
            runs: whether it may run on a case whose turn has not come, if there is a second
                process.
        """
        self._loop = loop
        self._problem = problem
        self._rules = rules
        self._time_limit_s = time_limit_s
        self._waiting: deque[Case] = deque()
        self._sent: deque[tuple[JudgeProcess, int, Case, Outcome | None]] = deque()
        self._runs = runs
        self._slow = False
        self._own = next((name for name, own in BUILT_IN.items() if own is loop), None)
        self._is_judge_idle = False

    @property
    def is_own(self) -> bool:
        """Whether the loop is one of the suite's own."""
        return self._own is not None

    def prepare(self, case: Case) -> None:
        """Begin with what a check of a case needs."""
        # the second process has neither the user's problem nor ranks nor a device
        if case.spec is None or case.plan.world_size > 1 or case.device != "cpu":
            run_ranks_ahead(self._loop, case, None if case.spec else self._problem)
            REFERENCES.prepare(case)
            return
        self._waiting.append(case)
        judge = running_judge() if self._runs else None
        if judge is None:
            REFERENCES.prepare(case)
            return
        # a loop runs on cases in their order, also where some are run in their turn only
        while self._waiting and self._runs and not (self._slow and self._sent):
            self._run(judge, self._waiting.popleft())

    def _run(self, judge: JudgeProcess, case: Case) -> None:
        """Run the loop on a case, and send what it did to be judged.

        One of the suite's own is run by the second process, where that one is ahead.
        """
        if self._own is not None and self._is_judge_idle:
            self._is_judge_idle = False
            own = OwnRun(
                case,
                self._own,
                self._rules,
                self._time_limit_s,
                evaluator(),
            )
            if number := judge.send(packed(own)):
                self._sent.append((judge, number, case, None))
            return
        began = time.perf_counter()
        try:
            outcome = run_loop(
                self._loop, generated_instance(case), time_limit_s=self._time_limit_s
            )
        except (CannotJudgeError, UsageError):
            self._runs = False  # told where the case's turn comes
            return
        try:
            message = packed(
                LoopRun(
                    case,
                    outcome,
                    self._rules,
                    evaluator(),
                )
            )
        except (AttributeError, PicklingError, TypeError):
            self._runs = False  # a loop's optimizer has settings that no other process can have
            return
        self._slow = time.perf_counter() - began > SLOW_S
        # a run that failed may have taken the whole time limit, and so may the next one
        self._runs = outcome.raised is None
        if number := judge.send(message):
            self._sent.append((judge, number, case, outcome))

    def result(self, case: Case) -> tuple[Verdict | None, Outcome | None]:
        """Return the verdict on a case, and what the loop did; None for what is not known."""
        # by identity: two equal cases have a turn each
        while any(waiting is case for waiting in self._waiting):
            self._waiting.popleft()
        while any(sent is case for *_, sent, _ in self._sent):
            judge, number, sent, outcome = self._sent.popleft()
            if sent is case:
                self._is_judge_idle = judge.has_answered
                answer = judge.answer(number)
                verdict: Verdict | None = None if answer is None else unpacked(answer)
                return verdict, outcome
        return None, None

    def forget(self) -> None:
        """Drop what was prepared for cases whose turn does not come."""
        forget_ahead()
        self._waiting.clear()
        if self._sent:
            self._sent[0][0].drop()
        self._sent.clear()
