"""Calibration: false alarms on sound loops, and how small a planted error is found."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch

from gradcheck_suite.catalogue.definitions import Signal
from gradcheck_suite.catalogue.tables import INPUTS, LAYERS, LOSSES, out_signal
from gradcheck_suite.core.case import Case, Layer, Plan
from gradcheck_suite.core.comparison import Layout, Vector
from gradcheck_suite.core.contract import (
    ASSUMPTIONS,
    EQUAL_MICRO_BATCHES,
    SUM_REDUCTION,
    WHOLE_WINDOWS,
    Loop,
    TrainingRun,
    assumptions_of,
    autocast_of,
)
from gradcheck_suite.core.results import Verdict, json_number
from gradcheck_suite.loops.reset_modes import BUILT_IN, part_of_window, window_count, windows
from gradcheck_suite.reference.large_batch import (
    REFERENCES,
    CannotJudgeError,
    Reference,
    WindowReference,
)
from gradcheck_suite.run.instance import AutocastRecorder, one_thread, torch_dtype
from gradcheck_suite.run.runner import Outcome, run_loop
from gradcheck_suite.strategies.cases import cases
from gradcheck_suite.strategies.drawing import draw_cases as draw_distinct
from gradcheck_suite.verification.check import check
from studies.tally import NEVER, OURS, RIVALS, Curve, Tally, exponents, failed_rules


def float_shares(run: TrainingRun) -> None:
    """Scale losses by Python floats."""
    for window in windows(run):
        counts = [float(run.count(batch)) for batch in window]
        for batch, count in zip(window, counts, strict=True):
            loss = run.loss(run.model, batch)
            (loss * (count / sum(counts)) if run.reduction == "mean" else loss).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def one_backward(run: TrainingRun) -> None:
    """Add up a window's losses and run one backward."""
    for window in windows(run):
        total = window_count(run, window)
        losses: Any = sum(part_of_window(run, batch, total) for batch in window)
        losses.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def any_order(run: TrainingRun) -> None:
    """Take a window's micro-batches from the last to the first."""
    for window in windows(run):
        total = window_count(run, window)
        for batch in reversed(window):
            part_of_window(run, batch, total).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def autograd_grad(run: TrainingRun) -> None:
    """Add up what `torch.autograd.grad` returns."""
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    for window in windows(run):
        total = window_count(run, window)
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        for batch in window:
            loss = part_of_window(run, batch, total)
            if loss.requires_grad:
                found = torch.autograd.grad(loss, parameters, allow_unused=True)
                sums = [
                    b if a is None else a if b is None else a + b
                    for a, b in zip(sums, found, strict=True)
                ]
        for p, gradient in zip(parameters, sums, strict=True):
            p.grad = gradient
        run.optimizer.step()


def scaled_and_back(run: TrainingRun, factor: float = 3) -> None:
    """Multiply each loss by a factor and divide the gradients by it."""
    for window in windows(run):
        total = window_count(run, window)
        for batch in window:
            (factor * part_of_window(run, batch, total)).backward()
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.div_(factor)
        run.optimizer.step()
        run.optimizer.zero_grad()


LOOPS: dict[str, Loop] = {
    **BUILT_IN,
    **{
        loop.__name__: loop
        for loop in (float_shares, one_backward, any_order, autograd_grad, scaled_and_back)
    },
}
"""The sound loops that the campaign judges."""


@dataclass(frozen=True)
class Sound:
    """A sound gradient that errors are planted in.

    Attributes:
        observed: (P,), what a sound loop handed its optimizer.
        contributions: of each micro-batch, (P,).
        layout: of the vectors.
        dtype: of the case.
    """

    observed: Vector
    contributions: Sequence[Vector]
    layout: Layout
    dtype: str

    def with_error(self, direction: Vector, size: float) -> Vector:
        """Return the gradient with `size` times a direction added, rounded to the dtype.

        No gradient holds anything else: half of one unit roundoff in an element is no error at all.
        """
        moved = torch.from_numpy(self.observed + size * direction)
        rounded: Vector = moved.to(torch_dtype(self.dtype)).to(torch.float64).numpy()
        return rounded


Place = Callable[[Sound, np.random.Generator], Vector | None]


def _everywhere(sound: Sound, rng: np.random.Generator) -> Vector | None:
    return sound.observed if sound.observed.any() else None


