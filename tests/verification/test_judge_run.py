"""One run, judged without further ones: which step is wrong, what is counted, and whom the
references blame.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from gradcheck_suite import Problem, training_loop, verify
from gradcheck_suite.core.case import (
    PARAMETER,
    Case,
    Input,
    Layer,
    Loss,
    Plan,
    ProblemSpec,
    probe_case,
)
from gradcheck_suite.core.options import VerifyOptions
from gradcheck_suite.core.results import result_lines
from gradcheck_suite.loops.reset_modes import (
    MODES,
    autocast_bfloat16,
    backward_window,
    grad_scaler,
    part_of_window,
    window_count,
    windows,
)
from gradcheck_suite.reference.large_batch import CannotJudgeError, WindowReference
from gradcheck_suite.run.instance import generated_instance, user_instance
from gradcheck_suite.run.runner import run_loop
from gradcheck_suite.verification import judge_run as module
from gradcheck_suite.verification.check import check
from gradcheck_suite.verification.judge_run import (
    DIVERGED,
    NOT_FINITE,
    SCALER_SKIPPED,
)
from properties.routed import routed_instance
from studies.zoo import BUGS
from tests.training import at, each_gradient, trains

PLAN = Plan((1, 3, 2, 2), 2, epochs=2)
"""Items 1 to 4 in window 0 and 5 to 8 in window 1: their means are 2.5 and 6.5. Two epochs are four steps."""
OWN = Case("slopes", PLAN)
MOVING = OWN.replace(optimizer="sgd")
PROBE = probe_case(Plan((1, 2), 1))


class _Slopes(torch.nn.Module):
    """A weight, one that no loss reaches, and one without elements."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([value], dtype=torch.float64))
        self.idle = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.empty = torch.nn.Parameter(torch.zeros(0, dtype=torch.float64))


def _loss(model, batch):
    return (model.weight * batch).mean()


def _problem(loss=_loss, value=1.0, **options):
    """Return the problem of items 1, 2, 3, ...: the gradient of a mean over some is their mean."""
    return Problem(
        lambda seed: _Slopes(value),
        lambda items, seed: torch.arange(1.0, items + 1)[:, None],
        loss,
        **options,
    )


def _ran(loop=MODES["zero_"], case=OWN, problem=None):
    """Return what a loop does."""
    instance = generated_instance(case) if case.spec else user_instance(case, problem or _problem())
    return run_loop(loop, instance)


def _judged(outcome, case=OWN, problem=None, **options):
    """Judge a run, or a change of it, as while shrinking."""
    problem = None if case.spec else problem or _problem()
    return check(
        lambda run: None, case, problem=problem, outcome=outcome, **{"shrinking": True, **options}
    )


def _with_gradient(outcome, step, value, parameter="weight"):
    """Return a run with another gradient at a step."""
    taken = [*outcome.observations]
    last = taken[step].evaluations[-1]
    evaluation = replace(last, gradients={**last.gradients, parameter: value})
    taken[step] = replace(taken[step], evaluations=(*taken[step].evaluations[:-1], evaluation))
    return replace(outcome, observations=taken)


@pytest.mark.parametrize("case", [OWN, MOVING])
def test_a_sound_run_is_judged_at_every_step(case):
    verdict = _judged(_ran(case=case), case)
    assert verdict.holds
    assert (verdict.windows, verdict.windows_skipped, verdict.skipped, verdict.finding) == (
        4,
        {},
        None,
        None,
    )
    assert verdict.moved_by_zeros is None
    assert verdict.ratio == 0  # torch's own gradient is not compared


@pytest.mark.parametrize("largest", range(4))
def test_the_ratio_is_that_of_the_worst_step(largest):
    outcome = _ran()
    quick = (256 + 2) * 2.0**-53
    for step in range(4):
        right, share = (2.5, 6.5)[step % 2], 0.75 if step == largest else 0.25
        # beyond what is taken for torch's own gradient without a comparison, and within what is
        # compared quickly
        value = torch.tensor([right * (1 + share * quick)], dtype=torch.float64)
        outcome = _with_gradient(outcome, step, value)
    verdict = _judged(outcome, shrinking=False)
    assert verdict.holds
    assert verdict.ratio == pytest.approx(0.75, rel=0.05)


