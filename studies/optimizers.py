"""Every optimizer of torch in optax: one record each.

Needs optax, which the extra `steps` installs. It judges steps alone: gradients are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

Settings = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Counterpart:
    """One optimizer of `torch.optim`, and the optax transformation that takes the same steps.

    Attributes:
        torch: name of the class in `torch.optim`.
        optax: the transformations that it is made of.
        differs: where the formulas differ by definition, one phrase each; `make` maps every one of
            them exactly.
        source: where the two formulas are written.
        make: settings by torch's names -> a transformation whose updates are added to the
            parameters. JAX traces them, but for those that are annotated as `bool` or `int`.
        variants: settings that are worth trying, beside the defaults; the first is none.
        implementations: torch's implementations of the step: some of `single`, `foreach` and
            `fused`.
        decoupled: whether decay always bypasses the direction; where a setting says so, False.
        coarse: (optax state after a step, settings) -> what a lower precision than that of the
            parameters does to each element of the update, as a bound; None where torch uses none.
        scalars: unit roundoff of the scalars of an update, for implementations that compute them in
            a lower precision.
    """

    torch: str
    optax: str
    differs: tuple[str, ...]
    source: str
    make: Callable[..., Any]
    variants: tuple[Settings, ...] = ({},)
    implementations: tuple[str, ...] = ("single", "foreach")
    outside: str | None = None
    decoupled: bool = False
    coarse: Callable[[Any, Settings], Any] | None = None
    scalars: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The class's name in lower case."""
        return self.torch.lower()


Transformation = Any
"""An `optax.GradientTransformationExtraArgs`; optax has no types that a checker reads."""
Rate = Any
"""A learning rate: a number, or a function of the number of steps before."""


def framed(
    core: optax.GradientTransformation,
    lr: Rate,
    *,
    weight_decay: Any = 0.0,
    decoupled: Any = False,
    maximize: Any = False,
) -> Transformation:
    """Return an optimizer's core between what torch does before and after it.

    Args:
        core: gradient -> direction.
        lr: the learning rate.
        weight_decay: factor of the parameters that is added to the gradient or, decoupled, to the
            direction.
        decoupled: 1 where the decay bypasses the core, else 0.
        maximize: 1 where the gradient is negated, before the decay is added, else 0.
    """
    return optax.chain(
        optax.scale(1.0 - 2.0 * maximize),
        optax.add_decayed_weights(weight_decay * (1.0 - decoupled)),
        core,
        optax.add_decayed_weights(weight_decay * decoupled),
        optax.scale_by_learning_rate(lr),
    )


