"""Whether what arrived adds up to what stands in `.grad` at a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.auditing.losses import NOWHERE, Place, living
from gradcheck_suite.auditing.passes import (
    PROJECTIONS,
    Pass,
    Sketch,
    Watched,
    as_array,
    is_finite,
    resolution,
    tolerance,
)
from gradcheck_suite.auditing.weights import History
from gradcheck_suite.auditing.window_again import Part
from gradcheck_suite.core.comparison import UNIT_ROUNDOFF
from gradcheck_suite.core.results import LiveViolation, ViolationKind

# What a live run says of each fault of the sum, and what to do.


SENTENCES = {
    "stale-window": "the gradient of an earlier step is still in it: reset the gradients once after every step",
    "no-gradient": "nothing of the window is in the gradient: it was reset between backward and the step",
    "reset-inside-window": "only the last backward passes of the window are in the gradient: "
    "reset once per window, not per micro-batch",
    "first-only": "only the window's first backward pass is in the gradient",
    "dropped-micro-batch": "some backward passes of the window are not in the gradient",
    "repeated-micro-batch": "a backward pass of the window is in the gradient twice",
    "running-loss": "earlier backward passes are in the gradient several times, as when the running sum of the losses "
    "goes backward each time: send each loss through once",
    "rescaled-accumulator": "the running sum itself is rescaled at every micro-batch; scale each contribution instead",
    "unrecognised-weights": "the backward passes of the window are not in the gradient once each",
    "not-linear": "the gradient is not a weighted sum of what arrived in the window: something else writes to `.grad` "
    "(clipping per micro-batch, noise, a shared buffer)",
    "hook": "a hook on a parameter changes the gradient of each micro-batch in a way that is no fixed factor of its "
    "elements (clipping, noise, normalization): do it once, to `.grad`, before the step",
    "foreign": "`.grad` still has the gradient of a backward pass that belonged to another optimizer's step: "
    "reset the gradients of this optimizer before its own backward passes",
    "step-per-micro-batch": "the optimizer steps after every micro-batch, where accumulation_steps = {steps}",
    "missing-gradient": "a parameter that the window reaches has no gradient at the step: "
    "look for what resets or replaces its `.grad`",
    "stale-parameters": "micro-batch(es) {numbers} of the window were computed with other parameters than those at the "
    "step: write to parameters between windows, not inside one",
    "moving-parameters": "another optimizer, which trains on the same passes, has made {steps} step(s) between "
    "the micro-batches of this window: let both step once per window",
    "mixed-modes": "micro-batch(es) {numbers} of the window were computed in another mode (train or eval) than the "
    "others: call model.train() after every evaluation",
    "nonlinear-backward": "the backward pass of {what} is no linear function of the gradient that it receives, so "
    "micro-batches do not add up to one batch (it ignores the gradient, clips or normalizes it)",
    "wrong-backward": "the backward of custom function {name} is wrong: {fault} of its forward (if that is on purpose, "
    "accept it with --accept wrong-backward)",
    "not-reduced": "only this rank's own gradient is in `.grad` at the step, not reduced over the ranks: run the "
    "forward and the backward of the window's last micro-batch outside no_sync",
    "tail-dropped": "{lost} micro-batch(es) went backward and were reset without a step: "
    "step after an epoch's last micro-batch too",
}

KNOWN = frozenset(SENTENCES) - {"hook", "foreign", "nonlinear-backward"} | {
    "mean-of-means",
    "wrong-count",
    "wrong-scale",
    "weighted-by-count",
    "rounded-weights",
    "unequal-factors",
    "tail-leak",
}
"""Every diagnosis of a live run: of the sum, and those that the weights of one window alone may show."""


# The names of an optimizer's parameters, from the modules that hold them.


WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that wrappers of models add."""


def _from_modules() -> dict[int, str]:
    """Return the longest name that a module has for each parameter: the outermost module gives it."""
    names: dict[int, str] = {}
    for module in living(torch.nn.Module):
        if "_parameters" in module.__dict__:
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if len(name) > len(names.get(id(parameter), "")):
                    names[id(parameter)] = name
    return names


