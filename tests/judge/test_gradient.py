"""What is said of a wrong gradient when its weights cannot be read, or are right."""

from __future__ import annotations

import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, check
from gradcheck_suite.catalogue.description import error_text
from gradcheck_suite.core.case import probe_case
from gradcheck_suite.core.results import ItemWeight
from gradcheck_suite.loops.reset_modes import backward_window, windows
from tests.judge.explaining import then

CASE = Case(
    ProblemSpec(Input("vector", size=2), (Layer("linear", features=2, bias=True),), Loss("mse", reduction="mean")),
    Plan((3, 1, 2), 2),
    seed=1,
)


def _double_matrices(run):
    for p in run.model.parameters():
        if p.ndim == 2:
            p.grad.mul_(2)


def _needs_a_bias(run):
    dict(run.model.named_parameters())["0.bias"].grad.mul_(2)


def _square(run):
    for p in run.model.parameters():
        if p.ndim == 2:
            p.grad.mul_(p.grad)


def _noise(run):
    for p in run.model.parameters():
        p.grad.add_(torch.randn_like(p.grad))


def _normalize(run):
    for p in run.model.parameters():
        p.grad.div_(p.grad.norm())


def _clip_norm(run):
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)


def _clip_value(run):
    torch.nn.utils.clip_grad_value_(run.model.parameters(), 0.01)


def _decay(run):
    for p in run.model.parameters():
        p.grad.add_(p.detach(), alpha=0.25)


def _signs(run):
    for p in run.model.parameters():
        p.grad.sign_()


def _flush(run):
    for p in run.model.parameters():
        p.grad[p.grad.abs() < p.grad.abs().max().clamp(min=1e-3)] = 0


@pytest.mark.parametrize(
    ("change", "diagnosis", "says"),
    [
        (_square, "not-linear", "(clipping, decay, normalizing)"),
        (_noise, "added-term", "a term that does not depend on the loss"),
        (_decay, "added-term", "0.25 times the parameter is added to the gradient"),
        (_normalize, "normalised", "divided by its own size"),
        (_signs, "normalised", "every element is 1, 0 or -1"),
        (_clip_norm, "clipped", "its norm is 0.01, as after clipping by norm"),
        (_clip_value, "clipped", "as after clipping by norm or by value"),
        (_flush, "flushed-to-zero", "small elements are 0"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_does_not_grow_with_the_loss_is_named_by_what_it_does(change, diagnosis, says):
    violation = check(then(change), CASE).violation
    assert (violation.kind, violation.diagnosis) == ("gradient", diagnosis)
    assert says in violation.explanation


@pytest.mark.parametrize(("change", "where"), [(_double_matrices, "0.weight"), (_needs_a_bias, "0.bias")])
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


def _doubles_in_bfloat16(run):
    for p in run.model.parameters():
        p.grad.copy_(2 * p.grad if p.dtype == torch.bfloat16 else p.grad)


def test_a_fault_that_float64_does_not_show_goes_unnamed():
    violation = check(then(_doubles_in_bfloat16), CASE.replace(dtype="bfloat16")).violation
    assert (violation.kind, violation.diagnosis) == ("gradient", "not-linear")


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


def test_the_numbers_are_those_of_the_worst_element():
    violation = check(then(_double_matrices), CASE).violation
    assert violation.parameter == "0.weight"
    assert violation.error > violation.allowed > 0
    (line,) = violation.details
    assert "4 of 6 elements of the gradient differ; the worst is 0.weight[" in line
    assert f"off by {error_text(violation.error, violation.allowed)}" in line


def test_the_weights_are_shown_beside_the_right_ones():
    def no_reset(run):
        for window in windows(run):
            backward_window(run, window)
            run.optimizer.step()

    violation = check(no_reset, CASE).violation
    assert (violation.epoch, violation.window) == (0, 1)
    # right: 0, 0, 1/2; the first window's 1/4 is still there
    assert violation.weights == (ItemWeight("0", 3, 0, 0.25), ItemWeight("1", 1, 0, 0.25), ItemWeight("2", 2, 0.5, 0.5))
