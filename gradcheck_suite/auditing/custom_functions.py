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
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradcheck_suite.auditing.function_calls import (
    LARGEST,
    FunctionCall,
    Laid,
    of_operator,
    reached,
    waits_for_ranks,
)
from gradcheck_suite.auditing.program_state import NotRecomputed, unchanged
from gradcheck_suite.core.comparison import UNIT_ROUNDOFF

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
# float32 has no digits left for the smaller steps
STEPS_OF = {torch.float64: STEPS, torch.float32: STEPS[: MOVING + 1]}
LEAST_OF_CALLERS = 0.05
"""The same for one that calls a module or another function: a solver's adjoint may be an approximation."""
LEAST_OF_DTYPES = 0.005
"""The same between two dtypes: one may keep its arguments for the backward in bfloat16."""
SPREAD = 0.05
"""Spread of a wrong factor of a function that passes a gradient where it is constant."""
HALVINGS = 20
JUMP = 64.0
"""How often an interval is halved to tell a jump from a bend, and what a bend then departs less by from its tangent."""
LONGEST_S = 1.0
"""Seconds that the calls by which a function is judged may take together."""
JITTER = 1e-3
"""Relative distance by which inputs are moved first: recorded ones often lie at kinks, such as the zeros of a ReLU."""
CONSTANT = "it passes a gradient where its output is constant, as a straight-through estimator does"
IGNORES = (
    "its backward gives a gradient where the one of its output is 0: it is right only for the"
    " gradient that it expects, such as 1"
)
CONTIGUOUS = (
    "its backward is another one for a gradient that is not contiguous in memory; it is right for"
    " those that were seen"
)
IDENTITY = "it returns its input and changes the gradient of it"
JUMPS = "its backward is not the derivative of its forward, which jumps or bends near by"
GIVEN = "the forward that makes its class gives it values"
ROUNDINGS = 64.0
"""Unit roundoffs by which gradients of one call may differ, relative to their size."""
NUDGES = 3
OF_NUDGES = 30.0
"""Points that are moved by one unit roundoff, and how many times what that changes is allowed."""
SECOND_STEPS = (1e-3, 1e-4, 1e-5)
"""Step sizes of the derivative of a backward."""
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
        called: the name of the fault.
    """

    name: str
    fault: str = ""
    note: str = ""
    error: float = 0.0
    called: str = "wrong-backward"


NOT_SEEN = "its backward was not checked, since no further call of it was seen"


def judge_backward(call: FunctionCall, *, accumulates: bool = True) -> FunctionReport:
    """Judge the `backward` of a custom function at one call.

    The random numbers of the process are changed.

    Args:
        call: the call.
        accumulates: whether the program adds up the gradients of several passes.
    """
    found = _of_forward(call)
    # what was found decides which calls follow, and ranks may find otherwise
    if found.fault or found.note or waits_for_ranks():
        return found
    # each of these holds the backward to one that is known to be the derivative
    checks = [_of_own_dtype, _of_program, _of_second]
    if accumulates:
        checks.append(_of_memory)
    for further in checks:
        # the function is the program's own, and raises what it likes where it cannot be called so
        with contextlib.suppress(Exception):
            if fault := further(call):
                return FunctionReport(
                    call.name, fault.words, error=fault.error, called=fault.called
                )
    # one that takes contiguous gradients alone may say so by any error
    with contextlib.suppress(Exception):
        if _needs_contiguous(call):
            return FunctionReport(call.name, note=CONTIGUOUS)
    return found


@dataclass(frozen=True)
class BackwardFault:
    """What is wrong with a backward.

    Attributes:
        words: what it is.
        error: the relative difference.
        called: the name of the fault.
    """

    words: str
    error: float
    called: str = "wrong-backward"


def _of_forward(call: FunctionCall) -> FunctionReport:
    """Hold `backward` to the derivative of `forward`."""
    name = call.name
    if refusal := _refusal(call):
        return FunctionReport(name, note=f"its backward was not checked: {refusal}")
    reason = ""
    # float64 first: many functions that are written in C++ or Triton take float32 alone
    for dtype in STEPS_OF:
        try:
            with FunctionUnderTest.of(call, dtype) as subject:
                return _judged(subject, dtype)
        except NotRecomputed as reason_of_state:
            return FunctionReport(name, note=f"its backward was not checked: {reason_of_state}")
        except Exception as error:  # whatever somebody's function raises on another dtype
            # the first one: that in float64 says what the function does not take
            reason = reason or f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return FunctionReport(
        name, note=f"its backward was not checked, since it cannot be called by itself ({reason})"
    )


def _refusal(call: FunctionCall) -> str:
    """Return why a call cannot be judged; empty where it can be tried."""
    if not call.by_itself:
        return GIVEN
    size = sum(v.numel() for v in call.arguments if isinstance(v, torch.Tensor))
    if size > LARGEST:
        return f"its arguments have {size} elements"
    # without others, nothing but its arguments can decide what it computes
    if not call.calls_others:
        return ""
    # its backward may compute that again, with the program's own parameters
    found = reached(call.arguments)
    # a module's tensors are replaced in its dicts; one in a closure stays the program's own, whose
    # `.grad` the calls would change
    if found.bare:
        return "it takes a function that uses tensors which need a gradient and are no parameters"
    parameters = set[torch.Tensor]()
    for module in found.modules:
        parameters.update(module.parameters(), module.buffers())
    if sum(p.numel() for p in parameters) > LARGEST:
        return "it takes a module or another function"
    if waits_for_ranks():
        return "it takes a module or another function, which may wait for other ranks"
    return ""


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _to(value: Any, dtype: torch.dtype | None) -> Any:
    return value.detach().to(dtype or value.dtype) if _is_real(value) else value


@dataclass(eq=False)
class FunctionUnderTest:
    """A function at one call, with the tensors of modules that it calls in one dtype.

    Attributes:
        call: the call.
        base: its arguments.
        wanted: indices of those whose gradient is looked at.
        tensors: of the modules: where each is held, its name there, and a copy.
        places: where its real outputs are among all.
    """

    call: FunctionCall
    base: list[Any]
    wanted: list[int]
    tensors: list[tuple[dict[str, Any], str, torch.Tensor]]
    places: list[int] = field(default_factory=list)

    @staticmethod
    @contextlib.contextmanager
    def of(call: FunctionCall, dtype: torch.dtype | None) -> Iterator[FunctionUnderTest]:
        """Make one, and put the modules' own tensors back at the end.

        Args:
            call: the call.
            dtype: of all real tensors; None for those that they have.
        """
        modules = reached(call.arguments).modules
        holders: dict[int, dict[str, Any]] = {}
        for module in modules:
            for part in module.modules():
                # by identity of the dicts: a module that is reached twice is held once
                holders[id(part._parameters)] = part._parameters
                holders[id(part._buffers)] = part._buffers
        own = list[tuple[dict[str, Any], str, torch.Tensor]]()
        for held in holders.values():
            own += [
                (held, name, tensor)
                for name, tensor in held.items()
                if isinstance(tensor, torch.Tensor)
            ]
        # by identity, so that a tied parameter stays tied
        copies = {
            id(tensor): _to(tensor, dtype).clone().requires_grad_(tensor.requires_grad)
            for _, _, tensor in own
        }
        wanted = [
            i for i, v in enumerate(call.arguments) if _is_real(v) and v.requires_grad and v.numel()
        ]
        base = [_to(value, dtype) for value in call.arguments]
        tensors = [(held, name, copies[id(tensor)]) for held, name, tensor in own]
        values = [v for v in call.arguments if not isinstance(v, torch.Tensor)]
        # the function may write to what the program reads next, such as a counter or a cache
        with unchanged(call.kind, values=[*values, *of_operator(call.kind)]):
            try:
                yield FunctionUnderTest(call, base, wanted, tensors)
            finally:
                for held, name, tensor in own:
                    held[name] = tensor

    def moved(self, generator: torch.Generator) -> list[Any]:
        """Return the arguments a little aside: recorded ones often lie at kinks."""
        return [
            v + JITTER * _direction(v, generator) if i in self.wanted else v
            for i, v in enumerate(self.base)
        ]

    def leaves(self, point: Sequence[Any]) -> list[Any]:
        """Return copies of arguments of which those that are looked at need a gradient."""
        return [
            v.detach().clone().requires_grad_() if i in self.wanted else v
            for i, v in enumerate(point)
        ]

    def bind(self, given: Sequence[Any]) -> None:
        """Let the modules have the tensors that are arguments, and copies of the others."""
        for held, name, tensor in self.tensors:
            held[name] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        for one in self.call.bound:
            one.holder[one.name] = given[one.index]

    def given(self, arguments: Sequence[Any]) -> list[Any]:
        """Return copies of arguments, which it may write to, and bind them."""
        given = [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]
        self.bind(given)
        return given

    def applied(self, given: Sequence[Any], *, grad: bool) -> list[torch.Tensor]:
        """Return the floating-point outputs of the function."""
        # the same numbers at each call, so that a random forward, such as dropout, is one function
        self.call.random.set()
        with torch.set_grad_enabled(grad):
            found = self.call.kind.apply(*given)
        outputs = found if isinstance(found, tuple) else (found,)
        self.places = [i for i, value in enumerate(outputs) if _is_real(value)]
        return [outputs[i] for i in self.places]

    def outputs(self, arguments: Sequence[Any]) -> list[torch.Tensor]:
        """Return the floating-point outputs for some arguments."""
        return self.applied(self.given(arguments), grad=False)

    @property
    def arrived(self) -> list[Laid | None]:
        """The gradients that came to its real outputs in the program; none where none were seen."""
        backward = self.call.backward
        return [backward.given[i] for i in self.places] if backward is not None else []


def _judged(subject: FunctionUnderTest, dtype: torch.dtype) -> FunctionReport:
    base = subject.base
    name = subject.call.name
    generator = torch.Generator().manual_seed(0)
    # not timed: the first call may compile a kernel
    first = subject.outputs(base)
    began = time.perf_counter()
    second = subject.outputs(base)
    took = time.perf_counter() - began
    # along each line, two ends of each step
    needed = len(subject.wanted) * DIRECTIONS * 2 * len(STEPS_OF.get(dtype, STEPS))
    if took * needed > LONGEST_S:
        note = (
            f"its backward was not checked, since one call of it takes {took:.2g} s, and"
            f" {needed} would be needed"
        )
        return FunctionReport(name, note=note)
    if not all(torch.isfinite(output).all() for output in first):
        note = "its backward was not checked, since its outputs are not finite"
        return FunctionReport(name, note=note)
    if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        note = "its backward was not checked, since its forward gives other outputs each time"
        return FunctionReport(name, note=note)
    moved = subject.moved(generator)
    outputs = subject.outputs(moved)
    # beside a recorded argument a logarithm or a root may have no value
    if not all(torch.isfinite(output).all() for output in outputs):
        moved = base
    elif dtype == torch.float64 and all(
        torch.equal(output, output.float().to(output)) for output in outputs
    ):
        raise TypeError("it computes in float32 inside, where the small steps of float64 are lost")
    verdicts = [
        _of_argument(subject, moved, index, STEPS_OF[dtype], generator) for index in subject.wanted
    ]
    # a fault of one argument is told before a note on another
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
    # such as a variance or a probability, of which the function may take a logarithm
    if bool((value > 0).all()):
        return draws * value
    size = float(value.double().square().mean().sqrt()) or 1.0
    return draws * size


def _of_argument(
    subject: FunctionUnderTest,
    point: list[Any],
    index: int,
    steps: tuple[float, ...],
    generator: torch.Generator,
) -> FunctionReport:
    """Judge the derivative with respect to one argument."""
    name = subject.call.name
    notes = list[str]()
    ratios = list[float]()
    on_purpose = list[float]()
    for number in range(DIRECTIONS):
        # every gradient lies in memory as the one that came; half of the lines go uphill
        line = _Line(
            subject,
            point,
            index,
            generator,
            uphill=bool(number % 2),
        )
        found = line.compared(steps)
        if isinstance(found, str):
            notes.append(found)
        elif found is not None:
            (on_purpose if found.passes_where_constant else ratios).append(found.ratio)
    least = LEAST_OF_CALLERS if subject.call.calls_others else LEAST
    if len(ratios) < 2 and len(on_purpose) > 1 and _are_one(on_purpose, SPREAD):
        ratios = on_purpose
    if len(ratios) < 2 and IGNORES in notes and subject.arrived:
        ratios = _of_what_arrived(subject, point, index, steps, generator)
    if len(ratios) < 2 or max(abs(r - 1) for r in ratios) <= least:
        if on_purpose:
            notes.append(CONSTANT)
        return FunctionReport(name, note=notes[0] if notes else "")
    return FunctionReport(
        name,
        f"with respect to argument {index} it is {_compared_as(ratios)} of its forward",
        error=max(abs(r - 1) for r in ratios),
    )


def _of_what_arrived(
    subject: FunctionUnderTest,
    point: list[Any],
    index: int,
    steps: tuple[float, ...],
    generator: torch.Generator,
) -> list[float]:
    """Return what `backward` gives over the derivative for the gradients that came in the program.

    A function that ignores them is right for those that it expects.
    """
    found = list[float]()
    for _ in range(DIRECTIONS):
        line = _Line(
            subject,
            point,
            index,
            generator,
            uphill=True,
            as_arrived=True,
        )
        compared = line.compared_as_a_whole(steps)
        if isinstance(compared, Ratio):
            found.append(compared.ratio)
    return found


def _are_one(ratios: Sequence[float], spread: float) -> bool:
    return max(ratios) - min(ratios) <= spread * abs(ratios[0])


def _compared_as(ratios: Sequence[float]) -> str:
    """Return in words what `backward` is, by what it gives over the derivative along each line."""
    if math.inf in ratios:
        return "not 0 where its output is constant; elsewhere it is the derivative"
    return (
        f"{ratios[0]:.3g} times the derivative" if _are_one(ratios, LEAST) else "not the derivative"
    )


@dataclass(frozen=True)
class Ratio:
    """A difference that nothing excuses.

    Attributes:
        ratio: what `backward` gives over the derivative, infinite where that is 0.
        passes_where_constant: whether it also passes a gradient where its output is constant, which
            may be on purpose.
    """

    ratio: float
    passes_where_constant: bool = False


class _Line:
    """A function along a random direction of one argument, with a random gradient of its outputs.

    Args:
        subject: the function.
        point: its arguments.
        index: of the argument.
        generator: of the direction and of the gradients.
        uphill: whether the direction goes where the outputs grow in the sense of the gradients.
        as_arrived: whether the gradients are those that came in the program.
    """

    def __init__(
        self,
        subject: FunctionUnderTest,
        point: list[Any],
        index: int,
        generator: torch.Generator,
        *,
        uphill: bool,
        as_arrived: bool = False,
    ) -> None:
        self.subject = subject
        self.point = point
        self.index = index
        self.direction = _direction(point[index], generator)
        # a backward may ask for the gradients of all that need one
        leaves = subject.leaves(point)
        self.leaf = leaves[index]
        self.given = subject.given(leaves)
        self.outputs = subject.applied(self.given, grad=True)
        arrived = subject.arrived or [None] * len(self.outputs)
        # an output that the function marks as not differentiable has no derivative to compare
        self.cotangents = [
            _cotangent(o, came, generator, as_arrived=as_arrived) * o.requires_grad
            for o, came in zip(self.outputs, arrived, strict=True)
        ]
        self.layouts = arrived
        gradient = self.backward(self.cotangents) if uphill else None
        if gradient is not None:
            # nothing of a sum of products of one sign cancels
            self.direction = torch.where(gradient < 0, -self.direction.abs(), self.direction.abs())

    def backward(self, cotangents: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the gradient of the argument for gradients of the outputs."""
        live = [
            (o, _laid(c, came))
            for o, c, came in zip(self.outputs, cotangents, self.layouts, strict=True)
            if o.requires_grad
        ]
        if not live:
            return None
        # the lines of the forward have bound others
        self.subject.bind(self.given)
        tensors, given = zip(*live, strict=True)
        return torch.autograd.grad(tensors, self.leaf, given, allow_unused=True, retain_graph=True)[
            0
        ]

    def at(self, move: float) -> list[torch.Tensor]:
        """Return the outputs at a place of the line."""
        values = [
            v + move * self.direction if i == self.index else v for i, v in enumerate(self.point)
        ]
        return self.subject.outputs(values)

    def difference_quotients(self, step: float) -> list[torch.Tensor]:
        """Return the central difference of each output."""
        return [(a - b) / (2 * step) for a, b in zip(self.at(step), self.at(-step), strict=True)]

    def compared_as_a_whole(self, steps: tuple[float, ...]) -> Ratio | str | None:
        """Compare `backward` with the derivative, whether or not the output is constant somewhere."""
        whole = self.backward(self.cotangents)
        if whole is None or not torch.isfinite(whole).all():
            return None
        quotients = [self.difference_quotients(step) for step in steps]
        everywhere = [torch.ones_like(o, dtype=torch.bool) for o in self.outputs]
        return self._where_moving(torch.zeros_like(whole), whole, everywhere, quotients)

    def compared(self, steps: tuple[float, ...]) -> Ratio | str | None:
        """Compare `backward` with the derivative.

        Returns:
            how the two differ where `forward` is smooth; words where they differ on purpose or may
            do so; None where they agree.
        """
        quotients = [self.difference_quotients(step) for step in steps]
        moving = [
            # an output that is rounded to less than float64 may stand still at a small step by
            # rounding alone
            (
                each[MOVING] != 0
                if each[MOVING].dtype == torch.float64
                else torch.stack(each[: MOVING + 1]).any(dim=0)
            )
            for each in zip(*quotients, strict=True)
        ]
        whole = self.backward(self.cotangents)
        still = self.backward([c * ~m for c, m in zip(self.cotangents, moving, strict=True)])
        if whole is None or still is None or not torch.isfinite(whole).all():
            return None
        least = LEAST if still.dtype == torch.float64 else BY_CHANCE
        # in float32 a few elements stand still by chance at every step
        if still.norm() > least * whole.norm():
            return self._where_constant(still, whole, moving, quotients)
        return self._where_moving(still, whole, moving, quotients)

    def _where_constant(
        self,
        still: torch.Tensor,
        whole: torch.Tensor,
        moving: Sequence[torch.Tensor],
        quotients: Sequence[Sequence[torch.Tensor]],
    ) -> Ratio | str:
        """Say of a function that passes a gradient where its output is constant whether that is on
        purpose.

        A straight-through estimator passes the gradient as it is, or one multiple of it. A function
        that has its derivative where it moves, and another multiple at each place where it does
        not, has forgotten a part of its domain. One that has a multiple of its derivative where it
        moves has a wrong factor.
        """
        if not any(each.any() for each in moving):
            return CONSTANT
        if self._of_no_gradient():
            return IGNORES
        found = self._where_moving(still, whole, moving, quotients)
        if isinstance(found, Ratio):
            return Ratio(found.ratio, passes_where_constant=True)
        if found is not None or len(self.outputs) != 1 or self.outputs[0].shape != self.leaf.shape:
            return CONSTANT
        passed = ~moving[0] & (still != 0)
        multiples = (still[passed] / self.cotangents[0][passed]).double()
        one = float(multiples.std(correction=0)) <= VARIED * float(multiples.abs().max())
        return CONSTANT if one else Ratio(math.inf)

    def _of_no_gradient(self) -> bool:
        """Return whether `backward` gives something for a gradient of zeros."""
        found = self.backward([torch.zeros_like(c) for c in self.cotangents])
        return found is not None and bool(found.any())

    def _where_moving(
        self,
        still: torch.Tensor,
        whole: torch.Tensor,
        moving: Sequence[torch.Tensor],
        quotients: Sequence[Sequence[torch.Tensor]],
    ) -> Ratio | str | None:
        """Compare `backward` with the derivative at the elements of the output that move."""
        cotangents = [c * m for c, m in zip(self.cotangents, moving, strict=True)]
        along = [
            float(
                sum((c.double() * d.double()).sum() for c, d in zip(cotangents, each, strict=True))
            )
            for each in quotients
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
            fine = along[MOVING : best + 1]
            if len(fine) < 2 or not off > STABLE * max(abs(value - right) for value in fine):
                return JUMPS
            if waits_for_ranks() or self._jumps(cotangents, quotients[best]):
                return JUMPS
        return Ratio(got / right if right else math.inf)

    def _jumps(self, cotangents: Sequence[torch.Tensor], fine: Sequence[torch.Tensor]) -> bool:
        """Return whether an output jumps near by, and does not only bend.

        The interval is halved where the output departs most from its tangent: by less and less at a
        bend, and by as much as before at a jump.
        """
        high = STEPS[0]
        low = -high
        ends = [self.at(low), self.at(high)]
        off = [
            ((b - a) - (high - low) * d).mul(c != 0)
            for a, b, d, c in zip(*ends, fine, cotangents, strict=True)
        ]
        which = max(range(len(off)), key=lambda i: float(off[i].abs().max()))
        place = int(off[which].abs().argmax())
        slope = float(fine[which].flatten()[place])

        def value(outputs: Sequence[torch.Tensor]) -> float:
            return float(outputs[which].flatten()[place])

        first = abs(float(off[which].flatten()[place]))
        left, right = map(value, ends)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            between = value(self.at(middle))
            departs = [
                abs(between - left - (middle - low) * slope),
                abs(right - between - (high - middle) * slope),
            ]
            if departs[0] > departs[1]:
                high = middle
                right = between
            else:
                low = middle
                left = between
        return abs(right - left - (high - low) * slope) > first / JUMP


def _cotangent(
    output: torch.Tensor, came: Laid | None, generator: torch.Generator, *, as_arrived: bool
) -> torch.Tensor:
    """Return a gradient of an output: a random one, or that which came."""
    if as_arrived:
        return torch.zeros_like(output) if came is None else came.values.to(output)
    draws = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
    # another shape than in the program: there is no layout to follow
    if came is None or came.values.shape != draws.shape:
        return draws
    try:
        return came.again(draws)
    except RuntimeError:
        return draws


def _laid(gradient: torch.Tensor, came: Laid | None) -> torch.Tensor:
    """Return a gradient that lies in memory as the one that came."""
    if came is None or came.values.shape != gradient.shape or came.stride == gradient.stride():
        return gradient
    try:
        laid = came.again(gradient)
    except RuntimeError:  # elements that share memory in another way than an expanded tensor's
        return gradient
    return laid if torch.equal(laid, gradient) else gradient


# Held to a backward that is known to be the derivative


@dataclass(frozen=True)
class _Gradients:
    """What a call gave.

    Attributes:
        outputs: its real outputs.
        found: index of an argument -> its gradient.
    """

    outputs: list[torch.Tensor]
    found: dict[int, torch.Tensor]


def _gradients(
    subject: FunctionUnderTest,
    point: Sequence[Any],
    cotangents: Sequence[torch.Tensor | None],
    *,
    seed: int,
) -> _Gradients:
    """Call a function, and its backward with some gradients.

    Args:
        subject: the function.
        point: its arguments.
        cotangents: of its real outputs; None for none.
        seed: of the random numbers that the backward may draw.
    """
    leaves = subject.leaves(point)
    outputs = subject.applied(subject.given(leaves), grad=True)
    live = [
        (o, c)
        for o, c in zip(outputs, cotangents, strict=True)
        if o.requires_grad and c is not None
    ]
    tensors, given = zip(*live, strict=True)
    torch.manual_seed(seed)
    found = torch.autograd.grad(
        tensors, [leaves[i] for i in subject.wanted], given, allow_unused=True
    )
    return _Gradients(
        [o.detach() for o in outputs],
        # a backward may give the same memory each time
        {i: g.clone() for i, g in zip(subject.wanted, found, strict=True) if g is not None},
    )


def _unit(tensors: Sequence[Any]) -> float:
    """Return the coarsest unit roundoff of some tensors."""
    names = (str(v.dtype).removeprefix("torch.") for v in tensors if _is_real(v))
    return max((UNIT_ROUNDOFF.get(name, UNIT_ROUNDOFF["float32"]) for name in names), default=0.0)


def _size(tensor: torch.Tensor) -> float:
    return float(tensor.double().norm())


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm())


