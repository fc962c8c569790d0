"""What the probe does not show is looked for on the case itself, and nothing is named that is not found."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, check
from gradcheck_suite.loops.reset_modes import backward_window, windows
from tests.judge.explaining import (
    DATA,
    PLAN,
    as_it_is,
    double,
    explained,
    fail,
    forget,
    mix,
    squares,
    then,
    triple,
    weight_of,
)

CLASSES = ProblemSpec(
    Input("vector", size=2),
    (Layer("linear", bias=True, features=3),),
    Loss("nll", reduction="mean", class_weights=False, ignore_index=True),
)

# On the case itself


def _with_a_loss_of_its_own(run):
    for window in windows(run):
        total = sum(batch["w"].sum() for batch in window if "w" in batch)
        for batch in window:
            (squares(run.model, batch) / total).backward()
        double(run)
        run.optimizer.step()
        run.optimizer.zero_grad()


def test_a_loop_that_takes_its_losses_from_elsewhere_is_read_all_the_same():
    name, sentence, _ = explained(_with_a_loss_of_its_own)
    assert name == "wrong-scale"
    assert sentence.startswith("in weight alone, while bias is right")


def _clip(run):
    if weight_of(run) is not None:
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)


def _raise_on_small_weight(run):
    double(run)
    if (weight := weight_of(run)) is not None and weight.grad.abs().max() < 1e-3:
        raise ValueError


def _not_a_number(run):
    if (weight := weight_of(run)) is not None:
        weight.grad[0, 0] = math.nan


@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_raise_on_small_weight, "on the weight probe the items' weights are right"),
        (_not_a_number, "on the weight probe the items' weights are right"),
    ],
)
def test_what_the_case_does_not_show_is_not_named(change, says, window):
    name, sentence, _ = explained(then(change), window=window)
    assert name == "not-linear"
    assert says in sentence


def test_a_threshold_is_seen_however_small_the_gradients_are():
    """On a sum of items that count 1e-20 each: gradients of 1e-18 are doubled, and those of 1e-24 are not."""

    def change(run):
        if (weight := weight_of(run)) is not None and weight.grad.abs().max() > 1e-21:
            weight.grad.mul_(2)

    name, sentence, _ = explained(then(change), sums=True, w=[1e-20] * 8)
    assert name == "not-linear"
    assert "large gradients alone are wrong, and too large" in sentence


@pytest.mark.parametrize("window", [0, 1])
def test_clipping_is_named(window):
    name, sentence, _ = explained(then(_clip), window=window)
    assert name == "clipped"
    assert "its norm is 0.5, as after clipping by norm" in sentence


def test_elements_that_small_losses_flush_to_zero_are_not_taken_for_a_dependence_on_size():
    """Of float32, whose least number is 1e-45: the first column's gradient is 1e-39 of what the others' is."""
    x = DATA["x"] * np.array([1e-39, 1, 1])
    name, sentence, _ = explained(then(mix), plan=Plan((1, 2), 2), x=x, dtype="float32")
    assert name == "not-linear"
    assert "on the weight probe the items' weights are right" in sentence
    assert "it is wrong in weight (4 of 6 elements)" in sentence


def test_clipping_by_value_is_told_from_clipping_by_norm():
    def change(run):
        if weight_of(run) is not None:
            torch.nn.utils.clip_grad_value_(run.model.parameters(), 20.0)

    name, sentence, _ = explained(then(change))
    assert name == "clipped"
    assert "elements are cut at 20, as after clipping by value" in sentence


class _Shared(torch.autograd.Function):
    """The sum of a vector with a number, whose backward hands out the same tensor each time."""

    buffer = torch.zeros((), dtype=torch.float64)

    @staticmethod
    def forward(ctx, x, shift):
        return x + shift

    @staticmethod
    def backward(ctx, gradient):
        _Shared.buffer.copy_(gradient.sum())
        return gradient, _Shared.buffer.view(())


class _Steals(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(7, dtype=torch.float64))
        self.shift = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return _Shared.apply(x @ self.weight[:3], self.shift)[:, None]


def test_a_buffer_that_the_model_uses_again_is_named():
    name, sentence, _ = explained(then(as_it_is), model=lambda seed: _Steals())
    assert name == "stolen-buffer"
    assert sentence.startswith("shift.grad shares its storage")


# NaN and infinity from an earlier window


def _kept_by_scaling(run):
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        for p in run.model.parameters():
            p.grad.mul_(0)


INFINITE = [[math.inf, 1.0], *DATA["y"][1:].tolist()]
"""The first item's first target is infinite: so is the gradient of its row of the weight, and of its bias."""
LAST = [*DATA["y"][:-1].tolist(), [math.inf, 1.0]]


