"""What a zero gradient does that None does not: one record for each optimizer of `torch.optim`.

An optimizer skips a parameter whose gradient is None. A zero gradient is a gradient: averages
decay, counters rise, and what is left of the momentum moves the parameter. A record has the
optimizer's step from the published algorithm; everything else, the table of the report included,
follows from it.

A step takes a parameter, its state, its gradient and the optimizer's settings, and returns the
parameter and the state afterwards. Elements of arrays are `Rounded` numbers, which bound the
rounding errors of torch. Must not import torch.

Sources: the algorithms printed in the documentation of `torch.optim`, and the papers that it cites.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

Exact = npt.NDArray[np.object_]
State = dict[str, Any]
Settings = Mapping[str, Any]

MOMENTUM_BASE = Decimal.from_float(0.96)
"""What NAdam's momentum coefficients are powers of, as torch has it."""
LEAST_CURVATURE = Decimal.from_float(1e-10)
"""The least product of two differences that L-BFGS keeps, as torch has it."""
EPS1 = Decimal(2) ** -52
"""The machine epsilon of float64: Adafactor's least second moment is its square, if no other is given."""


def _coupled(theta: Exact, g: Exact, s: Settings) -> Exact:
    """Return the gradient with the sign of the objective and the weight decay that is a part of it."""
    g = -g if s.get("maximize") else g
    return g + s["weight_decay"] * theta if s.get("weight_decay") else g


def _largest(a: Any, b: Any) -> Any:
    """Return the larger number."""
    return a if a > b else b


def _root_mean_square(x: Exact) -> Any:
    """Return the root of the mean of squares."""
    return ((x * x).sum() / x.size) ** Decimal("0.5")


def _count(state: State) -> int:
    return int(state.get("step", 0)) + 1


def _zeros(theta: Exact) -> Exact:
    return theta * 0


def _sgd(theta: Exact, state: State, g: Exact, s: Settings) -> tuple[Exact, State]:
    """Stochastic gradient descent; the first momentum buffer is the gradient itself."""
    g, mu = _coupled(theta, g, s), s["momentum"]
    if not mu:
        return theta - s["lr"] * g, {}
    buffer = (
        g
        if "momentum_buffer" not in state
        else mu * state["momentum_buffer"] + (1 - s["dampening"]) * g
    )
    return theta - s["lr"] * (g + mu * buffer if s["nesterov"] else buffer), {
        "momentum_buffer": buffer
    }


def _moments(theta: Exact, state: State, g: Exact, s: Settings) -> tuple[int, Any, Any, State]:
    """Return the step, both betas, and the moving averages of the gradient and its square."""
    beta1, beta2 = s["betas"]
    kept = {
        "step": _count(state),
        "exp_avg": beta1 * state.get("exp_avg", _zeros(theta)) + (1 - beta1) * g,
        "exp_avg_sq": beta2 * state.get("exp_avg_sq", _zeros(theta)) + (1 - beta2) * g * g,
    }
    return kept["step"], beta1, beta2, kept


def _decayed(theta: Exact, g: Exact, s: Settings) -> tuple[Exact, Exact]:
    """Return parameter and gradient after weight decay."""
    if not s["decoupled_weight_decay"]:
        return theta, _coupled(theta, g, s)
    return theta * (1 - s["lr"] * s["weight_decay"]), -g if s.get("maximize") else g


def _adam(theta: Exact, state: State, g: Exact, s: Settings) -> tuple[Exact, State]:
    """Adam; AdamW where `decoupled_weight_decay` is set."""
    theta, g = _decayed(theta, g, s)
    t, beta1, beta2, kept = _moments(theta, state, g, s)
    square = kept["exp_avg_sq"]
    if s["amsgrad"]:
        square = kept["max_exp_avg_sq"] = np.maximum(
            state.get("max_exp_avg_sq", _zeros(theta)), square
        )
    root = np.sqrt(square) / ((1 - beta2**t) ** Decimal("0.5")) + s["eps"]
    return theta - s["lr"] / (1 - beta1**t) * kept["exp_avg"] / root, kept


