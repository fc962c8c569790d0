"""What is said of a wrong gradient when its weights cannot be read, or are right."""

from __future__ import annotations

import math
import re
from itertools import islice

import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, Problem, ProblemSpec, check
from gradcheck_suite.core.case import probe_case
from gradcheck_suite.core.comparison import Comparison
from gradcheck_suite.core.results import ItemWeight
from gradcheck_suite.core.text import HEADER
from gradcheck_suite.judge.gradient import explain_gradient
from gradcheck_suite.judge.reruns import Evidence, LoopRunner, run_recorded
from gradcheck_suite.loops.reset_modes import MODES, backward_window, window_count, windows
from gradcheck_suite.reference.large_batch import Reference
from gradcheck_suite.run.instance import generated_instance, user_instance
from tests.judge.explaining import (
    DATA,
    MASKED,
    PLAN,
    as_it_is,
    double,
    every,
    explained,
    fail,
    forget,
    mix,
    of_case,
    of_weight,
    squares,
    table_of,
    then,
    triple,
    weight_of,
    where_not_finite,
)

CASE = Case(
    ProblemSpec(Input("vector", size=2), (Layer("linear", features=2, bias=True),), Loss("mse", reduction="mean")),
    Plan((3, 1, 2), 2),
    seed=1,
)


_double_matrices = every(lambda g, p: g.mul_(2) if p.ndim == 2 else g)


@pytest.mark.parametrize(
    ("change", "diagnosis", "says"),
    [
        (every(lambda g, p: g.mul_(g) if p.ndim == 2 else g), "not-linear", "(clipping, decay, normalizing)"),
        (every(lambda g, p: g.add_(torch.randn_like(g))), "added-term", "a term that does not depend on the loss"),
        (every(lambda g, p: g.add_(p, alpha=0.25)), "added-term", "0.25 times the parameter is added to the gradient"),
        (every(lambda g, p: g.div_(g.norm())), "normalised", "divided by its own size"),
        (every(lambda g, p: g.sign_()), "normalised", "every element is 1, 0 or -1"),
        (
            lambda run: torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.01),
            "clipped",
            "its norm is 0.01, as after clipping by norm",
        ),
        (
            lambda run: torch.nn.utils.clip_grad_value_(run.model.parameters(), 0.01),
            "clipped",
            "as after clipping by norm or by value",
        ),
        (
            every(lambda g, p: g.masked_fill_(g.abs() < g.abs().max().clamp(min=1e-3), 0)),
            "skipped-by-size",
            "small elements are 0",
        ),
    ],
)
def test_what_does_not_grow_with_the_loss_is_named_by_what_it_does(change, diagnosis, says):
    violation = check(then(change), CASE).violation
    assert (violation.kind, violation.diagnosis) == ("gradient", diagnosis)
    assert says in violation.explanation


@pytest.mark.parametrize(
    ("change", "where"),
    [(_double_matrices, "0.weight"), (lambda run: dict(run.model.named_parameters())["0.bias"].grad.mul_(2), "0.bias")],
)
def test_a_fault_of_one_parameter_is_read_on_the_case_itself(change, where):
    violation = check(then(change), CASE).violation
    assert (violation.kind, violation.diagnosis) == ("gradient", "wrong-scale")
    assert f"in {where} alone" in violation.explanation
    assert "2 times what it should" in violation.explanation


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fault_of_one_parameter_is_named_in_lower_precision_too(dtype):
    violation = check(then(_double_matrices), CASE.replace(dtype=dtype)).violation
    assert (violation.kind, violation.diagnosis) == ("gradient", "wrong-scale")
    assert "in 0.weight alone" in violation.explanation
    assert violation.explanation.endswith("(read off the same case in float64)")


def test_items_of_one_micro_batch_may_be_weighted_unequally():
    def weigh_the_first_twice(run):
        for window in windows(run):
            backward_window(run, window)
            if "0.weight" in dict(run.model.named_parameters()) and run.model[0].weight.ndim == 1:
                run.model[0].weight.grad[0] *= 2
            run.optimizer.step()
            run.optimizer.zero_grad()

    violation = check(weigh_the_first_twice, probe_case(Plan((2, 1), 2))).violation
    assert (violation.kind, violation.diagnosis) == ("gradient", "unequal-items")
    assert violation.explanation.endswith("those of micro-batch 0 weigh 0.666667, 0.333333, expected 0.333333 each")


