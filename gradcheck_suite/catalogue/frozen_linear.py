"""Linear layers that are not, or not wholly, trained: `requires_grad` is False for what is frozen."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import torch

from gradcheck_suite.catalogue.definitions import Arguments, LayerDefinition, Options, Signal, expect, product

FEATURES = (1, 2)
_PARTS = ("weight", "bias")


def _frozen_parts(options: Options) -> tuple[str, ...]:
    return (options["frozen"],) if "frozen" in options else _PARTS


def _module(signal: Signal, options: Options) -> torch.nn.Module:
    linear = torch.nn.Linear(signal.features, options["features"])
    for part in _frozen_parts(options):
        linear.get_parameter(part).requires_grad_(False)
    return linear


def _jax(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    frozen = _frozen_parts(options)
    weight, bias = (jax.lax.stop_gradient(params[p]) if p in frozen else params[p] for p in _PARTS)
    return x @ weight.T + bias


def _kind(name: str, *, wholly: bool) -> LayerDefinition:
    choices: dict[str, Sequence[object]] = (
        {"features": FEATURES} if wholly else {"features": FEATURES, "frozen": _PARTS}
    )

    def variants(signal: Signal) -> Sequence[Options]:
        return product(**choices) if signal.form in ("vector", "sequence") else ()

    def out(signal: Signal, options: Options) -> Signal:
        expect(signal.form in ("vector", "sequence"), name, "a vector or a sequence", signal)
        expect(options["features"] >= 1, name, "features of at least 1", options["features"])
        expect(wholly or options["frozen"] in _PARTS, name, f"frozen among {_PARTS}", options.get("frozen"))
        return signal.with_features(options["features"])

    return LayerDefinition(name, variants, out, _module, _jax, axes=1, trainable=not wholly)


KINDS = (_kind("part_frozen_linear", wholly=False), _kind("frozen_linear", wholly=True))
