"""The one judge of a live run: from the events of 1 to N ranks to violations, findings and what could not be judged.

Each step is asked about its sums when it comes: is every pass of the window in `.grad`, once, with one factor? The
weights are read at the same time, and judged with the windows before and after it, since one window alone often fits
two readings. They are judged again after each of the first windows, then from time to time, and when the run is over.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from gradcheck_suite.auditing import weights as reading_weights
from gradcheck_suite.auditing.places import Place
from gradcheck_suite.auditing.recorder import Event, PassRecord, StepRecord
from gradcheck_suite.auditing.samples import size
from gradcheck_suite.auditing.sums import (
    IF_WANTED,
    OF_SUMS,
    Fault,
    Members,
    Replay,
    Seen,
    Source,
    Sums,
    Window,
    judge_sums,
    near,
)
from gradcheck_suite.auditing.weights import (
    EQUAL,
    JOINED,
    MEAN_OF_MEANS,
    UNEQUAL,
    UNEVEN,
    Comparison,
    Key,
    Objective,
    Reading,
    Scale,
    Use,
    coefficient,
    evidence,
)
from gradcheck_suite.core.faults import FAULTS
from gradcheck_suite.core.results import LiveViolation, Unknown, WeightRow
from gradcheck_suite.core.text import counted
from gradcheck_suite.judge.naming import ONE_SIGN, diagnose, means_text, names_nothing
from gradcheck_suite.judge.weights import Diagnosis, Weights

KNOWN = frozenset(fault.name for fault in FAULTS.values() if fault.command != "verify")
"""Every diagnosis of a live run."""
REMEDIES = {
    ("accelerate", "where the window has"): "Accelerate divides by K in a short window too, up to 1.15.0 at least: "
    "`GradientAccumulationPlugin(num_steps=K, sync_with_dataloader=False)` makes every window whole",
    (
        "lightning",
        "where the window has",
    ): "Lightning divides by `accumulate_grad_batches` in a short window too, up to "
    "2.6.6 at least (Lightning#19987): let it divide the number of batches, or use manual optimization",
    (
        "transformers",
        "where the window has",
    ): "transformers 4.45.2 divides an epoch of fewer than K micro-batches by K: "
    "later releases divide by its length (transformers#39659)",
    (
        "transformers",
        "mean has weight",
    ): "transformers counts the targets of a window from 4.46 on (transformers#34191), "
    "for models and a `compute_loss_func` that divide by `num_items_in_batch`",
    (
        "transformers",
        "never divided",
    ): "transformers does not divide by K where a model takes `**kwargs`, up to 5.23.0 at "
    "least (transformers#47688): set `trainer.loss_is_scaled_for_ga = False`",
}
"""Package of a trainer and a part of a fault's sentence -> remedy: as found in docs/found-in-trainers.md."""
MAX_ROWS = 64
"""Rows of the table of weights that a violation keeps."""
MOST_WINDOWS = 512
"""Windows of one optimizer that are judged together; older ones have been judged and are forgotten."""
EVERY = 64
"""Windows after which the weights are judged again, once there have been so many."""
BOTH = "sums and weights"
SEVERAL_MODES = (
    "a module ran in train mode in some micro-batches of a window and in eval mode in others: call model.train() after "
    "every evaluation; whether the gradient depends on it is judged in windows that are computed again (`--every 1`)"
)
DECLARE = "declare it with `loss = gradcheck_suite.objective(loss, count=n)`, n being what its mean divides by"


MASTERS = (
    "the gradients of this step were written by hand to parameters that no backward pass reaches (master copies)",
    "where they are copies, give each one the gradient of one parameter (`copy.grad = p.grad.float()`), or step on the "
    "module's own parameters while the script is audited",
)
ZERO = (
    "DeepSpeed's ZeRO steps on flat copies of its own, which no backward pass reaches",
    "audit the script with `zero_optimization.stage` 0: the losses weigh the same there",
)
"""Why a step on copies could not be judged, and what to do."""
UNTOLD = (
    "`.grad` is put together by hand, or was reset and edited: the model has too few elements for so many "
    "micro-batches, or their gradients are too much alike in its dtype, to tell which of them are in it",
    "audit the script with fewer micro-batches in a window, or in float32",
)
"""Why a sum made by hand could not be judged, and what to do."""


# The weights of the windows of one optimizer, together.


@dataclass(frozen=True)
class Pending:
    """A window whose weights are judged with those of the others.

    Attributes:
        window: the window.
        where: the place of its last pass.
        coefficients: of its passes.
        readings: the weights, with the factor by which `.grad` was multiplied after the last pass, and without it,
            where there is one: it may be a part of the loss (a mean over K at the end) or none (clipping).
    """

    window: Window
    where: Place
    coefficients: Mapping[Source, float]
    readings: Sequence[Reading]
    factor: float

    @property
    def length(self) -> int:
        """The number of passes that are in `.grad`."""
        return len({index for _, index in self.coefficients})


Repeated = tuple[LiveViolation, set[int | None]]
United = dict[tuple[str, str | None], Repeated]
"""Diagnosis and place -> the first of the violations, and the steps of all."""


