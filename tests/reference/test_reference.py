"""A window's reference against what it is by hand: gradients of squares, and the bound in every precision."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, Problem, ProblemSpec
from gradcheck_suite.core.comparison import DRAWS, FEW_DRAWS, SMALLEST, UNIT_ROUNDOFF, growth, quick_bound
from gradcheck_suite.reference import large_batch
from gradcheck_suite.reference import large_batch as module
from gradcheck_suite.reference.large_batch import CannotJudgeError, Reference, References, disagreement, precision_fault
from gradcheck_suite.reference.rounding import Computation, RoundingErrors, cancellation
from gradcheck_suite.run.instance import generated_instance, user_instance

X = np.array([1.0, 3.0, 0.7, 2.9, 1.1, 5.3])
W = 0.3
CASE = Case("squares", Plan((1, 3, 2), 2))
"""Window 0 has items 0 to 3, in micro-batches of 1 and 3; window 1 has items 4 and 5."""


class _Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.idle = torch.nn.Parameter(torch.ones(2))
        self.weight = torch.nn.Parameter(torch.full((1, 1), W))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight)


def _problem(reduction="mean", loss=None):
    squares = loss or (lambda model, batch: getattr((model(batch) ** 2), reduction)())
    return Problem(
        lambda seed: _Model(),
        lambda items, seed: torch.as_tensor(X[:items])[:, None],
        squares,
        reduction=reduction,
    )


def _reference(case=CASE, **options):
    return Reference(user_instance(case, _problem(**options)))


def _generated(dtype="float64"):
    layers = (Layer("linear", bias=True, features=2),)
    spec = ProblemSpec(Input("vector", size=3), layers, Loss("mse", reduction="mean"))
    return Reference(generated_instance(Case(spec, CASE.plan, dtype=dtype, seed=3)))


def _slope(x, w=W):
    """Return d/dw of the mean of (w x)^2, behind two idle elements."""
    return np.array([0, 0, 2 * w * (x**2).mean()])


def _held(w, dtype="float64"):
    """Return a number rounded to a dtype."""
    return float(torch.tensor(w, dtype=torch.float64).to(getattr(torch, dtype)))


def test_each_window_has_its_own_items_gradient():
    reference = _reference()
    w = _held(W, "float32")  # the model is made in float32
    for index, x in enumerate((X[:4], X[4:])):
        window = reference.window(index)
        assert window.torch == pytest.approx(_slope(x, w), rel=1e-14)
        assert window.expected is window.torch
        assert window.jax is None
        assert window.reached == {"weight"}
        assert not window.moved


def test_a_window_is_computed_once_but_at_other_parameters():
    reference = _reference()
    assert reference.window(0) is reference.window(0)
    assert reference.window(0, None, "bfloat16") is not reference.window(0)
    parameters = {"weight": torch.full((1, 1), 2.0)}
    moved = reference.window(0, parameters)
    assert moved is not reference.window(0, parameters)
    assert moved.moved
    assert moved.torch == pytest.approx(_slope(X[:4], 2.0), rel=1e-14)
    assert reference.window(0).torch == pytest.approx(_slope(X[:4], _held(W, "float32")), rel=1e-14)


def test_jax_stands_for_generated_problems_at_any_parameters():
    reference = _generated()
    parameters = {name: 2 * p.detach() for name, p in reference.model(None, None).named_parameters()}
    for window in (reference.window(1), reference.window(1, parameters)):
        assert window.expected is window.jax
        assert window.jax == pytest.approx(window.torch, rel=1e-12)
    assert np.abs(reference.window(1).jax - reference.window(1, parameters).jax).max() > 0.1


def test_what_is_not_reached_is_zero_and_vectors_follow_the_layout():
    reference = _reference()
    flat = reference.flat({"weight": torch.tensor([[3.0]], dtype=torch.float32), "idle": None})
    assert flat.tolist() == [0, 0, 3]
    assert flat.dtype == np.float64
    assert reference.join({"weight": np.array([[4.0]]), "idle": np.array([1.0, 2.0])}).tolist() == [1, 2, 4]


def _plain(items, share, *, dtype, compute=None, reduction="mean"):
    """Return the gradient in a dtype of a share of some items' loss, by torch alone."""
    weight = torch.full((1, 1), W, dtype=torch.float32).to(dtype).requires_grad_()
    x = torch.as_tensor(X[list(items)])[:, None].to(dtype)
    with torch.autocast("cpu", dtype=compute) if compute else nullcontext():
        loss = getattr(torch.nn.functional.linear(x, weight) ** 2, reduction)() * share
    return np.array([0, 0, float(torch.autograd.grad(loss, weight)[0])])


