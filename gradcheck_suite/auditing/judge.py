"""The one judge of a live run: from the events of 1 to N ranks to violations, findings and what
could not be judged.

Each step is asked about its sums when it comes: is every pass of the window in `.grad`, once, with
one factor? The weights are read at the same time, and judged with the windows before and after it,
since one window alone often fits two readings. They are judged again after each of the first
windows, then from time to time, and when the run is over.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, pairwise, product
from typing import TypeVar

import numpy as np

from gradcheck_suite.auditing import weights as reading_weights
from gradcheck_suite.auditing.events import BY_HAND, Event, Gap, PassRecord, StepRecord
from gradcheck_suite.auditing.evidence import (
    Discards,
    History,
    WindowEvidence,
    columns_where,
    evidence_of,
)
from gradcheck_suite.auditing.places import Loop, Place, lines_with
from gradcheck_suite.auditing.replay import BackwardPass, Replay, Source, StepWindow, near
from gradcheck_suite.auditing.rules import Decided, E, Held, Need, Sighting, StepFault, decide
from gradcheck_suite.auditing.shared_passes import SharedPasses
from gradcheck_suite.auditing.step_rules import (
    OF_COPIES,
    PER_PASS,
    STEP_ALONE,
    STEP_RULES,
    STEPPED,
    StepEvidence,
)
from gradcheck_suite.auditing.sums import (
    ADDED_TWICE,
    ALL_RESET,
    LEFT_OUT,
    LIKENESS,
    MOST_LEFT,
    RULES,
    TAIL,
    alike_within,
    is_hidden,
    pass_coefficients,
    weigh_one,
)
from gradcheck_suite.auditing.vectors import size
from gradcheck_suite.auditing.weighing import (
    Repeated,
    United,
    WeightVerdict,
    WindowReadings,
    judge_weights,
    place_of_loss,
    read_joined,
    violation_of,
)
from gradcheck_suite.core.faults import remedy_over_ranks
from gradcheck_suite.core.findings import Occurrence, finding
from gradcheck_suite.core.results import Unknown, Violation
from gradcheck_suite.core.text import MOST_NAMES, counted, listed

MOST_WINDOWS = 512
"""Windows of one optimizer that are judged together; older ones have been judged and are forgotten."""
EVERY = 64
"""Windows after which the weights are judged again, once there have been so many."""
FEWEST_TOGETHER = 3
"""Windows that are judged together before what their losses weigh is said while the run goes on.

