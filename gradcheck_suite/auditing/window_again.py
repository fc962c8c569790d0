"""The window computed again in one batch, with what the user's own functions may do to that."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as module_hooks
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree as pytree

from gradcheck_suite.auditing.passes import PROJECTIONS, Pass, RandomState, as_array, differentiable, resolution, sketch
from gradcheck_suite.auditing.passes import Forward as PassesForward
from gradcheck_suite.core.comparison import FEW_DRAWS, FURTHER_ROUNDINGS, UNIT_ROUNDOFF, growth, student_factor
from gradcheck_suite.run.observer import Forward, kinds_of, replaced_forwards

# Custom `torch.autograd.Function`s of a window that is computed again: is `backward` the derivative of `forward`?
#
# A function is called by itself on the arguments of its first call, in float64 where it takes that. The derivative of
# `forward` along some directions, by central differences of several steps, is held to what `backward` says.
#
# Many functions differ from the derivative on purpose, and these are no faults: one that returns its input (gradient
# reversal, scaling, clipping) and one that passes a gradient where its output is constant or jumps (straight-through
# estimators, rounding, spikes). Elements of the output that a direction does not move are therefore left out, and a
# difference is a fault only where it is `STABLE` times as large as the differences between all step sizes: where
# `forward` is smooth.


LEAST = 1e-3
"""Relative difference of a derivative that is not looked at: a function may compute in float32."""
STABLE = 3.0
"""Least ratio of a fault to the largest difference between the derivatives of two step sizes."""
STEPS = (0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
"""Step sizes, relative to the root mean square of the input. Large ones tell smooth functions from rounding ones."""
MOVING = STEPS.index(1e-3)
"""The step that tells which elements of an output are constant."""
STEPS_OF = {torch.float64: STEPS, torch.float32: STEPS[: MOVING + 1]}
LARGEST = 2**23
"""Number of elements of a call's arguments above which it is not judged."""
JITTER = 1e-3
"""Relative distance by which inputs are moved first: recorded ones often lie at kinks, such as the zeros of a ReLU."""
CONSTANT = "it passes a gradient where its output is constant, as a straight-through estimator does"
IDENTITY = "it returns its input and changes the gradient of it"
JUMPS = "its backward is not the derivative of its forward, which jumps or bends near by"
DIRECTIONS = 4
"""Random directions for each input; every other one goes uphill, so that nothing cancels."""


@dataclass(frozen=True)
class Verdict:
    """What is known of a custom function.

    Attributes:
        name: of the class.
        fault: what is wrong with `backward`, in words; empty where nothing is, as far as it was judged.
        note: why the function was not judged, or that its gradient is another one on purpose; empty otherwise.
        error: relative difference of the derivative, where there is a fault.
    """

    name: str
    fault: str = ""
    note: str = ""
    error: float = 0.0


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a custom function: its class, a copy of its arguments, and the random numbers that it drew from."""

    kind: Any
    arguments: list[Any]
    random: RandomState


def users_kinds_of(outputs: Sequence[torch.Tensor]) -> frozenset[type]:
    """Return the classes of custom functions, other than torch's own, in the graph of some tensors."""
    return frozenset(kind for kind in kinds_of(outputs) if not kind.__module__.startswith("torch."))


@contextlib.contextmanager
def first_calls(kinds: Set[type]) -> Iterator[dict[type, Call]]:
    """Record the first call of each class while this is open: its arguments are copied."""
    found: dict[type, Call] = {}

    def recording(kind: Any) -> Any:
        def made(forward: Forward, first: int) -> Forward:
            def recorded(*arguments: Any) -> Any:
                if kind not in found:
                    found[kind] = Call(kind, [_copy(value) for value in arguments[first:]], RandomState.now())
                return forward(*arguments)

            return recorded

        return made

    with replaced_forwards((kind, recording(kind)) for kind in kinds):
        yield found