def _unite(united: United, violations: Iterable[LiveViolation]) -> None:
    """Add violations: a run that is faulty at every step has a few entries, however long it is."""
    for violation in violations:
        key = violation.diagnosis, violation.where
        if (known := united.get(key)) is not None:
            known[1].add(violation.step)
            united[key] = _first(known[0], violation), known[1]
        else:
            united[key] = violation, {violation.step}


def _first(*violations: LiveViolation) -> LiveViolation:
    first, *later = sorted(violations, key=_order)
    size = next((v.gradient_error for v in (first, *later) if v.gradient_error is not None), None)
    return replace(first, gradient_error=size)


def _number(sets: Iterable[set[int | None]]) -> int:
    """Return how many steps some sets have, without a copy of the largest one, which grows with the run."""
    largest, *others = sorted(sets, key=len, reverse=True)
    return len(largest) + len(set().union(*others) - largest)


def _order(violation: LiveViolation) -> float:
    return math.inf if violation.step is None else violation.step


@dataclass
class Weighed:
    """What the weights of an optimizer's windows showed.

    Attributes:
        violations: with the number of the step.
        alone: more of them, that no second window shows yet: a coefficient that changes may have any value in one.
        united: the same, one for each diagnosis and place.
        notes: what is worth knowing -> how often.
        unknown: what could not be judged, and what to do -> how often.
        steps: the steps whose weights were judged.
    """

    violations: list[LiveViolation] = field(default_factory=list)
    alone: list[LiveViolation] = field(default_factory=list)
    united: United = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    unknown: Counter[Unknown] = field(default_factory=Counter)
    steps: set[int] = field(default_factory=set)


@np.errstate(all="ignore")  # weights may be infinite, and the script's output stays what it was
def judge_weights(
    pending: Sequence[Pending], usual: int | None, said: int | None, ranks: int, name_of: Callable[[int], str | None]
) -> Weighed:
    """Judge the weights of the windows of one optimizer.

    Args:
        pending: the windows.
        usual: the most frequent number of passes.
        said: the accumulation steps that the user states or the trainer is configured with.
        ranks: number of ranks.
        name_of: the name of a parameter.
    """
    result = Weighed()
    modes = reading_weights.best_modes([(one.window, one.readings) for one in pending])
    history: defaultdict[Key, list[Use]] = defaultdict(list)
    unequal: defaultdict[Key, list[tuple[Objective, Window]]] = defaultdict(list)
    settled = [_settled(one, modes, usual) for one in pending]
    if joined := {objective.key for found in settled for objective in found if objective.key[2] == JOINED}:
        settled = [_settled(one, modes, usual, joined) for one in pending]
    for one, found in zip(pending, settled, strict=True):
        if fault := _again(one):
            result.steps.add(one.window.number)
            result.violations.append(violation_of(fault, one.window, one.where))
            continue
        dark, partial = _note_unknown(one, found, result, name_of)
        if one.length == 1 or ((found or partial) and not dark):
            result.steps.add(one.window.number)
        _compare_within(one, found, history, unequal, result)
    for several in unequal.values():
        unnamed = [objective for objective, _ in several if objective.comparison.named is None]
        general = _named(unnamed) if unnamed else None
        result.violations += [_of_unequal(objective, window, general) for objective, window in several]
    if pending:

        def note(sentence: str) -> None:
            result.notes[sentence] += 1

        for scale in reading_weights.scales(history, ranks, said, note):
            (result.alone if scale.alone else result.violations).append(_of_scale(scale))
    return result


def _settled(
    one: Pending,
    modes: Mapping[tuple[int, Key], Sequence[str]],
    usual: int | None,
    joined: Collection[Key] = frozenset(),
) -> list[Objective]:
    """Return the objectives of a window, the factor after its last pass taken as a part of them or not."""
    own = {top: listed for (optimizer, top), listed in modes.items() if optimizer == one.window.optimizer}
    found = [reading_weights.objectives(reading, own, joined) for reading in one.readings]
    right = bool(found[0]) and all(objective.is_right for objective in found[0])
    lengths = {1 / one.length, 1 / (usual or one.length)} - {1.0}
    return found[0] if right or any(near(one.factor, share, 1e-5) for share in lengths) else found[-1]


def _again(one: Pending) -> Fault | None:
    """Return the fault of losses that go backward more than once."""
    found = [one.window.passes[index].records[rank].terms for rank, index in one.coefficients]
    repeated = [(sum(term.again for term in terms), len(terms)) for terms in found if terms]
    if not any(again for again, _ in repeated):
        return None
    running = any(0 < again < number for again, number in repeated)
    return Fault("repeated-micro-batch", OF_SUMS["running sum" if running else "repeated-micro-batch"])


PARTIAL = "the loss sees items through which no gradient flows, and is no sum over the window's micro-batches"


