"""Every layer alone: torch against JAX, against finite differences, and against its own shape rule.

Generic over the catalogue: a new kind is tested by being registered.

Two tensors agree when no element differs by more than 1e-12 times the larger of 1 and the largest
entry of either. Inputs, parameters and cotangents are drawn at a size of about 1, and so are the
terms that a gradient sums: a gradient that nearly cancels, as through the normalization of two
numbers, is as inexact as its terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from gradcheck_suite.catalogue.definitions import LayerDefinition, Signal, no_extras
from gradcheck_suite.catalogue.tables import (
    INPUTS,
    LAYERS,
    Chain,
    extra_keys,
    fill_parameters,
    out_signal,
)
from gradcheck_suite.core.case import Layer
from gradcheck_suite.errors import UsageError
from gradcheck_suite.reference.programs import CompiledPrograms

RELATIVE = 1e-12
PLAIN_ITEMS = 3
KINDS = {name: kind for name, kind in LAYERS.items() if kind.wraps is None}


# Which signals, which variants


def _simplest(signal: Signal):
    return (
        len(signal.size),
        int(np.prod(signal.size)),
        signal.size,
        signal.padded,
        signal.vocabulary,
    )


@cache
def reachable_signals() -> tuple[Signal, ...]:
    """Return what the first two layers of a drawn model can receive, simplest first."""
    first = {
        kind.signal(options) for kind in INPUTS.values() if kind.drawn for options in kind.variants
    }
    second = {
        out_signal(Layer(k.name, **o), s)
        for k in KINDS.values()
        for s in first
        for o in k.variants(s)
    }
    return tuple(sorted(first | second, key=_simplest))


@cache
def cases_of(name: str) -> tuple[tuple[Layer, Signal], ...]:
    """Return a kind's layers, each with a signal: every variant with the largest signal of each
    form that admits it.

    The first variant meets each form's smallest signal and a padded one too; a kind that reads the
    mask meets a padded signal in every variant.
    """
    if name == "readout":  # takes the index of an item, which no drawn input gives
        return ((Layer("readout"), Signal("tokens", (1,), vocabulary=4)),)
    kind, cases = KINDS[name], {}
    for form in ("vector", "tokens", "sequence", "image"):
        admitting: dict[Layer, list[Signal]] = {}
        for signal in reachable_signals():
            for options in kind.variants(signal) if signal.form == form else ():
                admitting.setdefault(Layer(name, **options), []).append(signal)
        for i, (layer, signals) in enumerate(admitting.items()):
            plain = [s for s in signals if not s.padded]
            padded = [s for s in signals if s.padded]
            chosen = [
                *plain[-1:],
                *(plain[:1] if i == 0 else ()),
                *(padded[-1:] if i == 0 or kind.uses_mask else ()),
            ]
            cases |= {(layer, signal): None for signal in chosen or signals[-1:]}
    return tuple(cases)


def identifier(case: tuple[Layer, Signal]) -> str:
    layer, signal = case
    size = "x".join(map(str, signal.size))
    return f"{layer!r}-{signal.form}-{size}{'-padded' * signal.padded}".replace(" ", "")


@contextmanager
def about(layer: Layer, signal: Signal) -> Iterator[None]:
    """Name the layer and its signal where an assertion fails."""
    try:
        yield
    except AssertionError as error:
        error.add_note(f"with {identifier((layer, signal))}")
        raise


# Running one layer in both frameworks


def draw(layer: Layer, signal: Signal, items: int) -> dict[str, np.ndarray]:
    """Draw a batch: `x`, `mask` for a padded signal, and the layer's extras under the names its
    place gives them.

    After the first `PLAIN_ITEMS`, items hold what earlier layers leave behind: zeros, ties, values
    cut at 1.
    """
    rng = np.random.default_rng(crc32(identifier((layer, signal)).encode()))
    batch = {}
    if signal.form == "tokens":
        batch["x"] = rng.integers(0, signal.vocabulary, (items, *signal.size))
    else:
        batch["x"] = rng.standard_normal((items, *signal.size))
        special = batch["x"][PLAIN_ITEMS:]
        special[0:1] = np.maximum(special[0:1], 0.0)
        special[1:2] = 0.0
        special[2:3] = np.clip(5 * special[2:3], -1.0, 1.0)
    if signal.padded:
        lengths = 1 + np.arange(items) % signal.size[0]
        batch["mask"] = np.arange(signal.size[0]) < lengths[:, None]
        if signal.form == "tokens":
            batch["x"] = np.where(batch["mask"], np.maximum(batch["x"], 1), 0)
    extras = KINDS[layer.kind].extras(signal, layer.o, rng, items)
    return batch | {f"0.{name}": array for name, array in extras.items()}


def torch_model(layer: Layer, signal: Signal) -> Chain:
    model = Chain((layer,), signal)
    fill_parameters(model, seed=crc32(identifier((layer, signal)).encode()))
    return model.to(torch.float64)


def torch_run(model: Chain, batch: dict[str, np.ndarray], cotangent: np.ndarray | None = None):
    """Return the output, and by name the gradient of every trainable parameter and of a floating
    input `x`.
    """
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    x = tensors["x"]
    inputs = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if x.is_floating_point():
        inputs["x"] = x.requires_grad_()
    y = model(x, tensors)
    gradients = {}
    if cotangent is not None and inputs and y.requires_grad:
        found = torch.autograd.grad(
            y, list(inputs.values()), torch.from_numpy(cotangent), allow_unused=True
        )
        for (name, tensor), gradient in zip(inputs.items(), found, strict=True):
            gradient = torch.zeros_like(tensor) if gradient is None else gradient
            gradients[name] = (gradient.to_dense() if gradient.is_sparse else gradient).numpy()
    return y.detach().numpy(), gradients


@dataclass(frozen=True)
class Prepared:
    """One layer's batch, what torch computes of it, and the function and arguments with which JAX
    computes the same.
    """

    layer: Layer
    signal: Signal
    value: np.ndarray
    gradients: dict[str, np.ndarray]
    inputs: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def named(self, result: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return JAX's output, and its gradients by name, in the shapes of torch's."""
        y, into_params, *into_x = result
        gradients = {f"0.{name}": gradient for name, gradient in into_params.items()}
        if into_x:
            gradients["x"] = into_x[0].reshape(-1)[: self.inputs].reshape(self.gradients["x"].shape)
        return y.reshape(-1)[: self.value.size].reshape(self.value.shape), gradients


