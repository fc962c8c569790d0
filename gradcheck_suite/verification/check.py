"""check(loop, case) -> Verdict: run the loop, hold every gradient that reached its optimizer
against the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from gradcheck_suite.core.case import Case, is_probe
from gradcheck_suite.core.contract import (
    DEFAULT_TIME_LIMIT,
    SCHEDULES_MICRO_BATCHES,
    Loop,
    Problem,
    assumptions_of,
    autocast_of,
    expect_loop,
    is_jax,
)
from gradcheck_suite.core.faults import names_of, remedy_over_ranks, with_note
from gradcheck_suite.core.results import Verdict, Violation
from gradcheck_suite.core.text import counted
from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.judge.reruns import LoopRunner
from gradcheck_suite.judge.weights import Diagnosis
from gradcheck_suite.reference.large_batch import CannotJudgeError, Reference
from gradcheck_suite.run.instance import Compute, Instance
from gradcheck_suite.run.observer import same_tree
from gradcheck_suite.run.optimizers import NEEDS_CLOSURE
from gradcheck_suite.run.ranks import ENDED, run_ranks
from gradcheck_suite.run.runner import Outcome
from gradcheck_suite.verification.judge_run import RunJudge, Trajectory
from gradcheck_suite.verification.separability import reference_of

POISONED = "poisoned-by-earlier-window"
# no issue is known; the factor is `(1 - emit)` in optax/transforms/_accumulation.py
MULTI_STEPS = (
    "optax.MultiSteps resets its accumulator by multiplying it by 0, so that a NaN or an infinity"
    " stays in it for ever: windows after one that is not finite are not judged"
)


def step_calls_fault(
    case: Case, outcome: Outcome, rank: int, *, schedules: bool
) -> Violation | None:
    """Return the violation of a loop that calls a scheduler or scaler once per micro-batch, the
    optimizer per window.

    The gradients may be right all the same: a schedule only ends K times too early, and a scaler
    that is disabled, as on a CPU, does nothing. Once per window and once per epoch are both right,
    and any other number may be meant.

    Args:
        case: the case.
        outcome: what the loop did on the rank.
        rank: the rank, from 0.
        schedules: whether the loop assumes that its schedule counts micro-batches.
    """
    plan = case.plan
    micro_batches = (plan.ranks or (len(plan.micro_batches),))[rank]
    windows = len(plan.windows)
    # Accelerate steps a scheduler as many times per window as there are ranks; with one micro-batch
    # per window, stepping per window and per micro-batch are the same
    if is_probe(case) or micro_batches in (windows, windows * plan.world_size):
        return None

    def calls(counts: dict[int, int]) -> str | None:
        """Say how often something was called where it was once per micro-batch, in all epochs or in
        one.
        """
        total = sum(counts.values())
        if total == micro_batches * plan.epochs:
            return (
                f"{total} times, once per micro-batch, and the optimizer {plan.steps} times, once"
                " per window"
            )
        if len(counts) == plan.epochs and (
            found := [e for e, n in counts.items() if n == micro_batches]
        ):
            return (
                f"{micro_batches} times in epoch {found[0]}, once per micro-batch, and the"
                f" optimizer {windows} times, once per window"
            )
        return None

    name = "step-per-micro-batch"
    for counts in outcome.scheduler_steps:
        if not schedules and (sentence := calls(counts)):
            found = Diagnosis(name, f"a learning rate scheduler was stepped {sentence}")
            return Violation(
                "step-count",
                name,
                found.explanation(),
                case,
            )
    for method, counts in outcome.scaler_calls:
        if sentence := calls(counts):
            # a scaler that is disabled, as without CUDA, hides what this does to the gradient
            found = Diagnosis(
                name, f"GradScaler.{method} was called {sentence}", causes=("scaler",)
            )
            return Violation(
                "step-count",
                name,
                found.explanation(),
                case,
            )
    return None


# Judging a loop that ran on several ranks: what one rank did wrong is the loop's violation.


UNEVEN = (
    "; in this case a rank has no micro-batch in the last window: if your sampler gives every rank"
    " the same number, as DistributedSampler does, state the assumption even-ranks"
)


def judge_ranks(
    case: Case, outcomes: Sequence[Outcome], judged: Callable[[int], Verdict]
) -> Verdict:
    """Return the verdict on a case: the first rank's violation, or that all hold.

    Args:
        case: the case.
        outcomes: what the loop did, for each rank.
        judged: returns the verdict on one rank by itself.
    """
    if len(outcomes) == 1:
        return judged(0)
    # a rank that ended is why others lost their connection to it, one that raised is why others
    # wait, and one that changed its parameters is why the gradients that others add up are wrong
    order = sorted(range(len(outcomes)), key=lambda rank: _weight(outcomes[rank]))
    verdicts: dict[int, Verdict] = {}
    for rank in order:
        # data-parallel ranks do the same to the bit, so one verdict usually stands for all
        twin = next((r for r in verdicts if _same(outcomes[rank], outcomes[r])), None)
        verdicts[rank] = verdict = judged(rank) if twin is None else verdicts[twin]
        if verdict.violation is not None:
            right = [r for r in verdicts if r != rank]
            return replace(
                verdict, violation=_of_rank(case, verdict.violation, rank, outcomes, right)
            )
        # what cannot be judged on one rank cannot be on the others, which have the same reference
        if verdict.finding or verdict.skipped:
            return verdict
    return replace(verdicts[0], ratio=max(verdict.ratio for verdict in verdicts.values()))


def _weight(outcome: Outcome) -> tuple[bool, ...]:
    """Return what sorts the outcomes of ranks: causes before what follows from them."""
    raised = outcome.raised or ""
    left = [outcome.start, *(step.after for step in outcome.observations)]
    drifts = any(
        not same_tree(a, step.parameters)
        for a, step in zip(left, outcome.observations, strict=False)
    )
    # False sorts first
    return not raised, outcome.timed_out, not raised.startswith(ENDED), not drifts


def _summary(outcome: Outcome) -> tuple[object, ...]:
    steps = (
        len(outcome.observations),
        outcome.skipped,
        outcome.scheduler_steps,
        outcome.scaler_calls,
    )
    return outcome.raised, outcome.endless, outcome.structure, *steps


def _same(one: Outcome, other: Outcome) -> bool:
    """Return whether two ranks did the same to the bit, so that one of them need not be judged."""
    return _summary(one) == _summary(other) and all(
        same_tree(a.parameters, b.parameters)
        and same_tree(a.after, b.after)
        and same_tree(a.gradients, b.gradients)
        for a, b in zip(one.observations, other.observations, strict=True)
    )


def _of_rank(
    case: Case, violation: Violation, rank: int, outcomes: Sequence[Outcome], right: Sequence[int]
) -> Violation:
    """Return a violation with the rank that shows it, in words too, and with the ranks that are
    right.
    """
    # without ranks, the outcomes are those of the devices of a loop of JAX
    sentence = violation.explanation
    place = "rank" if case.plan.ranks else "device"
    sentence = remedy_over_ranks(sentence, violation.diagnosis)
    if outcomes[rank].timed_out:
        sentence += UNEVEN if case.plan.has_idle_rank else ""
    elif violation.kind != "raised" and all(_same(outcomes[rank], outcome) for outcome in outcomes):
        sentence = f"on all {counted(len(outcomes), place)} alike: {sentence}"
    else:
        sentence = f"on {place} {rank} of {len(outcomes)}: {sentence}"
        nothing_arrived = not any(row.observed for row in violation.weights if row.rank != rank)
        if right and nothing_arrived and names_of(violation.diagnosis) & {"not-reduced"}:
            note = (
                f"the gradients of rank {right[0]} are right, as after a reduce in place of an"
                " all_reduce"
            )
            sentence = with_note(sentence, note)
        if place == "device" and violation.kind == "gradient":
            note = (
                "devices have different gradients, as where no psum adds up a sum or a count over"
                " them"
            )
            sentence = with_note(sentence, note)
    return replace(violation, explanation=sentence, rank=rank if case.plan.ranks else None)


@dataclass(frozen=True)
class JudgingRules:
    """What the runs of a loop are judged by.

    Attributes:
        assumes: all that the loop assumes, names from `ASSUMPTIONS`.
        autocast: dtype in which it may compute its losses under `torch.autocast`, or None.
        jax: whether the loop is one of JAX.
    """

    assumes: frozenset[str]
    autocast: Compute
    jax: bool = False


def rules_of(loop: Loop, assumes: Iterable[str] = (), autocast: str | None = None) -> JudgingRules:
    """Return what a loop is judged by: what is assumed of it, and what it declares itself."""
    return JudgingRules(
        frozenset(assumes) | assumptions_of(loop), autocast or autocast_of(loop), is_jax(loop)
    )


def of_torch(loop: Loop, problem: Problem | None) -> Problem | None:
    """Return a user's problem.

    Of a loop of JAX, the problem of torch that the references are computed by.

    Raises:
        UsageError: the loop is of JAX and the problem is not, or its loss is not pure.
    """
    if problem is None or not is_jax(loop):
        return problem
    from gradcheck_suite.run.jax_run import (  # torch loops need none of it
        LiftedProblem,
        as_torch_problem,
    )

    return problem if isinstance(problem, LiftedProblem) else as_torch_problem(problem)


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
        shrinking: whether the kind of a violation suffices, as while Hypothesis shrinks. The loop
            then runs once, and a violation has a diagnosis only if its own gradient or number of
            steps determines one. JAX does not compute gradients that are right, and fewer draws
            measure rounding, so `allowed` may be larger.
        autocast: dtype in which the loop may compute its losses under `torch.autocast`; None for
            what it declares.
        assumes: what the loop assumes beside what it declares itself; its fault is named within
            that.
        outcome: what the loop did, where it has run on the case already.

    Raises:
        UsageError: the loop or the case is none, the case cannot be built, or the user's problem
            fails before any loop runs.
        CannotRunHere: the loop cannot train the user's problem, or passes no closure to an
            optimizer that needs one.
    """
    expect_loop(loop)
    if not isinstance(case, Case):
        raise UsageError(f"case is of type {type(case).__name__}: expected a gradcheck_suite.Case")
    rules = rules_of(loop, assumes, autocast)
    problem = of_torch(loop, problem)

    def run(instance: Instance) -> list[Outcome]:
        return [outcome] if outcome else run_ranks(loop, instance, time_limit_s=time_limit_s)

    runners: list[LoopRunner] = []

    def runner(rank: int, alike: bool) -> LoopRunner | None:
        if shrinking:
            return None
        runners.append(
            LoopRunner(
                loop, time_limit_s=time_limit_s, assumes=rules.assumes, rank=rank, alike=alike
            )
        )
        return runners[-1]

    verdict = check_run(
        run,
        case,
        rules,
        runner,
        problem=problem,
        shrinking=shrinking,
    )
    return replace(verdict, runs=verdict.runs + sum(runner.runs for runner in runners))


