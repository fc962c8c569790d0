"""Reference gradients that are NaN or infinite, in every precision: judged only where float64 has them too."""

from __future__ import annotations

import pytest
import torch

from gradcheck_suite import Case, Plan, Problem, check
from gradcheck_suite.loops.reset_modes import BUILT_IN, backward_window, windows
from gradcheck_suite.reference.rounding import RandomRounding, _Narrowed

DTYPES = ("float64", "float32", "bfloat16", "float16")
TWO_WINDOWS = Case("corner", Plan((1, 1), 1))


def _problem(scale, power):
    """Return items 0, 1, ... and the mean of `scale` * (weight * item) ** power."""

    def model(seed):
        linear = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(linear.weight, 2.0)
        return linear

    def batch(items, seed):
        return torch.arange(items, dtype=torch.float64)[:, None]

    return Problem(model, batch, lambda model, batch: (scale * model(batch) ** power).mean())


# at item 0 the square root's slope is infinite, times the item's 0: NaN; at item 1 it is finite
CORNER = _problem(1.0, 0.5)


def _then(change):
    def loop(run):
        for window in windows(run):
            backward_window(run, window)
            run.optimizer.step()
            for p in run.model.parameters():
                change(p)

    return loop


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["zero_", "set_to_none", "flat_buffer", "zero_grad_foreach"])
def test_a_sound_loop_keeps_the_nan_to_its_window(name, dtype):
    verdict = check(BUILT_IN[name], TWO_WINDOWS.replace(dtype=dtype), problem=CORNER)
    assert verdict.skipped is None
    assert verdict.holds, verdict.violation


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_reset_by_multiplication_carries_the_nan_on(dtype):
    violation = check(_then(lambda p: p.grad.mul_(0)), TWO_WINDOWS.replace(dtype=dtype), problem=CORNER).violation
    assert violation is not None
    assert (violation.kind, violation.diagnosis, violation.window) == ("non-finite", "poisoned-by-earlier-window", 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hiding_the_nan_is_a_fault_too(dtype):
    def hides(run):
        for window in windows(run):
            run.optimizer.zero_grad()
            backward_window(run, window)
            for p in run.model.parameters():
                p.grad.nan_to_num_(0.0)
            run.optimizer.step()

    violation = check(hides, TWO_WINDOWS.replace(dtype=dtype), problem=CORNER).violation
    assert violation is not None
    assert violation.window == 0


def test_what_overflows_in_the_lower_precision_alone_is_not_judged():
    # 6e4 * 2 * (2 * 1) is finite in float64 and beyond 65504 in float16
    problem = _problem(6e4, 2)
    assert check(BUILT_IN["zero_"], TWO_WINDOWS, problem=problem).skipped is None
    verdict = check(BUILT_IN["zero_"], TWO_WINDOWS.replace(dtype="float16"), problem=problem)
    (reason,) = verdict.windows_skipped
    assert "finite in float64 and not in float16" in reason
    assert verdict.holds


def test_an_infinity_is_as_good_as_a_nan_in_lower_precision():
    class Infinite(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return torch.full_like(grad, float("inf" if grad.dtype == torch.float32 else "nan"))

    base = _problem(1.0, 1)
    problem = Problem(base.model, base.batch, lambda model, batch: Infinite.apply(model(batch + 1)).mean())
    assert check(BUILT_IN["zero_"], TWO_WINDOWS.replace(dtype="float32"), problem=problem).holds


def test_rounding_never_writes_to_an_argument_that_an_operation_returns():
    """CuDNN's recurrent operation returns its flat weights, which are the model's parameters."""
    library = torch.library.Library("gradcheck_suite_tests", "DEF")
    library.define("recurrent(Tensor x, Tensor weight) -> (Tensor, Tensor)")
    library.impl("recurrent", lambda x, weight: (x / 3, weight), "CPU")
    x, weight = torch.ones(2, dtype=torch.float64), torch.full((2,), 1 / 3, dtype=torch.float64)
    for mode in (_Narrowed(torch.float16), RandomRounding(0, torch.float16)):
        with mode:
            y, returned = torch.ops.gradcheck_suite_tests.recurrent(x, weight)
        assert (y - 1 / 3).abs().max() > 1e-6
        assert weight.tolist() == [1 / 3] * 2
        assert (returned is weight) == isinstance(mode, _Narrowed)  # random rounding has moved a copy
