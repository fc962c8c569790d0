"""What only the end of a run of JAX shows: tails, leaves without a gradient, lost updates."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np

from gradcheck_suite.auditing.jax.judge import JaxJudge
from gradcheck_suite.auditing.jax.verdicts import FEWEST_STEPS
from gradcheck_suite.auditing.jax.windows import (
    Optimizer,
    Step,
    StepGradients,
)
from gradcheck_suite.auditing.rules import StepFault
from gradcheck_suite.core.findings import finding
from gradcheck_suite.core.text import counted

MOST_NAMES = 3


def judge_end(judge: JaxJudge, *, complete: bool) -> None:
    """Judge what only the end of a run shows.

    Args:
        judge: of the run.
        complete: whether the run ended by itself, and was watched to its end.
    """
    # no gradient follows that could show that the last update was no step
    judge.settle_unsure()
    for optimizer in judge.optimizers.values():
        _judge_held(judge, optimizer)
        _note_never(judge, optimizer)
        if complete:
            _judge_tail(judge, optimizer)
    for optimizer in judge.implicit.values():
        if optimizer.lengths:
            said = (
                "no optimizer of optax was seen: a change of the parameters is taken for a step,"
                " up to the learning rate"
            )
            judge.verdicts.notes[finding("changed-parameters", said)] += 1
    _judge_points(judge)


def _judge_held(judge: JaxJudge, optimizer: Optimizer) -> None:
    mark = optimizer.mark
    if mark is None or not optimizer.held.all_times:
        return
    if not optimizer.steps:
        said = f"the optimizer gave updates of 0 in all of its {optimizer.held.all_times} calls"
        judge.verdicts.notes[finding("no-update", said, mark.place)] += 1
    elif judge.verdicts.holds_back(optimizer) and None in judge.verdicts.held.get(
        optimizer.index, []
    ):
        calls = optimizer.held.times + optimizer.steps
        fault = StepFault(
            "step-per-micro-batch",
            f"the optimizer's state moves at each of {calls} gradients, and its updates are held"
            f" back in {optimizer.held.times} of them: accumulate gradients, not updates, as"
            " `optax.MultiSteps` does",
            kind="step-count",
        )
        of_optimizer = [one.window for one in judge.verdicts.shown if one.optimizer is optimizer]
        if of_optimizer:
            judge.verdicts.violate(fault, of_optimizer[0], optimizer)


def _note_never(judge: JaxJudge, optimizer: Optimizer) -> None:
    mark = optimizer.mark
    if optimizer.reached is None or not optimizer.lengths or mark is None:
        return
    never = np.flatnonzero(optimizer.reached == 0)
    # where no leaf has ever had a gradient, the windows have said so already
    if not len(never) or len(never) == len(optimizer.reached):
        return
    names = ", ".join(mark.names[i] or f"leaf {i}" for i in never[:MOST_NAMES])
    more = f" and {len(never) - MOST_NAMES} more" if len(never) > MOST_NAMES else ""
    said = (
        f"{len(never)} of {len(optimizer.reached)} leaves get a gradient of zeros in every step"
        f" ({names}{more})"
    )
    remedy = "look for a `stop_gradient`, or leave them out of the optimizer"
    judge.verdicts.notes[finding("no-gradient", said, optimizer.place, remedy)] += 1


def _judge_tail(judge: JaxJudge, optimizer: Optimizer) -> None:
    usual = optimizer.lengths.most_common(1)
    mark = optimizer.mark
    # after a gap it is not known which gradients have reached a step
    if not usual or mark is None or optimizer.generation != judge.generation:
        return
    parts = [
        one
        for one in judge.passes.own(mark.shapes)
        if optimizer.index not in one.consumers and one.mark.place in optimizer.sites
    ]
    last = max((one.number for one in optimizer.before), default=0)
    left = [one for one in parts if one.number > last]
    number = len({one.number for one in left})
    # as many as a whole window may as well be a window that the run was ended in
    if 0 < number < usual[0][0]:
        fault = StepFault(
            "tail-dropped",
            f"the last {counted(number, 'micro-batch')} went backward and never reached a step",
            kind="step-count",
            causes=("in-audit",),
        )
        step = Step(
            judge.steps, mark.place, mark.shapes, (), np.zeros(0), np.zeros(0), None, mark.dtype
        )
        violation = judge.verdicts.violation(
            fault,
            StepGradients(
                step,
                left,
                [1.0] * len(left),
                0.0,
            ),
            optimizer,
        )
        judge.verdicts.found.append(violation.of_no_step)


def _judge_points(judge: JaxJudge) -> None:
    """Judge parameters that stay the same while an optimizer steps on their gradients."""
    told = ("stale-parameters", "parameter-not-updated")
    stale = {one.where for one in judge.verdicts.found if one.diagnosis in told}
    for points in judge.passes.points.values():
        first = points.first
        mark = points.first.mark
        steps = [
            after
            for after in chain.from_iterable(
                optimizer.moved_after
                for optimizer in judge.optimizers.values()
                if mark.place in optimizer.sites
            )
            # a step outside of these gradients could not have moved the parameters between them
            if first.number <= after < points.last.number
        ]
        if len(steps) < FEWEST_STEPS or points.is_moving or str(mark.place) in stale:
            continue
        step = Step(
            0,
            mark.place,
            (),
            (),
            np.zeros(0),
            np.zeros(0),
            None,
            mark.dtype,
        )
        fault = StepFault(
            "parameter-not-updated",
            f"the gradients are by the same parameters after {counted(len(steps), 'step')}: the"
            " updates, or what they were added to, are thrown away",
            kind="parameters",
            causes=("thrown-away",),
        )
        violation = judge.verdicts.violation(
            fault,
            StepGradients(
                step,
                [first],
                [1.0],
                0.0,
            ),
            Optimizer(0),
        )
        judge.verdicts.found.append(replace(violation, stepped=None))