def updates_from_state(
    inner: optax.GradientTransformation, update: Callable[[Any, Any, Any], Any]
) -> optax.GradientTransformation:
    """Return a transformation with the state of another one and updates of its own.

    Args:
        inner: keeps the moments.
        update: (gradients, updates of `inner`, its new state) -> updates.
    """

    def advance(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = inner.update(gradients, state, params)
        return update(gradients, updates, state), state

    return optax.GradientTransformation(inner.init, advance)


def per_leaf(function: Callable[..., jax.Array], *trees: Any) -> Any:
    """Apply a function to the corresponding leaves of some trees."""
    return jax.tree.map(function, *trees)


def corrected(decay: Any, count: Any) -> Any:
    """Return the bias correction of a moving average that began at zero, 1 - decay**count."""
    return 1.0 - jnp.asarray(decay, jnp.float64) ** count


def in_float32(value: Any) -> jax.Array:
    """Round to float32, in which torch keeps the scalars of a state whatever the dtype of the
    parameters.
    """
    return jnp.asarray(value).astype(jnp.float32).astype(jnp.float64)


# SGD, averaged SGD and resilient propagation.


def _sgd(
    *, lr: Any, momentum: Any, dampening: Any, weight_decay: Any, nesterov: Any, maximize: Any
) -> Transformation:
    trace = updates_from_state(
        optax.trace(decay=momentum, nesterov=True),
        lambda gradients, updates, state: per_leaf(
            lambda u, t: jnp.where(nesterov, u, t), updates, state.trace
        ),
    )
    dampened = optax.scale_by_schedule(lambda count: jnp.where(count == 0, 1.0, 1.0 - dampening))
    return framed(optax.chain(dampened, trace), lr, weight_decay=weight_decay, maximize=maximize)


def _asgd(*, lr: Any, lambd: Any, alpha: Any, weight_decay: Any, maximize: Any) -> Transformation:
    def rate(count: Any) -> Any:
        return in_float32(lr / (1.0 + lambd * lr * count) ** alpha)

    return framed(
        optax.add_decayed_weights(lambd), rate, weight_decay=weight_decay, maximize=maximize
    )


def _rprop(
    *, lr: Any, etas: tuple[Any, Any], step_sizes: tuple[Any, Any], maximize: Any
) -> Transformation:
    smallest, largest = step_sizes
    inner = optax.scale_by_rprop(
        jnp.clip(lr, smallest, largest),
        etas[0],
        etas[1],
        min_step_size=smallest,
        max_step_size=largest,
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
        (
            "torch keeps the rate in float32, also for float64 parameters; foreach computes it in"
            " float32, too"
        ),
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


# Adagrad, RMSprop and Adadelta: gradients divided by the root of a sum or an average of their
# squares.


def _adagrad(
    *,
    lr: Any,
    lr_decay: Any,
    weight_decay: Any,
    initial_accumulator_value: Any,
    eps: Any,
    maximize: Any,
) -> Transformation:
    def outside(update: jax.Array, squares: jax.Array) -> jax.Array:
        """Move epsilon out of the root: g / sqrt(s) becomes g / (sqrt(s) + eps)."""
        return update * (jnp.sqrt(squares) / (jnp.sqrt(squares) + eps))

    core = updates_from_state(
        optax.scale_by_rss(initial_accumulator_value, eps=0.0),
        lambda gradients, updates, state: per_leaf(outside, updates, state.sum_of_squares),
    )
    return framed(
        core,
        lambda count: lr / (1.0 + count * lr_decay),
        weight_decay=weight_decay,
        maximize=maximize,
    )


def _rmsprop(
    *,
    lr: Any,
    alpha: Any,
    eps: Any,
    weight_decay: Any,
    momentum: Any,
    centered: bool,
    maximize: Any,
) -> Transformation:
    scale = optax.scale_by_stddev if centered else optax.scale_by_rms
    core = optax.chain(scale(decay=alpha, eps=eps, eps_in_sqrt=False), optax.trace(decay=momentum))
    return framed(core, lr, weight_decay=weight_decay, maximize=maximize)


def _adadelta(*, lr: Any, rho: Any, eps: Any, weight_decay: Any, maximize: Any) -> Transformation:
    return framed(
        optax.scale_by_adadelta(rho=rho, eps=eps), lr, weight_decay=weight_decay, maximize=maximize
    )


ADAGRAD = Counterpart(
    "Adagrad",
    "scale_by_rss",
    (
        "epsilon outside the root in torch, inside in optax",
        "epsilon 1e-10 and an accumulator that begins at 0 in torch; 1e-7 and 0.1 in optax.adagrad",
        "lr_decay, which optax.adagrad does not have",
    ),
    "torch/optim/adagrad.py _single_tensor_adagrad; optax/_src/transform.py scale_by_rss",
    _adagrad,
    (
        {},
        {"lr_decay": 0.1, "initial_accumulator_value": 0.1},
        {"weight_decay": 0.1},
        {"maximize": True, "eps": 1e-2},
    ),
    ("single", "foreach", "fused"),
)
RMSPROP = Counterpart(
    "RMSprop",
    "scale_by_rms, scale_by_stddev, trace",
    (
        "epsilon outside the root in torch, inside by default in optax.rmsprop",
        "decay of the squares 0.99 in torch, 0.9 in optax.rmsprop",
        (
            "momentum before the learning rate in torch, after it in optax.rmsprop: the same while"
            " the rate stays"
        ),
    ),
    "torch/optim/rmsprop.py _single_tensor_rmsprop; optax/_src/transform.py scale_by_rms,"
    " scale_by_stddev",
    _rmsprop,
    (
        {},
        {"momentum": 0.9},
        {"centered": True, "alpha": 0.9},
        {"centered": True, "momentum": 0.5, "alpha": 0.9, "weight_decay": 0.1},
        {"weight_decay": 0.1, "maximize": True, "eps": 1e-2},
    ),
)
ADADELTA = Counterpart(
    "Adadelta",
    "scale_by_adadelta",
    ("the formulas are the same; optax.adadelta has no maximize",),
    "torch/optim/adadelta.py _single_tensor_adadelta; optax/_src/transform.py scale_by_adadelta",
    _adadelta,
    ({}, {"rho": 0.7, "lr": 0.5}, {"weight_decay": 0.1}, {"maximize": True}),
)


# Adam and its relatives: optax keeps the moments, and the direction follows torch's formula.


def _adam(
    *,
    lr: Any,
    betas: tuple[Any, Any],
    eps: Any,
    weight_decay: Any,
    amsgrad: bool,
    decoupled_weight_decay: Any,
    maximize: Any,
) -> Transformation:
    core = optax.scale_by_adam(*betas, eps=eps)
    if amsgrad:
        inner = optax.scale_by_amsgrad(*betas, bias_correction_nu=False)
        core = updates_from_state(inner, lambda g, u, s: _largest(betas, eps, s))
    return framed(
        core, lr, weight_decay=weight_decay, decoupled=decoupled_weight_decay, maximize=maximize
    )


def _largest(betas: tuple[Any, Any], eps: Any, state: Any) -> Any:
    """Correct the largest second moment by the present step's bias, not each by its own."""
    first, second = corrected(betas[0], state.count), corrected(betas[1], state.count)
    return per_leaf(lambda m, v: m / first / (jnp.sqrt(v / second) + eps), state.mu, state.nu_max)


def _adamax(
    *, lr: Any, betas: tuple[Any, Any], eps: Any, weight_decay: Any, maximize: Any
) -> Transformation:
    return framed(
        optax.scale_by_adamax(*betas, eps=eps), lr, weight_decay=weight_decay, maximize=maximize
    )


class _Products(NamedTuple):
    moments: Any
    product: jax.Array


def _scale_by_nadam(
    betas: tuple[Any, Any], eps: Any, momentum_decay: Any
) -> optax.GradientTransformation:
    """Return torch's Nesterov Adam on the moments of `scale_by_adam`: its momentum grows with the
    steps.
    """
    inner = optax.scale_by_adam(*betas)

    def momentum(count: Any) -> Any:
        return betas[0] * (1.0 - 0.5 * 0.96 ** (count * momentum_decay))

    def advance(gradients: Any, state: _Products, params: Any = None) -> tuple[Any, _Products]:
        _, moments = inner.update(gradients, state.moments, params)
        now, then = momentum(moments.count), momentum(moments.count + 1)
        product = in_float32(state.product * in_float32(now))
        of_gradient, of_mean = (1.0 - now) / (1.0 - product), then / (1.0 - product * then)
        second = corrected(betas[1], moments.count)

        def direction(g: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return (of_gradient * g + of_mean * m) / (jnp.sqrt(v / second) + eps)

        return per_leaf(direction, gradients, moments.mu, moments.nu), _Products(moments, product)

    return optax.GradientTransformation(
        lambda params: _Products(inner.init(params), jnp.ones(())), advance
    )


def _nadam(
    *,
    lr: Any,
    betas: tuple[Any, Any],
    eps: Any,
    weight_decay: Any,
    momentum_decay: Any,
    decoupled_weight_decay: Any,
    maximize: Any,
) -> Transformation:
    core = _scale_by_nadam(betas, eps, momentum_decay)
    return framed(
        core, lr, weight_decay=weight_decay, decoupled=decoupled_weight_decay, maximize=maximize
    )


def _radam(
    *,
    lr: Any,
    betas: tuple[Any, Any],
    eps: Any,
    weight_decay: Any,
    decoupled_weight_decay: Any,
    maximize: Any,
) -> Transformation:
    def outside(gradients: Any, updates: Any, state: Any) -> Any:
        """Add epsilon to the root before its bias correction: a factor of the rectified direction
        of optax.
        """
        second = jnp.sqrt(corrected(betas[1], state.count))
        length = 2.0 / (1.0 - betas[1]) - 1.0
        rectified = length - 2.0 * state.count * (1.0 - second**2) / second**2 > 5.0

        def of(update: jax.Array, v: jax.Array) -> jax.Array:
            root = jnp.sqrt(v)
            return jnp.where(rectified, update * ((root + eps * second) / (root + eps)), update)

        return per_leaf(of, updates, state.nu)

    core = updates_from_state(optax.scale_by_radam(*betas, eps=eps), outside)
    return framed(
        core, lr, weight_decay=weight_decay, decoupled=decoupled_weight_decay, maximize=maximize
    )


def _sparse_adam(*, lr: Any, betas: tuple[Any, Any], eps: Any, maximize: Any) -> Transformation:
    inner = optax.scale_by_adam(*betas)

    def advance(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        _, moved = inner.update(gradients, state, params)
        first, second = corrected(betas[0], moved.count), corrected(betas[1], moved.count)
        present = per_leaf(
            lambda g: (g != 0).any(tuple(range(1, g.ndim)), keepdims=True), gradients
        )
        mu = per_leaf(jnp.where, present, moved.mu, state.mu)
        nu = per_leaf(jnp.where, present, moved.nu, state.nu)

        def direction(rows: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.where(rows, jnp.sqrt(second) / first * m / (jnp.sqrt(v) + eps), 0.0)

        return per_leaf(direction, present, mu, nu), moved._replace(mu=mu, nu=nu)

    return framed(optax.GradientTransformation(inner.init, advance), lr, maximize=maximize)


_ALL = ("single", "foreach", "fused")
ADAM = Counterpart(
    "Adam",
    "scale_by_adam, scale_by_amsgrad",
    (
        (
            "amsgrad: the largest second moment is taken before its bias correction in torch, after"
            " it in optax.amsgrad"
        ),
        "decay coupled in torch's Adam; optax.adam has none",
    ),
    "torch/optim/adam.py _single_tensor_adam; optax/_src/transform.py scale_by_adam,"
    " scale_by_amsgrad",
    _adam,
    (
        {},
        {"betas": (0.5, 0.8), "eps": 1e-3},
        {"weight_decay": 0.1},
        {"amsgrad": True, "betas": (0.8, 0.6)},
        {"maximize": True, "weight_decay": 0.1},
    ),
    _ALL,
)
ADAMW = Counterpart(
    "AdamW",
    "scale_by_adam, add_decayed_weights",
    ("decay 0.01 in torch, 0.0001 in optax.adamw", "amsgrad as for Adam"),
    "torch/optim/adam.py _single_tensor_adam; optax/_src/alias.py adamw",
    _adam,
    ({}, {"weight_decay": 0.3}, {"amsgrad": True, "betas": (0.8, 0.6)}, {"maximize": True}),
    _ALL,
)
ADAMAX = Counterpart(
    "Adamax",
    "scale_by_adamax",
    ("the formulas are the same; optax.adamax has neither decay nor maximize",),
    "torch/optim/adamax.py _single_tensor_adamax; optax/_src/transform.py scale_by_adamax",
    _adamax,
    ({}, {"betas": (0.7, 0.8), "eps": 1e-3}, {"weight_decay": 0.1}, {"maximize": True}),
)
NADAM = Counterpart(
    "NAdam",
    "scale_by_adam",
    (
        "torch's momentum grows with the steps (momentum_decay); that of optax.nadam is constant",
        "torch keeps the product of momenta in float32, also for float64 parameters",
    ),
    "torch/optim/nadam.py _single_tensor_nadam; optax/_src/transform.py"
    " scale_by_adam(nesterov=True)",
    _nadam,
    (
        {},
        {"momentum_decay": 0.5, "betas": (0.7, 0.8)},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"maximize": True},
    ),
)
RADAM = Counterpart(
    "RAdam",
    "scale_by_radam",
    ("epsilon added to the root before its bias correction in torch, after it in optax",),
    "torch/optim/radam.py _single_tensor_radam; optax/_src/transform.py scale_by_radam",
    _radam,
    (
        {},
        {"betas": (0.8, 0.95), "eps": 1e-2},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"maximize": True},
    ),
)
SPARSE_ADAM = Counterpart(
    "SparseAdam",
    "scale_by_adam on the rows that have a gradient",
    (
        (
            "no class in optax: moments and parameters of other rows stay, while the step counts"
            " for all rows"
        ),
        "epsilon added to the root before its bias correction",
    ),
    "torch/optim/_functional.py sparse_adam; optax/_src/transform.py scale_by_adam",
    _sparse_adam,
    ({}, {"betas": (0.5, 0.8), "eps": 1e-3}, {"maximize": True}),
    ("single",),
)


# Adafactor, which keeps the second moment of a matrix as the product of two vectors.


def _over_matrices(function: Callable[..., Any], leaf: jax.Array) -> Callable[..., Any]:
    """Return a function of one matrix, applied to every matrix of the last two dimensions of a
    leaf.
    """
    for _ in range(leaf.ndim - 2):
        function = jax.vmap(function)
    return function


def _scale_by_factors(decay: Any, smallest: Any) -> optax.GradientTransformation:
    """Return torch's division by the factored second moment, on the moments of
    `scale_by_factored_rms`.
    """
    inner = optax.scale_by_factored_rms(
        decay_rate=decay,
        min_dim_size_to_factor=1,
        epsilon=0.0,
        decay_rate_fn=lambda step, exponent: (
            1.0 - (jnp.asarray(step, jnp.float64) + 1.0) ** exponent
        ),
    )

    def direction(gradient: jax.Array, state: Any) -> jax.Array:
        moment = state.v
        if gradient.ndim > 1:
            # the rows of optax are the means over the larger dimension, those of torch the means
            # over the last one
            wide = gradient.shape[-1] >= gradient.shape[-2]
            down, across = (state.v_row, state.v_col) if wide else (state.v_col, state.v_row)
            mean = jnp.maximum(down.mean(-1, keepdims=True), smallest)[..., None]
            moment = down[..., :, None] * across[..., None, :] / mean
        return gradient * jax.lax.rsqrt(jnp.maximum(moment, smallest**2))

    def init(params: Any) -> tuple[Any, ...]:
        return tuple(_over_matrices(inner.init, leaf)(leaf) for leaf in jax.tree.leaves(params))

    def advance(
        gradients: Any, states: tuple[Any, ...], params: Any = None
    ) -> tuple[Any, tuple[Any, ...]]:
        leaves, tree = jax.tree.flatten(gradients)
        moved = tuple(
            _over_matrices(lambda g, s: inner.update(g, s, g)[1], g)(g, s)
            for g, s in zip(leaves, states, strict=True)
        )
        return jax.tree.unflatten(tree, map(direction, leaves, moved)), moved

    return optax.GradientTransformation(init, advance)


def _adafactor(
    *, lr: Any, beta2_decay: Any, eps: tuple[Any, Any], d: Any, weight_decay: Any, maximize: Any
) -> Transformation:
    core = optax.chain(
        _scale_by_factors(beta2_decay, eps[0]),
        optax.clip_by_block_rms(d),
        optax.scale_by_param_block_rms(min_scale=eps[1]),
        optax.scale_by_schedule(lambda count: jnp.minimum(lr, 1.0 / jnp.sqrt(count + 1.0))),
    )
    # torch's decay is by lr, also where the step is shorter than lr
    return framed(core, 1.0, weight_decay=lr * weight_decay, decoupled=True, maximize=maximize)


ADAFACTOR = Counterpart(
    "Adafactor",
    "scale_by_factored_rms, clip_by_block_rms, scale_by_param_block_rms",
    (
        "torch bounds the second moment from below, optax adds epsilon to the squared gradient",
        (
            "torch factors every matrix of the last two dimensions; optax the two largest"
            " dimensions, if both reach 128"
        ),
        "the rate is at most 1 / sqrt(t) in torch",
        "optax computes the decay of the moments in float32, also for float64 parameters",
        "decay times lr in torch, alone in optax.adafactor",
    ),
    "torch/optim/_adafactor.py _single_tensor_adafactor; optax/_src/factorized.py"
    " scale_by_factored_rms",
    _adafactor,
    ({}, {"lr": 0.8, "d": 1.5}, {"weight_decay": 0.1, "beta2_decay": -0.5}, {"maximize": True}),
    decoupled=True,
)


# Muon: momentum, made orthogonal by Newton-Schulz iterations that torch computes in bfloat16.


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
        # optax adds epsilon to the norm, torch takes the larger of the two: this epsilon adds what
        # the norm lacks
        lacks = jnp.maximum(eps - jnp.linalg.norm(matrix), _TINY)
        # without a momentum of its own, since optax corrects its bias: this is the
        # orthogonalization alone
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
        mixed = (
            per_leaf(lambda g, m: (1.0 - momentum) * g + momentum * m, gradients, mean)
            if nesterov
            else mean
        )
        return per_leaf(orthogonal, mixed), (kept, mixed)

    core = optax.GradientTransformation(init, advance)
    return framed(core, lr, weight_decay=weight_decay, decoupled=1.0)


def _factor(rule: str | None, shape: tuple[int, ...]) -> float:
    """Return torch's factor of the learning rate for a matrix of some shape."""
    rows, columns = shape
    return (
        0.2 * float(max(rows, columns)) ** 0.5
        if rule == "match_rms_adamw"
        else max(1.0, rows / columns) ** 0.5
    )


def _newton_schulz(x: jax.Array, settings: Mapping[str, Any], errors: list[jax.Array]) -> Any:
    """Return the orthogonalization with errors added to its intermediate results, and the sizes of
    these errors.
    """
    a, b, c = settings["ns_coefficients"]
    given, sizes = iter(errors), []

    def rounded(value: jax.Array, magnitude: jax.Array, times: int = ROUNDINGS) -> jax.Array:
        sizes.append(times * UNIT * magnitude)
        return value + next(given)

    x = x / jnp.maximum(jnp.linalg.norm(x), settings["eps"])
    x = rounded(x, jnp.abs(x), 3)  # the conversion, the norm or epsilon, and the quotient
    for _ in range(settings["ns_steps"]):
        gram = rounded(x @ x.T, jnp.abs(x) @ jnp.abs(x).T)
        mixed = rounded(
            b * gram + c * gram @ gram,
            jnp.abs(b * gram) + jnp.abs(c) * jnp.abs(gram) @ jnp.abs(gram),
        )
        x = rounded(a * x + mixed @ x, jnp.abs(a * x) + jnp.abs(mixed) @ jnp.abs(x))
    return x, sizes


def _in_bfloat16(state: Any, settings: Mapping[str, Any]) -> Any:
    """Return what bfloat16 may do to each element of the update, to first order in its unit
    roundoff.
    """

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
        (
            "torch orthogonalizes in bfloat16, whatever the dtype of the parameters: the step is"
            " not continuous"
        ),
        (
            "optax corrects the bias of the momentum, which changes the share of the gradient under"
            " Nesterov"
        ),
        "torch bounds the norm by epsilon, optax adds epsilon",
    ),
    "torch/optim/_muon.py _single_tensor_muon; optax/contrib/_muon.py scale_by_muon",
    _muon,
    ({}, {"nesterov": False, "momentum": 0.5, "adjust_lr_fn": "match_rms_adamw"}),
    ("single",),
    decoupled=True,
    coarse=_in_bfloat16,
)


# L-BFGS without a line search: one iteration a step.


def _lbfgs(*, lr: Any, history_size: int) -> Transformation:
    def shortened(gradients: Any, updates: Any, state: Any) -> Any:
        """Divide the first step by the sum of absolute values, where optax divides by the norm."""
        total = optax.tree.sum(per_leaf(jnp.abs, gradients))
        first = state.count == 1
        return per_leaf(
            lambda g, u: jnp.where(first, g * jnp.minimum(1.0, 1.0 / total), u), gradients, updates
        )

    core = updates_from_state(optax.scale_by_lbfgs(memory_size=history_size), shortened)
    return optax.chain(core, optax.scale_by_learning_rate(lr))


LBFGS = Counterpart(
    "LBFGS",
    "scale_by_lbfgs",
    (
        (
            "torch shortens the first step by the sum of absolute values of the gradient, optax by"
            " its norm"
        ),
    ),
    "torch/optim/lbfgs.py step; optax/_src/transform.py scale_by_lbfgs",
    _lbfgs,
    ({"max_iter": 1, "lr": 0.5, "history_size": 3}, {"max_iter": 1, "lr": 0.1, "history_size": 3}),
    ("single",),
    outside=(
        "the line search, the tolerances, and pairs (y, s) with y·s at most 1e-10, which torch does"
        " not store"
    ),
)


COUNTERPARTS: dict[str, Counterpart] = {
    counterpart.name: counterpart
    for counterpart in (
        *(
            SGD,
            ASGD,
            RPROP,
            ADAGRAD,
            RMSPROP,
            ADADELTA,
            ADAM,
            ADAMW,
            ADAMAX,
            NADAM,
            RADAM,
            SPARSE_ADAM,
        ),
        *(ADAFACTOR, MUON, LBFGS),
    )
}
"""Every optimizer of `torch.optim` by the name of its class in lower case."""
