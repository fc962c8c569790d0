"""A fault that some runs show and others do not is named `not-repeatable`, and no other fault is."""

from __future__ import annotations

import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, check
from gradcheck_suite.core.case import probe_case
from gradcheck_suite.loops.reset_modes import backward_window, windows
from tests.judge.explaining import explained, then, weight_of

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
    def add(run):
        for p in run.model.parameters():
            p.grad.add_(1e-3 * torch.randn_like(p.grad))

    assert check(then(add), LINEAR).violation.diagnosis == "added-term"


# What one run alone says


def test_a_gradient_of_0_is_no_reset_where_the_probe_is_right():
    def clear(run):
        if weight_of(run) is not None:
            for p in run.model.parameters():
                p.grad.zero_()

    name, sentence, _ = explained(then(clear))
    assert name == "no-gradient"
    assert "on the weight probe the items' weights are right" in sentence
    _, sentence, _ = explained(then(lambda run: run.optimizer.zero_grad(set_to_none=False)))
    assert "probe" not in sentence


def test_an_accumulator_in_float32_is_not_taken_for_weights_in_float32():
    def narrow(run):
        for p in run.model.parameters():
            p.grad.copy_(p.grad.float())

    case = LINEAR.replace(plan=Plan((1, 2, 3), 3))
    assert check(then(narrow), case).violation.diagnosis == "rounded-gradient"


def test_an_element_that_is_off_by_some_millionths_is_not_said_to_be_1_times_what_it_should_be():
    def nudge(run):
        if (weight := weight_of(run)) is not None:
            weight.grad[1, 2] *= 1 + 8e-6

    name, sentence, _ = explained(then(nudge))
    assert name == "partial-gradient"
    assert "are 1 + 8e-06 times what they should be" in sentence
