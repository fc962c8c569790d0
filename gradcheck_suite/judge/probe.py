"""Weight probes: the weights they show, probes that tell causes apart, and the pattern of the steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, groupby, islice, zip_longest

import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.core.case import PARAMETER, Case, Plan, Reduction, probe_case, slopes_of, slopes_text
from gradcheck_suite.core.comparison import Vector
from gradcheck_suite.core.contract import EQUAL_BATCHES, EQUAL_MICRO_BATCHES, ONE_EPOCH, WHOLE_WINDOWS, dealt_to_ranks
from gradcheck_suite.core.results import ENDLESS, ItemWeight
from gradcheck_suite.core.text import counted
from gradcheck_suite.judge.reruns import NOT_REPEATABLE, SKIPPED, LoopRunner, run_with_finite_losses
from gradcheck_suite.judge.weights import Diagnosis, Weights
from gradcheck_suite.run.instance import Instance, Items, generated_instance, recounted, scaled
from gradcheck_suite.run.runner import Outcome

Count = Callable[[list[int]], float]
"""What the mean over some items, given by their indices, divides by."""
EXACT, COARSE = 1e-13, 1e-5
"""Relative tolerances of weights that are read off in float64 and in coarser dtypes."""
MOST_ROWS = 12
"""Micro-batches that a table has a row each for; where there are more, a row stands for a run of equal ones."""


@dataclass(frozen=True)
class WeightProbe:
    """A probe: how its items are cut up and what its mean divides by.

    Attributes:
        plan: of the run.
        reduction: of the probe's loss.
        count: what the mean over some items divides by, if not their number.
        dtype: of the parameter.
    """

    plan: Plan
    reduction: Reduction
    count: Count | None = None
    dtype: str = "float64"

    @property
    def tolerance(self) -> float:
        """The relative error of its weights that rounding explains."""
        return EXACT if self.dtype == "float64" else COARSE

    @property
    def counts(self) -> tuple[float, ...]:
        """What the mean over each micro-batch divides by."""
        if self.count is None:
            return self.plan.micro_batches
        return tuple(self.count(list(items)) for items in self.plan.cuts)

    def right_weights(self, window: int) -> Vector:
        """Return (total items,): the weight of each item in a window's gradient, 0 in those without valid targets."""
        right, counts, members = np.zeros(self.plan.total_items), self.counts, self.plan.windows[window]
        share = 1.0 if self.reduction == "sum" else 1.0 / sum(counts[j] for j in members)
        for j in members:
            right[self.plan.items(j).start : self.plan.items(j).stop] = share if counts[j] else 0.0
        return right

    def instance(self, *, scale: float = 1.0, slopes: Sequence[float] = ()) -> Instance:
        """Return the probe, ready to run."""
        case = probe_case(self.plan, self.reduction, dtype=self.dtype, slopes=slopes_text(slopes))
        instance = generated_instance(case)
        if self.count is not None:
            instance = recounted(instance, self.count)
        return scaled(instance, scale)

    def run(self, runner: LoopRunner, *, scale: float = 1.0, slopes: Sequence[float] = ()) -> Outcome | None:
        """Run the loop on the probe; None where it raised or no run is left.

        Args:
            runner: of the loop.
            scale: the factor that the probe's loss is multiplied by.
            slopes: the derivative of each item's loss, 1 each if empty.
        """
        outcome = runner.run(self.instance(scale=scale, slopes=slopes))
        return None if outcome is None or outcome.raised is not None else outcome

    def observed_weights(
        self, runner: LoopRunner, *, scale: float = 1.0, slopes: Sequence[float] = ()
    ) -> list[Vector] | None:
        """Run the loop on the probe and return the weights it gave the items, times their slopes.

        Args:
            runner: of the loop.
            scale: the factor that the probe's loss is multiplied by, and the weights divided.
            slopes: the derivative of each item's loss, 1 each if empty.

        Returns:
            For each step the weight of each item, (total items,); None where the loop raised or no run is left.
        """
        outcome = self.run(runner, scale=scale, slopes=slopes)
        return None if outcome is None else [seen / scale for seen in gradients_of_steps(outcome)]


