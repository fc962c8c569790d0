"""Custom functions of a window: is `backward` the derivative of `forward`?

A function is called by itself on the arguments of its first call, in float64 where it takes that.
The derivative of `forward` along some directions, by central differences of several steps, is held
to what `backward` says.

Many functions differ from the derivative on purpose, and these are no faults: one that returns its
input (gradient reversal, scaling, clipping) and one that passes a gradient where its output is
constant or jumps (straight-through estimators, rounding, spikes). Elements of the output that a
direction does not move are therefore left out, and a difference is a fault only where it is
`STABLE` times as large as the differences between all step sizes: where `forward` is smooth.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import types
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from gradcheck_suite.auditing.program_state import PLAIN, NotRecomputed, RandomState, unchanged
from gradcheck_suite.run.functions import Forward as FunctionForward
from gradcheck_suite.run.functions import replaced_forwards

LEAST = 1e-3
"""Relative difference of a derivative that is not looked at: a function may compute in float32."""
BY_CHANCE = 0.1
"""The share of a gradient's norm that passes where an output in float32 stands still, by its rounding: 1% of them."""
VARIED = 0.05
"""Least spread of the multiples of a gradient that is passed where an output is constant, for which it is no purpose:
rounding in float32 spreads those of a straight-through estimator by less than 1e-5 of them."""
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
IGNORES = (
    "its backward gives a gradient where the one of its output is 0: it is right only for the"
    " gradient that it expects, such as 1"
)
IDENTITY = "it returns its input and changes the gradient of it"
JUMPS = "its backward is not the derivative of its forward, which jumps or bends near by"
GIVEN = "the forward that makes its class gives it values"
DIRECTIONS = 4
"""Random directions for each input; every other one goes uphill, so that nothing cancels."""


