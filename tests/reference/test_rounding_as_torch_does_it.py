"""Large values and saturated probabilities: no finding is made of torch's own rounding, and faults
are found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import jax
import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as everyone calls it

from gradcheck_suite import Case, Input, Layer, Loss, Plan, Problem, ProblemSpec, check
from gradcheck_suite.catalogue.tables import LOSSES
from gradcheck_suite.core.comparison import DRAWS, SMALLEST, student_factor
from gradcheck_suite.loops.reset_modes import BUILT_IN
from gradcheck_suite.reference import large_batch
from gradcheck_suite.reference.large_batch import (
    REFERENCES,
    CannotJudgeError,
    disagreement,
    precision_fault,
)
from gradcheck_suite.reference.rounding import Computation, RandomRounding, _Narrowed, leaves_range
from gradcheck_suite.run.instance import generated_instance
from studies.calibration import scaled_and_back
from tests.one_problem import OVERFLOWING_SUM
from tests.training import each_gradient, trains

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


PLAN = Plan((3, 1, 4), 2)
EMBEDDED = Layer("tied_embedding", features=2, sparse=False)


_doubled = trains(before=each_gradient(lambda g: g.mul_(2)))


def test_a_loss_that_overflows_within_torch_is_not_judged():
    window = REFERENCES.get(OVERFLOWS, None).window(0)
    with pytest.raises(CannotJudgeError, match="finite in float64 and not in bfloat16"):
        precision_fault(window)
    assert check(BUILT_IN["plain"], OVERFLOWS.replace(dtype="float64")).holds


def test_a_sum_that_overflows_where_its_mean_does_not_is_no_fault_of_a_loop_that_divides_last():
    """The mean's gradient is 32000 in float16, whose largest number is 65504, and five items make
    the window.
    """
    case = Case(OVERFLOWING_SUM, Plan((1, 1, 1, 1, 1), 5), dtype="float16")
    verdict = check(BUILT_IN["rescale_at_the_end"], case)
    assert verdict.holds
    assert list(verdict.windows_skipped) == [
        "the gradient of the window's summed loss overflows float16"
    ]
    assert check(BUILT_IN["plain"], case).windows == 1

    times_a_million = trains(before=each_gradient(lambda g: g.mul_(1e6)))
    small = ProblemSpec(Input("vector", size=2), OVERFLOWING_SUM.layers, OVERFLOWING_SUM.loss)
    violation = check(times_a_million, case.replace(problem=small)).violation
    assert violation.kind == "non-finite"


@pytest.mark.parametrize("scale", [pytest.param(100.0, marks=pytest.mark.full), 10000.0])
@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.full)])
def test_large_logits_are_judged(scale, dtype):
    loss = Loss("cross_entropy_of_large_logits", scale=scale, reduction="mean")
    layers = (
        Layer("linear", features=3, bias=True),
        Layer("tanh"),
        Layer("linear", features=3, bias=True),
    )
    for values in ({}, {"values": "tied"}, {"values": "large"}):
        case = Case(
            ProblemSpec(Input("vector", size=2, **values), layers, loss),
            Plan((3, 1, 4), 2),
            dtype=dtype,
        )
        assert check(BUILT_IN["plain"], case).holds
        violation = check(_doubled, case).violation
        assert (violation.kind, violation.diagnosis) == ("gradient", "wrong-scale")


def test_a_narrower_range_leaves_no_rounded_data_behind():
    """Batches that were first used while results were rounded to bfloat16 stayed so."""
    case = Case(
        ProblemSpec(
            Input("vector", size=2, values="large"),
            (Layer("linear", features=2, bias=True),),
            Loss("mse"),
        ),
        PLAN,
    )
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
    bce.torch_loss(
        {"weight": False}, leaf, {"target": torch.ones(1, 1, dtype=torch.float64)}, "sum"
    ).backward()
    assert np.array_equal(gradient, leaf.grad)


# the first normalization is over two features: its gradient is 1e5 times as large where bfloat16
# rounds them to equal ones, which one of 150 draws of the rounding errors showed
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
    monkeypatch.setattr(large_batch, "MANY_DRAWS", DRAWS)
    verdict = check(BUILT_IN["plain"], SPIKE)
    assert verdict.holds
    assert verdict.windows_skipped == {
        "the gradient jumps where bfloat16 rounds values to equal ones": 1
    }
    assert check(_doubled, SPIKE).violation.kind == "gradient"


def test_a_scaled_loss_may_overflow_where_the_gradient_is_nearly_too_large_and_nowhere_else():
    """Logits are multiplied by the loss's scale, and so are their gradients.

    Float16's largest number is 65504.
    """

    def case(scale):
        loss = Loss("cross_entropy_of_large_logits", scale=scale, reduction="sum")
        problem = ProblemSpec(
            Input("tokens", length=3, padded=True, vocabulary=5), (EMBEDDED,), loss
        )
        return Case(problem, Plan((1, 5, 4, 2, 3, 1), 3), dtype="float16", seed=877856297)

    verdict = check(scaled_and_back, case(1e4))
    assert verdict.holds
    assert (
        "a gradient of nearly the largest numbers of float16 overflows where it is scaled"
        in verdict.windows_skipped
    )
    # a factor that overflows far from the largest numbers is a fault of the loop
    assert check(partial(scaled_and_back, factor=2.0**20), case(1.0)).violation.kind == "non-finite"


# Reference gradients that are NaN or infinite, in every precision: judged only where float64 has
# them too.


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["zero_", "set_to_none", "flat_buffer", "zero_grad_foreach"])
def test_a_sound_loop_keeps_the_nan_to_its_window(name, dtype):
    verdict = check(BUILT_IN[name], TWO_WINDOWS.replace(dtype=dtype), problem=CORNER)
    assert verdict.skipped is None
    assert verdict.holds, verdict.violation


@pytest.mark.parametrize("dtype", DTYPES)
def test_hiding_the_nan_is_a_fault_too(dtype):
    hides = trains(before=each_gradient(lambda g: g.nan_to_num_(0.0)))
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
    problem = Problem(
        base.model, base.batch, lambda model, batch: Infinite.apply(model(batch + 1)).mean()
    )
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
        # random rounding has moved a copy
        assert (returned is weight) == isinstance(mode, _Narrowed)


# Rounding within torch's operations that once looked like a fault of torch in low precision: each
# smallest case.


LOW = (torch.bfloat16, torch.float16)


ELU = Case(
    ProblemSpec(
        Input("image", channels=2, height=4, values="large", width=5),
        (
            Layer("adaptive_max_pool2d", size=2),
            Layer(
                "conv2d", bias=True, dilation=1, features=2, groups=1, kernel=2, padding=0, stride=2
            ),
            Layer("elu", alpha=1.0),
            Layer(
                "conv2d",
                bias=False,
                dilation=1,
                features=2,
                groups=1,
                kernel=1,
                padding=0,
                stride=1,
            ),
        ),
        Loss("nll", class_weights=False, ignore_index=True, reduction="sum"),
    ),
    Plan((8, 5, 3, 3, 4), 4, masked=(1, 3)),
    dtype="float32",
    seed=3478523050,
    optimizer="normalized",
)


HAS_DIGITS = float(jax.grad(jax.numpy.expm1)(-40.0)) != 0
"""Whether this JAX knows the derivative of expm1 far below 0."""


def test_float64_has_two_digits_of_the_derivative_of_elu_far_below_0():
    """JAX computes that of expm1 as its value + 1, which is 5e-15 at -33, and off by 0.4%.

    Float32 has more digits. JAX 0.12 computes the exponential, and has them all.
    """
    far = torch.tensor(-40.0, dtype=torch.float64, requires_grad=True)
    F.elu(far).backward()
    assert float(far.grad) == pytest.approx(math.exp(-40), rel=1e-12)
    wanted = math.exp(-40) if HAS_DIGITS else 0
    assert float(jax.grad(jax.nn.elu)(-40.0)) == pytest.approx(wanted, rel=1e-12, abs=0)
    assert float(jax.grad(jax.numpy.expm1)(-40.0)) == pytest.approx(wanted, rel=1e-12, abs=0)
    value = torch.tensor(-40.0, dtype=torch.float64, requires_grad=True)
    torch.expm1(value).backward()
    assert value.grad == 0
    verdict = check(BUILT_IN["zero_"], ELU)
    assert verdict.holds
    assert verdict.finding is None


@pytest.mark.parametrize(
    ("factor", "holds"), [(1.002, not HAS_DIGITS), (0.97, False), (1.03, False)]
)
def test_what_float64_does_not_know_is_not_looked_for(factor, holds):
    """The second window's gradient is 1e-14 throughout, and known to 0.4%; from JAX 0.12 on fully."""
    tiny = each_gradient(lambda g: g.mul_(factor if g.abs().max() < 1e-12 else 1))
    loop = trains(before=lambda run, step: tiny(run) if step else None)
    assert check(loop, ELU).holds == holds


