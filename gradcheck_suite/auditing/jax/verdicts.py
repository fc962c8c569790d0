"""What the windows of a run of JAX show: violations, findings and reasons, by the judge of the
audit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from gradcheck_suite.auditing.jax.mapping import devices_of, pending_of, step_window
from gradcheck_suite.auditing.jax.windows import (
    Optimizer,
    StepGradients,
    is_uneven,
    norms_alike,
)
from gradcheck_suite.auditing.places import Place
from gradcheck_suite.auditing.rules import StepFault
from gradcheck_suite.auditing.weighing import (
    WeightVerdict,
    WindowReadings,
    judge_weights,
    violation_of,
)
from gradcheck_suite.auditing.weights import ComparedObjective
from gradcheck_suite.core.faults import FAULTS, FIX, names_of, remedy_of
from gradcheck_suite.core.findings import Occurrence, finding
from gradcheck_suite.core.results import Unknown, Violation
from gradcheck_suite.core.text import counted

BOTH = "sums and weights"
FEWEST_ALIKE = 2
"""Gradients that have the norm of another one, in all windows, from which on that is no chance."""
FEWEST_STEPS = 3
"""Fewest steps that show that parameters are never updated, or that each micro-batch has a step of its own."""


@dataclass(frozen=True, eq=False)
class Shown:
    """A window and the optimizer whose step it is.

    Attributes:
        window: the window.
        optimizer: its state.
    """

    window: StepGradients
    optimizer: Optimizer


@dataclass(eq=False)
class Verdicts:
    """What was found so far.

    Attributes:
        given: the accumulation steps that the user states.
        judges_weights: whether weights are judged.
        notes: what is worth knowing -> how often.
        unknown: what could not be judged -> in how many steps.
        found: violations, but for those of weights and of passes that are lost.
        shown: the windows whose weights are judged.
        lost: those of them that lack passes.
        alike: those of them in which gradients were perhaps cut to one norm.
        held: index of an optimizer -> what updates after some that were 0 are sums of; None for
            what is no sum.
    """

    given: int | None = None
    judges_weights: bool = True
    notes: Counter[Occurrence] = field(default_factory=Counter)
    unknown: Counter[Unknown] = field(default_factory=Counter)
    found: list[Violation] = field(default_factory=list)
    shown: list[Shown] = field(default_factory=list)
    lost: list[Shown] = field(default_factory=list)
    alike: list[Shown] = field(default_factory=list)
    held: defaultdict[int, list[StepGradients | None]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def __post_init__(self) -> None:
        self._weighed: dict[int, WeightVerdict] = {}
        self._weighed_at = (-1, 0)

    def skip(self, place: Place, name: str, reason: str) -> None:
        """Say why a step was not judged."""
        self.unknown[
            Unknown(
                BOTH,
                str(place),
                reason,
                name=name,
            )
        ] += 1

    def violation(self, fault: StepFault, window: StepGradients, optimizer: Optimizer) -> Violation:
        """Return the violation that a fault of a window is."""
        found = step_window(window, optimizer.index, window.columns)
        place = window.columns[-1].mark.place if window.columns else window.step.place
        violation = violation_of(fault, found, place)
        where = str(place)
        return _in_jax_words(replace(violation, where=where))

    def violate(self, fault: StepFault, window: StepGradients, optimizer: Optimizer) -> None:
        """Add the violation that a fault of a window is."""
        self.found.append(self.violation(fault, window, optimizer))

    # What the run shows.

    def violations(self) -> list[Violation]:
        """Return the violations so far, one for each diagnosis and place."""
        self._weigh()
        found = [*self._of_sums(), *map(_in_jax_words, self._of_weighed())]
        several: defaultdict[tuple[str, str | None], list[Violation]] = defaultdict(list)
        for one in found:
            several[one.diagnosis, one.where].append(one)
        united = []
        for ones in several.values():
            first = min(ones, key=_step_order)
            united.append(replace(first, occurrences=len({one.step for one in ones})))
        return sorted(united, key=_step_order)

    @property
    def violated(self) -> set[int]:
        """The steps that are violated."""
        found = chain(self._of_sums(), self._of_weighed())
        return {one.step for one in found if one.step is not None}

    def _of_sums(self) -> Iterator[Violation]:
        yield from (*self.found, *self._of_lost(), *self._of_clipped())

    def _of_weighed(self) -> Iterator[Violation]:
        for weighed in self._weighed.values():
            yield from (*weighed.violations, *weighed.provisional)

    @property
    def weighed(self) -> set[int]:
        """The steps whose weights were judged."""
        return set().union(*(weighed.steps for weighed in self._weighed.values()))

    def all_notes(self) -> Counter[Occurrence]:
        """Return what is worth knowing -> how often."""
        of_weights = (weighed.notes for weighed in self._weighed.values())
        return sum(of_weights, Counter(self.notes))

    def all_unknown(self) -> Counter[Unknown]:
        """Return what could not be judged -> in how many steps."""
        found = Counter(self.unknown)
        for weighed in self._weighed.values():
            for part, times in weighed.unknown.items():
                found[replace(part, remedy=None)] += times  # what it names is for torch
        return found

    def _of_lost(self) -> list[Violation]:
        found = []
        for shown in self.lost:
            window = shown.window
            optimizer = shown.optimizer
            usual = optimizer.lengths.most_common(1)
            if usual and usual[0][0] == window.length:
                continue  # other windows are as long, and lack nothing: it was discarded
            last = min(column.number for column in window.used)
            # all that is missing came before all that is used: the sum was begun anew
            is_reset = all(column.number < last for column in window.lost)
            number = len({column.number for column in window.lost})
            are = "is" if number == 1 else "are"
            fault = StepFault(
                "reset-inside-window" if is_reset else "dropped-micro-batch",
                f"{counted(number, 'gradient')} of the window, by the same parameters and at the same"
                f" line, {are} not in the gradient at the step",
            )
            found.append(self.violation(fault, window, optimizer))
        return found

    def _clipped(self) -> set[int]:
        """Return the optimizers for which gradients are clipped one by one.

        That two of them have one norm once may be chance, and where each item weighs the same the
        counts of items explain it.
        """
        times = Counter[int]()
        for shown in self.alike:
            times[shown.optimizer.index] += norms_alike(shown.window)
        candidates = [index for index, number in times.items() if number >= FEWEST_ALIKE]
        return {index for index in candidates if not self._is_even(index)}

    def _is_even(self, index: int) -> bool:
        """Return whether each item weighs the same where gradients have one norm."""
        windows = [one.window for one in self.alike if one.optimizer.index == index]
        pending = [pending_of(window, index) for window in windows]
        weighed = judge_weights(
            pending,
            None,
            self.given,
            1,
            lambda key: None,
        )
        return bool(weighed.steps) and not (weighed.violations or weighed.provisional)

    def _of_clipped(self) -> list[Violation]:
        found = []
        clipped = self._clipped()
        for shown in self.alike:
            if shown.optimizer.index not in clipped:
                continue
            sizes = ", ".join(f"{c:.3g}" for c in shown.window.coefficients[:6])
            fault = StepFault(
                "clipped",
                "the gradient of each micro-batch was clipped or normalised before it was added up:"
                f" they weigh {sizes}",
                causes=("in-audit",),
            )
            found.append(self.violation(fault, shown.window, shown.optimizer))
        return found

    def _weigh(self) -> None:
        clipped = self._clipped()
        now = len(self.shown), len(clipped)
        # `violations` is asked for after each step where the audit stops at the first one
        if not self.judges_weights or self._weighed_at == now:
            return
        self._weighed_at = now
        by_optimizer: defaultdict[int, list[Shown]] = defaultdict(list)
        lost = {id(shown) for shown in self.lost}
        for shown in self.shown:
            # where one micro-batch alone was clipped, its window does not show it by itself
            is_clipped = shown.optimizer.index in clipped and is_uneven(shown.window)
            if id(shown) not in lost and not is_clipped:
                by_optimizer[shown.optimizer.index].append(shown)
        self._weighed.clear()
        for index, several in by_optimizer.items():
            optimizer = several[0].optimizer
            windows = [shown.window for shown in several]
            held = self.held.get(index, [])
            if self.holds_back(optimizer):
                windows = [one for one in held if one is not None]
            pending = [pending_of(window, index) for window in windows]
            self._weighed[index] = self._of_weights(optimizer, windows, pending)

    def _of_weights(
        self,
        optimizer: Optimizer,
        windows: Sequence[StepGradients],
        pending: Sequence[WindowReadings],
    ) -> WeightVerdict:
        lengths = Counter(window.length for window in windows)
        typical = self.given or next((length for length, _ in lengths.most_common(1)), None)
        ranks = max(map(devices_of, windows), default=1)
        steps_each = self.given is not None and self.given > 1 and set(lengths) == {1}
        if steps_each and len(windows) >= FEWEST_STEPS and windows[0].step.is_scaled:
            fault = StepFault(
                "step-per-micro-batch",
                f"the optimizer steps after every micro-batch, where accumulation_steps = {self.given}",
                kind="step-count",
            )
            violation = self.violation(fault, windows[0], optimizer)
            return WeightVerdict([violation], steps={window.step.number for window in windows})
        weighed = judge_weights(
            pending,
            typical,
            self.given,
            ranks,
            lambda key: None,
        )
        self._note_shares(windows, pending, weighed)
        self._leave_out_unread(pending, weighed)
        causes = _causes_of_steps(windows)
        for found in (weighed.violations, weighed.provisional):
            found[:] = [
                _with_cause(one, causes[one.step]) if one.step in causes else one for one in found
            ]
        return weighed

    def _leave_out_unread(self, pending: Sequence[WindowReadings], weighed: WeightVerdict) -> None:
        """Take out steps on one pass of several devices whose loss cannot be read.

        That of one pass alone has no weights to compare; devices have.
        """
        for one in pending:
            records = [
                one.window.passes[index].records[device] for device, index in one.coefficients
            ]
            opaque = list[Unknown]()
            for record in records:
                place = str(record.place)
                opaque += [Unknown("weights", place, t.opaque) for t in record.terms if t.opaque]
            if opaque and len(records) > one.length == 1:
                weighed.steps.discard(one.window.number)
                weighed.unknown[opaque[0]] += 1

    def _note_shares(
        self,
        windows: Sequence[StepGradients],
        pending: Sequence[WindowReadings],
        weighed: WeightVerdict,
    ) -> None:
        """Note steps on one micro-batch with a share of its mean, as of a window of several."""
        for window, one in zip(windows, pending, strict=True):
            # without a known learning rate, a share of the loss cannot be told from it
            if window.length > 1 or not window.step.is_scaled:
                continue
            read: list[ComparedObjective] = []
            for objectives in one.readings[0].values():
                read += objectives.get("each", ())
            divisors = [_divisor_of_share(found) for found in read]
            if not read or not all(divisors):
                continue  # where one term is whole, the share of another is a coefficient
            said = (
                f"every step is on 1/{min(divisors)} of its loss and one micro-batch: a"
                " coefficient, or an optimizer that steps once per micro-batch"
            )
            remedy = "state `--accumulation-steps`"
            share = finding("step-per-micro-batch", said, read[0].line, remedy)
            weighed.notes[share] += 1

    def holds_back(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer often gives updates of 0 for gradients that are not."""
        return bool(optimizer.steps) and optimizer.held.times > 0.5 * optimizer.steps