@pytest.mark.parametrize(
    ("epoch", "window", "y", "source"), [(0, 1, INFINITE, 0), (1, 0, LAST, 1), (1, 1, INFINITE, 0)]
)
def test_what_is_not_finite_in_an_earlier_window_is_blamed(epoch, window, y, source):
    name, sentence, details = explained(
        _kept_by_scaling, plan=Plan(PLAN.micro_batches, 2, 2), epoch=epoch, window=window, y=y
    )
    assert name == "poisoned-by-earlier-window"
    assert f"the reference gradient of window {source} is NaN or infinite" in sentence
    assert len(details) == 1


def test_once_parameters_have_moved_no_earlier_window_is_blamed():
    """What was not finite where the parameters were says nothing of where they are."""
    assert explained(_kept_by_scaling, window=1, y=INFINITE)[0] == "poisoned-by-earlier-window"
    assert explained(_kept_by_scaling, window=1, y=INFINITE, optimizer="sgd")[0] != "poisoned-by-earlier-window"


@pytest.mark.parametrize("change", [double, mix])
def test_float16_in_which_small_losses_underflow_is_read_in_float64_alone(change):
    name, sentence, _ = explained(then(change), dtype="float16")
    assert name == ("wrong-scale" if change is double else "not-linear")
    assert "gradient's size" not in sentence


# Where a real optimizer has moved the parameters


@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_fault_is_read_at_the_parameters_that_the_optimizer_has_moved(window, dtype):
    changes = [as_it_is, as_it_is]
    changes[window] = double
    name, sentence, _ = explained(then(*changes), window=window, dtype=dtype, optimizer="sgd")
    assert name == "wrong-scale"
    assert sentence.startswith("in weight alone, while bias is right: every item of the window weighs 2 times")
    assert sentence.endswith(f"(read off the same case {'in float64' if dtype == 'float32' else 'at its start'})")


@pytest.mark.parametrize("change", [_clip, mix])
def test_moved_parameters_are_not_taken_for_a_dependence_on_size(change):
    name, _, _ = explained(then(as_it_is, change), window=1, optimizer="sgd")
    assert name == ("clipped" if change is _clip else "not-linear")


def _one_step_behind(run):
    """Compute each window's gradient before the step of the window before it."""
    pending = None
    for window in windows(run):
        backward_window(run, window)
        gradients = [p.grad for p in run.model.parameters()]
        run.optimizer.zero_grad()
        if pending is not None:
            _step_with(run, pending)
        pending = gradients
    _step_with(run, pending)


def _step_with(run, gradients):
    for p, gradient in zip(run.model.parameters(), gradients, strict=True):
        p.grad = gradient
    run.optimizer.step()
    run.optimizer.zero_grad()


def test_a_gradient_at_the_parameters_of_an_earlier_step_is_named():
    """Where parameters stay, it is right: the probe and the case at its start show nothing."""
    case = Case(CLASSES, Plan((2, 2, 3), 1), optimizer="sgd")
    violation = check(_one_step_behind, case).violation
    assert violation.diagnosis == "stale-parameters"


# In float64


@pytest.mark.parametrize("window", [0, 1])
def test_lower_precision_is_read_in_float64_on_the_same_step(window):
    changes = [as_it_is] * 4
    changes[2 + window] = triple
    name, sentence, _ = explained(
        then(*changes), plan=Plan(PLAN.micro_batches, 2, 2), window=window, epoch=1, dtype="float32"
    )
    assert name == "wrong-scale"
    assert sentence.startswith("in weight alone, while bias is right: every item of the window weighs 3 times")
    assert sentence.endswith("(read off the same case in float64)")


def _in_float64(change):
    """Return what doubles the weight's gradient, but in float64 does something else."""
    return lambda run: (change if run.dtype == torch.float64 else double)(run) if weight_of(run) is not None else None