def _micro_batch(sound: Sound, rng: np.random.Generator) -> Vector | None:
    """One micro-batch counts for 1 + s times what it should."""
    present = [c for c in sound.contributions if c.any()]
    return present[rng.integers(len(present))] if present else None


def _parameter(sound: Sound, rng: np.random.Generator) -> Vector | None:
    layout = sound.layout
    slices = [slice(o, o + s) for o, s in zip(layout.offsets, layout.sizes, strict=True)]
    present = [part for part in slices if sound.observed[part].any()]
    if not present:
        return None
    return _part(sound, present[rng.integers(len(present))])


def _largest(sound: Sound, rng: np.random.Generator) -> Vector | None:
    return _part(sound, int(np.argmax(np.abs(sound.observed)))) if sound.observed.any() else None


def _any(sound: Sound, rng: np.random.Generator) -> Vector | None:
    nonzero = np.flatnonzero(sound.observed)
    return _part(sound, int(rng.choice(nonzero))) if len(nonzero) else None


def _part(sound: Sound, elements: int | slice) -> Vector:
    direction = np.zeros_like(sound.observed)
    direction[elements] = sound.observed[elements]
    return direction


PLACES: dict[str, Place] = {
    "everywhere": _everywhere,
    "one parameter": _parameter,
    "one micro-batch": _micro_batch,
    "the largest element": _largest,
    "an element not 0": _any,
}
"""Places of errors: each function returns (P,), the error of size 1, or None where all elements there are 0.

An element that is 0 stays 0 under any factor, so an error in one element is planted in the largest one, or in any that
is not 0. Among these are elements whose parts cancel, down to nothing but rounding; a rule that finds every small error
there blames sound loops as well."""


DRAWN_WITHIN = ((), (), (EQUAL_MICRO_BATCHES, WHOLE_WINDOWS), (SUM_REDUCTION,))
"""Assumptions that cases are drawn within, in turn: half of the cases are drawn freely, the others so that loops with
assumptions have cases too."""


@dataclass(frozen=True)
class Drawn:
    """A case, and the assumptions that hold in it."""

    case: Case
    within: frozenset[str]


def draw_cases(dtype: str, chunk: int, count: int, seed_value: int) -> list[Drawn]:
    """Draw one chunk of the campaign's cases; the same arguments and versions give the same cases.

    Args:
        dtype: of the cases.
        chunk: which chunk.
        count: how many cases.
        seed_value: of the campaign.
    """
    groups: list[list[Drawn]] = []
    for i, within in enumerate(DRAWN_WITHIN):
        share = count // len(DRAWN_WITHIN) + (i < count % len(DRAWN_WITHIN))
        if share:
            digest = hashlib.sha256(f"{seed_value}/{dtype}/{chunk}/{i}".encode()).digest()
            drawn = cases(dtype=dtype, assumes=within)
            found = draw_distinct(drawn, examples=share, seed_value=int.from_bytes(digest[:4]))
            shorter = [case.replace(plan=_first_and_last(case.plan)) for case in found]
            groups.append([Drawn(case, _holding(case, frozenset(within))) for case in shorter])
    longest = max(map(len, groups), default=0)
    # in turn, so that a chunk that is cut short has cases of every group
    return [group[i] for i in range(longest) for group in groups if i < len(group)]


def _first_and_last(plan: Plan) -> Plan:
    """Return the plan of the first and the last window only, in one epoch.

    With parameters that do not change, every epoch has the same numbers. Two windows are enough to
    show a stale window, and only the last window may be short.
    """
    windows = plan.windows
    return plan.select((*windows[0], *(windows[-1] if len(windows) > 1 else ()))).replace(epochs=1)


def _holding(case: Case, within: frozenset[str]) -> frozenset[str]:
    """Return the assumptions that hold: those the case was drawn within and those its plan and loss
    satisfy.
    """
    assert case.spec is not None
    seen = set(within)
    if case.spec.loss.reduction == "sum":
        seen.add(SUM_REDUCTION)
    if not case.plan.has_short_window:
        seen.add(WHOLE_WINDOWS)
    assert seen <= ASSUMPTIONS.keys()
    return frozenset(seen)