def gradients_of_steps(outcome: Outcome) -> list[Vector]:
    """Return the gradient of each step that a loop took on a probe, (total items,) float64, zeros where it is None."""
    empty = torch.zeros_like(outcome.start[PARAMETER])
    return [flat_on_probe(observation.gradients, empty) for observation in outcome.observations]


def flat_on_probe(gradients: Mapping[str, torch.Tensor | None], empty: torch.Tensor) -> Vector:
    """Return the gradient of a probe's parameter, (total items,) float64; `empty` where it is None."""
    found = gradients[PARAMETER]
    seen: Vector = (empty if found is None else found).to("cpu", torch.float64).numpy()
    return seen


def expected_gradients(case: Case) -> list[Vector]:
    """Return the gradient of each window of a probe: the weight of each item times the slope of its loss."""
    assert case.spec is not None
    probe, slopes = WeightProbe(case.plan, case.spec.loss.reduction), np.array(slopes_of(case))
    rights = (probe.right_weights(window) for window in range(len(case.plan.windows)))
    return [np.multiply(right, slopes, out=np.zeros_like(right), where=right != 0) for right in rights]


def probes_of(instance: Instance) -> Iterator[WeightProbe]:
    """Yield the probes that show what a loop does to the weights of an instance's items, the most telling last.

    The first counts what the case counts, but items in micro-batches without valid targets, whose weights could not be
    read otherwise. Where there are such, another counts none there; where every item counts the same, another counts
    items.
    """
    plan, items = instance.case.plan, Items(instance.data)
    reduction: Reduction = "sum" if instance.problem.reduction == "sum" else "mean"

    def count(indices: list[int]) -> float:
        return float(instance.count(items.__getitems__(indices)))

    counts = [count(list(cut)) for cut in plan.cuts]
    empty = {i for j, counted in enumerate(counts) if not counted for i in plan.items(j)}
    shares = {counted / n for counted, n in zip(counts, plan.micro_batches, strict=True) if counted}
    alike = reduction == "sum" or len(shares) == 1
    if not alike:
        yield WeightProbe(plan, reduction, lambda indices: count(indices) + len(empty.intersection(indices)))
    elif reduction == "mean" and shares != {1.0} and not empty:
        yield WeightProbe(plan, reduction, count)
    if alike:
        yield WeightProbe(plan, reduction)
    if reduction == "mean" and empty:
        yield WeightProbe(plan, reduction, count)


def may_be_non_finite(expected: Vector) -> npt.NDArray[np.bool_]:
    """Return which elements of a step's gradient may be infinite or NaN, (total items,).

    Where one is rightly so, all may be NaN: `clip_grad_norm_(parameters, inf)`, which trainers call to log the norm,
    multiplies by infinity over infinity. The optimizer's step diverges anyway.
    """
    return np.full(len(expected), not np.isfinite(expected).all())


def item_weights(probe: WeightProbe, observed: Vector, window: int) -> tuple[ItemWeight, ...]:
    """Return the right and the observed weights of a step.

    Args:
        probe: that they were read on.
        observed: the weight of each micro-batch's items.
        window: of the step.

    Returns:
        A row for each micro-batch, and of a long plan one row for each run of equal ones.
    """
    expected = probe.right_weights(window)[list(probe.plan.starts)]
    ranks = [rank if probe.plan.ranks else None for rank in probe.plan.owners]
    rows = [
        (float(n), float(e), float(o), rank)
        for n, e, o, rank in zip(probe.counts, expected, observed, ranks, strict=True)
    ]
    runs: list[range] = []
    for j, row in enumerate(rows):
        if len(rows) > MOST_ROWS and runs and _digits(rows[runs[-1].start]) == _digits(row):
            runs[-1] = range(runs[-1].start, j + 1)
        else:
            runs.append(range(j, j + 1))
    return tuple(ItemWeight(ranges_text(list(run)), *rows[run.start]) for run in runs)


