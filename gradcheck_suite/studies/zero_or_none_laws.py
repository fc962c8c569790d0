"""One step of each optimizer of `torch.optim`, from the published algorithm, in exact numbers.

A function takes a parameter, its state, its gradient and the optimizer's settings, and returns the parameter and the
state after the step. Arrays have elements of any number type with + - * / ** sqrt and comparisons: `Decimal`, or
`Rounded`, which bounds the rounding errors of torch. Must not import torch.

Sources: the algorithms printed in the documentation of `torch.optim`, and the papers that it cites.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import reduce
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.object_]
State = dict[str, Any]
Settings = Mapping[str, Any]

MOMENTUM_BASE = Decimal.from_float(0.96)
"""What NAdam's momentum coefficients are powers of, as torch has it."""
LEAST_CURVATURE = Decimal.from_float(1e-10)
"""The least product of two differences that L-BFGS keeps, as torch has it."""
EPS1 = Decimal(2) ** -52
"""The machine epsilon of float64: Adafactor's least second moment is its square, if no other is given."""


def coupled(theta: Array, g: Array, s: Settings) -> Array:
    """Return the gradient with the sign of the objective and the weight decay that is a part of it."""
    g = -g if s.get("maximize") else g
    return g + s["weight_decay"] * theta if s.get("weight_decay") else g


def largest(a: Any, b: Any) -> Any:
    """Return the larger number."""
    return a if a > b else b


def root_mean_square(x: Array) -> Any:
    """Return the root of the mean of squares."""
    return ((x * x).sum() / x.size) ** Decimal("0.5")


def _count(state: State) -> int:
    return int(state.get("step", 0)) + 1


def _zeros(theta: Array) -> Array:
    return theta * 0


def recurrences_sgd(theta: Array, state: State, g: Array, s: Settings) -> tuple[Array, State]:
    """Stochastic gradient descent; the first momentum buffer is the gradient itself."""
    g, mu = coupled(theta, g, s), s["momentum"]
    if not mu:
        return theta - s["lr"] * g, {}
    buffer = g if "momentum_buffer" not in state else mu * state["momentum_buffer"] + (1 - s["dampening"]) * g
    return theta - s["lr"] * (g + mu * buffer if s["nesterov"] else buffer), {"momentum_buffer": buffer}


def _moments(theta: Array, state: State, g: Array, s: Settings) -> tuple[int, Any, Any, State]:
    """Return the step, both betas, and the moving averages of the gradient and its square."""
    beta1, beta2 = s["betas"]
    kept = {
        "step": _count(state),
        "exp_avg": beta1 * state.get("exp_avg", _zeros(theta)) + (1 - beta1) * g,
        "exp_avg_sq": beta2 * state.get("exp_avg_sq", _zeros(theta)) + (1 - beta2) * g * g,
    }
    return kept["step"], beta1, beta2, kept


def _decoupled(theta: Array, g: Array, s: Settings, *, decoupled: bool) -> tuple[Array, Array]:
    """Return parameter and gradient after weight decay."""
    if not decoupled:
        return theta, coupled(theta, g, s)
    return theta * (1 - s["lr"] * s["weight_decay"]), -g if s.get("maximize") else g


def recurrences_adam(theta: Array, state: State, g: Array, s: Settings) -> tuple[Array, State]:
    """Adam; AdamW where `decoupled_weight_decay` is set."""
    theta, g = _decoupled(theta, g, s, decoupled=s["decoupled_weight_decay"])
    t, beta1, beta2, kept = _moments(theta, state, g, s)
    square = kept["exp_avg_sq"]
    if s["amsgrad"]:
        square = kept["max_exp_avg_sq"] = np.maximum(state.get("max_exp_avg_sq", _zeros(theta)), square)
    root = np.sqrt(square) / ((1 - beta2**t) ** Decimal("0.5")) + s["eps"]
    return theta - s["lr"] / (1 - beta1**t) * kept["exp_avg"] / root, kept


