"""Parameters that items do not reach (torch's gradient is None exactly there, JAX's is 0), frozen
and tied ones.
"""

from __future__ import annotations

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradcheck_suite.catalogue.definitions import Signal
from gradcheck_suite.catalogue.rows import THRESHOLD
from gradcheck_suite.catalogue.tables import LAYERS, build_model, fill_parameters
from gradcheck_suite.core.case import Input, Layer, Loss, ProblemSpec
from gradcheck_suite.reference.jax_gradients import large_batch_gradients

SOURCES = (Input("vector", size=2), Input("sequence", length=3, padded=False, size=2))
ROUTED = (
    Layer("unused", features=2),
    Layer("branch", features=1),
    Layer("mixture", features=2, experts=2),
    Layer("mixture", features=1, experts=3),
)


def problem_of(source: Input, *layers: Layer) -> ProblemSpec:
    return ProblemSpec(source, layers, Loss("mse", reduction="sum"))


def ways_taken(layer: Layer, x: np.ndarray, values: dict[str, np.ndarray]) -> set[int]:
    """Route every row by the definition, in numpy: which branch or expert do they take?"""
    rows = x.reshape(-1, x.shape[-1])
    if layer.kind == "branch":
        return {int(row[0] > THRESHOLD) for row in rows}
    gates = list(zip(values["0.gate.weight"], values["0.gate.bias"], strict=True))
    scores = [[float(gate @ row + bias) for gate, bias in gates] for row in rows]
    return {row.index(max(row)) for row in scores}


def unreached(layer: Layer, x: np.ndarray, values: dict[str, np.ndarray]) -> set[str]:
    if layer.kind == "unused":
        return {"0.spare"}
    taken = ways_taken(layer, x, values)
    return {
        name
        for name in values
        if name.startswith("0.ways.") and int(name.split(".")[2]) not in taken
    }


def gradients(problem: ProblemSpec, x: np.ndarray, seed: int, dtype: torch.dtype = torch.float64):
    """Return the model's values and its gradients by torch and by JAX; the targets are 0."""
    model = build_model(problem, seed, torch.float64)
    values = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    model = model.to(dtype)
    loss = model({"x": torch.from_numpy(x).to(dtype)}).square().sum()
    loss.backward()
    target = np.zeros((len(x), *x.shape[1:-1], problem.layers[-1].o["features"]))
    ((_, in_jax),) = large_batch_gradients(
        problem, values, {"x": x, "target": target}, [range(len(x))]
    )
    return values, {n: p.grad for n, p in model.named_parameters()}, in_jax


