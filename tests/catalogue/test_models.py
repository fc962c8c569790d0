"""Layers inside layers, and modules and parameters under two names, in torch and in the JAX
references.

The JAX reference applies the chain rule itself. The gradient of what has two names is the sum of
both uses.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, UsageError, check
from gradcheck_suite.catalogue.tables import build_model, draw_data
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.reference import jax_gradients
from gradcheck_suite.reference.jax_gradients import large_batch_gradients, whole_gradient
from gradcheck_suite.reference.large_batch import float_values
from gradcheck_suite.run.instance import generated_instance

VECTOR = Input("vector", size=2)
SEQUENCE = Input("sequence", length=3, padded=True, size=2)
IMAGE = Input("image", channels=2, height=4, width=5)
LINEAR = Layer("linear", bias=True, features=2)
TANH = Layer("tanh")
COMPOSITES = {
    "shared": (VECTOR, (Layer("shared", LINEAR, TANH),)),
    "tied in shared": (VECTOR, (Layer("shared", Layer("tied_linear", features=2)), LINEAR)),
    "frozen in shared": (
        VECTOR,
        (Layer("shared", Layer("part_frozen_linear", features=2, frozen="weight")),),
    ),
    "routed in shared": (
        VECTOR,
        (Layer("shared", Layer("mixture", experts=2, features=2)), LINEAR),
    ),
    "sum": (VECTOR, (Layer("sum", LINEAR, TANH, Layer("scale")), LINEAR)),
    "concatenation": (VECTOR, (Layer("concat", LINEAR, Layer("second_input")), LINEAR)),
    "concatenated sequences": (SEQUENCE, (Layer("concat", TANH, LINEAR), LINEAR)),
    "concatenated images": (
        IMAGE,
        (Layer("concat", Layer("scale"), TANH, Layer("relu")), Layer("scale")),
    ),
    "residual in sum in shared": (
        VECTOR,
        (Layer("shared", Layer("sum", Layer("residual", LINEAR), TANH)), LINEAR),
    ),
    "masked attention in both": (
        SEQUENCE,
        (Layer("residual", Layer("shared", Layer("attention", causal=False, heads=2))), LINEAR),
    ),
}


def relative_difference(problem: ProblemSpec, seed: int, items: int = 5) -> float:
    """Return the largest difference between torch's and JAX's gradients, relative to the largest
    entry (or 1).
    """
    data = draw_data(problem, seed, np.zeros(items, dtype=bool))
    model = build_model(problem, seed, torch.float64)
    batch = {name: torch.from_numpy(array) for name, array in data.items()}
    torch.nn.functional.mse_loss(model(batch), batch["target"]).backward()
    values = {n: p.detach().numpy() for n, p in model.named_parameters()}
    ((_, in_jax),) = large_batch_gradients(problem, values, data, [range(len(data["x"]))])
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


@pytest.mark.parametrize("name", COMPOSITES)
def test_composites_agree_with_torch(name):
    assert relative_difference(mean_squared(*COMPOSITES[name]), seed=1) <= 1e-12


INNER = st.sampled_from(
    (LINEAR, TANH, Layer("relu"), Layer("branch", features=2), Layer("tied_linear", features=1))
)
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


def _forget_all_branches_but_one(self, windows, saved, cotangent):
    parts = [cotangent] * 2 if self.axis is None else np.split(cotangent, 2, self.axis)
    return self.inner[0].backward(windows, saved[0], parts[0])


@pytest.mark.parametrize("kind", ["residual", "sum", "concat"])
def test_fault_in_the_chain_rule_of_a_composite_is_found(monkeypatch, kind):
    monkeypatch.setattr(jax_gradients._Branches, "backward", _forget_all_branches_but_one)
    assert (
        relative_difference(
            mean_squared(VECTOR, (LINEAR, Layer(kind, LINEAR, TANH), LINEAR)), seed=1
        )
        > 1e-3
    )


# Two names for one module or parameter

TOKENS = Input("tokens", length=3, padded=False, vocabulary=5)
EMBEDDING = Layer("embedding", features=2, padding_idx=True, sparse=True)
OUTPUT = Layer("linear", bias=True, features=5)
BLOCK = Layer("residual", LINEAR, TANH)
TIED = {
    "a module": (VECTOR, (LINEAR, TANH, LINEAR), ("2", "0")),
    "a weight": (VECTOR, (LINEAR, TANH, LINEAR), ("2.weight", "0.weight")),
    "a block": (VECTOR, (BLOCK, TANH, BLOCK), ("2", "0")),
    "a layer inside another": (VECTOR, (BLOCK, TANH, LINEAR), ("2", "0.0")),
    "a normalization's buffers": (
        VECTOR,
        (Layer("batch_norm1d", affine=True), LINEAR) * 2,
        ("2", "0"),
    ),
    "embedding and output": (TOKENS, (EMBEDDING, TANH, OUTPUT), ("2.weight", "0.weight")),
}


def _problem(name: str) -> ProblemSpec:
    source, layers, tie = TIED[name]
    return ProblemSpec(source, layers, Loss("mse", reduction="mean"), (tie,))


@pytest.mark.parametrize("name", TIED)
def test_tied_models_agree_in_torch_and_jax(name):
    problem = _problem(name)
    model = build_model(problem, 0, torch.float64)
    tied, original = problem.ties[0]
    state = model.state_dict(keep_vars=True)
    pairs = [
        (key, original + key.removeprefix(tied))
        for key in state
        if key == tied or key.startswith(f"{tied}.")
    ]
    assert pairs
    assert all(state[one] is state[other] for one, other in pairs)
    case = Case(problem, Plan((1, 3, 2), 2, 2), seed=3)
    verdict = check(MODES["zero_"], case)
    assert verdict.holds, verdict
    instance = generated_instance(case)
    values = float_values(instance.model(torch.float64))
    ((_, layered),) = large_batch_gradients(
        problem, values, instance.arrays, [range(case.plan.total_items)]
    )
    _, whole = whole_gradient(problem, values, instance.arrays)
    for parameter, _ in instance.model().named_parameters():
        np.testing.assert_allclose(layered[parameter], whole[parameter], rtol=1e-12, atol=1e-12)
        assert np.any(layered[parameter])


def test_reference_that_forgets_the_second_use_is_found(monkeypatch):
    real = jax_gradients._Leaf._add

    def forget(self, into_params, windows, gradient):
        if self.path != "2":
            real(self, into_params, windows, gradient)

    monkeypatch.setattr(jax_gradients._Leaf, "_add", forget)
    verdict = check(MODES["zero_"], Case(_problem("a module"), Plan((1, 2), 2), seed=7))
    assert verdict.finding is not None


@pytest.mark.parametrize(
    ("tie", "message"),
    [
        (("2.weight", "0.wieght"), "the model has no module or parameter of that name"),
        (("3", "0"), "the model has no module or parameter of that name"),
        (("2", "0.weight"), "expected two modules or two parameters of one shape"),
        (("2.bias", "0.weight"), "expected two modules or two parameters of one shape"),
        (("2", "1"), "expected two modules or two parameters of one shape"),
    ],
)
def test_tie_that_does_not_fit_is_refused(tie, message):
    problem = ProblemSpec(VECTOR, (LINEAR, TANH, LINEAR), Loss("mse"), (tie,))
    with pytest.raises(UsageError, match=message):
        build_model(problem, 0, torch.float64)
