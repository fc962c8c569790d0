"""Steps of torch's optimizers and of their counterparts, and the bound that rounding allows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch
from jax.flatten_util import ravel_pytree

from gradcheck_suite.core.results import json_number
from studies.optimizers import Counterpart

jax.config.update("jax_enable_x64", True)

Numbers = npt.NDArray[np.float64]
GradientInJax = Callable[[list[jax.Array], list[jax.Array]], list[jax.Array]]
GradientInTorch = Callable[[int, list[torch.Tensor]], list[torch.Tensor]]
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
_QUICKLY: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


@dataclass(frozen=True)
class Trajectory:
    """The parameters after each step, flattened: arrays of (steps, parameters), float64.

    Attributes:
        parameters: by optax.
        allowed: the largest error of the same parameters by torch.
        undecided: whether the step has a jump within the errors of a gradient, so that no bound
            exists.
    """

    parameters: Numbers
    allowed: Numbers
    undecided: npt.NDArray[np.bool_]

    def ratio(self, observed: Numbers) -> float:
        """Return the largest error over its bound, without the undecided elements.

        Infinite for a NaN.
        """
        error = np.abs(observed - self.parameters)
        within = np.where(
            error == 0, 0.0, error / np.maximum(self.allowed, np.finfo(np.float64).tiny)
        )
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
    gradient: GradientInJax | None = None,
) -> Trajectory:
    """Take the steps of an optimizer in optax, in float64, with the bound of what rounding may do
    to their parameters.

    Every number that a step reads or writes may be off: a gradient by what its own bound allows,
    and each gradient, update and entry of the state by the rounded operations that make it. The
    derivative of all later parameters by each of these numbers, times its size, is how far they may
    be moved by it (first-order forward error analysis: Higham, Accuracy and Stability of Numerical
    Algorithms, section 3.1).

    Args:
        counterpart: of the optimizer.
        settings: of the torch optimizer's parameter group; those that the step does not read may be
            there.
        start: the parameters.
        gradients: of each step, one array for each parameter; what `gradient` reads, where there is
            one.
        errors: how far the gradient of each step may be from the one that torch's step uses; zero
            if None.
        unit: unit roundoff of the dtype in which torch computes its steps.
        implementation: of torch's step.
        gradient: (parameters, arrays of the step) -> their gradients, in JAX, at the parameters
            that the steps before have reached; the bound then has what an error of them does to
            later gradients. None: they are given.
    """
    read = inspect.signature(counterpart.make).parameters
    fixed = [
        name
        for name, parameter in read.items()
        if parameter.annotation in ("bool", "int", "str | None")
    ]
    flags = tuple((name, settings[name]) for name in fixed)
    shapes = tuple(np.shape(p) for p in start)
    units = np.asarray([unit, counterpart.scalars.get(implementation, 0.0)])
    read_by_step = [[_flat(step)] if gradient is None else step for step in gradients]
    data = [np.stack(column) for column in zip(*read_by_step, strict=True)]
    off = (
        np.zeros((len(data[0]), _flat(start).size))
        if errors is None
        else np.stack([_flat(step) for step in errors])
    )
    program = _program(
        counterpart.make, counterpart.coarse, counterpart.decoupled, flags, shapes, gradient
    )
    with jax.default_device(jax.devices("cpu")[0]):
        numbers = {name: _numbers(settings[name]) for name in read if name not in fixed}
        found = program(numbers, _flat(start), data, off, units)
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
    gradient_of: GradientInJax | None,
) -> Any:
    """Return the compiled program: (settings, start, data of the steps, errors, unit roundoffs) ->
    found.

    Found are the parameters after each step, what errors may do to them to first order, and what
    drawn errors do.
    """
    _, unravel = ravel_pytree([jnp.zeros(shape) for shape in shapes])

    def run(
        numbers: Mapping[str, Any],
        start: jax.Array,
        data: list[jax.Array],
        given: jax.Array,
        units: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        unit, scalar = units
        settings = {**numbers, **dict(flags)}
        optimizer = make(**settings)
        rate = numbers.get("weight_decay", 0.0) * (
            1.0 - numbers.get("decoupled_weight_decay", float(decoupled))
        )
        first_state = optimizer.init(unravel(start))
        no_errors = _Errors(
            jnp.zeros_like(start),
            jnp.zeros_like(start),
            list(map(jnp.zeros_like, _reals(first_state))),
        )
        none, as_errors = ravel_pytree(no_errors)

        def step(
            carry: Any, now: tuple[list[jax.Array], jax.Array, jax.Array], *, nearly: float
        ) -> tuple[Any, Any]:
            flat, state = carry
            read, shift, off = now
            found = (
                read[0]
                if gradient_of is None
                else ravel_pytree(gradient_of(unravel(flat), read))[0]
            )
            gradient, off = found + shift, as_errors(off)
            gradient += jnp.where(gradient == 0, nearly, 0.0)
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
            return (after, new), (after, found, ravel_pytree(sizes)[0])

        def parameters(off: jax.Array, shift: jax.Array, nearly: float = 0.0) -> Any:
            """Return parameters, gradients and sizes of errors, of all steps."""
            return jax.lax.scan(
                partial(step, nearly=nearly), (start, first_state), (data, shift, off)
            )[1]

        after, gradients, sizes = parameters(
            jnp.zeros((len(given), *none.shape)), jnp.zeros_like(given)
        )
        sizes = sizes.at[:, : start.size].add(given)
        moved, drawn = _effects(parameters, after, gradients, sizes)
        return after, moved, drawn

    return jax.jit(run, compiler_options=_QUICKLY)


def _effects(
    parameters: Callable[..., Any], after: jax.Array, gradients: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return how far errors of these sizes move the parameters: to first order together, and those
    that are drawn.

    Args:
        parameters: (errors, what is added to the gradients, what a gradient of zero becomes) ->
            (parameters, ...).
        after: the parameters without errors.
        gradients: of each step.
        sizes: of the errors; those of the gradients come first.
    """
    unmoved, as_given = jnp.zeros_like(sizes), jnp.zeros_like(gradients)
    # the derivative is taken with the gradient as it is and at both ends of its error, since a step
    # need not be smooth: the direction of Adam goes from -1 to 1 within epsilon
    given = sizes[:, : gradients.shape[1]]
    ends = jnp.stack([jnp.where(jnp.abs(gradients) <= given, -gradients, 0.0), given, -given])
    slopes = jax.vmap(
        lambda end: jax.jacfwd(lambda off: parameters(off, end, _NEARLY_ZERO)[0])(unmoved)
    )(ends)
    moved = jnp.where(sizes > 0, jnp.abs(slopes) * sizes, 0.0).sum((-2, -1)).max(0)
    # where the sign of a gradient is not certain, a step such as Rprop's jumps, and no bound of the
    # first order exists
    signs = jax.random.rademacher(jax.random.key(0), (DRAWS, *sizes.shape), sizes.dtype)
    drawn = jax.vmap(lambda sign: parameters(sign * sizes, as_given)[0])(signs)
    return moved, jnp.abs(drawn - after).max(0)