@cache
def _signals() -> frozenset[Signal]:
    """Return every signal that a chain of drawn layers can produce from a drawn input."""
    waiting = [
        kind.signal(options) for kind in INPUTS.values() if kind.drawn for options in kind.variants
    ]
    found: set[Signal] = set()
    while waiting:
        signal = waiting.pop()
        if signal not in found:
            found.add(signal)
            waiting += {
                out_signal(Layer(kind.name, **options), signal)
                for kind in LAYERS.values()
                if not kind.wraps
                for options in kind.variants(signal)
            }
    return frozenset(found)


@cache
def drawn_layers() -> frozenset[str]:
    """Return the layer kinds that the strategies draw."""
    return frozenset(
        kind.name for kind in LAYERS.values() if any(kind.variants(signal) for signal in _signals())
    )


@cache
def drawn_losses() -> frozenset[str]:
    """Return the loss kinds that the strategies draw."""
    kinds = (kind for kind in LOSSES.values() if kind.drawn)
    return frozenset(
        kind.name for kind in kinds if any(kind.variants(signal) for signal in _signals())
    )


@dataclass
class _Noted:
    """A loop that keeps the gradients that its optimizer's steps used."""

    loop: Loop
    reference: Reference
    gradients: list[Vector] = field(default_factory=list)
    compute: str | None = None

    @property
    def autocast(self) -> str | None:
        """The dtype of the autocast that the loop declares."""
        return autocast_of(self.loop)

    def __call__(self, run: TrainingRun) -> None:
        trainable = {name: p for name, p in run.model.named_parameters() if p.requires_grad}

        def note(*_: Any) -> None:
            dense = {n: p.grad.to_dense() if p.grad is not None and p.grad.is_sparse else p.grad
                     for n, p in trainable.items()}  # fmt: skip
            self.gradients.append(
                self.reference.flat({n: g if g is None else g.detach() for n, g in dense.items()})
            )

        # after the step, since a closure computes its gradients during it
        handle: torch.utils.hooks.RemovableHandle = run.optimizer.register_step_post_hook(note)
        try:
            self.loop(run)
        finally:
            handle.remove()
            self.compute = run.loss.compute if isinstance(run.loss, AutocastRecorder) else None


class CaseJudge:
    """Judges sound loops on one case and counts the verdicts.

    Bitwise equal gradients are compared once.
    """

    def __init__(self, drawn: Drawn, loops: Mapping[str, Loop] = LOOPS) -> None:
        self._drawn, self._tally = drawn, Tally(cases=1)
        self._loops = {
            name: loop for name, loop in loops.items() if assumptions_of(loop) <= drawn.within
        }
        self._reference = REFERENCES.get(drawn.case, None)
        self._seen: dict[tuple[int, str | None, bytes], tuple[float | None, frozenset[str]]] = {}
        spec = drawn.case.spec
        assert spec is not None
        self._layers, self._loss = frozenset(spec.layer_kinds), spec.loss.kind

    def run(self, limit: int, progress: Callable[[], None]) -> Tally:
        """CaseJudge the loops whose assumptions hold in the case, at most `limit` of them."""
        for name, loop in list(self._loops.items())[:limit]:
            noted = _Noted(loop, self._reference)
            self._note(name, noted, check(noted, self._drawn.case))
            progress()
        return self._tally

    def _note(self, name: str, noted: _Noted, verdict: Verdict) -> None:
        tally = self._tally
        tally.checks += 1
        if verdict.skipped is not None:
            tally.skipped[" ".join(verdict.skipped.split())] += 1
            return
        tally.loops[name] += 1
        tally.layers.update(self._layers)
        tally.losses[self._loss] += 1
        tally.autocast += noted.compute is not None
        if verdict.finding is not None:
            tally.findings[verdict.finding] += 1
            return
        tally.elements += sum(map(len, noted.gradients))
        if (violation := verdict.violation) is not None:
            ratio = (
                violation.error / violation.allowed
                if violation.error and violation.allowed
                else None
            )
            found = violation.to_json() | {"loop": name, "ratio": json_number(ratio)}
            tally.alarms.append({key: value for key, value in found.items() if value is not None})
            return
        tally.note_ratio(self._layers, verdict.ratio)
        self._look_closer(noted)

    def _look_closer(self, noted: _Noted) -> None:
        """Count the gradients that needed the Monte Carlo part of the bound, and the rules that
        would blame them.
        """
        rivals: set[str] = set()
        for index, observed in enumerate(noted.gradients):
            key = index, noted.compute, observed.tobytes()
            if key not in self._seen:
                window = self._reference.window(index, None, noted.compute)
                try:
                    beyond = window.compare_quickly(observed).ratio > 1
                    ratio = window.compare(observed).ratio if beyond else None
                except CannotJudgeError:  # this window alone: others of the case were judged
                    self._seen[key] = None, frozenset()
                    continue
                found = failed_rules(
                    window, self._reference.layout, observed, self._drawn.case.dtype
                )
                self._seen[key] = ratio, found
            ratio, found = self._seen[key]
            rivals |= found
            if ratio is not None:
                self._tally.drawn_on.note(ratio)
        (self._tally.rivals if noted.compute is None else self._tally.rivals_autocast).update(
            rivals
        )


