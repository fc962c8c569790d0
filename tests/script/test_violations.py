"""A script for every kind of violation, in a process of its own: status 1 with the faulty loop, 0
with a sound one.
"""

from __future__ import annotations

import math
import sys

import pytest
import torch

from gradcheck_suite.cli.loading import resolve_problem
from gradcheck_suite.core.case import Case, Input, Layer, Loss, Plan, ProblemSpec
from gradcheck_suite.loops.reset_modes import BUILT_IN, plain, windows
from gradcheck_suite.script import script_text
from gradcheck_suite.verification.check import check
from studies.zoo.bugs.micro_batches import mean_of_means, no_divide
from studies.zoo.bugs.resets import no_reset, tail_dropped
from tests.script.alone import SUITE, run_alone

LINEAR = ProblemSpec(
    Input("vector", size=2),
    (Layer("linear", features=2, bias=True),),
    Loss("mse", reduction="mean"),
)
SPARSE = ProblemSpec(
    Input("tokens", length=3, vocabulary=5, padded=True),
    (Layer("embedding", features=2, sparse=True, padding_idx=False),),
    Loss(
        "cross_entropy",
        ignore_index=True,
        label_smoothing=0.0,
        class_weights=False,
        reduction="mean",
    ),
)
PLAN = Plan((1, 2, 3, 1), 2, 2)


def exits(run):
    run.optimizer.zero_grad()
    raise SystemExit(0)


def freezes(run):
    plain(run)
    next(run.model.parameters()).requires_grad_(False)


def behind_the_closure(edit):
    """Return a loop with a hook that edits parameters or gradients when the closure of a step has
    returned.
    """

    def loop(run):
        def hook(optimizer, args, kwargs):
            def closure(inner=kwargs["closure"]):
                inner()
                edit(next(run.model.parameters()))

            return args, {**kwargs, "closure": closure}

        run.optimizer.register_step_pre_hook(hook)
        plain(run)

    return loop


def resets_before_the_step(run):
    for window in windows(run):
        run.optimizer.zero_grad()
        for batch in window:
            run.loss(run.model, batch).backward()
        run.optimizer.zero_grad()
        run.optimizer.step()


def decay(p):
    p.data.mul_(0.9)


def double(p):
    p.grad.mul_(2)


def fills(value):
    def loop(run):
        run.optimizer.register_step_pre_hook(
            lambda *given: [p.grad.fill_(value) for p in run.model.parameters()] and None
        )
        plain(run)

    return loop


def of_pairs(run):
    for x, y in run.pairs:
        run.criterion(run.model(x), y).backward()
    run.optimizer.step()


def leaves_a_hook(run):
    torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: 2 * output)
    plain(run)


def violation_of(loop, case, problem=None):
    found = check(loop, case, problem=problem).violation
    assert found is not None
    return found


def assert_script_is_right(loop, case, problem=None):
    """Hold a loop's script to status 1, and that of a sound loop to 0.

    Return the violation and what it prints.
    """
    __tracebackhide__ = True
    # a user's file imports the suite for its Problem
    violation, missing = violation_of(loop, case, problem), ("tests", "jax") if problem else SUITE
    faulty = run_alone(script_text(loop, "planted", violation, problem=problem), missing=missing)
    fixed = run_alone(script_text(plain, "planted", violation, problem=problem), missing=missing)
    assert (faulty.status, faulty.errors) == (1, "")
    assert (fixed.status, fixed.errors) == (0, "")
    assert faulty.output.endswith("the fault is there\n")
    assert fixed.output.endswith("the fault is gone\n")
    if violation.evidence is not None:
        assert "the gradient differs from OBSERVED by at most 0\n" in faulty.output
        assert f"{violation.parameter}: " in faulty.output
        assert f"error {violation.error:<10.3g} allowed {violation.allowed:.3g}" in faulty.output
    return violation, faulty.output


KINDS = {
    no_reset: "gradient",
    mean_of_means: "gradient",
    behind_the_closure(double): "gradient",
    resets_before_the_step: "none-pattern",
    fills(math.inf): "non-finite",
    tail_dropped: "step-count",
    behind_the_closure(decay): "parameters",
    freezes: "parameters",
    exits: "raised",
}


@pytest.mark.parametrize("optimizer", [None, "adamw"])
@pytest.mark.parametrize(("loop", "kind"), KINDS.items())
def test_every_kind_of_violation(loop, kind, optimizer):
    plan = Plan((1, 2, 3), 2, 2) if kind != "non-finite" else Plan((2,), 1, 2)
    violation, faulty = assert_script_is_right(
        loop, Case(LINEAR, plan, seed=3, optimizer=optimizer)
    )
    assert violation.kind == kind
    assert ("is None at the step" in faulty) == (kind == "none-pattern")
    assert ("is not finite at the step" in faulty) == (kind == "non-finite")