def parameter_name(state: Watched, key: int) -> str:
    """Return the name of a parameter: the one in its model, else its place in the optimizer.

    Looking through all modules takes a while and is done once for an optimizer.
    """
    if key not in state.names:
        found = _from_modules()
        optimizer = state.optimizer()
        for i, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
            for j, parameter in enumerate(group["params"]):
                name = found.get(id(parameter), f"param_groups[{i}]['params'][{j}]")
                for prefix in WRAPPERS:
                    name = name.removeprefix(prefix)
                state.names[id(parameter)] = name
    return state.names.get(key, "?")


# One optimizer step that is judged, and what its optimizer's earlier windows showed.


@dataclass
class Judged:
    """What one step showed.

    Attributes:
        violation: the fault, or None.
        weights: whether the weights of a recognised loss were judged.
        sums: whether the sum was judged.
        handmade: whether the gradient was put together by the user, in a way that says nothing about weights.
        edited: whether `.grad` was edited after the last backward pass.
        again: how the window was computed again, or None where it was not.
        error: relative error of the gradient, where the window was computed again.
        copies: whether inputs must be copied for that, since they were changed in place.
        parts: the recorded calls of a window that was computed again.
        findings: what is worth knowing.
    """

    violation: LiveViolation | None = None
    weights: bool = False
    sums: bool = False
    handmade: bool = False
    edited: bool = False
    again: str | None = None
    error: float | None = None
    copies: bool = False
    parts: Sequence[Part] = ()
    findings: list[str] = field(default_factory=list)


@dataclass
class Memory:
    """What the windows of one optimizer showed so far.

    Attributes:
        histories: of each objective.
        lengths: how often each number of micro-batches made a window.
        unclear: a fault of the sum that may be an edit after the last backward; the next window tells.
        singles: number of windows of one micro-batch in a row.
        windows: number of windows whose sum was judged.
        lines: `file:line` of a call of backward -> number of these windows in which it is.
        functions: classes of custom functions that were judged.
    """

    histories: dict[Hashable, History] = field(default_factory=dict)
    lengths: Counter[int] = field(default_factory=Counter)
    unclear: LiveViolation | None = None
    singles: int = 0
    windows: int = 0
    lines: Counter[str] = field(default_factory=Counter)
    functions: set[type] = field(default_factory=set)

    def strays(self) -> list[str]:
        """Return what there is to say of calls of backward that only some windows have, beside one that all have."""
        if self.windows not in self.lines.values():
            return []
        return [
            f"{line}: backward is called here in {n} of {self.windows} windows, and what it computes is in the gradient"
            for line, n in self.lines.items()
            if n < self.windows
        ]

    def steps(self, given: int | None) -> int | None:
        """Return the number of micro-batches in a whole window: as given, else the most frequent one so far."""
        if given is not None:
            return given
        return self.lengths.most_common(1)[0][0] if self.lengths else None


@dataclass(frozen=True)
class Step:
    """One step of an optimizer.

    Attributes:
        state: the optimizer and the passes since its last step.
        place: of the call of `step`.
        number: of the step, among all.
        memory: of earlier windows.
        given: the accumulation steps that the user states, or None.
        configured: those of the trainer that runs, or None.
    """

    state: Watched
    place: Place
    number: int
    memory: Memory
    given: int | None = None
    configured: int | None = None

    @property
    def passes(self) -> list[Pass]:
        """The backward passes since the last step."""
        return self.state.pending

    @property
    def whole(self) -> int | None:
        """The number of micro-batches in a whole window, where it is known."""
        return self.memory.steps(self.given or self.configured)

    @property
    def backward(self) -> str | None:
        """`file:line` of the last call of backward, where it was seen."""
        return self.passes[-1].place.line if self.passes and self.passes[-1].place is not NOWHERE else None

    def violation(self, name: str, sentence: str | None = None) -> LiveViolation:
        """Return a violation of some name at this step."""
        where = next((r.call.place.line for p in reversed(self.passes) for r in p.received), None)
        return LiveViolation(
            "gradient",
            name,
            SENTENCES[name] if sentence is None else sentence,
            step=self.number,
            where=where or (self.passes[-1].place.line if self.passes else self.place.line),
            backward=self.backward,
            stepped=self.place.line,
        )


