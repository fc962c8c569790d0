"""Whether torch and JAX agree on a window's large-batch gradient, and who is to be looked at where they do not."""

from __future__ import annotations

from gradcheck_suite.numerics.bounds import quick_bound
from gradcheck_suite.numerics.comparison import Vector, worst_difference
from gradcheck_suite.records.description import error_text
from gradcheck_suite.references.accumulated import accumulated_gradient, whole_gradient
from gradcheck_suite.references.window import Window


def disagreement(window: Window, jax: Vector | None = None) -> str | None:
    """Say where torch's and JAX's large-batch gradients differ by more than rounding, if they do.

    Args:
        window: whose gradients.
        jax: (P,), JAX's gradient of a user's problem; a window of a generated one brings its own.
    """
    jax = window.jax if jax is None else jax
    if jax is None or worst_difference(window.torch, jax, quick_bound(jax, 1)).ratio <= 1:
        return None
    bound = window.float64_allowed
    worst = worst_difference(window.torch, jax, bound)
    if worst.ratio <= 1:
        return None
    parameter, _ = window.reference.layout.place(worst.index)
    return (
        f"torch's and JAX's large-batch gradients of {parameter} differ by "
        f"{error_text(worst.error, worst.allowed)}, in window {window.index} of case "
        f"{window.reference.instance.case.digest}: {blame(opinions(window, jax), bound)}; no loop is to blame"
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