# Runs that ended


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "raised"),
        ({"timed_out": True}, "timed-out"),
        ({"timed_out": True, "deadlock": True}, "deadlock"),
        ({"deadlock": True}, "raised"),
        ({"mismatched": True}, "deadlock"),
    ],
)
@pytest.mark.parametrize("case", [OWN, PROBE])
def test_a_loop_that_failed_is_told_with_its_trace(changes, name, case):
    outcome = replace(
        _ran(case=case), raised="ValueError: no", trace="first\nsecond\n\n", **changes
    )
    violation = _judged(outcome, case).violation
    assert (violation.kind, violation.diagnosis, violation.details) == (
        "raised",
        name,
        ("first", "second"),
    )
    assert violation.explanation == "the loop failed: ValueError: no"


def test_a_loop_that_failed_is_not_blamed_where_the_plain_large_batch_fails():
    def refused(model, batch):
        if batch.dtype == torch.float16:
            raise RuntimeError("not implemented for 'Half'")
        return _loss(model, batch)

    problem, case = _problem(refused), OWN.replace(dtype="float16")
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


# The probe


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


# Parameters beside gradients


def _moved_before(outcome, step):
    """Return a run whose parameter is another before a step, with the right gradient there."""
    taken = [*outcome.observations]
    moved = {**outcome.start, "weight": outcome.start["weight"] + 1}
    evaluation = replace(taken[step].evaluations[0], parameters=moved)
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
    taken[1] = replace(taken[1], after={**outcome.start, "weight": outcome.start["weight"] + 1})
    changed = replace(outcome, observations=taken)
    violation = _judged(changed).violation
    assert (violation.kind, violation.epoch, violation.window) == ("parameters", 0, 1)
    wrong = _with_gradient(changed, 1, torch.tensor([30.0], dtype=torch.float64))
    assert _judged(wrong).violation.kind == "gradient"


# What is not judged


@pytest.mark.parametrize(("skipped_at", "fits"), [(0, False), (1, True)])
def test_a_gradient_scaler_may_skip_what_is_out_of_range(skipped_at, fits):
    """Gradients of 1 in window 0, which are no reason to skip a step, and of 60000 in window 1,
    which are.
    """

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

    monkeypatch.setattr(WindowReference, "compare", cannot)
    wrong = _with_gradient(_ran(), 1, torch.tensor([30.0], dtype=torch.float64))
    verdict = _judged(wrong)
    # what is torch's own gradient needs no comparison
    assert (verdict.windows, verdict.windows_skipped, verdict.skipped) == (
        3,
        {"window 1 overflows": 1},
        None,
    )
    for step in (0, 2, 3):
        wrong = _with_gradient(wrong, step, torch.tensor([30.0], dtype=torch.float64))
    verdict = _judged(wrong)
    assert (verdict.windows, verdict.ratio) == (0, 0.0)
    assert verdict.windows_skipped == {"window 0 overflows": 2, "window 1 overflows": 2}
    assert verdict.skipped == "window 0 overflows"


def _root(model, batch):
    # infinite in window 1 alone, and only once the weight has grown
    return (
        torch.where((model.weight > 1.5) & (batch > 4), torch.inf, 1.0) * model.weight * batch
    ).mean()


@pytest.mark.parametrize(("rate", "skipped"), [(-1.0, False), (-100.0, True)])
def test_a_reference_that_is_not_finite_is_not_judged_far_from_the_start(rate, skipped):
    """A step of -2.5 times the rate takes the weight from 1 to 3.5 or 251; from 16 on it is far."""

    def loop(run):
        run.optimizer.param_groups[0]["lr"] = rate
        MODES["zero_"](run)

    case, problem = MOVING.replace(plan=Plan((1, 3, 2, 2), 2)), _problem(_root)
    outcome = _ran(loop, case, problem)
    edits = ("edits-settings",)
    verdict = _judged(outcome, case, problem, shrinking=False, assumes=edits)
    assert verdict.holds
    assert verdict.windows == (1 if skipped else 2)
    assert verdict.windows_skipped == ({NOT_FINITE: 1} if skipped else {})
    wrong = _with_gradient(outcome, 1, torch.tensor([1.0], dtype=torch.float64))
    # beyond, the step's rule is judged all the same, which gives other parameters
    assert _judged(wrong, case, problem, shrinking=False, assumes=edits).violation.kind == (
        "parameters" if skipped else "gradient"
    )


# Whom the references blame