def _digits(row: tuple[float, float, float, int | None]) -> list[str]:
    """Return a row with the digits that are shown: equal weights may differ by rounding in further ones."""
    return [f"{number:.6g}" for number in row if number is not None]


def ranges_text(numbers: Sequence[int]) -> str:
    """Return increasing numbers with runs of them written as `0-15`."""
    runs: list[tuple[int, int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], n)
        else:
            runs.append((n, n))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def held_by(plan: Plan, items: Vector) -> list[int]:
    """Return the micro-batches of which some item has a weight other than 0."""
    held: list[int] = np.flatnonzero(np.logical_or.reduceat(items != 0, list(plan.starts))).tolist()
    return held


UNEQUAL = ((2, 3, 5), (3, 3, 2), (3,), (5, 2))
EQUAL = ((2,), (1,), (4,), (3,))
"""Sizes of the micro-batches of three windows and a short one, repeated as often as a window is long. Quotients of
unequal ones are no whole numbers: otherwise a coefficient that is kept from another window looks like a repetition."""


def separating_probe(probe: WeightProbe, assumes: Collection[str]) -> WeightProbe:
    """Return the probe that separates what looks alike on another one.

    Its windows have three or more micro-batches of other K, with different, with partly equal and with equal sizes, no
    two windows count the same, the last window is short, and there are two epochs: all within what the loop assumes.

    Args:
        probe: the other one.
        assumes: what the loop assumes.
    """
    k = max(3, probe.plan.accumulation_steps + 1)
    lengths = [k, k, k] if WHOLE_WINDOWS in assumes else [k, k, k, k - 1]
    equal = EQUAL_MICRO_BATCHES in assumes or EQUAL_BATCHES in assumes
    shapes = UNEQUAL if not equal else EQUAL if EQUAL_BATCHES not in assumes else ((2,),) * len(lengths)
    sizes = [n for shape, length in zip(shapes, lengths, strict=False) for n in islice(cycle(shape), length)]
    plan = Plan(tuple(sizes), k, 1 if ONE_EPOCH in assumes else max(2, probe.plan.epochs))
    plan = dealt_to_ranks(plan, probe.plan.world_size, assumes)
    if probe.count is None or equal:
        return WeightProbe(plan, probe.reduction, dtype=probe.dtype)
    empty = {i for window in plan.windows for i in plan.items(window[1])} if 0 in probe.counts else set()
    unit = 1.0 if all(float(n).is_integer() for n in probe.counts) else 0.375

    def count(items: list[int]) -> float:
        return unit * sum(1 + i % 3 for i in items if i not in empty)

    return WeightProbe(plan, probe.reduction, count, probe.dtype)


def readings(probe: WeightProbe, steps: list[Vector], *, alike: bool) -> list[Weights] | None:
    """Return the weights of every step of a run on a probe.

    Args:
        probe: the probe.
        steps: for each step the weight of each item, (total items,).
        alike: whether all of several ranks have these weights.

    Returns:
        None where the number of steps is wrong, or items of one micro-batch differ.
    """
    plan = probe.plan
    observed = [per_micro_batch(probe, items) for items in steps]
    if len(steps) != plan.steps or any(values is None for values in observed):
        return None
    return [reading(probe, step, values, alike=alike) for step, values in enumerate(observed) if values is not None]


def reading(probe: WeightProbe, step: int, observed: Vector, *, alike: bool) -> Weights:
    """Return the weights of one step, given those of micro-batches, and whether all of several ranks have them."""
    plan = probe.plan
    epoch, window = divmod(step, len(plan.windows))
    return Weights(
        observed=observed,
        counts=probe.counts,
        window=plan.windows[window],
        accumulation_steps=plan.accumulation_steps,
        epoch=epoch,
        reduction=probe.reduction,
        items=plan.micro_batches,
        windows=plan.windows,
        tolerance=probe.tolerance,
        owners=plan.owners if plan.ranks else (),
        alike=alike,
    )


