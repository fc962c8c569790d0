"""Whether torch and JAX agree on a window's large-batch gradient, and who is to be looked at where they do not."""

from __future__ import annotations

import numpy as np
import torch

from gradcheck_suite.numerics.comparison import Comparison, Vector, worst_difference
from gradcheck_suite.records.description import error_text
from gradcheck_suite.references.accumulated import accumulated_gradient, whole_gradient
from gradcheck_suite.references.drawn_comparison import compare_within, is_rarely_rounding
from gradcheck_suite.references.errors import CannotJudgeError
from gradcheck_suite.references.window import Window

NORMS = (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.modules.batchnorm._NormBase)
REPEATS = 3
"""How often a gradient that differs from JAX's is computed again, to see whether torch always returns the same."""


def disagreement(window: Window, jax: Vector | None = None) -> str | None:
    """Say where torch's and JAX's large-batch gradients differ by more than rounding, if they do.

    Args:
        window: whose gradients.
        jax: (P,), JAX's gradient of a user's problem; a window of a generated one brings its own.
    """
    jax = window.jax if jax is None else jax
    if jax is None:
        return None
    bound, layout = window.float64_bound, window.reference.layout
    quickly = Comparison(layout, jax, window.torch, bound.quick)
    if quickly.ratio <= 1:
        return None
    if text := _randomness(window):
        # a random gradient is no rounding error, and would widen the bound that it is held to
        return text
    compared = compare_within(bound, quickly, accumulated=False)
    if compared.ratio <= 1:
        return None
    return (
        f"torch's and JAX's large-batch gradients of {_where(window, compared)}: "
        f"{blame(opinions(window, jax), compared.allowed)}; no loop is to blame"
    )


def accumulation_fault(window: Window) -> str | None:
    """Say where torch's own accumulation in float64 and JAX's gradient differ by more than rounding, if they do.

    A fault of torch that rounding switches on and off widens the bound, so that `disagreement` may allow it in the
    large batch. Its error in the accumulated gradient is another one.
    """
    if window.jax is None:
        return None
    if text := _randomness(window):
        return text
    bound, accumulated = window.float64_bound, np.sum(window.float64_bound.contributions, axis=0)
    compared = compare_within(bound, Comparison(window.reference.layout, window.jax, accumulated, bound.quick))
    if compared.ratio <= 1:
        return None
    return (
        f"torch's and JAX's gradients of {_where(window, compared)}: "
        f"{blame(opinions(window, window.jax), compared.allowed)}; no loop is to blame"
    )


def precision_fault(window: Window) -> str | None:
    """Say where torch's large-batch gradient in the case's lower precision is wrong by more than rounding, if it is.

    Raises:
        CannotJudgeError: rounding explains it after all, once in hundreds of draws, or numbers within the computation
            leave the range of the precision: torch's cosine embedding loss divides by an infinite product of squares in
            float16, and its gradient is then 0.
    """
    name = window.reference.instance.case.dtype
    if window.bound is window.float64_bound:
        return None
    try:
        computed = [(window.bound.large_batch, False), (np.sum(window.bound.contributions, axis=0), True)]
    except RuntimeError:
        return None
    for gradient, accumulated in computed:
        compared = compare_within(window.bound, window.compare_quickly(gradient), accumulated=accumulated)
        if compared.ratio > 1:
            if is_rarely_rounding(window.bound, compared, has_norm=_has_norm(window.model())):
                raise CannotJudgeError(f"the gradient jumps where {name} rounds values to equal ones")
            if window.bound.is_out_of_range():
                raise CannotJudgeError(f"numbers within the plain gradient's computation leave the range of {name}")
            by = "torch" if window.jax is None else "JAX"
            return (
                f"torch's large-batch gradient in {name} and {by}'s in float64 of {_where(window, compared)}: the "
                f"{name} computation of torch is wrong, and no loop is to blame"
            )
    return None


def _has_norm(model: torch.nn.Module) -> bool:
    return any(isinstance(module, NORMS) for module in model.modules())


def _randomness(window: Window) -> str | None:
    """Say where torch's float64 gradient changes from one computation to the next, if it does.

    Another order of a summation is allowed for.
    """
    bound = window.float64_bound
    for _ in range(REPEATS):
        again = bound.computation.gradient((window.items, 1.0))
        if np.array_equal(again, window.torch):
            continue
        compared = Comparison(window.reference.layout, window.torch, again, bound.summing)
        if compared.ratio > 1:
            return (
                f"two computations of torch's float64 gradient of {_where(window, compared)}: it is not "
                "deterministic, and no loop is to blame"
            )
    return None


def _where(window: Window, compared: Comparison) -> str:
    worst = compared.worst
    parameter, _ = compared.layout.place(worst.index)
    moved = ", at parameters that the optimizer has moved" if window.moved else ""
    return (
        f"{parameter} differ by {error_text(worst.error, worst.allowed)}, in window {window.index} of case "
        f"{window.reference.instance.case.digest}{moved}"
    )


def opinions(window: Window, jax: Vector) -> dict[str, Vector]:
    """Return a window's gradient by every way there is: large batch and accumulated, in torch and in JAX."""
    instance = window.reference.instance
    found = {"torch large batch": window.torch, "torch accumulated": window.accumulated(), "JAX large batch": jax}
    if (spec := instance.case.spec) is None:
        return found
    sizes = [instance.case.plan.micro_batches[j] for j in window.members]
    _, whole = whole_gradient(spec, window.values, window.arrays)
    found["JAX large batch in one piece"] = window.reference.join(whole)
    accumulated = accumulated_gradient(spec, window.values, window.arrays, sizes)
    found["JAX accumulated"] = window.reference.join(accumulated)
    return found


def blame(opinions: dict[str, Vector], allowed: Vector) -> str:
    """Return which gradients agree with each other, as `a = b against c`, the largest group first."""
    groups: list[list[str]] = []
    for name, gradient in opinions.items():
        for group in groups:
            if worst_difference(gradient, opinions[group[0]], allowed).ratio <= 1:
                group.append(name)
                break
        else:
            groups.append([name])
    groups.sort(key=len, reverse=True)
    return " against ".join(" = ".join(group) for group in groups)
