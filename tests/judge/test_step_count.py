"""A loop that steps too seldom or too often is told what it does with its windows: counted by hand
on small plans.

Four items in micro-batches of 1, 2, 1 and a window of two make one whole window and a short one, of
the third; over two epochs that is four steps.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, check
from gradcheck_suite.core.case import probe_case
from gradcheck_suite.judge.reruns import LoopRunner
from gradcheck_suite.judge.steps import HeldSteps, explain_steps, named
from gradcheck_suite.loops.reset_modes import backward_window, windows
from gradcheck_suite.run.instance import generated_instance
from gradcheck_suite.run.runner import run_loop
from studies.zoo import BUGS
from tests.judge.explaining import PART_AND_WHOLE, assert_rows

PLAN = Plan((1, 2, 1), 2, 2)
REGRESSION = ProblemSpec(
    Input("vector", size=3), (Layer("linear", bias=True, features=2),), Loss("mse")
)


def _is_regression(run):
    """Whether a loop trains `REGRESSION`, which has eight parameters, and not the probe."""
    return sum(p.numel() for p in run.model.parameters()) == 8


def _diagnosis(loop, case):
    instance = generated_instance(case)
    runner = LoopRunner(loop)
    found = explain_steps(instance, run_loop(loop, instance), runner)
    assert runner.runs_left >= 0
    return found


def of(loop, case=PLAN):
    """Return a row of a table of faults, of a loop on a case or on the probe of a plan."""
    case = case if isinstance(case, Case) else probe_case(case)

    def row():
        found = _diagnosis(loop, case)
        return found.name, found.explanation()

    return row


def _step(run, window):
    backward_window(run, window)
    run.optimizer.step()
    run.optimizer.zero_grad()


_whole_windows_only = BUGS["tail-dropped"].loop


def _whole_windows_but_their_last(run):
    for window in windows(run):
        if len(window) == run.accumulation_steps:
            _step(run, window[:-1])


_left_in_the_gradient = BUGS["tail-leak"].loop


def _every_micro_batch(run):
    for window in windows(run):
        for batch in window:
            _step(run, [batch])


def _of_all_epochs(run):
    return [batch for _ in range(run.epochs) for batch in run.loader]


def _in_windows(run, batches, size):
    for first in range(0, len(batches), size):
        _step(run, batches[first : first + size])


def _across_epochs(run):
    batches, k = _of_all_epochs(run), run.accumulation_steps
    _in_windows(run, batches[: len(batches) // k * k], k)


def _across_epochs_and_the_rest(run):
    """It takes the right number of steps under the plan that separates faults which look alike."""
    _in_windows(run, _of_all_epochs(run), run.accumulation_steps)


def _across_epochs_and_ended_early(run):
    """As transformers 4.45 trains: as many steps as the epochs have whole windows, none of which
    ends at an epoch's.
    """
    k = run.accumulation_steps
    _in_windows(run, _of_all_epochs(run)[: run.epochs * (len(run.loader) // k) * k], k)


def _one_pass(run):
    _in_windows(run, list(run.loader), run.accumulation_steps)


def _one_pass_too_many(run):
    _one_pass(run)
    for window in windows(run):
        _step(run, window)


def _once_more(run):
    for window in windows(run):
        _step(run, window)
    run.optimizer.step()


def _never(run):
    for window in windows(run):
        backward_window(run, window)


def _another_optimizer(run):
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    for window in windows(run):
        backward_window(run, window)
        optimizer.step()


def _first_window_of_an_epoch(run):
    for _ in range(run.epochs):
        _step(run, list(run.loader)[: run.accumulation_steps])


def _first_window_of_all(run):
    _step(run, list(run.loader)[: run.accumulation_steps])


def _first_two_micro_batches(run):
    for _ in range(run.epochs):
        for batch in list(run.loader)[:2]:
            _step(run, [batch])


def _every_micro_batch_twice(run):
    for window in windows(run):
        for batch in window:
            _step(run, [batch])
            run.optimizer.step()


def _twice_under_the_plan(run):
    for window in windows(run):
        _step(run, window)
        if run.accumulation_steps == PLAN.accumulation_steps:
            run.optimizer.step()


def _whole_windows_under_the_plan(run):
    """Under another plan, what has no name."""
    (
        _whole_windows_only
        if run.accumulation_steps == PLAN.accumulation_steps
        else _first_two_micro_batches
    )(run)


def _one_ahead(run):
    for _ in range(run.epochs):
        first, *rest = run.loader
        _step(run, [first])
        _in_windows(run, rest, run.accumulation_steps)


_inverted = BUGS["inverted-condition"].loop


def _downhill(loop):
    """Return the loop with its losses negated: an ascent, whose weights are below 0."""

    def negated(run):
        loop(replace(run, loss=lambda model, batch: -run.loss(model, batch)))

    return negated


def _for_ever(run):
    while True:
        run.optimizer.step()


def _fails_on_other_plans(run):
    if len(list(run.loader)) != 4:
        raise ValueError
    run.optimizer.step()


def _only_regression(loop):
    """Return a loop that trains nothing but its own problem."""

    def alone(run):
        if not _is_regression(run):
            raise ValueError("another model")
        loop(run)

    return alone


def _five_steps(run):
    for _ in range(5):
        run.optimizer.step()


def _longer_in_later_epochs(run):
    for epoch in range(run.epochs):
        _in_windows(run, list(run.loader), run.accumulation_steps * (1 + epoch))


def _two_of_three_swapped(run):
    for _ in range(run.epochs):
        batches = list(run.loader)
        for batch in (*batches[1:2], batches[0]):
            _step(run, [batch])


def _skips_where(skipped):
    """Return a loop that leaves out the step of some windows, given the run and the window."""

    def loop(run):
        for window in windows(run):
            backward_window(run, window)
            if not skipped(run, window):
                run.optimizer.step()
            run.optimizer.zero_grad()

    return loop


def _is_large(run, window):
    return max(float(p.grad.abs().max()) for p in run.model.parameters()) > 0.25


def _has_nan(run, window):
    return not all(run.loss(run.model, batch).isfinite() for batch in window)


def _scaled(run):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17)
    for window in windows(run):
        for batch in window:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = run.loss(run.model, batch)
            scaler.scale(loss.half()).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()


ONE_EACH = {n: Plan((1,) * n, 2, 2) for n in range(1, 6)}
LOSS = Loss(
    "cross_entropy", ignore_index=True, label_smoothing=0.0, class_weights=False, reduction="mean"
)
CLASSES = ProblemSpec(Input("vector", size=2), (Layer("linear", bias=True, features=3),), LOSS)
NAMED = {
    "tail-dropped": {
        "whole windows": of(_whole_windows_only),
        "whole windows of none": of(_whole_windows_only, Plan((1, 1), 3)),
        # numbers beyond 256 are no longer one object each
        "whole windows of many": of(_whole_windows_only, Plan((1,) * 515, 2)),
        # it is the short window that this loop leaves out, and it trains nothing but its own
        # problem
        "of its own problem": of(_only_regression(_whole_windows_only), Case(REGRESSION, PLAN)),
    },
    "tail-leak": {
        "left in the gradient": of(_left_in_the_gradient),
        "left in the gradient of one epoch": of(_left_in_the_gradient, Plan((1,) * 4, 3)),
        "downhill": of(_downhill(_left_in_the_gradient)),
    },
    "step-per-micro-batch": {
        "every one": of(_every_micro_batch),
        "of one window": of(_every_micro_batch, Plan((1, 1), 2)),
        "of three epochs": of(_every_micro_batch, Plan((1,) * 5, 5, 3)),
        "of many": of(_every_micro_batch, Plan((1,) * 257, 257)),
        "of its own problem": of(_only_regression(_every_micro_batch), Case(REGRESSION, PLAN)),
    },
    "wrong-windows": {
        "across epochs": of(_across_epochs),
        "across epochs of one": of(_across_epochs, ONE_EACH[1]),
        "across epochs of four": of(_across_epochs, Plan((1,) * 4, 3, 2)),
        "across one epoch": of(_across_epochs, Plan((1, 1, 1), 2)),
        "and the rest": of(_across_epochs_and_the_rest),
        "and ended early": of(_across_epochs_and_ended_early),
        "and ended early, of one epoch": of(_across_epochs_and_ended_early, Plan((1, 1, 1), 2)),
        "inverted": of(_inverted, Plan((1,) * 7, 3)),
        "one ahead": of(_one_ahead, Plan((1,) * 11, 3)),
        "downhill": of(_downhill(_across_epochs)),
        "of its own problem": of(_only_regression(_across_epochs), Case(REGRESSION, PLAN)),
        "longer in the second epoch": of(_longer_in_later_epochs, Plan((1, 1, 1), 1, 2)),
        "longer in the second epoch of a case": of(
            _longer_in_later_epochs, Case(REGRESSION, Plan((1, 1, 1), 1, 2))
        ),
    },
    "wrong-step-count": {
        "whole windows but their last": of(_whole_windows_but_their_last),
        "one pass": of(_one_pass),
        "one pass of three": of(_one_pass, Plan((1, 2, 1), 2, 3)),
        "one too many": of(_one_pass_too_many),
        "one too many of one": of(_one_pass_too_many, Plan((1, 1), 2)),
        "whole windows under this plan alone": of(_whole_windows_under_the_plan),
        "downhill": of(_downhill(_one_pass)),
        "first two micro-batches": of(_first_two_micro_batches, Plan((1,) * 5, 2)),
        "every micro-batch twice": of(_every_micro_batch_twice),
        "for ever": of(_for_ever),
        "fails on other plans": of(_fails_on_other_plans, Plan((1,) * 4, 2)),
        "fails on other plans, of a short window": of(_fails_on_other_plans, Plan((1,) * 4, 3)),
        "the first window of its own problem": of(
            _only_regression(_first_window_of_all), Case(REGRESSION, PLAN)
        ),
        "five steps on its own problem": of(_only_regression(_five_steps), Case(REGRESSION, PLAN)),
        # held in order, they come after those of the whole run: [1], [0] after [0], [1], [2]
        "two of three, swapped": of(_two_of_three_swapped, Plan((1, 1, 1), 1, 2)),
    },
    "repeated-step": {"under this plan": of(_twice_under_the_plan), "once more": of(_once_more)},
    "never-stepped": {
        "never": of(_never),
        "never, of one": of(_never, Plan((1,), 2)),
        "another optimizer": of(_another_optimizer),
        "never on its own problem": of(_only_regression(_never), Case(REGRESSION, PLAN)),
    },
    "dropped-window": {
        "all but the first of an epoch": of(_first_window_of_an_epoch, ONE_EACH[5]),
        "all but the first": of(_first_window_of_all),
        "all but the first of one epoch": of(_first_window_of_all, Plan((1, 2, 1), 2)),
        "the last micro-batch without valid targets": of(
            _skips_where(lambda run, window: not run.count(window[-1])),
            Case(CLASSES, Plan((1, 1, 2), 2, masked=(1,))),
        ),
    },
    "skipped-by-size": {
        # on the probe of this plan every element of the gradient is 1/4
        "large ones": of(_skips_where(_is_large), Case(REGRESSION, Plan((2, 2), 2))),
        # items that count 1/4 make windows of 1/2, 2 and 1/4: that is no size of a gradient
        "by count": of(
            _skips_where(lambda run, window: sum(map(run.count, window)) < 1),
            probe_case(Plan((1, 1, 3, 5, 1), 2), unit=0.25),
        ),
    },
    # a loss of 1 times a scale of 2**17 overflows float16, whose largest number is 65504
    "dropped-window or skipped-by-size": {
        "a scaler": of(_scaled, probe_case(PLAN).replace(dtype="float32"))
    },
    # the loss of a micro-batch without targets is 0/0, and its gradient 0
    "skipped-non-finite": {
        "four micro-batches": of(
            _skips_where(_has_nan), Case(CLASSES, Plan((2, 1, 2, 1), 2, 2, masked=(1,)))
        ),
        "many": of(_skips_where(_has_nan), Case(CLASSES, Plan((1,) * 522, 2, masked=(1,)))),
    },
}
"""Name -> what is planted -> the row that plants it and returns what is said."""


@PART_AND_WHOLE
def test_what_a_loop_does_with_its_windows_is_told(part, golden):
    assert_rows(golden, "judge_steps", NAMED, part=part)


@pytest.mark.parametrize(
    ("loop", "diagnosis"),
    [
        (BUGS["windows-of-one-more"].loop, "wrong-windows"),
        (BUGS["windows-of-twice-the-size"].loop, "wrong-windows"),
        (BUGS["two-steps-per-window"].loop, "repeated-step"),
        (BUGS["first-window-skipped"].loop, "dropped-window"),
        (_inverted, "wrong-windows"),
        (_once_more, "repeated-step"),
        (_across_epochs, "wrong-windows"),
        (_left_in_the_gradient, "tail-leak"),
        (_whole_windows_only, "tail-dropped"),
        (_never, "never-stepped"),
    ],
)
@pytest.mark.parametrize(
    "plan", [Plan((1,), 1), Plan((1,), 2), Plan((1, 1), 1), Plan((1, 2, 1), 2), PLAN], ids=str
)
def test_a_small_plan_does_not_change_the_name(loop, diagnosis, plan):
    """On one micro-batch most of them take no step at all, and a plan on which they differ tells
    them apart.
    """
    instance = generated_instance(probe_case(plan))
    outcome = run_loop(loop, instance)
    if len(outcome.observations) != plan.steps:
        assert explain_steps(instance, outcome, LoopRunner(loop)).name == diagnosis


def test_a_loop_that_is_wrong_with_finite_losses_too_is_not_said_to_skip_others():
    case = Case(CLASSES, Plan((2, 1, 2), 2, 2, masked=(1,)))
    for loop in (_whole_windows_only, _once_more):
        assert _diagnosis(loop, case).name != "skipped-non-finite"


def _misses_steps(*missed):
    """Return a loop that leaves out the first steps of a run, so many in each run."""
    left = list(missed)

    def loop(run):
        skipped = left.pop(0)
        for i, window in enumerate(windows(run)):
            if i >= skipped:
                _step(run, window)

    return loop


@pytest.mark.parametrize(
    ("missed", "name"),
    [
        ((1, 0, 1, 1, 1), "not-repeatable"),
        ((1, 2, 1, 1, 1), "not-repeatable"),
        ((1, 1, 2, 1, 1), "not-repeatable"),
        ((1, 1, 2, 2, 2, 2), None),
    ],
)
def test_steps_that_differ_from_run_to_run_have_no_other_name(missed, name):
    """The run that showed the violation and the next one take equal numbers of steps, and that on
    the probe fewer.
    """
    found = _diagnosis(_misses_steps(*missed), probe_case(PLAN))
    assert (found.name == "not-repeatable") == (name is not None)
    if name is None:
        assert "on the weight probe, under the same plan, it takes 2" in found.sentence


def _name(plan, *held):
    found = named([HeldSteps(plan, [frozenset(step) for step in held])], plan)
    return found and found.name


def test_a_fault_that_one_plan_cannot_tell_from_another_has_no_name():
    """With one window, short, no step at all may be a tail that is dropped, and one pass of two a
    dropped window.
    """
    assert _name(Plan((1, 1), 3)) is None
    assert _name(Plan((1, 1), 2)) == "never-stepped"
    assert _name(Plan((1, 1), 2, 2), {0, 1}) == "dropped-window"
    assert _name(Plan((1, 1, 1, 1), 2, 2), {0, 1}, {2, 3}) == "wrong-step-count"


def test_steps_of_several_ranks_are_told_by_turns():
    """Rank 0 has micro-batches 0, 1 and 4, 5, rank 1 has 2, 3 and 6.

    The windows are 0 to 3 and 4 to 6.
    """
    plan = Plan((1,) * 7, 2, ranks=(4, 3))
    turns = [{0, 2}, {1, 3}, {4, 6}, {5}]
    assert plan.windows == ((0, 1, 2, 3), (4, 5, 6))
    assert _name(plan, *turns) == "step-per-micro-batch"
    assert _name(plan, turns[0] | turns[1]) == "tail-dropped"
    assert _name(plan, turns[0] | turns[1] | turns[2], turns[3]) == "wrong-windows"
    assert _name(plan, {0}, {1, 2}, {3}) is None


def test_a_step_that_holds_its_window_is_named_by_its_weights():
    def one_step_of_means(run):
        for batch in run.loader:
            run.loss(run.model, batch).backward()
        run.optimizer.step()

    # one window of two means; under a plan of more windows the loop steps too seldom, which
    # explains no weight here
    assert (
        check(one_step_of_means, Case(REGRESSION, Plan((1, 2), 2))).violation.diagnosis
        == "mean-of-means"
    )