def per_micro_batch(probe: WeightProbe, items: Vector) -> Vector | None:
    """Return the weight of each micro-batch's items, or None where they differ within one."""
    first = items[list(probe.plan.starts)]
    with np.errstate(invalid="ignore"):
        spread = abs(items - first.repeat(probe.plan.micro_batches)).max(initial=0.0)
    return None if spread > probe.tolerance * abs(items).max(initial=0.0) else first


# Which micro-batches each step of a wrong number of steps held, and which fault gives that.


Held = list[frozenset[int]]
"""For each step the indices of the micro-batches that its gradient holds."""
SHOWN = 8
"""Number of steps whose micro-batches are printed."""


def held_by_steps(plan: Plan, steps: Sequence[Vector]) -> Held:
    """Return which micro-batches each step holds, given the weight of each item, (total items,) for each step."""
    return [frozenset(held_by(plan, items)) for items in steps]


def shown(held: Held) -> str:
    """Return what the steps held, in words."""
    texts = [str(sorted(step)) if step else "nothing" for step in held[:SHOWN]]
    return ", ".join(texts) + (f" and {len(held) - SHOWN} more" if len(held) > SHOWN else "")


def fitting_faults(plan: Plan, held: Held) -> dict[str, str]:
    """Return name -> account of the faults whose steps would hold the same, the most special first."""
    found: dict[str, str] = {}
    for name, simulated, account in _simulated(plan):
        if simulated == held:
            found.setdefault(name, account)
    if not held:
        found["never-stepped"] = ": run.optimizer was never stepped"
    if found:
        return found
    return dict(_general(plan, held))


def _right(plan: Plan, epochs: int | None = None) -> Held:
    return [frozenset(window) for window in plan.windows] * (plan.epochs if epochs is None else epochs)


