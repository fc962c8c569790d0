"""What a loop computes its losses from is named where it is not what the run hands over, and only there."""

from __future__ import annotations

import copy
import dataclasses
from itertools import islice

import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, check
from gradcheck_suite.core.case import probe_case
from gradcheck_suite.loops.reset_modes import backward_window, part_of_window, window_count, windows
from tests.judge.explaining import MASKED, where_not_finite

SPEC = ProblemSpec(
    Input("vector", size=2),
    (Layer("train_scale", factor=2.0), Layer("linear", features=2, bias=True)),
    Loss("mse", reduction="mean"),
)
CASE = Case(SPEC, Plan((1, 3, 2), 2, 2), seed=3)


def _step(run):
    run.optimizer.step()
    run.optimizer.zero_grad()


def _stays_in_eval(run):
    for window in windows(run):
        backward_window(run, window)
        _step(run)
        run.model.eval()


def _evaluates_at_its_last_micro_batch(run):
    for window in windows(run):
        for j, batch in enumerate(window):
            run.model.train(j + 1 < len(window))
            part_of_window(run, batch, window_count(run, window)).backward()
        _step(run)


def _perturbs(run):
    """Take the gradient where a first one leads, as sharpness-aware minimisation does."""
    for window in windows(run):
        backward_window(run, window)
        start = copy.deepcopy(run.model.state_dict())
        with torch.no_grad():
            for p in run.model.parameters():
                p.add_(0.1 * p.grad)
        run.optimizer.zero_grad()
        backward_window(run, window)
        run.model.load_state_dict(start)
        _step(run)


def _trains_a_copy(run):
    other = copy.deepcopy(run.model)
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    for window in windows(run):
        other.zero_grad()
        for batch in window:
            (run.loss(other, batch) * run.count(batch) / window_count(run, window)).backward()
        for p, q in zip(run.model.parameters(), other.parameters(), strict=True):
            p.grad = q.grad.clone()
        _step(run)


def _normalizes_in_every_epoch(run):
    batches = list(run.loader)
    for epoch in range(run.epochs):
        for batch in batches if epoch else ():
            batch["x"].div_(2)
        for first in range(0, len(batches), run.accumulation_steps):
            backward_window(run, batches[first : first + run.accumulation_steps])
            _step(run)


def _adversarial(run):
    """Move each input along the sign of its own gradient: two losses of each micro-batch are sent backward."""
    for window in windows(run):
        total = window_count(run, window)
        for batch in window:
            x = batch["x"].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(run.loss(run.model, {**batch, "x": x}), x)
            moved = {**batch, "x": (x + 0.01 * gradient.sign()).detach()}
            (run.loss(run.model, moved) * run.count(batch) / total).backward()
        _step(run)


