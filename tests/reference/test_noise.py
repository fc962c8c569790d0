"""Measuring rounding: what is drawn covers what another library's rounding does, and nothing is
left changed.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch._decomp import get_decompositions
from torch.nn import functional as F  # noqa: N812 - as everyone calls it

from gradcheck_suite import Case, Input, Layer, Loss, Plan, Problem, ProblemSpec
from gradcheck_suite.core.comparison import DRAWS
from gradcheck_suite.reference.evaluation import evaluated_by
from gradcheck_suite.reference.large_batch import UNEVEN, Reference, disagreement
from gradcheck_suite.reference.rounding import (
    AttentionBackward,
    Computation,
    RandomRounding,
    RoundingErrors,
    attention,
    layer_norm_backward,
)
from gradcheck_suite.run.instance import generated_instance, user_instance

LINEAR = Layer("linear", bias=False, features=1)
REGRESSION = Case(
    ProblemSpec(Input("vector", size=2), (LINEAR,), Loss("mse", reduction="mean")),
    Plan((1, 3, 2), 2),
)
# x - tanh(x) twice over takes neighbouring numbers to one and the same: moving the inputs alone
# shows no noise
CONTRACTING = Case(
    ProblemSpec(
        Input("sequence", length=3, padded=True, size=2),
        (
            Layer("softmax"),
            Layer("max_over_time", shared=False),
            Layer("tanhshrink"),
            Layer("tanhshrink"),
            LINEAR,
        ),
        Loss("l1", reduction="mean"),
    ),
    Plan((1,), 1),
    seed=1,
)


def _computation(
    case: Case, dtype: torch.dtype = torch.float64, compute: str | None = None
) -> Computation:
    instance = generated_instance(case)
    return Computation(instance, instance.model(dtype), dtype, compute)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_drawing_leaves_parameters_as_they_were(dtype):
    computation = _computation(REGRESSION, dtype)
    before = computation.gradient((range(4), 1.0))
    assert (_noise(computation, (range(4), 1.0), dtype) > 0).all()
    assert computation.gradient((range(4), 1.0)).tolist() == before.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_noise_is_of_the_size_of_the_dtypes_rounding(dtype):
    noise = _noise(_computation(REGRESSION), (range(4), 1.0), dtype)
    unit = torch.finfo(dtype).eps / 2
    size = _sizes(REGRESSION)
    assert (noise > 0.1 * unit * size).all()
    assert (noise < 10 * unit * size).all()


@pytest.mark.usefixtures("many_draws")
def test_groups_of_draws_of_a_smooth_gradient_differ_by_chance_alone():
    """In the square, a group of 32 is by chance beyond half or twice the others once in thousands
    of times.
    """
    uneven = RoundingErrors(_computation(REGRESSION), [(range(4), 1.0)], torch.float32).unevenness()
    assert (uneven > 1).all()
    assert (uneven < UNEVEN).all()


def _noise(
    computation: Computation, part: tuple[range, float], dtype: torch.dtype = torch.float64
) -> np.ndarray:
    """Return the root mean square of the rounding errors in a dtype, (P,)."""
    return np.sqrt(RoundingErrors(computation, [part], dtype)._mean_square(0, DRAWS))


def _sizes(case: Case) -> np.ndarray:
    computation = _computation(case)
    return sum(np.abs(computation.gradient((range(i, i + 1), 0.25))) for i in range(4))


def test_what_two_libraries_round_differently_shows_only_where_every_operation_is_moved():
    """XLA's tanh is off by up to 4 unit roundoffs; this case was once a finding that blamed it."""
    with evaluated_by("xla"):
        window = Reference(generated_instance(CONTRACTING)).window(0)
        assert window.jax is not None
    computation, part = _computation(CONTRACTING), (window.items, 1.0)
    apart = np.abs(window.torch - window.jax).max()
    inputs_alone = [
        computation._at_moved_values([part], torch.float64, draw) - window.torch
        for draw in range(DRAWS)
    ]
    assert np.sqrt(np.mean(np.square(inputs_alone), axis=0)).max() < apart / 10
    assert (
        apart
        < RoundingErrors(computation, [part], torch.float64).noise().max()
        < 1e-12 * np.abs(window.torch).max()
    )
    assert disagreement(window) is None


