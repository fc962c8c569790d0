"""Faults planted in torch's and in JAX's own backward pass of a linear layer: each is a finding,
and no loop is blamed.

The sizes of the faults are within what the bound of every dtype finds (`docs/bounds.md` has the
measured curve).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, check
from gradcheck_suite.catalogue import tables
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.reference import jax_gradients, large_batch, programs
from gradcheck_suite.reference.large_batch import Reference
from gradcheck_suite.run.instance import generated_instance

LINEAR = Layer("linear", bias=True, features=3)
SPEC = ProblemSpec(
    Input("vector", size=3), (LINEAR, Layer("tanh"), LINEAR), Loss("mse", reduction="mean")
)
CASE = Case(SPEC, Plan((3, 5, 4, 4), 2), seed=5)
DTYPES = ("float64", "float32", "bfloat16", "float16")


def _element(lib, gradient):
    """Return 1 at the largest element, and 0 elsewhere."""
    return lib.where(lib.abs(gradient) == lib.abs(gradient).max(), 1.0, 0.0)


def _without_first(lib, rows):
    """Return the rows, with zeros in the first one."""
    return lib.concatenate((0 * rows[:1], rows[1:]))


# (library, input, gradient of the output, gradients of weight, bias and input) -> wrong gradients
FAULTS = {
    "weight times 3": lambda lib, x, g, w, b, i: (3 * w, b, i),
    "weight times 1.5": lambda lib, x, g, w, b, i: (1.5 * w, b, i),
    "weight is 0": lambda lib, x, g, w, b, i: (0 * w, b, i),
    "weight transposed": lambda lib, x, g, w, b, i: (w.T, b, i),
    "one element of weight doubled": lambda lib, x, g, w, b, i: (w + w * _element(lib, w), b, i),
    "first item dropped": lambda lib, x, g, w, b, i: (g.T @ _without_first(lib, x), b, i),
    "a constant added": lambda lib, x, g, w, b, i: (w + 1, b, i),
    "weight is NaN": lambda lib, x, g, w, b, i: (w * float("nan"), b, i),
    "one element of weight is infinite": lambda lib, x, g, w, b, i: (
        lib.where(_element(lib, w) == 1, float("inf"), w), b, i),
    "bias is 0": lambda lib, x, g, w, b, i: (w, 0 * b, i),
    "bias is a mean": lambda lib, x, g, w, b, i: (w, b / len(g), i),
    "input times 3": lambda lib, x, g, w, b, i: (w, b, 3 * i),
}  # fmt: skip


def _kinds(quick):
    """Return the names of all faults as parameters, of which the default run tests one."""
    return [pytest.param(name, marks=() if name == quick else pytest.mark.full) for name in FAULTS]


linear = torch.nn.functional.linear


def _in_torch(fault, acts):
    """Return a linear function whose gradient is wrong where `acts(weight)` is true."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x, weight)
            return linear(x, weight, bias)

        @staticmethod
        def backward(ctx, g):
            x, weight = ctx.saved_tensors
            right = g.T @ x, g.sum(0), g @ weight
            found = fault(torch, x, g, *right) if acts(weight) else right
            into_weight, into_bias, into_x = (f.to(g.dtype) for f in found)
            return into_x, into_weight, into_bias

    return lambda x, weight, bias: Wrong.apply(x, weight, bias)


def _in_jax(fault, acts):
    """Return the JAX implementation of a linear layer whose gradient is wrong where `acts(weight)`
    is true.
    """

    @jax.custom_vjp
    def wrong(weight, bias, x):
        return x @ weight.T + bias

    def backward(saved, g):
        weight, x = saved
        right = g.T @ x, g.sum(0), g @ weight
        return tuple(
            jnp.where(acts(weight), f, r)
            for f, r in zip(fault(jnp, x, g, *right), right, strict=True)
        )

    wrong.defvjp(lambda weight, bias, x: (x @ weight.T + bias, (weight, x)), backward)
    return lambda options, params, x, extras: wrong(params["weight"], params["bias"], x)


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch):
    """Compile what a test plants, and forget it afterwards."""
    monkeypatch.setenv("GRADCHECK_SUITE_CACHE", "")
    monkeypatch.setattr(programs, "PROGRAMS", programs.CompiledPrograms())
    monkeypatch.setattr(large_batch.REFERENCES, "_kept", type(large_batch.REFERENCES._kept)())
    _forget()
    yield
    _forget()


def _forget():
    for value in vars(jax_gradients).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def _plant_in_jax(monkeypatch, fault, acts=lambda weight: True):
    kind = dataclasses.replace(tables.LAYERS["linear"], jax_apply=_in_jax(fault, acts))
    monkeypatch.setitem(tables.LAYERS, "linear", kind)


def _expect_finding(case, *, by):
    verdict = check(MODES["zero_"], case)
    assert verdict.violation is None
    assert verdict.finding is not None, case.dtype
    assert by in verdict.finding


