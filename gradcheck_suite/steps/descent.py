"""SGD, averaged SGD and resilient propagation."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradcheck_suite.steps.chains import Transformation, framed, in_float32, per_leaf, updates_from_state
from gradcheck_suite.steps.counterpart import Counterpart


class _Steps(NamedTuple):
    taken: jax.Array


def _dampened(dampening: Any) -> optax.GradientTransformation:
    """Multiply every gradient but the first by 1 - dampening."""

    def advance(gradients: Any, state: _Steps, params: Any = None) -> tuple[Any, _Steps]:
        factor = jnp.where(state.taken == 0, 1.0, 1.0 - dampening)
        return per_leaf(lambda g: factor * g, gradients), _Steps(state.taken + 1)

    return optax.GradientTransformation(lambda params: _Steps(jnp.zeros((), jnp.int32)), advance)


def _sgd(
    *,
    lr: Any,
    momentum: Any,
    dampening: Any,
    weight_decay: Any,
    nesterov: Any,
    maximize: Any,
) -> Transformation:
    trace = updates_from_state(
        optax.trace(decay=momentum, nesterov=True),
        lambda gradients, updates, state: per_leaf(lambda u, t: jnp.where(nesterov, u, t), updates, state.trace),
    )
    core = optax.chain(_dampened(dampening), trace)
    return framed(core, lr, weight_decay=weight_decay, maximize=maximize)


def _asgd(
    *,
    lr: Any,
    lambd: Any,
    alpha: Any,
    weight_decay: Any,
    maximize: Any,
) -> Transformation:
    def rate(count: Any) -> Any:
        return in_float32(lr / (1.0 + lambd * lr * count) ** alpha)

    return framed(optax.add_decayed_weights(lambd), rate, weight_decay=weight_decay, maximize=maximize)


def _rprop(
    *,
    lr: Any,
    etas: tuple[Any, Any],
    step_sizes: tuple[Any, Any],
    maximize: Any,
) -> Transformation:
    smallest, largest = step_sizes
    inner = optax.scale_by_rprop(
        jnp.clip(lr, smallest, largest), etas[0], etas[1], min_step_size=smallest, max_step_size=largest
    )
    core = updates_from_state(inner, lambda gradients, updates, state: state.prev_updates)
    return framed(core, 1.0, maximize=maximize)


SGD = Counterpart(
    "SGD",
    "trace, add_decayed_weights",
    (
        "dampening, which torch applies from the second gradient on and optax does not have",
        "decay and maximize, which optax.sgd does not have",
    ),
    "torch/optim/sgd.py _single_tensor_sgd; optax/transforms/_accumulation.py trace",
    _sgd,
    (
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.8, "dampening": 0.3},
        {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1, "maximize": True},
        {"maximize": True},
    ),
    ("single", "foreach", "fused"),
)
ASGD = Counterpart(
    "ASGD",
    "add_decayed_weights, scale_by_learning_rate with a schedule",
    (
        "no class in optax: decay by lambd, and a rate lr / (1 + lambd lr t)**alpha",
        "torch keeps the rate in float32, also for float64 parameters; foreach computes it in float32, too",
    ),
    "torch/optim/asgd.py _single_tensor_asgd; optax/_src/transform.py scale_by_schedule",
    _asgd,
    ({}, {"lambd": 0.1, "alpha": 0.5}, {"weight_decay": 0.1, "lambd": 0.05}, {"maximize": True}),
    outside="the average `ax`, which no step reads",
    scalars={"foreach": 2.0**-24},
)
RPROP = Counterpart(
    "Rprop",
    "scale_by_rprop",
    (
        "optax 0.2.8 returns the update of the step before: its state has that of this step",
        "torch clamps the first step size to step_sizes, optax does not",
    ),
    "torch/optim/rprop.py _single_tensor_rprop; optax/_src/transform.py scale_by_rprop",
    _rprop,
    ({}, {"etas": (0.4, 1.5)}, {"lr": 0.3, "step_sizes": (0.01, 0.2)}, {"maximize": True}),
)