@settings(max_examples=60, deadline=None)
@given(
    layer=st.sampled_from(ROUTED),
    source=st.sampled_from(SOURCES),
    items=st.sampled_from((1, 1, 2, 4)),
    seed=st.integers(0, 2**32 - 1),
)
def test_gradient_is_none_exactly_for_parameters_that_no_item_reaches(layer, source, items, seed):
    problem = problem_of(source, layer)
    size = (3, 2) if source.kind == "sequence" else (2,)
    x = np.random.default_rng(seed).standard_normal((items, *size))
    values, in_torch, in_jax = gradients(problem, x, seed)
    expected = unreached(layer, x, values)
    assert {name for name, g in in_torch.items() if g is None} == expected
    assert {name for name, g in in_jax.items() if not np.any(g)} == expected
    for name in in_torch.keys() - expected:
        scale = max(1.0, np.abs(in_jax[name]).max())
        np.testing.assert_allclose(in_torch[name].numpy(), in_jax[name], rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize("layer", [layer for layer in ROUTED if layer.kind != "unused"])
def test_each_route_is_drawn_alone(layer):
    """Among 200 pairs of rows, each route is taken alone, so the test above has unreached
    parameters.
    """
    model = build_model(problem_of(SOURCES[0], layer), 1, torch.float64)
    values = {n: p.detach().numpy() for n, p in model.named_parameters()}
    rng = np.random.default_rng(0)
    seen = {
        frozenset(ways_taken(layer, 2 * rng.standard_normal((2, 2)), values)) for _ in range(200)
    }
    assert {frozenset((way,)) for way in range(layer.o.get("experts", 2))} <= seen


@pytest.mark.parametrize("layer", ROUTED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_unreached_route_has_gradient_none_in_every_dtype(layer, dtype):
    """One row takes one route, so the others get no gradient."""
    for row in ([2.0, 1.0], [-2.0, 1.0], [0.0, 0.0]):
        _, in_torch, _ = gradients(problem_of(SOURCES[0], layer), np.array([row]), 3)
        _, lower, _ = gradients(problem_of(SOURCES[0], layer), np.array([row]), 3, dtype)
        assert {n for n, g in lower.items() if g is None} == {
            n for n, g in in_torch.items() if g is None
        }
        assert all(g.dtype is dtype for g in lower.values() if g is not None)


@pytest.mark.parametrize("name", ["branch", "mixture"])
def test_ties_go_to_the_first_route_in_both_frameworks(name):
    """For an all-zero row, a gate without bias gives all experts the same weight."""
    options = {"features": 2} if name == "branch" else {"features": 2, "experts": 3}
    kind, signal = LAYERS[name], Signal("vector", (2,))
    module = kind.torch_module(signal, options).double()
    with torch.no_grad():
        for parameter_name, parameter in module.named_parameters():
            parameter.fill_(0.0 if parameter_name.startswith("gate") else 1.0)
        for way, layer in enumerate(module.ways):
            layer.bias.fill_(10.0**way)
    rows = [[0.0, 0.0], [-0.0, 0.0]] + ([[THRESHOLD, 0.0]] if name == "branch" else [])
    x = np.array(rows)
    values = {n: p.detach().numpy() for n, p in module.named_parameters()}
    share = 1.0 if name == "branch" else 1 / 3
    expected = share * (1.0 + x.sum(axis=1, keepdims=True)) * np.ones((1, 2))
    np.testing.assert_allclose(module(torch.from_numpy(x)).detach().numpy(), expected, rtol=1e-14)
    np.testing.assert_allclose(
        np.asarray(kind.jax_apply(options, values, x, {})), expected, rtol=1e-14
    )


def test_the_first_of_equal_tokens_of_a_bag_gets_the_gradient_in_both_frameworks():
    """An optimizer may move two vectors to the same bfloat16 number.

    The maximum's gradient could go to either.
    """
    kind, signal = LAYERS["embedding_bag"], Signal("tokens", (3,), vocabulary=4)
    options = next(o for o in kind.variants(signal) if o["mode"] == "max" and not o["padding_idx"])
    module = kind.torch_module(signal, options).double()
    weight = np.array([[1.0, 2.0], [1.0, 3.0], [0.5, 3.0], [1.0, -1.0]])
    with torch.no_grad():
        module.weight.copy_(torch.from_numpy(weight))
    tokens = np.array([[0, 1, 3], [2, 1, 0], [3, 3, 2]])
    (in_torch,) = torch.autograd.grad(module(torch.from_numpy(tokens)).sum(), module.weight)
    total = lambda w: kind.jax_apply(options, {"weight": w}, jnp.asarray(tokens), {}).sum()  # noqa: E731
    expected = [[1.0, 0.0], [1.0, 1.0], [0.0, 2.0], [1.0, 0.0]]
    assert (
        in_torch.tolist() == np.asarray(jax.grad(total)(jnp.asarray(weight))).tolist() == expected
    )


@pytest.mark.parametrize(("first", "routed"), list(product(("relu", "hardtanh"), ROUTED[1:3])))
def test_rows_of_zeros_and_ones_take_the_same_route_in_both_frameworks(first, routed):
    """Clamped values stay away from the thresholds of routing, so both frameworks take the same
    route.
    """
    x = 3 * np.random.default_rng(0).standard_normal((64, 2))
    x[::4] = -1.0
    problem = problem_of(SOURCES[0], Layer(first), routed)
    _, in_torch, in_jax = gradients(problem, x, 0)
    for name, gradient in in_torch.items():
        scale = max(1.0, np.abs(in_jax[name]).max())
        np.testing.assert_allclose(gradient.numpy(), in_jax[name], rtol=0, atol=1e-12 * scale)


def _embedding_gradients(sparse: bool, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    kind = LAYERS["tied_embedding"]
    module = kind.torch_module(
        Signal("tokens", (3,), vocabulary=5), {"features": 2, "sparse": sparse}
    )
    fill_parameters(module, 0)
    module.to(dtype)(torch.tensor([[1, 2, 1], [0, 4, 2]])).square().sum().backward()
    return module.weight.grad


@pytest.mark.parametrize("sparse", [False, True])
def test_gradient_of_a_tied_embedding_is_dense_and_reaches_unread_words(sparse):
    """Word 3 is never an input but has a score at every position.

    The sparse and the dense part have a dense sum.
    """
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