def test_the_weights_are_shown_beside_the_right_ones():
    def no_reset(run):
        for window in windows(run):
            backward_window(run, window)
            run.optimizer.step()

    violation = check(no_reset, CASE).violation
    assert (violation.epoch, violation.window) == (0, 1)
    # right: 0, 0, 1/2; the first window's 1/4 is still there
    assert violation.weights == (ItemWeight("0", 3, 0, 0.25), ItemWeight("1", 1, 0, 0.25), ItemWeight("2", 2, 0.5, 0.5))


# What is said of gradients that are written down: windows as a whole, NaN losses, None, digits.


ALLOWED = 2.0**-30

# An objective of the whole window: half the square of its items' sum with the weight

ROWS = np.array([[1.0, 2.0, -1.0], [2.0, 0.0, 3.0], [1.0, 1.0, 2.0], [0.0, 4.0, 1.0], [2.0, 2.0, 2.0]])
WEIGHT = np.array([2.0, 1.0, -1.0])
SIZES = (1, 3, 1)


class _Halves(torch.nn.Module):
    """A weight in two parameters."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(WEIGHT[:1]))
        self.b = torch.nn.Parameter(torch.tensor(WEIGHT[1:]))

    def forward(self, x):
        return x @ torch.cat([self.a, self.b])


OF_WINDOWS = Problem(
    lambda seed: _Halves(),
    lambda items, seed: torch.from_numpy(ROWS[:items]),
    lambda model, x: model(x).sum() ** 2 / 2,
    reduction="batch",
)


def _own(rows):
    """Return the gradient of the objective of some items."""
    total = rows.sum(axis=0)
    return (total @ WEIGHT) * total


PARTS = (_own(ROWS[:1]), _own(ROWS[1:4]))
RIGHT = _own(ROWS[:4])


def _named(observed, window=0, allowed=ALLOWED):
    reference = Reference(user_instance(Case("p.py:P", Plan(SIZES, 2)), OF_WINDOWS))
    expected = (RIGHT, _own(ROWS[4:]))[window]
    assert np.array_equal(reference.window(window).expected, expected)
    comparison = Comparison(reference.layout, expected, np.array(observed), np.full(3, allowed))
    return explain_gradient(Evidence(comparison, reference.window(window), 0, LoopRunner(MODES["set_to_none"])))


@pytest.mark.parametrize(
    ("shares", "how"),
    [((1, 1), "the sum of"), ((1 / 2, 1 / 2), "the mean of"), ((1 / 4, 3 / 4), "the mean, weighted by items, of")],
)
@pytest.mark.parametrize(("off", "named"), [(0, True), (4, True), (-4, True), (4.01, False), (-4.01, False)])
def test_micro_batches_by_themselves_are_named_up_to_four_times_what_is_allowed(shares, how, off, named):
    observed = shares[0] * PARTS[0] + shares[1] * PARTS[1]
    observed[1] += off * ALLOWED
    found = _named(observed)
    assert (found.name == "plain-accumulation") is named
    assert (f"the gradient is {how} those of the micro-batches' own losses" in found.sentence) is named
    assert found.details[0].startswith("3 of 3 elements of the gradient differ")


def test_other_faults_of_a_whole_window_are_named_by_their_elements():
    found = _named(RIGHT * np.array([2.0, 1.0, 1.0]))
    assert found.name == "wrong-scale"
    assert found.sentence.startswith("in a alone, while b is right: every element is 2 times")
    found = _named(RIGHT + np.array([1.0, 5.0, -3.0]))
    assert found.name == "not-linear"
    assert "it is wrong in a (1 of 1 elements), b (2 of 2 elements)" in found.sentence
    assert "the objective is a function of the whole window" in found.sentence


# Losses of NaN


def _resets_at_nan(change):
    return where_not_finite(lambda run: run.optimizer.zero_grad(), change)


def _of_case(change):
    """Return a change of the case's gradients, and not of the probe's."""
    return lambda run: [change(p.grad) for p in run.model.parameters()] if len(list(run.model.parameters())) > 1 else 0


@pytest.mark.parametrize(
    ("change", "skipped"),
    [
        (as_it_is, True),
        (_of_case(lambda g: g.mul_(1 + 1e-16)), True),
        (_of_case(lambda g: g.mul_(1.001)), False),
        (_of_case(lambda g: g.sub_(0.001)), False),
        (_of_case(lambda g: g.neg_()), False),
    ],
)
def test_a_loop_that_is_right_with_finite_losses_alone_skips_what_is_not_finite(change, skipped):
    violation = check(_resets_at_nan(change), MASKED).violation
    assert violation.kind == "gradient"
    assert (violation.diagnosis == "skipped-non-finite") is skipped
    assert violation.details[0].startswith("12 of 12 elements")


def _forgets_where_nan(run):
    for window in windows(run):
        total = window_count(run, window)
        losses = [run.loss(run.model, batch) for batch in window]
        for batch, loss in zip(window, losses, strict=True):
            (loss * run.count(batch) / total).backward()
        if not all(loss.isfinite() for loss in losses):
            for p in run.model.parameters():
                p.grad = None
        run.optimizer.step()
        run.optimizer.zero_grad()


def test_a_gradient_that_is_missing_where_a_loss_is_not_finite_is_skipped():
    violation = check(_forgets_where_nan, MASKED).violation
    assert (violation.kind, violation.diagnosis) == ("none-pattern", "skipped-non-finite")


def test_a_parameter_that_others_prove_right_is_not_skipped():
    """Only the bias is lost with the loss of NaN: what is skipped would be missing in the weight as well."""

    def loses_the_bias(run):
        for window in windows(run):
            finite = all(run.loss(run.model, batch).isfinite() for batch in window)
            backward_window(run, window)
            *_, last = run.model.parameters()
            if not finite:
                last.grad.mul_(0.5)
            run.optimizer.step()
            run.optimizer.zero_grad()

    violation = check(loses_the_bias, MASKED).violation
    assert violation.diagnosis == "wrong-scale"
    assert "in 0.bias alone" in violation.explanation


# NaN of an earlier window


def test_a_window_is_blamed_for_nan_only_where_parameters_stay():
    """The second window's root has an infinite derivative at the first parameters, 0, and none elsewhere."""

    def root(model, x):
        found = model(x)[:, 0]
        return torch.where(x[:, 0] > 1, found.sqrt(), found).mean()

    def zeros(seed):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        return model

    problem = Problem(zeros, lambda items, seed: torch.arange(1.0, items + 1)[:, None], root)
    reference = Reference(user_instance(Case("own", Plan((1, 1), 1, 2)), problem))
    for parameters in (None, {"weight": torch.ones(1, 1)}):
        window = reference.window(0, parameters)
        comparison = Comparison(reference.layout, np.ones(1), np.full(1, np.nan), np.full(1, ALLOWED))
        found = explain_gradient(Evidence(comparison, window, 1, LoopRunner(MODES["set_to_none"], max_runs=0)))
        assert (found.name == "poisoned-by-earlier-window") is (parameters is None)