def _sparse_adam(theta: Exact, state: State, g: Exact, s: Settings) -> tuple[Exact, State]:
    """Adam on the elements that the gradient has, None elsewhere.

    Epsilon joins the root before its correction.
    """
    touched = np.array([[x is not None for x in row] for row in g])
    t, beta1, beta2, new = _moments(theta, state, np.where(touched, g, 0), s)
    rate = s["lr"] * (1 - beta2**t) ** Decimal("0.5") / (1 - beta1**t)
    after = theta - rate * (new["exp_avg"] / (np.sqrt(new["exp_avg_sq"]) + s["eps"]))
    old = {name: state.get(name, _zeros(theta)) for name in ("exp_avg", "exp_avg_sq")}
    kept = {name: np.where(touched, new[name], value) for name, value in old.items()}
    return np.where(touched, after, theta), {"step": t, **kept}


def _adamax(theta: Exact, state: State, g: Exact, s: Settings) -> tuple[Exact, State]:
    """Adam with an infinity norm."""
    g, (beta1, beta2), t = _coupled(theta, g, s), s["betas"], _count(state)
    average = beta1 * state.get("exp_avg", _zeros(theta)) + (1 - beta1) * g
    norm = np.maximum(beta2 * state.get("exp_inf", _zeros(theta)), np.abs(g) + s["eps"])
    return theta - s["lr"] / (1 - beta1**t) * average / norm, {
        "step": t,
        "exp_avg": average,
        "exp_inf": norm,
    }


def _nadam(theta: Exact, state: State, g: Exact, s: Settings) -> tuple[Exact, State]:
    """Adam with Nesterov momentum, whose coefficients change with the step."""
    theta, g = _decayed(theta, g, s)
    t, beta1, beta2, kept = _moments(theta, state, g, s)
    base, half = MOMENTUM_BASE, Decimal("0.5")
    now, then = (beta1 * (1 - half * base ** (i * s["momentum_decay"])) for i in (t, t + 1))
    product = kept["mu_product"] = state.get("mu_product", 1) * now
    root = np.sqrt(kept["exp_avg_sq"] / (1 - beta2**t)) + s["eps"]
    move = (1 - now) / (1 - product) * g + then / (1 - product * then) * kept["exp_avg"]
    return theta - s["lr"] * move / root, kept


def _radam(theta: Exact, state: State, g: Exact, s: Settings) -> tuple[Exact, State]:
    """Adam whose adaptive rate starts once its variance is tractable."""
    theta, g = _decayed(theta, g, s)
    t, beta1, beta2, kept = _moments(theta, state, g, s)
    longest, short = 2 / (1 - beta2) - 1, 1 - beta2**t
    length = longest - 2 * t * beta2**t / short
    move = kept["exp_avg"] / (1 - beta1**t)
    if length > 5:
        part = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        move = (
            move
            * part ** Decimal("0.5")
            * short ** Decimal("0.5")
            / (np.sqrt(kept["exp_avg_sq"]) + s["eps"])
        )
    return theta - s["lr"] * move, kept


def _rmsprop(theta: Exact, state: State, g: Exact, s: Settings) -> tuple[Exact, State]:
    """The gradient over the root of a moving average of its square."""
    g, a = _coupled(theta, g, s), s["alpha"]
    square = a * state.get("square_avg", _zeros(theta)) + (1 - a) * g * g
    kept: State = {"step": _count(state), "square_avg": square}
    if s["centered"]:
        kept["grad_avg"] = a * state.get("grad_avg", _zeros(theta)) + (1 - a) * g
        square = square - kept["grad_avg"] * kept["grad_avg"]
    move = g / (np.sqrt(square) + s["eps"])
    if s["momentum"]:
        move = kept["momentum_buffer"] = (
            s["momentum"] * state.get("momentum_buffer", _zeros(theta)) + move
        )
    return theta - s["lr"] * move, kept


def _adagrad(theta: Exact, state: State, g: Exact, s: Settings) -> tuple[Exact, State]:
    """The gradient over the root of the sum of all squares."""
    g, t = _coupled(theta, g, s), _count(state)
    total = state.get("sum", _zeros(theta) + s["initial_accumulator_value"]) + g * g
    move = g / (np.sqrt(total) + s["eps"])
    return theta - s["lr"] / (1 + (t - 1) * s["lr_decay"]) * move, {"step": t, "sum": total}