@pytest.mark.parametrize("name", ["disagreement", "accumulation_fault", "precision_fault"])
def test_a_fault_of_the_references_is_a_finding_and_no_violation(name, monkeypatch):
    """JAX is asked here of parameters that have moved, and by `check_run` of the initial ones."""
    monkeypatch.setattr(module, name, lambda window: "torch and JAX differ")
    wrong = _with_gradient(_ran(case=MOVING), 1, torch.tensor([30.0], dtype=torch.float64))
    verdict = _judged(wrong, MOVING)
    assert (verdict.finding, verdict.violation, verdict.windows) == (
        "torch and JAX differ",
        None,
        0,
    )


@pytest.mark.parametrize(
    ("reduction", "kind"), [("mean", "not-accumulable"), ("batch", "gradient")]
)
def test_a_users_problem_is_asked_whether_its_gradient_adds_up(reduction, kind, monkeypatch):
    fault = check(
        MODES["zero_"], OWN, problem=_problem(lambda model, batch: _loss(model, batch) ** 2)
    ).violation
    assert fault.kind == "not-accumulable"
    monkeypatch.setattr(module, "gradient_fault", lambda reference, window: fault)
    outcome = _with_gradient(_ran(), 1, torch.tensor([30.0], dtype=torch.float64))
    problem = _problem(reduction=reduction)
    assert _judged(outcome, problem=problem).violation.kind == kind
    assert _judged(_ran(), problem=problem).holds


# Zeros that let an optimizer move a parameter which its window does not reach are explained; they
# are no violation.


EXPERT = "experts.1.weight"


def explained(loop, optimizer, routes=((0, 1), (0,))):
    """Return what is said of windows of one micro-batch, each with an item for every entry of its
    route.
    """
    instance = routed_instance([list(route) for route in routes], 1)
    verdict = check(
        MODES[loop], instance.case.replace(optimizer=optimizer), problem=instance.users_problem
    )
    assert verdict.holds
    return verdict.moved_by_zeros, instance


@pytest.mark.parametrize(
    "optimizer", ["adamw", "momentum", "nesterov", "adam", "rmsprop", "asgd", "adamax"]
)
def test_zeros_that_move_a_missed_parameter_are_explained(optimizer):
    said, _ = explained("zero_", optimizer)
    assert f"no item of window 1 reaches {EXPERT}. Its gradient was zeros and not None" in said
    assert f"With None, as after set_to_none=True, {optimizer} leaves" in said


def test_the_distance_on_zeros_is_said():
    # the flat buffer has zeros from the start, so that nothing but the decay can move a parameter
    # never reached
    said, instance = explained("flat_buffer", "adamw", ((0,), (0,)))
    value = instance.model().get_parameter(EXPERT).abs().max().item()
    decay = 0.01 * 0.1 * value
    assert f"no item of window 0 reaches {EXPERT}" in said
    assert f"moved it by {decay:.2g}, by weight decay, momentum or averages. With None" in said


@pytest.mark.parametrize(
    ("loop", "optimizer", "routes"),
    [
        ("set_to_none", "adamw", ((0, 1), (0,))),  # a release
        ("grad_none", "momentum", ((0, 1), (0,))),
        ("zero_", "sgd", ((0, 1), (0,))),  # a step on zeros changes nothing
        ("zero_", "adagrad", ((0, 1), (0,))),  # nothing but the step count
        ("zero_", "adamw", ((0, 1), (1, 0))),  # every window reaches the expert
        ("zero_", "adamw", ((0,), (0,))),  # no window reaches it, so that zeroing leaves None
        ("zero_", None, ((0, 1), (0,))),
        # drawn by chance, where nobody asked for an optimizer
        ("zero_", "normalized", ((0, 1), (0,))),
    ],
)
def test_nothing_is_said_where_none_would_do_the_same(loop, optimizer, routes):
    assert explained(loop, optimizer, routes)[0] is None


@pytest.mark.full
def test_a_verification_says_it_once():
    bug = BUGS["missing-from-the-last"]
    assert isinstance(bug.problem, Problem)
    options = VerifyOptions(examples=20, optimizer="adamw", second_opinion_s=0)
    result = verify(MODES["zero_"], options, problem=bug.problem)
    assert result.holds
    assert result.moved_by_zeros.cases >= 1
    found = result.to_json()["moved_by_zeros"]
    assert found == {
        "cases": result.moved_by_zeros.cases,
        "explanation": result.moved_by_zeros.explanation,
    }
    (line,) = [text for text in result_lines(result) if "zeros moved" in text]
    assert result.moved_by_zeros.explanation in line


# The precision that a loop is held to is declared by the loop or its user, never read from the run.