def check_run(
    run: Callable[[Instance], list[Outcome]],
    case: Case,
    rules: JudgingRules,
    runner: Callable[[int, bool], LoopRunner | None],
    *,
    problem: Problem | None = None,
    shrinking: bool = False,
) -> Verdict:
    """Judge what a loop does with a case.

    Args:
        run: instance -> what the loop does with it on each rank.
        case: what it trains.
        rules: what the loop is judged by.
        runner: (rank, whether all ranks had the same gradients) -> runs the loop again for a
            diagnosis, or None.
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
        # JAX's programs are traced and compiled while the loop runs
        if asked:
            # torch computes every window now, while other threads load or compile the programs of
            # JAX
            reference.start()
        outcomes = run(reference.instance)
        if asked and reference.finding:
            return Verdict(case, finding=reference.finding)
        if refused := next((outcome.refused for outcome in outcomes if outcome.refused), None):
            return _refused(case, problem, refused)

        def judged(rank: int) -> Verdict:
            again = runner(rank, outcomes[rank].alike)
            return _judged_on_rank(
                reference,
                outcomes[rank],
                rank,
                rules,
                again,
            )

        verdict = judge_ranks(case, outcomes, judged)
        found = verdict.violation
        # a known fault of a library's, which would hide every other one of the loop
        if found and found.diagnosis == POISONED and outcomes[0].keeps_non_finite:
            return Verdict(case, skipped=MULTI_STEPS)
        # while a case shrinks, JAX is asked of violations alone
        if verdict.violation is not None and not is_probe(case) and reference.finding:
            return Verdict(case, finding=reference.finding)
        return verdict
    except CannotJudgeError as error:
        return Verdict(case, skipped=str(error))


def _judged_on_rank(
    reference: Reference,
    outcome: Outcome,
    rank: int,
    rules: JudgingRules,
    runner: LoopRunner | None,
) -> Verdict:
    """Return the verdict on what one rank did."""
    case = reference.instance.case
    trajectory = Trajectory(
        case,
        outcome,
        rules.assumes,
        jax=rules.jax,
    )
    verdict = RunJudge(
        reference,
        outcome,
        trajectory,
        runner,
        rules.autocast,
    ).verdict()
    # a wrong gradient is told in place of a schedule that ends too early
    if verdict.violation or verdict.finding:
        return verdict
    schedules = SCHEDULES_MICRO_BATCHES in rules.assumes
    return replace(verdict, violation=step_calls_fault(case, outcome, rank, schedules=schedules))


def _refused(case: Case, problem: Problem | None, why: str) -> Verdict:
    """Return that a case is skipped, or raise where every case would be."""
    if problem is not None or case.optimizer in NEEDS_CLOSURE:
        # the user's problem, or the loop that passes no closure, is the same in every case
        raise CannotRunHere(why)
    return Verdict(case, skipped=why)
