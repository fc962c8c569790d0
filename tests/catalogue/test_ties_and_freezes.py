"""Tied weights and frozen weights."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

from gradcheck_suite.catalogue.definitions import Signal
from gradcheck_suite.catalogue.tables import LAYERS, fill

TOKENS = np.array([[1, 2, 1], [0, 4, 2]])


def test_gradient_of_a_tied_linear_is_the_sum_of_both_uses():
    module = LAYERS["tied_linear"].torch_module(Signal("vector", (3,)), {"features": 2})
    fill(module, 0)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 3)))
    encoder, decoder = (module.weight.detach().double().requires_grad_() for _ in range(2))
    (torch.tanh(x @ encoder.T) @ decoder).square().sum().backward()
    module.double()(x).square().sum().backward()
    assert encoder.grad.abs().max() > 0.1
    assert decoder.grad.abs().max() > 0.1
    torch.testing.assert_close(module.weight.grad, encoder.grad + decoder.grad, rtol=1e-12, atol=1e-12)


def _embedding_gradients(sparse: bool, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    kind = LAYERS["tied_embedding"]
    module = kind.torch_module(Signal("tokens", (3,), vocabulary=5), {"features": 2, "sparse": sparse})
    fill(module, 0)
    module.to(dtype)(torch.from_numpy(TOKENS)).square().sum().backward()
    return module.weight.grad


@pytest.mark.parametrize("sparse", [False, True])
def test_gradient_of_a_tied_embedding_is_dense_and_reaches_unread_words(sparse):
    """Word 3 is never an input but has a score at every position. The sparse and the dense part have a dense sum."""
    gradient = _embedding_gradients(sparse)
    assert not gradient.is_sparse
    assert gradient[3].abs().max() > 0
    torch.testing.assert_close(gradient, _embedding_gradients(not sparse), rtol=1e-13, atol=1e-13)


def test_sparse_tied_embedding_works_in_bfloat16():
    assert _embedding_gradients(True, torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("name", "options", "trained"),
    [
        ("part_frozen_linear", {"features": 2, "frozen": "weight"}, {"bias"}),
        ("part_frozen_linear", {"features": 2, "frozen": "bias"}, {"weight"}),
        ("frozen_linear", {"features": 2}, set()),
    ],
)
def test_frozen_parameters_have_no_gradient(name, options, trained):
    kind = LAYERS[name]
    module = kind.torch_module(Signal("vector", (3,)), options).double()
    assert {n for n, p in module.named_parameters() if p.requires_grad} == trained
    assert kind.trainable == bool(trained)
    values = {n: p.detach().numpy() for n, p in module.named_parameters()}
    x = np.random.default_rng(0).standard_normal((4, 3))
    in_jax = jax.grad(lambda params: (kind.jax_apply(options, params, x, {}) ** 2).sum())(values)
    assert {n for n, g in in_jax.items() if np.any(g)} == trained
    # layers below a frozen one still get a gradient
    into_x = jax.grad(lambda x: (kind.jax_apply(options, values, x, {}) ** 2).sum())(x)
    assert np.abs(into_x).max() > 0
