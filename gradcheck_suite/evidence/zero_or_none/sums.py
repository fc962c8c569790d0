"""What each optimizer's state and move are after n gradients, as explicit sums over all of them.

The second way to every prediction, beside the recurrences: a moving average after n gradients is
(1 - beta) sum beta^(n-i) g_i, a maximum is the largest of n discounted terms, L-BFGS is a dense matrix, and so on. A
zero gradient is a term that vanishes, so that only powers of the decay rates are left. A function takes the gradients
of all steps so far, with the coupled weight decay in them, the parameters before each of them, and the settings; it
returns what the last step subtracts from the parameter, and the state. Must not import torch, nor the recurrences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import reduce
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.object_]
Gradients = Sequence[Array]
Moved = tuple[Array, dict[str, Any]]
HALF = Decimal("0.5")


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


def sgd(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
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


def adam(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
    """Means that are corrected by the weight that they lack; `amsgrad` takes the largest mean square so far."""
    _, first, second, state = _averages(gradients, s)
    square = state["exp_avg_sq"]
    if s.get("amsgrad"):
        square = _largest([weighted(part, s["betas"][1]) for part in _prefixes(_squares(gradients))])
        state["max_exp_avg_sq"] = square
    return s["lr"] * (state["exp_avg"] / first) / (np.sqrt(square / second) + s["eps"]), state


def sparse_adam(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
    """Sums over the gradients that an element has had, corrected by the number of all steps."""
    n, (beta1, beta2) = len(gradients), s["betas"]

    def one(*history: Any) -> tuple[Any, Any, Any]:
        present = [g for g in history if g is not None]
        mean, square = (weighted(x, beta) for x, beta in ((present, beta1), ([g * g for g in present], beta2)))
        if history[-1] is None:
            return Decimal(0), mean, square
        move = s["lr"] * (1 - beta2**n) ** HALF / (1 - beta1**n) * mean / (square**HALF + s["eps"])
        return move, mean, square

    move, mean, square = _elementwise(one, *gradients)
    return move, {"step": n, "exp_avg": mean, "exp_avg_sq": square}


def adamax(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
    """The largest discounted gradient, each enlarged by epsilon."""
    n, (beta1, beta2) = len(gradients), s["betas"]
    norm = _largest([beta2 ** (n - i) * (np.abs(g) + s["eps"]) for i, g in enumerate(gradients, 1)])
    mean = weighted(gradients, beta1)
    return s["lr"] * mean / ((1 - beta1**n) * norm), {"step": n, "exp_avg": mean, "exp_inf": norm}


def nadam(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
    """Momentum coefficients mu_i, and the product of all so far."""
    n, _, second, state = _averages(gradients, s)
    mu = [s["betas"][0] * (1 - Decimal.from_float(0.96) ** (i * s["momentum_decay"]) / 2) for i in range(1, n + 2)]
    state["mu_product"] = prod(mu[:n])
    mean = (1 - mu[n - 1]) * gradients[-1] / (1 - prod(mu[:n])) + mu[n] * state["exp_avg"] / (1 - prod(mu))
    return s["lr"] * mean / (np.sqrt(state["exp_avg_sq"] / second) + s["eps"]), state


def radam(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
    """Plain momentum until the approximated length of the average exceeds 5."""
    n, first, second, state = _averages(gradients, s)
    beta2 = s["betas"][1]
    limit = (1 + beta2) / (1 - beta2)
    rho = limit - 2 * n * (1 - second) / second
    move = s["lr"] * state["exp_avg"] / first
    if rho > 5:
        rectified = ((rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho)) ** HALF
        move = rectified * move * second**HALF / (np.sqrt(state["exp_avg_sq"]) + s["eps"])
    return move, state


def rmsprop(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
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


def adagrad(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
    """The sum of all squares."""
    n = len(gradients)
    total = s["initial_accumulator_value"] + sum(_squares(gradients))
    rate = s["lr"] / (1 + (n - 1) * s["lr_decay"])
    return rate * gradients[-1] / (np.sqrt(total) + s["eps"]), {"step": n, "sum": total}


def adadelta(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
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


def asgd(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
    """The average is the mean of the parameters after step t0 + 1, or the last ones."""
    n = len(gradients)
    move = asgd_rate(n, s) * gradients[-1]
    after = [*thetas[1:], thetas[-1] * (1 - s["lambd"] * asgd_rate(n, s)) - move]
    averaged = after[int(s["t0"]) + 1 :] or after[-1:]
    mu = Decimal(1) / max(Decimal(1), n - s["t0"])
    return move, {"step": n, "ax": sum(averaged) / len(averaged), "eta": asgd_rate(n + 1, s), "mu": mu}


def rprop(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
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


def adafactor(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
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
    length = ((thetas[-1] ** 2).mean()) ** HALF
    rate = max(s["eps"][1], length) * min(s["lr"], 1 / Decimal(n) ** HALF)
    return rate * move / max(Decimal(1), (move**2).mean() ** HALF / s["d"]), state


def muon(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
    """The odd polynomial of the iteration, multiplied from the right."""
    mu, (a, b, c) = s["momentum"], s["ns_coefficients"]
    buffer = weighted(gradients, mu)
    x = mu * buffer + (1 - mu) * gradients[-1] if s["nesterov"] else buffer
    x = x / max((x**2).sum() ** HALF, s["eps"])
    for _ in range(s["ns_steps"]):
        right = x.T @ x
        x = x @ (a * _identity(len(x)) + b * right + c * (right @ right))
    return s["lr"] * x, {"momentum_buffer": buffer}


def _identity(size: int) -> Array:
    return np.array([[Decimal(i == j) for j in range(size)] for i in range(size)], dtype=object)


def lbfgs(gradients: Gradients, thetas: Sequence[Array], s: Mapping[str, Any]) -> Moved:
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