def _read_joined(passes: Mapping[int, Seen], sources: Iterable[Source]) -> None:
    """Read a term as a sum over items again where the rows that it joins without a gradient are no cached items.

    Cached items are those of the window's other passes, or of the other ranks: together the passes, or the ranks of
    each, let a gradient through to every item once. Rows of zeros as padding, or a bank of negatives, are others.
    """
    records = [(index, passes[index].records[rank]) for rank, index in sources]
    shares: defaultdict[int, float] = defaultdict(float)
    for index, record in records:
        shares[index] += next((term.partial[0] for term in record.terms if term.partial), 0.0)
    of_ranks = len(records) > len(shares) and all(near(share, 1.0, 1e-6) for share in shares.values())
    if of_ranks or near(sum(shares.values()), 1.0, 1e-6):
        return
    for _, record in records:
        record.whole = []
        for term in record.terms:
            term.partial = None


def _note_unknown(
    one: Pending, found: Sequence[Objective], result: Weighed, name_of: Callable[[int], str | None]
) -> tuple[bool, bool]:
    """Note what of a window's losses could not be read; return whether there is such a part, and one that is no sum.

    A loss that is no sum over the window's micro-batches has no weights, so that none are missing.
    """
    window = one.window
    records = {source: window.passes[source[1]].records[source[0]] for source in one.coefficients}
    dark, partial = set[Unknown](), set[Unknown]()
    for record in records.values():
        for term in record.terms:
            if term.opaque:
                dark.add(Unknown("weights", str(record.place), term.opaque, DECLARE))
            elif term.partial:
                partial.add(Unknown("weights", str(record.place), PARTIAL))
        if not record.terms and record.unread:
            dark.add(Unknown("weights", str(record.place), record.unread))
    if one.length > 1:
        result.unknown.update(dark | partial)
        whole = {key for record in records.values() for key in record.whole if key in window.keys}
        places = [term.partial[1] for record in records.values() for term in record.terms if term.partial]
        if whole and len(set(places)) == one.length:
            names = ", ".join(sorted(str(name_of(key)) for key in whole))
            result.notes[
                f"{one.where}: outside of the cached items, the gradient of {names} arrives from each of the "
                f"{one.length} passes over the same items: it is {one.length} times too large: divide it by "
                f"{one.length} before the step"
            ] += 1
    uneven = [objective for objective in found if objective.comparison.status == UNEVEN]
    for objective in uneven:
        reason = "the number of terms differs between micro-batches"
        result.unknown[Unknown("weights", str(objective.place), reason, DECLARE)] += 1
    return bool(dark or uneven), bool(partial)


def _compare_within(
    one: Pending,
    found: Sequence[Objective],
    history: defaultdict[Key, list[Use]],
    unequal: defaultdict[Key, list[tuple[Objective, Window]]],
    result: Weighed,
) -> None:
    """Judge the weights inside of a window; those that are equal are left for the run to judge."""
    window = one.window
    site = {source: window.passes[source[1]].records[source[0]].place for source in one.coefficients}
    right = [o for o in found if o.is_right and not o.parts[0].term.of_parameters]
    covered = {part.source for o in right if len(o.parts) > 1 for part in o.parts}
    for objective in found:
        status, sources = objective.comparison.status, {part.source for part in objective.parts}
        if status == UNEVEN:
            continue
        if status == EQUAL and _are_means_beside_empty(objective, window):
            beside = Comparison(UNEQUAL, named=Diagnosis(MEAN_OF_MEANS, ""))
            unequal[objective.key].append((replace(objective, comparison=beside), window))
            continue
        if status != EQUAL:
            if not objective.comparison.named and (covered >= sources or objective.parts[0].term.of_parameters):
                result.notes[f"{objective.place}: a coefficient changes within a window"] += 1
            else:
                unequal[objective.key].append((objective, window))
            continue
        # the window's length is that of the call sites that this objective comes from
        here = {site[source] for source in sources}
        passes = {source[1] for source in one.coefficients if site[source] in here}
        history[objective.key].append(
            Use(
                window,
                objective,
                length=len(passes),
                whole={source[1] for source in sources} == passes,
                others_right=any(o.key != objective.key for o in right),
            )
        )


# Violations, in words.


def violation_of(fault: Fault, window: Window, where: Place, parameter: str | None = None) -> LiveViolation:
    """Return the violation that a fault of a window is."""
    return LiveViolation(
        kind=fault.kind,  # type: ignore[arg-type]
        diagnosis=fault.name,
        explanation=fault.sentence + _remedy(fault, window.step.trainer),
        step=window.number,
        where=_loss_line(window, where) or str(where),
        backward=str(window.passes[max(window.passes)].site) if window.passes else None,
        stepped=str(window.step.place),
        parameter=parameter,
    )


def _remedy(fault: Fault, trainer: str | None) -> str:
    """Return what helps where a trainer's own division is the cause, which no user mends in the script."""
    package = (trainer or "").partition(".")[0]
    found = (text for (name, part), text in REMEDIES.items() if name == package and part in fault.sentence)
    return "".join(f". {text}" for text in found)


def _loss_line(window: Window, where: Place) -> str | None:
    """Return the line of the loss that goes backward at a place, where it is known."""
    records = [record for seen in window.passes.values() for record in seen.records if record.place == where]
    return next((term.line for record in records for term in record.terms if term.line), None)


