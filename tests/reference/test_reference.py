"""A window's reference against what it is by hand: gradients of squares, and the bound in every
precision.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, Problem, ProblemSpec
from gradcheck_suite.reference.evaluation import evaluated_by
from gradcheck_suite.reference.large_batch import (
    CannotJudgeError,
    Reference,
    accumulation_fault,
    disagreement,
    precision_fault,
)
from gradcheck_suite.run.instance import generated_instance, user_instance
from tests.reference.known_errors import KnownErrors

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


def test_jax_stands_for_generated_problems_at_any_parameters():
    reference = _generated()
    parameters = {
        name: 2 * p.detach() for name, p in reference.model(None, None).named_parameters()
    }
    for window in (reference.window(1), reference.window(1, parameters)):
        assert window.expected is window.jax
        assert window.jax == pytest.approx(window.torch, rel=1e-12)
    assert np.abs(reference.window(1).jax - reference.window(1, parameters).jax).max() > 0.1


def test_what_is_not_reached_is_zero_and_vectors_follow_the_layout():
    reference = _reference()
    flat = reference.flat({"weight": torch.tensor([[3.0]], dtype=torch.float32), "idle": None})
    assert flat.tolist() == [0, 0, 3]
    assert flat.dtype == np.float64
    assert reference.join({"weight": np.array([[4.0]]), "idle": np.array([1.0, 2.0])}).tolist() == [
        1,
        2,
        4,
    ]


@pytest.fixture(autouse=True)
def _by_xla():
    """What a test plants as JAX's gradient is XLA's: numpy's would be computed again."""
    with evaluated_by("xla"):
        yield


def test_models_are_at_the_parameters_asked_for():
    reference = _reference(CASE.replace(dtype="bfloat16"))
    assert reference.model(torch.float64, None) is reference.model(torch.float64, None)
    assert reference.model(None, None).weight.dtype == torch.bfloat16
    moved = reference.model(torch.float64, {"weight": torch.full((1, 1), 2.0)})
    assert moved is not reference.model(torch.float64, None)
    assert (moved.weight.item(), moved.idle.tolist()) == (2.0, [1, 1])
    assert reference.model(torch.float64, None).weight.item() == _held(W, "bfloat16")


def test_at_an_optimizers_parameters_jax_judges_as_well():
    """Torch's gradient is no excuse there either."""
    reference = _generated()
    parameters = {
        name: 2 * p.detach() for name, p in reference.model(None, None).named_parameters()
    }
    for window in (reference.window(0, parameters), reference.window(0)):
        assert disagreement(window) is None
        window.__dict__["jax"] = window.torch + 1.0
        assert window.compare(window.torch + 1.0).ratio <= 1
        assert window.compare(window.torch).ratio > 1
        said = disagreement(window)
        assert ("at parameters that the optimizer has moved" in said) is window.moved


def test_of_a_users_problem_torch_is_the_only_judge():
    window = _reference().window(0, {"weight": torch.full((1, 1), 2.0)})
    assert window.compare(window.torch).ratio <= 1
    assert window.compare(window.torch + 1).ratio > 1


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16"])
def test_in_a_window_that_is_rightly_not_finite_any_element_may_be_nan(name):
    window = _reference(
        CASE.replace(dtype=name), loss=lambda model, batch: (model(batch - batch) ** 0.5).mean()
    ).window(0)
    assert np.isnan(window.expected[2])
    for other, right in ((np.nan, True), (np.inf, False), (-np.inf, False), (1.0, False)):
        observed = window.expected.copy()
        observed[2] = other
        assert (window.compare(observed).ratio <= 1) is right
    for other, right in ((np.nan, True), (np.inf, False), (window.expected[0] + 1, False)):
        observed = window.expected.copy()
        observed[0] = other
        assert (window.compare(observed).ratio <= 1) is right


@pytest.mark.parametrize(("third", "cancels"), [(-0.3, True), (0.3, False)])
def test_the_other_infinity_is_right_where_rounding_alone_decides_on_it(third, cancels):
    """0.1 + 0.2 - 0.3 is 6e-17, and 0 or -3e-17 in other orders.

    Infinity times it is the gradient.
    """

    def loss(model, batch):
        one = torch.ones_like(batch[:, :1])
        return (model(batch * batch) * (0.1 * one + 0.2 * one + third * one) * torch.inf).mean()

    window = _reference(loss=loss).window(0)
    assert window.expected[2] == np.inf
    assert (window.compare(-window.expected).ratio <= 1) is cancels
    # batches of other sizes have a zero of the other sign
    window.bound.__dict__["contributions"] = [-window.expected]
    assert window.compare(-window.expected).ratio <= 1


def _refuses(wanted):
    def loss(model, batch):
        squares = model(batch) ** 2
        if squares.dtype == wanted:
            raise RuntimeError("not implemented for this dtype")
        return squares.mean()

    return loss


