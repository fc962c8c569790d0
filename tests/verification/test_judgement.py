"""What `check` says of a single fault at a known place: its kind, step, size, and what lies just within the bound."""

from __future__ import annotations

import math

import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, Problem, ProblemSpec, check
from gradcheck_suite.errors import UsageError
from gradcheck_suite.loops.reset_modes import MODES, backward_window, windows
from gradcheck_suite.verification.judge_run import DIVERGED

# two windows of two micro-batches, two epochs: four steps
PLAN = Plan((1, 3, 2, 2), 2, epochs=2)
LAYERS = (Layer("linear", bias=True, features=2),)
CASE = Case(ProblemSpec(Input("vector", size=3), LAYERS, Loss("mse", reduction="mean")), PLAN, seed=5)
OWN = Case("slopes", PLAN)
EPS = 2.0**-52


class _Slope(torch.nn.Module):
    """A weight, one that no loss reaches, and one without elements."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([value], dtype=torch.float64))
        self.idle = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.empty = torch.nn.Parameter(torch.zeros(0, dtype=torch.float64))


def _slopes(value=1.0, loss=lambda model, batch: (model.weight * batch).mean()):
    """Return the problem of items 1, 2, 3, ...: the gradient of a mean over some is their mean."""
    return Problem(lambda seed: _Slope(value), lambda items, seed: torch.arange(1.0, items + 1)[:, None], loss)


def _at_step(step, change):
    """Return a sound loop that does something to its run before one of its steps."""

    def loop(run):
        for i, window in enumerate(windows(run)):
            run.optimizer.zero_grad()
            backward_window(run, window)
            if i == step:
                change(run)
            run.optimizer.step()

    return loop


def _each_gradient(change):
    def on(run):
        for p in run.model.parameters():
            if p.grad is not None:
                change(p.grad)

    return on


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_a_wrong_gradient_is_placed_and_measured(step, optimizer):
    loop = _at_step(step, _each_gradient(lambda g: g.mul_(3)))
    violation = check(loop, OWN.replace(optimizer=optimizer), problem=_slopes()).violation
    assert (violation.kind, violation.parameter) == ("gradient", "weight")
    assert (violation.epoch, violation.window) == divmod(step, 2)
    # the window's items are 1 to 4 or 5 to 8
    right = (2.5, 6.5)[step % 2]
    assert violation.error == pytest.approx(2 * right, rel=1e-12)
    assert 0 < violation.allowed < 1e-12
    assert f"expected {right}, observed {3 * right}, off by {2 * right:.3g}" in violation.details[0]
    evidence = violation.evidence
    assert evidence.layout.part(evidence.expected, "weight") == pytest.approx([right], rel=1e-12)
    assert evidence.seen("weight") == pytest.approx([3 * right], rel=1e-12)
    assert evidence.seen("idle") is None
    assert evidence.allowed[evidence.worst.index] == violation.allowed


@pytest.mark.parametrize("step", range(4))
def test_a_missing_gradient_is_placed(step):
    def forget(run):
        dict(run.model.named_parameters())["0.bias"].grad = None

    violation = check(_at_step(step, forget), CASE).violation
    assert (violation.kind, violation.diagnosis, violation.parameter) == ("none-pattern", "missing-gradient", "0.bias")
    assert (violation.epoch, violation.window) == divmod(step, 2)
    assert violation.explanation == (
        "0.bias.grad is None at the step, but the window's items reach 0.bias: look for a loss that is not sent "
        "backward, a `no_grad`, a `requires_grad_(False)`, or a reset before the step"
    )
    assert violation.details == ()
    assert violation.evidence.seen("0.bias") is None
    assert violation.evidence.seen("0.weight") is not None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_a_kind_of_its_own(value):
    violation = check(_at_step(1, _each_gradient(lambda g: g.fill_(value))), CASE).violation
    assert (violation.kind, violation.epoch, violation.window) == ("non-finite", 0, 1)
    assert f"{violation.parameter}.grad is not finite at the step, the right gradient is; " in violation.explanation
    assert violation.details


def _root(model, batch):
    # the slope of a root at 0 times the item's 0 is NaN, at the first item alone
    return ((model.weight * (batch - 1)) ** 0.5).mean()


def test_a_finite_gradient_that_should_not_be_is_a_wrong_one():
    hides = _at_step(0, _each_gradient(lambda g: g.fill_(1.0)))
    violation = check(hides, OWN, problem=_slopes(loss=_root)).violation
    assert (violation.kind, violation.window) == ("gradient", 0)
    assert violation.error == math.inf
    wrong = _at_step(0, _each_gradient(lambda g: g.fill_(math.inf)))
    assert check(wrong, OWN, problem=_slopes(loss=_root)).violation.kind == "gradient"


@pytest.mark.parametrize("optimizer", [None, "sgd", "normalized"])
def test_a_gradient_that_hides_a_nan_is_found_under_every_optimizer(optimizer):
    hides = _at_step(0, _each_gradient(lambda g: g.fill_(1.0)))
    violation = check(hides, OWN.replace(optimizer=optimizer), problem=_slopes(loss=_root)).violation
    assert (violation.kind, violation.window) == ("gradient", 0)


@pytest.mark.parametrize("value", [0.25, 8.0, -8.0])
def test_parameters_may_not_change_by_the_last_bit(value):
    for change, holds in ((0.0, True), (EPS * abs(value), False), (math.nan, False)):
        violation = check(_at_step(3, lambda run, c=change: run.model.weight.data.add_(c)), OWN, problem=_slopes(value))
        violation = violation.violation
        assert (violation is None) is holds
        if violation is not None:
            assert (violation.kind, violation.diagnosis) == ("parameters", "parameter-drift")
            assert (violation.parameter, violation.allowed) == ("weight", 0)
            assert (violation.epoch, violation.window) == (1, 1)
            assert violation.error == pytest.approx(change, nan_ok=True)
            assert "something other than optimizer.step() changed weight between two steps" in violation.explanation


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_change_after_the_last_step_is_found(optimizer):
    case = OWN.replace(optimizer=optimizer)
    assert check(MODES["zero_"], case, problem=_slopes()).holds

    def late(run):
        MODES["zero_"](run)
        run.model.weight.data.add_(1e-6)

    violation = check(late, case, problem=_slopes()).violation
    assert (violation.diagnosis, violation.parameter, violation.window) == ("parameter-drift", "weight", None)
    assert violation.error == pytest.approx(1e-6, rel=1e-3)
    assert "after the last step" in violation.explanation


# where products of four parameters overflow
@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1.157e77), ("float32", 4.29e9)])
def test_what_has_diverged_is_counted_as_not_judged(dtype, limit):
    for factor, sign in ((0.9, 1), (1.1, 1), (1.1, -1)):

        def loop(run, target=sign * factor * limit):
            # the first window's gradient is 2.5, the second's is wrong
            run.optimizer.param_groups[0]["lr"] = -target / 2.5
            _at_step(1, lambda run: (_stay(run), _each_gradient(lambda g: g.mul_(3))(run)))(run)

        verdict = check(loop, OWN.replace(optimizer="sgd", dtype=dtype), problem=_slopes())
        assert (verdict.violation is not None) is (factor < 1)
        assert verdict.skipped is None
        if factor > 1:
            assert (verdict.windows, verdict.windows_skipped) == (1, {DIVERGED: 3})


def _stay(run):
    run.optimizer.param_groups[0]["lr"] = 0.0


def _checks_parameters(run):
    for window in windows(run):
        run.optimizer.zero_grad()
        backward_window(run, window)
        run.optimizer.step()
        if not run.model.weight.isfinite():
            raise ArithmeticError("training has diverged")


def test_a_loop_that_stops_where_training_has_diverged_is_not_blamed():
    def leap(run):
        run.optimizer.param_groups[0]["lr"] = -math.inf
        _checks_parameters(run)

    verdict = check(leap, OWN.replace(optimizer="sgd"), problem=_slopes())
    assert verdict.holds
    assert (verdict.windows, verdict.windows_skipped) == (1, {DIVERGED: 3})

    def no_leap(run):
        backward_window(run, next(windows(run)))
        raise ArithmeticError("training has not diverged")

    assert check(no_leap, OWN.replace(optimizer="sgd"), problem=_slopes()).violation.kind == "raised"

    # what the optimizer does not explain is found all the same
    def spoils(run):
        run.model.weight.data.fill_(math.nan)
        _checks_parameters(run)

    violation = check(spoils, OWN.replace(optimizer="sgd"), problem=_slopes()).violation
    assert (violation.kind, violation.diagnosis) == ("parameters", "parameter-drift")
    assert check(spoils, OWN, problem=_slopes()).violation.kind == "raised"


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_large_initial_parameters_have_not_diverged(optimizer):
    wrong = _at_step(0, _each_gradient(lambda g: g.mul_(3)))
    for sign in (1, -1):
        assert check(wrong, OWN.replace(optimizer=optimizer), problem=_slopes(sign * 1e78)).violation is not None


def test_steps_at_parameters_that_a_setting_makes_nan_are_counted_as_not_judged():
    def spoil(run):
        run.optimizer.param_groups[0]["lr"] = math.nan

    def loop(run):
        _at_step(0, spoil)(run)

    verdict = check(loop, OWN.replace(optimizer="sgd"), problem=_slopes())
    assert verdict.holds
    assert (verdict.windows, verdict.windows_skipped) == (1, {DIVERGED: 3})


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_divergence_that_the_optimizer_does_not_explain_is_found(dtype):
    for value in (math.nan, math.inf, torch.finfo(getattr(torch, dtype)).max):

        def spoil(run, value=value):
            run.model.weight.data.fill_(value)

        for optimizer in (None, "sgd", "normalized"):
            violation = check(
                _at_step(2, spoil), OWN.replace(dtype=dtype, optimizer=optimizer), problem=_slopes()
            ).violation
            assert (violation.kind, violation.diagnosis) == ("parameters", "parameter-drift")
            assert (violation.epoch, violation.window) == (1, 0)


def test_a_users_code_that_fails_is_named_before_any_loop_runs():
    def loss(model, batch):
        if len(batch) < 2:
            raise ZeroDivisionError("a variance of one item")
        return (model.weight * batch).mean()

    said = (
        "the problem slopes failed before any loop ran, on batches of 1 to 8 items: ZeroDivisionError: a variance of "
        r"one item \(.*test_judgement.py"
    )
    with pytest.raises(UsageError, match=said):
        check(MODES["zero_"], OWN, problem=_slopes(loss=loss))


def test_items_that_meet_in_the_gradient_alone_are_no_loops_fault():
    class Meeting(torch.autograd.Function):
        """The mean of products, whose backward multiplies by how many items there are."""

        @staticmethod
        def forward(ctx, weight, batch):
            ctx.save_for_backward(batch)
            return (weight * batch).mean()

        @staticmethod
        def backward(ctx, grad):
            (batch,) = ctx.saved_tensors
            return (grad * batch.mean() * len(batch)).reshape(1), None

    problem = _slopes(loss=lambda model, batch: Meeting.apply(model.weight, batch))
    violation = check(MODES["zero_"], OWN, problem=problem).violation
    assert violation.kind == "not-accumulable"
    # 4 * 2.5 of the large batch; (1 * 1 + 3 * 3 * 3) / 4 of the micro-batches
    assert (
        "The gradients of weight in window 0, of the large batch and as the sum of the micro-batches', differ by 3, "
        in (violation.explanation)
    )
    assert "no plain accumulation can equal the large batch and no loop is to blame: " in violation.explanation


@pytest.mark.parametrize(("plan", "judged"), [(Plan((4,), 1), True), (Plan((1, 3), 2), False)])
def test_a_generated_problem_in_which_items_meet_is_judged_where_nothing_is_split(plan, judged):
    spec = ProblemSpec(CASE.problem.input, (Layer("batch_norm_train"), *LAYERS), CASE.problem.loss)
    violation = check(_at_step(0, _each_gradient(lambda g: g.mul_(3))), Case(spec, plan, seed=5)).violation
    assert (violation.kind == "gradient") is judged
    assert (violation.kind == "not-accumulable") is not judged