def _rows(objective: Objective, count: str, expected: float) -> tuple[WeightRow, ...]:
    """Return the weight of each item, by micro-batch: expected and observed."""
    order = {index: j for j, index in enumerate(sorted({part.source[1] for part in objective.parts}))}
    ranks = len({part.source[0] for part in objective.parts}) > 1
    rows = [
        WeightRow(
            order[part.source[1]],
            objective.place.line,
            part.term.counts.get(count, part.term.counts[part.term.own]),
            expected,
            weight,
            part.source[0] if ranks else None,
        )
        for part, weight in zip(objective.parts, objective.weights, strict=True)
    ]
    return tuple(rows[:MAX_ROWS])


def _with_weights(violation: LiveViolation, objective: Objective, rows: tuple[WeightRow, ...]) -> LiveViolation:
    error = max((abs(row.observed / row.expected - 1) for row in rows if row.count and row.expected), default=0.0)
    share = "less than 1%" if error < 0.01 else f"{100 * error:.3g}%"
    return replace(
        violation,
        explanation=f"{violation.explanation} (weights are off by up to {share})",
        error=error,
        allowed=max(part.tolerance for part in objective.parts),
        weights=rows,
    )


def _of_unequal(objective: Objective, window: Window, general: Diagnosis | None) -> LiveViolation:
    """Return the violation of weights that differ within a window.

    Args:
        objective: whose weights they are.
        window: in which they differ.
        general: their name where no count explains them.
    """
    comparison, own = objective.comparison, objective.parts[0].term.own
    named, count = comparison.named or general, comparison.count or own
    assert named is not None
    empty = _empty(objective, window) if named.name == MEAN_OF_MEANS else set()
    w = _weights(objective, count, empty)
    whole = coefficient(w)
    sentence = named.sentence
    if named.name == MEAN_OF_MEANS:
        # with the share of those without items, and with a division that is left out
        seen = replace(w, observed=w.observed / whole)
        told = diagnose(seen, only=(MEAN_OF_MEANS,))
        sentence = means_text(seen, [seen]) if names_nothing(told) else told.sentence
        if count == "elements" and w.counts != _weights(objective, own, empty).counts:
            sentence = f"the mean divides by all elements of its micro-batch, padding included, and {sentence}"
    fault = Fault(named.name, sentence.replace("run.count(batch)", "the batch's count"))
    return _with_weights(
        violation_of(fault, window, objective.place),
        objective,
        _rows(objective, count, whole / (w.window_count or 1.0)),
    )


def _are_means_beside_empty(objective: Objective, window: Window) -> bool:
    """Return whether equal weights are those of means of equal counts, of which one without items has its share."""
    if objective.is_right or not objective.parts[0].term.mean:
        return False
    number, masses = len(objective.parts), _counts_and_masses(objective, objective.parts[0].term.own)[1]
    empty = len(_empty(objective, window))
    return bool(empty) and near(masses[0] * (number + empty), 1.0, objective.tolerance)


def _empty(objective: Objective, window: Window) -> set[Source]:
    """Return the passes of an objective's lines that have no items, and so nothing of it."""
    own = {part.source for part in objective.parts}
    places = {window.passes[index].records[rank].place for rank, index in own}
    return {
        (rank, index)
        for index, seen in window.passes.items()
        for rank, record in enumerate(seen.records)
        if record.place in places and any(map(reading_weights.is_empty, record.terms))
    } - own


def _counts_and_masses(objective: Objective, count: str) -> tuple[list[float], list[float]]:
    """Return the count of each term, and what its items weigh together."""
    numbers = [part.term.counts.get(count, 0.0) for part in objective.parts]
    return numbers, [weight * number for weight, number in zip(objective.weights, numbers, strict=True)]


def _named(objectives: Sequence[Objective]) -> Diagnosis:
    """Name weights that no count explains, as a loop that is verified would be.

    Args:
        objectives: one objective in all windows where its weights differ.
    """
    found = [_weights(one, one.parts[0].term.own) for one in objectives]
    observed = found[0].observed
    what = ONE_SIGN if observed.min() < 0 else "divide each summed loss by the window's count"
    said = (
        "items of different micro-batches have different weights: the micro-batches' items weigh "
        f"{', '.join(f'{weight:.3g}' for weight in observed[:6])}; {what}"
    )
    usual = [np.abs(w.observed - np.median(w.observed)) <= w.tolerance * np.median(w.observed) for w in found]
    if all(2 * same.sum() > len(same) for same in usual):
        # a special case for the first or the last micro-batch, a loss scale, a coefficient
        return Diagnosis("weighted-by-place", said)
    named = diagnose(found[0], found[1:])
    return Diagnosis(named.name, said) if names_nothing(named) else named


def _weights(objective: Objective, count: str, empty: Collection[Source] = ()) -> Weights:
    """Return the weights of an objective by what is counted, those of micro-batches without items among them."""
    parts = objective.parts
    tolerance = max(part.tolerance for part in parts)
    numbers, _ = _counts_and_masses(objective, count)
    return evidence(parts, objective.weights, numbers, tolerance, empty=empty)