def test_what_torch_itself_cannot_compute_is_not_judged():
    with pytest.raises(
        CannotJudgeError, match="the plain large batch fails in float64: not implemented for this"
    ):
        _reference(loss=_refuses(torch.float64)).window(0)
    window = _reference(CASE.replace(dtype="float16"), loss=_refuses(torch.float16)).window(0)
    with pytest.raises(
        CannotJudgeError, match="the plain large batch fails in float16: not implemented for this"
    ):
        window.bound.expect_computable()
    window = _reference(CASE.replace(dtype="float32"), loss=_refuses(torch.bfloat16)).window(
        0, None, "bfloat16"
    )
    with pytest.raises(
        CannotJudgeError, match="fails in float32 under autocast bfloat16: not implemented for this"
    ):
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
    reference = _reference(
        CASE.replace(dtype=dtype), loss=_scaled(scale, power) if power == 2 else _tiny_root(scale)
    )
    window = reference.window(0)
    window.bound.__dict__["large_batch"] = np.full_like(window.expected, np.nan)
    if excused:
        with pytest.raises(
            CannotJudgeError, match=f"is finite in float64 and not in {dtype}, or vice versa"
        ):
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
    agreeing = "torch large batch = torch accumulated = JAX large batch in one piece"
    assert f"{agreeing} against JAX large batch; no loop is to blame" in text


@pytest.mark.parametrize(("off", "right"), [(0.9, True), (1.1, False)])
def test_torchs_own_gradient_is_known_by_its_bound(off, right):
    window = _generated().window(0)
    observed = window.torch.copy()
    # 256 unit roundoffs of the largest element, and one for each of the two micro-batches
    observed[0] += off * (256 + 2) * 2.0**-53 * np.abs(observed).max()
    assert window.bound.is_torchs(observed) is right


# What the bounds are made of: parts, precisions, and what is excused where numbers leave a range.


PLAN = Plan((1, 3, 2), 2)
SPEC = ProblemSpec(
    Input("vector", size=3),
    (Layer("linear", bias=True, features=2),),
    Loss("mse", reduction="mean"),
)


def _model(seed, weight=1.0):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, weight)
    return model


def _own(dtype, items, *, reduction="mean", compute=None, index=0, plan=PLAN, weight=1.0):
    """Return a window whose gradient is the mean, or the sum, of its items."""
    data = torch.tensor(items, dtype=torch.float64)[:, None]
    problem = Problem(
        lambda seed: _model(seed, weight),
        lambda count, seed: data[:count],
        lambda model, batch: model(batch).sum() if reduction == "sum" else model(batch).mean(),
        reduction=reduction,
    )
    return Reference(user_instance(Case("own", plan, dtype=dtype), problem)).window(
        index, None, compute
    )


ITEMS = [1.0, 2.0, 4.0, 5.0, 8.0, 16.0]


# 65504 is float16's largest number, and results from a 64th of it on may have larger terms
@pytest.mark.parametrize(
    ("items", "reduction", "said"),
    [
        ([20000.0] * 6, "mean", "the gradient of the window's summed loss overflows float16"),
        ([20000.0] * 6, "sum", "is finite in float64 and not in float16, or vice versa"),
        (
            [16000.0] * 6,
            "mean",
            "a gradient of nearly the largest numbers of float16 overflows where it is scaled",
        ),
        (
            [10000.0] * 6,
            "sum",
            "a gradient of nearly the largest numbers of float16 overflows where it is scaled",
        ),
        (
            [20000.0] * 6,
            "batch",
            "a gradient of nearly the largest numbers of float16 overflows where it is scaled",
        ),
        ([500.0] * 6, "mean", None),
        ([200.0] * 6, "sum", None),
    ],
)
def test_a_gradient_that_overflows_is_excused_where_the_numbers_are_large(items, reduction, said):
    window = _own("float16", items, reduction=reduction)
    observed = np.array([np.inf])
    if said is None:
        assert window.bound.comparable(observed) is not None
        return
    with pytest.raises(CannotJudgeError, match=said):
        window.bound.comparable(observed)


# Up to where torch, JAX and a lower precision agree: at each bound itself, and on both sides of it.


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
        crafted["errors_of_parts"] = (
            None if of_parts is None else KnownErrors(np.full_like(window.torch, of_parts))
        )
        crafted["large_batch"] = window.torch
        crafted["contributions"] = [window.torch / 2, window.torch / 2]
    return window


def _answer(window, gradient):
    """Have torch's float64 computations of a window return this."""
    window.float64_bound.computation.gradient = gradient


APART = pytest.mark.parametrize(
    ("apart", "agree"), [(0.5, True), (1.0, True), (1.5, False), (3.0, False)]
)


@APART
def test_torch_and_jax_agree_up_to_the_bound(apart, agree):
    window = _window()
    window.__dict__["jax"] = window.torch + apart
    assert (disagreement(window) is None) is agree


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
        assert text.startswith(
            "torch's large-batch gradient in float32 and JAX's in float64 of 0.weight differ by "
        )


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
def test_a_gradient_that_changes_in_one_of_three_computations_is_not_deterministic(
    computation, random
):
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