def _step_order(violation: Violation) -> float:
    return float("inf") if violation.step is None else violation.step


def _divisor_of_share(objective: ComparedObjective) -> int:
    """Return N where an objective is 1/N of what may be counted; 0 where it is no such share."""
    if objective.status != "equal" or objective.right():
        return 0
    shares = objective.coefficients.values()
    # 1/2 is the largest share there is; what is no share of a whole number is a coefficient
    divisors = [round(1 / c) for c in shares if 0 < c < 0.6 and abs(1 / c - round(1 / c)) < 1e-3]
    return min(divisors, default=0)


def _in_jax_words(violation: Violation) -> Violation:
    """Return a violation whose explanation speaks of JAX: devices, and remedies for it."""
    text = violation.explanation
    for name in names_of(violation.diagnosis):
        fault = FAULTS[name]
        for remedy in (fault.remedy, *fault.causes.values()):
            if remedy.jax:
                text = text.replace(remedy.torch, remedy.jax)
    sentence, fix, remedy_text = text.partition(FIX)
    # the rules are shared with torch, and speak of `.grad` and of ranks
    sentence = sentence.replace("`.grad`", "the gradient at the step").replace("rank", "device")
    return replace(violation, explanation=f"{sentence}{fix}{remedy_text}")


def _causes_of_steps(windows: Sequence[StepGradients]) -> dict[int, str]:
    """Return the number of each step whose gradient JAX has added up over devices -> how it did."""
    found: dict[int, str] = {}
    for window in windows:
        marks = [column.mark for column in window.used]
        # a gradient that was reduced explains the scale, whatever its loss went through
        if any(mark.reduced for mark in marks):
            found[window.step.number] = "summed-by-jax"
        elif any(mark.adds_up_loss for mark in marks):
            found.setdefault(window.step.number, "summed-loss")
    return found


def _with_cause(violation: Violation, cause: str) -> Violation:
    """Return a wrong scale with the remedy of a cause that lies in how JAX adds up over devices."""
    if violation.diagnosis != "wrong-scale":
        return violation
    sentence = violation.explanation.partition(FIX)[0]
    return replace(
        violation,
        explanation=f"{sentence}{FIX}{remedy_of('wrong-scale', [cause], jax=True)}",
    )
