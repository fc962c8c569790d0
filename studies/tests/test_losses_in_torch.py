"""Behaviour of torch's losses that users may not expect, each in its smallest case.

The catalogue's JAX meanings and counts stand on these facts. Expected values come from the
mathematics.
"""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
import torch

from gradcheck_suite.catalogue.tables import LOSSES
from gradcheck_suite.reference import programs  # noqa: F401  # JAX computes in float64 from then on

F = torch.nn.functional
LOGITS = torch.tensor([[1.0, 2.0, 4.0], [0.5, -1.0, 0.0]], dtype=torch.float64)
CLASSES = torch.tensor([2, 0])
WEIGHTS = torch.tensor([0.5, 1.5, 2.5], dtype=torch.float64)
EVERY_SMOOTHING = pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
EVERY_WEIGHT = pytest.mark.parametrize("weight", [None, WEIGHTS], ids=["plain", "class-weights"])


def gradient(function, *values: float | list[float]) -> torch.Tensor:
    """Return the gradient of a scalar function at some values."""
    x = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(function(x), x)[0]


def one(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def close(value, expected: float) -> bool:
    return float(value) == pytest.approx(expected, rel=1e-12)


# Without valid targets


@EVERY_SMOOTHING
@EVERY_WEIGHT
@pytest.mark.parametrize("share", [1.0, 0.0], ids=["as-it-is", "times-its-count"])
def test_all_targets_ignored_is_a_loss_of_nan_and_a_gradient_of_zero(
    label_smoothing, weight, share
):
    logits = LOGITS.clone().requires_grad_()
    nothing = torch.full((2,), -100)
    loss = F.cross_entropy(logits, nothing, weight=weight, label_smoothing=label_smoothing)
    assert loss.isnan()
    assert (torch.autograd.grad(loss * share, logits)[0] == 0).all()


@EVERY_SMOOTHING
def test_a_class_of_weight_zero_alone_is_a_gradient_of_nan(label_smoothing):
    weight = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    logits = LOGITS.clone().requires_grad_()
    # one target of the class without weight, the other ignored
    loss = F.cross_entropy(
        logits, torch.tensor([0, -100]), weight=weight, label_smoothing=label_smoothing
    )
    found = torch.autograd.grad(loss, logits)[0]
    assert found[0].isnan().all()
    assert (found[1] == 0).all()


def test_a_loss_mask_of_zeros_is_a_gradient_of_nan():
    logits, mask = LOGITS.clone().requires_grad_(), torch.zeros(2, dtype=torch.float64)
    loss = (mask * F.cross_entropy(logits, CLASSES, reduction="none")).sum() / mask.sum()
    assert torch.autograd.grad(loss, logits)[0].isnan().all()


def test_probabilities_cannot_be_ignored():
    with pytest.raises(RuntimeError, match="ignore_index is not supported"):
        F.cross_entropy(LOGITS, torch.full((2, 3), 1 / 3, dtype=torch.float64), ignore_index=1)


# Slopes at kinks and far out


@pytest.mark.full
def test_the_cosine_of_nothing_is_zero_and_its_slope_a_million():
    # sqrt(0 + eps) stands for the norm of the zero vector; eps is 1e-12 rounded to float32, in
    # float64 too
    other = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    found = gradient(lambda x: F.cosine_embedding_loss(x, other, one(-1.0)), [0.0, 0.0])
    norm = math.sqrt(np.float32(1e-12))
    assert found[0].tolist() == pytest.approx([0.6 / norm, 0.8 / norm], rel=1e-12)
    assert found[0, 0].item() != pytest.approx(0.6e6, rel=1e-9)
    # and so has the catalogue's loss, in torch and in JAX
    loss, options, batch = (
        LOSSES["cosine_embedding"],
        {"margin": 0.0},
        {"other": other, "target": one(-1.0)},
    )
    by_torch = gradient(lambda x: loss.torch_loss(options, x, batch, "mean"), [0.0, 0.0])
    arrays = {name: value.numpy() for name, value in batch.items()}
    by_jax = jax.grad(lambda x: loss.jax_items(options, x, arrays).sum())(np.zeros((1, 2)))
    for slope in (by_torch, by_jax):
        assert slope[0].tolist() == pytest.approx([0.6 / norm, 0.8 / norm], rel=1e-12)


@pytest.mark.parametrize("logit", [28.0, 30.0, 40.0])
def test_bce_of_a_sigmoid_loses_its_gradient_where_the_logit_is_large(logit):
    # p - y is 1 to twelve digits; torch divides by max(p * (1 - p), 1e-12), and p * (1 - p) is
    # e^-logit there
    found = gradient(lambda x: F.binary_cross_entropy(torch.sigmoid(x), one(0.0)), logit).item()
    # 1 - p keeps less than three digits of its own
    assert found == pytest.approx(math.exp(-logit) * 1e12, rel=2e-3, abs=1e-5)
    with_logits = gradient(lambda x: F.binary_cross_entropy_with_logits(x, one(0.0)), logit).item()
    assert close(with_logits, 1 / (1 + math.exp(-logit)))


def test_soft_margin_overflows_where_bce_with_logits_does_not():
    assert gradient(lambda x: F.soft_margin_loss(x, one(-1.0)), 710.0).isnan().all()
    assert close(gradient(lambda x: F.binary_cross_entropy_with_logits(x, one(0.0)), 710.0), 1)


def test_gaussian_nll_clamps_a_small_variance_but_not_its_slope():
    # with v in place of the clamp's 1e-6 the slope is 1 / (2 v); a clamp would make it 0
    found = gradient(lambda v: F.gaussian_nll_loss(one(0.0), one(0.0), v), 1e-9)
    assert close(found, 0.5e6)


def test_softplus_is_the_identity_above_twenty():
    x = torch.tensor([20.0, 20.5], dtype=torch.float64)
    below, above = F.softplus(x).tolist()
    assert close(below, 20 + math.log1p(math.exp(-20)))
    assert above == 20.5