def _are_close(found: Sequence[torch.Tensor], other: Sequence[torch.Tensor], least: float) -> bool:
    return len(found) == len(other) and all(
        a.shape == b.shape and _apart(a, b) <= least * _size(b)
        for a, b in zip(found, other, strict=True)
    )


def _of_own_dtype(call: FunctionCall) -> BackwardFault | None:
    """Hold `backward` in the dtypes of the call to what it is in float64, where it is the
    derivative.

    A function may have a way of its own for a dtype. Its rounding is measured, by points that are
    moved by one unit roundoff.
    """
    unit = _unit(call.arguments)
    # in float64 it was judged already
    if unit <= UNIT_ROUNDOFF["float64"] or not any(map(_is_real, call.arguments)):
        return None
    generator = torch.Generator().manual_seed(1)
    least = max(LEAST_OF_DTYPES, ROUNDINGS * unit)
    with FunctionUnderTest.of(call, None) as subject:
        point = subject.moved(generator)
        cotangents = [
            torch.randn(o.shape, generator=generator).to(o) for o in subject.outputs(point)
        ]
        here = _gradients(
            subject,
            point,
            cotangents,
            seed=0,
        )
        moved = []
        for _ in range(NUDGES):
            near = [
                v * (1 + 2 * unit * torch.randn(v.shape, generator=generator).to(v).sign())
                if _is_real(v)
                else v
                for v in point
            ]
            moved.append(_gradients(subject, near, cotangents, seed=0))
    with FunctionUnderTest.of(call, torch.float64) as subject:
        exact = _gradients(
            subject,
            [_to(v, torch.float64) for v in point],
            [c.double() for c in cotangents],
            seed=0,
        )
    # the forward itself is another one in float64, so its derivative is no measure
    if not _are_close(here.outputs, exact.outputs, least):
        return None
    for index in here.found.keys() & exact.found.keys():
        off = _apart(here.found[index], exact.found[index])
        size = _size(exact.found[index])
        rounding = max(_apart(one.found[index], here.found[index]) for one in moved)
        if off > max(least * size, OF_NUDGES * rounding):
            dtype = str(call.arguments[index].dtype).removeprefix("torch.")
            share = off / size if size else math.inf
            return BackwardFault(
                f"with respect to argument {index} it is another one in {dtype} than in float64, by"
                f" {share:.2g} of its size, and the one in float64 is the derivative",
                share,
            )
    return None


