"""Specs: frozen data that prints and travels, and says what is wrong with it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from gradcheck_suite import Input, Layer, Loss, ProblemSpec, UsageError
from gradcheck_suite.schema.spec import layer_from_json, problem_from_json

SPEC = ProblemSpec(
    Input("tokens", length=3, vocabulary=5, padded=True),
    (
        Layer("embedding", features=2, sparse=False, padding_idx=True),
        Layer("residual", Layer("tanh"), Layer("linear", features=2, bias=True)),
    ),
    Loss("mse", reduction="sum"),
)


def test_options_are_kept_by_name_whatever_their_order():
    assert Layer("linear", features=2, bias=True) == Layer("linear", bias=True, features=2)
    assert hash(Layer("linear", features=2, bias=True)) == hash(Layer("linear", bias=True, features=2))
    assert Layer("linear", features=2, bias=True) != Layer("linear", features=3, bias=True)
    assert Layer("tanh") != Input("tanh")


def test_inner_layers_are_part_of_a_layer():
    assert Layer("residual", Layer("tanh")) != Layer("residual", Layer("relu"))
    assert Layer("residual", Layer("tanh")) != Layer("residual", Layer("tanh"), Layer("tanh"))


@pytest.mark.parametrize("spec", [SPEC, *SPEC.layers, SPEC.input, SPEC.loss], ids=lambda s: type(s).__name__)
def test_the_repr_is_the_constructor_call(spec):
    names = {"Input": Input, "Layer": Layer, "Loss": Loss, "ProblemSpec": ProblemSpec, "__builtins__": {}}
    assert eval(repr(spec), names) == spec


def test_json_round_trip():
    assert problem_from_json(json.loads(json.dumps(SPEC.to_json()))) == SPEC


def test_a_list_of_layers_becomes_a_tuple():
    assert ProblemSpec(SPEC.input, list(SPEC.layers), SPEC.loss) == SPEC


def test_layers_inside_others_count():
    layers = (Layer("residual", Layer("shared", Layer("linear", features=2))), Layer("tanh"))
    assert ProblemSpec(SPEC.input, layers, SPEC.loss).layer_kinds == ["residual", "shared", "linear", "tanh"]


def test_the_reduction_of_a_loss_is_mean_unless_stated():
    assert Loss("mse").reduction == "mean"
    assert Loss("mse", reduction="sum").reduction == "sum"


def test_specs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SPEC.layers[0].kind = "linear"
    with pytest.raises(dataclasses.FrozenInstanceError):
        SPEC.loss = Loss("mse")
    with pytest.raises(TypeError):
        SPEC.layers[0].o["features"] = 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layer(3), "Layer: kind must be a string, got int"),
        (lambda: Layer("linear", features=[2]), "Layer('linear'): option 'features' must be a bool, int, float, str"),
        (lambda: Layer("residual", "tanh"), "Layer('residual'): inner layers must be Layer, got str"),
        (lambda: ProblemSpec(SPEC.input, ("tanh",), SPEC.loss), "ProblemSpec: layers must be Layer, got str"),
        (lambda: ProblemSpec(SPEC.loss, SPEC.layers, SPEC.loss), "ProblemSpec: expected an Input, a sequence of Layer"),
    ],
)
def test_a_bad_spec_is_refused(make, message):
    with pytest.raises(UsageError) as error:
        make()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "problem: expected an object with 'input', 'layers' and 'loss'"),
        ({"input": {}, "layers": []}, "problem: expected an object with 'input', 'layers' and 'loss'"),
        ({**SPEC.to_json(), "input": {"length": 3}}, "input: expected an object with a string 'kind'"),
        ({**SPEC.to_json(), "loss": "mse"}, "loss: expected an object with a string 'kind', got 'mse'"),
        ({**SPEC.to_json(), "layers": "tanh"}, "problem: 'layers' must be a list, got 'tanh'"),
        ({**SPEC.to_json(), "layers": [{"kind": "residual", "layers": "tanh"}]}, "'layers' must be a list, got 'tanh'"),
        ({**SPEC.to_json(), "layers": [{"kind": "linear", "features": [2]}]}, "option 'features' must be a bool"),
    ],
)
def test_bad_json_is_refused(data, message):
    with pytest.raises(UsageError) as error:
        problem_from_json(data)
    assert message in str(error.value)


def test_a_layer_of_json_needs_a_kind():
    with pytest.raises(UsageError, match="layer: expected an object with a string 'kind', got None"):
        layer_from_json(None)


LINEAR_2 = Layer("linear", features=2, bias=True)
TIED = ProblemSpec(Input("vector", size=2), (LINEAR_2, LINEAR_2), Loss("mse"), ties=(("1.weight", "0.weight"),))


def test_ties_are_written_and_read_where_there_are_any():
    assert problem_from_json(json.loads(json.dumps(TIED.to_json()))) == TIED
    assert eval(repr(TIED)) == TIED
    assert "ties" not in SPEC.to_json()
    assert "ties" not in repr(SPEC)


@pytest.mark.parametrize("ties", [(("0", "1"),), (("1",),), ((1, 0),), (("1", "0", "0"),), (("a", "0"),)])
def test_tie_that_is_no_pair_of_a_later_and_an_earlier_name_is_refused(ties):
    with pytest.raises(UsageError, match="ties must be pairs of a name and one of an earlier layer"):
        ProblemSpec(TIED.input, TIED.layers, TIED.loss, ties)
