"""Where gradients part: the same search as for values, backwards, over cotangents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, count
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from gradcheck_suite.port.budget import Budget
from gradcheck_suite.port.changes import RAISED, Hypothesis, of_operand, of_result
from gradcheck_suite.port.explanation import Explanation, best_explanation
from gradcheck_suite.port.jax_program import CUSTOM, JaxProgram, line_of
from gradcheck_suite.port.matching import array, only_moves
from gradcheck_suite.port.mistakes import is_activation
from gradcheck_suite.port.number_sets import Array, Numbers
from gradcheck_suite.port.own_functions import OwnFunction
from gradcheck_suite.port.rounding import RESOLUTION, rounding_bounds
from gradcheck_suite.port.search import ALIKE, Repairs, at_every_call
from gradcheck_suite.port.sides import Point, Sides, input_name
from gradcheck_suite.port.torch_program import (
    Change,
    OperationCall,
    Ref,
    TorchProgram,
    TorchRun,
    with_tensors,
)

CANDIDATES = 1200
"""Changes that are tried. The zoo of ports needs up to 105."""
DETACHED = 6
"""Calls that read a detached tensor, of which up to two may have another operand detached."""
FACTORS = (2.0, 0.5, -1.0, 0.1, 10.0)


@dataclass
class GradientFault:
    """A difference of gradients that was placed.

    Attributes:
        index: of the call, or None where none was found.
        cause: its name.
        words: what the port does.
        left: parameters whose gradients still differ after its repair, with how much.
        repairs: with its repair, or None where it was not explained.
    """

    index: int | None
    cause: str
    words: str
    left: dict[str, float]
    repairs: Repairs | None


def wrong_gradients(
    sides: Sides, point: Point, expected: Mapping[str, Array], skip: set[str]
) -> dict[str, float]:
    """Return the parameters whose gradients differ by more than rounding, with the relative error
    of each.
    """
    run = sides.jax_run(point)
    allowed = rounding_bounds(sides, point).gradients
    theirs = run.gradients
    observed = sides.gradients(run)
    parameters = [g for n, g in expected.items() if n in sides.map.offsets]
    largest = max((float(np.abs(g).max(initial=0.0)) for g in parameters), default=0.0)
    found = {}
    for name, gradient in expected.items():
        is_parameter = name in sides.map.offsets
        if name in skip or (not is_parameter and name not in observed):
            continue
        size = float(np.abs(gradient).max(initial=0.0)) + 1e-6 * largest + 1e-300
        if is_parameter and not sides.map.complete:
            off = along_directions(sides, name, gradient, theirs, size)
            if off > 1e-5:
                found[name] = off
            continue
        off = _gradient_error(observed[name], gradient, is_parameter)
        # a repaired torch may have a gradient by an input that it had not
        if off > allowed.get(name, 10 * RESOLUTION * size):
            found[name] = off / size
    return found


def _gradient_error(observed: Array, expected: Array, is_parameter: bool) -> float:
    """Return the largest difference of gradients.

    By an input, as of an arc cosine of 1, a gradient may be no number: then nothing is expected.
    """
    observed = np.atleast_1d(observed)
    expected = np.atleast_1d(expected)
    difference = np.abs(observed - expected)
    difference[observed == expected] = 0.0
    free = np.isnan(expected) if is_parameter else ~np.isfinite(expected)
    difference[free] = 0.0
    return float(np.where(np.isnan(difference), np.inf, difference).max(initial=0.0))


def along_directions(
    sides: Sides, name: str, gradient: Array, theirs: list[Array], size: float
) -> float:
    """Return how far derivatives in random directions of a parameter differ.

    `load` is differentiated numerically.
    """
    if sides.pair.load is None:
        return 0.0
    worst = 0.0
    rng = np.random.default_rng(3)
    step = 1e-5
    for _ in range(2):
        direction = rng.normal(size=gradient.shape)
        ends = []
        for sign in (1, -1):
            state = dict(sides.state)
            for other in sides.map.names:
                if sides.map.part(other) == sides.map.part(name):
                    state[other] = sides.state[other] + sign * step * direction
            ends.append(sides.map.params(state))
        total = 0.0
        for slope, high, low in zip(theirs, *ends, strict=True):
            if slope is not None and np.asarray(high).dtype.kind == "f":
                total += float((np.asarray(slope) * (np.asarray(high) - np.asarray(low))).sum()) / (
                    2 * step
                )
        norm = max(float(np.sqrt((gradient**2).sum())), size)
        worst = max(worst, abs(total - float((gradient * direction).sum())) / norm)
    return worst


def _frontier(sides: Sides, point: Point, run: TorchRun, names: Iterable[str]) -> list[int]:
    """Return the calls through which wrong gradients come from right cotangents, the last ones
    first.
    """
    program = sides.torch_program(point)
    status = _cotangents_matched(sides, point, run)
    inputs = {input_name(int(i)): Ref(kind, i) for kind, i in program.given if kind == "input"}
    found = set[int]()
    seen = set[Ref]()
    todo = [inputs.get(n, Ref("state", n)) for n in names]
    while todo:
        ref = todo.pop()
        if ref in seen:
            continue
        seen.add(ref)
        for reader in program.readers.get(ref, []):
            results = [Ref(reader, j) for j in range(len(run.values[reader]))]
            outs = [out for out in results if out in status]
            if any(status[out] is False for out in outs):
                todo += outs
            elif outs:
                found.add(reader)
    return sorted(found, reverse=True)


def _cotangents_matched(sides: Sides, point: Point, run: TorchRun) -> dict[Ref, bool | None]:
    """Return, for each result of torch that has a gradient, whether the port has that gradient."""
    bounds = rounding_bounds(sides, point)
    theirs = [g for g in sides.jax_run(point).gradients if g is not None]
    theirs += list(sides.jax_run(point).input_gradients.values())
    tolerance = max(10 * RESOLUTION, bounds.outputs if bounds.rounded else 0.0)
    numbers = Numbers([*sides.cotangents(point), *theirs], tolerance)
    tensors: dict[Ref, torch.Tensor] = {}
    for i, values in enumerate(run.values):
        for j, value in enumerate(values):
            if torch.is_tensor(value) and value.requires_grad and value.is_floating_point():
                tensors[Ref(i, j)] = value
    grads = torch.autograd.grad(
        run.loss, list(tensors.values()), allow_unused=True, retain_graph=True
    )
    pairs = zip(tensors, grads, strict=True)
    return {ref: numbers.holds(array(g)) for ref, g in pairs if g is not None}


def place_gradient(
    sides: Sides,
    point: Point,
    repairs: Repairs,
    wrong: Mapping[str, float],
    skip: set[str],
    budget: Budget,
) -> GradientFault:
    """Return where gradients part, and which change of torch's backward explains it."""
    program = sides.torch_program(point)
    run, _ = sides.torch_gradients(program, repairs)
    frontier = _frontier(sides, point, run, wrong)
    budget = budget.of(CANDIDATES)

    def tried(hypothesis: Hypothesis) -> Explanation[GradientFault] | None:
        try:
            changed = repairs.with_change(hypothesis)
            _, expected = sides.torch_gradients(program, changed)
            left = wrong_gradients(sides, point, expected, skip)
        except RAISED:
            return None
        if left and not (len(left) < len(wrong) and set(left) <= set(wrong)):
            return None
        at = min(hypothesis.changes) if hypothesis.at is None else hypothesis.at
        fault = GradientFault(
            at,
            hypothesis.cause,
            hypothesis.words,
            left,
            changed,
        )
        return Explanation(fault, not left, -len(left))

    found = best_explanation(_candidates(program, run, frontier), tried, budget)
    if found is not None and (found.is_whole or not budget.stopped):
        return found.value
    last = max([i for i in frontier if i not in repairs.changes] or frontier, default=None)
    return _without_repair(sides, point, wrong, last, budget)