@dataclass(frozen=True)
class FunctionReport:
    """What is known of a custom function.

    Attributes:
        name: of the class.
        fault: what is wrong with `backward`, in words; empty where nothing is, as far as it was
            judged.
        note: why the function was not judged, or that its gradient is another one on purpose; empty
            otherwise.
        error: relative difference of the derivative, where there is a fault.
    """

    name: str
    fault: str = ""
    note: str = ""
    error: float = 0.0


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a custom function.

    Attributes:
        kind: its class.
        arguments: a copy of what it was called with.
        random: the random numbers that it drew from.
        by_itself: whether the class is the function whatever its arguments are: one that is made
            anew in each forward may have values from there, which belong to the arguments.
    """

    kind: Any
    arguments: list[Any]
    random: RandomState
    by_itself: bool = True


FunctionKey = type | tuple[str, str, Any]
"""A class of a custom function, or the statement that makes a new one each time: see `statement_of`."""


def statement_of(kind: Any) -> FunctionKey:
    """Return what all classes have that one statement has made, as in the forward of a module:
    names and code.
    """
    return (
        kind.__module__,
        kind.__qualname__,
        getattr(inspect.unwrap(kind.forward), "__code__", None),
    )


class _Bare(torch.autograd.Function):
    """A class statement gives it what it gives every class, such as the line of the statement from
    Python 3.13 on.
    """


_BARE = frozenset(vars(_Bare))


def _captured(kind: type) -> list[Any] | None:
    """Return the values that a class has from where it was made.

    None where some are no plain ones, such as tensors.
    """
    found: list[Any] = []
    for name, value in vars(kind).items():
        function = inspect.unwrap(getattr(value, "__func__", value))
        if isinstance(function, types.FunctionType):
            for cell in function.__closure__ or ():
                with contextlib.suppress(
                    ValueError
                ):  # the class's own name, which is bound when it is made
                    found.append(cell.cell_contents)
            found += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        elif name not in _BARE:
            found.append(value)
    found = [value for value in found if value is not kind]
    return found if all(isinstance(value, PLAIN) for value in found) else None


@contextlib.contextmanager
def first_calls(kinds: Set[type]) -> Iterator[dict[FunctionKey, Call]]:
    """Record the first call of each class while this is open: its arguments are copied.

    Where the statement that made one of the classes makes another one meanwhile, the first call of
    those is recorded.
    """
    found: dict[FunctionKey, Call] = {}
    statements = {statement_of(kind): _captured(kind) for kind in kinds}

    def recording(kind: Any, key: FunctionKey, *, by_itself: bool = True) -> Any:
        def made(forward: FunctionForward, first: int) -> FunctionForward:
            def recorded(*arguments: Any) -> Any:
                if key not in found:
                    given = [_copy(value) for value in arguments[first:]]
                    found[key] = Call(kind, given, RandomState.now(), by_itself)
                return forward(*arguments)

            return recorded

        return made

    with contextlib.ExitStack() as stack:

        def again(kind: type) -> None:
            if (statement := statement_of(kind)) in statements:
                values = _captured(kind)
                by_itself = values is not None and values == statements[statement]
                stack.enter_context(
                    replaced_forwards([(kind, recording(kind, statement, by_itself=by_itself))])
                )

        stack.enter_context(replaced_forwards((kind, recording(kind, kind)) for kind in kinds))
        stack.enter_context(_each_new_function(again))
        yield found


class CallsOfProgram:
    """Records the first call of classes that the program calls outside of recorded modules.

    The forward of a class is replaced from the moment it is known until the next judgement.
    """

    def __init__(self) -> None:
        self._calls: dict[type, Call] = {}
        self._watched: set[type] = set()
        self._stack = contextlib.ExitStack()

    def watch(self, kinds: Iterable[type]) -> None:
        """Record the next call of some classes."""
        for kind in kinds:
            if kind not in self._watched:
                self._watched.add(kind)
                self._stack.enter_context(replaced_forwards([(kind, self._recording(kind))]))

    def _recording(self, kind: type) -> Callable[[FunctionForward, int], FunctionForward]:
        def made(forward: FunctionForward, first: int) -> FunctionForward:
            def recorded(*arguments: Any) -> Any:
                if kind not in self._calls and not torch.compiler.is_compiling():
                    with contextlib.suppress(Exception):  # nothing is raised into the program
                        self._record(kind, arguments[first:])
                return forward(*arguments)

            return recorded

        return made

    def _record(self, kind: type, arguments: Sequence[Any]) -> None:
        of_tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return
        # a large call is not judged: no copy is made of it
        small = sum(value.numel() for value in of_tensors) <= LARGEST
        given = [_copy(value) if small else value for value in arguments]
        self._calls[kind] = Call(kind, given, RandomState.now())

    @property
    def has_calls(self) -> bool:
        """Whether some can be judged."""
        return bool(self._calls)

    def judged(self) -> list[FunctionReport]:
        """Judge what was recorded, and let the classes go."""
        calls = self._calls
        self.close()
        return [judge_function(call) for call in calls.values()]

    def close(self) -> set[type]:
        """Let all classes go, and return those that were watched in vain."""
        self._stack.close()
        unseen = self._watched - self._calls.keys()
        self._watched = set()
        self._calls = {}
        return unseen


NOT_SEEN = "its backward was not checked, since no further call of it was seen"


@contextlib.contextmanager
def _each_new_function(tell: Callable[[type], None]) -> Iterator[None]:
    """Tell of each class of a custom function that is made while this is open."""
    function: Any = torch.autograd.Function

    def told(kind: Any, /, **keywords: Any) -> None:
        super(function, kind).__init_subclass__(**keywords)
        tell(kind)

    function.__init_subclass__ = classmethod(told)
    try:
        yield
    finally:
        del function.__init_subclass__


def _copy(value: Any) -> Any:
    return (
        value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor)
        else value
    )


def judge_function(call: Call) -> FunctionReport:
    """Judge the `backward` of a custom function at one call.

    The random numbers of the process are changed.
    """
    name = call.kind.__name__
    reason = ""
    if not call.by_itself:
        return FunctionReport(name, note=f"its backward was not checked: {GIVEN}")
    if any(map(callable, call.arguments)):
        # its backward may compute that again, with the program's own parameters
        note = "its backward was not checked: it takes a module or another function"
        return FunctionReport(name, note=note)
    if (size := sum(v.numel() for v in call.arguments if isinstance(v, torch.Tensor))) > LARGEST:
        return FunctionReport(
            name, note=f"its backward was not checked: its arguments have {size} elements"
        )
    for dtype in STEPS_OF:
        try:
            with unchanged(call.kind):
                return _judged(call, dtype)
        except NotRecomputed as reason_of_state:
            return FunctionReport(name, note=f"its backward was not checked: {reason_of_state}")
        except Exception as error:  # whatever somebody's function raises on another dtype
            reason = reason or f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return FunctionReport(
        name, note=f"its backward was not checked, since it cannot be called by itself ({reason})"
    )


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _outputs(call: Call, arguments: Sequence[Any], *, grad: bool = False) -> list[torch.Tensor]:
    """Return the floating-point outputs of the function."""
    call.random.set()
    given = [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]
    with torch.set_grad_enabled(grad):
        found = call.kind.apply(*given)
    return [value for value in (found if isinstance(found, tuple) else (found,)) if _is_real(value)]


def _judged(call: Call, dtype: torch.dtype) -> FunctionReport:
    base = [v.detach().to(dtype) if _is_real(v) else v for v in call.arguments]
    wanted = [
        i for i, v in enumerate(call.arguments) if _is_real(v) and v.requires_grad and v.numel()
    ]
    name = call.kind.__name__
    generator = torch.Generator().manual_seed(0)
    if not all(
        torch.equal(a, b) for a, b in zip(_outputs(call, base), _outputs(call, base), strict=True)
    ):
        note = "its backward was not checked, since its forward gives other outputs each time"
        return FunctionReport(name, note=note)
    moved = [
        v + JITTER * _direction(v, generator) if i in wanted else v for i, v in enumerate(base)
    ]
    outputs = _outputs(call, moved)
    if not all(torch.isfinite(output).all() for output in outputs):
        moved = base
    elif dtype == torch.float64 and all(
        torch.equal(output, output.float().to(output)) for output in outputs
    ):
        raise TypeError("it computes in float32 inside, where the small steps of float64 are lost")
    verdicts = [_of_argument(call, moved, index, STEPS_OF[dtype], generator) for index in wanted]
    return next(
        (v for v in verdicts if v.fault),
        next((v for v in verdicts if v.note), FunctionReport(name)),
    )


def _direction(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a random direction of the input's size.

    It keeps the sign of an input whose elements are positive.
    """
    draws = (
        torch.randn(value.shape, generator=generator, dtype=torch.float64).clamp(-2, 2).to(value)
    )
    if bool((value > 0).all()):
        return draws * value
    return draws * (float(value.double().square().mean().sqrt()) or 1.0)


