"""A loop run on all ranks of a case."""

from __future__ import annotations

import sys
from dataclasses import replace

from gradcheck_suite.execution.instance import Instance
from gradcheck_suite.execution.quiet import is_quiet
from gradcheck_suite.execution.ranks.messages import Request
from gradcheck_suite.execution.ranks.parts import with_all_parts
from gradcheck_suite.execution.ranks.pool import ENDED, kept_ranks, pool_of
from gradcheck_suite.execution.ranks.sources import source_of
from gradcheck_suite.execution.runner import Outcome, run_loop
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import Loop, Problem
from gradcheck_suite.schema.options import DEFAULT_TIME_LIMIT


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