def recurrences_sparse_adam(theta: Array, state: State, g: Array, s: Settings) -> tuple[Array, State]:
    """Adam on the elements that the gradient has, None elsewhere; epsilon joins the root before its correction."""
    touched = np.array([[x is not None for x in row] for row in g])
    t, beta1, beta2, new = _moments(theta, state, np.where(touched, g, 0), s)
    rate = s["lr"] * (1 - beta2**t) ** Decimal("0.5") / (1 - beta1**t)
    after = theta - rate * (new["exp_avg"] / (np.sqrt(new["exp_avg_sq"]) + s["eps"]))
    old = {name: state.get(name, _zeros(theta)) for name in ("exp_avg", "exp_avg_sq")}
    kept = {name: np.where(touched, new[name], value) for name, value in old.items()}
    return np.where(touched, after, theta), {"step": t, **kept}


def recurrences_adamax(theta: Array, state: State, g: Array, s: Settings) -> tuple[Array, State]:
    """Adam with an infinity norm."""
    g, (beta1, beta2), t = coupled(theta, g, s), s["betas"], _count(state)
    average = beta1 * state.get("exp_avg", _zeros(theta)) + (1 - beta1) * g
    norm = np.maximum(beta2 * state.get("exp_inf", _zeros(theta)), np.abs(g) + s["eps"])
    return theta - s["lr"] / (1 - beta1**t) * average / norm, {"step": t, "exp_avg": average, "exp_inf": norm}


def recurrences_nadam(theta: Array, state: State, g: Array, s: Settings) -> tuple[Array, State]:
    """Adam with Nesterov momentum, whose coefficients change with the step."""
    theta, g = _decoupled(theta, g, s, decoupled=s["decoupled_weight_decay"])
    t, beta1, beta2, kept = _moments(theta, state, g, s)
    base, half = MOMENTUM_BASE, Decimal("0.5")
    now, then = (beta1 * (1 - half * base ** (i * s["momentum_decay"])) for i in (t, t + 1))
    product = kept["mu_product"] = state.get("mu_product", 1) * now
    root = np.sqrt(kept["exp_avg_sq"] / (1 - beta2**t)) + s["eps"]
    move = (1 - now) / (1 - product) * g + then / (1 - product * then) * kept["exp_avg"]
    return theta - s["lr"] * move / root, kept


def recurrences_radam(theta: Array, state: State, g: Array, s: Settings) -> tuple[Array, State]:
    """Adam whose adaptive rate starts once its variance is tractable."""
    theta, g = _decoupled(theta, g, s, decoupled=s["decoupled_weight_decay"])
    t, beta1, beta2, kept = _moments(theta, state, g, s)
    longest, short = 2 / (1 - beta2) - 1, 1 - beta2**t
    length = longest - 2 * t * beta2**t / short
    move = kept["exp_avg"] / (1 - beta1**t)
    if length > 5:
        part = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        move = move * part ** Decimal("0.5") * short ** Decimal("0.5") / (np.sqrt(kept["exp_avg_sq"]) + s["eps"])
    return theta - s["lr"] * move, kept


def recurrences_rmsprop(theta: Array, state: State, g: Array, s: Settings) -> tuple[Array, State]:
    """The gradient over the root of a moving average of its square."""
    g, a = coupled(theta, g, s), s["alpha"]
    square = a * state.get("square_avg", _zeros(theta)) + (1 - a) * g * g
    kept: State = {"step": _count(state), "square_avg": square}
    if s["centered"]:
        kept["grad_avg"] = a * state.get("grad_avg", _zeros(theta)) + (1 - a) * g
        square = square - kept["grad_avg"] * kept["grad_avg"]
    move = g / (np.sqrt(square) + s["eps"])
    if s["momentum"]:
        move = kept["momentum_buffer"] = s["momentum"] * state.get("momentum_buffer", _zeros(theta)) + move
    return theta - s["lr"] * move, kept


def recurrences_adagrad(theta: Array, state: State, g: Array, s: Settings) -> tuple[Array, State]:
    """The gradient over the root of the sum of all squares."""
    g, t = coupled(theta, g, s), _count(state)
    total = state.get("sum", _zeros(theta) + s["initial_accumulator_value"]) + g * g
    move = g / (np.sqrt(total) + s["eps"])
    return theta - s["lr"] / (1 + (t - 1) * s["lr_decay"]) * move, {"step": t, "sum": total}


def recurrences_adadelta(theta: Array, state: State, g: Array, s: Settings) -> tuple[Array, State]:
    """The gradient times the root of a moving average of squared moves, over that of squared gradients."""
    g, rho, eps = coupled(theta, g, s), s["rho"], s["eps"]
    square = rho * state.get("square_avg", _zeros(theta)) + (1 - rho) * g * g
    moves = state.get("acc_delta", _zeros(theta))
    move = np.sqrt(moves + eps) / np.sqrt(square + eps) * g
    kept = {"step": _count(state), "square_avg": square, "acc_delta": rho * moves + (1 - rho) * move * move}
    return theta - s["lr"] * move, kept


