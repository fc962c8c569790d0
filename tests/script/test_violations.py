"""A script for every kind of violation, in a process of its own: status 1 with the faulty loop, 0 with a sound one."""

from __future__ import annotations

import math

import pytest
import torch

from gradcheck_suite import Problem
from gradcheck_suite.core.case import Case, Input, Layer, Loss, Plan, ProblemSpec
from gradcheck_suite.loops.reset_modes import BUILT_IN, plain, windows
from gradcheck_suite.script import script_text
from gradcheck_suite.studies.zoo.bugs.micro_batches import mean_of_means, no_divide
from gradcheck_suite.studies.zoo.bugs.resets import no_reset, tail_dropped
from gradcheck_suite.verification.check import check
from tests.faults import loops as faults
from tests.script.alone import run_alone
from tests.script.problems import load

LINEAR = ProblemSpec(Input("vector", size=2), (Layer("linear", features=2, bias=True),), Loss("mse", reduction="mean"))
SPARSE = ProblemSpec(
    Input("tokens", length=3, vocabulary=5, padded=True),
    (Layer("embedding", features=2, sparse=True, padding_idx=False),),
    Loss("cross_entropy", ignore_index=True, label_smoothing=0.0, class_weights=False, reduction="mean"),
)
PLAN = Plan((1, 2, 3, 1), 2, 2)


def exits(run):
    run.optimizer.zero_grad()
    raise SystemExit(0)


def freezes(run):
    plain(run)
    next(run.model.parameters()).requires_grad_(False)


def decays_after_an_indirect_step(run):
    def hook(optimizer, args, kwargs):
        def closure(inner=kwargs["closure"]):
            inner()
            next(run.model.parameters()).data.mul_(0.9)

        return args, {**kwargs, "closure": closure}

    run.optimizer.register_step_pre_hook(hook)
    plain(run)


def doubles_behind_the_closure(run):
    def hook(optimizer, args, kwargs):
        def closure(inner=kwargs["closure"]):
            inner()
            for p in run.model.parameters():
                p.grad.mul_(2)

        return args, {**kwargs, "closure": closure}

    run.optimizer.register_step_pre_hook(hook)
    plain(run)


def fills(value):
    def loop(run):
        for window in windows(run):
            run.optimizer.zero_grad()
            for batch in window:
                run.loss(run.model, batch).backward()
            for p in run.model.parameters():
                p.grad.fill_(value)
            run.optimizer.step()

    return loop


def of_pairs(run):
    for x, y in run.pairs:
        run.criterion(run.model(x), y).backward()
    run.optimizer.step()


def violation_of(loop, case, problem=None):
    found = check(loop, case, problem=problem).violation
    assert found is not None
    return found


def assert_script_is_right(loop, case, problem=None):
    """Hold a loop's script to status 1, and that of a sound loop to 0; return violation, module and both outputs."""
    __tracebackhide__ = True
    violation = violation_of(loop, case, problem)
    # a user's file imports the suite for its Problem
    missing = ("tests", "jax") if problem else ("gradcheck_suite", "tests", "jax", "hypothesis")
    text = script_text(loop, "planted", violation, problem=problem)
    faulty = run_alone(text, missing=missing)
    assert (faulty.status, faulty.errors) == (1, "")
    mended = run_alone(script_text(plain, "planted", violation, problem=problem), missing=missing)
    assert (mended.status, mended.errors) == (0, "")
    assert faulty.output.endswith("the fault is there\n")
    assert mended.output.endswith("the fault is gone\n")
    return violation, load(text), faulty.output


@pytest.mark.parametrize("optimizer", [None, "adamw"])
@pytest.mark.parametrize(
    ("loop", "kind"),
    [
        (no_reset, "gradient"),
        (mean_of_means, "gradient"),
        (doubles_behind_the_closure, "gradient"),
        (faults.reset_between_backward_and_step, "none-pattern"),
        (fills(math.inf), "non-finite"),
        (tail_dropped, "step-count"),
        (faults.step_per_micro_batch, "step-count"),
        (faults.updates_by_hand_as_well, "parameters"),
        (decays_after_an_indirect_step, "parameters"),
        (freezes, "parameters"),
        (exits, "raised"),
    ],
)
def test_every_kind_of_violation(loop, kind, optimizer):
    plan = Plan((1, 2, 3), 2, 2) if kind != "non-finite" else Plan((2,), 1, 2)
    violation, _, faulty = assert_script_is_right(loop, Case(LINEAR, plan, seed=3, optimizer=optimizer))
    assert violation.kind == kind
    assert ("is None at the step" in faulty) == (kind == "none-pattern")
    assert ("is not finite at the step" in faulty) == (kind == "non-finite")


def test_the_optimizer_that_is_the_suites_own_is_copied():
    assert_script_is_right(no_reset, Case(LINEAR, PLAN, seed=3, optimizer="normalized", groups=2))


def test_what_was_observed_is_recorded_and_comes_back():
    violation, script, told = assert_script_is_right(no_reset, Case(LINEAR, PLAN, seed=3))
    assert script.OBSERVED.keys() == {"0.weight", "0.bias"}
    assert "the gradient differs from OBSERVED by at most 0\n" in told
    assert f"{violation.parameter}: " in told
    assert f"error {violation.error:<10.3g} allowed {violation.allowed:.3g}" in told


def test_a_loop_of_pairs():
    assert_script_is_right(of_pairs, Case(LINEAR, Plan((1, 2), 1), seed=3))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_special_numbers_stand_by_name(value):
    _, script, _ = assert_script_is_right(fills(value), Case(LINEAR, PLAN))
    assert all(str(x) == str(value) for row in script.OBSERVED["0.weight"] for x in row)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_low_precision_is_held_to_what_it_allows(dtype):
    _, script, _ = assert_script_is_right(no_divide, Case(LINEAR, PLAN, dtype=dtype, seed=5))
    assert next(script.make_model().parameters()).dtype == getattr(torch, dtype)