def _needs_contiguous(call: FunctionCall) -> bool:
    """Return whether `backward` depends on how a gradient of its outputs lies in memory."""
    generator = torch.Generator().manual_seed(4)
    with FunctionUnderTest.of(call, None) as subject:
        outputs = subject.outputs(subject.base)
        if not any(output.dim() > 1 for output in outputs):
            return False
        rows = [torch.randn(o.shape, generator=generator).to(o) for o in outputs]
        # the same values, laid out by columns
        columns = [c.mT.contiguous().mT if c.dim() > 1 else c for c in rows]
        one = _gradients(subject, subject.base, rows, seed=0).found
        other = _gradients(subject, subject.base, columns, seed=0).found
    least = max(LEAST, ROUNDINGS * _unit(call.arguments))
    return any(_apart(other[i], gradient) > least * _size(gradient) for i, gradient in one.items())


def _of_program(call: FunctionCall) -> BackwardFault | None:
    """Hold what `backward` gave in the program to what it gives by itself for the same call.

    What its forward kept outside of its context may be that of a later call by then.
    """
    if call.backward is None:
        return None
    with FunctionUnderTest.of(call, None) as subject:
        subject.outputs(subject.base)
        cotangents = [
            None if came is None else _laid(came.values, came) for came in subject.arrived
        ]
        # two seeds tell a backward that draws random numbers
        one, other = (_gradients(subject, subject.base, cotangents, seed=seed) for seed in (0, 1))
        then = [call.outputs[i] for i in subject.places]
    least = max(LEAST, ROUNDINGS * _unit(call.arguments))
    if not _are_close(one.outputs, then, least / ROUNDINGS):
        return None  # it read something else then
    for index, gradient in one.found.items():
        given = call.backward.returned[index]
        if given is None or given.values.shape != gradient.shape:
            continue
        if _apart(gradient, other.found[index]) > least * _size(gradient):
            return None  # it draws random numbers on purpose
        off = _apart(given.values, gradient)
        if off > least * _size(gradient):
            share = off / (_size(gradient) or math.inf)
            if written := call.backward.written:
                of_leaves = set(written) <= call.leaves
                listed = ", ".join(map(str, written))
                return BackwardFault(
                    f"argument {listed}, which it has saved, was written between its forward and its"
                    f" backward: what it gave differs by {share:.2g} of its size from the derivative",
                    share,
                    "stale-parameters" if of_leaves else "changed-batch",
                )
            return BackwardFault(
                f"with respect to argument {index} it differed in the program by {share:.2g} of its"
                " size from the derivative of its forward, which it is where it is called by itself"
                " (it reads what was written after its forward)",
                share,
            )
    return None