def recurrences_asgd(theta: Array, state: State, g: Array, s: Settings) -> tuple[Array, State]:
    """Decay by `lambd`, a step of a falling rate, and an average of the parameters from step `t0` on."""
    g, t, eta = coupled(theta, g, s), _count(state), state.get("eta", s["lr"])
    theta = theta * (1 - s["lambd"] * eta) - eta * g
    average, mu = state.get("ax", _zeros(theta)), state.get("mu", 1)
    ax = average + mu * (theta - average) if mu < 1 else theta
    eta = s["lr"] / (1 + s["lambd"] * s["lr"] * t) ** s["alpha"]
    return theta, {"step": t, "ax": ax, "eta": eta, "mu": 1 / largest(t - s["t0"], Decimal(1))}


def recurrences_rprop(theta: Array, state: State, g: Array, s: Settings) -> tuple[Array, State]:
    """The sign of the gradient times a step size, which grows while the sign stays and shrinks when it turns."""
    g = coupled(theta, g, s)
    (minus, plus), (low, high) = s["etas"], s["step_sizes"]
    agree = g * state.get("prev", _zeros(theta))
    factor = np.where(agree > 0, plus, np.where(agree < 0, minus, 1))
    size = np.clip(state.get("step_size", _zeros(theta) + s["lr"]) * factor, low, high)
    g = np.where(agree < 0, g * 0, g)
    sign = np.where(g > 0, 1, np.where(g < 0, -1, 0))
    return theta - sign * size, {"step": _count(state), "prev": g, "step_size": size}


def recurrences_adafactor(theta: Array, state: State, g: Array, s: Settings) -> tuple[Array, State]:
    """The gradient over the root of its second moment, factored for matrices, limited in its root mean square."""
    g, t = -g if s.get("maximize") else g, _count(state)
    weight = Decimal(t) ** s["beta2_decay"]
    rate = largest(s["eps"][1], root_mean_square(theta)) * -largest(-s["lr"], -1 / Decimal(t) ** Decimal("0.5"))
    theta = theta * (1 - s["lr"] * s["weight_decay"])

    def average(name: str, now: Array) -> Array:
        return state.get(name, now * 0) * (1 - weight) + weight * now

    if theta.ndim > 1:
        # torch squares a norm, which rounds where a sum of squares does not
        kept = {name: average(name, np.sqrt((g * g).sum(axis, keepdims=True)) ** 2 / g.shape[axis])
                for name, axis in (("row_var", -1), ("col_var", -2))}  # fmt: skip
        estimate = kept["row_var"] @ kept["col_var"] / largest(kept["row_var"].sum() / g.shape[-2], EPS1)
    else:
        estimate = average("variance", g * g)
        kept = {"variance": estimate}
    move = g / np.sqrt(np.maximum(estimate, np.full_like(estimate, EPS1 * EPS1)))
    limit = largest(1, root_mean_square(move) / s["d"])
    return theta - rate / limit * move, {"step": t, **kept}


def newton_schulz(x: Array, s: Settings) -> Array:
    """Return the matrix that Muon moves along: the iteration drives all singular values towards 1."""
    a, b, c = s["ns_coefficients"]
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / largest(((x * x).sum()) ** Decimal("0.5"), s["eps"])
    for _ in range(s["ns_steps"]):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


def recurrences_muon(theta: Array, state: State, g: Array, s: Settings) -> tuple[Array, State]:
    """Momentum whose singular values are driven towards 1; the parameters here are square matrices."""
    mu = s["momentum"]
    buffer = mu * state.get("momentum_buffer", _zeros(theta)) + (1 - mu) * g
    move = newton_schulz((1 - mu) * g + mu * buffer if s["nesterov"] else buffer, s)
    return theta * (1 - s["lr"] * s["weight_decay"]) - s["lr"] * move, {"momentum_buffer": buffer}