def _copy(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def judge_function(call: Call) -> Verdict:
    """Judge the `backward` of a custom function at one call.

    The random numbers of the process are changed.
    """
    name, reason = call.kind.__name__, ""
    if (size := sum(v.numel() for v in call.arguments if isinstance(v, torch.Tensor))) > LARGEST:
        return Verdict(name, note=f"its backward was not checked: its arguments have {size} elements")
    for dtype in STEPS_OF:
        try:
            return _judged(call, dtype)
        except Exception as error:  # whatever somebody's function raises on another dtype
            reason = reason or f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return Verdict(name, note=f"its backward was not checked, since it cannot be called by itself ({reason})")


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _outputs(call: Call, arguments: Sequence[Any], *, grad: bool = False) -> list[torch.Tensor]:
    """Return the floating-point outputs of the function."""
    call.random.set()
    given = [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]
    with torch.set_grad_enabled(grad):
        found = call.kind.apply(*given)
    return [value for value in (found if isinstance(found, tuple) else (found,)) if _is_real(value)]


def _judged(call: Call, dtype: torch.dtype) -> Verdict:
    base = [v.detach().to(dtype) if _is_real(v) else v for v in call.arguments]
    wanted = [i for i, v in enumerate(call.arguments) if _is_real(v) and v.requires_grad and v.numel()]
    name, generator = call.kind.__name__, torch.Generator().manual_seed(0)
    if not all(torch.equal(a, b) for a, b in zip(_outputs(call, base), _outputs(call, base), strict=True)):
        return Verdict(name, note="its backward was not checked, since its forward gives other outputs each time")
    moved = [v + JITTER * _direction(v, generator) if i in wanted else v for i, v in enumerate(base)]
    if not all(torch.isfinite(output).all() for output in _outputs(call, moved)):
        moved = base
    verdicts = [_of_argument(call, moved, index, STEPS_OF[dtype], generator) for index in wanted]
    return next((v for v in verdicts if v.fault), next((v for v in verdicts if v.note), Verdict(name)))


def _direction(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a random direction of the input's size; it keeps the sign of an input whose elements are positive."""
    draws = torch.randn(value.shape, generator=generator, dtype=torch.float64).clamp(-2, 2).to(value)
    if bool((value > 0).all()):
        return draws * value
    return draws * (float(value.double().square().mean().sqrt()) or 1.0)


def _of_argument(
    call: Call, point: list[Any], index: int, steps: tuple[float, ...], generator: torch.Generator
) -> Verdict:
    """Judge the derivative with respect to one argument."""
    name, notes, ratios = call.kind.__name__, list[str](), list[float]()
    for number in range(DIRECTIONS):
        line = _Line(call, point, index, _direction(point[index], generator), generator, uphill=bool(number % 2))
        found = line.compared(steps)
        if isinstance(found, str):
            notes.append(found)
        elif found is not None:
            ratios.append(found)
    if len(ratios) < 2:
        return Verdict(name, note=notes[0] if notes else "")
    same = max(ratios) - min(ratios) <= LEAST * abs(ratios[0])
    what = f"{ratios[0]:.3g} times the derivative" if same else "not the derivative"
    return Verdict(name, f"with respect to argument {index} it is {what}", error=max(abs(r - 1) for r in ratios))


class _Line:
    """A function along a direction of one argument, with a random gradient of its outputs."""

    def __init__(
        self,
        call: Call,
        point: list[Any],
        index: int,
        direction: torch.Tensor,
        generator: torch.Generator,
        *,
        uphill: bool,
    ) -> None:
        self.call, self.point, self.index, self.direction = call, point, index, direction
        self.leaf = point[index].clone().requires_grad_()
        self.outputs = _outputs(call, [self.leaf if i == index else v for i, v in enumerate(point)], grad=True)
        # an output that the function marks as not differentiable has no derivative to compare
        self.cotangents = [
            torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) * o.requires_grad for o in self.outputs
        ]
        gradient = self.backward(self.cotangents) if uphill else None
        if gradient is not None:
            # nothing of a sum of products of one sign cancels
            self.direction = torch.where(gradient < 0, -direction.abs(), direction.abs())

    def backward(self, cotangents: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the gradient of the argument for gradients of the outputs."""
        live = [(o, c) for o, c in zip(self.outputs, cotangents, strict=True) if o.requires_grad]
        if not live:
            return None
        tensors, given = zip(*live, strict=True)
        return torch.autograd.grad(tensors, self.leaf, given, allow_unused=True, retain_graph=True)[0]

    def slopes(self, step: float) -> list[torch.Tensor]:
        """Return the central difference of each output."""
        ends = []
        for move in (step, -step):
            values = [v + move * self.direction if i == self.index else v for i, v in enumerate(self.point)]
            ends.append(_outputs(self.call, values))
        return [(a - b) / (2 * step) for a, b in zip(*ends, strict=True)]

    def compared(self, steps: tuple[float, ...]) -> float | str | None:
        """Compare `backward` with the derivative.

        Returns:
            what `backward` gives over the derivative where the two differ and `forward` is smooth; words where it
            differs on purpose or may do so; None where they agree.
        """
        slopes = [self.slopes(step) for step in steps]
        moving = [
            # an output that is rounded to less than float64 may stand still at a small step by rounding alone
            each[MOVING] != 0 if each[MOVING].dtype == torch.float64 else torch.stack(each[: MOVING + 1]).any(dim=0)
            for each in zip(*slopes, strict=True)
        ]
        whole = self.backward(self.cotangents)
        still = self.backward([c * ~m for c, m in zip(self.cotangents, moving, strict=True)])
        if whole is None or still is None or not torch.isfinite(whole).all():
            return None
        if still.norm() > LEAST * whole.norm():
            return CONSTANT
        cotangents = [c * m for c, m in zip(self.cotangents, moving, strict=True)]
        along = [
            float(sum((c.double() * d.double()).sum() for c, d in zip(cotangents, each, strict=True)))
            for each in slopes
        ]
        terms = (whole - still).double() * self.direction.double()
        got = float(terms.sum())
        # the finest of the two neighbours that agree best; beyond it, rounding
        best = min(range(1, len(along)), key=lambda i: abs(along[i] - along[i - 1]))
        off, right = abs(got - along[best]), along[best]
        if not off > LEAST * max(abs(got), abs(right), float(terms.norm())):
            return None
        if any(o.shape == self.leaf.shape and torch.equal(o, self.leaf) for o in self.outputs):
            return IDENTITY
        if not off > STABLE * max(abs(value - right) for value in along[: best + 1]):
            return JUMPS
        return got / right if right else float("inf")


# Computes recorded calls of modules again, and the gradients that follow from the gradients of their outputs.
#
# The run stays what it is: the parameters are aliases without hooks, the buffers copies, and random numbers, training
# modes and plain attributes are put back. What the modules print is dropped.


Gradients = dict[int, torch.Tensor]
"""The id of a parameter -> a gradient."""

SCALE = 8.0
"""A power of two, by which the gradients of outputs are multiplied and what follows is divided. A backward pass that is
linear gives the same bits."""


@dataclass(frozen=True)
class How:
    """How calls are computed again.

    Attributes:
        modes: `training` of each submodule, in place of the recorded ones.
        hooks: whether the backward hooks of modules run.
        scale: by which the gradients of outputs are multiplied.
        seed: of a relative change of each parameter and input by one unit roundoff; None for no change.
    """

    modes: tuple[bool, ...] | None = None
    hooks: bool = False
    scale: float = SCALE
    seed: int | None = None


@dataclass
class Replayed:
    """What calls gave when they were computed again.

    Attributes:
        gradients: of the parameters that they reach.
        outputs: the output tensors through which a gradient may come, in the order of the recorded ones.
        functions: classes of custom `torch.autograd.Function`s on the way.
        random: whether random numbers were drawn.
    """

    gradients: Gradients = field(default_factory=dict)
    outputs: list[torch.Tensor] = field(default_factory=list)
    functions: frozenset[type] = frozenset()
    random: bool = False


_PLAIN = frozenset(vars(torch.nn.Module()))
_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def backward_hooks(module: torch.nn.Module) -> list[str]:
    """Return the names of the submodules that have backward hooks of the user's."""
    return [name or type(part).__name__ for name, part in module.named_modules() if any(vars(part)[h] for h in _HOOKS)]


@contextlib.contextmanager
def _unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Put back what calls of a module may change: random numbers, modes, attributes and, one level deep, containers."""
    before = RandomState.now()
    kept = [
        (part, part.training, {k: (v, _content(v)) for k, v in vars(part).items() if k not in _PLAIN})
        for part in module.modules()
    ]
    try:
        yield
    finally:
        before.set()
        for part, training, attributes in kept:
            part.training = training
            for name in [name for name in vars(part) if name not in _PLAIN and name not in attributes]:
                del vars(part)[name]
            for name, (value, content) in attributes.items():
                vars(part)[name] = value
                if content is not None:
                    _refill(value, content)


def _content(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict, set) else None


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(content)


@contextlib.contextmanager
def _without_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Switch off backward hooks."""
    hooks = [vars(part)[name] for part in module.modules() for name in _HOOKS]
    hooks += [module_hooks._global_backward_hooks, module_hooks._global_backward_pre_hooks]
    kept = [(each, each.copy()) for each in hooks if each]
    for each, _ in kept:
        each.clear()
    try:
        yield
    finally:
        for each, content in kept:
            each.update(content)


def _nudged(value: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Return a tensor whose elements are changed by one unit roundoff up or down."""
    unit = UNIT_ROUNDOFF.get(str(value.dtype).removeprefix("torch."))
    if generator is None or unit is None:
        return value
    # one step of the format for a number in the middle of a binade
    signs = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.int8).to(value.device) * 2 - 1
    return value + signs.to(value.dtype) * (2 * unit) * value


@contextlib.contextmanager
def _replaced(module: torch.nn.Module, tensors: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Replace parameters and buffers by those with their ids.

    `torch.func.functional_call` would leave its replacements in a submodule that has two names (pytorch#164759).
    """
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    try:
        for part in module.modules():
            holders: list[dict[str, Any]] = [vars(part)["_parameters"], vars(part)["_buffers"]]
            for holder in holders:
                for name, tensor in list(holder.items()):
                    if id(tensor) in tensors:
                        holder[name] = tensors[id(tensor)]
                        before.append((holder, name, tensor))
        yield
    finally:
        for holder, name, tensor in before:
            holder[name] = tensor


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what the user's code prints and warns of."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def replay(forward: PassesForward, arguments: list[Any], cotangents: dict[int, torch.Tensor], how: How) -> Replayed:
    """Compute a call again, and the gradients of the parameters.

    Args:
        forward: the recorded call.
        arguments: flat arguments in place of the recorded ones.
        cotangents: index of an output -> its gradient.
        how: how.

    Raises:
        Exception: whatever the user's module raises.
    """
    module = forward.module
    generator = None if how.seed is None else torch.Generator().manual_seed(how.seed)
    real = [p for p in module.parameters() if p.requires_grad]
    leaves = [_nudged(p.detach(), generator).detach().requires_grad_() for p in real]
    replacing = {id(b): b.detach().clone() for b in module.buffers()}
    replacing.update((id(p), leaf) for p, leaf in zip(real, leaves, strict=True))
    values = [
        _nudged(v, generator).detach().requires_grad_(need) if isinstance(v, torch.Tensor) else v
        for v, need in zip(arguments, forward.needs_gradient, strict=True)
    ]
    positional, keywords = pytree.tree_unflatten(values, forward.structure)
    device, dtype, enabled = forward.autocast
    result, seen = Replayed(), list[Any]()

    def compute() -> None:
        forward.random.set()
        for each, training in zip(module.modules(), how.modes or forward.modes, strict=True):
            each.training = training
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            module(*positional, **keywords)
        now = RandomState.now()
        states = zip((now.cpu, *now.devices), (forward.random.cpu, *forward.random.devices), strict=True)
        result.random = not all(torch.equal(a, b) for a, b in states)
        outputs = differentiable(seen[-1])
        scaled = [g * how.scale for g in cotangents.values()]
        found = [outputs[index] for index in cotangents]
        gradients = torch.autograd.grad(found, leaves, scaled, allow_unused=True)
        both = zip(real, gradients, strict=True)
        result.gradients = {id(p): g / how.scale for p, g in both if g is not None}
        result.outputs = [output.detach() for output in outputs]
        result.functions = users_kinds_of(outputs)

    handle = register_module_forward_hook(lambda part, _, output: seen.append(output) if part is module else None)
    hooks = contextlib.nullcontext() if how.hooks else _without_hooks(module)
    try:
        with _unchanged(module), hooks, quiet(), torch.enable_grad(), _replaced(module, replacing):
            compute()
    finally:
        handle.remove()
    return result


# The window again: its recorded module calls in one batch where that is possible, else micro-batch by micro-batch.
#
# The gradients that reached the modules' outputs are recorded, so what follows from them is a function of the modules
# alone. The bound on the 2-norm of a parameter's difference is that of the additions, `growth(K + 5, u)` times the
# sum of the norms of the contributions. Where it is exceeded, the rounding errors are measured by `FEW_DRAWS`
# computations with parameters and inputs changed by one unit roundoff, and Student's factor for their number times
# their root mean square is allowed as well (`core.comparison`).


ONE_BATCH, BY_MICRO_BATCH = "in one batch", "micro-batch by micro-batch"
FULL_PRECISION = ("float32", "float64")


class NotRecomputed(Exception):
    """Why a window cannot be computed again."""


class InputsChanged(NotRecomputed):
    """An input was changed in place."""


@dataclass(frozen=True, eq=False)
class Part:
    """One recorded call with what came back in one backward pass.

    Attributes:
        forward: the call.
        cotangents: index of an output -> the gradient that it received.
        index: of the pass among the window's.
        weight: by which the gradients are multiplied.
    """

    forward: PassesForward
    cotangents: dict[int, torch.Tensor]
    index: int
    weight: float = 1.0


def parts_of(passes: Sequence[Pass], weights: Sequence[float]) -> list[Part]:
    """Return the recorded calls of a window.

    Args:
        passes: the backward passes.
        weights: of each pass.

    Raises:
        NotRecomputed: no call was recorded in some pass, a module is compiled, or an input was changed in place.
    """
    parts = []
    for index, (one, weight) in enumerate(zip(passes, weights, strict=True)):
        if not one.forwards:
            raise NotRecomputed("no call of a module that leads to the loss was recorded")
        for forward, received in one.forwards.items():
            if forward.compiled:
                raise NotRecomputed("the model is compiled")
            if forward.changed:
                raise InputsChanged("an input of the model was changed in place before the step")
            scalars = {i: g for i, g in received.items() if forward.scalars[i]}
            # the loss that a model returns beside its logits is computed from them
            parts.append(Part(forward, scalars or dict(received), index, weight))
    return parts


def dtype_of(tensor: torch.Tensor) -> str:
    """Return the name of a dtype, float32 for one without a known unit roundoff."""
    name = str(tensor.dtype).removeprefix("torch.")
    return name if name in UNIT_ROUNDOFF else "float32"


def norm(tensor: torch.Tensor) -> float:
    """Return the 2-norm of a gradient, computed in float64."""
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return float(torch.linalg.vector_norm(dense.detach().reshape(-1), dtype=torch.float64))


@dataclass
class Total:
    """A window's gradient, computed again.

    Attributes:
        gradients: the weighted sum.
        sizes: id of a parameter -> the sum of the 2-norms of its contributions.
        terms: number of contributions.
        dtype: the coarsest dtype in which contributions may be added up, where that is not the gradient's.
        functions: classes of the custom functions on the way.
    """

    gradients: Gradients = field(default_factory=dict)
    sizes: dict[int, float] = field(default_factory=dict)
    terms: int = 0
    dtype: str | None = None
    functions: frozenset[type] = frozenset()

    def add(self, found: Replayed, weight: float) -> None:
        """Add a contribution."""
        self.terms += 1
        self.functions |= found.functions
        for key, gradient in found.gradients.items():
            scaled = (gradient.to_dense() if gradient.layout != torch.strided else gradient) * weight
            self.gradients[key] = self.gradients[key] + scaled if key in self.gradients else scaled
            self.sizes[key] = self.sizes.get(key, 0.0) + norm(scaled)


def by_micro_batch(parts: Sequence[Part], how: Callable[[Part], How]) -> tuple[Total, list[Replayed]]:
    """Compute each call again and return the weighted sum of the gradients."""
    total, replayed = Total(), []
    if len({part.index for part in parts}) < len(parts):
        # under autocast, the calls of one pass share a cast parameter, and their gradients are added up in its dtype
        total.dtype = next((str(p.forward.autocast[1])[6:] for p in parts if p.forward.autocast[2]), None)
    for part in parts:
        found = replay(part.forward, part.forward.arguments, part.cotangents, how(part))
        total.add(found, part.weight)
        replayed.append(replace(found, gradients={}))
    return total, replayed


def _joined(parts: Sequence[Part]) -> tuple[list[Any], dict[int, torch.Tensor], list[int]] | None:
    """Return the arguments and gradients of all calls as one batch, and its sizes; None where they do not fit."""
    forwards = [part.forward for part in parts]
    first = forwards[0]
    same = all(
        (f.module, f.structure, f.modes, f.autocast) == (first.module, first.structure, first.modes, first.autocast)
        for f in forwards
    )
    if not same or len({part.index for part in parts}) < len(parts) or any(any(f.scalars) for f in forwards):
        return None
    columns = list(zip(*(f.arguments for f in forwards), strict=True))
    batched = [c for c in columns if all(isinstance(v, torch.Tensor) and v.dim() for v in c)]
    if not batched:
        return None
    rows = [int(v.shape[0]) for v in batched[0]]
    arguments: list[Any] = []
    for column in columns:
        if all(isinstance(v, torch.Tensor) for v in column):
            if not _fits(column, rows):
                return None
            arguments.append(torch.cat(list(column)))
        elif all(v is column[0] or (type(v) in (int, float, str, bool) and v == column[0]) for v in column):
            arguments.append(column[0])
        else:
            return None
    indices = parts[0].cotangents.keys()
    if any(part.cotangents.keys() != indices for part in parts):
        return None
    received = {i: [part.cotangents[i] for part in parts] for i in indices}
    if not all(_fits(column, rows) for column in received.values()):
        return None
    cotangents = {
        i: torch.cat([g * part.weight for g, part in zip(column, parts, strict=True)]) for i, column in received.items()
    }
    return arguments, cotangents, rows


def _fits(column: Sequence[torch.Tensor], rows: Sequence[int]) -> bool:
    shapes = {(v.shape[1:], v.dtype, v.layout) if v.dim() else None for v in column}
    return len(shapes) == 1 and None not in shapes and [int(v.shape[0]) for v in column] == list(rows)


def _low_precision(parts: Sequence[Part]) -> bool:
    low = any(p.forward.autocast[2] for p in parts)
    return low or any(dtype_of(g) not in FULL_PRECISION for p in parts for g in p.cotangents.values())


def in_one_batch(parts: Sequence[Part]) -> Total | None:
    """Return the window's gradient from one call, or None where there is none that is equal to the calls.

    In a lower precision than float32 rounding hides too much: there it is not tried.
    """
    joined = None if len(parts) < 2 or _low_precision(parts) else _joined(parts)
    if joined is None:
        return None
    arguments, cotangents, rows = joined
    first = parts[0].forward

    def computed(seed: int | None) -> Replayed:
        return replay(first, arguments, cotangents, How(seed=seed))

    try:
        found = computed(None)
    except Exception:
        return None  # the model takes no batch of this size
    if found.random or not _same_outputs(parts, found, rows):
        return None
    total = Total()
    total.add(found, 1.0)
    total.terms = sum(rows)
    return total


def _same_outputs(parts: Sequence[Part], found: Replayed, rows: Sequence[int]) -> bool:
    """Whether the rows of one batch's outputs are those of the calls: the model is separable over samples."""
    for i in parts[0].cotangents:
        if i >= len(found.outputs) or not found.outputs[i].dim() or found.outputs[i].shape[0] != sum(rows):
            return False
        for part, piece in zip(parts, found.outputs[i].split(list(rows)), strict=True):
            if distance(part.forward.outputs[i], piece) > ONE_BATCH_OUTPUTS * UNIT_ROUNDOFF[dtype_of(piece)]:
                return False
    return True


ONE_BATCH_OUTPUTS = 2.0**12
"""Relative difference of outputs, in unit roundoffs, above which a model counts as not separable over samples. It
decides no verdict: the window is then computed micro-batch by micro-batch."""


def distance(recorded: Any, output: torch.Tensor) -> float:
    """Return the largest difference of a projection of two outputs, relative to their norm."""
    then, now = as_array(recorded), as_array(sketch(output))
    size = max(float(then[PROJECTIONS]), float(now[PROJECTIONS])) ** 0.5
    return float(np.abs(then - now)[:PROJECTIONS].max()) / size if size else 0.0


def is_exact(part: Part, found: Replayed) -> bool:
    """Whether a call's outputs are what they were to the bit."""
    return all(
        i < len(found.outputs) and not distance(part.forward.outputs[i], found.outputs[i]) for i in part.cotangents
    )


def reproduced(part: Part, found: Replayed, draws: Callable[[int], Replayed], *, exactly: bool) -> bool:
    """Whether a call's outputs are what they were, but for rounding.

    Args:
        part: the call.
        found: what it gave when it was computed again.
        draws: computes it again with changed parameters and inputs.
        exactly: whether other calls of the window gave the same bits: then only the rounding of parameters that were
            written and put back is allowed, in their dtype.
    """
    if is_exact(part, found):
        return True
    for i in part.cotangents:
        if i >= len(found.outputs):
            return False
        now, then = as_array(sketch(found.outputs[i])), as_array(part.forward.outputs[i])  # type: ignore[arg-type]
        if not np.isfinite(now).all() or not np.isfinite(then).all():
            return False
        dtype, shape = dtype_of(found.outputs[i]), tuple(found.outputs[i].shape)
        off = np.abs(now - then)[:PROJECTIONS]
        if exactly:
            dtype = min(map(dtype_of, part.forward.module.parameters()), key=lambda name: -UNIT_ROUNDOFF[name])
        allowed = resolution(float(then[PROJECTIONS]) ** 0.5, shape, dtype)
        if off.max() > allowed:
            if exactly:
                return False
            moved = np.array([as_array(sketch(draws(seed).outputs[i])) - now for seed in range(FEW_DRAWS)])
            noise = float(np.sqrt((moved[:, :PROJECTIONS] ** 2).mean()))
            if off.max() > allowed + student_factor(FEW_DRAWS) * noise:
                return False
    return True


@dataclass(frozen=True)
class Difference:
    """How `.grad` differs from the window's gradient.

    Attributes:
        error: 2-norm of the difference over that of the window's gradient, over all parameters.
        worst: id of the parameter whose difference is the largest of what is allowed, or None where none exceeds it.
        ratio: that difference over what is allowed.
    """

    error: float
    worst: int | None = None
    ratio: float = 0.0


def compare(
    observed: Mapping[int, torch.Tensor], total: Total, factor: float, draws: Callable[[int], Total]
) -> Difference:
    """Compare `.grad` with a factor times the window's gradient.

    Args:
        observed: id of each parameter -> its `.grad`.
        total: the window's gradient, computed again.
        factor: the common factor that something seen explains.
        draws: computes the window again with changed parameters and inputs.
    """
    squares = [0.0, 0.0]
    ratios: dict[int, float] = {}
    off: dict[int, float] = {}
    for key, gradient in total.gradients.items():
        if key in observed:
            found = observed[key].detach()
            dense = found.to_dense() if found.layout != torch.strided else found
            off[key] = norm(dense.double() - factor * gradient.double())
            squares[0] += off[key] ** 2
            squares[1] += (factor * norm(gradient)) ** 2
            ratios[key] = _ratio(off[key], _adding(observed[key], total, key, factor))
    error = (squares[0] / squares[1]) ** 0.5 if squares[1] else 0.0
    if max(ratios.values(), default=0.0) > 1:
        moved = [draws(seed).gradients for seed in range(FEW_DRAWS)]
        for key in [key for key, ratio in ratios.items() if ratio > 1]:
            here = total.gradients[key]
            mean = np.mean([norm(other[key].double() - here.double()) ** 2 for other in moved if key in other] or [0.0])
            noise = student_factor(FEW_DRAWS) * abs(factor) * float(mean) ** 0.5
            ratios[key] = _ratio(off[key], _adding(observed[key], total, key, factor) + noise)
    worst = max(ratios, key=lambda key: ratios[key], default=None)
    if worst is None or ratios[worst] <= 1:
        return Difference(error)
    return Difference(error, worst, ratios[worst])


def _adding(gradient: torch.Tensor, total: Total, key: int, factor: float) -> float:
    return abs(factor) * growth(total.terms + FURTHER_ROUNDINGS, total.dtype or dtype_of(gradient)) * total.sizes[key]


def _ratio(difference: float, allowed: float) -> float:
    return 0.0 if not difference else difference / allowed if allowed else float("inf")