def _adadelta(theta: Exact, state: State, g: Exact, s: Settings) -> tuple[Exact, State]:
    """The gradient times the root of a moving average of squared moves, over that of squared
    gradients.
    """
    g, rho, eps = _coupled(theta, g, s), s["rho"], s["eps"]
    square = rho * state.get("square_avg", _zeros(theta)) + (1 - rho) * g * g
    moves = state.get("acc_delta", _zeros(theta))
    move = np.sqrt(moves + eps) / np.sqrt(square + eps) * g
    kept = {
        "step": _count(state),
        "square_avg": square,
        "acc_delta": rho * moves + (1 - rho) * move * move,
    }
    return theta - s["lr"] * move, kept


def _asgd(theta: Exact, state: State, g: Exact, s: Settings) -> tuple[Exact, State]:
    """Decay by `lambd`, a step of a falling rate, and an average of the parameters from step `t0`
    on.
    """
    g, t, eta = _coupled(theta, g, s), _count(state), state.get("eta", s["lr"])
    theta = theta * (1 - s["lambd"] * eta) - eta * g
    average, mu = state.get("ax", _zeros(theta)), state.get("mu", 1)
    ax = average + mu * (theta - average) if mu < 1 else theta
    eta = s["lr"] / (1 + s["lambd"] * s["lr"] * t) ** s["alpha"]
    return theta, {"step": t, "ax": ax, "eta": eta, "mu": 1 / _largest(t - s["t0"], Decimal(1))}


def _rprop(theta: Exact, state: State, g: Exact, s: Settings) -> tuple[Exact, State]:
    """The sign of the gradient times a step size, which grows while the sign stays and shrinks when
    it turns.
    """
    g = _coupled(theta, g, s)
    (minus, plus), (low, high) = s["etas"], s["step_sizes"]
    agree = g * state.get("prev", _zeros(theta))
    factor = np.where(agree > 0, plus, np.where(agree < 0, minus, 1))
    size = np.clip(state.get("step_size", _zeros(theta) + s["lr"]) * factor, low, high)
    g = np.where(agree < 0, g * 0, g)
    sign = np.where(g > 0, 1, np.where(g < 0, -1, 0))
    return theta - sign * size, {"step": _count(state), "prev": g, "step_size": size}


def _adafactor(theta: Exact, state: State, g: Exact, s: Settings) -> tuple[Exact, State]:
    """The gradient over the root of its second moment, factored for matrices, limited in its root
    mean square.
    """
    g, t = -g if s.get("maximize") else g, _count(state)
    weight = Decimal(t) ** s["beta2_decay"]
    rate = _largest(s["eps"][1], _root_mean_square(theta)) * -_largest(
        -s["lr"], -1 / Decimal(t) ** Decimal("0.5")
    )
    theta = theta * (1 - s["lr"] * s["weight_decay"])

    def average(name: str, now: Exact) -> Exact:
        return state.get(name, now * 0) * (1 - weight) + weight * now

    if theta.ndim > 1:
        # torch squares a norm, which rounds where a sum of squares does not
        kept = {name: average(name, np.sqrt((g * g).sum(axis, keepdims=True)) ** 2 / g.shape[axis])
                for name, axis in (("row_var", -1), ("col_var", -2))}  # fmt: skip
        estimate = (
            kept["row_var"] @ kept["col_var"] / _largest(kept["row_var"].sum() / g.shape[-2], EPS1)
        )
    else:
        estimate = average("variance", g * g)
        kept = {"variance": estimate}
    move = g / np.sqrt(np.maximum(estimate, np.full_like(estimate, EPS1 * EPS1)))
    limit = _largest(1, _root_mean_square(move) / s["d"])
    return theta - rate / limit * move, {"step": t, **kept}


def _newton_schulz(x: Exact, s: Settings) -> Exact:
    """Return the matrix that Muon moves along: the iteration drives all singular values towards 1."""
    a, b, c = s["ns_coefficients"]
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / _largest(((x * x).sum()) ** Decimal("0.5"), s["eps"])
    for _ in range(s["ns_steps"]):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