def _of_memory(call: FunctionCall) -> BackwardFault | None:
    """Hold the sum of two passes in `.grad` to the sum of what each gave.

    Torch puts the first gradient itself in `.grad`. A function that computes into one piece of
    memory of its own each time overwrites it.
    """
    if not call.leaves:
        return None
    generator = torch.Generator().manual_seed(3)
    with FunctionUnderTest.of(call, None) as subject:
        outputs = subject.outputs(subject.base)
        expected = dict[int, torch.Tensor]()
        leaves = subject.leaves(subject.base)
        for _ in range(2):
            cotangents = [torch.randn(o.shape, generator=generator).to(o) for o in outputs]
            for i, gradient in _gradients(subject, subject.base, cotangents, seed=0).found.items():
                expected[i] = expected[i] + gradient if i in expected else gradient
            subject.bind(leaves)
            made = subject.applied(leaves, grad=True)
            live = [(o, c) for o, c in zip(made, cotangents, strict=True) if o.requires_grad]
            torch.manual_seed(0)
            torch.autograd.backward([o for o, _ in live], [c for _, c in live])
    # only a leaf's `.grad` is added to in place
    for index in call.leaves & expected.keys():
        summed = leaves[index].grad
        size = _size(expected[index])
        off = math.inf if summed is None else _apart(summed, expected[index])
        if off > max(LEAST, ROUNDINGS * _unit(call.arguments)) * size:
            share = off / size if size else math.inf
            return BackwardFault(
                f"with respect to argument {index} it gives the same memory each time, which `.grad`"
                f" then is: a further pass overwrites it, and the sum is off by {share:.2g} of its"
                " size",
                share,
            )
    return None


