"""A module or a parameter under two names: one gradient, the sum of both uses, in torch and in both JAX references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, UsageError, check
from gradcheck_suite.catalogue.tables import build_model
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.reference import jax_gradients
from gradcheck_suite.reference.jax_gradients import large_batch_gradient, whole_gradient
from gradcheck_suite.reference.large_batch import float_values
from gradcheck_suite.run.instance import generated_instance

VECTOR, TOKENS = Input("vector", size=2), Input("tokens", length=3, padded=False, vocabulary=5)
LINEAR, TANH = Layer("linear", bias=True, features=2), Layer("tanh")
EMBEDDING = Layer("embedding", features=2, padding_idx=True, sparse=True)
OUTPUT = Layer("linear", bias=True, features=5)
BLOCK = Layer("residual", LINEAR, TANH)
MODELS = {
    "a module": (VECTOR, (LINEAR, TANH, LINEAR), ("2", "0")),
    "a weight": (VECTOR, (LINEAR, TANH, LINEAR), ("2.weight", "0.weight")),
    "a block": (VECTOR, (BLOCK, TANH, BLOCK), ("2", "0")),
    "a layer inside another": (VECTOR, (BLOCK, TANH, LINEAR), ("2", "0.0")),
    "a normalization's buffers": (VECTOR, (Layer("batch_norm1d", affine=True), LINEAR) * 2, ("2", "0")),
    "embedding and output": (TOKENS, (EMBEDDING, TANH, OUTPUT), ("2.weight", "0.weight")),
}


def _problem(name: str) -> ProblemSpec:
    source, layers, tie = MODELS[name]
    return ProblemSpec(source, layers, Loss("mse", reduction="mean"), (tie,))


@pytest.mark.parametrize("name", MODELS)
def test_tied_models_agree_in_torch_and_jax(name):
    problem = _problem(name)
    model = build_model(problem, 0, torch.float64)
    tied, original = problem.ties[0]
    state = model.state_dict(keep_vars=True)
    pairs = [(key, original + key.removeprefix(tied)) for key in state if key == tied or key.startswith(f"{tied}.")]
    assert pairs
    assert all(state[one] is state[other] for one, other in pairs)
    case = Case(problem, Plan((1, 3, 2), 2, 2), seed=3)
    verdict = check(MODES["zero_"], case)
    assert verdict.holds, verdict
    instance = generated_instance(case)
    values = float_values(instance.model(torch.float64))
    layered, whole = (f(problem, values, instance.arrays)[1] for f in (large_batch_gradient, whole_gradient))
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