def _of_argument(
    call: Call, point: list[Any], index: int, steps: tuple[float, ...], generator: torch.Generator
) -> FunctionReport:
    """Judge the derivative with respect to one argument."""
    name = call.kind.__name__
    notes = list[str]()
    ratios = list[float]()
    for number in range(DIRECTIONS):
        found = _Line(call, point, index, generator, uphill=bool(number % 2)).compared(steps)
        if isinstance(found, str):
            notes.append(found)
        elif found is not None:
            ratios.append(found)
    if len(ratios) < 2:
        return FunctionReport(name, note=notes[0] if notes else "")
    return FunctionReport(
        name,
        f"with respect to argument {index} it is {_compared_as(ratios)}",
        error=max(abs(r - 1) for r in ratios),
    )


def _compared_as(ratios: Sequence[float]) -> str:
    """Return in words what `backward` is, by what it gives over the derivative along each line."""
    if math.inf in ratios:
        return "not 0 where its output is constant; elsewhere it is the derivative"
    same = max(ratios) - min(ratios) <= LEAST * abs(ratios[0])
    return f"{ratios[0]:.3g} times the derivative" if same else "not the derivative"


class _Line:
    """A function along a random direction of one argument, with a random gradient of its outputs."""

    def __init__(
        self, call: Call, point: list[Any], index: int, generator: torch.Generator, *, uphill: bool
    ) -> None:
        self.call = call
        self.point = point
        self.index = index
        self.direction = _direction(point[index], generator)
        self.leaf = point[index].clone().requires_grad_()
        self.outputs = _outputs(
            call, [self.leaf if i == index else v for i, v in enumerate(point)], grad=True
        )
        # an output that the function marks as not differentiable has no derivative to compare
        self.cotangents = [
            torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) * o.requires_grad
            for o in self.outputs
        ]
        gradient = self.backward(self.cotangents) if uphill else None
        if gradient is not None:
            # nothing of a sum of products of one sign cancels
            self.direction = torch.where(gradient < 0, -self.direction.abs(), self.direction.abs())

    def backward(self, cotangents: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the gradient of the argument for gradients of the outputs."""
        live = [(o, c) for o, c in zip(self.outputs, cotangents, strict=True) if o.requires_grad]
        if not live:
            return None
        tensors, given = zip(*live, strict=True)
        return torch.autograd.grad(tensors, self.leaf, given, allow_unused=True, retain_graph=True)[
            0
        ]

    def slopes(self, step: float) -> list[torch.Tensor]:
        """Return the central difference of each output."""
        ends = []
        for move in (step, -step):
            values = [
                v + move * self.direction if i == self.index else v
                for i, v in enumerate(self.point)
            ]
            ends.append(_outputs(self.call, values))
        return [(a - b) / (2 * step) for a, b in zip(*ends, strict=True)]

    def compared(self, steps: tuple[float, ...]) -> float | str | None:
        """Compare `backward` with the derivative.

        Returns:
            what `backward` gives over the derivative where the two differ and `forward` is smooth;
            words where it differs on purpose or may do so; None where they agree.
        """
        slopes = [self.slopes(step) for step in steps]
        moving = [
            # an output that is rounded to less than float64 may stand still at a small step by
            # rounding alone
            (
                each[MOVING] != 0
                if each[MOVING].dtype == torch.float64
                else torch.stack(each[: MOVING + 1]).any(dim=0)
            )
            for each in zip(*slopes, strict=True)
        ]
        whole = self.backward(self.cotangents)
        still = self.backward([c * ~m for c, m in zip(self.cotangents, moving, strict=True)])
        if whole is None or still is None or not torch.isfinite(whole).all():
            return None
        least = LEAST if still.dtype == torch.float64 else BY_CHANCE
        # in float32 a few elements stand still by chance at every step
        if still.norm() > least * whole.norm():
            return self._where_constant(still, whole, moving, slopes)
        return self._where_moving(still, whole, moving, slopes)

    def _where_constant(
        self,
        still: torch.Tensor,
        whole: torch.Tensor,
        moving: Sequence[torch.Tensor],
        slopes: Sequence[Sequence[torch.Tensor]],
    ) -> float | str:
        """Say of a function that passes a gradient where its output is constant whether that is on
        purpose.

        A straight-through estimator passes the gradient as it is, or one multiple of it. A function
        that has its derivative where it moves, and another multiple at each place where it does
        not, has forgotten a part of its domain.

        Returns:
            what `backward` gives over the derivative, infinite, where that is no purpose; else
            words.
        """
        if self._of_no_gradient() and any(each.any() for each in moving):
            return IGNORES
        if (
            len(self.outputs) != 1
            or self.outputs[0].shape != self.leaf.shape
            or not moving[0].any()
        ):
            return CONSTANT
        passed = ~moving[0] & (still != 0)
        multiples = (still[passed] / self.cotangents[0][passed]).double()
        if float(multiples.std(correction=0)) <= VARIED * float(multiples.abs().max()):
            return CONSTANT
        return math.inf if self._where_moving(still, whole, moving, slopes) is None else CONSTANT

    def _of_no_gradient(self) -> bool:
        """Return whether `backward` gives something for a gradient of zeros."""
        found = self.backward([torch.zeros_like(c) for c in self.cotangents])
        return found is not None and bool(found.any())

    def _where_moving(
        self,
        still: torch.Tensor,
        whole: torch.Tensor,
        moving: Sequence[torch.Tensor],
        slopes: Sequence[Sequence[torch.Tensor]],
    ) -> float | str | None:
        """Compare `backward` with the derivative at the elements of the output that move."""
        cotangents = [c * m for c, m in zip(self.cotangents, moving, strict=True)]
        along = [
            float(
                sum((c.double() * d.double()).sum() for c, d in zip(cotangents, each, strict=True))
            )
            for each in slopes
        ]
        terms = (whole - still).double() * self.direction.double()
        got = float(terms.sum())
        # the finest of the two neighbours that agree best; beyond it, rounding
        best = min(range(1, len(along)), key=lambda i: abs(along[i] - along[i - 1]))
        off = abs(got - along[best])
        right = along[best]
        if not off > LEAST * max(abs(got), abs(right), float(terms.norm())):
            return None
        if any(o.shape == self.leaf.shape and torch.equal(o, self.leaf) for o in self.outputs):
            return IDENTITY
        if not off > STABLE * max(abs(value - right) for value in along[: best + 1]):
            return JUMPS
        return got / right if right else float("inf")