# Which step

THREE = Plan((1, 2, 1, 2, 1, 1), 2, 3)
"""Three windows an epoch; the ninth step is the last of the third."""


def _only_at(step, change):
    changes = [as_it_is] * 9
    changes[step] = change
    return then(*changes)


@pytest.mark.parametrize("step", [0, 4, 8])
@pytest.mark.parametrize("probed", [True, False])
def test_a_fault_of_one_step_is_read_at_that_step(step, probed):
    """Every parameter doubled is seen on the probe; the weight alone, on the case."""
    epoch, window = divmod(step, 3)

    def doubles(run):
        for name, p in run.model.named_parameters():
            if probed or name == "weight":
                p.grad.mul_(1.7)

    name, sentence, details = explained(_only_at(step, doubles), plan=THREE, epoch=epoch, window=window)
    assert name == "wrong-scale"
    assert ("in weight alone" in sentence) is not probed
    assert (len(details) > 1) is probed


# Elements of one sign, which the probe has not


def _relu_of_each(run):
    for window in windows(run):
        total = window_count(run, window)
        kept = [torch.zeros_like(p) for p in run.model.parameters()]
        for batch in window:
            run.model.zero_grad()
            (run.loss(run.model, batch) * run.count(batch) / total).backward()
            for k, p in zip(kept, run.model.parameters(), strict=True):
                k.add_(p.grad.relu())
        for k, p in zip(kept, run.model.parameters(), strict=True):
            p.grad = k
        run.optimizer.step()
        run.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        ([[4.0, -2.0], [-2.0, 4.0]], "wrong-scale or partial-gradient"),
        ([[4.0, -2.0, 8.0], [-2.0, 4.0, -4.0]], "partial-gradient"),
    ],
)
def test_a_relu_that_looks_like_a_scale_is_told_by_enough_elements(rows, name):
    """What is positive is twice the sum in each element."""
    size = len(rows[0])

    def ones(seed):
        model = torch.nn.Linear(size, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        return model

    problem = Problem(
        ones,
        lambda items, seed: torch.tensor((rows * items)[:items], dtype=torch.float64),
        lambda model, x: model(x).mean(),
    )
    violation = check(_relu_of_each, Case("own", Plan((1, 1), 2)), problem=problem).violation
    assert violation.diagnosis == name


# What the probe says of the case


_more = every(lambda g, p: g.mul_(1.7))


def _loses_the_first(run):
    for window in windows(run):
        for batch in window[1:]:
            (run.loss(run.model, batch) * run.count(batch) / window_count(run, window)).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def test_a_fault_that_the_probe_lacks_is_said_to_depend_on_values_or_the_model():
    name, sentence, _ = explained(then(forget))
    assert name == "no-gradient"
    assert "; but on the weight probe the items' weights are right, so the fault depends on the values of" in sentence
    for loop, found in ((_loses_the_first, "dropped-micro-batch"), (then(_more), "wrong-scale")):
        name, sentence, _ = explained(loop, plan=Plan((1, 2, 3, 2), 4))
        assert name == found
        assert "the weight probe" not in sentence


# Rounding


def _rounds_gradients(run):
    for p in run.model.parameters():
        p.grad.copy_(p.grad.bfloat16())


def _rounds_weights(run):
    for window in windows(run):
        for batch in window:
            share = (run.count(batch) / window_count(run, window)).bfloat16()
            (run.loss(run.model, batch) * share).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("loop", "name"), [(then(_rounds_gradients), "low-precision"), (_rounds_weights, "low-precision")]
)
def test_rounded_gradients_are_told_from_rounded_weights_by_the_case(loop, name):
    """Thirds, which no binary format has."""
    assert explained(loop, plan=Plan((1, 2), 2))[0] == name