In two windows, a coefficient that is annealed may look like a division by K.
"""
FEWEST_WITHOUT = 3
"""Windows without a gradient after which a parameter that had one is said to get none, a third of all at least."""
BOTH = "sums and weights"
COMPOSED = (
    "the program keeps the gradients of backward passes, resets `.grad` and writes a combination"
    " into it, so their sum is not judged; the weights of each of these gradients are"
)
LOST = "dropped-micro-batch", "reset-inside-window"
"""What one window may show before another one tells that gradients are put together by hand."""
ORPHANS = STEPPED.found
"""Why a step has no pass, where there were some."""
UNREAD = finding("unread-weights", "the weights of its losses could not be read")
FEWEST_SHARES = 2
"""Micro-batches from which on coefficients that add up to 1 are shares; two tasks may well be weighted so."""


def _unite(united: United, violations: Iterable[Violation]) -> None:
    """Add violations: a run that is faulty at every step has a few entries, however long it is."""
    for violation in violations:
        key = violation.diagnosis, violation.where
        first, steps = united.setdefault(key, (violation, set()))
        steps.add(violation.step)
        united[key] = min(first, violation, key=_order), steps


def _first(ones: Sequence[Repeated]) -> Violation:
    return min((violation for violation, _ in ones), key=_order)


def _number(sets: Iterable[set[int | None]]) -> int:
    """Return how many steps some sets have, without a copy of the largest one, which grows with the
    run.
    """
    largest, *others = sorted(sets, key=len, reverse=True)
    return len(largest) + len(set().union(*others) - largest)


def _of_steps(reason: Occurrence, numbers: Sequence[int], steps: int) -> Occurrence:
    """Return a reason with the steps that were not judged for it, of so many."""
    more = ", ..." if len(numbers) > MOST_NAMES else ""
    which = f"{', '.join(map(str, numbers[:MOST_NAMES]))}{more}"
    said = f"{len(numbers)} of {counted(steps, 'step')} not judged ({which}): {reason.sentence}"
    return replace(reason, sentence=said)


def _order(violation: Violation) -> float:
    return math.inf if violation.step is None else violation.step


def _number_of(line: str) -> int:
    """Return the number of `file:line`."""
    return int(line.rpartition(":")[2])


@dataclass
class PlaceCount:
    """What became of the passes of a line.

    Attributes:
        lost: passes that are not in the gradient of their step.
        used: passes that are.
        windows: windows that have some.
    """

    lost: int = 0
    used: int = 0
    windows: int = 0


T = TypeVar("T")


def _ranks_of(found: Sequence[Iterable[T]]) -> dict[T, list[int]]:
    """Return what some ranks have shown -> those ranks."""
    ranks: defaultdict[T, list[int]] = defaultdict(list)
    for rank, one in enumerate(found):
        for each in one:
            ranks[each].append(rank)
    return ranks


def _on(ranks: Sequence[int], of_ranks: Sequence[AuditJudge], sentence: str) -> str:
    """Return a sentence with the ranks of which it is true, where that is not said of all of them."""
    if len(ranks) == len(of_ranks):
        return sentence
    return f"on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {sentence}"


@dataclass(frozen=True)
class DoubtfulSum:
    """A fault of a window's sum, where most of `.grad` is none of what its passes have brought.

    Where no other window of the optimizer tells that its gradients are no sums, it is one.
    """

    window: StepWindow
    fault: StepFault


# The run.


class AuditJudge:
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
        skipped: steps of which nothing was -> why.
        counted: steps that were not recorded, since the budget does not pay for them.
        has_copies: whether an optimizer steps on copies of the parameters.
        edits_slightly: whether the program has edited `.grad` such that a later edit may show in no
            sampled element.
        ranks_train_apart: whether a step's gradients were not reduced over the ranks, and nothing
            wraps the model: each rank may train by itself.
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
        self.window: StepWindow | None = None
        self._last: dict[int, StepWindow] = {}
        self.used: Mapping[Source, float] = {}
        self.ranks_train_apart = self.has_copies = self.edits_slightly = False
        self.counted: list[range] = []
        self._known: set[int] | None = None
        self._by_hand: set[str] = set()
        self._composed: set[int] = set()
        self._unlike: set[int] = set()
        self._doubtful: defaultdict[int, list[DoubtfulSum]] = defaultdict(list)
        self._reached: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._moving: defaultdict[str, list[int]] = defaultdict(list)
        self._clipped: set[str] = set()
        self.skipped: dict[int, Occurrence] = {}
        self._removed: defaultdict[int, list[Sequence[int]]] = defaultdict(list)
        self._emptied: dict[int, StepWindow] = {}
        self._sizes: dict[int, float] = {}
        self._replay = Replay(ranks, dtypes)
        self._ranks = ranks
        self._given = given
        self._judges_weights = weights
        self._judges_sums = sums
        self._name_of = name_of
        # windows are counted for each optimizer: that of a GAN's critic may be five times as long
        self._lengths: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._configured: dict[int, int] = {}
        self._grown: dict[int, int] = {}
        self._stepped_in: dict[int, Loop | None] = {}
        self._discards: defaultdict[int, Discards] = defaultdict(Discards)
        self._singles: Counter[int] = Counter()
        self._windows: Counter[int] = Counter()
        self._places: dict[tuple[int, Place], PlaceCount] = {}
        self._of_first: set[tuple[int, Place]] = set()
        self._tasks: dict[tuple[int, str], Counter[frozenset[int]]] = {}
        self._united: United = {}
        self._owners: dict[tuple[str, str | None], int] = {}
        self._violated: set[int] = set()
        self._read_before = bytearray()
        self._of_step: list[Violation] = []
        self._notes: Counter[Occurrence] = Counter()
        self._unknown: Counter[Unknown] = Counter()
        self._pending: defaultdict[int, list[WindowReadings]] = defaultdict(list)
        self._since: Counter[int] = Counter()
        self._weighed: dict[int, WeightVerdict] = {}
        self._shared = SharedPasses(self._replay.owners, self._names)

    @property
    def sparse(self) -> Set[int]:
        """The parameters whose gradients sampled elements alone do not show."""
        return self._replay.sparse

    def take(self, row: Sequence[Event]) -> None:
        """Take the event of each rank.

        Raises:
            ValueError: the ranks do different things.
        """
        passes = [event for event in row if isinstance(event, PassRecord)]
        steps = [event for event in row if isinstance(event, StepRecord)]
        gaps = [event for event in row if isinstance(event, Gap)]
        if len(passes) == len(row):
            self._replay.on_pass(passes)
        elif len(gaps) == len(row):
            for optimizer in list(self._emptied):
                self._judge_emptied(optimizer, seen_all=False)
            self._replay.on_gap()
            self._known = set()
            self.counted.append(gaps[0].steps)
        elif len(steps) == len(row) and len({step.optimizer for step in steps}) == 1:
            if self._known is None or steps[0].optimizer in self._known:
                self._on_step(steps)
                assert self.window is not None
                self.window.step = replace(
                    self.window.step,
                    gradients={},
                    masked={},
                    before_clipping={},
                    unwritten=(),
                )
            else:
                self._on_first_step(steps)
        else:
            raise ValueError("the ranks do different things")

    def typical_k(self, optimizer: int) -> int | None:
        """Return K: what the user or the trainer says, else the usual number of passes."""
        # a schedule lets the windows grow: then the last one tells what the most frequent length
        # does not tell yet
        usual = next((length for length, _ in self._lengths[optimizer].most_common(1)), None)
        return self._declared_k(optimizer) or self._grown.get(optimizer) or usual

    def _declared_k(self, optimizer: int) -> int | None:
        return self._given or self._configured.get(optimizer)

    def violations(self) -> list[Violation]:
        """Return the violations so far, one for each diagnosis and place, in the order of their
        steps.
        """
        united = list[Violation]()
        for ones in self._repeated().values():
            of_steps = [steps for _, steps in ones]
            error = next(
                (e for step, e in self._sizes.items() if any(step in steps for steps in of_steps)),
                None,
            )
            first = _first(ones)
            if self._ranks > 1:
                said = remedy_over_ranks(first.explanation, first.diagnosis)
                first = replace(first, explanation=said)
            united.append(replace(first, occurrences=_number(of_steps), gradient_error=error))
        return sorted(united, key=_order)

    def settled(self, *, is_last: bool = False) -> list[Violation]:
        """Return the violations that no later window takes back or gives another name.

        Args:
            is_last: whether there is no later window to wait for.
        """
        return [one for one in self.violations() if not self._may_change(one, is_last=is_last)]

    def _may_change(self, violation: Violation, *, is_last: bool) -> bool:
        """Return whether a fault that one window has shown waits for the next one."""
        key = (violation.diagnosis, violation.where)
        step = violation.step
        if step is None:
            return False
        if key in self._united:
            last = self._last.get(self._owners.get(key, -1))
            # another window tells whether the program puts gradients together by hand
            return violation.diagnosis in LOST and (last is None or last.number <= step)
        if is_last:
            return False
        # what a loss weighs is judged over the windows of its optimizer: a coefficient, a schedule
        # and a count of other windows show in the next ones
        return not any(
            key in weighed.united
            and len(self._pending[optimizer]) - self._since[optimizer] >= FEWEST_TOGETHER
            for optimizer, weighed in self._weighed.items()
        )

    def _repeated(self) -> Mapping[tuple[str, str | None], Sequence[Repeated]]:
        several: defaultdict[tuple[str, str | None], list[Repeated]] = defaultdict(list)
        for found in (self._united, *(weighed.united for weighed in self._weighed.values())):
            for (diagnosis, where), one in found.items():
                # one window of a gradient that is put together by hand may look reset before
                # another one tells
                if not (diagnosis in LOST and (one[0].loss or where) in self._by_hand):
                    several[diagnosis, where].append(one)
        return several

    def notes(self) -> Counter[Occurrence]:
        """Return what is worth knowing -> how often."""
        return sum((weighed.notes for weighed in self._weighed.values()), self._notes)

    def unknown(self) -> Counter[Unknown]:
        """Return what could not be judged, and what to do -> in how many steps."""
        return sum((weighed.unknown for weighed in self._weighed.values()), self._unknown)

    def unjudged(self, steps: int) -> list[Occurrence]:
        """Return which of so many steps were not judged, and why."""
        reasons = defaultdict[Occurrence, list[int]](list)
        judged = bytearray(steps)  # a set of millions of numbers takes hundreds of megabytes
        for some in self.counted:
            judged[some.start : some.stop] = b"\1" * len(judged[some.start : some.stop])
        for step in self.weighed | self.violated:
            if step < steps:
                judged[step] = 1
        step = judged.find(0)
        while step >= 0:
            reasons[self.skipped.get(step, UNREAD)].append(step)
            step = judged.find(0, step + 1)
        return [_of_steps(reason, numbers, steps) for reason, numbers in reasons.items()]

    @property
    def weighed(self) -> set[int]:
        """The steps whose weights were judged or, without that instrument, whose sums were."""
        before = {step for step, is_read in enumerate(self._read_before) if is_read}
        return before.union(*(weighed.steps for weighed in self._weighed.values()))

    def add(self, violation: Violation) -> None:
        """Add a violation that another instrument found."""
        self._of_step.append(violation)
        _unite(self._united, [violation])
        if violation.step is not None:
            self._violated.add(violation.step)

    def note(self, one: Occurrence) -> None:
        """Add what another instrument found worth knowing."""
        self._notes[one] += 1

    def take_over(self, of_ranks: Sequence[AuditJudge]) -> None:
        """Take over what the judges of ranks that train by themselves have found: what all have
        alike is said once.

        A step was judged where each of them judged it.

        Args:
            of_ranks: the judge of each rank.
        """
        repeated = [judge._repeated() for judge in of_ranks]
        for key, ranks in _ranks_of(repeated).items():
            first = {rank: _first(repeated[rank][key]) for rank in ranks}
            shown = min(ranks, key=lambda rank: _order(first[rank]))
            violation = replace(
                first[shown],
                explanation=_on(ranks, of_ranks, first[shown].explanation),
                weights=tuple(replace(row, rank=shown) for row in first[shown].weights),
            )
            self._united[key] = (
                violation,
                set().union(
                    *(
                        steps
                        for _, steps in chain.from_iterable(repeated[rank][key] for rank in ranks)
                    )
                ),
            )
        notes = [judge.notes() for judge in of_ranks]
        unknown = [judge.unknown() for judge in of_ranks]
        for one, ranks in _ranks_of(notes).items():
            limited_note = replace(one, sentence=_on(ranks, of_ranks, one.sentence))
            self._notes[limited_note] = max(notes[rank][one] for rank in ranks)
        for part, ranks in _ranks_of(unknown).items():
            limited = replace(part, reason=_on(ranks, of_ranks, part.reason))
            self._unknown[limited] = max(unknown[rank][part] for rank in ranks)
        self.counted = list(chain.from_iterable(judge.counted for judge in of_ranks[:1]))
        self._mark_read(set.intersection(*(judge.weighed | judge.violated for judge in of_ranks)))

    def of_last_step(self) -> Violation | None:
        """Return the violation of the last step, or None."""
        assert self.window is not None
        found = [
            *self._of_step,
            *chain.from_iterable((*w.violations, *w.provisional) for w in self._weighed.values()),
        ]
        return next((v for v in found if v.step == self.window.number), None)

    def note_size(self, step: int, error: float) -> None:
        """Note by how much the gradient of a violated step is off."""
        self._sizes[step] = error

    @property
    def violated(self) -> set[int]:
        """The steps that are violated."""
        found = {
            v.step
            for v in chain.from_iterable(weighed.violations for weighed in self._weighed.values())
            if v.step is not None
        }
        return self._violated | found

    def _violate(self, fault: StepFault, window: StepWindow, where: Place | None = None) -> None:
        name = None if fault.key is None else self._name_of(fault.key)
        if fault.keys:
            names = self._names([key for key in window.keys if key in fault.keys])
            fault = replace(fault, sentence=f"in {names}: {fault.sentence}")
        violation = violation_of(fault, window, where or window.where, name)
        self._owners[violation.diagnosis, violation.where] = window.optimizer
        self.add(violation)

    def _on_step(self, steps: Sequence[StepRecord]) -> None:
        if self.window is not None:
            self.window.slim()
        window = self.window = self._replay.on_step(steps)
        self.used = {}
        self._of_step = []
        optimizer = window.optimizer
        self.has_copies = self.has_copies or window.copies
        self.edits_slightly = self.edits_slightly or window.edits_slightly
        self._note_reached(window)
        if not self._judge_step(window, has_unseen=any(step.has_unseen for step in steps)):
            return
        if optimizer in self._emptied:
            self._judge_emptied(optimizer)
        self._last[optimizer] = window
        if window.step.steps is not None:
            self._configured[optimizer] = window.step.steps
        evidence = evidence_of(window)
        self._note_clocks(evidence)
        self._note_places(evidence)
        self._note_length(evidence)
        self._note_parts(evidence)
        if self._judges_sums:
            self._shared.take(evidence)
        used = self._judge_sums(evidence) if self._judges_sums else self._assumed(window)
        if used is None:
            return
        self.used = used
        self._note_alike(window, used)
        self._note_modes(window, used)
        if self._judges_weights:
            self._read(window, used)
        else:
            self._mark_read({window.number})
        is_single = len(evidence.required or evidence.indices) == 1
        self._singles[optimizer] = self._singles[optimizer] + 1 if is_single else 0
        self._violate_all(decide([PER_PASS], self._step_evidence(window)), window)

    def _note_reached(self, window: StepWindow) -> None:
        """Note at which parameters of the optimizer a gradient was, in which of its windows last."""
        number = self._windows[window.optimizer]
        reached = self._reached[window.optimizer]
        reached |= {key: number for key, now in window.step.gradients.items() if now is not None}
        for record in chain.from_iterable(seen.records for seen in window.passes.values()):
            reached |= dict.fromkeys(record.arrivals, number)

    def _step_evidence(self, window: StepWindow, *, has_unseen: bool = False) -> StepEvidence:
        return StepEvidence(
            window,
            self._last.get(window.optimizer),
            [seen for index, seen in self._replay.passes.items() if index >= window.before],
            has_unseen,
            self._replay.is_stepped,
            self._given,
            self._singles[window.optimizer],
        )

    def _judge_step(self, window: StepWindow, *, has_unseen: bool) -> bool:
        """Judge a step by itself, and return whether there are passes whose sum is to be judged."""
        evidence = self._step_evidence(window, has_unseen=has_unseen)
        decided = decide(STEP_RULES, evidence)
        if decided.missing is not None:
            self.has_copies = self.has_copies or decided.missing in OF_COPIES
            self._skip(window, decided.missing)
        if decided.missing is None and not evidence.is_empty and evidence.last is None:
            self._note_listed(window)
            # a program that has ended has let its modules go, and their names with them
            self._names([key for key, now in window.step.gradients.items() if now is None])
        self._violate_all(decided, window)
        return decided.missing is None and not evidence.is_empty

    def _violate_all(self, decided: Decided[E], window: StepWindow) -> None:
        for one in decided.held:
            where = one.seen.where
            self._violate(
                one.rule.fault(one.seen), window, where if isinstance(where, Place) else None
            )

    def _note_places(self, evidence: WindowEvidence) -> None:
        """Note from which lines passes came, and whether they are in the gradient."""
        window = evidence.window
        optimizer = window.optimizer
        told = np.flatnonzero(~evidence.null).tolist()
        zero = columns_where(evidence.null & ~evidence.unknown)
        for site in {str(place) for place in evidence.places(zero)}:
            said = "backward() computes gradients here that are all exactly 0"
            self._notes[finding("zero-gradient", said, site)] += 1
        for column in told:
            place = evidence.pass_of(column).site
            count = self._places.setdefault((optimizer, place), PlaceCount())
            if evidence.in_sum[column] or window.misplaced:
                count.used += 1
            else:
                count.lost += 1
            if window.first and evidence.in_sum[column]:
                self._of_first.add((optimizer, place))
        # a pass that brings exactly 0, or what no sampled element shows, was called all the same
        for place in evidence.places(range(len(evidence.indices))):
            if (optimizer, place) in self._places:
                self._places[optimizer, place].windows += 1

    def _note_length(self, evidence: WindowEvidence) -> None:
        """Count a window, and its passes where none is missing."""
        optimizer = evidence.window.optimizer
        self._windows[optimizer] += 1
        required = evidence.required or range(len(evidence.indices))
        if not required or not evidence.in_sum[list(required)].all():
            return
        # a pass that brings exactly 0, as of a saturated loss, is a micro-batch like the others
        sites = evidence.places(required)
        zero = [j for j in columns_where(evidence.null) if evidence.pass_of(j).site in sites]
        number = len({*required, *zero})
        lengths = self._lengths[optimizer]
        grows = number >= max(lengths, default=0) and self._grown.get(optimizer, 1)
        self._grown[optimizer] = number if grows else 0
        lengths[number] += 1

    def _skip(self, window: StepWindow, need: Need[E]) -> None:
        """Say why a step is not judged."""
        found = need.found
        if need in STEP_ALONE:
            self.skipped[window.number] = found
            return
        part = Unknown(
            BOTH,
            str(window.where),
            found.sentence,
            found.remedy,
            name=found.name,
        )
        self._unknown[part] += 1
        self.skipped[window.number] = part.found

    def _on_first_step(self, steps: Sequence[StepRecord]) -> None:
        """Take an optimizer's first step after a gap: what stands in `.grad` is known from then on."""
        self._known = (self._known or set()) | {steps[0].optimizer}
        self._replay.on_unknown(steps)
        self.window = None
        self.used = {}
        self._of_step = []
        number = steps[0].call
        if number not in self.counted[-1]:
            follows = self.counted[-1].stop == number
            begin = self.counted.pop().start if follows else number
            self.counted.append(range(begin, number + 1))

    def _note_listed(self, window: StepWindow) -> None:
        """Note parameters that an optimizer moves more than once in a step."""
        if twice := window.step.twice:
            said = (
                f"the optimizer lists {self._names(twice)} more than once, and moves it once for"
                " each"
            )
            self._notes[finding("parameter-listed-twice", said, window.step.place)] += 1
        if own := sorted(self._replay.of_rank & window.step.values.keys()):
            said = f"{self._names(own)} began with other values on each rank"
            self._notes[finding("unequal-ranks", said)] += 1
        if overlaid := window.step.overlaid:
            said = (
                f"{self._names(overlaid)} are different parameters over one memory, each with a"
                " part of the gradient, and the optimizer moves that memory once for each"
            )
            self._notes[finding("overlaid-parameters", said, window.step.place)] += 1

    def _note_clocks(self, evidence: WindowEvidence) -> None:
        """Note what moves with every micro-batch of a window, where the optimizer steps once per
        window.
        """
        window = evidence.window
        clocks = [evidence.record(column).clocks for column in evidence.required]
        seen_by_all = set.intersection(*map(set, clocks)) if len(clocks) > 1 else set()
        for what in seen_by_all:
            if all(one[what] != other[what] for one, other in pairwise(clocks)):
                self._moving[what].append(window.number)
        line, unscaled = (
            next(iter(lines_with(call, window.step.place)), None)
            for call in ("clip_grad_", "unscale_(")
        )
        scaled = window.step.scale and not window.step.fused and window.step.trainer is None
        edited = window.factor is None or abs(window.left - 1) > 1e-3
        if line and scaled and edited and (not unscaled or _number_of(unscaled) > _number_of(line)):
            self._clipped.add(line)

    def _note_alike(self, window: StepWindow, used: Mapping[Source, float]) -> None:
        """Note that all micro-batches in a window's gradient have brought the same."""
        indices = {index for _, index in used}
        arrived = [seen.arrived for index, seen in window.passes.items() if index in indices]
        if len(arrived) < 2 or not any(one.any() for one in arrived[0].values()):
            return
        first, *others = arrived
        have_same = all(other.keys() == first.keys() for other in others)
        if have_same and self._replay.are_alike(first, others, first):
            said = "all micro-batches of a window brought the same gradient"
            self._notes[finding("same-micro-batches", said, window.where)] += 1

    def _note_parts(self, evidence: WindowEvidence) -> None:
        """Note parameters that get a gradient in some passes of a line and in others none."""
        own = {*evidence.window.keys}
        by_site: defaultdict[str, list[set[int]]] = defaultdict(list)
        for column in evidence.required:
            seen = evidence.pass_of(column)
            keys = own.intersection(set().union(*(record.arrivals for record in seen.records)))
            by_site[str(seen.site)].append(keys)
        for site, reached in by_site.items():
            times = Counter(chain.from_iterable(reached))
            some = [key for key, number in times.items() if number < len(reached)]
            if not some:
                continue
            # A context that is cut off after its first use by mistake leaves exactly what truncated
            # backpropagation through time, a warm-up branch or layer dropout leave: the same
            # passes, values and arrivals. So this is a finding, and no fault.
            if reached[0].issuperset(some) and all(times[key] == 1 for key in some):
                said = (
                    f"{self._names(some)} got a gradient in the first of {len(reached)} passes of a"
                    " window alone (expected where a state is carried over and cut off on purpose,"
                    " as in truncated backpropagation through time; otherwise look for a `detach`"
                    " or a `no_grad`)"
                )
            else:
                said = (
                    f"{counted(len(some), 'parameter')} of the optimizer got a gradient in"
                    " some passes of a window and in others none (expected of mixtures of experts"
                    " and of layers that are unfrozen one by one; otherwise look for a `detach` or a"
                    " `no_grad`)"
                )
            self._notes[finding("partly-reached-parameters", said, site)] += 1

    def _note_modes(self, window: StepWindow, used: Iterable[Source]) -> None:
        """Note a line whose passes went through one module in train mode and in eval mode."""
        seen: defaultdict[tuple[str, int], set[frozenset[bool]]] = defaultdict(set)
        for rank, index in used:
            record = window.passes[index].records[rank]
            for module in {module for module, _ in record.modes}:
                modes = frozenset(training for of, training in record.modes if of == module)
                seen[str(record.place), module].add(modes)
        said = (
            "a module ran in train mode in some micro-batches of a window and in eval mode in"
            " others"
        )
        for place in {place for (place, _), modes in seen.items() if len(modes) > 1}:
            self._notes[finding("mixed-modes", said, place)] += 1

    def _judge_sums(self, evidence: WindowEvidence) -> Mapping[Source, float] | None:
        """Judge a window's sums, and return the coefficients by which its weights are read, None
        where they are not.
        """
        window = evidence.window
        optimizer = window.optimizer
        # without a wrapper, ranks that never reduce may train a model each, as in a sweep
        some_reduced = window.is_reduced or any(seen.reduced for seen in window.passes.values())
        if window.local and not window.step.wrapped and not some_reduced:
            self.ranks_train_apart = True
            return None
        coefficients = pass_coefficients(window)
        decided = decide(
            RULES,
            replace(
                evidence,
                history=self._history(optimizer),
                weighs_rightly=cache(lambda: self._pending_of(window, coefficients).is_right),
            ),
        )
        if window.passes:
            self._stepped_in[optimizer] = window.passes[max(window.passes)].records[0].loop
        if decided.missing is not None:
            if decided.missing.reason == "unlike-gradient":
                self._forget_alike(optimizer)
            self._skip(window, decided.missing)
            return None
        self._note_sums(window, decided)
        if decided.fault is not None:
            self._violate_sum(window, decided.fault)
            return None
        lost = len(evidence.lost) if decided.get("whole window") else 0
        self._discards[optimizer] = self._discards[optimizer].followed_by(lost)
        if decided.get("copies") or decided.get("results written"):
            window.edit = BY_HAND
            return {}
        return coefficients

    def _history(self, optimizer: int) -> History:
        return History(
            self.typical_k(optimizer),
            max(self._lengths[optimizer], default=0),
            self._stepped_in.get(optimizer),
            self._discards[optimizer],
            optimizer in self._unlike,
        )

    def _note_sums(self, window: StepWindow, decided: Decided[WindowEvidence]) -> None:
        """Note what a window's sum shows beside faults."""
        for one in decided.findings:
            if not one.rule.is_silent:
                found = one.rule.finding(one.seen)
                if one.seen.keys:
                    said = f"{found.sentence} ({self._names(one.seen.keys)})"
                    found = replace(found, sentence=said)
                self._notes[found] += 1
            elif one.rule.called == "removed-gradient":
                self._removed[window.optimizer].append(one.seen.keys)
            if one.seen.weights and self._judges_weights:
                # the gradient there gives a direction, in which the micro-batches weigh as in the
                # step
                first = replace(self._pending_of(window, one.seen.weights), scaled=False)
                self._pending[window.optimizer].append(first)

    def _violate_sum(self, window: StepWindow, held: Held[WindowEvidence]) -> None:
        records = list(chain.from_iterable(seen.records for seen in window.passes.values()))
        reached = set[int]().union(*(record.arrivals for record in records))
        if held.rule.name == ALL_RESET.name and reached - {*window.keys}:
            # an optimizer of the other parameters may step on them yet
            self._emptied[window.optimizer] = window
            return
        fault = held.rule.fault(held.seen)
        if fault.name in LOST and window.fit is not None and is_hidden(window.fit):
            self._doubtful[window.optimizer].append(DoubtfulSum(window, fault))
        else:
            self._violate(fault, window)

    def _forget_alike(self, optimizer: int) -> None:
        """Take back what was read of windows whose gradient looks put together from passes, where
        that of another window is not: it looked so by chance.
        """
        self._unlike.add(optimizer)
        for one in [*self._pending[optimizer]]:
            fit = one.window.fit
            if fit is not None and not fit.is_exact and fit.left > MOST_LEFT:
                self._pending[optimizer].remove(one)
                self._skip(one.window, LIKENESS)
        self._weighed.pop(optimizer, None)
        for doubtful in self._doubtful.pop(optimizer, ()):
            self._skip(doubtful.window, LIKENESS)

    def _judge_emptied(self, optimizer: int, *, seen_all: bool = True) -> None:
        """Judge a window whose gradients were all reset, where its passes reached other optimizers'
        parameters, too.

        Where one of these has stepped on them since, not all was reset: the program has taken away
        what this one has.

        Args:
            optimizer: whose window it is.
            seen_all: whether each step since then was recorded.
        """
        window = self._emptied.pop(optimizer)
        if any(seen.consumers.keys() - {optimizer} for seen in window.passes.values()):
            self._removed[optimizer].append(window.keys)
        elif seen_all:
            self._violate(ALL_RESET.fault(), window)
            return
        self.skipped[window.number] = finding(
            "gradients-taken-away", "the gradients of its parameters were taken away before it"
        )

    def _assumed(self, window: StepWindow) -> Mapping[Source, float]:
        """Return the coefficients where sums are not judged: 1 for each pass that has no other
        consumer.
        """
        own = [i for i, seen in window.passes.items() if not window.seen[i] and not seen.by_hand]
        return {(rank, i): 1.0 for i, rank in product(own, range(self._ranks))}

    def _read(self, window: StepWindow, used: Mapping[Source, float]) -> None:
        if window.not_finite & ({index for _, index in used} or window.passes.keys()):
            # its weights cannot be read, and would hide what those of the other windows show
            self.skipped[window.number] = finding("not-finite", "a gradient is not finite")
            return
        pending = self._pending[window.optimizer]
        one = self._pending_of(window, used)
        if window.edit == BY_HAND:
            one = replace(one, kept=[self._pending_of(window, kept) for kept in window.kept_apart])
        elif not used:
            if window.has_only(window.zero) and self._pending[window.optimizer]:
                # what arrived is 0 with any weights, and so is the gradient; a run of nothing else
                # shows nothing
                self._mark_read({window.number})
            elif window.has_only(window.null):
                said = "no element of its gradients that was looked at differs from 0"
                self.skipped[window.number] = finding("unread-weights", said)
            return
        pending.append(one)
        self._since[window.optimizer] += 1
        # after the first windows, and then whenever a third more have come
        if self._since[window.optimizer] >= min(EVERY, max(1, len(pending) // 4)):
            self._weigh(window.optimizer)

    def _mark_read(self, steps: set[int]) -> None:
        """Mark steps whose weights were judged: a set would take 60 bytes for one, and a run may
        have millions.
        """
        self._read_before.extend(bytes(max(0, max(steps, default=0) + 1 - len(self._read_before))))
        for step in steps:
            self._read_before[step] = 1

    def _pending_of(self, window: StepWindow, used: Mapping[Source, float]) -> WindowReadings:
        # what a GradScaler takes out again, before the step or inside of it, is no part of the
        # weights
        scale = window.step.scale or 1.0
        left = self._left_of(window)
        factors = [1.0] if abs(left - 1) < 1e-3 else [left, 1.0]
        if self._judges_sums and window.divided is not None:
            factors = [window.divided]  # what is clipping is known, and is no part of the weights
        tasks = self._tasks_of(window)
        read_joined(window.passes, used)

        def read(factor: float) -> reading_weights.Reading:
            scaled = {source: c * factor / scale for source, c in used.items()}
            return reading_weights.read_terms(window.passes, scaled, tasks, window.error)

        return WindowReadings(
            window,
            used,
            list(map(read, factors)),
            factors[0],
            read,
        )

    def _left_of(self, window: StepWindow) -> float:
        """Return by what `.grad` was multiplied after the last pass, beside what a GradScaler takes
        out; 1 where that is not known.
        """
        if not self._judges_sums:
            return 1.0
        if window.factor is None and window.factor_of_most:
            window = replace(window, factor=window.factor_of_most)
        return window.left if window.factor is not None else 1.0

    def _is_sum(self, made: Sequence[WindowReadings]) -> bool:
        """Return whether gradients that are put together by hand are sums over the micro-batches of
        a window.

        They are where the weights are right, where each pass has the same coefficient, or where the
        coefficients are shares of the same micro-batches in every window. Others are the program's:
        a projection, the weight of a task.
        """
        shares = [np.array([c for _, c in sorted(one.coefficients.items())]) for one in made]
        if not all(map(len, shares)):
            return False
        first = shares[0]
        places = set[Place]().union(*(one.places for one in made))
        # what stands in `.grad` is added up after each pass
        running = first[-1] * np.arange(len(first), 0, -1)
        known = near(float(first.sum()), 1.0, 1e-2) or np.allclose(first, running, rtol=1e-2)
        are_shares = len(first) > FEWEST_SHARES and len(places) == 1 and known
        if are_shares and all(
            len(each) == len(first) and np.allclose(each, first, rtol=1e-2) for each in shares
        ):
            return True
        # what weighs 1 in all is a mean over the window; means of tasks may as well be added up
        return all(
            (
                np.ptp(each) <= alike_within(one.window) * size(each)
                and evidence_of(one.window).is_alike
                and weigh_one(one.window, one.coefficients)
            )
            or one.is_right
            for one, each in zip(made, shares, strict=True)
        )

    def _tasks_of(self, window: StepWindow) -> dict[int, str]:
        """Tell the tasks of a line apart by the parameters that only one of them reaches, such as
        its head.

        Experts by turns and dropped layers differ from window to window: these are no tasks.
        """
        by_site: defaultdict[str, dict[int, frozenset[int]]] = defaultdict(dict)
        for index, seen in window.passes.items():
            by_site[str(seen.site)][index] = frozenset(
                seen.records[0].arrivals.keys() & set(window.keys)
            )
        found: dict[int, str] = {}
        for site, reached in by_site.items():
            sets = Counter(reached.values())
            has_part = any(one < other for one, other in product(sets, sets))
            are_tasks = len(sets) > 1 and not has_part
            if sets != self._tasks.setdefault((window.optimizer, site), sets):
                self._tasks[window.optimizer, site] = Counter()
            elif are_tasks:
                found |= {index: f"of {sorted(keys)}" for index, keys in reached.items()}
        return found

    def _weigh(self, optimizer: int, *, ended: bool = False) -> None:
        pending = self._pending[optimizer]
        made = [one for one in pending if one.kept]
        # that one is no sum shows in a later window where projections change nothing in the first
        # ones
        if made and optimizer not in self._composed and not self._is_sum(made):
            self._composed.add(optimizer)
        is_composed = bool(made) and optimizer in self._composed
        judged = list[WindowReadings]()
        for one in pending:
            judged += (one.kept if is_composed else ()) or (one,)
        weighed = self._weighed[optimizer] = judge_weights(
            judged,
            self.typical_k(optimizer),
            self._declared_k(optimizer),
            self._ranks,
            self._name_of,
        )
        self._since[optimizer] = 0
        if ended or len(pending) > MOST_WINDOWS:
            weighed.violations += weighed.provisional
            weighed.provisional = []
        if made:
            self._judge_made(made, weighed, is_composed=is_composed)
        if len(pending) > MOST_WINDOWS:
            self._let_go(optimizer, weighed)
        _unite(weighed.united, weighed.violations)

    def _judge_made(
        self, made: Sequence[WindowReadings], weighed: WeightVerdict, *, is_composed: bool
    ) -> None:
        """Judge whether gradients that the program puts together lack the same passes each time, and
        note that they are put together.
        """
        places = {place_of_loss(one.window, one.window.where) for one in made}
        held = decide((LEFT_OUT, ADDED_TWICE), [evidence_of(one.window) for one in made]).fault
        if held is not None:
            self._by_hand -= places
            fault = held.rule.fault(held.seen)
            weighed.violations += [violation_of(fault, o.window, o.window.where) for o in made]
        elif is_composed:
            self._by_hand |= places
            weighed.notes[finding("composed-gradient", COMPOSED, made[0].window.where)] += len(made)

    def _let_go(self, optimizer: int, weighed: WeightVerdict) -> None:
        """Let go of windows that have been judged: the first ones of a run and the last ones say
        most about it.
        """
        pending = self._pending[optimizer]
        old = pending[EVERY : EVERY + len(pending) - MOST_WINDOWS]
        lost = {one.window.number for one in old}
        forgotten = [violation for violation in weighed.violations if violation.step in lost]
        weighed.violations = [one for one in weighed.violations if one.step not in lost]
        _unite(self._united, forgotten)
        self._violated |= {v.step for v in forgotten if v.step is not None}
        self._mark_read(weighed.steps & lost)
        self._pending[optimizer] = [one for one in pending if one.window.number not in lost]

    def end(self, *, complete: bool) -> None:
        """Judge what only the whole run shows.

        Args:
            complete: whether the run ended by itself: what is left in `.grad` then never reaches a
                step.
        """
        for optimizer in list(self._emptied):
            self._judge_emptied(optimizer, seen_all=complete)
        for doubtful in chain.from_iterable(self._doubtful.values()):
            self._violate(doubtful.fault, doubtful.window)
        for optimizer in list(self._pending):
            self._weigh(optimizer, ended=True)
        self._note_lines()
        self._note_run()
        for optimizer in self._removed:
            self._note_removed(optimizer)
        if complete and self._judges_sums:
            self._tails()

    def _note_lines(self) -> None:
        """Note lines whose passes are in no step, or in some windows only."""
        somewhere = {place for (_, place), count in self._places.items() if count.used}
        covered = Counter[int]()
        for (optimizer, _), count in self._places.items():
            covered[optimizer] += count.windows
        places = {place for _, place in self._places}
        for (optimizer, place), count in self._places.items():
            every = self._windows[optimizer]
            where = place.apart_from(places)
            if count.windows == 1 < every and (optimizer, place) in self._of_first:
                said = (
                    "what goes backward here, before the first step and never again, is in its"
                    " gradient"
                )
                self._notes[finding("gradient-before-loop", said, where)] += 1
            elif count.lost and not count.used:
                # else another optimizer steps on what goes backward here
                if place not in somewhere:
                    said = "what goes backward here is in no step of the whole run"
                    self._notes[finding("discarded-pass", said, where)] += 1
            # lines that take turns have each their windows
            elif count.windows < every and covered[optimizer] != every:
                said = f"backward is called here in {count.windows} of {every} windows"
                self._notes[finding("occasional-pass", said, where)] += 1

    def _note_run(self) -> None:
        """Note what moved, was clipped, was alike on all ranks, or got no gradient, over the run."""
        if self._replay.alike.keys() == {True} and len(self._windows):
            said = (
                "the same gradient arrived on all ranks in every backward pass, as of the same data"
            )
            self._notes[finding("same-data-on-ranks", said)] += 1
        for what, steps in self._moving.items():
            if len(steps) > 1:
                said = (
                    f"{what} is stepped with every micro-batch, and the optimizer once per window"
                )
                remedy = "step it once per window, after optimizer.step()"
                self._notes[finding("step-per-micro-batch", said, remedy=remedy)] += len(steps)
        for line in self._clipped:
            said = (
                "gradients are clipped before the GradScaler has divided by its scale, so the norm"
                " is that of scaled ones"
            )
            self._notes[finding("scaled-clipping", said, line)] += 1
        for one, windows in self._shared.findings():
            self._notes[one] += windows
        for optimizer, last in self._last.items():
            never = [
                key
                for key in last.keys
                if key not in self._reached[optimizer].keys() | last.step.frozen
            ]
            if never:
                said = (
                    f"{len(never)} of {len(last.keys)} parameters of the optimizer got no gradient"
                    f" in any step ({self._names(never)})"
                )
                self._notes[finding("parameter-without-gradient", said, last.step.place)] += 1
            self._note_gone(optimizer, last)

    def _note_gone(self, optimizer: int, last: StepWindow) -> None:
        """Note parameters that had a gradient in the first windows of an optimizer, and none since."""
        windows = self._windows[optimizer]
        since = max(FEWEST_WITHOUT, windows // 3)
        reached = self._reached[optimizer]
        gone = [key for key in last.keys if reached.get(key, windows) < windows - since]
        if gone:
            said = (
                f"{counted(len(gone), 'parameter')} of the optimizer had a gradient in earlier"
                f" steps, and none in the last {since} windows or more ({self._names(gone)})"
            )
            self._notes[finding("parameter-without-later-gradient", said, last.step.place)] += 1

    def _note_removed(self, optimizer: int) -> None:
        """Note gradients that were taken away before the step, as those of a layer that is frozen
        for a while.
        """
        steps = Counter(chain.from_iterable(self._removed[optimizer]))
        for number in sorted({*steps.values()}):
            names = self._names([key for key, times in steps.items() if times == number])
            said = (
                f"the gradient of {names} was taken away between backward and the step in {number}"
                f" of {self._windows[optimizer]} steps"
            )
            self._notes[finding("removed-gradient", said)] += 1

    def _names(self, keys: Sequence[int]) -> str:
        """Return the names of a few parameters, and how many more there are."""
        return listed([str(self._name_of(key)) for key in keys])

    def _is_of_steps(self, optimizer: int, seen: BackwardPass) -> bool:
        """Return whether the optimizer has stepped on passes of that place, or of its line in a
        loop as deep.
        """
        used = {
            place for (one, place), count in self._places.items() if one == optimizer and count.used
        }
        here = seen.records[0].loop
        there = self._stepped_in.get(optimizer)
        alike = here is not None and there is not None and len(here) == len(there)
        # of a place that windows have seen, it is known whether they step on it
        is_new = (optimizer, seen.site) not in self._places
        return seen.site in used or (is_new and alike and str(seen.site) in map(str, used))

    def _tails(self) -> None:
        """Find what went backward after an optimizer's last step, stands in `.grad`, and is never
        stepped on.
        """
        for optimizer, before in self._replay.last.items():
            typical_k = self.typical_k(optimizer)
            last = self._last.get(optimizer)
            if last is None or typical_k is None:
                continue
            standing = self._replay.standing(last.keys)
            left = {
                index: seen
                for index, seen in self._replay.passes.items()
                if index >= before and index in standing and not seen.consumers
                if seen.has(set(last.keys)) and self._is_of_steps(optimizer, seen)
            }
            # as many as a window may be one that was discarded on purpose: nothing after it tells
            if left and len(left) != typical_k:
                window = replace(last, passes=left)
                lost = Sighting({"lost": counted(len(left), "micro-batch")})
                violation = violation_of(TAIL.fault(lost), window, window.where)
                self.add(violation.of_no_step)