# Which backward passes are in `.grad` at a step, and how often: read off the sketches.
#
# The gradient of a step must be the sum of what arrived in the window's backward passes, up to one common factor.
# Where it is not, the coefficients of the passes name the fault, as in `judge.weights`.


Array = npt.NDArray[np.float64]
BY_CHANCE = 1e-6
"""Probability at most that coefficients fit which mean nothing: each equation beyond their number fits by chance."""


@dataclass(frozen=True)
class Sums:
    """The sketches of one step, for P parameters and r backward passes.

    Attributes:
        arrivals: (P, r, M), projections of what arrived, 0 where nothing did.
        gradient: (P, M), projections of `.grad`.
        previous: (P, M), projections of `.grad` at the step before.
        allowed: (P,), what the rounding of the additions explains of a projection's difference.
        resolution: (P,), what the rounding of `.grad` itself explains, whatever the factor.
        optional: (r,), whether another optimizer has stepped on the pass, so that it need not be in the sum.
    """

    arrivals: Array
    gradient: Array
    previous: Array
    allowed: Array
    resolution: Array
    optional: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Explanation:
    """What a gradient is made of.

    Attributes:
        name: `""` where it is the sum up to a factor; a diagnosis, or `not-linear` where no coefficients fit.
        coefficients: (r,), how often each pass is in the sum, before the factor.
        factor: the common factor.
        stale: the coefficient of the previous step's gradient.
        wrong: indices of the parameters that are not the sum; empty where all are wrong or none is.
        excess: the largest difference from the sum, relative to the gradient.
        ratio: the largest difference of a projection over what rounding explains.
    """

    name: str
    coefficients: tuple[float, ...]
    factor: float = 1.0
    stale: float = 0.0
    wrong: tuple[int, ...] = ()
    excess: float = 0.0
    ratio: float = 0.0
    details: tuple[str, ...] = field(default=())


def _misfit(sums: Sums, sum_: Array, factor: float) -> Array:
    """Return (P,): the largest difference of a projection from a factor times a sum, over what rounding explains."""
    difference = np.abs(sums.gradient - factor * sum_).max(axis=1, initial=0.0)
    allowed = abs(factor) * sums.allowed + sums.resolution
    return np.where(difference == 0, 0.0, difference / np.maximum(allowed, np.finfo(float).tiny))


def _factor(sums: Sums, sum_: Array, among: Array | None = None) -> float:
    g, s = (sums.gradient, sum_) if among is None else (sums.gradient[among], sum_[among])
    square = float((s * s).sum())
    return float((g * s).sum()) / square if square else 1.0


def _fits(sums: Sums, columns: Sequence[Array]) -> tuple[Array, Array] | None:
    """Return the coefficients of some columns, each (P, M), by least squares, and the misfit (P,)."""
    allowed = sums.allowed + sums.resolution
    weight = np.where(allowed > 0, 1 / np.where(allowed > 0, allowed, 1), 0.0)[:, None]
    matrix = np.stack([(column * weight).ravel() for column in columns], axis=1)
    if matrix.shape[0] < matrix.shape[1]:
        return None
    solution, _, rank, _ = np.linalg.lstsq(matrix, (sums.gradient * weight).ravel(), rcond=1e-9)
    if rank < matrix.shape[1]:
        return None
    fitted = np.tensordot(solution, np.stack(columns), axes=1)
    return np.asarray(solution, dtype=np.float64), _misfit(sums, fitted, 1.0)


def _coarseness(sums: Sums) -> float:
    """Return the share of its size by which a projection may be off: the chance that a wrong equation fits."""
    size = np.abs(sums.gradient).max(initial=0.0)
    allowed = (sums.allowed + sums.resolution).max(initial=0.0)
    return float(np.clip(allowed / size if size else 1.0, 1e-300, 1.0))


