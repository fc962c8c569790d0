"""check(loop, case) -> Verdict: run the loop, hold every gradient that reached its optimizer against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from gradcheck_suite.diagnosis.further_runs.loop_runner import LoopRunner
from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.execution.autocast import Compute
from gradcheck_suite.execution.instance import Instance
from gradcheck_suite.execution.optimizers import NEEDS_CLOSURE
from gradcheck_suite.execution.ranks.run import run_ranks
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.references.errors import CannotJudgeError
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import (
    EDITS_PARAMETERS,
    SCHEDULES_MICRO_BATCHES,
    Loop,
    Problem,
    assumptions_of,
    autocast_of,
)
from gradcheck_suite.schema.options import DEFAULT_TIME_LIMIT
from gradcheck_suite.schema.results import Verdict
from gradcheck_suite.schema.weight_probe import is_probe
from gradcheck_suite.verification.accumulable import reference_of
from gradcheck_suite.verification.judge_run import judge_run
from gradcheck_suite.verification.parameters import Trajectory
from gradcheck_suite.verification.ranks import judge_ranks
from gradcheck_suite.verification.step_calls import step_calls_fault


@dataclass(frozen=True)
class Terms:
    """What the runs of a loop are judged by.

    Attributes:
        assumes: all that the loop assumes, names from `ASSUMPTIONS`.
        autocast: dtype in which it may compute its losses under `torch.autocast`, or None.
    """

    assumes: frozenset[str]
    autocast: Compute


def terms_of(loop: Loop, assumes: Iterable[str] = (), autocast: str | None = None) -> Terms:
    """Return what a loop is judged by: what is assumed of it, and what it declares itself."""
    return Terms(frozenset(assumes) | assumptions_of(loop), autocast or autocast_of(loop))


def check(
    loop: Loop,
    case: Case,
    *,
    problem: Problem | None = None,
    time_limit_s: float | None = DEFAULT_TIME_LIMIT,
    shrinking: bool = False,
    autocast: str | None = None,
    assumes: Iterable[str] = (),
    outcome: Outcome | None = None,
) -> Verdict:
    """Run a loop on a case and judge it.

    Args:
        loop: the subject.
        case: what it trains.
        problem: the user's problem that `case.problem` names, if it is not a generated one.
        time_limit_s: seconds after which the loop is stopped and counts as `raised`.
        shrinking: whether the kind of a violation suffices, as while Hypothesis shrinks. The loop then runs once, and
            a violation has a diagnosis only if its own gradient or number of steps determines one. JAX does not
            compute gradients that are right, and fewer draws measure rounding, so `allowed` may be larger.
        autocast: dtype in which the loop may compute its losses under `torch.autocast`; None for what it declares.
        assumes: what the loop assumes beside what it declares itself; its fault is named within that.
        outcome: of the loop's run, where it has run on the case already.

    Raises:
        UsageError: the case cannot be built, or the user's problem fails before any loop runs.
        CannotRunHere: the loop cannot train the user's problem, or passes no closure to an optimizer that needs one.
    """
    terms = terms_of(loop, assumes, autocast)

    def run(instance: Instance) -> list[Outcome]:
        return [outcome] if outcome else run_ranks(loop, instance, time_limit_s=time_limit_s)

    def runner(rank: int, alike: bool) -> LoopRunner | None:
        if shrinking:
            return None
        return LoopRunner(loop, time_limit_s=time_limit_s, assumes=terms.assumes, rank=rank, alike=alike)

    return check_run(run, case, terms, runner, problem=problem, shrinking=shrinking)


def check_run(
    run: Callable[[Instance], list[Outcome]],
    case: Case,
    terms: Terms,
    runner: Callable[[int, bool], LoopRunner | None],
    *,
    problem: Problem | None = None,
    shrinking: bool = False,
) -> Verdict:
    """Judge what a loop does with a case.

    Args:
        run: instance -> what the loop does with it on each rank.
        case: what it trains.
        terms: what the loop is judged by.
        runner: (rank, whether all ranks had the same gradients) -> runs the loop again for a diagnosis, or None.
        problem: as for `check`.
        shrinking: as for `check`.

    Raises:
        UsageError: as `check`.
        CannotRunHere: as `check`.
    """
    try:
        reference, fault = reference_of(case, problem)
        if reference is None:
            return Verdict(case, fault)
        asked = not shrinking and not is_probe(case)
        if asked:
            reference.start()
        outcomes = run(reference.instance)
        if asked and reference.finding:
            return Verdict(case, finding=reference.finding)
        if refused := next((outcome.refused for outcome in outcomes if outcome.refused), None):
            return _refused(case, problem, refused)

        def judged(rank: int) -> Verdict:
            outcome = outcomes[rank]
            trajectory = Trajectory(case, outcome, edited=EDITS_PARAMETERS in terms.assumes)
            verdict = judge_run(reference, outcome, trajectory, runner(rank, outcome.alike), terms.autocast)
            if verdict.violation or verdict.finding:
                return verdict
            schedules = SCHEDULES_MICRO_BATCHES in terms.assumes
            return replace(verdict, violation=step_calls_fault(case, outcome, rank, schedules=schedules))

        verdict = judge_ranks(case, outcomes, judged)
        if verdict.violation is not None and not is_probe(case) and reference.finding:
            return Verdict(case, finding=reference.finding)
        return verdict
    except CannotJudgeError as error:
        return Verdict(case, skipped=str(error))


def _refused(case: Case, problem: Problem | None, why: str) -> Verdict:
    """Return that a case is skipped, or raise where every case would be."""
    if problem is not None or case.optimizer in NEEDS_CLOSURE:
        # the user's problem, or the loop that passes no closure, is the same in every case
        raise CannotRunHere(why)
    return Verdict(case, skipped=why)
