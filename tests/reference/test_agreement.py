"""Up to where torch, JAX and a lower precision agree: at each bound itself, and on both sides of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, Problem, ProblemSpec
from gradcheck_suite.reference.large_batch import (
    Reference,
    accumulation_fault,
    blame,
    disagreement,
    opinions,
    precision_fault,
)
from gradcheck_suite.run.instance import generated_instance, user_instance
from tests.reference.known_errors import KnownErrors

PLAN = Plan((1, 3, 2), 2)
SPEC = ProblemSpec(Input("vector", size=3), (Layer("linear", bias=True, features=2),), Loss("mse", reduction="mean"))
OWN = Problem(
    lambda seed: torch.nn.Linear(2, 1),
    lambda items, seed: torch.ones(items, 2),
    lambda model, batch: model(batch).mean(),
)


def _window(case=None, *, expected=2.0, allowed=1.0, of_parts=None, problem=None):
    """Return a window with whole numbers for its references and bounds, so that ratios are exact."""
    case = case or Case(SPEC, PLAN, seed=3)
    instance = generated_instance(case) if problem is None else user_instance(case, problem)
    window = Reference(instance).window(0)
    window.torch = np.full_like(window.torch, expected)
    if problem is None:
        window.__dict__["jax"] = window.torch.copy()
    _answer(window, lambda *parts: window.torch)
    for bound in (window.bound, window.float64_bound):
        crafted = bound.__dict__
        crafted["summing"] = np.zeros_like(window.torch)
        crafted["quick"] = np.full_like(window.torch, 2.0**-40)
        crafted["errors"] = KnownErrors(np.full_like(window.torch, allowed))
        crafted["errors_of_parts"] = None if of_parts is None else KnownErrors(np.full_like(window.torch, of_parts))
        crafted["large_batch"] = window.torch
        crafted["contributions"] = [window.torch / 2, window.torch / 2]
    return window


def _answer(window, gradient):
    """Have torch's float64 computations of a window return this."""
    window.float64_bound.computation.gradient = gradient


APART = pytest.mark.parametrize(("apart", "agree"), [(0.5, True), (1.0, True), (1.5, False), (3.0, False)])


@APART
def test_torch_and_jax_agree_up_to_the_bound(apart, agree):
    window = _window()
    window.__dict__["jax"] = window.torch + apart
    assert (disagreement(window) is None) is agree


@pytest.mark.parametrize(("apart", "asked"), [(2.0**-41, False), (2.0**-40, False), (1.5 * 2.0**-40, True)])
def test_what_the_quick_bound_allows_is_not_computed_again(apart, asked):
    window, computed = _window(), []
    _answer(window, lambda *parts: computed.append(parts) or window.torch)
    window.__dict__["jax"] = window.torch + apart
    assert disagreement(window) is None
    assert bool(computed) is asked


def test_a_large_batch_is_held_to_its_own_rounding_errors():
    """Those of the micro-batches' gradients are no excuse for it."""
    window = _window(Case("own", PLAN), of_parts=8.0, problem=OWN)
    assert disagreement(window, window.torch + 1.0) is None
    assert disagreement(window, window.torch + 4.0) is not None


@APART
def test_torchs_accumulation_and_jax_agree_up_to_the_bound(apart, agree):
    window = _window()
    window.bound.__dict__["contributions"] = [window.torch / 2, window.torch / 2 + apart]
    text = accumulation_fault(window)
    assert (text is None) is agree
    if text:
        assert text.startswith("torch's and JAX's gradients of 0.weight differ by ")
        assert text.endswith("; no loop is to blame")


def test_of_a_users_problem_no_accumulation_is_asked_about():
    window = _window(Case("own", PLAN), problem=OWN)
    window.bound.__dict__["contributions"] = [window.torch, window.torch]
    assert accumulation_fault(window) is None


@APART
@pytest.mark.parametrize("accumulated", [False, True])
def test_torchs_lower_precision_and_jax_agree_up_to_the_bound(apart, agree, accumulated):
    window = _window(Case(SPEC, PLAN, dtype="float32", seed=3))
    if accumulated:
        window.bound.__dict__["contributions"] = [window.torch / 2, window.torch / 2 + apart]
    else:
        window.bound.__dict__["large_batch"] = window.torch + apart
    text = precision_fault(window)
    assert (text is None) is agree
    if text:
        assert text.startswith("torch's large-batch gradient in float32 and JAX's in float64 of 0.weight differ by ")