def test_random_rounding_moves_results_by_an_ulp_and_no_copies():
    x = torch.linspace(1, 2, 1000, dtype=torch.float64)
    with RandomRounding(0):
        y, copied, view = x * 3, x.clone(), x.view(10, 100)
    steps = ((y - 3 * x) / (3 * x) / torch.finfo(torch.float64).eps).abs()
    # 3/8 or 9/8 of the spacing at 1, and a rounding of its own
    assert 0 < steps.max() <= 2
    assert 0.5 < (steps > 0).double().mean() <= 1
    assert torch.equal(copied, x)
    assert torch.equal(view.reshape(-1), x)


def test_random_rounding_leaves_infinities_and_what_is_next_to_them():
    """Attention adds minus infinity to what is masked; a NaN there would void the whole draw."""
    with RandomRounding(0):
        y = torch.tensor([1.0, -torch.inf, torch.inf, 0.0]).repeat(100) * 2
    assert y.isfinite().sum() == 200
    assert y.isnan().sum() == 0


def test_a_loss_that_refuses_what_was_moved_is_measured_all_the_same():
    def loss(model, batch):
        probability = torch.sigmoid(50 + 0 * model(batch["x"]))
        if bool((probability > 1).any()):
            raise RuntimeError("all elements of input should be between 0 and 1")
        return (probability * model(batch["x"])).mean()

    problem = Problem(
        lambda seed: torch.nn.Linear(2, 1),
        lambda items, seed: {"x": torch.linspace(1, 2, 2 * items).view(-1, 2)},
        loss,
    )
    instance = user_instance(Case("problem", Plan((4,), 1)), problem)
    computation = Computation(instance, instance.model(torch.float64), torch.float64)
    before = computation.gradient((range(4), 1.0))
    noise = _noise(computation, (range(4), 1.0))
    assert (noise > 0).all()
    assert noise.max() < 1e-14
    assert computation.gradient((range(4), 1.0)).tolist() == before.tolist()


@pytest.mark.parametrize("name", ["hinge_embedding", "cosine_embedding"])
def test_targets_that_name_a_class_are_no_roundings_to_move(name):
    """A target of 1.0001 is neither 1 nor -1: what came of it was once taken for rounding, as large
    as the gradient.
    """
    if name == "hinge_embedding":
        source, options = Input("vector", size=2), {"margin": 1.0}
    else:
        source, options = Input("vector", size=3), {"margin": 0.25}
    layers = (Layer("linear", bias=True, features=2),)
    case = Case(
        ProblemSpec(source, layers, Loss(name, reduction="sum", **options)), Plan((5,), 1), seed=3
    )
    exact = _computation(case).gradient((range(5), 1.0))
    noise = _noise(_computation(case), (range(5), 1.0), torch.float32)
    assert 0 < noise.max() < 1e-5 * np.abs(exact).max()


def test_the_largest_number_stays_finite_and_infinity_stays_infinite():
    """Attention's masks hold the smallest float: were it moved to -inf, every draw would be NaN and
    noise 0.
    """
    least = torch.finfo(torch.float64).min
    for seed in range(8):
        with RandomRounding(seed, guarded=True):
            masked = torch.tensor([1.0, 0.0], dtype=torch.float64) * least
            infinite = torch.zeros(4, dtype=torch.float64) - torch.inf
        assert masked.tolist() == pytest.approx([least, 0.0], rel=1e-15)
        assert infinite.tolist() == [-torch.inf] * 4