def _candidates(
    program: TorchProgram, run: TorchRun, frontier: Sequence[int]
) -> Iterator[Hypothesis]:
    """Yield other gradients: at a call, then at all calls that have something in common with it."""
    at_calls = chain.from_iterable(_at_call(program, run, index) for index in frontier)
    for hypothesis in chain(_with_more(program), at_calls):
        scopes = [hypothesis.changes]
        scopes += [at_every_call(program, hypothesis, alike) for alike in ALIKE[-2:]]
        for changes in {tuple(changes): changes for changes in scopes}.values():
            at = hypothesis.at
            if len(changes) > len(hypothesis.changes):
                at = min(changes) if at is None else min(at, *changes)
            yield replace(hypothesis, changes=changes, at=at)


def _without_repair(
    sides: Sides, point: Point, wrong: Mapping[str, float], last: int | None, budget: Budget
) -> GradientFault:
    """Return what is known of a difference of gradients that no change of torch explains."""
    theirs = sides.gradients(sides.jax_run(point))
    # the gradient by an input has other ways, beside that of the parameters
    names = [n for n in wrong if n in sides.map.offsets] or list(wrong)
    if sides.map.complete and all(not theirs[n].any() for n in names):
        return GradientFault(
            last,
            "no-gradient",
            f"no gradient of {_some(wrong)} at all",
            {},
            None,
        )
    if rule := own_rule(sides.jax_program(point)):
        return GradientFault(
            last,
            "custom-gradient",
            f"a rule of its own at {rule}",
            {},
            None,
        )
    return GradientFault(
        last,
        "unknown",
        f"another gradient{budget.words}",
        {},
        None,
    )


