"""Whole losses through the bridge: exported modules keep their values, gradients and buffers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from gradcheck_suite.bridge import arguments_of, jax_gradient, lower
from gradcheck_suite.bridge.ops.reductions import ctc_loss
from gradcheck_suite.reference.programs import PROGRAMS
from tests.bridge.agreeing import assert_agrees

X = torch.linspace(-1, 2, 24, dtype=torch.float64).reshape(6, 4)
TOKENS = torch.tensor([[3, 1, 0, 0], [2, 5, 4, 0], [6, 6, 1, 2]])


class Of(nn.Module):
    """A module with a given forward over one linear layer."""

    def __init__(self, forward, **modules):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4).double()
        for name, module in modules.items():
            setattr(self, name, module)
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


def squares(model, batch):
    return (model(batch) ** 2).mean()


def _no_grad_and_detach(self, x):
    h = self.linear(x)
    with torch.no_grad():
        still = torch.tanh(self.linear(x)) * 2
        with torch.enable_grad():
            again = self.linear(x)
    return h * still + self.linear(h).detach() + again


def _writes_in_no_grad(self, x):
    h = self.linear(x)
    with torch.no_grad():
        self.seen.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return h * self.seen


def _writes_in_place_and_to_views(self, x):
    h = self.linear(x)
    h[:, 1] = h[:, 0] * 2
    h[2:4] += 1
    h[h > 0.5] = 0.25
    h.t()[3].mul_(3)
    return F.relu(h, inplace=True) + x


SCALE = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)


def _constants_and_closures(self, x):
    return self.linear(x) * SCALE + torch.tensor(0.5, dtype=torch.float64) + torch.arange(4) / 3


def _integers_that_become_floats(self, x):
    count = (x > 0).sum()
    share = count / x.numel()
    half = torch.arange(4) * 0.5
    return self.linear(x) * share + half + count // 4 + (x > 0) * 2 + x.argmax(1, keepdim=True) % 3


FORWARDS = (
    _no_grad_and_detach,
    _writes_in_no_grad,
    _writes_in_place_and_to_views,
    _constants_and_closures,
    _integers_that_become_floats,
)


@pytest.mark.full
def test_what_a_forward_may_do():
    """Exporting and compiling several takes as long as one."""
    models = nn.ModuleList(Of(forward) for forward in FORWARDS)
    for model in models:
        model.register_buffer("seen", torch.ones(4, dtype=torch.float64))
    assert_agrees(models, lambda models, batch: sum(squares(model, batch) for model in models), X)


def test_new_buffer_values_are_returned():
    def forward(self, x):
        self.steps += 1
        return self.norm(self.linear(x))

    model = Of(forward, norm=nn.BatchNorm1d(4).double())
    model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
    lowered = assert_agrees(model, squares, X)
    assert set(lowered.buffers) == {
        "steps",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert model.steps == 0
    assert model.norm.num_batches_tracked == 0


def test_a_part_in_eval_mode_stays_in_it():
    model = Of(lambda self, x: self.norm(self.linear(x)), norm=nn.BatchNorm1d(4).double().eval())
    assert_agrees(model, squares, X, jit=False)
    assert model.training
    assert not model.norm.training


def test_a_tied_parameter_has_one_gradient_under_its_first_name():
    embedding = nn.Embedding(7, 4, padding_idx=0).double()
    head = nn.Linear(4, 7, bias=False).double()
    head.weight = embedding.weight

    def loss(model, batch):
        return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten(), ignore_index=0)

    model = Of(
        lambda self, x: self.head(self.linear(self.embedding(x))), embedding=embedding, head=head
    )
    lowered = assert_agrees(model, loss, TOKENS)
    assert lowered.parameters == ("linear.weight", "linear.bias", "embedding.weight")


def test_a_frozen_parameter_has_no_gradient_and_an_unreached_one_zeros():
    model = Of(lambda self, x: self.linear(x), other=nn.Linear(2, 2).double())
    model.linear.bias.requires_grad_(False)
    lowered = assert_agrees(model, squares, X)
    assert lowered.trainable == ("linear.weight", "other.weight", "other.bias")
    gradient = jax_gradient(model, squares, X)
    assert not gradient["other.weight"].any()


def test_batches_are_trees_that_may_contain_other_objects():
    batch = {"x": X, "pair": (X * 2, [TOKENS]), "name": "text", "times": 3}

    def loss(model, batch):
        assert batch["name"] == "text"
        return (
            batch["times"] * (model(batch["x"]) * batch["pair"][0]).mean()
            + batch["pair"][1][0].sum()
        )

    assert_agrees(Of(lambda self, x: self.linear(x)), loss, batch)


@pytest.mark.full
def test_shapes_that_depend_on_values_run_step_by_step():
    def loss(model, batch):
        out = model(batch)
        return out[batch[:, 0] > 0.2].sum() / 3 + out.masked_select(out.detach() > 0).sum()

    assert_agrees(Of(lambda self, x: self.linear(x)), loss, X)


def test_the_key_of_a_program_contains_its_constants():
    """Two losses of one graph and two constants: the second must not run the first one's program."""
    model = Of(lambda self, x: self.linear(x))
    for scale in (1.0, 2.0):
        weights = torch.full((4,), scale, dtype=torch.float64)
        assert_agrees(model, lambda model, batch, w=weights: (model(batch) ** 2 * w).mean(), X)
    compiled = PROGRAMS.compiled
    assert_agrees(model, lambda model, batch, w=weights: (model(batch) ** 2 * w).mean(), X)
    assert PROGRAMS.compiled == compiled