def test_a_copy_to_fewer_digits_rounds_and_one_to_more_does_not():
    third = torch.full((100,), 1 / 3, dtype=torch.float64)
    found = set()
    for seed in range(8):
        with RandomRounding(seed):
            narrow = third.to(torch.float32)
            wide = narrow.to(torch.float64)
        found.update(narrow.tolist())
        assert torch.equal(wide.float(), narrow)
    assert len(found) > 1


def test_a_model_with_a_mask_and_a_float32_part_has_noise_of_float32():
    """As causal language models of transformers compute: float64 parameters, scores masked, the
    loss in float32.
    """
    scores = torch.tensor([0.3, 0.7, 0.2], dtype=torch.float64, requires_grad=True)
    found = set()
    for seed in range(6):
        with RandomRounding(seed, guarded=True):
            mask = (
                torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64) * torch.finfo(torch.float64).min
            )
            weights = torch.softmax((scores + mask).to(torch.float32), 0)
            (gradient,) = torch.autograd.grad(weights[0].log(), scores)
        found.add(gradient[0].item())
    assert all(map(math.isfinite, found))
    assert max(found) - min(found) > 1e-8


@pytest.mark.parametrize("masked", [False, True, "causal"])
def test_attention_that_is_rounded_operation_by_operation_is_that_of_torch(masked):
    generator = torch.Generator().manual_seed(3)
    shape = {"dtype": torch.float64, "generator": generator}
    query, key, value = (torch.randn(2, 3, 5, 4, requires_grad=True, **shape) for _ in range(3))
    mask, causal = None, masked == "causal"
    if masked is True:
        mask = torch.where(torch.rand(2, 1, 5, 5, **shape) < 0.4, -torch.inf, 0.0).double()
        mask[0, 0, 2] = -torch.inf
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal, scale=0.3
    )
    own_out, sums = attention(query, key, value, 0.0, causal, attn_mask=mask, scale=0.3)
    assert (own_out - out).abs().max() < 1e-14
    gradient = torch.randn(2, 3, 5, 4, **shape)
    right = torch.autograd.grad(out, (query, key, value), gradient)
    for rounded in (False, True):
        backward = AttentionBackward(logarithms_rounded=rounded)
        found = backward(
            gradient, query, key, value, out, sums, 0.0, causal, attn_mask=mask, scale=0.3
        )
        for own, torchs in zip(found, right, strict=True):
            assert (own - torchs).abs().max() < 1e-14


def test_attention_that_picks_one_value_has_a_rounding_error_of_the_size_of_its_parts():
    """Its scores' gradient is dO V - sum(dO * O) = 0 where O is V.

    Torch rounds the two sums apart.
    """
    generator = torch.Generator().manual_seed(1)
    large = 1e4 * torch.randn(3, 1, 1, 6, 16, generator=generator, dtype=torch.float64)
    weights = torch.randn(1, 1, 6, 16, generator=generator, dtype=torch.float64)

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        query, key, value = (t.to(dtype).requires_grad_() for t in large)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return torch.autograd.grad((out * weights.to(dtype)).sum(), query)[0].double()

    exact, found = gradient(torch.float64), gradient(torch.float32)
    with_rounding = []
    for seed in range(DRAWS):
        with RandomRounding(seed, torch.float32):
            with_rounding.append(gradient(torch.float64))
    drawn = torch.stack(with_rounding) - exact
    assert drawn.isfinite().all()
    noise, error = drawn.square().mean().sqrt(), (found - exact).square().mean().sqrt()
    assert 0 < error < 5 * noise
    assert noise < 30 * error


def test_no_draw_of_large_logits_overflows():
    """The logarithm of a sum of exponentials is at least the largest logit, however it is rounded."""
    logits = torch.tensor([[8e12, 7e12, -1e12]], dtype=torch.float64)

    def gradient() -> torch.Tensor:
        x = logits.clone().requires_grad_()
        loss = (
            torch.nn.functional.cross_entropy(x, torch.tensor([1]))
            + torch.logsumexp(x, 1).square().sum()
        )
        return torch.autograd.grad(loss, x)[0]

    exact = gradient()
    for seed in range(8):
        for dtype in (torch.float32, torch.bfloat16):
            with RandomRounding(seed, dtype):
                drawn = gradient()
            assert drawn.isfinite().all()
            assert (drawn - exact).abs().max() <= 2 * exact.abs().max()


