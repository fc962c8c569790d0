"""Attention ignores padding, and with a causal mask later positions."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from gradcheck_suite.catalogue.definitions import Signal
from gradcheck_suite.catalogue.rows import visible_keys
from gradcheck_suite.catalogue.tables import LAYERS, fill

PADDED = Signal("sequence", (3, 4), padded=True)
MASK = np.arange(3) < np.array([[1], [2], [3]])
LAYERS_WITH_MASK = [
    pytest.param(name, options, id=f"{name}{dict(options)}")
    for name in ("attention", "transformer")
    for options in LAYERS[name].variants(PADDED)
]


def both_sides(name, options, mask):
    """Return the layer as a torch function and as a JAX function of x (n, T, D), with the same values."""
    kind = LAYERS[name]
    module = kind.torch_module(PADDED, options)
    fill(module, 0)
    module = module.double()
    values = {n: p.detach().numpy() for n, p in module.named_parameters()}
    extras = {} if mask is None else {"mask": mask}

    def in_torch(x):
        y = module(torch.from_numpy(x), **{n: torch.from_numpy(a) for n, a in extras.items()})
        return y.detach().numpy()

    return in_torch, lambda x: np.asarray(kind.jax_apply(options, values, jnp.asarray(x), extras))


def changed_positions(function, x, where, to):
    """Return (n, T): which positions of the output change when the input's positions `where` are set to `to`."""
    other = np.where(where[..., None], to, x)
    before, after = function(x), function(other)
    assert np.isfinite(before).all()
    assert np.isfinite(after).all()
    return (np.abs(before - after) > 1e-9).any(axis=-1)


@pytest.mark.parametrize(("name", "options"), LAYERS_WITH_MASK)
def test_padding_changes_no_valid_position(name, options):
    x = np.random.default_rng(0).standard_normal((3, 3, 4))
    for function in both_sides(name, options, MASK):
        assert not (changed_positions(function, x, ~MASK, 7.0) & MASK).any()


@pytest.mark.parametrize(("name", "options"), [p for p in LAYERS_WITH_MASK if not p.values[1].get("causal")])
def test_without_the_mask_padding_changes_valid_positions(name, options):
    """The test above can fail, except for causal layers, where padding is after every valid position."""
    x = np.random.default_rng(0).standard_normal((3, 3, 4))
    for function in both_sides(name, options, None):
        assert (changed_positions(function, x, ~MASK, 7.0) & MASK).any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_only_a_causal_layer_ignores_later_positions(causal, position):
    x = np.random.default_rng(0).standard_normal((2, 3, 4))
    where = np.broadcast_to(np.arange(3) == position, (2, 3))
    for function in both_sides("attention", {"heads": 2, "causal": causal}, None):
        changed = changed_positions(function, x, where, 7.0)
        assert (changed == ((np.arange(3) >= position) | (not causal))).all()


@pytest.mark.parametrize("causal", [False, True])
def test_every_query_has_a_visible_key(causal):
    """Otherwise its weights would be 0/0. The first position of every item is valid."""
    seen = np.asarray(visible_keys(jnp.zeros((3, 3, 4)), {"mask": MASK}, causal))
    assert seen.any(axis=-1).all()
    expected = MASK[:, None, None, :] & (np.tri(3, dtype=bool) | (not causal))
    assert (seen == expected).all()


@pytest.mark.parametrize(("name", "options"), LAYERS_WITH_MASK)
def test_gradient_is_finite_where_only_one_position_is_valid(name, options):
    kind = LAYERS[name]
    module = kind.torch_module(PADDED, options)
    fill(module, 0)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 3, 4))).requires_grad_()
    mask = torch.tensor([[True, False, False]] * 2)
    module.double()(x, mask=mask).square().sum().backward()
    assert all(bool(torch.isfinite(t.grad).all()) for t in (x, *module.parameters()))