# What the probe does not show is looked for on the case itself, and nothing is named that is not found.


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


_not_a_number = of_weight(lambda g: g[0, 0].fill_(math.nan))


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
        (of_case(lambda g, p: g.sub_(g.mean())), "projected-gradient", "the mean of all its elements has been"),
        (
            of_case(lambda g, p: g.sub_(g.mean(-1, keepdim=True)) if g.ndim > 1 else g),
            "projected-gradient",
            "in weight alone, while bias is right: the mean of each row has been subtracted",
        ),
        (
            of_case(lambda g, p: g.sub_(p * (g * p).sum() / (p * p).sum())),
            "projected-gradient",
            "what lies along the parameter itself has been subtracted",
        ),
        (_swap, "misplaced-gradient", "they are flattened in one order and taken apart in another"),
    ],
)
def test_what_is_taken_from_a_gradient_or_moved_to_another_is_named(change, diagnosis, says):
    name, sentence, _ = explained(then(change))
    assert name == diagnosis
    assert says in sentence


def test_an_element_that_is_wrong_on_the_probe_too_is_named_on_the_case():
    """The probe and what its weights depend on take two runs, and the recorded run takes a third."""
    name, sentence, _ = explained(then(every(lambda g, p: g.view(-1)[0].mul_(2))))
    assert name == "partial-gradient"
    assert "2 times what they should be" in sentence


