"""Muon: momentum, made orthogonal by Newton-Schulz iterations that torch computes in bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from gradcheck_suite.steps.chains import Transformation, framed, per_leaf
from gradcheck_suite.steps.counterpart import Counterpart

UNIT = 2.0**-9
"""Unit roundoff of bfloat16."""
ROUNDINGS = 2
"""Rounded operations by which torch computes an element of a product of matrices or of their weighted sum."""
_TINY = 1e-300
"""An epsilon that changes no norm."""


def _muon(
    *,
    lr: Any,
    weight_decay: Any,
    momentum: Any,
    nesterov: bool,
    ns_coefficients: tuple[Any, ...],
    eps: Any,
    ns_steps: int,
    adjust_lr_fn: str | None,
) -> Transformation:
    average = optax.ema(momentum, debias=False)

    def orthogonal(matrix: jax.Array) -> jax.Array:
        # optax adds epsilon to the norm, torch takes the larger of the two: this epsilon adds what the norm lacks
        lacks = jnp.maximum(eps - jnp.linalg.norm(matrix), _TINY)
        # without a momentum of its own, since optax corrects its bias: this is the orthogonalization alone
        inner = scale_by_muon(
            jnp.stack(ns_coefficients),
            ns_steps,
            beta=0.0,
            eps=lacks,
            nesterov=False,
            weight_dimension_numbers=MuonDimensionNumbers(),
        )
        direction, _ = inner.update(matrix, inner.init(matrix))
        return _factor(adjust_lr_fn, matrix.shape) * direction

    def init(params: Any) -> tuple[Any, Any]:
        return average.init(params), per_leaf(jnp.zeros_like, params)

    def advance(gradients: Any, state: tuple[Any, Any], params: Any = None) -> tuple[Any, Any]:
        mean, kept = average.update(gradients, state[0])
        mixed = per_leaf(lambda g, m: (1.0 - momentum) * g + momentum * m, gradients, mean) if nesterov else mean
        return per_leaf(orthogonal, mixed), (kept, mixed)

    core = optax.GradientTransformation(init, advance)
    return framed(core, lr, weight_decay=weight_decay, decoupled=1.0)


def _factor(rule: str | None, shape: tuple[int, ...]) -> float:
    """Return torch's factor of the learning rate for a matrix of some shape."""
    rows, columns = shape
    return 0.2 * float(max(rows, columns)) ** 0.5 if rule == "match_rms_adamw" else max(1.0, rows / columns) ** 0.5


def _newton_schulz(x: jax.Array, settings: Mapping[str, Any], errors: list[jax.Array]) -> Any:
    """Return the orthogonalization with errors added to its intermediate results, and the sizes of these errors."""
    a, b, c = settings["ns_coefficients"]
    given, sizes = iter(errors), []

    def rounded(value: jax.Array, magnitude: jax.Array, times: int = ROUNDINGS) -> jax.Array:
        sizes.append(times * UNIT * magnitude)
        return value + next(given)

    x = x / jnp.maximum(jnp.linalg.norm(x), settings["eps"])
    x = rounded(x, jnp.abs(x), 3)  # the conversion, the norm or epsilon, and the quotient
    for _ in range(settings["ns_steps"]):
        gram = rounded(x @ x.T, jnp.abs(x) @ jnp.abs(x).T)
        mixed = rounded(b * gram + c * gram @ gram, jnp.abs(b * gram) + jnp.abs(c) * jnp.abs(gram) @ jnp.abs(gram))
        x = rounded(a * x + mixed @ x, jnp.abs(a * x) + jnp.abs(mixed) @ jnp.abs(x))
    return x, sizes


def _in_bfloat16(state: Any, settings: Mapping[str, Any]) -> Any:
    """Return what bfloat16 may do to each element of the update, to first order in its unit roundoff."""

    def of(mixed: jax.Array) -> jax.Array:
        x = mixed.T if mixed.shape[0] > mixed.shape[1] else mixed
        rows, columns = x.shape
        errors = [jnp.zeros((rows, columns))]
        for _ in range(settings["ns_steps"]):
            errors += [jnp.zeros((rows, rows)), jnp.zeros((rows, rows)), jnp.zeros((rows, columns))]
        _, sizes = _newton_schulz(x, settings, errors)
        slopes = jax.jacfwd(lambda e: _newton_schulz(x, settings, e)[0])(errors)
        pairs = zip(slopes, sizes, strict=True)
        moved = sum((jnp.abs(slope) * size).sum((-2, -1)) for slope, size in pairs)
        bound = moved.T if mixed.shape[0] > mixed.shape[1] else moved
        return settings["lr"] * _factor(settings["adjust_lr_fn"], mixed.shape) * bound

    return per_leaf(of, state[2][1])


MUON = Counterpart(
    "Muon",
    "ema, contrib.scale_by_muon for the orthogonalization alone",
    (
        "torch orthogonalizes in bfloat16, whatever the dtype of the parameters: the step is not continuous",
        "optax corrects the bias of the momentum, which changes the share of the gradient under Nesterov",
        "torch bounds the norm by epsilon, optax adds epsilon",
    ),
    "torch/optim/_muon.py _single_tensor_muon; optax/contrib/_muon.py scale_by_muon",
    _muon,
    ({}, {"nesterov": False, "momentum": 0.5, "adjust_lr_fn": "match_rms_adamw"}),
    ("single",),
    decoupled=True,
    coarse=_in_bfloat16,
)
