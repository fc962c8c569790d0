"""Steps that ranks share out among them, as `ZeroRedundancyOptimizer` does: each rank's optimizer has a few parameters.

Put together, they are one step on all parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from gradcheck_suite.execution.observer import Evaluation, Observation, same_tree
from gradcheck_suite.execution.runner import Outcome

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
