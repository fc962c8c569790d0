"""A loop that steps too seldom or too often is told what it does with its windows: counted by hand on small plans.

Four items in micro-batches of 1, 2, 1 and a window of two make one whole window and a short one, of the third; over two
epochs that is four steps.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, check
from gradcheck_suite.core.case import probe_case
from gradcheck_suite.judge.reruns import LoopRunner
from gradcheck_suite.judge.steps import Run, explain_steps, named
from gradcheck_suite.loops.reset_modes import backward_window, windows
from gradcheck_suite.run.instance import generated_instance
from gradcheck_suite.run.runner import run_loop

PLAN = Plan((1, 2, 1), 2, 2)
REGRESSION = ProblemSpec(Input("vector", size=3), (Layer("linear", bias=True, features=2),), Loss("mse"))


def _is_regression(run):
    """Whether a loop trains `REGRESSION`, which has eight parameters, and not the probe."""
    return sum(p.numel() for p in run.model.parameters()) == 8


def _explained(loop, plan=PLAN):
    instance = generated_instance(probe_case(plan))
    runner = LoopRunner(loop)
    diagnosis = explain_steps(instance, run_loop(loop, instance), runner)
    assert runner.runs_left >= 0
    return diagnosis


def _step(run, window):
    backward_window(run, window)
    run.optimizer.step()
    run.optimizer.zero_grad()


def _whole_windows_only(run):
    for window in windows(run):
        if len(window) == run.accumulation_steps:
            _step(run, window)


def _whole_windows_but_their_last(run):
    for window in windows(run):
        if len(window) == run.accumulation_steps:
            _step(run, window[:-1])


def _left_in_the_gradient(run):
    for window in windows(run):
        backward_window(run, window)
        if len(window) == run.accumulation_steps:
            run.optimizer.step()
            run.optimizer.zero_grad()


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
    """As transformers 4.45 trains: as many steps as the epochs have whole windows, none of which ends at an epoch's."""
    k = run.accumulation_steps
    _in_windows(run, _of_all_epochs(run)[: run.epochs * (len(run.loader) // k) * k], k)


def _across_epochs_in_shorter_windows(run):
    batches, k = _of_all_epochs(run), run.accumulation_steps
    _step(run, batches[:k])
    shorter = max(1, k - 1)
    for first in range(k, len(batches) // shorter * shorter, shorter):
        _step(run, batches[first : first + shorter])


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


def _second_window_thrice(run):
    k = run.accumulation_steps
    for _ in range(run.epochs):
        batches = list(run.loader)
        for i in range(len(batches) // k):
            for _ in range(3 if i == 1 else 1):
                _step(run, batches[i * k : i * k + k])


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
    (_whole_windows_only if run.accumulation_steps == PLAN.accumulation_steps else _first_two_micro_batches)(run)


def _one_ahead(run):
    for _ in range(run.epochs):
        first, *rest = run.loader
        _step(run, [first])
        _in_windows(run, rest, run.accumulation_steps)


def _inverted(run):
    for _ in range(run.epochs):
        for i, batch in enumerate(run.loader):
            run.loss(run.model, batch).backward()
            if (i + 1) % run.accumulation_steps:
                run.optimizer.step()
                run.optimizer.zero_grad()


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


@pytest.mark.parametrize(
    ("loop", "plan", "diagnosis", "says"),
    [
        (_whole_windows_only, PLAN, "tail-dropped", "[2]) is never stepped: its items contribute to no step"),
        (_whole_windows_only, Plan((1, 1), 3), "tail-dropped", "[0, 1]) is never stepped: its items contribute to no"),
        (_whole_windows_but_their_last, PLAN, "wrong-step-count", "the steps held micro-batches [0], [0]"),
        (_left_in_the_gradient, PLAN, "tail-leak", "[2]) is never stepped, and its gradient leaks into the next"),
        (_left_in_the_gradient, Plan((1, 1, 1, 1), 3), "tail-leak", "first window; under a plan of 4 windows with"),
        (_every_micro_batch, PLAN, "step-per-micro-batch", "called 6 times, expected 4 (2 epochs of 2 windows)"),
        (_every_micro_batch, Plan((1, 1), 2), "step-per-micro-batch", "called 2 times, expected 1 ("),
        (_one_pass, PLAN, "wrong-step-count", "called 2 times, expected 4 (2 epochs of 2 windows): it makes 1 pass"),
        (_one_pass, Plan((1, 2, 1), 2, 3), "wrong-step-count", "it makes 1 pass(es); pass over run.loader run.epochs"),
        (_one_pass_too_many, PLAN, "wrong-step-count", "called 6 times, expected 4 (2 epochs of 2 windows)"),
        (_one_pass_too_many, Plan((1, 1), 2), "wrong-step-count", "called 2 times, expected 1 (1 epoch of 1 window)"),
        (_across_epochs, PLAN, "wrong-windows", "called 3 times, expected 4 (2 epochs of 2 windows): win"),
        (_across_epochs, Plan((1,), 2, 2), "wrong-windows", "called 1 time, expected 2 (2 epochs of 1 window)"),
        (_across_epochs, Plan((1, 1, 1, 1), 3, 2), "wrong-windows", "called 2 times, expected 4 ("),
        (_across_epochs_and_the_rest, PLAN, "wrong-windows", "windows run on from one epoch"),
        (_across_epochs_and_ended_early, PLAN, "wrong-windows", "it ends before the last 2 micro-batches"),
        (_across_epochs_and_ended_early, Plan((1, 1, 1), 2), "wrong-windows", "windows run on from one epoch"),
        (_across_epochs_in_shorter_windows, Plan((1,) * 4, 3, 2), "wrong-step-count", "(2 epochs of 2 windows)"),
        (_every_micro_batch, Plan((1,) * 5, 5, 3), "step-per-micro-batch", "called 15 times, expected 3 ("),
        # numbers beyond 256 are no longer one object each
        (_every_micro_batch, Plan((1,) * 257, 257), "step-per-micro-batch", "called 257 times, expected 1 ("),
        (_whole_windows_only, Plan((1,) * 515, 2), "tail-dropped", "[514]) is never stepped: its items contribute to"),
        (_twice_under_the_plan, PLAN, "repeated-step", "called 8 times, expected 4 ("),
        (_whole_windows_under_the_plan, PLAN, "wrong-step-count", "the steps held micro-batches [0, 1], [0, 1]"),
        (_inverted, Plan((1,) * 7, 3), "wrong-windows", "steps after the micro-batches that do not end a window"),
        (_one_ahead, Plan((1,) * 11, 3), "wrong-windows", "steps at other places than after 3 micro-batches and at"),
        (_once_more, PLAN, "repeated-step", "the steps held micro-batches [0, 1], [2], [0, 1], [2], nothing"),
        (_never, PLAN, "never-stepped", "called 0 times, expected 4 (2 epochs of 2 windows): run.optimizer was"),
        (_across_epochs, Plan((1, 1, 1), 2), "wrong-windows", "called 1 time, expected 2 (1 epoch of 2"),
        (_downhill(_across_epochs), PLAN, "wrong-windows", "2 micro-batches each; step at the end of every"),
        (_downhill(_left_in_the_gradient), PLAN, "tail-leak", "its gradient leaks into the next epoch's first window"),
        (_downhill(_one_pass), PLAN, "wrong-step-count", "it makes 1 pass(es)"),
        (_first_window_of_an_epoch, Plan((1,) * 5, 2, 2), "dropped-window", "called 2 times, expected 6 ("),
        (_first_window_of_all, PLAN, "dropped-window", "called 1 time, expected 4 (2 epochs of 2 windows)"),
        (_first_window_of_all, Plan((1, 2, 1), 2), "dropped-window", "called 1 time, expected 2 ("),
        (_first_two_micro_batches, Plan((1,) * 5, 2), "wrong-step-count", "called 2 times, expected 3 ("),
        (_second_window_thrice, Plan((1,) * 5, 2, 2), "wrong-step-count", "called 8 times, expected 6 ("),
        (_every_micro_batch_twice, PLAN, "wrong-step-count", "called 12 times, expected 4 (2 epochs of 2 windows)"),
        (_never, Plan((1,), 2), "never-stepped", "run.optimizer was never stepped"),
        (_another_optimizer, PLAN, "never-stepped", "never stepped, yet the parameters moved, so something else was"),
        (_for_ever, PLAN, "wrong-step-count", "called 20 or more times, expected 4 (2 epochs of 2 windows); the loop"),
        (_fails_on_other_plans, Plan((1, 1, 1, 1), 2), "wrong-step-count", "called 1 time"),
        (_fails_on_other_plans, Plan((1, 1, 1, 1), 3, 1), "wrong-step-count", "called 1 time"),
    ],
)
def test_what_a_loop_does_with_its_windows_is_told(loop, plan, diagnosis, says):
    found = _explained(loop, plan)
    assert found.name == diagnosis, found.sentence
    assert says in found.sentence
    if diagnosis == "step-per-micro-batch":
        assert "; the steps held micro-batches [0], [1]" in found.sentence


def _windows_of(size):
    def loop(run):
        for _ in range(run.epochs):
            _in_windows(run, list(run.loader), size(run.accumulation_steps))

    return loop


def _every_micro_batch_without_a_reset(run):
    for _ in range(run.epochs):
        for batch in run.loader:
            run.loss(run.model, batch).backward()
            run.optimizer.step()


def _stepped_twice(run):
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        run.optimizer.step()
        run.optimizer.zero_grad()


def _first_window_skipped(run):
    for i, window in enumerate(windows(run)):
        if i:
            _step(run, window)


@pytest.mark.parametrize(
    ("loop", "diagnosis"),
    [
        (_windows_of(lambda k: k + 1), "wrong-windows"),
        (_windows_of(lambda k: 2 * k), "wrong-windows"),
        (_stepped_twice, "repeated-step"),
        (_every_micro_batch_without_a_reset, "step-per-micro-batch"),
        (_first_window_skipped, "dropped-window"),
        (_inverted, "wrong-windows"),
        (_once_more, "repeated-step"),
        (_across_epochs, "wrong-windows"),
        (_left_in_the_gradient, "tail-leak"),
        (_whole_windows_only, "tail-dropped"),
        (_never, "never-stepped"),
    ],
)
@pytest.mark.parametrize("plan", [Plan((1,), 1), Plan((1,), 2), Plan((1, 1), 1), Plan((1, 2, 1), 2), PLAN], ids=str)
def test_a_small_plan_does_not_change_the_name(loop, diagnosis, plan):
    """On one micro-batch most of them take no step at all, and a plan on which they differ tells them apart."""
    instance = generated_instance(probe_case(plan))
    outcome = run_loop(loop, instance)
    if len(outcome.observations) != plan.steps:
        assert explain_steps(instance, outcome, LoopRunner(loop)).name == diagnosis


@pytest.mark.parametrize(
    ("loop", "name"),
    [
        (_every_micro_batch, "step-per-micro-batch"),
        (_across_epochs, "wrong-windows"),
        (_whole_windows_only, "tail-dropped"),
        (_first_window_of_all, "wrong-step-count"),
    ],
)
def test_the_number_of_steps_suggests_a_name_where_the_probe_cannot_be_used(loop, name):
    def raises_on_the_probe(run):
        if not _is_regression(run):
            raise ValueError
        loop(run)

    instance = generated_instance(Case(REGRESSION, PLAN))
    found = explain_steps(instance, run_loop(raises_on_the_probe, instance), LoopRunner(raises_on_the_probe))
    assert found.name == name


def test_a_loop_that_skips_steps_by_their_values_is_told_from_one_that_never_steps():
    """On the probe of this plan every element of the gradient is 1/4."""

    def skips(run):
        for window in windows(run):
            backward_window(run, window)
            if max(float(p.grad.abs().max()) for p in run.model.parameters()) <= 0.25:
                run.optimizer.step()
            run.optimizer.zero_grad()

    instance = generated_instance(Case(REGRESSION, Plan((2, 2), 2)))
    outcome = run_loop(skips, instance)
    assert not outcome.observations
    diagnosis = explain_steps(instance, outcome, LoopRunner(skips))
    assert diagnosis.name == "skipped-by-size"
    assert "on the weight probe, under the same plan, it takes the right number" in diagnosis.sentence


def test_a_step_that_is_skipped_by_a_count_is_not_put_down_to_the_size_of_a_gradient():
    """Items that count 1/4 make windows of 1/2, 2 and 1/4."""

    def skips(run):
        for window in windows(run):
            if sum(map(run.count, window)) >= 1:
                _step(run, window)

    instance = generated_instance(probe_case(Plan((1, 1, 3, 5, 1), 2), unit=0.25))
    found = explain_steps(instance, run_loop(skips, instance), LoopRunner(skips))
    assert "so it skips steps by the values of gradients or losses" in found.sentence
    assert "norm" not in found.sentence


def test_a_scaler_that_skips_a_step_is_thought_of_in_float16_alone():
    """A loss of 1 times a scale of 2**17 overflows float16, whose largest number is 65504."""

    def scaled(run):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17)
        for window in windows(run):
            for batch in window:
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = run.loss(run.model, batch)
                scaler.scale(loss.half()).backward()
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()

    case = probe_case(PLAN).replace(dtype="float32")
    instance = generated_instance(case)
    diagnosis = explain_steps(instance, run_loop(scaled, instance), LoopRunner(scaled))
    assert diagnosis.name == "dropped-window or skipped-by-size"
    assert "GradScaler skips the step" in diagnosis.sentence
    assert "GradScaler" not in _explained(_never).sentence


def test_the_number_of_steps_is_all_that_is_known_of_a_loop_that_fails_on_the_probe():
    """It is the short window that this loop leaves out, and it trains nothing but its own problem."""

    def loop(run):
        if not _is_regression(run):
            raise ValueError("another model")
        _whole_windows_only(run)

    def never(run):
        if not _is_regression(run):
            raise ValueError("another model")

    def five(run):
        never(run)
        for _ in range(5):
            run.optimizer.step()

    instance = generated_instance(Case(REGRESSION, PLAN))
    subjects = {
        loop: ("tail-dropped", "of 2 windows)"),
        never: ("never-stepped", "was never stepped"),
        five: ("wrong-step-count", "of 2 windows)"),
    }
    for subject, (name, said) in subjects.items():
        found = explain_steps(instance, run_loop(subject, instance), LoopRunner(subject))
        assert found.name == name
        assert found.sentence.endswith(said)


def test_a_loop_that_skips_windows_whose_loss_is_not_finite_is_told_from_one_that_drops_them():
    """The loss of a micro-batch without targets is 0/0, and its gradient 0."""

    def skips(run):
        for window in windows(run):
            losses = [run.loss(run.model, batch) for batch in window]
            if all(loss.isfinite() for loss in losses):
                _step(run, window)

    loss = Loss("cross_entropy", ignore_index=True, label_smoothing=0.0, class_weights=False, reduction="mean")
    classes = ProblemSpec(Input("vector", size=2), (Layer("linear", bias=True, features=3),), loss)
    instance = generated_instance(Case(classes, Plan((2, 1, 2, 1), 2, 2, masked=(1,))))
    found = explain_steps(instance, run_loop(skips, instance), LoopRunner(skips))
    assert found.name == "skipped-non-finite"
    assert found.sentence.startswith(
        "optimizer.step() was called 2 times, expected 4 (2 epochs of 2 windows): the loss"
    )
    # numbers beyond 256 are no longer one object each
    instance = generated_instance(Case(classes, Plan((1,) * 522, 2, masked=(1,))))
    assert explain_steps(instance, run_loop(skips, instance), LoopRunner(skips)).name == "skipped-non-finite"
    # a loop that would be wrong with finite losses too is not said to be right
    instance = generated_instance(Case(classes, Plan((2, 1, 2), 2, 2, masked=(1,))))
    for loop in (_whole_windows_only, _once_more):
        assert explain_steps(instance, run_loop(loop, instance), LoopRunner(loop)).name != "skipped-non-finite"


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("changed_run", [2, 3])
def test_a_loop_that_steps_more_or_less_when_it_runs_again_is_not_repeatable(change, changed_run):
    """The second run comes before the one on the probe, the third after it: there it steps as often as it must."""
    runs: list[int] = []

    def loop(run):
        own = _is_regression(run)
        runs.append(1) if own else None
        for _ in range(7 + change * (len(runs) >= changed_run) if own else PLAN.steps):
            run.optimizer.step()

    instance = generated_instance(Case(REGRESSION, PLAN))
    assert explain_steps(instance, run_loop(loop, instance), LoopRunner(loop)).name == "not-repeatable"


def test_micro_batches_that_are_left_out_are_no_windows_at_other_places():
    """Held in order, they come after those of the whole run: [1], [0] after [0], [1], [2]."""

    def loop(run):
        for _ in range(run.epochs):
            batches = list(run.loader)
            for batch in (*batches[1:2], batches[0]):
                _step(run, [batch])

    found = _explained(loop, Plan((1, 1, 1), 1, 2))
    assert found.name == "wrong-step-count"
    assert found.sentence.endswith("; the steps held micro-batches [1], [0], [1], [0]")


def test_windows_of_another_length_in_a_later_epoch_are_said_to_end_elsewhere():
    def doubles(run):
        for epoch in range(run.epochs):
            _in_windows(run, list(run.loader), run.accumulation_steps * (1 + epoch))

    found = check(doubles, probe_case(Plan((1, 1, 1), 1, 2))).violation
    assert (found.kind, found.diagnosis) == ("step-count", "wrong-windows")
    linear = ProblemSpec(
        Input("vector", size=3), (Layer("linear", bias=True, features=2),), Loss("mse", reduction="mean")
    )
    found = check(doubles, Case(linear, Plan((1, 1, 1), 1, 2))).violation
    assert (found.kind, found.diagnosis) == ("step-count", "wrong-windows")
    assert "the steps held micro-batches [0], [1], [2], [0, 1], [2]" in found.explanation


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
    """The run that showed the violation and the next one take equal numbers of steps, and that on the probe fewer."""
    found = _explained(_misses_steps(*missed))
    assert (found.name == "not-repeatable") == (name is not None)
    if name is None:
        assert "on the weight probe, under the same plan, it takes 2" in found.sentence


def _name(plan, *held):
    found = named([Run(plan, [frozenset(step) for step in held])], plan)
    return found and found[0]


def test_a_fault_that_one_plan_cannot_tell_from_another_has_no_name():
    """With one window, short, no step at all may be a tail that is dropped, and one pass of two a dropped window."""
    assert _name(Plan((1, 1), 3)) is None
    assert _name(Plan((1, 1), 2)) == "never-stepped"
    assert _name(Plan((1, 1), 2, 2), {0, 1}) == "dropped-window"
    assert _name(Plan((1, 1, 1, 1), 2, 2), {0, 1}, {2, 3}) == "wrong-step-count"


def test_steps_of_several_ranks_are_told_by_turns():
    """Rank 0 has micro-batches 0, 1 and 4, 5, rank 1 has 2, 3 and 6; the windows are 0 to 3 and 4 to 6."""
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

    # one window of two means; under a plan of more windows the loop steps too seldom, which explains no weight here
    assert check(one_step_of_means, Case(REGRESSION, Plan((1, 2), 2))).violation.diagnosis == "mean-of-means"