def _some(names: Mapping[str, float]) -> str:
    return ", ".join(sorted(names, key=lambda n: -names[n])[:3])


def own_rule(program: JaxProgram) -> str:
    """Return `file:line` of the author's rule for a derivative, or nothing."""
    rules = [
        e
        for e in program.all_equations
        if e.primitive.name in CUSTOM and e.primitive.name != "custom_jvp_call"
    ]
    return next(filter(None, map(line_of, rules)), "")


def stops(program: JaxProgram) -> str:
    """Return where the author's code stops gradients, in words, or nothing."""
    lines = [line_of(e) for e in program.all_equations if e.primitive.name == "stop_gradient"]
    found = list(dict.fromkeys(line for line in lines if line))
    return f" (stop_gradient at {', '.join(found[:3])})" if found else ""


def _at_call(program: TorchProgram, run: TorchRun, index: int) -> Iterator[Hypothesis]:
    """Yield other gradients of one call."""
    call = program.calls[index]
    if call.name == "embedding":
        if call.args[2:] and call.args[2] >= 0:
            words = "a gradient of the padding row"
            yield Hypothesis("padding-gradient", words, {index: lambda c, a, k, g: c.op(*a[:2])})
        for row in (0, 1):
            yield Hypothesis(
                "padding-gradient",
                f"no gradient of row {row}",
                {index: lambda c, a, k, g, r=row: c.op(*a[:2], r)},
            )
    refs = [(i, r) for i, r in enumerate(pytree.tree_leaves(call.args)) if isinstance(r, Ref)]
    for ref in call.refs:
        at = _producer(program, run, ref, index)
        own = input_name(int(ref.index)) if ref.kind == "input" else str(ref.index)
        what = program.calls[at].label if at != index else own
        yield Hypothesis(
            "stop-gradient", f"no gradient through {what}", {index: _stopped(call, ref)}, at=at
        )
    words = f"no gradient through {call.label}"
    yield Hypothesis("stop-gradient", words, {index: of_result(lambda v: v.detach())}, at=index)
    for factor in FACTORS:
        for i, _ in refs:
            change = of_operand(i, lambda v, f=factor: f * v + (1 - f) * v.detach())
            yield Hypothesis("gradient-scaled", f"a gradient times {factor:g}", {index: change})
    out = run.values[index][0]
    for _, ref in refs:
        if run.get(ref).shape == out.shape:
            yield Hypothesis(
                "straight-through",
                "the gradient of the identity",
                {index: lambda c, a, k, g, r=ref: [g(r) + (c.op(*a, **k) - g(r)).detach()]},
            )