def test_a_parameter_that_nothing_reaches_is_not_said_to_be_right():
    """Whatever scales the gradient leaves a gradient of 0 as it is."""
    x = DATA["x"] * np.array([0.0, 0.0, 0.0])

    name, sentence, _ = explained(then(of_case(lambda g, p: g.mul_(0.99))), x=x)
    assert name == "wrong-scale"
    assert "are right" not in sentence
    assert "is right" not in sentence


# What the weight probe shows of a wrong gradient: which step is read, by which count, and where it cannot be used.


# What is counted


def _by_items(run):
    for window in windows(run):
        items = sum(len(next(iter(batch.values()))) for batch in window)
        for batch in window:
            (run.loss(run.model, batch) * len(next(iter(batch.values()))) / items).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def test_a_mean_is_read_by_what_the_case_counts_where_its_items_are_right():
    """Of items that count 2, 1, 0 and 1, 1, 0, 0, 0 the loop gives each mean the weight of its number of items."""
    counts = (2, 1, 0, 0, 0, 0, 1, 1)
    name, sentence, details = explained(_by_items, plan=Plan((1, 2, 3, 2), 4), w=counts)
    assert name == "wrong-count"
    assert "as if every item of theirs counted alike" in sentence
    assert details[1] == HEADER.format(rank="")
    # the third has count 0; right is 1/5 of each, seen n/8 over the count
    assert table_of(details) == [
        ["0", "2", "0.2", "0.0625"],
        ["1", "1", "0.2", "0.25"],
        ["2", "0", "0", "0"],
        ["3", "2", "0.2", "0.125"],
    ]


def test_a_sum_is_read_by_its_items_alone():
    name, sentence, details = explained(then(double), sums=True, w=(2, 1, 1, 1, 1, 1, 1, 1))
    assert name == "wrong-scale"
    assert sentence.startswith("in weight alone, while bias is right: every item of the window weighs 2 times")
    assert len(details) == 1


def test_items_of_a_sum_weigh_one():
    name, sentence, details = explained(then(every(lambda g, p: g.mul_(0.5))), sums=True)
    assert name == "wrong-scale"
    # K is 2 here, and 3 on the probe that tells it from a constant
    assert "weighs 0.5 times what it should, in every wrong window alike, whatever its counts" in sentence
    assert table_of(details) == [
        ["0", "1", "1", "0.5"],
        ["1", "2", "1", "0.5"],
        ["2", "3", "0", "0"],
        ["3", "2", "0", "0"],
    ]


# Which step


def test_the_step_that_is_wrong_is_the_one_that_is_read():
    """Of three windows and two epochs each step has a fault of its own: a multiple of the right gradient."""

    def multiplies(factor):
        return every(lambda g, p: g.mul_(factor))

    plan, factors = Plan((1, 2, 1, 2, 1, 1), 2, 2), (3, 5, 7, 11, 13, 17)
    for step, factor in enumerate(factors):
        epoch, window = divmod(step, 3)
        loop = then(*map(multiplies, factors))
        name, sentence, details = explained(loop, plan=plan, epoch=epoch, window=window)
        assert name == "wrong-scale"
        assert f"weighs {factor} times what it should" in sentence
        table = table_of(details)
        assert [row[2] != "0" for row in table] == [j // 2 == window for j in range(6)]


# Where the probe cannot be used


def _on_probe(change):
    """Return the linear fault on the case, and on the probe another."""
    return lambda run: mix(run) if weight_of(run) is not None else change(run)


_infinite = every(lambda g, p: g.div_(0))
double_all = every(lambda g, p: g.mul_(2))


def _doubles_where_large(run):
    if all(p.grad.abs().max() < 1e-3 for p in run.model.parameters()):
        raise ValueError
    double_all(run)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (fail, "the weight probe cannot be used: the loop raised on it"),
        (_infinite, "on the weight probe, whose gradients are all 1, it is not even finite"),
        (_doubles_where_large, "the items' weights are wrong, and the loop stops if the loss is small"),
        (as_it_is, "on the weight probe the items' weights are right, so the fault depends on the values of the"),
    ],
)
def test_why_the_probe_tells_nothing_is_said(change, says):
    name, sentence, details = explained(then(_on_probe(change)))
    assert name == "not-linear"
    assert says in sentence
    assert len(details) == 1