TANH = ProblemSpec(
    Input("vector", size=8),
    (Layer("linear", features=8, bias=True), Layer("tanh"), Layer("linear", features=3, bias=True)),
    Loss("mse", reduction="mean"),
)
FLOAT32 = Case(TANH, Plan((2, 3, 1), 2), dtype="float32", seed=3)


def under(dtype, wrong=1.0):
    def backward(run, window):
        for batch in window:
            with torch.autocast(run.device.type, dtype=dtype):
                loss = part_of_window(run, batch, window_count(run, window) * wrong)
            loss.backward()

    return trains(backward=backward)


@pytest.mark.parametrize("shrinking", [False, True])
def test_undeclared_autocast_is_named(shrinking):
    violation = check(under(torch.bfloat16), FLOAT32, shrinking=shrinking).violation
    assert (violation.kind, violation.diagnosis) == ("gradient", "low-precision")
    assert "under torch.autocast in bfloat16 in a float32 run" in violation.explanation
    assert "under torch.autocast in bfloat16" in violation.explanation


def test_declared_autocast_holds():
    assert check(under(torch.bfloat16), FLOAT32, autocast="bfloat16").holds
    assert check(autocast_bfloat16, FLOAT32).holds
    assert check(grad_scaler, FLOAT32).holds


@pytest.mark.full
def test_a_finer_declaration_does_not_cover_a_coarser_autocast():
    assert check(under(torch.float16), FLOAT32, autocast="bfloat16").holds
    # the errors of bfloat16 are 8 times those of float16, and the bound is as wide: not every
    # gradient shows it
    violations = [
        check(under(torch.bfloat16), FLOAT32.replace(seed=seed), autocast="float16").violation
        for seed in range(8)
    ]
    assert {violation.diagnosis for violation in violations if violation} == {"low-precision"}


def test_a_fault_under_autocast_keeps_its_own_name():
    for autocast in (None, "bfloat16"):
        violation = check(under(torch.bfloat16, wrong=2.0), FLOAT32, autocast=autocast).violation
        assert violation.diagnosis == "wrong-scale"


def test_autocast_that_changes_nothing_needs_no_declaration():
    assert check(under(torch.bfloat16), FLOAT32.replace(dtype="float64")).holds
    assert check(under(torch.bfloat16), FLOAT32.replace(dtype="bfloat16")).holds


# A gradient scaler may skip the step of a window whose gradient overflows, and no other.


ATTENTION = ProblemSpec(
    Input("sequence", length=3, padded=False, size=2),
    (Layer("attention", causal=False, heads=1),),
    Loss("mse", reduction="sum"),
)
# momentum takes the parameters where the gradient of the third window exceeds float16's largest
# number
OVERFLOWS = Case(ATTENTION, Plan((1, 1, 2, 1, 1, 1, 1, 1), 3), seed=81569260, optimizer="momentum")
SMALL = OVERFLOWS.replace(
    problem=ProblemSpec(
        Input("vector", size=2), (Layer("linear", features=2, bias=True),), ATTENTION.loss
    )
)