CLOSE = torch.tensor([[-6.7251, -6.8569]], dtype=torch.float64)
NORMALIZATIONS = {
    "layer": lambda x, *affine: F.layer_norm(x, (2,), *affine),
    "group": lambda x, *affine: F.group_norm(
        x.repeat(1, 2), 2, *(of_each.repeat(2) for of_each in affine)
    ),
    "frozen batch": lambda x, *affine: F.batch_norm(
        x, x.new_tensor([-6.7, -6.8]), x.new_tensor([1e-3, 2e-3]), *affine
    ),
    "batch": lambda x, *affine: F.batch_norm(x.T.repeat(1, 2), None, None, *affine, training=True),
}


@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_a_normalization_of_close_numbers_has_the_rounding_error_of_their_mean(name):
    """A shift of all inputs leaves the output as it is, so moved inputs would show a thousandth of
    it.
    """
    normalized, affine = (
        NORMALIZATIONS[name],
        torch.tensor([[1.5, 0.5], [0.2, -0.3]], dtype=torch.float64),
    )
    exact = normalized(CLOSE, *affine)
    variance = {"frozen batch": 1e-3}.get(name, float(CLOSE.var(correction=0)))
    size = 2.0**-24 * 6.8 * variance**-0.5
    errors = []
    for draw in range(DRAWS):
        with RandomRounding(draw, torch.float32):
            errors.append(normalized(CLOSE, *affine) - exact)
    noise = torch.stack(errors).square().mean(0).sqrt().max()
    assert 0.3 * size < noise < 6 * size
    with RandomRounding(0):
        assert 0 < (normalized(CLOSE, *affine) - exact).abs().max() < 1e-12
    assert (normalized(CLOSE.float(), *affine.float()).double() - exact).abs().max() < 4 * noise
    with RandomRounding(0, torch.bfloat16):
        # torch computes the others in float32 there, and rounds at the end
        near = (normalized(CLOSE, *affine) - exact).abs().max() < 2.0**-5 * exact.abs().max()
    assert near == (name != "batch")


def _layer_norm_gradients(shape, dtype, is_affine):
    """Return torch's decomposition, and the arguments of a call of it."""
    aten = torch.ops.aten
    theirs = get_decompositions([aten.native_layer_norm_backward])
    x, grad = (torch.randn(4, 2, 3).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(shape).to(dtype) if is_affine else None for _ in range(2))
    _, mean, scale = torch.native_layer_norm(x, shape, weight, bias, 1e-5)
    arguments = (grad, x, shape, mean, scale, weight, bias)
    return theirs[aten.native_layer_norm_backward.default], arguments


def _equal(found, expected):
    return all(
        own is other or torch.equal(own, other) for own, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, False)], ids=str)
@pytest.mark.parametrize("shape", [(3,), (2, 3), (4, 2, 3)], ids=str)
@pytest.mark.parametrize("is_affine", [True, False])
def test_the_gradient_of_a_layer_norm_is_that_of_torchs_decomposition(shape, is_affine, wanted):
    """To the bit, also with rounding errors: torch's own imports sympy, which takes a second."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        theirs, arguments = _layer_norm_gradients(shape, dtype, is_affine)
        assert _equal(layer_norm_backward(*arguments, wanted), theirs(*arguments, wanted))
    theirs, arguments = _layer_norm_gradients(shape, torch.float64, is_affine)
    for seed in (0, 1):
        with RandomRounding(seed):
            own = layer_norm_backward(*arguments, wanted)
        with RandomRounding(seed):
            expected = theirs(*arguments, wanted)
        assert _equal(own, expected)