@pytest.mark.parametrize("change", [as_it_is, fail, mix])
def test_what_float64_does_not_show_is_not_named(change):
    name, sentence, _ = explained(then(_in_float64(change)), dtype="float32")
    assert name == "not-linear"
    assert "or on the model: it is wrong in weight (6 of 6 elements)" in sentence


def test_a_parameter_that_is_left_out_is_named_in_lower_precision_too():
    for dtype in ("float64", "float32"):
        name, sentence, _ = explained(then(forget), dtype=dtype)
        assert name == "no-gradient"
        assert sentence.startswith("in weight alone, while bias is right: the gradient of weight is 0")


def _forget_one_parameter_behind_masked_targets(run):
    for window in windows(run):
        masked = any(run.count(batch) == 0 for batch in window)
        total = sum(run.count(batch) for batch in window)
        *others, last = run.model.parameters()
        run.optimizer.zero_grad()
        for j, batch in enumerate(window):
            if run.count(batch):
                (run.loss(run.model, batch) * run.count(batch) / total).backward()
            if masked and j == 0 and others:
                last.grad.zero_()
        run.optimizer.step()


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"optimizer": "adamw"}])
def test_a_fault_of_one_parameter_is_named_although_masked_targets_take_two_probes(changes):
    case = Case(CLASSES, Plan((2, 2, 2, 3), 2, masked=(3,)), seed=3, **changes)
    violation = check(_forget_one_parameter_behind_masked_targets, case).violation
    # a micro-batch without valid targets has a gradient of 0, and may be there
    assert violation.diagnosis == "no-gradient or dropped-micro-batch"
    assert "in 0.bias alone" in violation.explanation


def _each(change):
    """Return a change of every parameter's gradient, but for the probe's, which has no name of its own here."""

    def changes(run):
        for p in run.model.parameters():
            if weight_of(run) is not None:
                change(p.grad, p.detach())

    return changes


def _swap(run):
    """Hand two parameters of 6 and 2 elements each other's elements, as a flat buffer in another order does."""
    if (weight := weight_of(run)) is not None:
        bias = run.model.bias
        flat = torch.cat([bias.grad.flatten(), weight.grad.flatten()])
        weight.grad.copy_(flat[:6].view(2, 3))
        bias.grad.copy_(flat[6:])


@pytest.mark.parametrize(
    ("change", "diagnosis", "says"),
    [
        (_each(lambda g, p: g.sub_(g.mean())), "projected-gradient", "the mean of all its elements has been"),
        (
            _each(lambda g, p: g.sub_(g.mean(-1, keepdim=True)) if g.ndim > 1 else g),
            "projected-gradient",
            "in weight alone, while bias is right: the mean of each row has been subtracted",
        ),
        (
            _each(lambda g, p: g.sub_(p * (g * p).sum() / (p * p).sum())),
            "projected-gradient",
            "what lies along the parameter itself has been subtracted",
        ),
        (_swap, "permuted-gradient", "they are flattened in one order and taken apart in another"),
    ],
)
def test_what_is_taken_from_a_gradient_or_moved_to_another_is_named(change, diagnosis, says):
    name, sentence, _ = explained(then(change))
    assert name == diagnosis
    assert says in sentence


def test_an_element_that_is_wrong_on_the_probe_too_is_named_on_the_case():
    """The probe and what its weights depend on take two runs, and the recorded run takes a third."""

    def double_the_first(run):
        for p in run.model.parameters():
            p.grad.view(-1)[0] *= 2

    name, sentence, _ = explained(then(double_the_first))
    assert name == "partial-gradient"
    assert "2 times what they should be" in sentence


def test_a_parameter_that_nothing_reaches_is_not_said_to_be_right():
    """Whatever scales the gradient leaves a gradient of 0 as it is."""
    x = DATA["x"] * np.array([0.0, 0.0, 0.0])

    def change(run):
        if weight_of(run) is not None:
            for p in run.model.parameters():
                p.grad.mul_(0.99)

    name, sentence, _ = explained(then(change), x=x)
    assert name == "wrong-scale"
    assert "are right" not in sentence
    assert "is right" not in sentence