def _simulated(plan: Plan) -> Iterator[tuple[str, Held, str]]:
    """Yield name, what the steps hold, and account of each known fault under a plan that it shows under."""
    k, count, right = plan.accumulation_steps, len(plan.micro_batches), _right(plan)
    if plan.ranks:
        yield from _simulated_over_ranks(plan)
        return
    if plan.has_short_window:
        whole, tail = [w for w in _right(plan, 1) if len(w) == k], frozenset(plan.windows[-1])
        said = f": the short last window (micro-batches {list(plan.windows[-1])}) is never stepped"
        yield "tail-dropped", whole * plan.epochs, f"{said}: its items contribute to no step"
        leaking = [whole[0] | tail, *whole[1:]] if whole else []
        leak = f"{said}, and its gradient leaks into the next epoch's first window"
        yield "tail-leak", whole + leaking * (plan.epochs - 1), leak
        said = f": windows run on from one epoch into the next, {k} micro-batches each; step at the end of every "
        said += "epoch and start the next one's windows anew"
        running_on = _chunks(range(count), plan.epochs, k, across=True, dropped=True)
        yield "wrong-windows", running_on, said
        yield "wrong-windows", _chunks(range(count), plan.epochs, k, across=True, dropped=False), said
        # transformers 4.45 asks for as many steps as the epochs have whole windows
        whole_windows = plan.epochs * (count // k)
        ended = f"{said}; it ends after {whole_windows} steps, the number of whole windows of its epochs"
        yield "wrong-windows", running_on[:whole_windows], ended
    yield from _wrong_epochs(plan)
    singles = [frozenset({j}) for j in range(count)] * plan.epochs
    growing = [frozenset(window[: i + 1]) for window in plan.windows for i in range(len(window))] * plan.epochs
    never_reset = [frozenset(range(min(i + 1, count))) for i in range(count * plan.epochs)]
    for steps in (singles, growing, never_reset):
        if steps != right:
            yield "step-per-micro-batch", steps, ": it stepped once per micro-batch"
    yield (
        "wrong-windows",
        _stepping(plan, lambda i: (i + 1) % k != 0),
        ": it steps after the micro-batches that do not end a window; step where (i + 1) % accumulation_steps == 0",
    )
    for size in sorted({n for n in (*range(2, 9), k - 1, k + 1, 2 * k, k // 2) if n > 1} - {k}):
        said = f": its windows have {size} micro-batches, where accumulation_steps is {k}"
        for across in (False, True):
            for dropped in (False, True):
                steps = _chunks(range(count), plan.epochs, size, across=across, dropped=dropped)
                yield "wrong-windows", steps, said


def _simulated_over_ranks(plan: Plan) -> Iterator[tuple[str, Held, str]]:
    """Yield the same as `_simulated` for a plan of several ranks, whose windows have micro-batches of each."""
    k, ranks = plan.accumulation_steps, range(plan.world_size)

    def dealt(size: int) -> list[list[frozenset[int]]]:
        """Return each rank's windows of a size."""
        return [_chunks(plan.of_rank(rank), 1, size, across=False, dropped=False) for rank in ranks]

    busy = list(zip(*dealt(k), strict=False))
    yield (
        "dropped-window",
        _united(busy) * plan.epochs,
        ": it stops as soon as one rank has no micro-batch left, while others have some; a rank that has run out of "
        "micro-batches adds zeros, until no rank has any left",
    )
    whole = [parts for parts in busy if all(len(part) == k for part in parts)]
    if len(whole) < len(busy):
        said = f": a window in which some rank has fewer than {k} micro-batches is never stepped"
        yield "tail-dropped", _united(whole) * plan.epochs, f"{said}: its items contribute to no step"
    yield from _wrong_epochs(plan)
    if k > 1:
        said = ": it stepped once per micro-batch"
        yield "step-per-micro-batch", _united(zip_longest(*dealt(1), fillvalue=frozenset())) * plan.epochs, said
    for size in sorted({*range(2, 9), k - 1, k + 1, 2 * k, k // 2} - {0, 1, k}):
        said = f": its windows have {size} micro-batches of each rank, where accumulation_steps is {k}"
        steps = _united(zip_longest(*dealt(size), fillvalue=frozenset()))
        yield "wrong-windows", steps * plan.epochs, said


def _united(steps: Iterable[Sequence[frozenset[int]]]) -> Held:
    """Return what steps hold, given each rank's part of each."""
    return [frozenset().union(*parts) for parts in steps]


def _wrong_epochs(plan: Plan) -> Iterator[tuple[str, Held, str]]:
    for epochs in range(1, plan.epochs + 3):
        if epochs != plan.epochs:
            said = f": it makes {epochs} pass(es); pass over run.loader run.epochs times"
            yield "wrong-step-count", _right(plan, epochs), said


def _chunks(epoch: Iterable[int], epochs: int, size: int, *, across: bool, dropped: bool) -> Held:
    """Return windows of a size, over the ends of epochs or not, with the shorter rest or without it."""
    passes = [list(epoch) * epochs] if across else [list(epoch)] * epochs
    cut = [one[first : first + size] for one in passes for first in range(0, len(one), size)]
    return [frozenset(chunk) for chunk in cut if len(chunk) == size or not dropped]


def _stepping(plan: Plan, condition: Callable[[int], bool]) -> Held:
    """Return what steps hold that come after micro-batch `i` of an epoch, with a reset after each."""
    held, gathered = [], set()
    for _ in range(plan.epochs):
        for i in range(len(plan.micro_batches)):
            gathered.add(i)
            if condition(i):
                held.append(frozenset(gathered))
                gathered = set()
    return held


def _general(plan: Plan, held: Held) -> Iterator[tuple[str, str]]:
    """Yield name and account of what can be said of steps that no simulation gives."""
    right, kept = _right(plan), [step for step in held if step]
    if len(kept) < len(held) and kept == right:
        yield (
            "repeated-step",
            f": {len(held) - len(kept)} of its steps came right after a reset and held nothing; step only where a "
            "window has been accumulated",
        )
    runs = [(step, len(list(group))) for step, group in groupby(held)]
    if len(runs) < len(held) and [step for step, _ in runs] == [step for step, _ in groupby(right)]:
        times = max(n for _, n in runs)
        yield "repeated-step", f": it stepped up to {times} times on the gradient of one window; step once"
    if held and len(held) < len(right) and _is_part(held, right):
        per_epoch = len(plan.windows)
        place = [i for i in range(len(right)) if i not in _places(held, right)]
        missing = ", ".join(f"window {i % per_epoch} of epoch {i // per_epoch}" for i in place[:3])
        yield "dropped-window", f": no step has the gradient of {missing}{' and others' if len(place) > 3 else ''}"


def _places(held: Held, right: Held) -> list[int]:
    """Return where the steps are in the right sequence, as late as possible: what is missing is then the first."""
    places, end = [], len(right)
    for step in reversed(held):
        end = next((i for i in range(end - 1, -1, -1) if right[i] == step), -1)
        places.append(end)
    return places


def _is_part(held: Held, right: Held) -> bool:
    remaining = iter(right)
    return all(step in remaining for step in held)


# Naming the fault of a loop that stepped too seldom or too often, by further runs of it.


SKIPPED_BY_SCALER = (
    "a GradScaler skips the step of a window whose gradients overflow: where the loop has one, give it a smaller "
    "init_scale; otherwise look for a guard that skips large or small gradients"
)


def explain_steps(instance: Instance, outcome: Outcome, runner: LoopRunner) -> Diagnosis:
    """Name the fault of a loop that stepped too seldom or too often; `wrong-step-count` where no known one fits.

    Two runs are on weight probes, whose steps show which micro-batches each of them was about: one under the loop's own
    plan, one under the plan that separates faults which look alike. The others repeat the case.

    Args:
        instance: what the loop trained.
        outcome: what it did.
        runner: of the loop.
    """
    plan, taken = instance.case.plan, len(outcome.observations)
    times = f"{taken} or more times" if outcome.endless else counted(taken, "time")
    asked = (
        f"optimizer.step() was called {times}, expected {plan.steps} "
        f"({counted(plan.epochs, 'epoch')} of {counted(len(plan.windows), 'window')})"
    )
    if outcome.endless:
        return Diagnosis("wrong-step-count", f"{asked}; {ENDLESS}")
    for again in runner.repeat(instance, 1):
        if len(again.observations) != taken:
            return NOT_REPEATABLE
    found = _explained(instance, outcome, runner, asked)
    for again in runner.repeat(instance):
        if len(again.observations) != taken:
            return NOT_REPEATABLE
    return found


def _explained(instance: Instance, outcome: Outcome, runner: LoopRunner, asked: str) -> Diagnosis:
    plan, taken = instance.case.plan, len(outcome.observations)
    finite = run_with_finite_losses(runner, instance)
    if finite is not None and len(finite.observations) == plan.steps:
        return replace(SKIPPED, sentence=f"{asked}: {SKIPPED.sentence}")
    probe = WeightProbe(plan.replace(masked=()), "sum" if instance.problem.reduction == "sum" else "mean")
    own = _held(probe, runner)
    if own is None:
        known = _from_counts(plan, outcome)
        return Diagnosis(known or "wrong-step-count", asked + (_never(outcome) if known == "never-stepped" else ""))
    if len(own) == plan.steps:
        return _by_values(asked, plan, taken)
    if len(own) != taken:
        if _held(probe, runner) not in (own, None):
            return NOT_REPEATABLE
        asked += f"; on the weight probe, under the same plan, it takes {len(own)}"
    faults = _separated(probe, own, runner)
    if "never-stepped" in faults:
        faults["never-stepped"] = _never(outcome)
    if _may_skip(instance, outcome) and not faults.keys() - {"dropped-window", "never-stepped"}:
        faults["skipped-by-size"] = f"; {SKIPPED_BY_SCALER}"
    whole_run = [*range(len(plan.micro_batches))] * plan.epochs
    if not faults and own and all(own) and [j for step in own for j in sorted(step)] == whole_run:
        faults["wrong-windows"] = "; each micro-batch is in one step, but the steps are at other places"
    name = " or ".join(faults) or "wrong-step-count"
    details = f"; the steps held micro-batches {shown(own)}" if own and len(own) == taken else ""
    return Diagnosis(name, asked + "".join(faults.values()) + details)


def step_pattern(plan: Plan, outcome: Outcome) -> Diagnosis:
    """Return what the number of steps alone suggests, without a sentence and without a further run of the loop."""
    if outcome.endless:
        return Diagnosis("wrong-step-count", ENDLESS)
    return Diagnosis(_from_counts(plan, outcome) or "wrong-step-count", "")


def _held(probe: WeightProbe, runner: LoopRunner) -> Held | None:
    steps = probe.observed_weights(runner)
    return None if steps is None else held_by_steps(probe.plan, steps)


def _separated(probe: WeightProbe, own: Held, runner: LoopRunner) -> dict[str, str]:
    """Return name -> account of the faults that fit the steps under both plans; of one alone where none fits both."""
    faults = fitting_faults(probe.plan, own)
    separating = separating_probe(probe, runner.assumes)
    other = _held(separating, runner)
    if other is None or len(other) == separating.plan.steps:
        return faults
    on_other = fitting_faults(separating.plan, other)
    both = {name: account for name, account in faults.items() if name in on_other}
    first = next(iter(both or on_other), None)
    if first is None:
        # what fits under a small plan alone is a coincidence
        return {}
    k, windows = separating.plan.accumulation_steps, len(separating.plan.windows)
    elsewhere = f"; under a plan of {windows} windows with accumulation_steps = {k}{on_other[first]}"
    return {first: faults.get(first, elsewhere)}


def _by_values(asked: str, plan: Plan, taken: int) -> Diagnosis:
    """Return the diagnosis of a loop that takes the right number of steps on the probe."""
    said = f"{asked}; on the weight probe, under the same plan, it takes the right number"
    if taken < plan.steps:
        return Diagnosis(
            "skipped-by-size", f"{said}, so it skips steps by the values of gradients or losses: {SKIPPED_BY_SCALER}"
        )
    return Diagnosis("wrong-step-count", f"{said}, so the number depends on the values of gradients or losses")


def _from_counts(plan: Plan, outcome: Outcome) -> str | None:
    """Return the name of the fault that the number of steps suggests, or None."""
    taken, micro = len(outcome.observations), plan.epochs * len(plan.micro_batches)
    if not taken:
        return "never-stepped"
    if plan.ranks:
        return None
    if taken == micro:
        return "step-per-micro-batch"
    if plan.has_short_window and taken == plan.epochs * (len(plan.micro_batches) // plan.accumulation_steps):
        return "tail-dropped"
    if plan.has_short_window and taken == micro // plan.accumulation_steps:
        return "wrong-windows"
    return None


def _may_skip(instance: Instance, outcome: Outcome) -> bool:
    """Whether a GradScaler may have skipped steps on the probe, too: there are too few, and float16 takes part."""
    too_few = len(outcome.observations) < instance.case.plan.steps
    return too_few and "float16" in (instance.case.dtype, outcome.compute)


def _never(outcome: Outcome) -> str:
    moved = any(not torch.equal(value, outcome.start[name]) for name, value in outcome.parameters.items())
    return ": run.optimizer was never stepped" + (
        ", yet the parameters moved, so something else was; step run.optimizer, or wrap it" if moved else ""
    )