GELU = Case(
    ProblemSpec(
        Input("sequence", length=3, padded=False, size=2, values="large"),
        (
            Layer("linear", bias=True, features=2),
            Layer("gelu_tanh"),
            Layer("tanh"),
            Layer("unused", features=2),
            Layer("linear", bias=True, features=2),
        ),
        Loss(
            "cross_entropy",
            class_weights=False,
            ignore_index=True,
            label_smoothing=0.0,
            reduction="sum",
        ),
        ties=(("4", "0"),),
    ),
    Plan((3, 1, 2, 4, 2, 5, 2, 2, 3, 4, 8, 1), 7, epochs=2, masked=(2, 3, 4, 5, 9, 10)),
    dtype="float32",
    seed=840943660,
    groups=3,
)


def test_float64_has_no_digit_of_the_derivative_of_gelu_by_tanh_far_below_0():
    """1 - tanh(u)**2 is a rounding error at u = -18, and what multiplies it is 45: both frameworks
    compute it so.
    """
    x = -7.157669083346235
    u, slope = (math.sqrt(2 / math.pi) * v for v in (x + 0.044715 * x**3, 1 + 3 * 0.044715 * x**2))
    exact = math.exp(2 * u) + x / 2 * slope * 4 * math.exp(2 * u)
    far = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    F.gelu(far, approximate="tanh").backward()
    by_jax = float(jax.grad(jax.nn.gelu)(x))
    moved = []
    for seed in range(64):
        with RandomRounding(seed):
            again = torch.tensor(x, dtype=torch.float64, requires_grad=True)
            F.gelu(again, approximate="tanh").backward()
        moved.append(float(again.grad) - float(far.grad))
    size = math.sqrt(sum(error**2 for error in moved) / len(moved))
    assert abs(exact) < size / 2
    for value in (float(far.grad), by_jax):
        assert abs(value - exact) < 4 * size
    # 1.5 units in the last place of tanh, twice for its square
    assert 20 * 2.0**-52 < size < 100 * 2.0**-52
    window = REFERENCES.get(GELU, None).window(0)
    assert disagreement(window) is None
    assert disagreement(window, window.jax * (1 + 1e-9)) is not None


