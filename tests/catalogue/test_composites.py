"""Layers inside layers in the JAX reference, which applies the chain rule itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradcheck_suite.catalogue.tables import build_model, draw_data
from gradcheck_suite.core.case import Input, Layer, Loss, ProblemSpec
from gradcheck_suite.reference import jax_gradients
from gradcheck_suite.reference.jax_gradients import large_batch_gradient

VECTOR = Input("vector", size=2)
SEQUENCE = Input("sequence", length=3, padded=True, size=2)
IMAGE = Input("image", channels=2, height=4, width=5)
LINEAR = Layer("linear", bias=True, features=2)
TANH = Layer("tanh")
MODELS = {
    "residual": (VECTOR, (Layer("residual", LINEAR, TANH), LINEAR)),
    "residual of one pointwise layer": (VECTOR, (LINEAR, Layer("residual", Layer("relu")), LINEAR)),
    "shared": (VECTOR, (Layer("shared", LINEAR, TANH),)),
    "shared between others": (VECTOR, (LINEAR, Layer("shared", TANH, LINEAR), TANH, LINEAR)),
    "residual in shared": (VECTOR, (Layer("shared", Layer("residual", LINEAR, TANH)),)),
    "shared in residual": (VECTOR, (Layer("residual", Layer("shared", LINEAR, TANH), TANH), LINEAR)),
    "shared in shared": (VECTOR, (Layer("shared", Layer("shared", LINEAR, TANH), LINEAR),)),
    "tied in shared": (VECTOR, (Layer("shared", Layer("tied_linear", features=2)), LINEAR)),
    "frozen in shared": (VECTOR, (Layer("shared", Layer("part_frozen_linear", features=2, frozen="weight")),)),
    "routed in residual": (VECTOR, (Layer("residual", Layer("branch", features=2)), LINEAR)),
    "routed in shared": (VECTOR, (Layer("shared", Layer("mixture", experts=2, features=2)), LINEAR)),
    "sum": (VECTOR, (Layer("sum", LINEAR, TANH, Layer("scale")), LINEAR)),
    "concatenation": (VECTOR, (Layer("concat", LINEAR, Layer("second_input")), LINEAR)),
    "concatenated sequences": (SEQUENCE, (Layer("concat", TANH, LINEAR), LINEAR)),
    "concatenated images": (IMAGE, (Layer("concat", Layer("scale"), TANH, Layer("relu")), Layer("scale"))),
    "residual in sum in shared": (VECTOR, (Layer("shared", Layer("sum", Layer("residual", LINEAR), TANH)), LINEAR)),
    "masked attention in both": (
        SEQUENCE,
        (Layer("residual", Layer("shared", Layer("attention", causal=False, heads=2))), LINEAR),
    ),
}


def relative_difference(problem: ProblemSpec, seed: int, items: int = 5) -> float:
    """Return the largest difference between torch's and JAX's gradients, relative to the largest entry (or 1)."""
    data = draw_data(problem, seed, np.zeros(items, dtype=bool))
    model = build_model(problem, seed, torch.float64)
    batch = {name: torch.from_numpy(array) for name, array in data.items()}
    torch.nn.functional.mse_loss(model(batch), batch["target"]).backward()
    _, in_jax = large_batch_gradient(problem, {n: p.detach().numpy() for n, p in model.named_parameters()}, data)
    worst = 0.0
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        in_torch = torch.zeros_like(p) if p.grad is None else p.grad
        scale = max(1.0, float(in_torch.abs().max()))
        worst = max(worst, float(np.abs(in_torch.numpy() - in_jax[name]).max()) / scale)
    return worst


def mean_squared(source: Input, layers) -> ProblemSpec:
    return ProblemSpec(source, tuple(layers), Loss("mse", reduction="mean"))


@pytest.mark.parametrize("name", MODELS)
def test_composites_agree_with_torch(name):
    assert relative_difference(mean_squared(*MODELS[name]), seed=1) <= 1e-12


INNER = st.sampled_from((LINEAR, TANH, Layer("relu"), Layer("branch", features=2), Layer("tied_linear", features=1)))
NESTED = st.recursive(
    INNER,
    lambda inner: st.builds(
        lambda kind, layers: Layer(kind, *layers),
        st.sampled_from(("residual", "shared")),
        st.lists(inner, min_size=1, max_size=2),
    ),
    max_leaves=4,
)


@settings(max_examples=40, deadline=None)
@given(st.lists(NESTED, min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_any_nesting_agrees_with_torch(layers, seed):
    assert relative_difference(mean_squared(VECTOR, (*layers, LINEAR)), seed) <= 1e-11


def _forget_the_shortcut(self, windows, saved, cotangent):
    return self.inner.backward(windows, saved, cotangent)


def _forget_the_first_use(self, windows, saved, cotangent):
    first, second = saved
    aside = jax_gradients.Windows(windows.values, windows.batch, windows.spans)
    return self.inner.backward(windows, first, self.inner.backward(aside, second, cotangent))


def _forget_all_branches_but_one(self, windows, saved, cotangent):
    parts = [cotangent] * 2 if self.axis is None else np.split(cotangent, 2, self.axis)
    return self.inner[0].backward(windows, saved[0], parts[0])


@pytest.mark.parametrize(
    ("node", "fault", "model"),
    [
        ("_Residual", _forget_the_shortcut, (LINEAR, Layer("residual", LINEAR, TANH), LINEAR)),
        ("_Shared", _forget_the_first_use, (Layer("shared", LINEAR, TANH),)),
        ("_Branches", _forget_all_branches_but_one, (LINEAR, Layer("sum", LINEAR, TANH), LINEAR)),
        ("_Branches", _forget_all_branches_but_one, (LINEAR, Layer("concat", LINEAR, TANH), LINEAR)),
    ],
)
def test_fault_in_the_chain_rule_of_a_composite_is_found(monkeypatch, node, fault, model):
    monkeypatch.setattr(getattr(jax_gradients, node), "backward", fault)
    assert relative_difference(mean_squared(VECTOR, model), seed=1) > 1e-3