def test_ignored_micro_batches_and_sparse_gradients():
    _, script, _ = assert_script_is_right(no_reset, Case(SPARSE, Plan((2, 1, 2), 2, 2, masked=(1,)), seed=2))
    assert (script.batch_of(script.MICRO_BATCHES[1])["target"] == -100).all()


def scribbles(run):
    for window in windows(run):
        run.optimizer.zero_grad()
        total = sum(run.count(batch) for batch in window)
        for batch in window:
            (run.loss(run.model, batch) * run.count(batch) / total).backward()
            batch["x"].zero_()
        run.optimizer.step()


def test_a_loop_may_change_what_it_is_given():
    """Every pass yields fresh copies, as the suite's own loader does."""
    violation = violation_of(no_reset, Case(LINEAR, Plan((1, 1), 2, 3)))
    assert run_alone(script_text(scribbles, "planted", violation)).status == 0


def test_a_loop_of_the_suites_own_is_printed_in_full():
    violation = violation_of(no_reset, Case(LINEAR, PLAN))
    for name, loop in BUILT_IN.items():
        holds = name != "summed" and "equal-micro-batches" not in getattr(loop, "assumes", ())
        assert run_alone(script_text(loop, name, violation)).status == (0 if holds else 1), name


PROBLEMS = """
import torch
from gradcheck_suite import Problem
def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(2, 1)
def batch(items, seed):
    drawn = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(items, 2, generator=drawn), "y": [torch.randn(items, 1, generator=drawn)]}
def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"][0])
def problem(**changes):
    return Problem(**{"model": model, "batch": batch, "loss": loss, **changes})
PROBLEM = problem()
COUNTED = problem(count=lambda batch: len(batch["x"]))
SUMMED = problem(loss=lambda m, b: ((m(b["x"]) - b["y"][0]) ** 2).sum(), reduction="sum")
CENTRED = problem(loss=lambda m, b: (m(b["x"]) - b["y"][0]).std(correction=0))
def same_value(m, b):
    error, means = m(b["x"]) - b["y"][0], m(b["x"]).mean()
    return (error ** 2).mean() + (means - means.detach()) * means.detach()  # adds 0
SAME_VALUE = problem(loss=same_value)
def slightly(m, b):
    out = m(b["x"])
    return ((out - b["y"][0]) ** 2).mean() + 1e-8 * out.mean() ** 2  # adds a product of means
SLIGHTLY = problem(loss=slightly)
class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return gradient * (2 if len(gradient) == 3 else 1)  # depends on the batch
BACKWARD = problem(loss=lambda m, b: torch.nn.functional.mse_loss(Doubles.apply(m(b["x"])), b["y"][0]))
MISCOUNTED = problem(count=lambda batch: len(batch["x"]) ** 2)
def normalized(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))  # in train mode
NORMALIZED = problem(model=normalized)
def make():
    return problem()
"""


@pytest.fixture
def users_file(tmp_path):
    path = tmp_path / "users.py"
    path.write_text(PROBLEMS)
    return path


def named(name) -> Problem:
    namespace: dict = {}
    exec(PROBLEMS, namespace)
    return namespace[name]() if name == "make" else namespace[name]


@pytest.mark.parametrize(
    ("name", "dtype", "optimizer"),
    [("PROBLEM", "float64", "sgd"), ("COUNTED", "bfloat16", None), ("SUMMED", "float64", "sgd"),
     ("make", "bfloat16", None)],
)  # fmt: skip
def test_a_users_problem_is_imported(name, dtype, optimizer, users_file):
    case = Case(f"{users_file}:{name}", Plan((1, 2, 3), 2, 2), dtype=dtype, optimizer=optimizer)
    _, script, _ = assert_script_is_right(no_reset, case, named(name))
    assert not hasattr(script, "EXPECTED")


def test_a_users_problem_in_pairs(users_file):
    assert_script_is_right(of_pairs, Case(f"{users_file}:PROBLEM", Plan((1, 2), 1)), named("PROBLEM"))


@pytest.mark.parametrize(
    ("name", "faulty", "mended"),
    [
        ("CENTRED", ".std(correction=0)", ".abs().mean()"),
        ("SAME_VALUE", "means.detach()  #", "0  #"),
        ("SLIGHTLY", "1e-8", "0.0"),
        ("BACKWARD", "(2 if", "(1 if"),
        ("MISCOUNTED", "** 2)\ndef", ")\ndef"),
        ("NORMALIZED", "torch.nn.BatchNorm1d(1)", "torch.nn.Tanh()"),
    ],
)
def test_an_objective_that_is_no_sum_over_items(name, faulty, mended, users_file):
    plan = Plan((1, 2), 2) if name == "NORMALIZED" else Plan((2, 3), 2)
    violation = violation_of(plain, Case(f"{users_file}:{name}", plan), named(name))
    assert violation.kind == "not-accumulable"
    assert PROBLEMS.count(faulty) == 1
    text = script_text(plain, "plain", violation, problem=named(name))
    assert run_alone(text, missing=("tests", "jax")).status == 1
    users_file.write_text(PROBLEMS.replace(faulty, mended))
    assert run_alone(text, missing=("tests", "jax")).status == 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("spec", [LINEAR, SPARSE])
def test_on_a_cuda_device(spec):
    _, script, _ = assert_script_is_right(no_reset, Case(spec, PLAN, device="cuda"))
    assert all(tensor.is_cuda for tensor in script.DATA.values())
