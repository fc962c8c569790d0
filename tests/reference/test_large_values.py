"""Large values and saturated probabilities: no finding is made of torch's own rounding, and faults are found."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, check
from gradcheck_suite.catalogue.tables import LOSSES
from gradcheck_suite.core.comparison import DRAWS
from gradcheck_suite.loops.reset_modes import BUILT_IN, backward_window, windows
from gradcheck_suite.reference import large_batch, rounding
from gradcheck_suite.reference.large_batch import REFERENCES, UNEVEN, CannotJudgeError, precision_fault
from gradcheck_suite.reference.rounding import Computation, leaves_range
from gradcheck_suite.run.instance import generated_instance
from gradcheck_suite.studies.calibration import scaled_and_back
from tests.one_problem import OVERFLOWING_SUM

# torch rounds log(sum(exp(x))) to bfloat16 before it subtracts it from the largest x
SATURATED = Case(
    ProblemSpec(
        Input("vector", size=2, values="large"),
        (
            Layer("scale"),
            Layer("batch_norm1d", affine=False),
            Layer("mixture", experts=2, features=2),
        ),
        Loss("nll", class_weights=False, ignore_index=False, reduction="mean"),
    ),
    Plan((1, 3, 1, 2, 2, 5, 3, 8, 1, 3, 3, 3), 3),
    dtype="bfloat16",
    seed=2940450932,
)
# torch computes log(1 + exp(-y x)), whose exponential is infinite in bfloat16
OVERFLOWS = Case(
    ProblemSpec(
        Input("image", channels=2, height=4, width=5, values="large"),
        (Layer("scale"),),
        Loss("soft_margin", reduction="mean"),
    ),
    Plan((1, 3, 4, 5, 1, 8, 2, 2, 1, 1, 1, 5, 1, 2, 4, 4, 5), 6),
    dtype="bfloat16",
    seed=2448470818,
)


LOST_WITHIN = Case(
    ProblemSpec(
        Input("vector", size=2, values="large"),
        (Layer("unused", features=2), Layer("second_input")),
        Loss("cosine_embedding", margin=0.0, reduction="mean"),
    ),
    Plan((3, 8, 3, 4, 2, 4, 8, 1, 2, 8, 5, 8, 2, 8), 7),
    dtype="float16",
    seed=3763580280,
)
"""The gradient of item 25 is 0.085, and 0 in float16: a product of squares of norms is infinite there."""

PLAN = Plan((3, 1, 4), 2)
EMBEDDED = Layer("tied_embedding", features=2, sparse=False)


def _doubled(run):
    for window in windows(run):
        run.optimizer.zero_grad()
        backward_window(run, window)
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.mul_(2)
        run.optimizer.step()


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_rounding_of_saturated_probabilities_is_no_fault_of_torch(dtype):
    case = SATURATED.replace(dtype=dtype)
    reference = REFERENCES.get(case, None)
    assert all(precision_fault(reference.window(w)) is None for w in range(len(case.plan.windows)))
    assert check(BUILT_IN["plain"], case).holds
    assert check(_doubled, case).violation.kind == "gradient"


def test_a_loss_that_overflows_within_torch_is_not_judged():
    window = REFERENCES.get(OVERFLOWS, None).window(0)
    with pytest.raises(CannotJudgeError, match="finite in float64 and not in bfloat16"):
        precision_fault(window)
    assert check(BUILT_IN["plain"], OVERFLOWS.replace(dtype="float64")).holds


@pytest.mark.full
def test_a_gradient_that_an_overflow_within_torch_makes_0_is_not_judged():
    window = REFERENCES.get(LOST_WITHIN, None).window(0)
    with pytest.raises(CannotJudgeError, match="leave the range of float16"):
        precision_fault(window)
    assert check(BUILT_IN["plain"], LOST_WITHIN).finding is None
    assert check(BUILT_IN["plain"], LOST_WITHIN.replace(dtype="float64")).holds


def test_a_sum_that_overflows_where_its_mean_does_not_is_no_fault_of_a_loop_that_divides_last():
    """The mean's gradient is 32000 in float16, whose largest number is 65504, and five items make the window."""
    case = Case(OVERFLOWING_SUM, Plan((1, 1, 1, 1, 1), 5), dtype="float16")
    verdict = check(BUILT_IN["rescale_at_the_end"], case)
    assert verdict.holds
    assert list(verdict.windows_skipped) == ["the gradient of the window's summed loss overflows float16"]
    assert check(BUILT_IN["plain"], case).windows == 1

    def times_a_million(run):
        for window in windows(run):
            backward_window(run, window)
            for p in run.model.parameters():
                p.grad = None if p.grad is None else p.grad * 1e6
            run.optimizer.step()

    small = ProblemSpec(Input("vector", size=2), OVERFLOWING_SUM.layers, OVERFLOWING_SUM.loss)
    violation = check(times_a_million, case.replace(problem=small)).violation
    assert violation.kind == "non-finite"


@pytest.mark.parametrize("scale", [pytest.param(100.0, marks=pytest.mark.full), 10000.0])
@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.full)])
def test_large_logits_are_judged(scale, dtype):
    loss = Loss("cross_entropy_of_large_logits", scale=scale, reduction="mean")
    layers = (Layer("linear", features=3, bias=True), Layer("tanh"), Layer("linear", features=3, bias=True))
    for values in ({}, {"values": "tied"}, {"values": "large"}):
        case = Case(ProblemSpec(Input("vector", size=2, **values), layers, loss), Plan((3, 1, 4), 2), dtype=dtype)
        assert check(BUILT_IN["plain"], case).holds
        violation = check(_doubled, case).violation
        assert (violation.kind, violation.diagnosis) == ("gradient", "wrong-scale")