def _changes(change):
    def loop(run):
        for window in windows(run):
            backward_window(run, [{name: change(name, t) for name, t in batch.items()} for batch in window])
            _step(run)

    return loop


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("loop", "diagnosis", "says"),
    [
        (_stays_in_eval, "wrong-mode", "the window's losses are computed in eval mode"),
        (_evaluates_at_its_last_micro_batch, "wrong-mode", "1 of the window's 2 losses is computed in eval mode"),
        (_perturbs, "other-parameters", "perturbed or rounded and restored before the step"),
        (_trains_a_copy, "other-parameters", "other values of 1.weight than those that the step changes"),
        (_adversarial, "changed-batch", "it has other values in x,"),
        (_normalizes_in_every_epoch, "changed-batch", "it has other values in x,"),
        (_changes(lambda name, t: t.roll(1, 0) if name == "target" else t), "changed-batch", "other values in target,"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_inputs_than_the_contracts_are_named(loop, diagnosis, says, dtype):
    violation = check(loop, CASE.replace(dtype=dtype)).violation
    assert (violation.kind, violation.diagnosis) == ("gradient", diagnosis), violation.explanation
    assert says in violation.explanation


@pytest.mark.parametrize("case", [CASE, probe_case(Plan((1, 3, 2), 2))], ids=["case", "probe"])
@pytest.mark.parametrize("items", [2, 4])
def test_a_batch_with_other_items_is_told_from_a_wrong_weight(case, items):
    def cut(name, t):
        return t[:items] if len(t) > items else torch.cat([t, t[-1:]]) if items > 2 and len(t) == 3 else t

    violation = check(_changes(cut), case).violation
    assert violation.diagnosis == "changed-batch", violation.explanation
    assert f"{items} items in place of 3" in violation.explanation


def test_a_mode_that_changes_nothing_is_not_blamed():
    """The loop stays in eval mode, in which this model computes the same, and loses a micro-batch."""

    def loses_the_last(run):
        run.model.eval()
        for window in windows(run):
            for batch in window[:-1]:
                part_of_window(run, batch, window_count(run, window)).backward()
            _step(run)

    spec = dataclasses.replace(SPEC, layers=SPEC.layers[1:])
    violation = check(loses_the_last, Case(spec, Plan((1, 3, 2), 3), seed=3)).violation
    assert violation.diagnosis == "dropped-micro-batch"


@pytest.mark.parametrize(
    "then", [lambda run: run.optimizer.zero_grad(), lambda run: "end"], ids=["resets", "ends the window"]
)
def test_a_loop_that_loses_more_than_a_loss_of_nan_is_said_to(then):
    violation = check(where_not_finite(then), MASKED).violation
    assert violation.diagnosis == "skipped-non-finite", violation.explanation
    assert "with finite losses in place of such ones the loop is right" in violation.explanation


def test_a_loop_that_drops_a_window_of_a_nan_loss_is_said_to():
    def drops(run):
        for window in windows(run):
            if all(run.loss(run.model, batch).isfinite() for batch in window):
                backward_window(run, window)
                run.optimizer.step()
                run.optimizer.zero_grad()

    violation = check(drops, MASKED).violation
    assert (violation.kind, violation.diagnosis) == ("step-count", "skipped-non-finite")


def test_a_loop_that_skips_nothing_but_the_loss_of_nan_holds():
    assert check(where_not_finite(lambda run: None), MASKED).holds


def _targets_shifted(run):
    for _ in range(run.epochs):
        pairs = iter(run.pairs)
        while window := list(islice(pairs, run.accumulation_steps)):
            total = sum(len(y) for _, y in window)
            for x, y in window:
                (run.criterion(run.model(x), y.roll(1, 0)) * len(y) / total).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()


def test_targets_that_belong_to_other_inputs_are_named_where_the_loop_calls_the_criterion():
    """The loss is not called with the model then, but with its output."""
    violation = check(_targets_shifted, Case(SPEC, Plan((2, 3), 2, 2), seed=3)).violation
    assert violation.diagnosis == "changed-batch"
    assert (
        "where micro-batch 0 is due, it has other values in target, and the gradient is right" in violation.explanation
    )


def _at_an_average(run):
    parameters = list(run.model.parameters())
    average = [p.detach().clone() for p in parameters]
    for window in windows(run):
        own = [p.detach().clone() for p in parameters]
        for p, value in zip(parameters, average, strict=True):
            p.data.copy_(value)
        backward_window(run, window)
        for p, value in zip(parameters, own, strict=True):
            p.data.copy_(value)
        run.optimizer.step()
        run.optimizer.zero_grad()
        for p, value in zip(parameters, average, strict=True):
            value.lerp_(p.detach(), 0.1)


def test_an_average_of_the_parameters_is_named_once_they_move():
    """It is right where they do not, and is no earlier step's either."""
    violation = check(_at_an_average, Case(SPEC, Plan((2, 3), 1, 2), seed=3, optimizer="sgd")).violation
    assert violation.diagnosis == "other-parameters"
    assert "than those that the step changes" in violation.explanation
    assert check(_at_an_average, Case(SPEC, Plan((2, 3), 1, 2), seed=3)).holds