@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize("rounding", [True, False])
def test_a_dependence_on_the_gradients_size_is_seen_where_it_is_no_rounding(probe, rounding):
    """On the probe, where weights are 1/3, or on the case alone, 1e-14 of the gradient is rounding and 1e-8 is not."""

    def change(run):
        for p in run.model.parameters():
            if (weight_of(run) is None) == probe:
                p.grad.mul_(1 + p.grad.abs() * (1e-14 if rounding else 1e-8))
        mix(run)

    name, sentence, _ = explained(then(change))
    assert name == "not-linear"
    if rounding:
        assert "on the weight probe the items' weights are right" in sentence
    else:
        said = "large gradients alone are wrong, and too large" if probe else "(clipping, decay, normalizing)"
        assert said in sentence


def test_weights_within_a_micro_batch_are_told_apart_as_soon_as_they_are_no_rounding():
    """One of the first window's second micro-batch's items weighs more by 1e-8, then by 1e-14."""

    def lifts(amount):
        def change(run):
            if weight_of(run) is None:
                next(run.model.parameters()).grad[2] *= 1 + amount
            mix(run)

        return change

    name, sentence, _ = explained(then(lifts(1e-8)))
    assert name == "unequal-items"
    assert "those of micro-batch 1 weigh" in sentence
    name, sentence, _ = explained(then(lifts(1e-14)))
    assert name == "not-linear"
    assert "the items' weights are right" in sentence


# A fault that some runs show and others do not is named `not-repeatable`, and no other fault is.


LINEAR = Case(
    ProblemSpec(Input("vector", size=2), (Layer("linear", features=2, bias=True),), Loss("mse", reduction="mean")),
    Plan((1, 2), 2),
)
PROBE = probe_case(Plan((1, 2, 3), 3), "mean")


def _wrong_in_some_runs(every):
    """Return a loop whose first gradient element is 0 in its first run, and in every so many runs from there."""
    runs = [0]

    def loop(run):
        for window in windows(run):
            backward_window(run, window)
            if runs[0] % every == 0:
                for p in run.model.parameters():
                    p.grad.flatten()[0] = 0
            run.optimizer.step()
            run.optimizer.zero_grad()
        runs[0] += 1

    return loop


@pytest.mark.parametrize("case", [LINEAR, PROBE], ids=["case", "probe"])
@pytest.mark.parametrize("every", [4, 9])
def test_a_fault_that_is_gone_in_the_next_run_is_not_put_down_to_the_gradients_size(case, every):
    violation = check(_wrong_in_some_runs(every), case).violation
    assert violation.diagnosis == "not-repeatable", violation.explanation
    assert "keeps state from one run to the next" in violation.explanation


@pytest.mark.parametrize("case", [LINEAR, PROBE], ids=["case", "probe"])
def test_a_fault_that_every_run_shows_is_repeatable(case):
    violation = check(_wrong_in_some_runs(1), case).violation
    assert violation.diagnosis != "not-repeatable", violation.explanation


def test_noise_from_torchs_generator_is_repeatable():
    add = every(lambda g, p: g.add_(1e-3 * torch.randn_like(g)))
    assert check(then(add), LINEAR).violation.diagnosis == "added-term"


# What one run alone says


def test_a_gradient_of_0_is_no_reset_where_the_probe_is_right():
    name, sentence, _ = explained(then(of_case(lambda g, p: g.zero_())))
    assert name == "no-gradient"
    assert "on the weight probe the items' weights are right" in sentence
    _, sentence, _ = explained(then(lambda run: run.optimizer.zero_grad(set_to_none=False)))
    assert "probe" not in sentence


def test_an_accumulator_in_float32_is_not_taken_for_weights_in_float32():
    case = LINEAR.replace(plan=Plan((1, 2, 3), 3))
    assert check(then(every(lambda g, p: g.copy_(g.float()))), case).violation.diagnosis == "low-precision"


def test_an_element_that_is_off_by_some_millionths_is_not_said_to_be_1_times_what_it_should_be():
    name, sentence, _ = explained(then(of_weight(lambda g: g[1, 2].mul_(1 + 8e-6))))
    assert name == "partial-gradient"
    assert "are 1 + 8e-06 times what they should be" in sentence


