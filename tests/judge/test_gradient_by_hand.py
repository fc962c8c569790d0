"""What is said of gradients that are written down: windows as a whole, NaN losses, None, digits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Plan, Problem, check
from gradcheck_suite.core.comparison import Comparison
from gradcheck_suite.judge.gradient import explain_gradient
from gradcheck_suite.judge.reruns import LoopRunner
from gradcheck_suite.loops.reset_modes import MODES, backward_window, window_count, windows
from gradcheck_suite.reference.large_batch import Reference
from gradcheck_suite.run.instance import user_instance
from tests.judge.explaining import (
    MASKED,
    as_it_is,
    explained,
    forget,
    table_of,
    then,
    weight_of,
    where_not_finite,
)

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
    return explain_gradient(comparison, reference.window(window), 0, LoopRunner(MODES["set_to_none"]))


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
        found = explain_gradient(comparison, window, 1, LoopRunner(MODES["set_to_none"], max_runs=0))
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


def _more(run):
    for p in run.model.parameters():
        p.grad.mul_(1.7)


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


@pytest.mark.parametrize("count", [0.5, 1.0, 2.0])
def test_weights_of_a_sum_are_those_of_the_probe_whatever_is_counted(count):
    """The first micro-batch is dropped, and the second's gradient is the larger one in every element."""

    def drops_the_first(run):
        for window in windows(run):
            for batch in window[-1:]:
                run.loss(run.model, batch).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

    y = [[-10.0, -10.0], *[[-1000.0, -1000.0]] * 7]
    name, _, details = explained(
        drops_the_first, plan=Plan((1, 1), 2), sums=True, w=[count] * 8, x=np.ones((8, 3)), y=y
    )
    assert "reset-inside-window" in name or "dropped-micro-batch" in name
    assert [row[2:] for row in table_of(details)] == [["1", "0"], ["1", "1"]]


# The probe in float32


class _Counted:
    """A loop with the number of its runs, which may refuse a dtype."""

    def __init__(self, change, refused=None):
        self._loop, self._refused, self.runs = then(change), refused, 0

    def __call__(self, run):
        self.runs += 1
        if run.dtype == self._refused:
            raise TypeError("not in this dtype")
        self._loop(run)


@pytest.mark.parametrize(
    ("dtype", "refused", "named", "runs"),
    [
        ("float32", None, True, 4),
        ("float32", torch.float64, True, 5),
        ("float16", torch.float64, False, 4),
        ("bfloat16", torch.float64, False, 4),
    ],
)
def test_a_loop_that_runs_in_float32_alone_is_read_there_and_its_refusal_is_not_counted(dtype, refused, named, runs):
    loop = _Counted(_more, refused)
    name, sentence, _ = explained(loop, dtype=dtype)
    assert (name == "wrong-scale") is named
    assert ("the weight probe cannot be used: the loop raised on it" in sentence) is not named
    assert loop.runs == runs


# Ranks


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
    ("loop", "name"), [(then(_rounds_gradients), "rounded-gradient"), (_rounds_weights, "rounded-weights")]
)
def test_rounded_gradients_are_told_from_rounded_weights_by_the_case(loop, name):
    """Thirds, which no binary format has."""
    assert explained(loop, plan=Plan((1, 2), 2))[0] == name


# Weights on the probe that do not explain the case


def _holds_another_window(step, other):
    """Return a loop that doubles the probe's gradients, and adds another window's to the weight's at one step."""

    def loop(run):
        epoch = list(windows(run))
        for i, window in enumerate(epoch):
            backward_window(run, window)
            weight = weight_of(run)
            if weight is None:
                next(run.model.parameters()).grad.mul_(2)
            elif i == step:
                total = window_count(run, epoch[other])
                for batch in epoch[other]:
                    loss = run.loss(run.model, batch) * run.count(batch) / total
                    weight.grad += torch.autograd.grad(loss, weight)[0]
            run.optimizer.step()
            run.optimizer.zero_grad()

    return loop


@pytest.mark.parametrize(
    ("step", "other", "name"), [(1, 2, "later-window"), (1, 0, "stale-window"), (3, 2, "stale-window")]
)
def test_the_epoch_tells_what_is_later_of_the_case_itself(step, other, name):
    epoch, window = divmod(step, 3)
    plan = Plan((1, 2, 1, 2, 1, 1), 2, 2)
    found, sentence, _ = explained(_holds_another_window(step, other), plan=plan, epoch=epoch, window=window)
    assert found == name
    assert sentence.startswith("in weight alone, while bias is right: ")


# The digits shown