def prepare(kind: LayerDefinition, layer: Layer, signal: Signal) -> Prepared:
    """Run a layer in torch; JAX's meaning is folded over the axes that the kind does not mix."""
    batch = draw(layer, signal, PLAIN_ITEMS + 3)
    model = torch_model(layer, signal)
    size = out_signal(layer, signal).size
    cotangent = np.random.default_rng(1).standard_normal((len(batch["x"]), *size))
    shape = torch_run(model, batch)[0].shape
    assert shape == cotangent.shape, f"out() says {size}, torch gives {shape[1:]}"
    value, gradients = torch_run(model, batch, cotangent)
    named = (*model.named_parameters(), *model.named_buffers())
    values = {n.removeprefix("0."): t.detach().numpy() for n, t in named if t.is_floating_point()}
    extras = {name: batch[key] for name, key in extra_keys(layer, signal, "0").items()}
    x = batch["x"]
    if kind.axes is not None:
        x = x.reshape(-1, *x.shape[x.ndim - kind.axes :])
        cotangent = cotangent.reshape(-1, *shape[len(shape) - kind.axes :])

    def both(params, x, extras, cotangent):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            y, pullback = jax.vjp(lambda p: kind.jax_apply(layer.o, p, x, extras), params)
            return y, *pullback(cotangent)
        y, pullback = jax.vjp(lambda p, x: kind.jax_apply(layer.o, p, x, extras), params, x)
        return y, *pullback(cotangent)

    return Prepared(
        layer, signal, value, gradients, batch["x"].size, both, (values, x, extras, cotangent)
    )


def assert_same(what: str, observed: np.ndarray, expected: np.ndarray) -> None:
    __tracebackhide__ = True
    assert observed.shape == expected.shape, (
        f"{what}: shape {observed.shape}, but should be {expected.shape}"
    )
    assert np.isfinite(expected).all(), f"{what}: not finite"
    largest = max(1.0, np.abs(expected).max(initial=0.0), np.abs(observed).max(initial=0.0))
    error = np.abs(observed - expected)
    worst = np.unravel_index(np.argmax(error), error.shape) if error.size else ()
    assert (error <= RELATIVE * largest).all(), (
        f"{what}: {float(observed[worst])}, but should be {float(expected[worst])} at {tuple(map(int, worst))}; "
        f"{np.count_nonzero(~(error <= RELATIVE * largest))} of {error.size} elements differ"
    )