@pytest.mark.parametrize("dtype", DTYPES)
def test_sound_references_are_no_finding(dtype, monkeypatch):
    def right(lib, x, g, w, b, i):
        return w, b, i

    monkeypatch.setattr(torch.nn.functional, "linear", _in_torch(right, lambda weight: True))
    _plant_in_jax(monkeypatch, right)
    verdict = check(MODES["zero_"], CASE.replace(dtype=dtype))
    assert verdict.holds
    assert verdict.finding is None


@pytest.mark.full
@pytest.mark.parametrize("kind", _kinds("one element of weight doubled"))
def test_a_fault_of_torch_in_one_dtype_is_a_finding(kind, monkeypatch):
    for dtype in DTYPES:
        wrong = getattr(torch, dtype)
        planted = _in_torch(FAULTS[kind], lambda weight, wrong=wrong: weight.dtype is wrong)
        monkeypatch.setattr(torch.nn.functional, "linear", planted)
        by = (
            "torch's and JAX's"
            if dtype == "float64"
            else f"the {dtype} computation of torch is wrong"
        )
        _expect_finding(CASE.replace(dtype=dtype), by=by)


def test_a_fault_of_torch_that_rounding_switches_off_is_a_finding(monkeypatch):
    def first_item_dropped(lib, x, g, w, b, i):
        # exactly 1 in the first row, unless a draw of rounding errors moves it
        place = lib.cumsum(lib.ones_like(x[:, :1]), 0)
        return g.T @ (x * lib.where(place == 1, 0.0, 1.0)), b, i

    planted = _in_torch(first_item_dropped, lambda weight: weight.dtype is torch.float64)
    monkeypatch.setattr(torch.nn.functional, "linear", planted)
    _expect_finding(CASE, by="torch's and JAX's")


@pytest.mark.parametrize("often", [0.5, 1.0])
def test_a_random_fault_of_torch_is_a_finding(often, monkeypatch):
    generator = torch.Generator().manual_seed(0)

    def sometimes_off(lib, x, g, w, b, i):
        off = torch.rand(2, generator=generator)
        return w * (1 + float(off[0]) * (float(off[1]) < often)), b, i

    monkeypatch.setattr(
        torch.nn.functional, "linear", _in_torch(sometimes_off, lambda weight: True)
    )
    for seed in range(4):
        _expect_finding(CASE.replace(seed=seed), by="not deterministic")


@pytest.mark.parametrize("kind", _kinds("bias is 0"))
def test_a_fault_of_jax_is_a_finding(kind, monkeypatch):
    _plant_in_jax(monkeypatch, FAULTS[kind])
    # JAX computes in float64 whatever the case's dtype
    for dtype in ("float64", "bfloat16"):
        _expect_finding(CASE.replace(dtype=dtype), by="torch's and JAX's")


@pytest.mark.parametrize("framework", ["torch", "JAX"])
def test_a_fault_after_the_first_step_is_a_finding(framework, monkeypatch):
    initial = Reference(generated_instance(CASE)).values64["0.weight"]
    if framework == "torch":
        at_start = torch.as_tensor(initial)

        def moved(weight):
            return weight.dtype is torch.float64 and not torch.equal(weight, at_start)

        monkeypatch.setattr(
            torch.nn.functional, "linear", _in_torch(FAULTS["weight times 1.5"], moved)
        )
    else:
        _plant_in_jax(
            monkeypatch, FAULTS["weight times 1.5"], lambda weight: (weight != initial).any()
        )
    # the other layer has other weights from the start
    spec = dataclasses.replace(SPEC, layers=(LINEAR,))
    case = CASE.replace(problem=spec, optimizer="sgd")
    _expect_finding(case, by="at parameters that the optimizer has moved")


@pytest.mark.parametrize("far", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_fault_of_lower_precision_after_the_first_step_is_a_finding(far, monkeypatch):
    """Also where the optimizer has made parameters hundreds of times as large as they were at
    first.
    """
    spec = dataclasses.replace(SPEC, layers=(LINEAR,))
    if far:
        spec = dataclasses.replace(
            spec, loss=Loss("cross_entropy_of_large_logits", reduction="mean", scale=10000.0)
        )
    at_start = (
        generated_instance(CASE.replace(problem=spec, dtype="bfloat16"))
        .model()
        .get_parameter("0.weight")
    )
    largest = []

    def moved(weight):
        largest.append(weight.abs().max().item())
        return weight.dtype is torch.bfloat16 and not torch.equal(weight, at_start)

    monkeypatch.setattr(torch.nn.functional, "linear", _in_torch(FAULTS["weight times 3"], moved))
    case = CASE.replace(problem=spec, dtype="bfloat16", optimizer="sgd")
    _expect_finding(case, by="the bfloat16 computation of torch is wrong")
    assert (max(largest) > 100) == far