def _grows(run):
    """Scale by a factor that grows after every step, until it overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_factor=2.0**18, growth_interval=1)
    for window in windows(run):
        total = window_count(run, window)
        for batch in window:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = part_of_window(run, batch, total)
            scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_skip_at_parameters_where_the_gradient_overflows_is_right(dtype):
    verdict = check(grad_scaler, OVERFLOWS.replace(dtype=dtype), autocast="float16")
    assert verdict.holds
    assert (verdict.windows, verdict.windows_skipped) == (2, {SCALER_SKIPPED: 1})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_skip_where_only_the_scale_overflows_is_found(dtype):
    assert check(grad_scaler, SMALL.replace(dtype=dtype), autocast="float16").windows_skipped == {}
    violation = check(_grows, SMALL.replace(dtype=dtype), autocast="float16").violation
    assert (violation.kind, violation.diagnosis) == ("step-count", "skipped-by-size")


# What `check` says of a single fault at a known place: its kind, step, size, and what lies just
# within the bound.


# two windows of two micro-batches, two epochs: four steps
LAYERS = (Layer("linear", bias=True, features=2),)
CASE = Case(
    ProblemSpec(Input("vector", size=3), LAYERS, Loss("mse", reduction="mean")), PLAN, seed=5
)
EPS = 2.0**-52


def _at_step(step, change):
    """Return a sound loop that does something to its run before one of its steps."""
    return trains(before=at({step}, lambda run, _: change(run)))


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_a_wrong_gradient_is_placed_and_measured(step, optimizer):
    loop = _at_step(step, each_gradient(lambda g: g.mul_(3)))
    violation = check(loop, OWN.replace(optimizer=optimizer), problem=_problem()).violation
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
    assert (violation.kind, violation.diagnosis, violation.parameter) == (
        "none-pattern",
        "no-gradient",
        "0.bias",
    )
    assert (violation.epoch, violation.window) == divmod(step, 2)
    said = "the gradient of 0.bias is None at the step, but the window's items reach 0.bias. Fix: do not reset"
    assert violation.explanation.startswith(said)
    assert violation.details == ()
    assert violation.evidence.seen("0.bias") is None
    assert violation.evidence.seen("0.weight") is not None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_a_kind_of_its_own(value):
    violation = check(_at_step(1, each_gradient(lambda g: g.fill_(value))), CASE).violation
    assert (violation.kind, violation.epoch, violation.window) == ("non-finite", 0, 1)
    assert (
        f"the gradient of {violation.parameter} is not finite at the step, the right one is; "
        in violation.explanation
    )
    assert violation.details


# where products of four parameters overflow
@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1.157e77), ("float32", 4.29e9)])
def test_what_has_diverged_is_counted_as_not_judged(dtype, limit):
    for factor, sign in ((0.9, 1), (1.1, 1), (1.1, -1)):

        @training_loop(assumes=("edits-settings",))
        def loop(run, target=sign * factor * limit):
            # the first window's gradient is 2.5, the second's is wrong
            run.optimizer.param_groups[0]["lr"] = -target / 2.5
            _at_step(1, lambda run: (_stay(run), each_gradient(lambda g: g.mul_(3))(run)))(run)

        verdict = check(loop, OWN.replace(optimizer="sgd", dtype=dtype), problem=_problem())
        assert (verdict.violation is not None) is (factor < 1)
        assert verdict.skipped is None
        if factor > 1:
            assert (verdict.windows, verdict.windows_skipped) == (1, {DIVERGED: 3})


def _stay(run):
    run.optimizer.param_groups[0]["lr"] = 0.0


def _checks_parameters(run):
    def check_weight(*_):
        if not run.model.weight.isfinite():
            raise ArithmeticError("training has diverged")

    trains(after=check_weight)(run)


def test_a_loop_that_stops_where_training_has_diverged_is_not_blamed():
    @training_loop(assumes=("edits-settings",))
    def leap(run):
        run.optimizer.param_groups[0]["lr"] = -math.inf
        _checks_parameters(run)

    verdict = check(leap, OWN.replace(optimizer="sgd"), problem=_problem())
    assert verdict.holds
    assert (verdict.windows, verdict.windows_skipped) == (1, {DIVERGED: 3})

    def no_leap(run):
        backward_window(run, next(windows(run)))
        raise ArithmeticError("training has not diverged")

    assert (
        check(no_leap, OWN.replace(optimizer="sgd"), problem=_problem()).violation.kind == "raised"
    )

    # what the optimizer does not explain is found all the same
    def spoils(run):
        run.model.weight.data.fill_(math.nan)
        _checks_parameters(run)

    violation = check(spoils, OWN.replace(optimizer="sgd"), problem=_problem()).violation
    assert (violation.kind, violation.diagnosis) == ("parameters", "parameter-drift")
    assert check(spoils, OWN, problem=_problem()).violation.kind == "raised"


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_large_initial_parameters_have_not_diverged(optimizer):
    wrong = _at_step(0, each_gradient(lambda g: g.mul_(3)))
    for sign in (1, -1):
        assert (
            check(
                wrong, OWN.replace(optimizer=optimizer), problem=_problem(value=sign * 1e78)
            ).violation
            is not None
        )


@pytest.mark.parametrize(("plan", "judged"), [(Plan((4,), 1), True), (Plan((1, 3), 2), False)])
def test_a_generated_problem_in_which_items_meet_is_judged_where_nothing_is_split(plan, judged):
    spec = ProblemSpec(CASE.problem.input, (Layer("batch_norm_train"), *LAYERS), CASE.problem.loss)
    violation = check(
        _at_step(0, each_gradient(lambda g: g.mul_(3))), Case(spec, plan, seed=5)
    ).violation
    assert (violation.kind == "gradient") is judged
    assert (violation.kind == "not-accumulable") is not judged