LOW = [("float32", None), ("bfloat16", None), ("float16", None), ("float32", "bfloat16"), ("bfloat16", "float16")]


@pytest.mark.parametrize(("name", "compute"), LOW)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_bound_of_a_lower_precision_is_what_it_is_made_of(name, compute, reduction):
    dtype, autocast = getattr(torch, name), compute and getattr(torch, compute)
    window = _reference(CASE.replace(dtype=name), reduction=reduction).window(0, None, compute)
    x = np.array([_held(value, name) for value in X[:4]])
    exact = np.array([0, 0, 2 * _held(_held(W, "float32"), name) * getattr(x**2, reduction)()])
    assert window.expected == pytest.approx(exact, rel=1e-14)

    parts = [(range(1), 0.25), (range(1, 4), 0.75)] if reduction == "mean" else [(range(1), 1.0), (range(1, 4), 1.0)]
    how = {"dtype": dtype, "compute": autocast, "reduction": reduction}
    large = _plain(range(4), 1.0, **how)
    low = [_plain(*part, **how) for part in parts]
    high = [
        np.array([0, 0, share * 2 * _held(_held(W, "float32"), name) * getattr(x[list(items)] ** 2, reduction)()])
        for items, share in parts
    ]
    assert window.bound.large_batch == pytest.approx(large, rel=1e-12)
    assert np.array(window.bound.contributions) == pytest.approx(np.array(low), rel=1e-12)

    # nothing that was computed in the lower precision is part of the bound
    sizes = sum(map(np.abs, high))
    coarse = max((name, compute or name), key=UNIT_ROUNDOFF.__getitem__)
    # two micro-batches: one addition, and five further roundings
    smallest = max(SMALLEST[name], SMALLEST[compute or name])
    summing = growth(6, coarse) * sizes + 6 * smallest
    assert window.bound.quick == pytest.approx(summing, rel=1e-9)
    computation = Computation(window.reference.instance, window.model(), torch.float64)
    errors = RoundingErrors(computation, [(range(4), 1.0)], getattr(torch, coarse), smallest=smallest)
    for draws in (FEW_DRAWS, DRAWS):
        assert window.allowed(draws) == pytest.approx(summing + errors.noise(draws), rel=1e-9)
    assert (window.allowed() == window.allowed(DRAWS)).all()


def test_the_bound_of_float64_is_what_it_is_made_of():
    window = _generated().window(0)
    instance = window.reference.instance
    computation = Computation(instance, instance.model(), torch.float64)
    errors = RoundingErrors(computation, [(range(4), 1.0)], torch.float64)
    sums = cancellation(computation, range(4), [range(1), range(1, 4)], window.reference.layout)
    for draws in (FEW_DRAWS, DRAWS):
        allowed = quick_bound(window.expected, 2) + sums + errors.noise(draws)
        assert window.allowed(draws) == pytest.approx(allowed, rel=1e-12, abs=0)
    assert (window.allowed() == window.allowed(DRAWS)).all()
    assert window.bound.large_batch is window.torch
    assert sum(window.bound.contributions) == pytest.approx(window.torch, rel=1e-12)


def test_autocast_is_nothing_to_float64():
    window = _reference().window(0, None, "bfloat16")
    assert window.bound.large_batch is window.torch
    # within a few unit roundoffs of float64, where bfloat16 would allow 1e-2
    assert window.compare(window.torch * (1 + 1e-9)).ratio > 1