def _stopped(call: OperationCall, ref: Ref) -> Change:
    """Return the change that detaches an operand of a call.

    In the calls of other layers, the one at the same place.
    """
    places = {n for n, r in enumerate(call.refs) if r == ref}

    def change(call: OperationCall, args: Any, kwargs: Any, get: Any) -> Any:
        number = count()
        stop = lambda v: v.detach() if next(number) in places else v  # noqa: E731 - one use
        args, kwargs = pytree.tree_map_only(torch.Tensor, stop, (args, kwargs))
        return call.op(*args, **kwargs)

    return change


def _producer(program: TorchProgram, run: TorchRun, ref: Ref, index: int) -> int:
    """Return the call that computes an operand, past those that only move it."""
    at = ref.kind if isinstance(ref.kind, int) else index
    while only_moves(program.calls[at], run.seen[at], run) and not is_activation(program.calls[at]):
        before = next((r.kind for r in program.calls[at].refs), None)
        if not isinstance(before, int):
            return at
        at = before
    return at


def _with_more(program: TorchProgram) -> Iterator[Hypothesis]:
    """Yield that what torch detaches, or computes without gradients, has one."""
    own = {i: c.op.start for i, c in enumerate(program.calls) if isinstance(c.op, OwnFunction)}
    for i, start in own.items():
        words = f"that of what its forward computes, not its backward ({program.calls[i].label})"
        yield Hypothesis("missing-custom-gradient", words, _freed(start, i), at=i)
    yield from _without_no_grad(program, own)
    yield from _without_detach(program)


def _freed(start: int, end: int) -> dict[int, Change]:
    """Return the changes of calls that are made with gradients, whatever torch did."""

    def free(call: OperationCall, args: Any, kwargs: Any, get: Any) -> Any:
        with torch.enable_grad():
            return call.op(*args, **kwargs)

    return dict.fromkeys(range(start, end), free)


def _without_no_grad(program: TorchProgram, own: Mapping[int, int]) -> Iterator[Hypothesis]:
    """Yield that calls in a row that torch makes under `no_grad` have a gradient.

    Args:
        program: of torch.
        own: index of each call of a Function -> the first call of its forward, which torch itself
            makes without gradients.
    """
    forwards = set(chain.from_iterable(range(start, i) for i, start in own.items()))
    words = "an extra gradient where torch has no_grad and the port no stop_gradient"
    start = None
    for i in range(len(program.calls) + 1):
        inside = i < len(program.calls) and not program.calls[i].grad and i not in forwards
        if inside and start is None:
            start = i
        elif not inside and start is not None:
            yield Hypothesis("missing-stop-gradient", words, _freed(start, i), at=i - 1)
            start = None


def _without_detach(program: TorchProgram) -> Iterator[Hypothesis]:
    """Yield that what torch detaches has a gradient, alone or in place of another operand."""
    exchanged: dict[int, Change] = {}
    detached = [i for i in sorted(program.needed) if program.calls[i].name == "detach"]
    for i in detached:
        words = "an extra gradient where torch detaches and the port has no stop_gradient"
        yield Hypothesis("missing-stop-gradient", words, {i: lambda c, a, k, g: [a[0]]}, at=i)
        change = _other_stopped(Ref(i, 0), program.calls[i].args[0])
        exchanged |= dict.fromkeys(program.readers.get(Ref(i, 0), []), change)
    few = list(exchanged.items())[-DETACHED:]
    words = "a gradient of the operand that torch detaches, and none of the other"
    for group in chain(combinations(few, 1), combinations(few, 2)):
        changes = dict(group)
        yield Hypothesis("stop-gradient", words, changes, at=min(changes))


def _other_stopped(detached: Ref, source: Ref) -> Change:
    """Return the change of a call that reads a detached tensor: it reads that as it was, and the
    others detached.
    """

    def change(call: OperationCall, args: Any, kwargs: Any, get: Any) -> Any:
        read = lambda r: get(source) if r == detached else get(r).detach()  # noqa: E731 - one use
        return call.op(*with_tensors(call.args, read), **with_tensors(call.kwargs, read))

    return change
