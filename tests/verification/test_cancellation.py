"""Parts of a gradient that cancel, to exactly zero in one order of summation and not in another, are no fault."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, Problem, ProblemSpec, check
from gradcheck_suite.core.comparison import UNIT_ROUNDOFF, Layout, summation_bound
from gradcheck_suite.loops.reset_modes import MODES, part_of_window, window_count, windows
from gradcheck_suite.reference.large_batch import Reference
from gradcheck_suite.run.instance import user_instance

LINEAR = Layer("linear", bias=False, features=1)
# the softmax of one feature is 1, so the last gradient is a sum of +1/N and -1/N, which the large batch adds up to 0
CANCELLING = Case(
    ProblemSpec(Input("vector", size=2), (LINEAR, Layer("softmax"), LINEAR, LINEAR), Loss("l1", reduction="mean")),
    Plan((1, 2, 3, 4, 1, 1, 1, 1, 1, 2, 2, 1, 2, 2, 3, 5), 4),
)


@pytest.mark.parametrize("name", ["zero_", "set_to_none"])
def test_parts_that_cancel_are_not_blamed(name):
    verdict = check(MODES[name], CANCELLING)
    assert verdict.violation is None
    assert verdict.finding is None


def test_a_wrong_weight_among_cancelling_parts_is_still_found():
    def off_by_a_millionth(run):
        for _ in range(run.epochs):
            batches = list(run.loader)
            for start in range(0, len(batches), run.accumulation_steps):
                window = batches[start : start + run.accumulation_steps]
                total = sum(run.count(batch) for batch in window)
                for j, batch in enumerate(window):
                    weight = 1 + 1e-6 * (j == 0)
                    (weight * run.loss(run.model, batch) * run.count(batch) / total).backward()
                run.optimizer.step()
                run.optimizer.zero_grad()

    assert check(off_by_a_millionth, CANCELLING).violation is not None


def test_the_bound_of_summation_holds_for_every_order_and_is_no_wider_than_it_must_be():
    rng = np.random.default_rng(0)
    parts = rng.choice([-0.1, 0.1], 64) * rng.uniform(0.5, 2, 64)
    layout = Layout(("w",), ((1,),))
    (allowed,) = summation_bound(np.array([np.abs(parts).sum()]), len(parts), layout)
    sums = [np.add.accumulate(rng.permutation(parts))[-1] for _ in range(200)]
    assert max(sums) - min(sums) <= allowed
    assert allowed <= 200 * UNIT_ROUNDOFF["float64"] * np.abs(parts).sum()


NORMED = (Layer("weight_norm", features=1, whole=False),)
NORM_CANCELS = Case(ProblemSpec(Input("vector", size=1), NORMED, Loss("l1", reduction="mean")), Plan((3, 2, 4, 1), 2))
"""The direction of a single weight is 1 or -1: its gradient is 0, of products that cancel."""


def _by_functional_grad(run):
    for window in windows(run):
        total = window_count(run, window)
        named = {name: p.detach() for name, p in run.model.named_parameters()}
        for batch in window:

            def part(values, batch=batch, total=total):
                model = partial(torch.func.functional_call, run.model, values)
                return part_of_window(SimpleNamespace(**{**vars(run), "model": model}), batch, total)

            for name, gradient in torch.func.grad(part)(named).items():
                p = run.model.get_parameter(name)
                p.grad = gradient if p.grad is None else p.grad + gradient
        run.optimizer.step()
        run.optimizer.zero_grad()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_products_that_cancel_inside_a_layer_are_not_blamed(dtype):
    for seed in range(5):
        verdict = check(_by_functional_grad, NORM_CANCELS.replace(dtype=dtype, seed=seed))
        assert verdict.violation is None
        assert verdict.finding is None


def test_preactivations_that_cancel_are_no_fault_of_the_problem():
    """The sum of a row is 0 or a rounding error, by the order of the sum, and ReLU passes a gradient or does not."""

    def model(seed):
        torch.manual_seed(seed)
        linear = torch.nn.Linear(3, 2)
        torch.nn.init.ones_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
        return torch.nn.Sequential(linear, torch.nn.ReLU(), torch.nn.Linear(2, 1))

    def batch(items, seed):
        return torch.tensor([0.1, 0.2, -0.3], dtype=torch.float64).repeat(items, 1)

    problem = Problem(model, batch, lambda model, batch: model(batch).square().mean())
    for sizes in ((1, 3), (2, 7), (5, 16), (17, 1)):
        verdict = check(MODES["zero_"], Case("cancelling", Plan(sizes, 2)), problem=problem)
        assert verdict.violation is None, sizes


class _Normed(torch.nn.Module):
    """A weight of length `length` and direction `v`; the gradient of one direction is a number minus itself."""

    def __init__(self, wrong_by: float = 0.0) -> None:
        super().__init__()
        self.v, self.length = torch.nn.Parameter(torch.rand(1) + 0.1), torch.nn.Parameter(torch.rand(1) + 1)
        self._wrong_by = wrong_by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = _WrongInFloat32.apply(self.v, self._wrong_by)
        return x * (v * (self.length / v.norm()))


class _WrongInFloat32(torch.autograd.Function):
    """The identity; its backward adds a number in float32, as a fault of torch in that precision would."""

    @staticmethod
    def forward(ctx, v, wrong_by):
        ctx.wrong_by = wrong_by
        return v.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + ctx.wrong_by * (gradient.dtype is torch.float32), None


def _opposed(wrong_by: float = 0.0) -> Problem:
    """Return a problem whose items have gradients of 5, 11, -16, 5, ... with respect to the weight."""

    def model(seed):
        torch.manual_seed(seed)
        return _Normed(wrong_by)

    def batch(items, seed):
        return torch.tensor([[5.0], [11.0], [-16.0]], dtype=torch.float64).repeat(items, 1)[:items]

    return Problem(model, batch, lambda model, batch: model(batch).sum(), reduction="sum")


OPPOSED = Case("opposed", Plan((1, 1, 1), 3))


@pytest.mark.parametrize(
    "dtype", ["float64", "bfloat16", *(pytest.param(dtype, marks=pytest.mark.full) for dtype in ("float32", "float16"))]
)
def test_micro_batches_that_cancel_each_other_have_rounding_errors_of_their_own_size(dtype):
    """The large batch's gradient of the weight is 0, and so is its rounding error; no micro-batch's is."""
    largest = 0.0
    for seed in range(4):
        case = OPPOSED.replace(dtype=dtype, seed=seed)
        window = Reference(user_instance(case, _opposed())).window(0)
        accumulated = np.sum(window.bound.contributions, axis=0)
        largest = max(largest, float(np.max(np.abs(accumulated - window.expected) / window.allowed())))
        verdict = check(MODES["zero_"], case, problem=_opposed())
        assert (verdict.violation, verdict.finding, verdict.skipped) == (None, None, None)
    assert largest > 1, "the errors of the large batch alone would allow it"


def test_a_fault_of_float32_among_micro_batches_that_cancel_is_a_finding():
    for size, found in ((1e-3, True), (1e-9, False)):
        verdict = check(MODES["zero_"], OPPOSED.replace(dtype="float32"), problem=_opposed(size))
        assert verdict.violation is None
        assert ("the float32 computation of torch is wrong" in str(verdict.finding)) == found