def _candidates(r: int) -> list[tuple[str, Array]]:
    """Return the named patterns of coefficients of r passes, the most common fault first."""
    found: list[tuple[str, Array]] = []
    ones, unit = np.ones(r), np.eye(r)
    if r > 1:
        found.append(("reset-inside-window", unit[-1]))
        found += [("reset-inside-window", np.where(np.arange(r) >= first, 1.0, 0.0)) for first in range(1, r - 1)]
        found.append(("first-only", unit[0]))
        found += [("dropped-micro-batch", ones - unit[j]) for j in range(r)]
        found += [("repeated-micro-batch", ones + unit[j]) for j in range(r)]
    if r > 2:
        found.append(("running-loss", np.arange(r, 0, -1.0)))
    return found


def _named(coefficients: Array) -> str:
    """Return the diagnosis of fitted coefficients, relative to the largest."""
    relative = coefficients / np.abs(coefficients).max()
    zero, r = np.abs(relative) < 1e-3, len(relative)
    if zero.any():
        kept = np.flatnonzero(~zero)
        if kept[-1] == r - 1 and not zero[kept[0] :].any():
            return "reset-inside-window"
        return "first-only" if list(kept) == [0] else "dropped-micro-batch"
    steps = relative[1:] / relative[:-1]
    if r > 2 and np.allclose(steps, steps.mean(), rtol=1e-3):
        return "rescaled-accumulator"
    return "unrecognised-weights"


def explain(sums: Sums) -> Explanation:
    """Say what a gradient is made of."""
    r = sums.arrivals.shape[1]
    required = (~sums.optional).astype(float)
    for coefficients in (required, np.ones(r)) if sums.optional.any() else (required,):
        found = _as_sum(sums, coefficients)
        if not found.name:
            return found
    found = _as_sum(sums, required if required.any() else np.ones(r))
    if found.wrong:
        part = np.array(found.wrong)
        named = _faulty(
            Sums(
                arrivals=sums.arrivals[part],
                gradient=sums.gradient[part],
                previous=sums.previous[part],
                allowed=sums.allowed[part],
                resolution=sums.resolution[part],
                optional=sums.optional,
            ),
            found,
        )
        return Explanation(
            named.name, named.coefficients, found.factor, named.stale, found.wrong, found.excess, found.ratio
        )
    return _faulty(sums, found)


def parallel(sums: Sums) -> bool:
    """Whether all that arrived, and the previous gradient, are multiples of one gradient."""
    columns = np.concatenate([sums.arrivals, sums.previous[:, None]], axis=1)
    matrix = np.moveaxis(columns, 1, 0).reshape(columns.shape[1], -1)
    values = np.linalg.svd(matrix, compute_uv=False)
    return len(values) < 2 or bool(values[1] <= 1e-4 * values[0])


def exactly(sums: Sums) -> Explanation | None:
    """Return what a gradient is made of by a named pattern and without any factor, or None."""
    r = sums.arrivals.shape[1]
    total = sums.arrivals.sum(axis=1)
    patterns = [("stale-window", np.ones(r), 1.0)] if np.abs(sums.previous).max(initial=0.0) else []
    for name, pattern, stale in [*patterns, *((name, pattern, 0.0) for name, pattern in _candidates(r))]:
        part = np.tensordot(sums.arrivals, pattern, axes=([1], [0])) + stale * sums.previous
        if _misfit(sums, part, 1.0).max() <= 1:
            excess = float(np.abs(sums.gradient - total).max() / np.abs(sums.gradient).max(initial=1e-300))
            return Explanation(name, tuple(float(c) for c in pattern), 1.0, stale, excess=excess, ratio=1.0)
    return None