@pytest.mark.parametrize(("factor", "right"), [(1 + 256 * 2.0**-53, True), (1 + 1e-9, False)])
def test_what_needs_no_draws_is_judged_without(factor, right, monkeypatch):
    window = _reference().window(0)
    if right:
        monkeypatch.setattr(large_batch, "cancellation", lambda *_: pytest.fail("it was measured"))
    difference = window.compare(window.torch * factor)
    assert (difference.ratio <= 1) is right


def test_at_an_optimizers_parameters_jax_judges_as_well():
    """Torch's gradient is no excuse there either."""
    reference = _generated()
    parameters = {name: 2 * p.detach() for name, p in reference.model(None, None).named_parameters()}
    for window in (reference.window(0, parameters), reference.window(0)):
        assert disagreement(window) is None
        window.__dict__["jax"] = window.torch + 1.0
        assert window.compare(window.torch + 1.0).ratio <= 1
        assert window.compare(window.torch).ratio > 1
        said = disagreement(window)
        assert ("at parameters that the optimizer has moved" in said) is window.moved


@pytest.mark.parametrize(("name", "alike"), [("float64", False), ("float32", True), ("bfloat16", True)])
def test_infinity_and_nan_are_one_in_lower_precisions(name, alike):
    window = _reference(
        CASE.replace(dtype=name), loss=lambda model, batch: (model(batch - batch) ** 0.5).mean()
    ).window(0)
    assert np.isnan(window.expected[2])
    for other, right in ((np.nan, True), (np.inf, alike), (-np.inf, alike), (1.0, False)):
        observed = window.expected.copy()
        observed[2] = other
        assert (window.compare(observed).ratio <= 1) is right
    observed = window.expected.copy()
    observed[0] = np.nan
    assert window.compare(observed).ratio > 1


def _refuses(wanted):
    def loss(model, batch):
        squares = model(batch) ** 2
        if squares.dtype == wanted:
            raise RuntimeError("not implemented for this dtype")
        return squares.mean()

    return loss


def test_what_torch_itself_cannot_compute_is_not_judged():
    with pytest.raises(CannotJudgeError, match="the plain large batch fails in float64: not implemented for this"):
        _reference(loss=_refuses(torch.float64)).window(0)
    window = _reference(CASE.replace(dtype="float16"), loss=_refuses(torch.float16)).window(0)
    with pytest.raises(CannotJudgeError, match="the plain large batch fails in float16: not implemented for this"):
        window.bound.expect_computable()
    window = _reference(CASE.replace(dtype="float32"), loss=_refuses(torch.bfloat16)).window(0, None, "bfloat16")
    with pytest.raises(CannotJudgeError, match="fails in float32 under autocast bfloat16: not implemented for this"):
        window.bound.expect_computable()


def _scaled(scale, power):
    return lambda model, batch: (scale * model(batch) ** power).mean()


@pytest.mark.parametrize(
    ("scale", "power", "dtype", "excused"),
    [
        (1e6, 2, "float16", True),  # beyond 65504
        (1e6, 2, "bfloat16", False),
        (1e38, 2, "bfloat16", True),  # beyond 3e38 on the way
        (1e-9, 0.5, "float16", True),  # below 6e-8, where the gradient of a root is 1 / 0
    ],
)
def test_an_infinity_is_excused_where_the_numbers_leave_the_range(scale, power, dtype, excused):
    reference = _reference(CASE.replace(dtype=dtype), loss=_scaled(scale, power) if power == 2 else _tiny_root(scale))
    window = reference.window(0)
    window.bound.__dict__["large_batch"] = np.full_like(window.expected, np.nan)
    if excused:
        with pytest.raises(CannotJudgeError, match=f"is finite in float64 and not in {dtype}, or vice versa"):
            window.compare(np.full_like(window.expected, np.nan))
    else:
        assert window.compare(np.full_like(window.expected, np.nan)).ratio == np.inf
        assert f"the {dtype} computation of torch is wrong" in precision_fault(window)