def recurrences_lbfgs(theta: Array, state: State, g: Array, s: Settings) -> tuple[Array, State]:
    """One iteration of L-BFGS without a line search, by the two-loop recursion (Nocedal and Wright, algorithm 7.4)."""
    t = int(state.get("n_iter", 0)) + 1
    kept: State = {"n_iter": t, "func_evals": t, "prev_flat_grad": g}
    if t == 1:
        d, rate = -g, -largest(Decimal(-1), -1 / np.abs(g).sum()) * s["lr"]
        kept |= {"old_dirs": [], "old_stps": [], "ro": [], "H_diag": 1}
    else:
        dirs, steps, ro, h = (state[name] for name in ("old_dirs", "old_stps", "ro", "H_diag"))
        y, moved, rate = g - state["prev_flat_grad"], state["d"] * state["t"], s["lr"]
        if (curvature := (y * moved).sum()) > LEAST_CURVATURE:
            dirs, steps, ro, h = [*dirs, y], [*steps, moved], [*ro, 1 / curvature], curvature / (y * y).sum()
        d, al = -g, list[Any]()
        for y, moved, r in reversed(list(zip(dirs, steps, ro, strict=True))):
            al.insert(0, (moved * d).sum() * r)
            d = d - al[0] * y
        d = d * h
        for y, moved, r, a in zip(dirs, steps, ro, al, strict=True):
            d = d + moved * (a - (y * d).sum() * r)
        kept |= {"old_dirs": dirs, "old_stps": steps, "ro": ro, "H_diag": h}
    return theta + rate * d, {**kept, "d": d, "t": rate}


# What each optimizer's state and move are after n gradients, as explicit sums over all of them.
#
# The second way to every prediction, beside the recurrences: a moving average after n gradients is (1 - beta) sum
# beta^(n-i) g_i, a maximum is the largest of n discounted terms, L-BFGS is a dense matrix, and so on. A zero gradient
# is a term that vanishes, so that only powers of the decay rates are left. A function takes the gradients of all
# steps so far, with the coupled weight decay in them, the parameters before each of them, and the settings; it
# returns what the last step subtracts from the parameter, and the state. Must not import torch, nor the recurrences.


Gradients = Sequence[Array]
Moved = tuple[Array, dict[str, Any]]
SUMS_HALF = Decimal("0.5")


def weighted(terms: Sequence[Any], beta: Any) -> Any:
    """Return (1 - beta) sum over i of beta^(n-i) x_i."""
    n = len(terms)
    return (1 - beta) * sum(beta ** (n - i) * x for i, x in enumerate(terms, 1))


def _squares(gradients: Gradients) -> list[Array]:
    return [g * g for g in gradients]


def _prefixes(terms: Sequence[Any]) -> list[Sequence[Any]]:
    return [terms[: i + 1] for i in range(len(terms))]


def _largest(arrays: Sequence[Array]) -> Array:
    return reduce(np.maximum, arrays)


def _elementwise(function: Callable[..., Any], *arrays: Array) -> list[Array]:
    """Return the arrays of results of a function that returns several numbers for each element."""
    results = [function(*elements) for elements in zip(*(a.ravel() for a in arrays), strict=True)]
    return [np.array(column, dtype=object).reshape(arrays[0].shape) for column in zip(*results, strict=True)]