def _as_sum(sums: Sums, coefficients: Array) -> Explanation:
    """Compare a gradient with a sum of passes up to one common factor; name it `not-linear` where it is not that."""
    total = np.tensordot(sums.arrivals, coefficients, axes=([1], [0]))
    size = np.abs(sums.gradient).max(initial=0.0)
    given = tuple(float(c) for c in coefficients)
    if not np.abs(total).max(initial=0.0) and not size:
        return Explanation("", given)
    misfit = _misfit(sums, total, 1.0)
    factor = 1.0
    if misfit.max() > 1 and size:
        seen = np.abs(total).max(axis=1) > 0
        # the median over parameters: a few wrong ones do not move it
        each = [_factor(sums, total, np.array([p])) for p in np.flatnonzero(seen)]
        guesses = [_factor(sums, total)] + ([float(np.median(each))] if each else []) + [1.0]
        factor = min(guesses, key=lambda f: (int((_misfit(sums, total, f) > 1).sum()), abs(f - 1)))
        misfit = _misfit(sums, total, factor)
    wrong = np.flatnonzero(misfit > 1)
    if not len(wrong):
        return Explanation("", given, factor, ratio=float(misfit.max()))
    excess = float(np.abs(sums.gradient - factor * total).max() / max(size, np.abs(total).max(), 1e-300))
    partial = tuple(int(p) for p in wrong) if len(wrong) < len(misfit) else ()
    return Explanation("not-linear", given, factor, wrong=partial, excess=excess, ratio=float(misfit.max()))


def _faulty(sums: Sums, found: Explanation) -> Explanation:
    """Name what a gradient that is not the sum is made of."""
    r = sums.arrivals.shape[1]
    passes = [sums.arrivals[:, j] for j in range(r)]
    total = np.tensordot(sums.arrivals, np.ones(r), axes=([1], [0]))

    def result(name: str, coefficients: Array, factor: float, stale: float = 0.0) -> Explanation:
        given = tuple(float(c) for c in coefficients)
        return Explanation(name, given, factor, stale, found.wrong, found.excess, found.ratio)

    if not np.abs(sums.gradient).max(initial=0.0):
        return result("no-gradient", np.zeros(r), 1.0)
    if np.abs(sums.previous).max(initial=0.0):
        if _misfit(sums, sums.previous, found.factor).max() <= 1 or _misfit(sums, sums.previous, 1.0).max() <= 1:
            return result("stale-window", np.zeros(r), 1.0, 1.0)
        if np.abs(total).max(initial=0.0):
            fit = _fits(sums, [total, sums.previous])
            if fit is not None and fit[1].max() <= 1 and abs(fit[0][0]) > 1e-12:
                return result("stale-window", np.ones(r), float(fit[0][0]), float(fit[0][1] / fit[0][0]))
    for name, pattern in _candidates(r):
        part = np.tensordot(sums.arrivals, pattern, axes=([1], [0]))
        if np.abs(part).max(initial=0.0):
            for factor in (1.0, found.factor, _factor(sums, part)):
                if factor and _misfit(sums, part, factor).max() <= 1:
                    return result(name, pattern, factor)
    stale = np.abs(sums.previous).max(initial=0.0) > 0
    columns = [column for column in passes if np.abs(column).max(initial=0.0)]
    unknowns = r + stale
    spare = sums.gradient.size - unknowns
    if len(columns) == r and spare > 0 and spare * np.log(_coarseness(sums)) < np.log(BY_CHANCE):
        fit = _fits(sums, [*passes, sums.previous] if stale else passes)
        if fit is not None and fit[1].max() <= 1 and np.abs(fit[0][:r]).max() > 0:
            old = float(fit[0][r]) if stale else 0.0
            scale = float(np.abs(fit[0][:r]).max())
            if abs(old) > 1e-3 * scale:
                return result("stale-window", fit[0][:r], 1.0, old)
            return result(_named(fit[0][:r]), fit[0][:r], 1.0)
    return result("not-linear", np.ones(r), found.factor)


def empty(parameters: int, r: int) -> Array:
    """Return (P, r, M) zeros."""
    return np.zeros((parameters, r, PROJECTIONS))


