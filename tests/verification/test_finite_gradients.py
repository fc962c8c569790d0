"""A loop that assumes finite gradients is run on such cases only, and judged on as many."""

from __future__ import annotations

import pytest
import torch

from gradcheck_suite import Problem, verify
from gradcheck_suite.loops.reset_modes import backward_window, windows
from gradcheck_suite.verification.search import OUTSIDE

pytestmark = pytest.mark.usefixtures("without_second_opinion")


class _Power(torch.nn.Module):
    def __init__(self, power: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.5, 1.0], dtype=torch.float64))
        self.power = power


def _problem(power):
    """Return a problem whose gradient is infinite where an item is 0, which some batches have."""

    def batch(items, seed):
        return torch.randint(
            0, 80, (items, 1), generator=torch.Generator().manual_seed(seed)
        ).double()

    return Problem(
        _Power, batch, lambda model, batch: ((model.weight.sum() * batch) ** power).mean()
    )


def _noting(seen, change=lambda gradient: None):
    """Return a loop that notes whether its gradients are finite, and then changes them."""

    def loop(run):
        for window in windows(run):
            run.optimizer.zero_grad()
            backward_window(run, window)
            for p in run.model.parameters():
                if p.grad is not None:
                    seen.append(bool(p.grad.isfinite().all()))
                    change(p.grad)
            run.optimizer.step()

    return loop


@pytest.mark.full
@pytest.mark.parametrize(
    ("problem", "dtype"),
    [(_problem(0.5), "float64"), pytest.param(None, "float16", marks=pytest.mark.full)],
)
def test_only_finite_gradients_are_drawn_and_as_many_cases_judged(problem, dtype):
    free, seen = [], []
    options = {"problem": problem, "examples": 20, "dtype": dtype}
    assert verify(_noting(free), **options).holds
    assert not all(free)
    result = verify(
        _noting(seen, lambda g: g.nan_to_num_(0.0, 0.0, 0.0)),
        **options,
        assumes=("finite-gradients",),
    )
    assert result.holds
    assert all(seen)
    assert result.judged + sum(result.skipped.values()) == result.cases == 20
    assert OUTSIDE not in result.skipped


@pytest.mark.full
def test_a_wrong_finite_gradient_is_found():
    loop = _noting([], lambda g: g.nan_to_num_(0.0, 0.0, 0.0).mul_(1.5))
    options = {"problem": _problem(0.5), "examples": 5, "assumes": ("finite-gradients",)}
    assert verify(loop, **options).violation.diagnosis == "wrong-scale"