def test_a_narrower_range_leaves_no_rounded_data_behind():
    """Batches that were first used while results were rounded to bfloat16 stayed so."""
    case = Case(ProblemSpec(SATURATED.problem.input, (Layer("linear", features=2, bias=True),), Loss("mse")), PLAN)
    instance = generated_instance(case)
    kept, fresh = (Computation(instance, instance.model(), torch.float64) for _ in range(2))
    leaves_range(kept, [(range(8), 1.0)], torch.bfloat16)
    assert np.array_equal(kept.gradient((range(8), 1.0)), fresh.gradient((range(8), 1.0)))


@pytest.mark.parametrize("out", [-800.0, 800.0])
def test_jax_does_not_overflow_where_torch_does_not(out):
    """JAX's gradient of 1 / (1 + exp(-x)) is NaN at -800."""
    bce, x = LOSSES["bce"], np.array([[out]])
    batch = {"target": np.ones((1, 1))}
    gradient = jax.grad(lambda x: bce.jax_items({"weight": False}, x, batch).sum())(x)
    leaf = torch.tensor(x, requires_grad=True)
    bce.torch_loss({"weight": False}, leaf, {"target": torch.ones(1, 1, dtype=torch.float64)}, "sum").backward()
    assert np.array_equal(gradient, leaf.grad)


# the optimizer has made the scores of attention and the logits so large that every probability is 0 or 1
ONE_OR_ZERO = Case(
    ProblemSpec(
        Input("tokens", length=3, padded=False, vocabulary=5),
        (
            Layer("tied_embedding", features=2, sparse=False),
            Layer("batch_norm1d", affine=False),
            Layer("shared", Layer("attention", causal=False, heads=1)),
            Layer("conv1d", bias=False, dilation=1, features=2, groups=1, kernel=1, padding=0, stride=1),
        ),
        Loss("cross_entropy_and_z", ignore_index=True, reduction="sum"),
    ),
    Plan((4, 2, 3, 2, 4, 3, 2, 4, 5, 3, 3, 4, 8, 3, 2), 4, masked=(0, 1, 2, 5, 6, 10, 11, 12, 14)),
    dtype="float32",
    seed=3122227395,
    optimizer="momentum",
)


@pytest.mark.full
def test_saturated_attention_under_autocast_is_judged_and_holds():
    """Random rounding once gave NaN in every draw, so that it allowed nothing, and the finding blamed torch."""
    verdict = check(BUILT_IN["autocast_bfloat16"], ONE_OR_ZERO)
    assert (verdict.violation, verdict.finding) == (None, None)
    assert (verdict.windows, dict(verdict.windows_skipped)) == (ONE_OR_ZERO.plan.steps, {})
    assert check(_doubled, ONE_OR_ZERO).violation is not None


# the first normalization is over two features: its gradient is 1e5 times as large where bfloat16 rounds them to equal
# ones, which one of 150 draws of the rounding errors showed
SPIKE = Case(
    ProblemSpec(
        Input("sequence", length=3, padded=False, size=2),
        (
            Layer("linear", bias=True, features=2),
            Layer("gru", bidirectional=False, depth=1, features=2),
            Layer("transformer", activation="relu", heads=1, norm_first=False),
            Layer("linear", bias=True, features=2),
        ),
        Loss("cross_entropy_and_z", ignore_index=True, reduction="mean"),
        ties=(("3", "0"),),
    ),
    Plan((1, 3, 3, 1), 1),
    dtype="bfloat16",
    seed=4020884351,
)


@pytest.mark.full
def test_a_spike_of_the_gradient_that_rounding_seldom_meets_is_not_judged(monkeypatch):
    # so that the draws before the many miss it, as 128 do in four of ten cases
    for module in (large_batch, rounding):
        monkeypatch.setattr(module, "MANY_DRAWS", DRAWS)
    verdict = check(BUILT_IN["plain"], SPIKE)
    assert verdict.holds
    assert verdict.windows_skipped == {"the gradient jumps where bfloat16 rounds values to equal ones": 1}
    assert check(_doubled, SPIKE).violation.kind == "gradient"


@pytest.mark.full
def test_rounding_errors_of_a_linear_model_are_even_and_those_of_a_spike_are_not():
    linear = Case(
        ProblemSpec(Input("vector", size=2), (Layer("linear", bias=True, features=2),), Loss("mse", reduction="mean")),
        PLAN,
        "bfloat16",
    )
    for case, uneven in ((linear, False), (SPIKE, True)):
        errors = REFERENCES.get(case, None).window(min(2, len(case.plan.windows) - 1)).bound.errors
        assert (errors.unevenness() > UNEVEN).any() == uneven


def test_a_scaled_loss_may_overflow_where_the_gradient_is_nearly_too_large_and_nowhere_else():
    """Logits are multiplied by the loss's scale, and so are their gradients; float16's largest number is 65504."""

    def case(scale):
        loss = Loss("cross_entropy_of_large_logits", scale=scale, reduction="sum")
        problem = ProblemSpec(Input("tokens", length=3, padded=True, vocabulary=5), (EMBEDDED,), loss)
        return Case(problem, Plan((1, 5, 4, 2, 3, 1), 3), dtype="float16", seed=877856297)

    verdict = check(scaled_and_back, case(1e4))
    assert verdict.holds
    assert "a gradient of nearly the largest numbers of float16 overflows where it is scaled" in verdict.windows_skipped
    # a factor that overflows far from the largest numbers is a fault of the loop
    assert check(partial(scaled_and_back, factor=2.0**20), case(1.0)).violation.kind == "non-finite"