# The judgement of the sum: whether `.grad` at a step is what arrived in the window's backward passes.


def _sketches(
    state: Watched, passes: Sequence[Pass], gradients: dict[int, Sketch], previous: dict[int, Sketch]
) -> tuple[Sums, list[int]]:
    """Return the sketches as arrays, and the ids of the parameters."""
    keys, shapes, dtypes = [], [], []
    for key, parameter in state.live():
        if key in gradients or any(key in p.arrivals for p in passes):
            keys.append(key)
            shapes.append(tuple(parameter.shape))
            gradient = parameter.grad if parameter.grad is not None else parameter
            dtypes.append(str(gradient.dtype).removeprefix("torch."))
    arrivals = empty(len(keys), len(passes))
    now, before = np.zeros((len(keys), PROJECTIONS)), np.zeros((len(keys), PROJECTIONS))
    allowed, own = np.zeros(len(keys)), np.zeros(len(keys))
    for index, key in enumerate(keys):
        norms = []
        for j, one in enumerate(passes):
            if key in one.arrivals:
                found = as_array(one.arrivals[key])
                arrivals[index, j] = found[:PROJECTIONS]
                norms.append(max(found[PROJECTIONS], 0.0) ** 0.5)
        sizes = np.array(norms)
        size = 0.0
        for target, source in ((now, gradients), (before, previous)):
            if key in source and is_finite(source[key]):
                target[index] = source[key][:PROJECTIONS]
                size = max(size, float(source[key][PROJECTIONS]) ** 0.5)
        dtype = dtypes[index] if dtypes[index] in UNIT_ROUNDOFF else "float32"
        allowed[index] = tolerance(sizes, shapes[index], dtype)
        own[index] = resolution(size, shapes[index], dtype)
    optional = np.array([bool(p.consumers) or not p.accumulates for p in passes])
    if optional.all():
        # nothing came after the other optimizer's step: both step on the same passes
        optional = np.array([not p.accumulates for p in passes])
    return Sums(arrivals, now, before, allowed, own, optional), keys


def _untouched(sums: Sums, passes: Sequence[Pass]) -> bool:
    """Whether gradients were written by hand, and not from all that one line computed by `torch.autograd.grad`."""
    if not sums.optional.all() or not np.abs(sums.gradient).max(initial=0.0):
        return False
    found = explain(sums)
    unused = {p.place.line for p, c in zip(passes, found.coefficients, strict=True) if abs(c) < 1e-3}
    used = {p.place.line for p, c in zip(passes, found.coefficients, strict=True) if abs(c) >= 1e-3}
    return found.name == "not-linear" or (found.name != "" and not unused & used)


def _handmade(step: Step, found: Explanation, before: Explanation, now: Sums, left: Sums) -> bool:
    """Whether the user has put a gradient together from passes that he had reset, as per-example clipping does."""
    if before.name != "reset-inside-window" or found.name not in ("unrecognised-weights", "not-linear"):
        return False
    again = any(abs(f) >= 1e-3 > abs(b) for f, b in zip(found.coefficients, before.coefficients, strict=True))
    if found.name == "unrecognised-weights":
        return again
    # what is left of the last pass is small beside what was written over it
    last, written = left.gradient.ravel(), now.gradient.ravel()
    sizes = float(last @ last) * float(written @ written)
    overwritten = sizes > 0 and float(last @ written) ** 2 < MOSTLY * sizes
    return step.state.replaced() or overwritten or all(p.clips for p in step.passes)


def _foreign(passes: Sequence[Pass], found: Explanation, optional: np.ndarray) -> bool:
    """Whether the gradient has passes that another optimizer stepped on, from other lines than this window's own."""
    left = [p for p, c, o in zip(passes, found.coefficients, optional, strict=True) if o and c and p.consumers]
    own = [p for p, o in zip(passes, optional, strict=True) if not o]
    lines = [
        {r.call.place.line for p in part for r in p.received} or {p.place.line for p in part} for part in (left, own)
    ]
    return bool(left and own) and not lines[0] & lines[1]