@pytest.mark.parametrize("factor", [2.0, 1 + 1.1e-6])
def test_the_worst_element_is_shown_in_six_digits_unless_they_agree(factor):
    """It is 1000 sevenths: digits that rounding decides are not shown, unless the two differ in them alone."""
    _, _, details = explained(then(of_weight(lambda g: g.mul_(factor))), w=(3, 3, 1, 1, 1, 1, 1, 1))
    expected, observed = re.search("expected (.+), observed (.+), off by", details[0]).groups()
    assert float(observed) == pytest.approx(-1000 / 7 * factor, rel=1e-5 if factor == 2 else 1e-15)
    assert (expected == "-142.857") == (factor == 2)


def test_a_step_that_a_loop_does_not_take_on_the_probe_shows_nothing_there():
    def loop(run):
        for window in islice(windows(run), 1 if weight_of(run) is None else None):
            backward_window(run, window)
            mix(run)
            run.optimizer.step()
            run.optimizer.zero_grad()

    assert "the loop took 1 step(s) on it" in explained(loop, window=1)[1]


def test_a_loop_that_skips_ordinary_gradients_is_read_by_the_large_one():
    """With slopes of 1 the second step, whose gradient is doubled where it is 64, is not taken."""

    def loop(run):
        for step, window in enumerate(windows(run)):
            backward_window(run, window)
            large = any(float(p.grad.max()) > 8 for p in run.model.parameters())
            for p in run.model.parameters() if large else ():
                p.grad.mul_(2)
            if large or not step:
                run.optimizer.step()
            run.optimizer.zero_grad()

    violation = check(loop, probe_case(Plan((1, 1), 1), slopes="1.0 64.0")).violation
    assert violation.diagnosis == "not-linear"
    assert "a gradient of 64 comes out as one of 128, while one of about 1 is right" in violation.explanation


def test_a_loop_that_stops_before_the_step_where_the_loss_is_larger_is_read_without_it():
    """The second gradient, 64, is halved; where the first is 4 in place of 1, no step is taken."""

    def loop(run):
        for step, window in enumerate(windows(run)):
            backward_window(run, window)
            (largest,) = (float(p.grad.max()) for p in run.model.parameters())
            if not step and largest > 2:
                return
            for p in run.model.parameters():
                p.grad.mul_(0.5 if largest > 8 else 1.0)
            run.optimizer.step()
            run.optimizer.zero_grad()

    violation = check(loop, probe_case(Plan((1, 1), 1), slopes="1.0 64.0")).violation
    assert violation.diagnosis == "not-linear"
    assert "a gradient of 64 comes out as one of 32, while one of about 1 is right" in violation.explanation


def test_nothing_is_recorded_of_ranks_where_no_run_is_left():
    instance = generated_instance(probe_case(Plan((1, 1), 1, ranks=(1, 1))))
    _, outcome = run_recorded(LoopRunner(MODES["set_to_none"], max_runs=0), instance)
    assert outcome is None


def test_the_size_of_the_gradient_before_is_said_where_it_decides():
    def loop(run):
        large = False
        for window in windows(run):
            backward_window(run, window)
            for p in run.model.parameters():
                p.grad.mul_(0.5 if large else 1.0)
            large = any(float(p.grad.max()) > 8 for p in run.model.parameters())
            run.optimizer.step()
            run.optimizer.zero_grad()

    violation = check(loop, probe_case(Plan((1, 1), 1), slopes="64.0 1.0")).violation
    assert violation.explanation.endswith(
        "(only after a window whose gradient is 64: after one of ordinary size it is right)"
    )


def test_whole_windows_of_a_plan_on_which_the_loop_drops_the_short_one_tell_what_a_factor_is():
    """Of two micro-batches of an item, 2 is the count, too."""

    def loop(run):
        for window in windows(run):
            backward_window(run, window)
            for p in run.model.parameters():
                p.grad.mul_(run.accumulation_steps)
            if len(window) == run.accumulation_steps:
                run.optimizer.step()
            run.optimizer.zero_grad()

    violation = check(loop, probe_case(Plan((1, 1), 2))).violation
    assert violation.diagnosis == "wrong-scale"
    assert "which is accumulation_steps = 2: a division is left out" in violation.explanation
