"""Every layer alone: torch against JAX, against finite differences, and against its own shape rule.

Generic over the catalogue: a new kind is tested by being registered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from gradcheck_suite.catalogue import LAYERS, out_signal
from gradcheck_suite.catalogue.build import extra_keys
from gradcheck_suite.catalogue.definitions import Signal, no_extras
from gradcheck_suite.errors import UsageError
from gradcheck_suite.schema.spec import Layer
from tests.catalogue.one_layer import (
    KINDS,
    PLAIN_ITEMS,
    assert_frameworks_agree,
    assert_same,
    cases_of,
    draw,
    identifier,
    reachable_signals,
    torch_model,
    torch_run,
)

ALL_CASES = [pytest.param(*case, id=identifier(case)) for name in KINDS for case in cases_of(name)]


# What holds of every layer


@pytest.mark.parametrize(("layer", "signal"), ALL_CASES)
def test_torch_and_jax_agree(layer, signal):
    assert_frameworks_agree(KINDS[layer.kind], layer, signal)


@pytest.mark.parametrize(("layer", "signal"), ALL_CASES)
def test_items_are_independent(layer, signal):
    """Otherwise the objective would be no sum over items, and no accumulation could equal the large batch."""
    batch = draw(layer, signal, PLAIN_ITEMS + 3)
    model = torch_model(layer, signal)
    cotangent = np.random.default_rng(1).standard_normal((len(batch["x"]), *out_signal(layer, signal).size))
    value, gradients = torch_run(model, batch, cotangent)
    for which in ([5, 2, 0, 4, 1, 3], [1, 2], [0]):
        part, part_gradients = torch_run(model, {n: a[which] for n, a in batch.items()}, cotangent[which])
        assert_same("output", part, value[which])
        if "x" in gradients:
            assert_same("gradient of x", part_gradients["x"], gradients["x"][which])


@pytest.mark.parametrize(("layer", "signal"), [c for c in ALL_CASES if KINDS[c.values[0].kind].trainable])
def test_items_reach_a_parameter_of_every_variant_of_a_trainable_kind(layer, signal):
    batch = draw(layer, signal, PLAIN_ITEMS)
    cotangent = np.random.default_rng(1).standard_normal((PLAIN_ITEMS, *out_signal(layer, signal).size))
    _, gradients = torch_run(torch_model(layer, signal), batch, cotangent)
    assert any(np.any(gradient) for name, gradient in gradients.items() if name != "x")


def _one_case_per_form() -> Iterator[object]:
    for name in KINDS:
        for case in {signal.form: (layer, signal) for layer, signal in reversed(cases_of(name))}.values():
            yield pytest.param(*case, id=identifier(case))


@pytest.mark.parametrize(("layer", "signal"), list(_one_case_per_form()))
def test_gradient_is_the_central_difference(layer, signal):
    """Only at plain items: at a kink or a tie there is no derivative to approximate."""
    model = torch_model(layer, signal)
    tensors = {name: torch.from_numpy(array) for name, array in draw(layer, signal, 2).items()}
    inputs = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    x = tensors["x"].is_floating_point()
    if x:
        inputs["x"] = tensors["x"]

    def value(*arguments):
        named = dict(zip(inputs, arguments, strict=True))
        x = named.pop("x", tensors["x"])
        return torch.func.functional_call(model, named, (x, tensors))

    assert torch.autograd.gradcheck(value, tuple(t.requires_grad_() for t in inputs.values()), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_some_drawn_model_can_hold_the_layer(name):
    assert cases_of(name)


# Shape rules and options


def _refused() -> Iterator[object]:
    for name, kind in KINDS.items():
        taken = {signal.form for _, signal in cases_of(name)}
        for signal in {s.form: s for s in reversed(reachable_signals())}.values():
            if signal.form not in taken:
                yield pytest.param(cases_of(name)[0][0], signal, id=f"{kind.name}-{signal.form}")


@pytest.mark.parametrize(("layer", "signal"), list(_refused()))
def test_signal_of_a_form_that_the_kind_does_not_take_is_refused(layer, signal):
    with pytest.raises(UsageError, match=rf"layer '{layer.kind}'.*expected.*got"):
        out_signal(layer, signal)


def _wrong_options() -> Iterator[object]:
    for name in KINDS:
        # of variants that leave an option out, the one with the most options shows the most faults
        layer, signal = max(cases_of(name), key=lambda case: len(case[0].options))
        for option, value in layer.options:
            others = {n: v for n, v in layer.options if n != option}
            wrong = [("missing", {}), ("ill-typed", {option: "no such value"})]
            if isinstance(value, int) and not isinstance(value, bool):
                wrong.append(("negative", {option: -1}))
            variants = [dict(v) for v in KINDS[name].variants(signal)]
            for what, change in [(w, c) for w, c in wrong if {**others, **c} not in variants]:
                yield pytest.param(Layer(name, **others, **change), signal, id=f"{name}-{option}-{what}")
        yield pytest.param(Layer(name, **dict(layer.options), foreign=1), signal, id=f"{name}-foreign")


@pytest.mark.parametrize(("layer", "signal"), list(_wrong_options()))
def test_wrong_option_is_refused(layer, signal):
    with pytest.raises(UsageError, match=rf"layer '{layer.kind}'"):
        out_signal(layer, signal)


# The comparison itself, on planted faults

LINEAR = Layer("linear", features=2, bias=True)


def _off(options, params, x, extras):
    """Off by one part in 10^9 in the value, and so in every gradient."""
    return (x @ params["weight"].T) * (1 + 1e-9) + params["bias"]


def _stopped(options, params, x, extras):
    """Right in value, with a bias that is never learned."""
    return x @ params["weight"].T + jax.lax.stop_gradient(params["bias"])


def _stopped_input(options, params, x, extras):
    """Right in value and in every parameter's gradient, but not in the input's."""
    return jax.lax.stop_gradient(x) @ params["weight"].T + params["bias"]


def _nan(options, params, x, extras):
    return (x @ params["weight"].T + params["bias"]) * jnp.nan


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_off, "value"),
        (_stopped, "gradient of 0.bias"),
        (_stopped_input, "gradient of x"),
        (_nan, "value: nan"),
    ],
)
def test_planted_fault_in_a_jax_meaning_is_found(fault, message):
    faulty = replace(KINDS["linear"], jax_apply=fault)
    with pytest.raises(AssertionError, match=message):
        assert_frameworks_agree(faulty, LINEAR, Signal("vector", (3,)))


def test_planted_fault_in_a_shape_rule_is_found(monkeypatch):
    module = KINDS["linear"].torch_module
    wider = replace(KINDS["linear"], torch_module=lambda signal, o: module(signal, {**o, "features": 5}))
    monkeypatch.setitem(LAYERS, "linear", wider)
    with pytest.raises(AssertionError, match=r"out\(\) says \(2,\), torch gives \(5,\)"):
        assert_frameworks_agree(wider, LINEAR, Signal("vector", (3,)))


def test_extras_are_handed_over_by_their_place_in_the_model():
    for name, kind in KINDS.items():
        if kind.extras is no_extras:
            continue
        layer, signal = cases_of(name)[0]
        drawn = kind.extras(signal, layer.o, np.random.default_rng(0), 4)
        assert set(drawn) <= set(extra_keys(layer, signal, "0"))
        assert all(len(array) == 4 for array in drawn.values())
