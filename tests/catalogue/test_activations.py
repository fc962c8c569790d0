"""Activations at points that are never drawn: at their kinks, and for large arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from gradcheck_suite.catalogue.definitions import Signal
from gradcheck_suite.catalogue.rows import KINDS

jax.config.update("jax_enable_x64", True)

# 0.5 is both a shrinkage's edge and where softplus(beta=2, threshold=1) turns linear
KINKS = (-6.0, -3.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 3.0, 6.0, 10.0, 20.0)
FAR = (-800.0, -50.0, 50.0, 800.0)
POINTS = np.array(KINKS + FAR)
SIGNAL = Signal("vector", (1,))
CASES = [
    pytest.param(kind, options, id=f"{kind.name}{dict(options)}")
    for kind in KINDS
    if kind.axes == 0
    for options in kind.variants(SIGNAL)
]


def torch_side(module, x: np.ndarray):
    leaf = torch.from_numpy(x.copy()).requires_grad_()
    y = module(leaf)
    y.sum().backward()
    return y.detach().numpy(), leaf.grad.numpy()


def jax_side(meaning, x: np.ndarray):
    y, pullback = jax.vjp(meaning, jnp.asarray(x))
    return np.asarray(y), np.asarray(pullback(jnp.ones_like(y))[0])


def disagreements(module, meaning) -> list[float]:
    """Return the points at which value or derivative differ by more than 1e-12, relative."""
    pairs = zip(torch_side(module, POINTS), jax_side(meaning, POINTS), strict=True)
    wrong = np.zeros(len(POINTS), dtype=bool)
    for ours, theirs in pairs:
        wrong |= ~(np.abs(ours - theirs) <= 1e-12 * np.maximum(1.0, np.abs(ours)))
    return POINTS[wrong].tolist()


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_kinks_and_far_points_agree(kind, options):
    module = kind.torch_module(SIGNAL, options)
    assert disagreements(module, lambda x: kind.jax_apply(options, {}, x, {})) == []


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_derivative_at_a_kink_is_a_subgradient(kind, options):
    """The derivative at a kink must lie between those on the two sides."""
    module = kind.torch_module(SIGNAL, options)
    _, at = torch_side(module, POINTS)
    _, left = torch_side(module, POINTS - 1e-9)
    _, right = torch_side(module, POINTS + 1e-9)
    assert (np.minimum(left, right) - 1e-7 <= at).all()
    assert (at <= np.maximum(left, right) + 1e-7).all()


@pytest.mark.parametrize(
    ("module", "fault", "found"),
    [
        (torch.nn.ReLU(), lambda x: jnp.maximum(x, 0.0), [-0.0, 0.0]),
        (
            torch.nn.ReLU6(),
            lambda x: jnp.where((x >= 0) & (x <= 6), x, jnp.where(x > 6, 6.0, 0.0)),
            [-0.0, 0.0, 6.0],
        ),
        (torch.nn.ELU(), lambda x: jnp.where(x > 0, x, jnp.exp(x) - 1), [800.0]),
    ],
    ids=["half at the kink", "one at the kink", "NaN of an unused exponential"],
)
def test_fault_at_a_kink_or_far_out_is_found(module, fault, found):
    assert disagreements(module, fault) == found


def test_hardsigmoid_has_no_float64_gradient():
    """Why the catalogue has no hardsigmoid: torch multiplies by a float32 1/6, also in float64.

    Every model that holds one would be a finding, and hide others. It can join once this fails.
    """
    _, slope = torch_side(torch.nn.Hardsigmoid(), np.zeros(1))
    assert slope[0] == float(np.float32(1 / 6)) != pytest.approx(1 / 6, rel=1e-12)