def curve_of(drawn: Drawn, seed: int) -> Curve:
    """Plant errors in a sound loop's gradient of one case.

    Args:
        drawn: the case.
        seed: of the choice of loop, window, places and signs.
    """
    rng = np.random.default_rng([seed, int(drawn.case.digest, 16)])
    reference = REFERENCES.get(drawn.case, None)
    curve = Curve(cases=1)
    try:
        index = int(rng.integers(len(drawn.case.plan.windows)))
        window = reference.window(index)
        # where the case cannot be judged in its dtype, this says why
        window.bound.expect_computable()
        if reference.finding is not None:
            curve.skipped["torch and JAX disagree"] += 1
            return curve
        outcome = _sound_outcome(drawn, reference, rng)
        observed = reference.flat(outcome.observations[index].gradients)
        if window.compare(observed).ratio > 1:
            curve.skipped["a false alarm"] += 1
            return curve
        sound = Sound(observed, window.bound.contributions, reference.layout, drawn.case.dtype)
    except CannotJudgeError as error:
        curve.skipped[" ".join(str(error).split())] += 1
        return curve
    for place, direction_of in PLACES.items():
        direction = direction_of(sound, rng)
        if direction is not None:
            sign = float(rng.choice((-1.0, 1.0)))
            curve.note(place, smallest_found(sound, window, sign * direction))
    return curve


def _sound_outcome(drawn: Drawn, reference: Reference, rng: np.random.Generator) -> Outcome:
    """Return what one of the loops does that fit the case, whose losses are of the case's own
    precision.
    """
    fitting = [loop for loop in LOOPS.values() if assumptions_of(loop) <= drawn.within]
    for i in rng.permutation(len(fitting)):
        outcome = run_loop(fitting[i], reference.instance)
        if outcome.compute is None and outcome.raised is None:
            return outcome
    raise AssertionError(f"no sound loop runs on case {drawn.case.digest}")


def smallest_found(sound: Sound, window: WindowReference, direction: Vector) -> dict[str, int]:
    """Return, for each rule, k: it finds the error of size 2**-k in a direction, and all larger
    ones.

    Args:
        sound: the gradient.
        window: whose it is.
        direction: (P,), what an error of size 1 adds.
    """
    found = dict.fromkeys((OURS, *RIVALS), NEVER)
    looking = set(found)
    for k in exponents(sound.dtype):
        planted = sound.with_error(direction, 2.0**-k)
        finding = set(failed_rules(window, sound.layout, planted, sound.dtype))
        if OURS in looking and window.compare(planted).ratio > 1:
            finding.add(OURS)
        looking &= finding
        found |= dict.fromkeys(looking, k)
        if not looking:
            break
    return found


CHUNK = 1000
"""Checks in a chunk: less than a minute's work."""


@dataclass(frozen=True)
class Settings:
    """What was asked for.

    Attributes:
        checks: number of checks of sound loops, in all dtypes together.
        planted: number of cases in each dtype that errors are planted in.
        seed: the same seed and versions draw the same cases.
        dtypes: names from `DTYPES`.
    """

    checks: int
    planted: int
    seed: int
    dtypes: tuple[str, ...]


def shares(total: int, dtypes: Sequence[str]) -> dict[str, int]:
    """Return how many of all the checks each dtype gets; the first ones get what is left over."""
    share, left = divmod(total, len(dtypes))
    return {dtype: share + (i < left) for i, dtype in enumerate(dtypes)}