def assert_frameworks_agree(kind: LayerDefinition, *cases: tuple[Layer, Signal]) -> None:
    """Compare value and gradients of a kind's two meanings, in one compiled program for all cases."""
    __tracebackhide__ = True
    prepared = [prepare(kind, layer, signal) for layer, signal in cases]

    def run(*arguments):
        return tuple(each.function(*given) for each, given in zip(prepared, arguments, strict=True))

    # compiled without optimisation, since it is called once
    results = CompiledPrograms().call(
        ("test of layers", kind.name), run, *(each.arguments for each in prepared), store=False
    )
    for each, result in zip(prepared, results, strict=True):
        value, gradients = each.named(result)
        with about(each.layer, each.signal):
            assert_same("value", value, each.value)
            for name, gradient in each.gradients.items():
                assert_same(f"gradient of {name}", gradients[name], gradient)


EACH_KIND = pytest.mark.parametrize("name", KINDS)
EVERY_THIRD_KIND = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] * (i % 3 > 0)) for i, name in enumerate(KINDS)],
)
"""The others are tested with --full."""


# What holds of every layer


def _chosen(name: str, *, full: bool) -> list[tuple[Layer, Signal]]:
    """Return a kind's cases.

    Unless `full`, without those whose options and form of signal stand in cases before.
    """
    seen, chosen = set(), []
    for layer, signal in cases_of(name):
        own = {layer, (signal.form, signal.padded)}
        if full or not own <= seen:
            chosen.append((layer, signal))
        seen |= own
    return chosen


SLOW = ("gru", "rnn", "transformer")
"""Kinds whose programs take a second and more to compile; `lstm` and `attention` stand for them."""


@pytest.mark.parametrize(
    ("name", "full"),
    [
        *(pytest.param(name, False, marks=pytest.mark.quick) for name in KINDS if name not in SLOW),
        *(pytest.param(name, True, marks=pytest.mark.full) for name in KINDS),
    ],
)
def test_torch_and_jax_agree(name, full):
    if chosen := _chosen(name, full=full):
        assert_frameworks_agree(KINDS[name], *chosen)


@EACH_KIND
def test_a_layer_of_jax_keeps_a_lower_precision(name):
    """Otherwise a convolution after it fails, and the loop of JAX that trains the model would be
    blamed.
    """
    for layer, signal in _chosen(name, full=False):
        values, x, extras, _ = prepare(KINDS[name], layer, signal).arguments

        def low(array):
            return jax.ShapeDtypeStruct(
                array.shape, jnp.bfloat16 if array.dtype.kind == "f" else array.dtype
            )

        y = jax.eval_shape(
            partial(KINDS[name].jax_apply, layer.o), *jax.tree.map(low, (values, x, extras))
        )
        with about(layer, signal):
            assert not jnp.issubdtype(y.dtype, jnp.floating) or y.dtype == jnp.bfloat16


@EACH_KIND
def test_items_are_independent_and_reach_a_parameter(name):
    """Otherwise the objective would not be separable over samples."""
    for layer, signal in cases_of(name):
        batch = draw(layer, signal, PLAIN_ITEMS + 3)
        model = torch_model(layer, signal)
        cotangent = np.random.default_rng(1).standard_normal(
            (len(batch["x"]), *out_signal(layer, signal).size)
        )
        value, gradients = torch_run(model, batch, cotangent)
        with about(layer, signal):
            if KINDS[name].trainable:
                assert any(np.any(gradient) for name, gradient in gradients.items() if name != "x")
            for which in ([5, 2, 0, 4, 1, 3], [1, 2], [0]):
                part, part_gradients = torch_run(
                    model, {n: a[which] for n, a in batch.items()}, cotangent[which]
                )
                assert_same("output", part, value[which])
                if "x" in gradients:
                    assert_same("gradient of x", part_gradients["x"], gradients["x"][which])


@EVERY_THIRD_KIND
def test_gradient_is_the_central_difference(name):
    """Only for plain items, because there is no derivative at a kink or a tie."""
    for layer, signal in {
        signal.form: (layer, signal) for layer, signal in reversed(cases_of(name))
    }.values():
        model = torch_model(layer, signal)
        tensors = {name: torch.from_numpy(array) for name, array in draw(layer, signal, 2).items()}
        inputs = {
            name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad
        }
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
    for signal in {
        s.form: s for s in reversed(reachable_signals()) if s.form not in taken
    }.values():
        with (
            about(layer, signal),
            pytest.raises(UsageError, match=rf"layer '{name}'.*expected.*got"),
        ):
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
    wider = replace(
        KINDS["linear"], torch_module=lambda signal, o: module(signal, {**o, "features": 5})
    )
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
