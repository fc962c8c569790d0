"""Judging a loop that ran on several ranks: what one rank did wrong is the loop's violation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gradcheck_suite.diagnosis.weight_patterns.weights import names_of
from gradcheck_suite.execution.observer import same_tree
from gradcheck_suite.execution.ranks.pool import ENDED
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.records.columns import counted
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.results import Verdict, Violation

UNEVEN = (
    "; in this case a rank has no micro-batch in the last window: if your sampler gives every rank the same number, as "
    "DistributedSampler does, state the assumption even-ranks"
)


def judge_ranks(case: Case, outcomes: Sequence[Outcome], judged: Callable[[int], Verdict]) -> Verdict:
    """Return the verdict on a case: the first rank's violation, or that all hold.

    Args:
        case: the case.
        outcomes: what the loop did, for each rank.
        judged: returns the verdict on one rank by itself.
    """
    if len(outcomes) == 1:
        return judged(0)
    # a rank that ended is why others lost their connection to it, one that raised is why others wait, and one that
    # changed its parameters is why the gradients that others add up are wrong
    order = sorted(range(len(outcomes)), key=lambda rank: _weight(outcomes[rank]))
    verdicts: dict[int, Verdict] = {}
    for rank in order:
        twin = next((r for r in verdicts if _same(outcomes[rank], outcomes[r])), None)
        verdicts[rank] = verdict = judged(rank) if twin is None else verdicts[twin]
        if verdict.violation is not None:
            right = [r for r in verdicts if r != rank]
            return replace(verdict, violation=_of_rank(case, verdict.violation, rank, outcomes, right))
        if verdict.finding or verdict.skipped:
            return verdict
    return replace(verdicts[0], ratio=max(verdict.ratio for verdict in verdicts.values()))


def _weight(outcome: Outcome) -> tuple[bool, ...]:
    """Return what sorts the outcomes of ranks: causes before what follows from them."""
    raised = outcome.raised or ""
    left = [outcome.start, *(step.after for step in outcome.observations)]
    drifts = any(not same_tree(a, step.parameters) for a, step in zip(left, outcome.observations, strict=False))
    return not raised, outcome.timed_out, not raised.startswith(ENDED), not drifts


def _summary(outcome: Outcome) -> tuple[object, ...]:
    steps = len(outcome.observations), outcome.skipped, outcome.scheduler_steps, outcome.scaler_calls
    return outcome.raised, outcome.endless, outcome.structure, *steps


def _same(one: Outcome, other: Outcome) -> bool:
    """Return whether two ranks did the same to the bit, so that one of them need not be judged."""
    return _summary(one) == _summary(other) and all(
        same_tree(a.parameters, b.parameters) and same_tree(a.after, b.after) and same_tree(a.gradients, b.gradients)
        for a, b in zip(one.observations, other.observations, strict=True)
    )


def _of_rank(
    case: Case, violation: Violation, rank: int, outcomes: Sequence[Outcome], right: Sequence[int]
) -> Violation:
    """Return a violation with the rank that shows it, in words too, and with the ranks that are right."""
    said = violation.explanation
    if outcomes[rank].timed_out:
        said += UNEVEN if case.plan.has_idle_rank else ""
    elif violation.kind != "raised" and all(_same(outcomes[rank], outcome) for outcome in outcomes):
        said = f"on all {counted(len(outcomes), 'rank')} alike: {said}"
    else:
        said = f"on rank {rank} of {len(outcomes)}: {said}"
        if right and names_of(violation.diagnosis) & {"not-reduced", "partly-reduced", "dropped-rank"}:
            said += f" (the gradients of rank {right[0]} are right: look for a reduce in place of an all_reduce)"
    return replace(violation, explanation=said, rank=rank)
