"""A gradient that is rightly zeros is no None, and a parameter that nothing reaches may have
either.
"""

from __future__ import annotations

import pytest
import torch

from gradcheck_suite import Case, Plan, Problem
from gradcheck_suite.loops.reset_modes import MODES, backward_window, plain
from gradcheck_suite.verification.check import check
from tests.training import trains


class Paths(torch.nn.Module):
    """One weight that every item reaches, one behind a ReLU that is off, one that only negative
    items reach.
    """

    def __init__(self):
        super().__init__()
        self.used, self.off, self.negative = (torch.nn.Parameter(torch.ones(1)) for _ in range(3))

    def forward(self, x):
        out = x * self.used + torch.relu(-1 - self.off**2 * x**2)
        return torch.cat([out, x[x < 0] * self.negative]) if bool((x < 0).any()) else out


def problem(values):
    """Return a problem whose items have these values; a negative one counts nothing."""

    def loss(model, batch):
        x = batch["x"]
        total = model(x)[: len(x)][x > 0].sum() + 0 * model(x).sum()
        return total / (x > 0).sum().clamp(min=1)

    return Problem(
        lambda seed: Paths(),
        lambda items, seed: {"x": torch.tensor(values[:items], dtype=torch.float64)},
        loss,
        count=lambda batch: (batch["x"] > 0).sum(),
    )


def _set_zeros_to_none(run, step):
    for p in run.model.parameters():
        if p.grad is not None and not p.grad.any():
            p.grad = None


def _valid_alone(run, window):
    backward_window(run, [batch for batch in window if run.count(batch)])


zeros_set_to_none = trains(before=_set_zeros_to_none)
micro_batches_without_valid_targets_left_out = trains(backward=_valid_alone)


@pytest.mark.parametrize("optimizer", [None, "adamw"])
def test_none_in_place_of_zeros_is_another_step(optimizer):
    case = Case("paths", Plan((1, 2), 2, 2), optimizer=optimizer)
    violation = check(zeros_set_to_none, case, problem=problem([1.0, 2.0, 3.0])).violation
    assert (violation.kind, violation.diagnosis, violation.parameter) == (
        "none-pattern",
        "no-gradient",
        "off",
    )
    assert "where backward leaves zeros" in violation.explanation


@pytest.mark.parametrize("loop", [plain, MODES["zero_"], MODES["set_to_none"]])
def test_a_parameter_that_no_item_reaches_may_have_either(loop):
    case = Case("paths", Plan((1, 2), 1, 2), optimizer="adamw")
    assert check(loop, case, problem=problem([1.0, 2.0, 3.0])).holds


def test_a_micro_batch_without_valid_targets_may_be_left_out():
    # its item alone reaches a parameter, with a gradient of zeros
    case = Case("paths", Plan((2, 1), 2), optimizer="adamw")
    given = problem([1.0, 2.0, -3.0])
    assert check(plain, case, problem=given).holds
    assert check(micro_batches_without_valid_targets_left_out, case, problem=given).holds


class Routed(torch.nn.Module):
    """A weight for numbers above 1, and one for the others, chosen as a mixture of experts does."""

    def __init__(self):
        super().__init__()
        self.above, self.below = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))

    def forward(self, x):
        # 1 + 2**-9 is 1 in bfloat16, whose next number is 1 + 2**-7
        moved = x + 2**-9
        parts = [
            x[chosen] * w
            for chosen, w in ((moved > 1, self.above), (moved <= 1, self.below))
            if chosen.any()
        ]
        return torch.cat(parts)


@pytest.mark.parametrize(
    ("dtype", "violated"), [("float64", True), ("float32", True), ("bfloat16", False)]
)
def test_what_only_a_rounding_error_reaches_may_have_none(dtype, violated):
    without_the_weight_above = trains(
        before=lambda run, step: setattr(run.model.above, "grad", None)
    )

    given = Problem(
        lambda seed: Routed(),
        lambda items, seed: {"x": torch.ones(items, dtype=torch.float64)},
        lambda model, batch: model(batch["x"]).mean(),
    )
    case = Case("routed", Plan((1, 2), 2), dtype=dtype)
    assert check(plain, case, problem=given).holds
    assert (check(without_the_weight_above, case, problem=given).violation is not None) == violated