CASES = [
    *(
        (no_divide, Case(LINEAR, PLAN, dtype=dtype, seed=5))
        for dtype in ("float32", "bfloat16", "float16")
    ),
    *((fills(value), Case(LINEAR, PLAN)) for value in (math.nan, -math.inf)),
    (no_reset, Case(LINEAR, PLAN, seed=3, optimizer="normalized", groups=2)),
    (no_reset, Case(SPARSE, Plan((2, 1, 2), 2, 2, masked=(1,)), seed=2)),
    (of_pairs, Case(LINEAR, Plan((1, 2), 1), seed=3)),
    (leaves_a_hook, Case(LINEAR, Plan((1,), 1))),
]
CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES += [
    pytest.param(no_reset, Case(spec, PLAN, device="cuda"), marks=CUDA) for spec in (LINEAR, SPARSE)
]


@pytest.mark.parametrize(("loop", "case"), CASES)
def test_other_numbers_layouts_optimizers_and_devices(loop, case):
    assert_script_is_right(loop, case)


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
F = torch.nn.functional
def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(2, 1)
def batch(items, seed):
    drawn = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(items, 2, generator=drawn), "y": [torch.randn(items, 1, generator=drawn)]}
def of(loss, **changes):
    given = {"model": model, "batch": batch, "loss": lambda m, b: loss(m(b["x"]), b["y"][0]), **changes}
    return lambda: Problem(**given)
PROBLEM = of(F.mse_loss)()
COUNTED = of(F.mse_loss, count=lambda b: len(b["x"]))
SUMMED = of(lambda out, y: ((out - y) ** 2).sum(), reduction="sum")
CENTRED = of(lambda out, y: (out - y).std(correction=0))
SAME_VALUE = of(lambda out, y: F.mse_loss(out, y) + (out.mean() - out.mean().detach()) * out.mean().detach())  # adds 0
SLIGHTLY = of(lambda out, y: F.mse_loss(out, y) + 1e-8 * out.mean() ** 2)  # adds a product of means
class Doubles(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, gradient: gradient * (2 if len(gradient) == 3 else 1))  # depends on the batch
BACKWARD = of(lambda out, y: F.mse_loss(Doubles.apply(out), y))
MISCOUNTED = of(F.mse_loss, count=lambda b: len(b["x"]) ** 2)
NORMALIZED = of(F.mse_loss, model=lambda seed: torch.nn.Sequential(model(seed), torch.nn.BatchNorm1d(1)))
"""


@pytest.fixture
def users_file(tmp_path, monkeypatch):
    # a test writes it again within a second and with as many bytes, which bytecode is not told from
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "users.py"
    path.write_text(PROBLEMS)
    return path


@pytest.mark.parametrize(
    ("loop", "name", "options"),
    [
        (no_reset, "PROBLEM", {"optimizer": "sgd"}),
        (no_reset, "COUNTED", {"dtype": "bfloat16"}),
        (no_reset, "SUMMED", {"optimizer": "sgd"}),
        (no_reset, "PROBLEM", {"dtype": "bfloat16"}),
        (of_pairs, "PROBLEM", {}),
    ],
)
def test_a_users_problem_is_imported(loop, name, options, users_file):
    place = f"{users_file}:{name}"
    assert_script_is_right(
        loop, Case(place, Plan((1, 2, 3), 2, 2), **options), resolve_problem(place)
    )


@pytest.mark.parametrize(
    ("name", "faulty", "fixed"),
    [
        ("CENTRED", ".std(correction=0)", ".abs().mean()"),
        ("SAME_VALUE", "out.mean().detach())  #", "0)  #"),
        ("SLIGHTLY", "1e-8", "0.0"),
        ("BACKWARD", "(2 if", "(1 if"),
        ("MISCOUNTED", 'len(b["x"]) ** 2', 'len(b["x"])'),
        ("NORMALIZED", "torch.nn.BatchNorm1d(1)", "torch.nn.Tanh()"),
    ],
)
def test_an_objective_that_is_no_sum_over_items(name, faulty, fixed, users_file):
    problem = resolve_problem(f"{users_file}:{name}")
    plan = Plan((1, 2), 2) if name == "NORMALIZED" else Plan((2, 3), 2)
    violation = violation_of(plain, Case(f"{users_file}:{name}", plan), problem)
    assert violation.kind == "not-accumulable"
    assert PROBLEMS.count(faulty) == 1
    text = script_text(plain, "plain", violation, problem=problem)
    assert run_alone(text, missing=("tests", "jax")).status == 1
    users_file.write_text(PROBLEMS.replace(faulty, fixed))
    assert run_alone(text, missing=("tests", "jax")).status == 0
