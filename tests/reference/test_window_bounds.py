"""What the bounds are made of: parts, precisions, and what is excused where numbers leave a range."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, Problem, ProblemSpec
from gradcheck_suite.reference.large_batch import CannotJudgeError, Reference
from gradcheck_suite.run.instance import generated_instance, user_instance

PLAN = Plan((1, 3, 2), 2)
SPEC = ProblemSpec(Input("vector", size=3), (Layer("linear", bias=True, features=2),), Loss("mse", reduction="mean"))


def _generated(dtype, index=0, plan=PLAN):
    return Reference(generated_instance(Case(SPEC, plan, dtype=dtype, seed=3))).window(index)


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
    return Reference(user_instance(Case("own", plan, dtype=dtype), problem)).window(index, None, compute)


ITEMS = [1.0, 2.0, 4.0, 5.0, 8.0, 16.0]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("index", "several"), [(0, True), (1, False)])
def test_the_parts_have_rounding_errors_of_their_own_where_there_are_several(dtype, index, several):
    assert (_own(dtype, ITEMS, index=index).bound.errors_of_parts is not None) is several
    # in float64 a fault of torch's would allow itself there, and JAX's gradient is none of torch's
    generated = _generated(dtype, index).bound.errors_of_parts
    assert (generated is not None) is (several and dtype == "float32")


def test_infinities_and_nan_are_one_and_everything_else_is_as_it_is():
    window = _generated("float32")
    window.__dict__["jax"] = np.array([1.0, np.nan, np.inf, np.inf, 0.0, 2.0, 3.0, 4.0])
    seen = np.array([5.0, np.inf, np.nan, -np.inf, 1.0, 2.0, 3.0, 0.0])
    compared = window.bound.comparable(seen)
    np.testing.assert_array_equal(compared, [5.0, np.nan, np.inf, np.inf, 1.0, 2.0, 3.0, 0.0])


# 65504 is float16's largest number, and results from a 64th of it on may have larger terms
@pytest.mark.parametrize(
    ("items", "reduction", "said"),
    [
        ([20000.0] * 6, "mean", "the gradient of the window's summed loss overflows float16"),
        ([20000.0] * 6, "sum", "is finite in float64 and not in float16, or vice versa"),
        ([16000.0] * 6, "mean", "a gradient of nearly the largest numbers of float16 overflows where it is scaled"),
        ([10000.0] * 6, "sum", "a gradient of nearly the largest numbers of float16 overflows where it is scaled"),
        ([20000.0] * 6, "batch", "a gradient of nearly the largest numbers of float16 overflows where it is scaled"),
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


def test_a_gradient_that_is_finite_is_never_excused():
    window = _own("float16", [2000.0] * 6)
    assert window.bound.comparable(np.array([1.0])).tolist() == [1.0]


def test_a_gradient_that_is_finite_in_float16_alone_is_excused_where_the_numbers_are_large():
    for excuse in ("comparable", "expect_computable"):
        window = _own("float16", [2000.0] * 6)
        window.torch = np.array([np.inf])
        observed = [np.array([1.0])] if excuse == "comparable" else []
        with pytest.raises(CannotJudgeError):
            getattr(window.bound, excuse)(*observed)


@pytest.mark.parametrize(("value", "out"), [(1023.0, False), (1024.0, True)])
@pytest.mark.parametrize(("dtype", "compute"), [("float16", None), ("float32", "float16"), ("float16", "bfloat16")])
def test_numbers_are_out_of_range_from_a_64th_of_the_largest_on(value, out, dtype, compute):
    window = _own(dtype, [value] * 6, compute=compute, reduction="mean")
    assert window.bound.is_out_of_range() is out
    assert not _own(dtype.replace("16", "32") if compute is None else "bfloat16", [value] * 6).bound.is_out_of_range()


@pytest.mark.parametrize(("value", "out"), [(250.0, False), (300.0, True)])
def test_the_large_batch_may_be_out_of_range_alone(value, out):
    # the gradient of four items, where the larger part has three; the loss is small
    assert _own("float16", [value] * 6, reduction="sum", weight=2.0**-10).bound.is_out_of_range() is out


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_what_autocast_refuses_is_not_judged(dtype):
    def loss(model, batch):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("unsafe to autocast")
        return model(batch).mean()

    problem = Problem(_model, lambda count, seed: torch.ones(count, 1), loss)
    reference = Reference(user_instance(Case("own", PLAN, dtype=dtype), problem))
    reference.window(0).bound.expect_computable()
    with pytest.raises(CannotJudgeError, match="under autocast bfloat16: unsafe to autocast"):
        reference.window(0, None, "bfloat16").bound.expect_computable()


def test_one_part_that_is_not_finite_alone_is_not_judged_where_numbers_are_out_of_range():
    """The large batch's gradient of 500 is finite in float16, and so is every part's."""
    window = _own("float16", [500.0] * 6)
    window.bound.__dict__["contributions"] = [np.array([1.0]), np.array([np.inf])]
    window.bound.expect_computable()  # its numbers are in range, so that this is a fault
    window = _own("float16", [2000.0] * 6)
    window.bound.expect_computable()
    window.bound.__dict__["contributions"] = [np.array([1.0]), np.array([np.inf])]
    with pytest.raises(CannotJudgeError, match="the plain gradient of a batch is finite in float64 and not in float16"):
        window.bound.expect_computable()
    window = _own("float16", [2000.0] * 6)
    window.bound.__dict__["large_batch"] = np.array([np.inf])
    with pytest.raises(CannotJudgeError, match="the plain gradient of a batch is finite in float64 and not in float16"):
        window.bound.expect_computable()