def _with_fault(step: Step, found: Explanation, violation: LiveViolation, result: Judged) -> Explanation | None:
    """Report a wrong sum, or look at the next step in detail where this gradient may have been edited."""
    if found.name == "not-linear" and not step.passes[-1].after:
        step.state.detail = True
        step.memory.unclear = step.memory.unclear or violation
        result.findings.append("a gradient is not the sum of what arrived, and may have been edited before the step")
        return None
    result.sums = True
    result.violation = violation
    return found


def _with_edits(step: Step, found: Explanation, result: Judged) -> Explanation:
    """Judge the edits of user hooks: the same factors in each micro-batch are one edit of the window's gradient."""
    edits = [fixed for p in step.passes for fixed in p.edited.values()]
    if not edits:
        return found
    if len(step.passes) > 1 and not all(edits):
        result.violation = step.violation("not-linear", SENTENCES["hook"])
    else:
        result.findings.append("a hook on a parameter multiplies its gradient by fixed factors")
    return found


def _excuse(step: Step, found: Explanation) -> str | None:
    """Return why a sum that lacks passes is no fault, or None."""
    state, passes = step.state, step.passes
    zero = [abs(c) < 1e-3 for c in found.coefficients]
    versions = [p.versions.get(id(state)) for p in passes]
    moved = [v != versions[-1] for v in versions]
    partial = ("reset-inside-window", "dropped-micro-batch", "unrecognised-weights")
    excused = found.name in partial and all(m for m, z in zip(moved, zero, strict=True) if z)
    if any(moved) and (excused or found.name == "not-linear"):
        return "parameters were written between the backward passes of a window: the earlier ones were not judged"
    if found.name in partial and any(zero):
        dropped = [p for p, z in zip(passes, zero, strict=True) if z]
        kept_lines = {p.place.line for p, z in zip(passes, zero, strict=True) if not z}
        if all(len(p.versions) > 1 and p.place.line not in kept_lines for p in dropped):
            return "backward passes that another optimizer shares were reset before the window: they were not judged"
    if found.name == "reset-inside-window" and any(zero):
        lost, kept = sum(zero), len(zero) - sum(zero)
        whole = step.whole
        if whole is not None and kept == whole and lost % whole == 0:
            return "a whole window was reset without a step, as a guard against bad windows does: it was not judged"
        if state.steps == 0 and not {p.place.line for p, z in zip(passes, zero, strict=True) if z} & {
            p.place.line for p, z in zip(passes, zero, strict=True) if not z
        }:
            return "backward passes before the training began were reset: they were not judged"
    return None


def _sum_violation(step: Step, found: Explanation) -> LiveViolation:
    passes, name = step.passes, found.name
    kind: ViolationKind = "gradient"
    zero = [abs(c) < 1e-3 for c in found.coefficients]
    whole = step.whole
    sentence = SENTENCES[name]
    if name == "reset-inside-window" and whole is not None and len(zero) - sum(zero) == whole and sum(zero) < whole:
        name, kind = "tail-dropped", "step-count"
        sentence = SENTENCES[name].format(lost=sum(zero))
    if found.wrong and name == "no-gradient":
        name, kind = "missing-gradient", "none-pattern"
        sentence = SENTENCES[name]
    if name in ("dropped-micro-batch", "repeated-micro-batch", "unrecognised-weights", "rescaled-accumulator"):
        shown = ", ".join(f"{c:.4g}" for c in found.coefficients[:16])
        sentence += f"; the window's backward passes are in the gradient {shown} times"
    if clipped := sum(bool(p.clips) for p in passes[:-1]):
        sentence = (
            f"gradients are clipped {clipped + bool(passes[-1].clips)} times in a window of {len(passes)}: "
            "clip once, after the window's last backward"
        )
        name = "not-linear"
    amount = f"the gradient is off by {found.excess:.2g} of its size"
    which = "" if not found.wrong else f", in {len(found.wrong)} parameter(s)"
    violation = step.violation(name)
    return replace(
        violation,
        kind=kind,
        explanation=f"{sentence} ({amount}{which})",
        error=found.excess,
        allowed=found.excess / max(found.ratio, 1e-300),
    )