def sums_sgd(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
    """The first buffer is the gradient; dampening reduces all later ones."""
    n, mu = len(gradients), s["momentum"]
    if not mu:
        return s["lr"] * gradients[-1], {}
    later = sum(mu ** (n - i) * g for i, g in enumerate(gradients, 1) if i > 1)
    buffer = mu ** (n - 1) * gradients[0] + (1 - s["dampening"]) * later
    return s["lr"] * (gradients[-1] + mu * buffer if s["nesterov"] else buffer), {"momentum_buffer": buffer}


def _averages(gradients: Gradients, s: Mapping[str, Any]) -> tuple[int, Any, Any, dict[str, Any]]:
    beta1, beta2 = s["betas"]
    n = len(gradients)
    averages = {"exp_avg": weighted(gradients, beta1), "exp_avg_sq": weighted(_squares(gradients), beta2)}
    return n, 1 - beta1**n, 1 - beta2**n, {"step": n, **averages}


def sums_adam(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
    """Means that are corrected by the weight that they lack; `amsgrad` takes the largest mean square so far."""
    _, first, second, state = _averages(gradients, s)
    square = state["exp_avg_sq"]
    if s.get("amsgrad"):
        square = _largest([weighted(part, s["betas"][1]) for part in _prefixes(_squares(gradients))])
        state["max_exp_avg_sq"] = square
    return s["lr"] * (state["exp_avg"] / first) / (np.sqrt(square / second) + s["eps"]), state


def sums_sparse_adam(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
    """Sums over the gradients that an element has had, corrected by the number of all steps."""
    n, (beta1, beta2) = len(gradients), s["betas"]

    def one(*history: Any) -> tuple[Any, Any, Any]:
        present = [g for g in history if g is not None]
        mean, square = (weighted(x, beta) for x, beta in ((present, beta1), ([g * g for g in present], beta2)))
        if history[-1] is None:
            return Decimal(0), mean, square
        move = s["lr"] * (1 - beta2**n) ** SUMS_HALF / (1 - beta1**n) * mean / (square**SUMS_HALF + s["eps"])
        return move, mean, square

    move, mean, square = _elementwise(one, *gradients)
    return move, {"step": n, "exp_avg": mean, "exp_avg_sq": square}


def sums_adamax(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
    """The largest discounted gradient, each enlarged by epsilon."""
    n, (beta1, beta2) = len(gradients), s["betas"]
    norm = _largest([beta2 ** (n - i) * (np.abs(g) + s["eps"]) for i, g in enumerate(gradients, 1)])
    mean = weighted(gradients, beta1)
    return s["lr"] * mean / ((1 - beta1**n) * norm), {"step": n, "exp_avg": mean, "exp_inf": norm}


def sums_nadam(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
    """Momentum coefficients mu_i, and the product of all so far."""
    n, _, second, state = _averages(gradients, s)
    mu = [s["betas"][0] * (1 - Decimal.from_float(0.96) ** (i * s["momentum_decay"]) / 2) for i in range(1, n + 2)]
    state["mu_product"] = prod(mu[:n])
    mean = (1 - mu[n - 1]) * gradients[-1] / (1 - prod(mu[:n])) + mu[n] * state["exp_avg"] / (1 - prod(mu))
    return s["lr"] * mean / (np.sqrt(state["exp_avg_sq"] / second) + s["eps"]), state


def sums_radam(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
    """Plain momentum until the approximated length of the average exceeds 5."""
    n, first, second, state = _averages(gradients, s)
    beta2 = s["betas"][1]
    limit = (1 + beta2) / (1 - beta2)
    rho = limit - 2 * n * (1 - second) / second
    move = s["lr"] * state["exp_avg"] / first
    if rho > 5:
        rectified = ((rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho)) ** SUMS_HALF
        move = rectified * move * second**SUMS_HALF / (np.sqrt(state["exp_avg_sq"]) + s["eps"])
    return move, state


def sums_rmsprop(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
    """A sum of n scaled gradients, discounted by the momentum."""
    n, a = len(gradients), s["alpha"]

    def scaled(part: Gradients) -> Any:
        variance = weighted(_squares(part), a) - (weighted(part, a) ** 2 if s["centered"] else 0)
        return part[-1] / (np.sqrt(variance) + s["eps"])

    state: dict[str, Any] = {"step": n, "square_avg": weighted(_squares(gradients), a)}
    if s["centered"]:
        state["grad_avg"] = weighted(gradients, a)
    if not s["momentum"]:
        return s["lr"] * scaled(gradients), state
    parts = enumerate(_prefixes(gradients), 1)
    state["momentum_buffer"] = sum(s["momentum"] ** (n - i) * scaled(part) for i, part in parts)
    return s["lr"] * state["momentum_buffer"], state


def sums_adagrad(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
    """The sum of all squares."""
    n = len(gradients)
    total = s["initial_accumulator_value"] + sum(_squares(gradients))
    rate = s["lr"] / (1 + (n - 1) * s["lr_decay"])
    return rate * gradients[-1] / (np.sqrt(total) + s["eps"]), {"step": n, "sum": total}


def sums_adadelta(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
    """Each move is scaled by the average of the squares of all moves before it."""
    moves: list[Any] = []
    for part in _prefixes(gradients):
        before = weighted([m * m for m in moves], s["rho"])
        mean = weighted(_squares(part), s["rho"])
        moves.append(np.sqrt((before + s["eps"]) / (mean + s["eps"])) * part[-1])
    state = {"square_avg": mean, "acc_delta": weighted([m * m for m in moves], s["rho"])}
    return s["lr"] * moves[-1], {"step": len(moves), **state}


def asgd_rate(step: int, s: Mapping[str, Any]) -> Any:
    """Return the rate of a step, counted from 1."""
    return s["lr"] / (1 + s["lambd"] * s["lr"] * (step - 1)) ** s["alpha"]


def sums_asgd(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
    """The average is the mean of the parameters after step t0 + 1, or the last ones."""
    n = len(gradients)
    move = asgd_rate(n, s) * gradients[-1]
    after = [*thetas[1:], thetas[-1] * (1 - s["lambd"] * asgd_rate(n, s)) - move]
    averaged = after[int(s["t0"]) + 1 :] or after[-1:]
    mu = Decimal(1) / max(Decimal(1), n - s["t0"])
    return move, {"step": n, "ax": sum(averaged) / len(averaged), "eta": asgd_rate(n + 1, s), "mu": mu}


def sums_rprop(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
    """Element by element: three cases of the product of two signs."""
    (minus, plus), (low, high) = s["etas"], s["step_sizes"]

    def one(*history: Any) -> tuple[Any, Any, Any]:
        size, before, move = s["lr"], Decimal(0), Decimal(0)
        for g in history:
            if before * g < 0:
                size, g = max(size * minus, low), Decimal(0)
            elif before * g > 0:
                size = min(size * plus, high)
            move = size if g > 0 else -size if g < 0 else Decimal(0)
            before = g
        return move, before, size

    move, before, size = _elementwise(one, *gradients)
    return move, {"step": len(gradients), "prev": before, "step_size": size}


def sums_adafactor(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
    """The weight of square i after n steps: w_i times all later 1 - w_j, where w_1 = 1."""
    n, epsilon = len(gradients), Decimal(2) ** -52
    w = [Decimal(i) ** s["beta2_decay"] for i in range(1, n + 1)]
    weights = [w[i] * prod(1 - later for later in w[i + 1 :]) for i in range(n)]
    second = sum(weight * square for weight, square in zip(weights, _squares(gradients), strict=True))
    state: dict[str, Any] = {"step": n, "variance": second}
    if second.ndim > 1:
        # the averages over rows and columns are linear in the squares, so that they are those of the average
        rows, columns = second.mean(axis=-1, keepdims=True), second.mean(axis=-2, keepdims=True)
        state = {"step": n, "row_var": rows, "col_var": columns}
        second = rows * columns / max(second.mean(), epsilon)
    move = gradients[-1] / np.sqrt(np.maximum(second, np.full_like(second, epsilon**2)))
    length = ((thetas[-1] ** 2).mean()) ** SUMS_HALF
    rate = max(s["eps"][1], length) * min(s["lr"], 1 / Decimal(n) ** SUMS_HALF)
    return rate * move / max(Decimal(1), (move**2).mean() ** SUMS_HALF / s["d"]), state


def sums_muon(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
    """The odd polynomial of the iteration, multiplied from the right."""
    mu, (a, b, c) = s["momentum"], s["ns_coefficients"]
    buffer = weighted(gradients, mu)
    x = mu * buffer + (1 - mu) * gradients[-1] if s["nesterov"] else buffer
    x = x / max((x**2).sum() ** SUMS_HALF, s["eps"])
    for _ in range(s["ns_steps"]):
        right = x.T @ x
        x = x @ (a * _identity(len(x)) + b * right + c * (right @ right))
    return s["lr"] * x, {"momentum_buffer": buffer}


def _identity(size: int) -> Array:
    return np.array([[Decimal(i == j) for j in range(size)] for i in range(size)], dtype=object)


def sums_lbfgs(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
    """The inverse Hessian as a dense matrix, updated by each pair of differences (Nocedal and Wright, 6.17)."""
    n, g = len(gradients), gradients[-1].ravel()
    rates = [min(Decimal(1), 1 / np.abs(gradients[0]).sum()) * s["lr"], *[s["lr"]] * (n - 1)]
    every = [
        (gradients[i].ravel() - gradients[i - 1].ravel(), (thetas[i] - thetas[i - 1]).ravel()) for i in range(1, n)
    ]
    pairs = [(y, moved) for y, moved in every if y @ moved > Decimal.from_float(1e-10)]
    scale = pairs[-1][0] @ pairs[-1][1] / (pairs[-1][0] @ pairs[-1][0]) if pairs else Decimal(1)
    one = _identity(len(g))
    inverse = scale * one
    for y, moved in pairs:
        left = one - np.outer(moved, y) / (y @ moved)
        inverse = left @ inverse @ left.T + np.outer(moved, moved) / (y @ moved)
    d = (-inverse @ g).reshape(gradients[-1].shape)
    shape = d.shape
    state = {"n_iter": n, "func_evals": n, "prev_flat_grad": gradients[-1], "d": d, "t": rates[-1], "H_diag": scale,
             "old_dirs": [y.reshape(shape) for y, _ in pairs], "old_stps": [moved.reshape(shape) for _, moved in pairs],
             "ro": [1 / (y @ moved) for y, moved in pairs]}  # fmt: skip
    return -rates[-1] * d, state


# What a zero gradient does that None does not: one record for each optimizer of `torch.optim`.
#
# An optimizer skips a parameter whose gradient is None. A zero gradient is a gradient: averages decay, counters rise,
# and what is left of the momentum moves the parameter. A record names the optimizer and its two derivations.
# Everything else, the table of the report included, follows from them. Must not import torch.


PLAIN, MOMENTUM, DECAY, DEFAULTS = "plain", "momentum", "weight decay", "torch's defaults"


@dataclass(frozen=True)
class Law:
    """One optimizer.

    Attributes:
        optimizer: name of the class in `torch.optim`.
        step: one step, as a recurrence.
        sums: the last of n steps, as sums over all gradients.
        zero: what one zero gradient does, as formulas.
        variants: name -> settings that differ from torch's defaults. Dyadic settings make more operations exact.
        decoupled: whether weight decay shrinks the parameter, and is no part of the gradient.
        decay: (step from 1, settings) -> factor by which the step shrinks the parameter; None for weight decay alone.
        sparse: whether it takes sparse gradients only. Zeroing leaves no element of such a gradient.
        reads_none_as_zero: whether None is not skipped.
        of: what is trained, where a parameter of that shape has another state: "vector"; "" for a matrix.
    """

    optimizer: str
    step: Callable[..., tuple[Any, dict[str, Any]]]
    sums: Callable[..., tuple[Any, dict[str, Any]]]
    zero: str
    variants: Mapping[str, Settings]
    decoupled: bool = False
    decay: Callable[[int, Settings], Any] | None = None
    sparse: bool = False
    reads_none_as_zero: bool = False
    of: str = ""

    @property
    def name(self) -> str:
        """The class, and the shape of the parameter where it has laws for several."""
        return f"{self.optimizer} of a {self.of}" if self.of else self.optimizer

    def is_decoupled(self, settings: Settings) -> bool:
        """Whether weight decay is no part of the gradient under these settings."""
        return bool(self.decoupled or settings.get("decoupled_weight_decay"))

    def factor(self, step: int, settings: Settings) -> Any:
        """Return the factor by which a step shrinks the parameter."""
        if self.decay is not None:
            return self.decay(step, settings)
        return 1 - settings["lr"] * settings["weight_decay"] if self.is_decoupled(settings) else 1


RATE = 2.0**-4
DYADIC = {"lr": RATE, "weight_decay": 0.0}
BETAS = {**DYADIC, "betas": (0.5, 0.75)}


def _variants(plain: Settings, momentum: Settings | None = None, **others: Settings) -> dict[str, Settings]:
    """Return variants: plain, with momentum and with weight decay where the optimizer has them, defaults, others."""
    found = {PLAIN: plain} | ({} if momentum is None else {MOMENTUM: {**plain, **momentum}})
    found |= {DECAY: {**plain, "weight_decay": 0.125}} if "weight_decay" in plain else {}
    found |= {} if plain is ORTHOGONAL else {DEFAULTS: {}}
    return found | {name: {**plain, **settings} for name, settings in others.items()}


LAWS_HALF = {"momentum": 0.5}
ORTHOGONAL = {**DYADIC, **LAWS_HALF, "ns_coefficients": (1.5, -0.5, 0.0), "ns_steps": 1}
"""Settings under which Muon's iteration, which runs in bfloat16, is exact on small dyadic orthogonal matrices."""
ADAFACTOR = Law(
    "Adafactor", recurrences_adafactor, sums_adafactor, "R, C <- (1 - step^beta2_decay) R, C, step + 1",
    _variants(DYADIC), decoupled=True)  # fmt: skip
LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law("Adadelta", recurrences_adadelta, sums_adadelta, "v <- rho v, u <- rho u, step + 1",
            _variants({**DYADIC, "rho": 0.75})),
        ADAFACTOR,
        replace(ADAFACTOR, zero="V <- (1 - step^beta2_decay) V, step + 1", of="vector"),
        Law("Adagrad", recurrences_adagrad, sums_adagrad, "step + 1, which lr_decay reads",
            _variants({**DYADIC}, falling={"lr_decay": 0.5}, filled={"initial_accumulator_value": 0.5})),
        Law("Adam", recurrences_adam, sums_adam,
            "m <- beta1 m, v <- beta2 v, step + 1; p - lr m' / (sqrt(v') + eps), of the corrected m and v",
            _variants(BETAS, amsgrad={"amsgrad": True}, maximize={"maximize": True, "weight_decay": 0.125})),
        Law("AdamW", recurrences_adam, sums_adam,
            "as Adam, after p <- (1 - lr weight_decay) p",
            _variants(BETAS, amsgrad={"amsgrad": True})),
        Law("Adamax", recurrences_adamax, sums_adamax,
            "m <- beta1 m, u <- max(beta2 u, eps), step + 1; p - lr m / ((1 - beta1^step) u)", _variants(BETAS)),
        Law("ASGD", recurrences_asgd, sums_asgd,
            "p <- (1 - lambd eta) p, ax <- ax + mu (p - ax); eta and mu fall, step + 1",
            _variants({**DYADIC, "lambd": 0.5}, averaged={"t0": 1.0}),
            decay=lambda step, s: 1 - s["lambd"] * asgd_rate(step, s)),
        Law("LBFGS", recurrences_lbfgs, sums_lbfgs,
            "a zero in the flat gradient, as None is: p moves along the direction of all parameters",
            {PLAIN: {"lr": 0.5, "max_iter": 1}, DEFAULTS: {"max_iter": 1}}, reads_none_as_zero=True),
        Law("Muon", recurrences_muon, sums_muon,
            "b <- momentum b; p - lr O(b), where O drives the singular values towards 1, however small b is",
            _variants(ORTHOGONAL, standard={"nesterov": False}), decoupled=True),
        Law("NAdam", recurrences_nadam, sums_nadam,
            "m <- beta1 m, v <- beta2 v, mu_product and step go on; p - lr mu m' / (sqrt(v') + eps)",
            _variants(BETAS, decoupled={"decoupled_weight_decay": True, "weight_decay": 0.125})),
        Law("RAdam", recurrences_radam, sums_radam,
            "m <- beta1 m, v <- beta2 v, step + 1; p - lr m', rectified and over sqrt(v) + eps later on",
            _variants({**BETAS, "betas": (0.5, 0.9375)},
                      decoupled={"decoupled_weight_decay": True, "weight_decay": 0.125})),
        Law("RMSprop", recurrences_rmsprop, sums_rmsprop,
            "v <- alpha v, step + 1; with momentum b <- momentum b, p - lr b",
            _variants({**DYADIC, "alpha": 0.75}, LAWS_HALF, centered={"centered": True, **LAWS_HALF})),
        Law("Rprop", recurrences_rprop, sums_rprop,
            "prev <- 0, step + 1: the next gradient counts as one whose sign has not turned", {
                PLAIN: {"lr": RATE, "etas": (0.5, 1.25), "step_sizes": (0.03125, 0.25)}, DEFAULTS: {}}),
        Law("SGD", recurrences_sgd, sums_sgd, "with momentum b <- momentum b, p - lr b",
            _variants(DYADIC, LAWS_HALF, nesterov={**LAWS_HALF, "nesterov": True},
                      dampened={**LAWS_HALF, "dampening": 0.25, "weight_decay": 0.125},
                      maximize={**LAWS_HALF, "maximize": True})),
        Law("SparseAdam", recurrences_sparse_adam, sums_sparse_adam,
            "step + 1 alone: a zeroed sparse gradient has no element",
            {PLAIN: {"lr": RATE, "betas": (0.5, 0.75)}, DEFAULTS: {}}, sparse=True),
    )
}  # fmt: skip
"""The record of each optimizer by the name of its class; Adafactor has a second one, of a vector."""