def _tiny_root(scale):
    return lambda model, batch: ((scale * model(batch).abs()) ** 0.5).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_infinity_of_one_precision_alone_is_a_fault(dtype):
    def loss(model, batch):
        squares = (model(batch) ** 2).mean()
        return squares * (float("inf") if squares.dtype == dtype else 1.0)

    window = _reference(CASE.replace(dtype="float32"), loss=loss).window(0)
    assert window.compare(window.bound.large_batch).ratio == np.inf
    assert "the float32 computation of torch is wrong" in precision_fault(window)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_torch_accumulates_to_the_large_batch(reduction):
    window = _reference(CASE.replace(dtype="float32"), reduction=reduction).window(0)
    assert window.accumulated() == pytest.approx(window.torch, rel=1e-14)
    batch_means = _reference(loss=lambda model, batch: model(batch).mean() ** 2).window(0)
    # the sum of n (w mean)^2 is no multiple of the square of the whole mean
    parts = (1 * X[0] ** 2 + 3 * X[1:4].mean() ** 2) / 4
    assert batch_means.accumulated()[2] == pytest.approx(2 * _held(W, "float32") * parts, rel=1e-14)


def test_where_the_frameworks_differ_it_is_said_who_and_where():
    reference = _generated("float32")
    window = reference.window(1)
    assert disagreement(window) is None
    assert disagreement(window, window.torch) is None
    off = window.torch.copy()
    off[-1] += 1e-9  # nothing to float32, and far more than float64 rounds
    text = disagreement(window, off)
    name = reference.layout.names[-1]
    assert f"large-batch gradients of {name} differ by 1e-09, where rounding allows " in text
    assert f"in window 1 of case {reference.instance.case.digest}: " in text
    allowed = float(text.split("rounding allows ")[1].split(",")[0])
    assert 0 < allowed < 1e-12
    agreeing = "torch large batch = torch accumulated = JAX large batch in one piece = JAX accumulated"
    assert f"{agreeing} against JAX large batch; no loop is to blame" in text


def test_a_users_problem_is_asked_of_torch_unless_jaxs_gradient_is_brought():
    window = _reference().window(0)
    assert disagreement(window) is None
    assert "torch large batch = torch accumulated against JAX large batch" in disagreement(window, window.torch + 1)


@pytest.mark.parametrize("index", [0, 1])
def test_every_window_is_asked_about(index):
    reference = _generated()
    assert reference.finding is None
    del reference.__dict__["finding"]
    window = reference.window(index)
    window.__dict__["jax"] = window.torch + 1e-6
    assert f"in window {index} of case" in reference.finding


def test_no_jax_is_asked_where_items_meet():
    reference = _generated()
    entangled = dataclasses.replace(
        reference.instance.case.problem, layers=(Layer("batch_norm_train"), *reference.instance.case.problem.layers)
    )
    window = Reference(generated_instance(reference.instance.case.replace(problem=entangled))).window(0)
    assert window.jax is None
    assert window.expected is window.torch


def test_the_latest_references_are_kept(monkeypatch):
    monkeypatch.setattr(module, "MAX_REFERENCES", 2)
    kept, problem, other = References(), _problem(), _problem()
    a, b, c = (CASE.replace(seed=seed) for seed in range(3))
    first = kept.get(a, problem)
    second = kept.get(b, problem)
    assert kept.get(a, problem) is first
    kept.get(c, problem)
    assert kept.get(a, problem) is first
    assert kept.get(b, problem) is not second
    assert kept.get(b, other) is not kept.get(b, problem)


@pytest.mark.parametrize(("off", "right"), [(0.9, True), (1.1, False)])
def test_torchs_own_gradient_is_known_by_its_bound(off, right):
    window = _generated().window(0)
    observed = window.torch.copy()
    # 256 unit roundoffs of the largest element, and one for each of the two micro-batches
    observed[0] += off * (256 + 2) * 2.0**-53 * np.abs(observed).max()
    assert window.bound.is_torchs(observed) is right


def test_no_bound_of_float64_is_held_against_a_lower_precision():
    window = _generated("float32").window(0)
    assert not window.bound.is_torchs(window.torch)
