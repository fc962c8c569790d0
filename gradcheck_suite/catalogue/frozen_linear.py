"""Linear layers with frozen parameters: weight, bias or both have `requires_grad=False`."""

from __future__ import annotations

import jax
import torch

from gradcheck_suite.catalogue.definitions import Arguments, LayerDefinition
from gradcheck_suite.catalogue.signals import ROWS, Options, Signal, expect, on, rows_to_features

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


def _partly_frozen_out(signal: Signal, options: Options) -> Signal:
    expect(options["frozen"] in _PARTS, "part_frozen_linear", f"frozen among {_PARTS}", options["frozen"])
    return rows_to_features("part_frozen_linear")(signal, options)


KINDS = (
    LayerDefinition(
        "part_frozen_linear",
        on(*ROWS, features=FEATURES, frozen=_PARTS),
        _partly_frozen_out,
        _module,
        _jax,
        axes=1,
        trainable=True,
    ),
    LayerDefinition(
        "frozen_linear", on(*ROWS, features=FEATURES), rows_to_features("frozen_linear"), _module, _jax, axes=1
    ),
)