ATTENTION = Case(
    ProblemSpec(
        Input("sequence", length=3, padded=False, size=2, values="large"),
        (
            Layer("weight_norm", features=2, whole=False),
            Layer("attention", causal=False, heads=1),
            Layer("attention", causal=False, heads=1),
        ),
        Loss("mse", reduction="mean"),
    ),
    Plan((8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4), 7, 2),
    dtype="float32",
    seed=3255877730,
)


def test_probabilities_in_the_backward_of_attention_add_up_to_1_but_for_the_rounding_of_their_logarithm():
    """Their sums times the gradient of the output are the gradient of the values: 6, for six
    queries and ones.
    """

    def inputs(seed: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        common = 20 * torch.randn(1, 1, 1, 4, generator=generator)
        query = common + torch.randn(1, 1, 6, 4, generator=generator)
        key, value = torch.randn(2, 1, 1, 5, 4, generator=generator)
        return query, common + 0.05 * key, value

    def error(seed: int, dtype: torch.dtype) -> float:
        query, key, value = (x.to(dtype) for x in inputs(seed))
        out = F.scaled_dot_product_attention(query, key, value.requires_grad_())
        out.backward(torch.ones_like(out))
        return float(value.grad.double().sum(-2).sub(6).abs().max())

    def size(errors: Iterable[float]) -> float:
        return float(np.sqrt(np.mean(np.square(list(errors)))))

    logarithm = max(
        float((query @ key.mT / 2).logsumexp(-1).max()) for query, key, _ in map(inputs, range(16))
    )
    observed = size(error(seed, torch.float32) for seed in range(16))
    modelled = []
    for seed in range(16):
        with RandomRounding(seed, torch.float32):
            modelled.append(error(seed, torch.float64))
    assert 100 * 2.0**-24 < observed < 6 * logarithm * 2.0**-24
    assert observed / 4 < size(modelled) < 8 * observed
    window = REFERENCES.get(ATTENTION, None).window(1)
    assert precision_fault(window) is None
    assert window.compare_quickly(window.expected).ratio == 0
    assert window.compare_quickly(window.expected * 1.001).ratio > 1


def test_a_float16_gradient_has_few_digits_under_autocast_to_bfloat16_too():
    """A gradient of 1.5e-8 is less than half of the smallest number of float16.

    Bfloat16 would hold it.
    """
    case = Case(
        ProblemSpec(
            Input("sequence", length=3, padded=True, size=2, values="large"),
            (
                Layer("glu"),
                Layer("weight_norm", features=2, whole=False),
                Layer("unused", features=2),
            ),
            Loss(
                "cross_entropy",
                class_weights=False,
                ignore_index=True,
                label_smoothing=0.0,
                reduction="mean",
            ),
        ),
        Plan((3, 1, 2, 2, 4, 3, 1, 8, 5, 2, 3, 2), 3, 3, masked=(0, 2, 3, 5, 7, 8, 9, 10)),
        dtype="float16",
        seed=3496907658,
    )
    verdict = check(BUILT_IN["autocast_bfloat16"], case)
    assert verdict.holds
    assert verdict.finding is None
    window = REFERENCES.get(case, None).window(0, None, "bfloat16")
    assert (window.bound.quick >= 5 * SMALLEST["float16"]).all()
    assert (window.bound.quick < 1e-3 * np.abs(window.expected).max()).any()


def _drawn(function, *, dtype, smallest=0.0):
    """Return the root mean square of the errors of a float64 function, as they are drawn for a
    dtype.
    """
    exact, errors = function(), []
    for draw in range(DRAWS):
        with RandomRounding(draw, dtype, smallest=smallest):
            errors.append((function() - exact).square())
    return torch.stack(errors).mean(0).sqrt()


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    "logits", [[0.0, -5.5], [0.01, -5.0], [8.0, 0.0], [0.5, -6.25], [3.0, -6.25]]
)
def test_the_sum_in_a_logarithm_of_softmax_is_rounded(logits, dtype):
    x = torch.tensor([logits]).to(dtype)
    error = (F.log_softmax(x, -1).double() - F.log_softmax(x.double(), -1)).abs()
    drawn = _drawn(lambda: F.log_softmax(x.double(), -1), dtype=dtype)
    assert (error <= 4 * drawn).all()
    # not more than both roundings, of 1 to 2 and of the largest logit
    assert drawn.max() < 4 * torch.finfo(dtype).eps * (1 + max(map(abs, logits)))