def _is_real(leaf: jax.Array) -> bool:
    return bool(jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact))


def _reals(state: Any) -> list[jax.Array]:
    """Return the entries of a state that are rounded: all but counters."""
    return list(filter(_is_real, jax.tree.leaves(state)))


def _moved(state: Any, errors: list[jax.Array]) -> Any:
    """Return a state with errors added to the entries that `_reals` returns."""
    leaves, tree = jax.tree.flatten(state)
    given = iter(errors)
    return jax.tree.unflatten(
        tree, [leaf + next(given) if _is_real(leaf) else leaf for leaf in leaves]
    )


IMPLEMENTATIONS: dict[str, Mapping[str, Any]] = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
"""torch's implementations of a step, and the arguments that choose them."""


@dataclass(frozen=True)
class Steps:
    """Some steps of a torch optimizer, in float64 whatever the dtype that they were computed in.

    Attributes:
        settings: of the optimizer's parameter group, with an epsilon of None replaced by what it
            stands for.
        start: the parameters before the first step.
        gradients: of each step, one array for each parameter.
        parameters: after each step, flattened, (steps, parameters).
    """

    settings: dict[str, Any]
    start: list[Numbers]
    gradients: list[list[Numbers]]
    parameters: Numbers


def take_steps(
    counterpart: Counterpart,
    settings: Mapping[str, Any],
    start: Sequence[torch.Tensor],
    gradient: GradientInTorch,
    steps: int,
    *,
    implementation: str = "single",
) -> Steps:
    """Take some steps of a torch optimizer.

    Args:
        counterpart: names the optimizer.
        settings: arguments of its class; what is left out has its default.
        start: the parameters; their dtype is that of the steps.
        gradient: (index of the step, parameters) -> their gradients, as tensors of the same dtype,
            sparse or dense.
        steps: number of steps.
        implementation: one of `counterpart.implementations`.
    """
    parameters = [torch.nn.Parameter(p.clone()) for p in start]
    chosen = IMPLEMENTATIONS[implementation] if len(counterpart.implementations) > 1 else {}
    optimizer = getattr(torch.optim, counterpart.torch)(parameters, **settings, **chosen)
    seen, after = [], []
    for index in range(steps):
        gradients = gradient(index, [p.detach() for p in parameters])
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g
        seen.append([_wide(g.to_dense() if g.is_sparse else g) for g in gradients])
        # of a closure, L-BFGS reads the loss alone, which its tolerances look at
        optimizer.step(lambda: 1.0)
        after.append(np.concatenate([_wide(p.detach()).reshape(-1) for p in parameters]))
    (group,) = optimizer.param_groups
    return Steps(
        settings_of(group, start[0].dtype), [_wide(p) for p in start], seen, np.stack(after)
    )


