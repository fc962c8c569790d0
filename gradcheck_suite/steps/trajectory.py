"""The parameters after each of some steps in optax, and what rounding and uncertain gradients may do to them.

The bound is derived through the steps. Every number that a step reads or writes may be off: a gradient by what its own
bound allows, and each gradient, update and entry of the state by the rounded operations that make it. The derivative of
all later parameters by each of these numbers, times its size, is how far they may be moved by it (first-order forward
error analysis: Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). So a direction that is divided by
the root of something tiny has a wide bound, exactly there and from then on.

The derivative is taken with the gradient as it is, and at both ends of its error, since a step need not be smooth: the
direction of Adam goes from -1 to 1 within epsilon. Where the sign of a gradient is not certain, as it may be for Rprop,
no bound of this kind exists; such elements are `undecided`. Drawn errors of the same sizes find them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.flatten_util import ravel_pytree

from gradcheck_suite.steps.counterpart import Counterpart

Numbers = npt.NDArray[np.float64]
ROUNDINGS = 8
"""Rounded operations by which torch computes one element of a gradient with decay, of an update or of a state."""
PARAMETER_ROUNDINGS = 4
"""Rounded operations on a parameter in one step: NAdam computes 1 - lr * decay, multiplies by it, and adds twice."""
DRAWS = 8
"""Drawn combinations of errors that look for places where a step is not continuous."""
SMOOTH = 4.0
"""Factor of the first-order bound above which the effect of drawn errors means that the step is not continuous."""
_NEARLY_ZERO = 1e-90
"""Stands for a gradient of zero where a derivative is taken: that of a root is infinite at zero."""
_QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True)
class Trajectory:
    """The parameters after each step, flattened: arrays of (steps, parameters), float64.

    Attributes:
        parameters: by optax.
        allowed: the largest error of the same parameters by torch.
        undecided: whether the step has a jump within the errors of a gradient, so that no bound exists.
    """

    parameters: Numbers
    allowed: Numbers
    undecided: npt.NDArray[np.bool_]

    def ratio(self, observed: Numbers) -> float:
        """Return the largest error over its bound, without the undecided elements; infinite for a NaN."""
        error = np.abs(observed - self.parameters)
        within = np.where(error == 0, 0.0, error / np.maximum(self.allowed, np.finfo(np.float64).tiny))
        within = np.where(np.isnan(within), np.inf, within)
        return float(np.where(self.undecided, 0.0, within).max(initial=0.0))


class _Errors(NamedTuple):
    """What is added to the numbers of one step."""

    gradient: Any
    update: Any
    state: Any


def follow(
    counterpart: Counterpart,
    settings: Mapping[str, Any],
    start: Sequence[Numbers],
    gradients: Sequence[Sequence[Numbers]],
    *,
    errors: Sequence[Sequence[Numbers]] | None = None,
    unit: float = 2.0**-53,
    implementation: str = "single",
) -> Trajectory:
    """Take the steps of an optimizer in optax, in float64.

    Args:
        counterpart: of the optimizer.
        settings: of the torch optimizer's parameter group; those that the step does not read may be there.
        start: the parameters.
        gradients: of each step, one array for each parameter.
        errors: how far each of these may be from the gradients that torch's steps use; zero if None.
        unit: unit roundoff of the dtype in which torch computes its steps.
        implementation: of torch's step.
    """
    read = inspect.signature(counterpart.make).parameters
    fixed = [name for name, parameter in read.items() if parameter.annotation in ("bool", "int", "str | None")]
    flags = tuple((name, settings[name]) for name in fixed)
    shapes = tuple(np.shape(p) for p in start)
    units = np.asarray([unit, counterpart.scalars.get(implementation, 0.0)])
    steps = [_flat(step) for step in gradients]
    off = np.zeros_like(steps) if errors is None else np.stack([_flat(step) for step in errors])
    program = _program(counterpart.make, counterpart.coarse, counterpart.decoupled, flags, shapes, len(steps))
    with jax.default_device(jax.devices("cpu")[0]):
        numbers = {name: _numbers(settings[name]) for name in read if name not in fixed}
        found = program(numbers, _flat(start), np.stack(steps), off, units)
    parameters, allowed, jumped = (np.asarray(value) for value in found)
    return Trajectory(parameters, allowed, jumped > SMOOTH * allowed + np.finfo(np.float64).tiny)


def _numbers(value: Any) -> Any:
    return tuple(map(np.float64, value)) if isinstance(value, tuple) else np.float64(value)


def _flat(arrays: Sequence[Numbers]) -> Numbers:
    return np.concatenate([np.asarray(array, np.float64).reshape(-1) for array in arrays])


@cache
def _program(
    make: Callable[..., Any],
    coarse: Callable[..., Any] | None,
    decoupled: bool,
    flags: tuple[tuple[str, Any], ...],
    shapes: tuple[tuple[int, ...], ...],
    steps: int,
) -> Any:
    """Return the compiled program: (settings, start, gradients, their errors, unit roundoffs) -> found.

    Found are the parameters after each step, what errors may do to them to first order, and what drawn errors do.
    """
    _, unravel = ravel_pytree([jnp.zeros(shape) for shape in shapes])

    def run(
        numbers: Mapping[str, Any], start: jax.Array, gradients: jax.Array, given: jax.Array, units: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        unit, scalar = units
        settings = {**numbers, **dict(flags)}
        optimizer = make(**settings)
        rate = numbers.get("weight_decay", 0.0) * (1.0 - numbers.get("decoupled_weight_decay", float(decoupled)))
        first_state = optimizer.init(unravel(start))
        no_errors = _Errors(
            jnp.zeros_like(start), jnp.zeros_like(start), list(map(jnp.zeros_like, _reals(first_state)))
        )
        none, as_errors = ravel_pytree(no_errors)

        def step(carry: Any, now: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
            flat, state = carry
            gradient, off = now
            off = as_errors(off)
            updates, new = optimizer.update(unravel(gradient + off.gradient), state, unravel(flat))
            update, _ = ravel_pytree(updates)
            after = flat + update + off.update
            new = _moved(new, off.state)
            many = ROUNDINGS * unit
            coarsely = 0.0 if coarse is None else ravel_pytree(coarse(new, settings))[0]
            sizes = _Errors(
                many * (jnp.abs(gradient) + rate * jnp.abs(flat)),
                ROUNDINGS * jnp.maximum(unit, scalar) * jnp.abs(update)
                + PARAMETER_ROUNDINGS * unit * jnp.abs(after)
                + coarsely,
                [many * jnp.abs(leaf) for leaf in _reals(new)],
            )
            return (after, new), (after, ravel_pytree(sizes)[0])

        def parameters(off: jax.Array, gradients: jax.Array) -> tuple[jax.Array, jax.Array]:
            _, (after, sizes) = jax.lax.scan(step, (start, first_state), (gradients, off))
            return after, sizes

        unmoved = jnp.zeros((steps, *none.shape))
        after, sizes = parameters(unmoved, gradients)
        sizes = sizes.at[:, : start.size].add(given)
        given = sizes[:, : start.size]
        ends = jnp.stack([jnp.where(jnp.abs(gradients) <= given, 0.0, gradients), gradients + given, gradients - given])
        ends = jnp.where(ends == 0, _NEARLY_ZERO, ends)
        slopes = jax.vmap(lambda g: jax.jacfwd(lambda off: parameters(off, g)[0])(unmoved))(ends)
        moved = jnp.where(sizes > 0, jnp.abs(slopes) * sizes, 0.0).sum((-2, -1)).max(0)
        signs = jax.random.rademacher(jax.random.key(0), (DRAWS, *unmoved.shape), sizes.dtype)
        drawn = jax.vmap(lambda sign: parameters(sign * sizes, gradients)[0])(signs)
        return after, moved, jnp.abs(drawn - after).max(0)

    return jax.jit(run, compiler_options=_QUICKLY)


def _is_real(leaf: jax.Array) -> bool:
    return bool(jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact))


def _reals(state: Any) -> list[jax.Array]:
    """Return the entries of a state that are rounded: all but counters."""
    return list(filter(_is_real, jax.tree.leaves(state)))


def _moved(state: Any, errors: list[jax.Array]) -> Any:
    """Return a state with errors added to the entries that `_reals` returns."""
    leaves, tree = jax.tree.flatten(state)
    given = iter(errors)
    return jax.tree.unflatten(tree, [leaf + next(given) if _is_real(leaf) else leaf for leaf in leaves])
