"""Custom `torch.autograd.Function`s of a window that is computed again: is `backward` the derivative of `forward`?

A function is called by itself on the arguments of its first call, in float64 where it takes that. The derivative of
`forward` along some directions, by central differences of several steps, is held to what `backward` says.

Many functions differ from the derivative on purpose, and these are no faults: one that returns its input (gradient
reversal, scaling, clipping) and one that passes a gradient where its output is constant or jumps (straight-through
estimators, rounding, spikes). Elements of the output that a direction does not move are therefore left out, and a
difference is a fault only where it is `STABLE` times as large as the differences between all step sizes: where
`forward` is smooth.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from gradcheck_suite.auditing.forwards import RandomState
from gradcheck_suite.run.observer import Forward, kinds_of, replaced_forwards

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