def _of_scale(scale: Scale) -> LiveViolation:
    """Return the violation of a common weight that follows from how the window is cut up."""
    use = scale.use
    total = use.items or 1.0
    times = use.own / scale.expected
    sentence = f"every item of the window weighs {times:.6g} times what it should, which is {scale.note}"
    if scale.name == "tail-leak":
        sentence += (
            "; the gradient of micro-batches that belong to the window before is still in it: "
            "step after an epoch's last micro-batch too, and reset after it"
        )
    else:
        sentence += f"; {what}" if (what := reading_weights.remedy(scale.note)) else ""
    rows = _rows(use.objective, use.count, scale.expected / total)
    violation = violation_of(Fault(scale.name, sentence), use.window, use.objective.place)
    if use.others_right and (line := use.objective.parts[0].term.line):
        violation = replace(violation, where=line)
    return _with_weights(violation, use.objective, rows)


T = TypeVar("T")


def _ranks_of(found: Sequence[Iterable[T]]) -> dict[T, list[int]]:
    """Return what some ranks have shown -> those ranks."""
    ranks: defaultdict[T, list[int]] = defaultdict(list)
    for rank, one in enumerate(found):
        for each in one:
            ranks[each].append(rank)
    return ranks


def _on(ranks: Sequence[int], alone: Sequence[Judge], sentence: str) -> str:
    """Return a sentence with the ranks of which it is true, where that is not said of all of them."""
    if len(ranks) == len(alone):
        return sentence
    return f"on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {sentence}"


# The run.