def test_float32_operations_are_reported_with_their_lines():
    def loss(model, batch):
        return model(batch).float().topk(2).values.double().sum()

    narrow = lower(Of(lambda self, x: self.linear(x)), loss, X).narrow
    assert [name.partition(" (")[0] for name in narrow] == [
        "aten._to_copy.default",
        "aten.topk.default",
    ]
    assert all("test_lowered.py, line" in name for name in narrow)


@pytest.mark.full
def test_convolutions_pooling_and_interpolation():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same", padding_mode="reflect", groups=2),
        nn.BatchNorm2d(4),
        nn.MaxPool2d(2, 1, 1),
        nn.ConvTranspose2d(4, 2, 3, 2, output_padding=1),
        nn.Upsample(scale_factor=0.6, mode="bicubic"),
        nn.Conv2d(2, 2, 2, padding=1, padding_mode="circular"),
        nn.AdaptiveAvgPool2d(3),
        nn.LocalResponseNorm(2),
        nn.PixelUnshuffle(3),
    ).double()
    images = torch.sin(torch.arange(2 * 2 * 5 * 6, dtype=torch.float64)).reshape(2, 2, 5, 6)
    assert_agrees(model, squares, images)


def test_weight_and_spectral_norm():
    from torch.nn.utils.parametrizations import spectral_norm, weight_norm

    torch.manual_seed(0)
    model = nn.Sequential(weight_norm(nn.Linear(4, 3)), spectral_norm(nn.Linear(3, 3))).double()
    assert_agrees(model, squares, X)


LOGITS = torch.sin(torch.arange(24, dtype=torch.float64)).reshape(6, 4)
CLASSES = torch.tensor([0, 3, 1, -100, 2, 2])
UNIT = torch.sigmoid(LOGITS.roll(1))
SIGNS = torch.where(LOGITS.roll(2) > 0, 1.0, -1.0).double()
LOSSES = {
    "cross entropy, weights, smoothing": lambda z: F.cross_entropy(
        z, CLASSES, weight=torch.tensor([1.0, 2.0, 0.5, 3.0]).double(), label_smoothing=0.1
    ),
    "cross entropy of probabilities": lambda z: F.cross_entropy(z, UNIT),
    "cross entropy in two dimensions": lambda z: F.cross_entropy(
        z.reshape(1, 4, 2, 3), CLASSES.reshape(1, 2, 3)
    ),
    "kl": lambda z: F.kl_div(F.log_softmax(z, 1), torch.softmax(UNIT, 1), reduction="batchmean"),
    "poisson": lambda z: F.poisson_nll_loss(z, UNIT, full=True),
    "cosine": lambda z: F.cosine_embedding_loss(z, UNIT, SIGNS[:, 0], margin=0.1),
    "hinge": lambda z: F.hinge_embedding_loss(z, SIGNS),
    "ranking": lambda z: F.margin_ranking_loss(z[:, 0], z[:, 1], SIGNS[:, 0], margin=0.2),
    "triplet": lambda z: F.triplet_margin_loss(z, UNIT, SIGNS),
    "labels": lambda z: F.multilabel_soft_margin_loss(z, (SIGNS > 0).double()),
    "eigenvectors": lambda z: (
        torch.linalg.eigh(z.T @ z + 0.1 * UNIT.T @ UNIT)[1] ** 4 * UNIT[:4]
    ).sum(),
    "singular vectors": lambda z: (
        torch.linalg.svd(z + torch.eye(6, 4))[0][:, :4] ** 2 * UNIT
    ).sum(),
    "spectrum": lambda z: (torch.fft.rfft(z).abs() ** 2 * torch.fft.fft(UNIT).real[:, :3]).sum(),
    "solutions": lambda z: (
        torch.linalg.solve(z.T @ z + UNIT.T @ UNIT, UNIT.T).sum()
        + torch.linalg.cholesky(z.T @ z + torch.eye(4)).sin().sum()
        + torch.linalg.inv(z.T @ z + torch.eye(4)).sum()
    ),
    "einsum": lambda z: torch.einsum("bi,bj,ij->b", z, UNIT, z.T @ UNIT).sin().sum(),
    "rows that see nothing": lambda z: (
        F.scaled_dot_product_attention(
            z.reshape(1, 1, 6, 4),
            z.reshape(1, 1, 6, 4),
            z.reshape(1, 1, 6, 4),
            attn_mask=LOGITS @ LOGITS.T > 1,
        )
        .pow(2)
        .sum()
    ),
    "instance norm": lambda z: F.instance_norm(z.reshape(2, 3, 4)).pow(3).sum(),
}