def settings_of(group: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the settings of a parameter group of a dtype, with those that are None replaced by
    what they stand for.
    """
    found = {name: value for name, value in group.items() if name != "params"}
    eps = found.get("eps")
    if isinstance(eps, tuple) and eps[0] is None:
        found["eps"] = (torch.finfo(dtype).eps, *eps[1:])
    return found


def _wide(tensor: torch.Tensor) -> Numbers:
    wide: Numbers = tensor.detach().to("cpu", torch.float64).numpy()
    return wide


STEPS = 6
"""The first five of RAdam are not rectified."""
Shapes = tuple[tuple[int, ...], ...]
SHAPES: Shapes = ((2, 3), (2,), (2, 2), (2,))
"""The parameters of two linear layers: every optimizer has the same shapes, so that few programs compile."""
MATRICES: Shapes = ((2, 3), (2, 2))


def draw_steps(
    counterpart: Counterpart,
    settings: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    implementation: str = "single",
    seed: int = 0,
    scale: float = 1.0,
    device: str = "cpu",
    shapes: Shapes | None = None,
) -> Steps:
    """Take `STEPS` steps on drawn parameters and gradients.

    The gradients of L-BFGS are those of a convex quadratic function, and those of SparseAdam leave
    out a row. Others have one element of zero in every step, and one whose sign changes.

    Args:
        counterpart: of the optimizer.
        settings: arguments of its class.
        dtype: of parameters and gradients.
        implementation: one of `counterpart.implementations`.
        seed: of the drawn numbers.
        scale: of the gradients.
        device: of the parameters.
        shapes: of the parameters; `SHAPES` if None, and `MATRICES` for Muon.
    """
    drawn = torch.Generator().manual_seed(seed)
    shapes = shapes or (MATRICES if counterpart.torch == "Muon" else SHAPES)

    def normal(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=drawn, dtype=torch.float64)

    start = [normal(shape).to(device, dtype) for shape in shapes]
    curvature = [(0.1 + normal(shape) ** 2).to(device, dtype) for shape in shapes]

    def gradient(step: int, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        if counterpart.torch == "LBFGS":
            return [h * p for h, p in zip(curvature, parameters, strict=True)]
        found = [(scale * normal(shape)).to(device, dtype) for shape in shapes]
        for g in found:
            g.view(-1)[0] = 0
            g.view(-1)[1] = scale * (-1) ** step
            if counterpart.torch == "SparseAdam":
                g[step % len(g)] = 0
        return [g.to_sparse(1) if counterpart.torch == "SparseAdam" else g for g in found]

    return take_steps(counterpart, settings, start, gradient, STEPS, implementation=implementation)


def in_optax(
    counterpart: Counterpart, steps: Steps, dtype: torch.dtype, implementation: str = "single"
) -> Trajectory:
    """Take the same steps in optax, with the bound for torch's in some dtype."""
    unit = torch.finfo(dtype).eps / 2
    return follow(
        counterpart,
        steps.settings,
        steps.start,
        steps.gradients,
        unit=unit,
        implementation=implementation,
    )


DTYPES = ("float64", "float32")
SCALES = (1.0, 1e-6, 100.0)
"""Sizes of the drawn gradients: at, below and above what the epsilons are made for."""


@dataclass(frozen=True)
class Row:
    """The steps of one optimizer, compared.

    Attributes:
        counterpart: of the optimizer.
        cases: number of runs of `drawn.STEPS` steps, over all dtypes.
        ratios: dtype -> the largest error of a parameter over its bound.
        undecided: number of parameters at which a step jumps within its error, so that they have no
            bound.
    """

    counterpart: Counterpart
    cases: int
    ratios: dict[str, float]
    undecided: int

    @property
    def agree(self) -> bool:
        """Whether every parameter is within its bound."""
        return all(ratio <= 1 for ratio in self.ratios.values())

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON-ready data."""
        counterpart = self.counterpart
        return {
            "torch": counterpart.torch,
            "optax": counterpart.optax,
            "differs": list(counterpart.differs),
            "outside": counterpart.outside,
            "source": counterpart.source,
            "implementations": list(counterpart.implementations),
            "settings": len(counterpart.variants),
            "cases": self.cases,
            "error_over_allowed": {
                dtype: json_number(ratio) for dtype, ratio in self.ratios.items()
            },
            "undecided": self.undecided,
            "agree": self.agree,
        }


def compare(counterpart: Counterpart, seeds: Iterable[int], device: str = "cpu") -> Row:
    """Compare an optimizer's steps under all its settings, in each implementation, dtype and scale
    of the gradients.

    Args:
        counterpart: of the optimizer.
        seeds: of the drawn numbers.
        device: where torch computes; JAX computes on the CPU.
    """
    every = list(product(DTYPES, counterpart.variants, counterpart.implementations, seeds))
    ratios, undecided = dict.fromkeys(DTYPES, 0.0), 0
    for name, settings, implementation, seed in every:
        dtype, scale = getattr(torch, name), SCALES[seed % len(SCALES)]
        about = {"dtype": dtype, "implementation": implementation, "seed": seed, "scale": scale}
        steps = draw_steps(counterpart, settings, device=device, **about)
        found = in_optax(counterpart, steps, dtype, implementation)
        ratios[name] = max(ratios[name], found.ratio(steps.parameters))
        undecided += int(found.undecided.sum())
    return Row(counterpart, len(every), ratios, undecided)
