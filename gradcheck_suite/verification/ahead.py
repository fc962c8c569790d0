"""What is done for cases before their turn: ranks and the second process work on them, threads compile programs."""

from __future__ import annotations

import time
from collections import deque

from gradcheck_suite.execution.instance import generated_instance
from gradcheck_suite.execution.packing import packed, unpacked
from gradcheck_suite.execution.ranks.pool import forget_ahead
from gradcheck_suite.execution.ranks.run import run_ranks_ahead
from gradcheck_suite.execution.runner import Outcome, run_loop
from gradcheck_suite.references.reference import REFERENCES
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import Loop, Problem
from gradcheck_suite.schema.results import Verdict
from gradcheck_suite.verification.check import Terms
from gradcheck_suite.verification.second_process.judge import Judge, running_judge
from gradcheck_suite.verification.second_process.messages import DROP, Run

SLOW_S = 0.1
"""Seconds of a run from which on only one is ahead: the judge waits for the loop then, and a fault ends the search."""


class Ahead:
    """The cases of one loop that are prepared; those that the loop has run on already are in the second process."""

    def __init__(
        self, loop: Loop, problem: Problem | None, terms: Terms, time_limit_s: float | None, *, runs: bool
    ) -> None:
        """Prepare nothing yet.

        Args:
            loop: the subject.
            problem: the user's problem that it trains, if any.
            terms: what it is judged by.
            time_limit_s: seconds after which it is stopped on one case.
            runs: whether it may run on a case whose turn has not come, if there is a second process.
        """
        self._loop, self._problem, self._terms, self._time_limit_s = loop, problem, terms, time_limit_s
        self._waiting: deque[Case] = deque()
        self._sent: deque[tuple[Judge, Case, Outcome]] = deque()
        self._runs, self._slow = runs, False

    def prepare(self, case: Case) -> None:
        """Begin with what a check of a case needs."""
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

    def _run(self, judge: Judge, case: Case) -> None:
        """Run the loop on a case, and send what it did to be judged."""
        began = time.perf_counter()
        try:
            outcome = run_loop(self._loop, generated_instance(case), time_limit_s=self._time_limit_s)
            message = packed(Run(case, outcome, self._terms))
        except Exception:
            # a case that cannot be built, or settings that no other process can have: told where the turn comes
            self._runs = False
            return
        self._slow = time.perf_counter() - began > SLOW_S
        # a run that failed may have taken the whole time limit, and so may the next one
        self._runs = outcome.raised is None
        if judge.send(message):
            self._sent.append((judge, case, outcome))

    def result(self, case: Case) -> tuple[Verdict | None, Outcome | None]:
        """Return the verdict on a case, and what the loop did; None for what is not known."""
        if any(waiting is case for waiting in self._waiting):
            while self._waiting.popleft() is not case:
                pass
        if not any(sent is case for _, sent, _ in self._sent):
            return None, None
        while True:
            judge, sent, outcome = self._sent.popleft()
            answer = judge.answer()
            if sent is case:
                verdict: Verdict | None = None if answer is None else unpacked(answer)
                return (verdict if verdict is not None and verdict.case == case else None), outcome

    def forget(self) -> None:
        """Drop what was prepared for cases whose turn does not come."""
        forget_ahead()
        self._waiting.clear()
        if self._sent:
            self._sent[0][0].drop(packed(DROP))
        self._sent.clear()