def _muon(theta: Exact, state: State, g: Exact, s: Settings) -> tuple[Exact, State]:
    """Momentum whose singular values are driven towards 1.

    The parameters here are square matrices.
    """
    mu = s["momentum"]
    buffer = mu * state.get("momentum_buffer", _zeros(theta)) + (1 - mu) * g
    move = _newton_schulz((1 - mu) * g + mu * buffer if s["nesterov"] else buffer, s)
    return theta * (1 - s["lr"] * s["weight_decay"]) - s["lr"] * move, {"momentum_buffer": buffer}


def _lbfgs(theta: Exact, state: State, g: Exact, s: Settings) -> tuple[Exact, State]:
    """One iteration of L-BFGS without a line search, by the two-loop recursion (Nocedal and Wright,
    algorithm 7.4).
    """
    t = int(state.get("n_iter", 0)) + 1
    kept: State = {"n_iter": t, "func_evals": t, "prev_flat_grad": g}
    if t == 1:
        d, rate = -g, -_largest(Decimal(-1), -1 / np.abs(g).sum()) * s["lr"]
        kept |= {"old_dirs": [], "old_stps": [], "ro": [], "H_diag": 1}
    else:
        dirs, steps, ro, h = (state[name] for name in ("old_dirs", "old_stps", "ro", "H_diag"))
        y, moved, rate = g - state["prev_flat_grad"], state["d"] * state["t"], s["lr"]
        if (curvature := (y * moved).sum()) > LEAST_CURVATURE:
            dirs, steps, ro, h = (
                [*dirs, y],
                [*steps, moved],
                [*ro, 1 / curvature],
                curvature / (y * y).sum(),
            )
        d, al = -g, list[Any]()
        for y, moved, r in reversed(list(zip(dirs, steps, ro, strict=True))):
            al.insert(0, (moved * d).sum() * r)
            d = d - al[0] * y
        d = d * h
        for y, moved, r, a in zip(dirs, steps, ro, al, strict=True):
            d = d + moved * (a - (y * d).sum() * r)
        kept |= {"old_dirs": dirs, "old_stps": steps, "ro": ro, "H_diag": h}
    return theta + rate * d, {**kept, "d": d, "t": rate}


PLAIN, MOMENTUM, DECAY, DEFAULTS = "plain", "momentum", "weight decay", "torch's defaults"


@dataclass(frozen=True)
class Law:
    """One optimizer.

    Attributes:
        optimizer: name of the class in `torch.optim`.
        step: one step, as a recurrence.
        zero: what one zero gradient does, as formulas.
        variants: name -> settings that differ from torch's defaults. Dyadic settings make more
            operations exact.
        sparse: whether it takes sparse gradients only. Zeroing leaves no element of such a
            gradient.
        reads_none_as_zero: whether None is not skipped.
        of: what is trained, where a parameter of that shape has another state: "vector"; "" for a
            matrix.
    """

    optimizer: str
    step: Callable[..., tuple[Any, dict[str, Any]]]
    zero: str
    variants: Mapping[str, Settings]
    sparse: bool = False
    reads_none_as_zero: bool = False
    of: str = ""

    @property
    def name(self) -> str:
        """The class, and the shape of the parameter where it has laws for several."""
        return f"{self.optimizer} of a {self.of}" if self.of else self.optimizer


RATE = 2.0**-4
DYADIC = {"lr": RATE, "weight_decay": 0.0}
BETAS = {**DYADIC, "betas": (0.5, 0.75)}


def _variants(
    plain: Settings, momentum: Settings | None = None, **others: Settings
) -> dict[str, Settings]:
    """Return variants: plain, with momentum and with weight decay where the optimizer has them,
    defaults, others.
    """
    found = {PLAIN: plain} | ({} if momentum is None else {MOMENTUM: {**plain, **momentum}})
    found |= {DECAY: {**plain, "weight_decay": 0.125}} if "weight_decay" in plain else {}
    found |= {} if plain is ORTHOGONAL else {DEFAULTS: {}}
    return found | {name: {**plain, **settings} for name, settings in others.items()}