def _parameter(state: Watched, keys: list[int], found: Explanation, sums: Sums) -> str | None:
    candidates = found.wrong or range(len(keys))
    worst = max(candidates, key=lambda p: float(np.abs(sums.gradient[p]).max() + np.abs(sums.arrivals[p]).max()))
    return parameter_name(state, keys[worst]) if keys else None


def clip_factor(passes: Sequence[Pass]) -> float:
    """Return the factor of the clipping after the last backward pass."""
    factor = 1.0
    for _, norm, largest in passes[-1].clips:
        size = float(norm)
        if np.isfinite(size):
            factor *= min(1.0, largest / (size + 1e-6))
    return factor


HANDMADE = "gradients were put together by hand from several backward passes: their sum was not judged"
GROWN = (
    "the gradient of a step was more than what arrived in its window, by one factor: something multiplied it after the "
    "last backward, or gradients of earlier steps are in it"
)
LARGER = 0.05
"""Relative excess over what arrived from which on it is reported; bfloat16 may add 2**-9 for each micro-batch."""
MOSTLY = 0.5
"""Share of the square of a gradient from which on it counts as that of the last pass, with something added."""
UNEXPLAINED = 1e-3
"""Relative deviation from what clipping explains, from which on the next window is looked at in detail."""


def judge_sum(
    step: Step, gradients: dict[int, Sketch], previous: dict[int, Sketch], result: Judged
) -> Explanation | None:
    """Judge the sum; return what the gradient is made of where that is clear.

    Args:
        step: the step.
        gradients: id of each parameter -> sketch of its `.grad`.
        previous: the same at the step before.
        result: what the step showed; this adds to it.
    """
    state, passes, memory = step.state, step.passes, step.memory
    sums, keys = _sketches(state, passes, gradients, previous)
    if _untouched(sums, passes):
        result.findings.append("gradients were written by hand: what arrived by backward was not used")
        return None
    found, own_buffer = explain(sums), False
    after = {key: as_array(sketch) for key, sketch in passes[-1].after.items()}
    if after and any(g[:PROJECTIONS].any() for g in gradients.values()):
        # `.grad` as the last backward pass left it: what was done to it afterwards is the user's decision
        left, _ = _sketches(state, passes, after, previous)
        before = explain(left)
        own_buffer = not found.name and before.name == "reset-inside-window"
        if _handmade(step, found, before, sums, left):
            state.detail, memory.unclear = True, None
            result.findings.append(HANDMADE)
            result.handmade = found.name == "not-linear"
            return None if result.handmade else replace(found, name="")
        if before.factor != 1.0 and parallel(left):
            # where all arrivals are parallel, any sum of them is a multiple of any other
            found = exactly(left) or found
        elif found.name and before.name and (before.name != "not-linear" or found.name == "not-linear"):
            found = replace(before, factor=before.factor * clip_factor(passes))
        elif found.name and not before.name:
            state.detail = result.sums = result.edited = True
            memory.unclear = None
            result.findings.append("gradients were edited between the last backward and the step, not by one factor")
            return replace(before, factor=1.0)
    unexplained = 0.0 if found.name else found.factor / clip_factor(passes) - 1
    state.detail = own_buffer or abs(unexplained) > UNEXPLAINED
    if unexplained > LARGER:
        result.findings.append(GROWN)
    if found.name and (excuse := _excuse(step, found)):
        result.findings.append(excuse)
        # what is left in the gradient is a window of its own
        return None if found.name == "not-linear" else replace(found, name="")
    if not found.name:
        result.sums = True
        if _foreign(passes, found, sums.optional):
            result.violation = step.violation("stale-window", SENTENCES["foreign"])
        return _with_edits(step, found, result)
    violation = replace(_sum_violation(step, found), parameter=_parameter(state, keys, found, sums))
    return _with_fault(step, found, violation, result)