def test_the_micro_batches_rounding_errors_excuse_an_accumulated_gradient_alone():
    window = _window(Case(SPEC, PLAN, dtype="float32", seed=3), of_parts=8.0)
    window.bound.__dict__["contributions"] = [window.torch / 2, window.torch / 2 + 4.0]
    assert precision_fault(window) is None
    window.bound.__dict__["large_batch"] = window.torch + 4.0
    assert "differ by 4" in precision_fault(window)


def test_of_a_users_problem_a_lower_precision_is_held_to_torchs_float64():
    window = _window(Case("own", PLAN, dtype="float32"), problem=OWN)
    assert precision_fault(window) is None
    window.bound.__dict__["large_batch"] = window.torch + 2.0
    assert "in float32 and torch's in float64 of weight differ by 2" in precision_fault(window)


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError])
def test_what_torch_cannot_compute_in_a_lower_precision_is_no_wrong_gradient(error):
    def loss(model, batch):
        if batch.dtype == torch.float16:
            raise error("not implemented for 'Half'")
        return model(batch).mean()

    problem = Problem(OWN.model, OWN.batch, loss)
    window = Reference(user_instance(Case("own", PLAN, dtype="float16"), problem)).window(0)
    assert precision_fault(window) is None


@pytest.mark.parametrize(("computation", "random"), [(0, True), (1, True), (2, True), (3, False)])
def test_a_gradient_that_changes_in_one_of_three_computations_is_not_deterministic(computation, random):
    window, asked = _window(), []

    def gradient(*parts):
        assert parts == ((window.items, 1.0),)
        asked.append(parts)
        return window.torch + 4.0 * (len(asked) == computation + 1)

    _answer(window, gradient)
    window.__dict__["jax"] = window.torch + 4.0
    window.bound.__dict__["contributions"] = [window.torch, window.torch]
    said = "two computations of torch's float64 gradient of 0.weight differ by 4"
    for ask in (disagreement, accumulation_fault):
        asked.clear()
        text = ask(window)
        assert text.startswith(said) is random
        assert ("it is not deterministic, and no loop is to blame" in text) is random


@pytest.mark.parametrize(("apart", "random"), [(0.5, False), (1.0, False), (2.0, True)])
def test_another_order_of_a_sum_is_no_randomness(apart, random):
    window = _window()
    window.bound.__dict__["summing"] = np.ones_like(window.torch)
    _answer(window, lambda *parts: window.torch + apart)
    window.__dict__["jax"] = window.torch + 4.0
    assert ("it is not deterministic" in disagreement(window)) is random


def test_nan_at_the_same_place_is_no_randomness():
    window = _window()
    window.torch[0] = np.nan
    window.__dict__["jax"] = np.full_like(window.torch, 6.0)
    _answer(window, lambda *parts: window.torch.copy())
    assert "it is not deterministic" not in disagreement(window)


def test_opinions_are_grouped_by_who_agrees_the_largest_group_first():
    one = np.ones(1)
    found = {"a": 0 * one, "b": 4 * one, "c": 5 * one, "d": 6 * one, "e": 4.5 * one}
    # d agrees with c, and not with b, which the others of its group are held to
    assert blame(found, one) == "b = c = e against a against d"


def test_there_are_five_ways_to_a_gradient_and_two_for_a_users_problem():
    window = Reference(generated_instance(Case(SPEC, PLAN, seed=3))).window(0)
    ways = opinions(window, window.jax)
    assert [*ways] == [
        "torch large batch",
        "torch accumulated",
        "JAX large batch",
        "JAX large batch in one piece",
        "JAX accumulated",
    ]
    for gradient in ways.values():
        assert gradient == pytest.approx(window.torch, rel=1e-12)
    own = Reference(user_instance(Case("own", PLAN), OWN)).window(0)
    assert [*opinions(own, own.torch)] == ["torch large batch", "torch accumulated", "JAX large batch"]