HALF_MOMENTUM = {"momentum": 0.5}
ORTHOGONAL = {**DYADIC, **HALF_MOMENTUM, "ns_coefficients": (1.5, -0.5, 0.0), "ns_steps": 1}
"""Settings under which Muon's iteration, which runs in bfloat16, is exact on small dyadic orthogonal matrices."""
ADAFACTOR = Law(
    "Adafactor", _adafactor, "R, C <- (1 - step^beta2_decay) R, C, step + 1",
    _variants(DYADIC))  # fmt: skip
LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law("Adadelta", _adadelta, "v <- rho v, u <- rho u, step + 1",
            _variants({**DYADIC, "rho": 0.75})),
        ADAFACTOR,
        replace(ADAFACTOR, zero="V <- (1 - step^beta2_decay) V, step + 1", of="vector"),
        Law("Adagrad", _adagrad, "step + 1, which lr_decay reads",
            _variants({**DYADIC}, falling={"lr_decay": 0.5}, filled={"initial_accumulator_value": 0.5})),
        Law("Adam", _adam,
            "m <- beta1 m, v <- beta2 v, step + 1; p - lr m' / (sqrt(v') + eps), of the corrected m and v",
            _variants(BETAS, amsgrad={"amsgrad": True}, maximize={"maximize": True, "weight_decay": 0.125})),
        Law("AdamW", _adam,
            "as Adam, after p <- (1 - lr weight_decay) p",
            _variants(BETAS, amsgrad={"amsgrad": True})),
        Law("Adamax", _adamax,
            "m <- beta1 m, u <- max(beta2 u, eps), step + 1; p - lr m / ((1 - beta1^step) u)", _variants(BETAS)),
        Law("ASGD", _asgd,
            "p <- (1 - lambd eta) p, ax <- ax + mu (p - ax); eta and mu fall, step + 1",
            _variants({**DYADIC, "lambd": 0.5}, averaged={"t0": 1.0})),
        Law("LBFGS", _lbfgs,
            "a zero in the flat gradient, as None is: p moves along the direction of all parameters",
            {PLAIN: {"lr": 0.5, "max_iter": 1}, DEFAULTS: {"max_iter": 1}}, reads_none_as_zero=True),
        Law("Muon", _muon,
            "b <- momentum b; p - lr O(b), where O drives the singular values towards 1 unless b is far below eps",
            _variants(ORTHOGONAL, standard={"nesterov": False})),
        Law("NAdam", _nadam,
            "m <- beta1 m, v <- beta2 v, mu_product and step go on; p - lr mu m' / (sqrt(v') + eps)",
            _variants(BETAS, decoupled={"decoupled_weight_decay": True, "weight_decay": 0.125})),
        Law("RAdam", _radam,
            "m <- beta1 m, v <- beta2 v, step + 1; p - lr m', rectified and over sqrt(v) + eps later on",
            _variants({**BETAS, "betas": (0.5, 0.9375)},
                      decoupled={"decoupled_weight_decay": True, "weight_decay": 0.125})),
        Law("RMSprop", _rmsprop,
            "v <- alpha v, step + 1; with momentum b <- momentum b, p - lr b",
            _variants({**DYADIC, "alpha": 0.75}, HALF_MOMENTUM, centered={"centered": True, **HALF_MOMENTUM})),
        Law("Rprop", _rprop,
            "prev <- 0, step + 1: the next gradient counts as one whose sign has not turned", {
                PLAIN: {"lr": RATE, "etas": (0.5, 1.25), "step_sizes": (0.03125, 0.25)}, DEFAULTS: {}}),
        Law("SGD", _sgd, "with momentum b <- momentum b, p - lr b",
            _variants(DYADIC, HALF_MOMENTUM, nesterov={**HALF_MOMENTUM, "nesterov": True},
                      dampened={**HALF_MOMENTUM, "dampening": 0.25, "weight_decay": 0.125},
                      maximize={**HALF_MOMENTUM, "maximize": True})),
        Law("SparseAdam", _sparse_adam,
            "step + 1 alone: a zeroed sparse gradient has no element",
            {PLAIN: {"lr": RATE, "betas": (0.5, 0.75)}, DEFAULTS: {}}, sparse=True),
    )
}  # fmt: skip
"""The record of each optimizer by the name of its class; Adafactor has a second one, of a vector."""
