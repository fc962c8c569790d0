"""One run, judged without further ones: which step is wrong, what is counted, and whom the references blame."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Plan, Problem, check
from gradcheck_suite.execution.instance import generated_instance, user_instance
from gradcheck_suite.execution.runner import run_loop
from gradcheck_suite.loops import MODES
from gradcheck_suite.references.errors import CannotJudgeError
from gradcheck_suite.references.reference import Reference
from gradcheck_suite.references.window import Window
from gradcheck_suite.references.window_bounds import Float64Bound
from gradcheck_suite.schema.weight_probe import PARAMETER, probe_case
from gradcheck_suite.verification import judge_run as module
from gradcheck_suite.verification.divergence import DIVERGED
from gradcheck_suite.verification.judge_run import NOT_FINITE, SCALER_SKIPPED, _may_skip

PLAN = Plan((1, 3, 2, 2), 2, epochs=2)
"""Items 1 to 4 in window 0 and 5 to 8 in window 1: their means are 2.5 and 6.5. Two epochs are four steps."""
CASE = Case("slopes", PLAN)
MOVING = CASE.replace(optimizer="sgd")
PROBE = probe_case(Plan((1, 2), 1))


class _Slope(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))


def _loss(model, batch):
    return (model.weight * batch).mean()


def _problem(loss=_loss, **options):
    """Return the problem of items 1, 2, 3, ...: the gradient of a mean over some is their mean."""
    return Problem(lambda seed: _Slope(), lambda items, seed: torch.arange(1.0, items + 1)[:, None], loss, **options)


def _ran(loop=MODES["zero_"], case=CASE, problem=None):
    """Return what a loop does."""
    instance = generated_instance(case) if case.spec else user_instance(case, problem or _problem())
    return run_loop(loop, instance)


def _judged(outcome, case=CASE, problem=None, **options):
    """Judge a run, or a change of it, as while shrinking."""
    problem = None if case.spec else problem or _problem()
    return check(lambda run: None, case, problem=problem, outcome=outcome, **{"shrinking": True, **options})


def _with_gradient(outcome, step, value, parameter="weight"):
    """Return a run with another gradient at a step."""
    taken = [*outcome.observations]
    evaluation = replace(taken[step].evaluations[-1], gradients={parameter: value})
    taken[step] = replace(taken[step], evaluations=(*taken[step].evaluations[:-1], evaluation))
    return replace(outcome, observations=taken)


@pytest.mark.parametrize("case", [CASE, MOVING])
def test_a_sound_run_is_judged_at_every_step(case):
    verdict = _judged(_ran(case=case), case)
    assert verdict.holds
    assert (verdict.windows, verdict.windows_skipped, verdict.skipped, verdict.finding) == (4, {}, None, None)
    assert verdict.moved_by_zeros is None
    assert verdict.ratio == 0  # torch's own gradient is not compared


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("case", [CASE, MOVING])
def test_the_first_wrong_step_is_told(step, case):
    outcome = _ran(case=case)
    for wrong in range(step, 4):
        outcome = _with_gradient(outcome, wrong, torch.tensor([30.0], dtype=torch.float64))
    violation = _judged(outcome, case).violation
    assert (violation.kind, violation.parameter) == ("gradient", "weight")
    assert (violation.epoch, violation.window) == divmod(step, 2)
    assert violation.error == pytest.approx(30.0 - (2.5, 6.5)[step % 2])
    assert violation.moved is (case is MOVING and step > 0)


@pytest.mark.parametrize("largest", range(4))
def test_the_ratio_is_that_of_the_worst_step(largest):
    outcome = _ran()
    quick = (256 + 2) * 2.0**-53
    for step in range(4):
        right, share = (2.5, 6.5)[step % 2], 0.75 if step == largest else 0.25
        # beyond what is taken for torch's own gradient without a comparison, and within what is compared quickly
        value = torch.tensor([right * (1 + share * quick)], dtype=torch.float64)
        outcome = _with_gradient(outcome, step, value)
    verdict = _judged(outcome, shrinking=False)
    assert verdict.holds
    assert verdict.ratio == pytest.approx(0.75, rel=0.05)


def test_every_call_of_a_closure_is_judged():
    outcome = _ran()
    taken = [*outcome.observations]
    (once,) = taken[1].evaluations
    taken[1] = replace(taken[1], evaluations=(once, once, once))
    assert _judged(replace(outcome, observations=taken)).windows == 6
    wrong = replace(once, gradients={"weight": torch.tensor([30.0], dtype=torch.float64)})
    for place in range(3):
        calls = [once, once, once]
        calls[place] = wrong
        taken[1] = replace(taken[1], evaluations=tuple(calls))
        violation = _judged(replace(outcome, observations=taken)).violation
        assert (violation.epoch, violation.window) == (0, 1)


# Runs that ended


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "raised"),
        ({"timed_out": True}, "timed-out"),
        ({"timed_out": True, "deadlock": True}, "deadlock"),
        ({"deadlock": True}, "raised"),
        ({"mismatched": True}, "mismatched-collectives"),
    ],
)
@pytest.mark.parametrize("case", [CASE, PROBE])
def test_a_loop_that_failed_is_told_with_its_trace(changes, name, case):
    outcome = replace(_ran(case=case), raised="ValueError: no", trace="first\nsecond\n\n", **changes)
    violation = _judged(outcome, case).violation
    assert (violation.kind, violation.diagnosis, violation.details) == ("raised", name, ("first", "second"))
    assert violation.explanation == "the loop failed: ValueError: no"


def test_a_loop_that_failed_is_not_blamed_where_the_plain_large_batch_fails():
    def refused(model, batch):
        if batch.dtype == torch.float16:
            raise RuntimeError("not implemented for 'Half'")
        return _loss(model, batch)

    problem, case = _problem(refused), CASE.replace(dtype="float16")
    outcome = _ran(case=case, problem=problem)
    assert outcome.raised is not None
    verdict = _judged(outcome, case, problem)
    assert verdict.holds
    assert "the plain large batch fails in float16" in verdict.skipped

    def refused_later(model, batch):
        return _loss(model, batch) if batch.max() <= 4 else refused(model, batch)

    # it is the first window that is asked about
    problem = _problem(refused_later)
    assert _judged(_ran(case=case, problem=problem), case, problem).violation.kind == "raised"


def test_a_loop_that_failed_on_the_probe_is_asked_for_no_reference(monkeypatch):
    monkeypatch.setattr(Window, "__init__", lambda *args: pytest.fail("a window was computed"))
    assert _judged(replace(_ran(case=PROBE), raised="ValueError: no"), PROBE).violation.kind == "raised"


@pytest.mark.parametrize("case", [CASE, PROBE])
def test_a_model_with_other_parameters_is_told(case):
    violation = _judged(replace(_ran(case=case), structure="weight is gone"), case).violation
    assert (violation.kind, violation.diagnosis) == ("parameters", "changed-model")
    assert violation.explanation == "the loop changed the model's parameters: weight is gone"


@pytest.mark.parametrize("taken", [0, 3])
def test_too_few_steps_are_told(taken):
    outcome = _ran()
    violation = _judged(replace(outcome, observations=outcome.observations[:taken])).violation
    assert violation.kind == "step-count"


def test_a_run_that_ended_where_it_had_diverged_is_judged_as_far_as_it_went():
    def diverges(run):
        run.optimizer.param_groups[0]["lr"] = -1e200
        for batch in run.loader:
            run.optimizer.zero_grad()
            run.loss(run.model, batch).backward()
            run.optimizer.step()
            raise ArithmeticError("training has diverged")

    case = MOVING.replace(plan=Plan((1, 3), 1))
    outcome = _ran(diverges, case)
    verdict = _judged(outcome, case)
    assert verdict.holds
    assert (verdict.windows, verdict.windows_skipped) == (1, {DIVERGED: 1})
    wrong = _with_gradient(outcome, 0, torch.tensor([3.0], dtype=torch.float64))
    assert _judged(wrong, case).violation.kind == "gradient"


# The probe


def test_a_sound_run_on_the_probe_has_as_many_windows_as_steps():
    verdict = _judged(_ran(case=PROBE), PROBE)
    assert verdict.holds
    assert (verdict.windows, verdict.skipped) == (2, None)
    assert verdict.ratio <= 1


@pytest.mark.parametrize("step", range(2))
def test_a_wrong_weight_on_the_probe_is_told(step):
    outcome = _with_gradient(_ran(case=PROBE), step, torch.full((3,), 9.0, dtype=torch.float64), PARAMETER)
    violation = _judged(outcome, PROBE).violation
    assert (violation.kind, violation.window) == ("gradient", step)


@pytest.mark.parametrize(("step", "place"), [(0, (0, 0)), (1, (0, 1)), (None, (None, None))])
def test_parameters_that_change_on_the_probe_are_told(step, place):
    outcome = _ran(case=PROBE)
    moved = {PARAMETER: outcome.start[PARAMETER] + 1}
    if step is None:
        outcome = replace(outcome, parameters=moved)
    else:
        taken = [*outcome.observations]
        evaluation = replace(taken[step].evaluations[0], parameters=moved)
        taken[step] = replace(taken[step], evaluations=(evaluation,))
        outcome = replace(outcome, observations=taken)
    violation = _judged(outcome, PROBE).violation
    assert (violation.kind, violation.parameter, (violation.epoch, violation.window)) == (
        "parameters",
        PARAMETER,
        place,
    )


def test_what_a_step_changes_on_the_probe_is_told_at_that_step():
    outcome = _ran(case=PROBE)
    taken = [*outcome.observations]
    taken[0] = replace(taken[0], after={PARAMETER: outcome.start[PARAMETER] + 1})
    violation = _judged(replace(outcome, observations=taken), PROBE).violation
    assert (violation.kind, violation.epoch, violation.window) == ("parameters", 0, 0)


# Parameters beside gradients


def _moved_before(outcome, step):
    """Return a run whose parameter is another before a step, with the right gradient there."""
    taken = [*outcome.observations]
    evaluation = replace(taken[step].evaluations[0], parameters={"weight": outcome.start["weight"] + 1})
    taken[step] = replace(taken[step], evaluations=(evaluation,))
    return replace(outcome, observations=taken)


def test_what_changed_before_a_step_is_told_before_its_gradient():
    outcome = _with_gradient(_moved_before(_ran(), 2), 2, torch.tensor([30.0], dtype=torch.float64))
    violation = _judged(outcome).violation
    assert (violation.kind, violation.epoch, violation.window) == ("parameters", 1, 0)
    outcome = _with_gradient(_moved_before(_ran(), 2), 1, torch.tensor([30.0], dtype=torch.float64))
    assert _judged(outcome).violation.kind == "gradient"


def test_what_a_step_changed_is_told_after_its_gradient():
    outcome = _ran()
    taken = [*outcome.observations]
    taken[1] = replace(taken[1], after={"weight": outcome.start["weight"] + 1})
    changed = replace(outcome, observations=taken)
    violation = _judged(changed).violation
    assert (violation.kind, violation.epoch, violation.window) == ("parameters", 0, 1)
    wrong = _with_gradient(changed, 1, torch.tensor([30.0], dtype=torch.float64))
    assert _judged(wrong).violation.kind == "gradient"


def test_what_changed_after_the_last_step_is_told():
    outcome = _ran()
    verdict = _judged(replace(outcome, parameters={"weight": outcome.start["weight"] + 1}))
    assert (verdict.violation.kind, verdict.violation.window) == ("parameters", None)
    assert verdict.windows == 4


# What is not judged


@pytest.mark.parametrize("taken", range(4))
def test_a_skipped_step_is_judged_at_the_parameters_that_the_last_step_left(taken, monkeypatch):
    asked = []
    outcome = _ran(case=MOVING)
    reference = Reference(user_instance(MOVING, _problem()))
    window = reference.window(1)
    monkeypatch.setattr(reference, "window", lambda *args: asked.append(args) or window)
    assert not _may_skip(reference, outcome, "bfloat16", 1, taken)
    (parameters,) = {id(parameters) for _, parameters, _ in asked}
    assert parameters == id(outcome.observations[taken - 1].after if taken else None)
    assert {(index, autocast) for index, _, autocast in asked} == {(1, "bfloat16")}


@pytest.mark.parametrize(("skipped_at", "fits"), [(0, False), (1, True)])
def test_a_gradient_scaler_may_skip_what_is_out_of_range(skipped_at, fits):
    """Gradients of 1 in window 0, which are no reason to skip a step, and of 60000 in window 1, which are."""

    def loss(model, batch):
        return (model.weight * torch.where(batch > 2, 60000.0, 1.0)).mean()

    case, problem = Case("slopes", Plan((1, 1, 1, 1), 2), dtype="float16"), _problem(loss)
    outcome = _ran(case=case, problem=problem)
    assert len(outcome.observations) == 2
    kept = 1 - skipped_at
    run = replace(outcome, observations=[outcome.observations[kept]], skipped=(skipped_at,))
    verdict = _judged(run, case, problem)
    if fits:
        assert verdict.holds
        assert (verdict.windows, verdict.windows_skipped) == (1, {SCALER_SKIPPED: 1})
    else:
        assert verdict.violation.kind == "step-count"


def test_where_nothing_is_judged_the_case_is_skipped_and_it_is_said_why(monkeypatch):
    def cannot(self, observed, *, roughly=False):
        raise CannotJudgeError(f"window {self.index} overflows")

    monkeypatch.setattr(Window, "compare", cannot)
    wrong = _with_gradient(_ran(), 1, torch.tensor([30.0], dtype=torch.float64))
    verdict = _judged(wrong)
    # what is torch's own gradient needs no comparison
    assert (verdict.windows, verdict.windows_skipped, verdict.skipped) == (3, {"window 1 overflows": 1}, None)
    for step in (0, 2, 3):
        wrong = _with_gradient(wrong, step, torch.tensor([30.0], dtype=torch.float64))
    verdict = _judged(wrong)
    assert (verdict.windows, verdict.ratio) == (0, 0.0)
    assert verdict.windows_skipped == {"window 0 overflows": 2, "window 1 overflows": 2}
    assert verdict.skipped == "window 0 overflows"


def _root(model, batch):
    # infinite in window 1 alone, and only once the weight has grown
    return (torch.where((model.weight > 1.5) & (batch > 4), torch.inf, 1.0) * model.weight * batch).mean()


@pytest.mark.parametrize(("rate", "skipped"), [(-1.0, False), (-100.0, True)])
def test_a_reference_that_is_not_finite_is_not_judged_far_from_the_start(rate, skipped):
    """A step of -2.5 times the rate takes the weight from 1 to 3.5 or 251; from 16 on it is far."""

    def loop(run):
        run.optimizer.param_groups[0]["lr"] = rate
        MODES["zero_"](run)

    case, problem = MOVING.replace(plan=Plan((1, 3, 2, 2), 2)), _problem(_root)
    outcome = _ran(loop, case, problem)
    verdict = _judged(outcome, case, problem, shrinking=False)
    assert verdict.holds
    assert verdict.windows == (1 if skipped else 2)
    assert verdict.windows_skipped == ({NOT_FINITE: 1} if skipped else {})
    wrong = _with_gradient(outcome, 1, torch.tensor([1.0], dtype=torch.float64))
    # beyond, the step's rule is judged all the same, which gives other parameters
    assert _judged(wrong, case, problem, shrinking=False).violation.kind == ("parameters" if skipped else "gradient")


# Whom the references blame


@pytest.mark.parametrize("case", [CASE, MOVING])
@pytest.mark.parametrize("wrong", [None, 0, 1])
def test_the_references_are_looked_at_where_parameters_moved_or_a_gradient_is_wrong(case, wrong, monkeypatch):
    asked = {"disagreement": [], "accumulation_fault": [], "precision_fault": []}
    for name, windows in asked.items():
        monkeypatch.setattr(module, name, lambda window, windows=windows: windows.append(window.index) and None)
    outcome = _ran(case=case)
    for step in range(4):
        outcome = _with_gradient(outcome, step, torch.tensor([(2.5, 6.5)[step % 2] * (1 + 1e-13)]).double())
    if wrong is not None:
        outcome = _with_gradient(outcome, wrong, torch.tensor([30.0], dtype=torch.float64))
    verdict = _judged(outcome, case, shrinking=False)
    assert (verdict.violation is not None) is (wrong is not None)
    judged = range(4 if wrong is None else wrong + 1)
    expected = [step % 2 for step in judged if step == wrong or (case is MOVING and step)]
    assert asked["disagreement"] == expected
    assert asked["accumulation_fault"] == asked["precision_fault"] == [step for step in judged if step == wrong]


@pytest.mark.parametrize(("off", "wrong"), [(0.5, False), (1.0, False), (1.5, True), (3.0, True)])
def test_a_gradient_is_wrong_beyond_the_bound_itself(off, wrong, monkeypatch):
    asked = []
    monkeypatch.setattr(Float64Bound, "quick", property(lambda self: np.ones(1)))
    monkeypatch.setattr(module, "disagreement", lambda window: asked.append(window.index) and None)
    outcome = _with_gradient(_ran(), 1, torch.tensor([6.5 + off], dtype=torch.float64))
    verdict = _judged(outcome)
    assert (verdict.violation is not None) is wrong
    assert asked == [1] * wrong
    if not wrong:
        assert verdict.ratio == off


@pytest.mark.parametrize("shrinking", [False, True])
def test_a_gradient_of_an_earlier_steps_parameters_is_named_outside_of_shrinking(shrinking):
    """The slope of a square grows with the weight, which every step changes."""
    problem = _problem(lambda model, batch: (model.weight**2 * batch).mean())
    outcome = _ran(case=MOVING, problem=problem)
    stale = _with_gradient(outcome, 2, torch.tensor([5.0], dtype=torch.float64))
    violation = _judged(stale, MOVING, problem, shrinking=shrinking).violation
    assert (violation.kind, violation.epoch, violation.window) == ("gradient", 1, 0)
    assert violation.diagnosis == ("" if shrinking else "stale-parameters")


@pytest.mark.parametrize("name", ["disagreement", "accumulation_fault", "precision_fault"])
def test_a_fault_of_the_references_is_a_finding_and_no_violation(name, monkeypatch):
    monkeypatch.setattr(module, name, lambda window: "torch and JAX differ")
    verdict = _judged(_with_gradient(_ran(), 1, torch.tensor([30.0], dtype=torch.float64)))
    assert (verdict.finding, verdict.violation, verdict.windows) == ("torch and JAX differ", None, 0)


@pytest.mark.parametrize(("reduction", "kind"), [("mean", "not-accumulable"), ("batch", "gradient")])
def test_a_users_problem_is_asked_whether_its_gradient_adds_up(reduction, kind, monkeypatch):
    fault = check(MODES["zero_"], CASE, problem=_problem(lambda model, batch: _loss(model, batch) ** 2)).violation
    assert fault.kind == "not-accumulable"
    monkeypatch.setattr(module, "gradient_fault", lambda reference, window: fault)
    outcome = _with_gradient(_ran(), 1, torch.tensor([30.0], dtype=torch.float64))
    problem = _problem(reduction=reduction)
    assert _judged(outcome, problem=problem).violation.kind == kind
    assert _judged(_ran(), problem=problem).holds


def test_losses_under_autocast_that_was_not_declared_are_named():
    outcome = _ran(case=CASE.replace(dtype="float32"))
    wrong = _with_gradient(replace(outcome, compute="bfloat16"), 1, torch.tensor([6.55]))
    names = [_judged(wrong, CASE.replace(dtype="float32"), autocast=autocast) for autocast in (None, "bfloat16")]
    assert names[0].violation.diagnosis == "undeclared-autocast"
    assert names[1].holds
    assert math.isclose(float(np.max(names[0].violation.evidence.observed)), 6.55, rel_tol=1e-6)
