"""Every layer alone: torch against JAX, against finite differences, and against its own shape rule.

Generic over the catalogue: a new kind is tested by being registered.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from gradcheck_suite.catalogue.definitions import Signal, no_extras
from gradcheck_suite.catalogue.tables import LAYERS, extra_keys, out_signal
from gradcheck_suite.core.case import Layer
from gradcheck_suite.errors import UsageError
from tests.catalogue.one_layer import (
    KINDS,
    PLAIN_ITEMS,
    about,
    assert_frameworks_agree,
    assert_same,
    cases_of,
    draw,
    reachable_signals,
    torch_model,
    torch_run,
)

EACH_KIND = pytest.mark.parametrize("name", KINDS)
EVERY_THIRD_KIND = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (i % 3 > 0)) for i, name in enumerate(KINDS)]
)
"""The others are tested with --full."""


# What holds of every layer


def _chosen(name: str, *, full: bool) -> list[tuple[Layer, Signal]]:
    """Return a kind's cases; unless `full`, without those whose options and form of signal stand in cases before."""
    seen, chosen = set(), []
    for layer, signal in cases_of(name):
        own = {layer, (signal.form, signal.padded)}
        if full or not own <= seen:
            chosen.append((layer, signal))
        seen |= own
    return chosen


@EACH_KIND
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.full)])
def test_torch_and_jax_agree(name, full):
    if chosen := _chosen(name, full=full):
        assert_frameworks_agree(KINDS[name], *chosen)


@EACH_KIND
def test_items_are_independent_and_reach_a_parameter(name):
    """Otherwise the objective would not be separable over samples."""
    for layer, signal in cases_of(name):
        batch = draw(layer, signal, PLAIN_ITEMS + 3)
        model = torch_model(layer, signal)
        cotangent = np.random.default_rng(1).standard_normal((len(batch["x"]), *out_signal(layer, signal).size))
        value, gradients = torch_run(model, batch, cotangent)
        with about(layer, signal):
            if KINDS[name].trainable:
                assert any(np.any(gradient) for name, gradient in gradients.items() if name != "x")
            for which in ([5, 2, 0, 4, 1, 3], [1, 2], [0]):
                part, part_gradients = torch_run(model, {n: a[which] for n, a in batch.items()}, cotangent[which])
                assert_same("output", part, value[which])
                if "x" in gradients:
                    assert_same("gradient of x", part_gradients["x"], gradients["x"][which])


@EVERY_THIRD_KIND
def test_gradient_is_the_central_difference(name):
    """Only for plain items, because there is no derivative at a kink or a tie."""
    for layer, signal in {signal.form: (layer, signal) for layer, signal in reversed(cases_of(name))}.values():
        model = torch_model(layer, signal)
        tensors = {name: torch.from_numpy(array) for name, array in draw(layer, signal, 2).items()}
        inputs = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        if tensors["x"].is_floating_point():
            inputs["x"] = tensors["x"]

        def value(*arguments, inputs=inputs, model=model, tensors=tensors):
            named = dict(zip(inputs, arguments, strict=True))
            x = named.pop("x", tensors["x"])
            return torch.func.functional_call(model, named, (x, tensors))

        with about(layer, signal):
            leaves = tuple(t.requires_grad_() for t in inputs.values())
            assert torch.autograd.gradcheck(value, leaves, atol=1e-7, rtol=1e-5)


@EACH_KIND
def test_some_drawn_model_can_hold_the_layer(name):
    assert cases_of(name)


# Shape rules and options


@EACH_KIND
def test_signal_of_a_form_that_the_kind_does_not_take_is_refused(name):
    layer = cases_of(name)[0][0]
    taken = {signal.form for _, signal in cases_of(name)}
    for signal in {s.form: s for s in reversed(reachable_signals()) if s.form not in taken}.values():
        with about(layer, signal), pytest.raises(UsageError, match=rf"layer '{name}'.*expected.*got"):
            out_signal(layer, signal)


@EACH_KIND
def test_wrong_option_is_refused(name):
    # of variants that leave an option out, the one with the most options shows the most faults
    layer, signal = max(cases_of(name), key=lambda case: len(case[0].options))
    variants = [dict(v) for v in KINDS[name].variants(signal)]
    wrong = [{**layer.o, "foreign": 1}]
    for option, value in layer.options:
        others = {n: v for n, v in layer.options if n != option}
        wrong += [others, {**others, option: "no such value"}]
        if isinstance(value, int) and not isinstance(value, bool):
            wrong.append({**others, option: -1})
    for options in wrong:
        if options in variants:
            continue
        refused = Layer(name, **options)
        with about(refused, signal), pytest.raises(UsageError, match=rf"layer '{name}'"):
            out_signal(refused, signal)


# The comparison itself, on planted faults

LINEAR = Layer("linear", features=2, bias=True)


def _off(options, params, x, extras):
    """Value and gradients have a relative error of 1e-9."""
    return (x @ params["weight"].T) * (1 + 1e-9) + params["bias"]


def _stopped(options, params, x, extras):
    """The value is right, but the bias has no gradient."""
    return x @ params["weight"].T + jax.lax.stop_gradient(params["bias"])


def _stopped_input(options, params, x, extras):
    """The value and the parameters' gradients are right, but the input's gradient is not."""
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
        assert_frameworks_agree(faulty, (LINEAR, Signal("vector", (3,))))


def test_planted_fault_in_a_shape_rule_is_found(monkeypatch):
    module = KINDS["linear"].torch_module
    wider = replace(KINDS["linear"], torch_module=lambda signal, o: module(signal, {**o, "features": 5}))
    monkeypatch.setitem(LAYERS, "linear", wider)
    with pytest.raises(AssertionError, match=r"out\(\) says \(2,\), torch gives \(5,\)"):
        assert_frameworks_agree(wider, (LINEAR, Signal("vector", (3,))))


def test_extras_are_found_by_their_place_in_the_model():
    for name, kind in KINDS.items():
        if kind.extras is no_extras:
            continue
        layer, signal = cases_of(name)[0]
        drawn = kind.extras(signal, layer.o, np.random.default_rng(0), 4)
        assert set(drawn) <= set(extra_keys(layer, signal, "0"))
        assert all(len(array) == 4 for array in drawn.values())