@pytest.mark.parametrize("dtype", LOW)
def test_numbers_that_are_one_in_a_coarser_dtype_have_one_error(dtype):
    """Those that float64 rounds up or down, on either side of a number of the dtype, would not be
    equal there.
    """
    x = torch.linspace(1, 2, 64).to(dtype).double()

    def errors(values):
        with RandomRounding(0, dtype):
            return values * 1.0 / x

    for factor in (1 - 2.0**-50, 1 + 2.0**-50):
        assert (errors(x * factor) - errors(x)).abs().max() < 2.0**-45


@pytest.mark.parametrize("dtype", LOW)
def test_the_statistics_of_a_batch_are_rounded_before_they_are_used(dtype):
    """In torch itself: in bfloat16 its result is off by 5%, and that of a layer norm, computed in
    float32, by 0.1%.
    """
    x = torch.tensor([[-6.7251, -6.8569], [-6.5, -6.62], [-6.9, -6.1]]).to(dtype)

    def norm(x):
        return F.batch_norm(x, None, None, training=True)

    error = (norm(x).double() - norm(x.double())).abs().max()
    assert error > 8 * torch.finfo(dtype).eps
    assert error < 4 * _drawn(lambda: norm(x.double()), dtype=dtype).max()
    own = (F.layer_norm(x, (2,)).double() - F.layer_norm(x.double(), (2,))).abs().max()
    assert own < torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smallest_numbers_are_rounded_to_their_neighbours_and_zero_stays(dtype):
    smallest = SMALLEST[str(dtype).removeprefix("torch.")]
    x = torch.tensor([0.0, 0.3, 5.0, 7.5, 1e30], dtype=torch.float64) * smallest
    found = []
    for draw in range(DRAWS):
        with RandomRounding(draw, dtype, smallest=smallest):
            found.append(x * 1.0)
    drawn = torch.stack(found) / smallest
    assert (drawn[:, :-1] == drawn[:, :-1].round()).all()
    assert (drawn[:, 0] == 0).all()
    for column, allowed in ((1, {0.0, 1.0}), (2, {5.0}), (3, {7.0, 8.0})):
        assert set(drawn[:, column].tolist()) <= allowed
    assert len(set(drawn[:, 3].tolist())) == 2
    # far from the smallest, the error is that of the precision alone
    assert (drawn[:, -1] / 1e30 - 1).abs().max() < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", LOW)
def test_probabilities_of_attention_are_rounded(dtype):
    """Values that add up to 0 leave the rounding errors of the probabilities, which torch computes
    in low precision.
    """
    assert student_factor(DRAWS) > 8
    value = (
        torch.tensor([1.0, -0.5, -0.5])
        .to(dtype)
        .reshape(1, 1, 3, 1)
        .expand(1, 1, 3, 4)
        .contiguous()
    )
    query = torch.zeros(1, 1, 3, 4, dtype=dtype)
    error = F.scaled_dot_product_attention(query, query, value).double().abs()
    drawn = _drawn(
        lambda: F.scaled_dot_product_attention(query.double(), query.double(), value.double()),
        dtype=dtype,
    )
    assert (error <= 4 * drawn).all()
    assert drawn.max() < 2 * torch.finfo(dtype).eps