@pytest.mark.parametrize(
    "every", [pytest.param(4, marks=pytest.mark.quick), pytest.param(1, marks=pytest.mark.full)]
)
def test_losses_and_functions(every):
    """Exporting and compiling the sum of several takes as long as one."""
    model = Of(lambda self, x: self.linear(x))
    assert_agrees(
        model,
        lambda model, batch: sum(f(model(batch)) for f in list(LOSSES.values())[::every]),
        LOGITS,
    )


def test_the_mean_over_no_valid_target_is_nan_with_gradient_zero():
    model = Of(lambda self, x: self.linear(x))

    def loss(model, batch):
        return F.cross_entropy(model(batch), torch.full((6,), -100))

    lowered = lower(model, loss, LOGITS)
    value, gradient, _ = lowered.value_and_gradient(*arguments_of(model, LOGITS), jit=True)
    assert np.isnan(value)
    assert not any(g.any() for g in gradient.values())


def test_the_padding_row_of_an_embedding_has_no_gradient():
    model = Of(
        lambda self, x: self.table(x),
        table=nn.Embedding(7, 4, padding_idx=0, scale_grad_by_freq=True).double(),
    )
    assert_agrees(model, squares, TOKENS)
    assert not jax_gradient(model, squares, TOKENS)["table.weight"][0].any()


def test_complex_parameters_have_torchs_gradient_not_its_conjugate():
    model = Of(lambda self, x: (x * self.phase).abs().pow(2) + (x * self.phase).imag)
    model.phase = nn.Parameter(torch.complex(X[0], X[1]))
    assert_agrees(model, squares, X)


def test_a_planted_fault_in_a_gradient_is_found():
    """Export gives another gradient than torch, for the same value."""
    model = Of(lambda self, x: self.linear(x))

    def two_faced(model, batch):
        right = squares(model, batch)
        return 2 * right.detach() - right if torch.compiler.is_exporting() else right

    with pytest.raises(AssertionError, match=r"linear.weight: off by"):
        assert_agrees(model, two_faced, X)


@pytest.mark.full
def test_ctc_as_a_function_of_logits():
    """torch.export has no shapes for ctc_loss, and its gradient is right only after log_softmax.

    https://github.com/pytorch/pytorch/issues/52241
    """
    logits = LOGITS[:, None].clone().requires_grad_()
    value = F.ctc_loss(
        F.log_softmax(logits, -1), torch.tensor([[1, 1, 2]]), (6,), (3,), reduction="sum"
    )
    (expected,) = torch.autograd.grad(value, logits)

    def in_jax(z):
        lengths = jnp.asarray([6]), jnp.asarray([3])
        return ctc_loss(jax.nn.log_softmax(z, -1), jnp.asarray([[1, 1, 2]]), *lengths)[0].sum()

    got, gradient = jax.jit(jax.value_and_grad(in_jax))(jnp.asarray(logits.detach().numpy()))
    assert got == pytest.approx(value.item(), rel=1e-13)
    np.testing.assert_allclose(gradient, expected.numpy(), atol=1e-13)
