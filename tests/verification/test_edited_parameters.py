"""Loops that edit parameters on purpose: sound ones hold where they say so, and wrong gradients in them are named."""

from __future__ import annotations

import copy

import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, check, verify
from gradcheck_suite.cli.verdict_text import result_lines
from gradcheck_suite.loops.windows import backward_window, windows
from gradcheck_suite.schema.options import VerifyOptions

SPEC = ProblemSpec(
    Input("vector", size=2),
    (Layer("linear", bias=True, features=2), Layer("tanh"), Layer("linear", bias=True, features=2)),
    Loss("mse", reduction="mean"),
)
CASE = Case(SPEC, Plan((1, 3, 2, 2, 1), 2, epochs=2), seed=3)
EDITS = ("edits-parameters",)


def _copies(run):
    return [p.detach().clone() for p in run.model.parameters()]


def _lookahead(run, step, slow):
    if step % 2:
        for p, kept in zip(run.model.parameters(), slow, strict=True):
            p.copy_(kept.lerp_(p, 0.5))


def _clip_weights(run, step, slow):
    for p in run.model.parameters():
        p.clamp_(-0.1, 0.1)


def _average(run, step, slow):
    for p, kept in zip(run.model.parameters(), slow, strict=True):
        kept.lerp_(p, 0.1)
        if step == 2:
            p.copy_(kept)


def _shrink(run, step, slow):
    for p in run.model.parameters():
        p.mul_(0.9)


EDITED = {"lookahead": _lookahead, "clipped weights": _clip_weights, "average": _average, "decay by hand": _shrink}


def _loop(edit, wrong=lambda run, step: None, reset=True):
    def loop(run):
        slow = _copies(run)
        for step, window in enumerate(windows(run)):
            if reset or not step:
                run.optimizer.zero_grad()
            backward_window(run, window)
            wrong(run, step)
            run.optimizer.step()
            with torch.no_grad():
                edit(run, step, slow)

    return loop


def _twice_after_the_first(run, step):
    for p in run.model.parameters():
        p.grad.mul_(1 + (step > 0))


@pytest.mark.parametrize("edit", EDITED.values(), ids=EDITED)
@pytest.mark.parametrize("optimizer", [None, "momentum"])
def test_an_edit_on_purpose_is_a_drift_unless_the_loop_says_so(edit, optimizer):
    case = CASE.replace(dtype="bfloat16", optimizer=optimizer)
    violation = check(_loop(edit), case).violation
    if optimizer or edit in (_clip_weights, _shrink):
        assert violation.diagnosis == "parameter-drift"
        assert "assume edits-parameters" in violation.explanation
    verdict = check(_loop(edit), case, assumes=EDITS)
    assert verdict.holds
    assert verdict.windows == CASE.plan.steps


@pytest.mark.parametrize("edit", EDITED.values(), ids=EDITED)
@pytest.mark.parametrize("optimizer", [pytest.param(None, marks=pytest.mark.full), "momentum"])
def test_a_wrong_gradient_between_edits_is_found_and_named(edit, optimizer):
    case = CASE.replace(optimizer=optimizer)
    twice = check(_loop(edit, _twice_after_the_first), case, assumes=EDITS).violation
    assert (twice.kind, twice.window) == ("gradient", 1)
    assert twice.diagnosis == "wrong-scale"
    leak = check(_loop(edit, reset=False), case, assumes=EDITS).violation
    assert (leak.kind, leak.diagnosis) == ("gradient", "stale-window")


def test_a_gradient_of_other_parameters_than_the_edited_ones_is_found():
    def loop(run):
        stale = copy.deepcopy(run.model)
        for window in windows(run):
            run.optimizer.zero_grad()
            for batch in window:
                (run.loss(stale, batch) * run.count(batch) / sum(map(run.count, window))).backward()
            for p, old in zip(run.model.parameters(), stale.parameters(), strict=True):
                p.grad, old.grad = old.grad, None
            run.optimizer.step()
            with torch.no_grad():
                _shrink(run, 0, [])

    violation = check(loop, CASE, assumes=EDITS).violation
    assert (violation.kind, violation.diagnosis, violation.window) == ("gradient", "stale-parameters", 1)


def test_the_optimizers_step_and_state_are_judged_all_the_same():
    def forget(run, step):
        if step == 2:
            run.optimizer.state.clear()

    case = CASE.replace(optimizer="momentum")
    assert check(_loop(_shrink, forget), case, assumes=EDITS).violation.diagnosis == "optimizer-state-lost"


@pytest.mark.usefixtures("only_linear")
def test_the_output_says_that_parameters_were_not_judged():
    result = verify(_loop(_shrink), examples=10, assumes=EDITS)
    assert result.holds
    assert result.windows >= 10
    lines = result_lines(result, None, VerifyOptions(examples=10), 4, judged=True)
    assert "    assumes edits-parameters: gradients were judged at the parameters that each step found" in lines
    assert not any("nothing else was tried" in line for line in lines)