def _of_second(call: FunctionCall) -> BackwardFault | None:
    """Hold the derivative of `backward`, through which a further pass of the program went, to its
    differences.
    """
    if not call.is_differentiated:
        return None
    generator = torch.Generator().manual_seed(2)
    with FunctionUnderTest.of(call, torch.float64) as subject:
        point = subject.moved(generator)
        ratios = [_second_along(subject, point, generator) for _ in range(DIRECTIONS)]
    found = [one for one in ratios if one is not None]
    # one direction may lie across a kink by chance
    if len(found) < 2:
        return None
    return BackwardFault(
        "a further pass goes through what it gives, and the derivative of that is lost or wrong (it"
        " was detached, or computed without the graph)",
        max(abs(ratio - 1) for ratio in found),
    )


def _second_along(
    subject: FunctionUnderTest, point: Sequence[Any], generator: torch.Generator
) -> float | None:
    """Return what the derivative of `backward` is over its difference quotient along a random line;
    None where they agree, or where it is not smooth.
    """

    def draw(shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    leaves = subject.leaves(point)
    outputs = [o for o in subject.applied(subject.given(leaves), grad=True) if o.requires_grad]
    cotangents = [draw(o.shape).to(o).requires_grad_() for o in outputs]
    trained = {i: leaves[i] for i in subject.wanted}
    first = torch.autograd.grad(
        outputs, list(trained.values()), cotangents, create_graph=True, allow_unused=True
    )
    found = {i: g for i, g in zip(trained, first, strict=True) if g is not None}
    weights = {i: draw(g.shape).to(g) for i, g in found.items()}
    inputs = [*trained.values(), *cotangents]
    directions = [_direction(v.detach(), generator) for v in inputs]
    terms = _terms_along(sum((found[i] * w).sum() for i, w in weights.items()), inputs, directions)
    got = float(sum(term.sum() for term in terms))

    def value(move: float) -> float:
        moved = [v.detach() + move * d for v, d in zip(inputs, directions, strict=True)]
        values = dict(zip(trained, moved, strict=False))
        there = [values.get(i, v) for i, v in enumerate(point)]
        at = _gradients(subject, there, moved[len(trained) :], seed=0).found
        return float(sum((at[i] * w).sum() for i, w in weights.items() if i in at))

    quotients = [(value(step) - value(-step)) / (2 * step) for step in SECOND_STEPS]
    right = quotients[-1]
    off = abs(got - right)
    size = max(abs(got), abs(right), math.hypot(*(float(term.norm()) for term in terms)))
    # negated, so that a NaN is no fault
    if not off > max(LEAST * size, STABLE * max(abs(one - right) for one in quotients)):
        return None
    return got / right if right else math.inf


def _terms_along(
    whole: Any, inputs: Sequence[torch.Tensor], directions: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the terms of a derivative along a direction; none where the graph is lost."""
    if not (isinstance(whole, torch.Tensor) and whole.requires_grad):
        return []
    found = torch.autograd.grad(whole, inputs, allow_unused=True)
    return [g * d for g, d in zip(found, directions, strict=True) if g is not None]