class Judge:
    """Takes the events of a run, one of each rank at a time, and judges it.

    Args:
        ranks: number of ranks.
        dtypes: key of a parameter -> the dtype of its gradient.
        given: the accumulation steps that the user states.
        weights: whether weights are judged.
        sums: whether sums are.
        name_of: gives the name of a parameter.

    Attributes:
        window: the last one.
        used: the coefficients of its passes, where its sums were judged.
        judged: the steps of which something was judged.
        alone: whether a step's gradients were not reduced over the ranks, and nothing wraps the model: each rank may
            train by itself.
    """

    def __init__(
        self,
        ranks: int,
        dtypes: dict[int, str],
        *,
        given: int | None = None,
        weights: bool = True,
        sums: bool = True,
        name_of: Callable[[int], str | None] = lambda key: None,
    ) -> None:
        self.window: Window | None = None
        self._last: dict[int, Window] = {}
        self.used: Mapping[Source, float] = {}
        self.judged: set[int] = set()
        self.alone = False
        self._by_hand: set[str] = set()
        self._sizes: dict[int, float] = {}
        self._replay = Replay(ranks, dtypes)
        self._ranks, self._given = ranks, given
        self._judges_weights, self._judges_sums = weights, sums
        self._name_of = name_of
        self._lengths: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._configured: dict[int, int] = {}
        self._grown: dict[int, int] = {}
        self._singles: Counter[int] = Counter()
        self._windows: Counter[int] = Counter()
        self._places: dict[tuple[int, str], list[int]] = {}
        self._tasks: dict[tuple[int, str], Counter[frozenset[int]]] = {}
        self._united: United = {}
        self._violated: set[int] = set()
        self._read_before: set[int] = set()
        self._of_step: list[LiveViolation] = []
        self._notes: Counter[str] = Counter()
        self._unknown: Counter[Unknown] = Counter()
        self._pending: defaultdict[int, list[Pending]] = defaultdict(list)
        self._since: Counter[int] = Counter()
        self._weighed: dict[int, Weighed] = {}

    def take(self, row: Sequence[Event]) -> None:
        """Take the event of each rank.

        Raises:
            ValueError: the ranks do different things.
        """
        passes = [event for event in row if isinstance(event, PassRecord)]
        steps = [event for event in row if isinstance(event, StepRecord)]
        if len(passes) == len(row):
            self._replay.on_pass(passes)
        elif len(steps) == len(row) and len({step.optimizer for step in steps}) == 1:
            self._on_step(steps)
        else:
            raise ValueError("the ranks do different things")

    def usual(self, optimizer: int) -> int | None:
        """Return K: what the user or the trainer says, else the usual number of passes."""
        lengths = self._lengths[optimizer]
        if said := self._said(optimizer):
            return said
        # a schedule lets the windows grow: then the last one tells what the most frequent length does not tell yet
        return self._grown.get(optimizer) or (lengths.most_common(1)[0][0] if lengths else None)

    def _said(self, optimizer: int) -> int | None:
        return self._given or self._configured.get(optimizer)

    def violations(self) -> list[LiveViolation]:
        """Return the violations so far, one for each diagnosis and place, in the order of their steps."""
        united = [
            replace(_first(*(violation for violation, _ in ones)), occurrences=_number([steps for _, steps in ones]))
            for ones in self._repeated().values()
        ]
        return sorted(united, key=_order)

    def _repeated(self) -> Mapping[tuple[str, str | None], Sequence[Repeated]]:
        several: defaultdict[tuple[str, str | None], list[Repeated]] = defaultdict(list)
        for found in (self._united, *(weighed.united for weighed in self._weighed.values())):
            for (diagnosis, where), one in found.items():
                # one window of a gradient that is put together by hand may look reset before another one tells
                if not (diagnosis == "reset-inside-window" and where in self._by_hand):
                    several[diagnosis, where].append(one)
        return several

    def notes(self) -> Counter[str]:
        """Return what is worth knowing -> how often."""
        return sum((weighed.notes for weighed in self._weighed.values()), self._notes)

    def unknown(self) -> Counter[Unknown]:
        """Return what could not be judged, and what to do -> in how many steps."""
        return sum((weighed.unknown for weighed in self._weighed.values()), self._unknown)

    @property
    def weighed(self) -> set[int]:
        """The steps whose weights were judged."""
        return self._read_before.union(*(weighed.steps for weighed in self._weighed.values()))

    def add(self, violation: LiveViolation) -> None:
        """Add a violation that another instrument found."""
        self._of_step.append(violation)
        _unite(self._united, [violation])
        if violation.step is not None:
            self._violated.add(violation.step)

    def note(self, sentence: str) -> None:
        """Add what another instrument found worth knowing."""
        self._notes[sentence] += 1

    def take_over(self, alone: Sequence[Judge]) -> None:
        """Take over what the judges of ranks that train by themselves have found: what all have alike is said once.

        A step was judged where each of them judged it.

        Args:
            alone: the judge of each rank.
        """
        repeated = [judge._repeated() for judge in alone]
        for key, ranks in _ranks_of(repeated).items():
            first = {rank: _first(*(violation for violation, _ in repeated[rank][key])) for rank in ranks}
            shown = min(ranks, key=lambda rank: _order(first[rank]))
            violation = replace(
                first[shown],
                explanation=_on(ranks, alone, first[shown].explanation),
                weights=tuple(replace(row, rank=shown) for row in first[shown].weights),
            )
            self._united[key] = violation, set().union(*(steps for rank in ranks for _, steps in repeated[rank][key]))
        notes, unknown = [judge.notes() for judge in alone], [judge.unknown() for judge in alone]
        for sentence, ranks in _ranks_of(notes).items():
            self._notes[_on(ranks, alone, sentence)] = max(notes[rank][sentence] for rank in ranks)
        for part, ranks in _ranks_of(unknown).items():
            said = replace(part, reason=_on(ranks, alone, part.reason))
            self._unknown[said] = max(unknown[rank][part] for rank in ranks)
        self.judged = set.intersection(*(judge.judged | judge.violated for judge in alone))
        self._read_before = set.intersection(*(judge.weighed | judge.violated for judge in alone))

    def of_last_step(self) -> LiveViolation | None:
        """Return the violation of the last step, or None."""
        assert self.window is not None
        found = [*self._of_step, *(v for w in self._weighed.values() for v in (*w.violations, *w.alone))]
        return next((v for v in found if v.step == self.window.number), None)

    def note_size(self, step: int, error: float) -> None:
        """Note by how much the gradient of a violated step is off."""
        self._sizes[step] = error
        _unite(self._united, [replace(v, gradient_error=error) for v in self._of_step])
        for weighed in self._weighed.values():
            self._unite_weighed(weighed)

    def _unite_weighed(self, weighed: Weighed) -> None:
        weighed.united = {}
        _unite(weighed.united, self._sized(weighed.violations))

    def _sized(self, violations: Iterable[LiveViolation]) -> Iterator[LiveViolation]:
        return (replace(v, gradient_error=self._sizes[v.step]) if v.step in self._sizes else v for v in violations)

    @property
    def violated(self) -> set[int]:
        """The steps that are violated."""
        found = {v.step for weighed in self._weighed.values() for v in weighed.violations if v.step is not None}
        return self._violated | found

    def _violate(self, fault: Fault, window: Window, where: Place) -> None:
        name = None if fault.key is None else self._name_of(fault.key)
        self.add(violation_of(fault, window, where, name))

    def _on_step(self, steps: Sequence[StepRecord]) -> None:
        window = self.window = self._replay.on_step(steps)
        self.used, self._of_step = {}, []
        if not window.passes and (window.edit == "all reset" or not any(window.coefficients.values())):
            given = [one for one in window.step.gradients.values() if isinstance(one, np.ndarray)]
            if any(map(size, given)):
                of_zero = (window.step.trainer or "").startswith("deepspeed")
                self._unknown[Unknown(BOTH, str(window.step.place), *(ZERO if of_zero else MASTERS))] += 1
            elif given and any(isinstance(one, np.ndarray) and size(one) > 0 for one in window.step.moved.values()):
                fault = Fault("repeated-step", OF_SUMS["repeated-step"], kind="step-count")
                self._violate(fault, window, window.step.place)
            return
        optimizer = window.optimizer
        self._last[optimizer] = window
        if window.step.steps is not None:
            self._configured[optimizer] = window.step.steps
        members = Members(window)
        required = members.required or list(window.passes)
        self._windows[optimizer] += 1
        told = {index: seen for index, seen in window.passes.items() if not members.is_null(index)}
        for site in {str(seen.site) for index, seen in window.passes.items() if index not in told}:
            self._notes[
                f"{site}: every gradient that goes backward here is exactly 0: look for a mask, a factor of "
                "0, or a saturated function"
            ] += 1
        for index, seen in told.items():
            self._places.setdefault((optimizer, str(seen.site)), [0, 0, 0])[bool(members.is_in(index))] += 1
        for site in {str(seen.site) for seen in told.values()}:
            self._places[optimizer, site][2] += 1
        if required and all(members.is_in(i) for i in required):
            number, lengths = len(required), self._lengths[optimizer]
            self._grown[optimizer] = (
                number if number >= max(lengths, default=0) and self._grown.get(optimizer, 1) else 0
            )
            lengths[number] += 1
        where = window.passes[max(window.passes)].site if window.passes else window.step.place
        self._note_parts(window, members)
        used = self._judge_sums(window, where) if self._judges_sums else self._assumed(window)
        if used is None:
            return
        self.judged.add(window.number)
        self.used = used
        self._note_modes(window, used)
        if used and self._judges_weights:
            self._read(window, where, used)
        self._singles[optimizer] = self._singles[optimizer] + 1 if len(required) == 1 else 0
        if self._given is not None and self._given > 1 and self._singles[optimizer] == 3:
            sentence = OF_SUMS["step-per-micro-batch"].format(steps=self._given)
            self._violate(Fault("step-per-micro-batch", sentence, kind="step-count"), window, where)

    def _note_parts(self, window: Window, members: Members) -> None:
        """Note parameters that get a gradient in some passes of a line and in others none."""
        by_site: defaultdict[str, list[set[int]]] = defaultdict(list)
        for index in members.required:
            keys = {key for record in window.passes[index].records for key in record.arrivals} & set(window.keys)
            by_site[str(window.passes[index].site)].append(keys)
        for site, reached in by_site.items():
            times = Counter(key for keys in reached for key in keys)
            if some := [key for key, number in times.items() if number < len(reached)]:
                self._notes[
                    f"{site}: {counted(len(some), 'parameter')} of the optimizer got a gradient in some passes of a "
                    "window and in others none (experts by turns, or unfrozen there; if they are none, look for a "
                    "`detach` or a `no_grad`)"
                ] += 1

    def _note_modes(self, window: Window, used: Iterable[Source]) -> None:
        """Note a line whose passes went through one module in train mode and in eval mode."""
        seen: defaultdict[tuple[str, int], set[frozenset[bool]]] = defaultdict(set)
        for rank, index in used:
            record = window.passes[index].records[rank]
            for module in {module for module, _ in record.modes}:
                modes = frozenset(training for of, training in record.modes if of == module)
                seen[str(record.place), module].add(modes)
        for place in {place for (place, _), modes in seen.items() if len(modes) > 1}:
            self._notes[f"{place}: {SEVERAL_MODES}"] += 1

    def _judge_sums(self, window: Window, where: Place) -> Mapping[Source, float] | None:
        """Judge a window's sums, and return the coefficients by which its weights are read, None where they are not."""
        if window.local and not window.step.wrapped:
            self.alone = True
            return None
        usual, longest = self.usual(window.optimizer), max(self._lengths[window.optimizer], default=0)
        found = judge_sums(window, usual, longest)
        fault = found.fault or self._of_hooks(window)
        if found.fault is not None and found.coefficients and not found.excuse and self._are_right(window, found):
            return found.coefficients
        if found.excuse:
            self._notes[found.excuse] += 1
        if fault is not None:
            self.judged.add(window.number)
            self._violate(fault, window, where)
            return None
        if found.untold:
            self._unknown[Unknown(BOTH, str(where), *UNTOLD)] += 1
            return None
        if found.by_hand:
            self._by_hand.add(str(where))
        if found.by_hand or (any(seen.by_hand for seen in window.passes.values()) and window.edit == "free"):
            reason = "gradients are put together by hand from what arrived"
            self._unknown[Unknown(BOTH, str(where), reason)] += 1
            return None
        if window.edit == "free":
            self._notes[
                "`.grad` is edited between the last backward pass and the step, which is the program's decision"
            ] += 1
        return found.coefficients

    def _are_right(self, window: Window, found: Sums) -> bool:
        """Return whether the losses weigh their items rightly with unequal coefficients of the passes."""
        scale = window.step.scale or 1.0
        coefficients = {s: c / scale for s, c in found.coefficients.items()}
        reading = reading_weights.read(window.passes, coefficients, error=window.error)
        objectives = reading_weights.objectives(reading, {})
        dark = any(term.opaque for _, i in found.coefficients for r in window.passes[i].records for term in r.terms)
        return bool(objectives) and not dark and all(o.is_right and len(o.parts) > 1 for o in objectives)

    def _assumed(self, window: Window) -> Mapping[Source, float]:
        """Return the coefficients where sums are not judged: 1 for each pass that has no other consumer."""
        own = [i for i, seen in window.passes.items() if not window.seen[i] and not seen.by_hand]
        return {(rank, i): 1.0 for i in own for rank in range(self._ranks)}

    def _of_hooks(self, window: Window) -> Fault | None:
        hooked: dict[int, bool] = {}
        for seen in window.passes.values():
            for record in seen.records:
                for key in record.hooked.keys() & set(window.keys):
                    hooked[key] = hooked.get(key, True) and record.hooked[key]
        if len(window.passes) > 1 and not all(hooked.values()):
            return Fault("not-linear", OF_SUMS["hook"], next(key for key, fixed in hooked.items() if not fixed))
        if hooked:
            number = counted(len(hooked), "parameter")
            self._notes[f"a hook changes what arrives at {number}, by the same factors in each pass"] += 1
        return None

    def _read(self, window: Window, where: Place, used: Mapping[Source, float]) -> None:
        scale = window.step.scale or 1.0
        factor = (window.factor or 1.0) if self._judges_sums else 1.0 if window.step.fused else 1 / scale
        # what a GradScaler takes out again, before the step or inside of it, is no part of the weights
        left = factor * (1.0 if window.step.fused else scale)
        factors = [1.0] if abs(left - 1) < 1e-3 or window.factor is None else [left, 1.0]
        tasks = self._tasks_of(window)
        _read_joined(window.passes, used)
        scaled = [{source: c * f / scale for source, c in used.items()} for f in factors]
        readings = [reading_weights.read(window.passes, one, tasks, window.error) for one in scaled]
        pending = self._pending[window.optimizer]
        pending.append(Pending(window, where, used, readings, factors[0]))
        self._since[window.optimizer] += 1
        # after the first windows, and then whenever a third more have come
        if self._since[window.optimizer] >= min(EVERY, max(1, len(pending) // 4)):
            self._weigh(window.optimizer)

    def _tasks_of(self, window: Window) -> dict[int, str]:
        """Tell the tasks of a line apart by the parameters that only one of them reaches, such as its head.

        Experts by turns and dropped layers differ from window to window: these are no tasks.
        """
        by_site: defaultdict[str, dict[int, frozenset[int]]] = defaultdict(dict)
        for index, seen in window.passes.items():
            by_site[str(seen.site)][index] = frozenset(seen.records[0].arrivals.keys() & set(window.keys))
        found: dict[int, str] = {}
        for site, reached in by_site.items():
            sets = Counter(reached.values())
            apart = len(sets) > 1 and not any(one < other for one in sets for other in sets)
            if sets != self._tasks.setdefault((window.optimizer, site), sets):
                self._tasks[window.optimizer, site] = Counter()
            elif apart:
                found |= {index: f"of {sorted(keys)}" for index, keys in reached.items()}
        return found

    def _weigh(self, optimizer: int, *, ended: bool = False) -> None:
        pending = self._pending[optimizer]
        usual, said = self.usual(optimizer), self._said(optimizer)
        weighed = self._weighed[optimizer] = judge_weights(pending, usual, said, self._ranks, self._name_of)
        self._since[optimizer] = 0
        if ended or len(pending) > MOST_WINDOWS:
            weighed.violations += weighed.alone
            weighed.alone = []
        self._unite_weighed(weighed)
        if len(pending) > MOST_WINDOWS:
            # the first windows of a run and the last ones say most about it
            lost = {one.window.number for one in pending[EVERY : EVERY + len(pending) - MOST_WINDOWS]}
            forgotten = [violation for violation in weighed.violations if violation.step in lost]
            weighed.violations = [violation for violation in weighed.violations if violation.step not in lost]
            self._unite_weighed(weighed)
            _unite(self._united, self._sized(forgotten))
            self._violated |= {v.step for v in forgotten if v.step is not None}
            self._read_before |= weighed.steps & lost
            self._pending[optimizer] = [one for one in pending if one.window.number not in lost]

    def end(self, *, complete: bool) -> None:
        """Judge what only the whole run shows.

        Args:
            complete: whether the run ended by itself: what is left in `.grad` then never reaches a step.
        """
        for optimizer in list(self._pending):
            self._weigh(optimizer, ended=True)
        somewhere = {place for (_, place), (_, used, _) in self._places.items() if used}
        for (optimizer, place), (lost, used, windows) in self._places.items():
            if lost and not used:
                if place in somewhere:
                    continue
                self._notes[f"{place}: what goes backward here is in no step of the whole run{IF_WANTED}"] += 1
            elif windows < (every := self._windows[optimizer]):
                self._notes[f"{place}: backward is called here in {windows} of {every} windows"] += 1
        if complete and self._judges_sums:
            self._tails()

    def _tails(self) -> None:
        """Find what went backward after an optimizer's last step, stands in `.grad`, and is never stepped on."""
        for optimizer, before in self._replay.last.items():
            usual = self.usual(optimizer)
            last = self._last.get(optimizer)
            if last is None or usual is None:
                continue
            standing = self._replay.standing(last.keys)
            left = {
                index: seen
                for index, seen in self._replay.passes.items()
                if index >= before
                and index in standing
                and not seen.consumers
                and seen.has(set(last.keys))
                and (optimizer, str(seen.site)) in self._places
            }
            # as many as a window may be one that was discarded on purpose: nothing after it tells
            if left and len(left) != usual:
                sentence = OF_SUMS["tail-dropped"].format(lost=counted(len(left), "micro-batch"))
                fault = Fault("tail-dropped", sentence, kind="step-count")
                violation = violation_of(fault, replace(last, passes=left), left[max(left)].site)
                self.add(replace(violation, step=None, stepped=None))