def count_alarms(
    settings: Settings, progress: Callable[[int], None], into: dict[str, Tally]
) -> None:
    """CaseJudge sound loops until every dtype has its share of the checks.

    Args:
        settings: what was asked for.
        progress: called with a number of checks whenever so many more are done.
        into: dtype -> counts, filled chunk by chunk, so that an interrupted caller keeps them.
    """

    def count(dtype: str, chunk: int, limit: int) -> Tally:
        return alarms_in_chunk(dtype, chunk, limit, settings.seed, progress)

    wanted = shares(settings.checks, settings.dtypes)
    _fill(into, wanted, CHUNK, Tally, lambda tally: tally.checks, count)


def trace_curves(
    settings: Settings, progress: Callable[[int], None], into: dict[str, Curve]
) -> None:
    """Plant errors in the cases that sound loops are judged on, `settings.planted` of them in each
    dtype.

    Args:
        settings: what was asked for.
        progress: called with a number of cases whenever so many more are done.
        into: dtype -> counts, filled chunk by chunk.
    """

    def count(dtype: str, chunk: int, limit: int) -> Curve:
        curve = Curve()
        for drawn in draw_cases(dtype, chunk, cases_for(CHUNK), settings.seed)[:limit]:
            curve.add(curve_of(drawn, settings.seed))
            progress(1)
        return curve

    wanted = dict.fromkeys(settings.dtypes, settings.planted)
    _fill(into, wanted, cases_for(CHUNK), Curve, lambda curve: curve.cases, count)


Counts = TypeVar("Counts", Tally, Curve)


def _fill(
    into: dict[str, Counts],
    wanted: Mapping[str, int],
    size: int,
    empty: Callable[[], Counts],
    done: Callable[[Counts], int],
    count: Callable[[str, int, int], Counts],
) -> None:
    """Add chunks of at most `size` to every dtype's counts until they come to what is wanted.

    The dtypes take turns, so that a run that is stopped early has counts of all of them.

    Args:
        into: dtype -> counts.
        wanted: dtype -> how much is to be counted.
        size: of a chunk.
        empty: returns no counts.
        done: returns how much is counted.
        count: (dtype, chunk, limit) -> the counts of a chunk.
    """
    with one_thread():
        for chunk in itertools.count():
            waiting = [
                dtype for dtype in wanted if done(into.setdefault(dtype, empty())) < wanted[dtype]
            ]
            if not waiting:
                return
            for dtype in waiting:
                into[dtype].add(count(dtype, chunk, min(size, wanted[dtype] - done(into[dtype]))))


def alarms_in_chunk(
    dtype: str, chunk: int, limit: int, seed: int, progress: Callable[[int], None]
) -> Tally:
    """CaseJudge sound loops on the cases of one chunk, `limit` checks in all."""
    total = Tally()
    for drawn in draw_cases(dtype, chunk, cases_for(limit), seed):
        if total.checks >= limit:
            break
        total.add(CaseJudge(drawn).run(limit - total.checks, lambda: progress(1)))
    return total


def cases_for(checks: int) -> int:
    """Return how many cases have loops for that many checks: loops that assume nothing are judged
    on every case.
    """
    return math.ceil(checks / sum(not assumptions_of(loop) for loop in LOOPS.values()))


def record(
    settings: Settings, tallies: Mapping[str, Tally], curves: Mapping[str, Curve]
) -> dict[str, Any]:
    """Return what was counted as the data of a record.

    Coverage says which kinds of layers and losses that the strategies draw are in no case that was
    judged.
    """
    layers = {kind for tally in tallies.values() for kind in tally.layers}
    losses = {kind for tally in tallies.values() for kind in tally.losses}
    wanted = {"layers": (drawn_layers(), layers), "losses": (drawn_losses(), losses)}
    return {
        "asked": {"checks": settings.checks, "planted": settings.planted, "seed": settings.seed,
                  "dtypes": list(settings.dtypes)},
        "alarms": {dtype: tally.to_json() for dtype, tally in tallies.items()},
        "curves": {dtype: curve.to_json() for dtype, curve in curves.items()},
        "coverage": {
            what: {"reached": len(drawn & reached), "missing": sorted(drawn - reached)}
            for what, (drawn, reached) in wanted.items()
        },
        "loops": len(LOOPS),
    }  # fmt: skip
