"""Names what is wrong with the steps of a run of JAX, by the names and the judge of the audit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gradcheck_suite.auditing.jax.losses import DIFFERENCE, ENTERED, IDENTITY, OWN
from gradcheck_suite.auditing.jax.mapping import devices_of, pending_of, step_window
from gradcheck_suite.auditing.jax.marks import PassMark, UpdateMark
from gradcheck_suite.auditing.jax.replay import Cut, Event, MarkEvent
from gradcheck_suite.auditing.jax.windows import (
    MOST_AGE,
    MOST_OPEN,
    Column,
    Optimizer,
    Stale,
    Step,
    Unfitted,
    Window,
    clipped_norm,
    columns_of,
    explain,
    implicit_step,
    is_of_earlier_step,
    is_same_point,
    mixes,
    select,
)
from gradcheck_suite.auditing.places import Place
from gradcheck_suite.auditing.sums import StepFault
from gradcheck_suite.auditing.weighing import Pending, Weighed, judge_weights, violation_of
from gradcheck_suite.core.faults import FAULTS, FIX, names_of, remedy_of
from gradcheck_suite.core.findings import Found, finding
from gradcheck_suite.core.results import Unknown, Violation
from gradcheck_suite.core.text import counted

BOTH = "sums and weights"
MIXED = 1e-3
"""By how much an item may change with another row of its batch, relative to the largest one."""
WRONG_RULE = 1e-2
"""By how much the gradient of a rule may differ from that of its function, relative to the larger."""
FEWEST_STEPS = 3
"""Steps after which parameters that are still the same are not updated."""
MOST_NAMES = 3


@dataclass(frozen=True, eq=False)
class Shown:
    """A window and the optimizer whose step it is.

    Attributes:
        window: the window.
        optimizer: its state.
    """

    window: Window
    optimizer: Optimizer


@dataclass(eq=False)
class Points:
    """The parameters that gradients of one place were taken by.

    Attributes:
        first: the first gradient.
        last: the last one.
        is_moving: whether some parameters were others than the first.
    """

    first: Column
    is_moving: bool = False

    def __post_init__(self) -> None:
        self.last = self.first


@dataclass(eq=False)
class JaxJudge:
    """Takes the events of a run of JAX, and judges its steps.

    Attributes:
        on_step: is called at each step.
        has_optimizer: whether the run has one that is seen.
        given: the accumulation steps that the user states.
        judges_sums: whether sums are judged.
        judges_weights: whether weights are.
        notes: what is worth knowing -> how often.
        unknown: what could not be judged -> in how many steps.
        steps: the number of steps so far.
        judged: the steps whose sums were.
        files: places that were seen.
    """

    on_step: Callable[[], None]
    has_optimizer: Callable[[], bool]
    given: int | None = None
    judges_sums: bool = True
    judges_weights: bool = True
    notes: Counter[Found] = field(default_factory=Counter)
    unknown: Counter[Unknown] = field(default_factory=Counter)
    steps: int = 0
    judged: set[int] = field(default_factory=set)
    places: set[Place] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._number = 0
        self._generation = 0
        self._columns: list[Column] = []
        self._mixed: set[int] = set()
        self._inner: MarkEvent | None = None
        self._by_owner: dict[tuple[int, tuple[tuple[int, ...], ...]], Optimizer] = {}
        self._shown: list[Shown] = []
        self._held: defaultdict[int, list[Window | None]] = defaultdict(list)
        self._found: list[Violation] = []
        self._lost: list[Shown] = []
        self._has_updates = False
        self._last_update: MarkEvent | None = None
        self._implicit: dict[tuple[tuple[int, ...], ...], Optimizer] = {}
        self._points: dict[tuple[Place, tuple[tuple[int, ...], ...]], Points] = {}
        self._weighed: dict[int, Weighed] = {}
        self._weighed_at = -1

    # Events.

    def take(self, events: Iterable[Event]) -> None:
        """Take what happened."""
        for event in events:
            if isinstance(event, Cut):
                self._generation += 1
                self._columns.clear()
                self.steps += event.steps
            elif isinstance(event.mark, PassMark):
                self._on_pass(event)
            elif event.mark.inside:
                self._inner = event
            else:
                self._on_update(event, event.mark)

    def _on_pass(self, event: MarkEvent) -> None:
        self._number += 1
        self._last_update = None
        found = columns_of(event, self._number)
        mark = found[0].mark
        self.places.add(mark.place)
        if not self.has_optimizer():
            self._on_point(found[0])
        self._columns = [*self._columns, *found][-MOST_OPEN:]
        points = self._points.setdefault((mark.place, mark.shapes), Points(found[0]))
        if mixes(found[0], points.last) > MIXED:
            self._mixed.add(self._number)
        points.last = found[0]
        points.is_moving = points.is_moving or not is_same_point(points.first, found[0])
        self._judge_rules(found[0])
        if found[0].copies:
            said = "of the gradients under a `vmap`, those of the first copy were judged"
            self.notes[finding("mapped-copies", said, mark.place)] += 1

    def _on_point(self, column: Column) -> None:
        """Take a change of the parameters for a step, where no optimizer is seen."""
        shapes = column.mark.shapes
        before = [one for one in self._columns if one.mark.shapes == shapes]
        if not before or is_same_point(before[-1], column):
            return
        first = [one for one in before if is_same_point(one, before[-1])]
        if len(first[0].parameters) != len(first[0].gradient):
            return
        optimizer = self._implicit.setdefault(shapes, Optimizer(-1 - len(self._implicit)))
        step = implicit_step(self.steps, first[-1].mark.place, first, column)
        self._judge(optimizer, step, first)
        self._columns = [one for one in self._columns if one not in first]
        self.steps += 1
        self.on_step()

    def _on_update(self, event: MarkEvent, mark: UpdateMark) -> None:
        inner, self._inner = self._inner, None
        if not self._has_updates:
            self._has_updates = True
            self._withdraw_implicit()
        self.places.add(mark.place)
        given = inner if inner is not None else event
        if self._continues(given):
            self._last_update = event
            return
        self._last_update = event
        optimizer = self._optimizer_of(mark)
        moved = bool(np.all(event.values["moved"]))
        if not moved:
            norms = np.asarray(given.values["gradient"]["norms"])
            if inner is None and np.isfinite(norms).all() and norms.any():
                optimizer.times_withheld += 1
                optimizer.withheld += self._own_columns(mark.shapes)
                self._columns = [one for one in self._columns if select(one, mark.shapes) is None]
            return
        self._step(optimizer, given, event, mark)
        self.steps += 1
        optimizer.steps += 1
        self.on_step()

    def _withdraw_implicit(self) -> None:
        """Forget steps that were taken from changes of parameters, since there is an optimizer."""
        self._implicit.clear()
        self._shown = [one for one in self._shown if one.optimizer.index >= 0]
        self._lost.clear()

    def _continues(self, event: MarkEvent) -> bool:
        """Return whether an update is given what another one has returned: they are one step."""
        last = self._last_update
        if last is None or last.devices != event.devices:
            return False
        before = np.asarray(last.values["update"]["sample"], float)
        now = np.asarray(event.values["gradient"]["sample"], float)
        same = before.shape == now.shape and np.allclose(
            before, now, rtol=1e-4, atol=1e-6 * np.abs(now).max(initial=0.0)
        )
        return bool(same and now.any())

    def _optimizer_of(self, mark: UpdateMark) -> Optimizer:
        key = mark.owner, mark.shapes
        found = self._by_owner.get(key)
        if found is None:
            found = Optimizer(len(self._by_owner), names=mark.names, mark=mark)
            found.generation = self._generation
            self._by_owner[key] = found
        return found

    def _own_columns(self, shapes: Sequence[tuple[int, ...]]) -> list[Column]:
        parts = (select(one, shapes) for one in self._columns)
        return [one for one in parts if one is not None]

    # A step.

    def _step(
        self, optimizer: Optimizer, given: MarkEvent, event: MarkEvent, mark: UpdateMark
    ) -> None:
        values = given.values
        gradient = np.asarray(values["gradient"]["sample"], np.float64)
        norms = np.asarray(values["gradient"]["norms"], np.float64)
        parameters = values.get("parameters", {}).get("sample")
        optimizer.place = mark.place
        number = len(mark.shapes)
        reached = norms.reshape(-1, number).max(0)
        optimizer.reached = reached if optimizer.reached is None else optimizer.reached + reached
        if optimizer.generation != self._generation:
            # what was added up before the gap is not known: this step ends that window
            optimizer.generation = self._generation
            self._columns = [one for one in self._columns if select(one, mark.shapes) is None]
            optimizer.before = []
            optimizer.last = None
            return
        columns = [
            one for one in self._own_columns(mark.shapes) if optimizer.index not in one.consumers
        ]
        if given.devices:
            if self._differs_over_devices(gradient, parameters, mark, optimizer, columns):
                return
            gradient, norms = gradient[0], norms[0]
            parameters = None if parameters is None else parameters[0]
        step = Step(
            number=self.steps,
            place=mark.place,
            shapes=mark.shapes,
            names=mark.names,
            gradient=gradient,
            norms=norms,
            parameters=None if parameters is None else np.asarray(parameters, np.float64),
            dtype=mark.dtype,
        )
        if optimizer.withheld:
            self._hold(optimizer, step, columns, event)
        self._judge(optimizer, step, columns)
        if step.parameters is not None:
            first = optimizer.parameters[0] if optimizer.parameters else step.parameters
            optimizer.parameters = first, step.parameters
        optimizer.moved_after.append(self._number)

    def _hold(
        self, optimizer: Optimizer, step: Step, columns: list[Column], event: MarkEvent
    ) -> None:
        """Keep what an update that comes after some that were 0 is a sum of."""
        update = np.asarray(event.values["update"]["sample"], np.float64)
        update = update[0] if event.devices else update
        of_sum = replace(step, gradient=-update, is_scaled=False, parameters=None)
        all_columns = [*optimizer.withheld, *columns]
        found = explain(Optimizer(-1), of_sum, all_columns)
        alike = isinstance(found, Window) and _are_alike(found)
        self._held[optimizer.index].append(found if alike and isinstance(found, Window) else None)
        optimizer.withheld = []

    def _differs_over_devices(
        self,
        gradient: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
        parameters: np.ndarray[tuple[int, ...], np.dtype[np.float64]] | None,
        mark: UpdateMark,
        optimizer: Optimizer,
        columns: Sequence[Column],
    ) -> bool:
        """Judge a gradient that is another one on each device; return whether it is."""
        allowed = 1e-5 * np.abs(gradient).max(initial=0.0)
        if np.allclose(gradient, gradient[:1], rtol=1e-3, atol=allowed, equal_nan=True):
            return False
        alike = parameters is None or bool((parameters == parameters[:1]).all())
        if alike:
            window = Window(
                self._step_of(mark, gradient[0]), list(columns), [1.0] * len(columns), 0.0
            )
            fault = StepFault(
                "not-reduced",
                "the gradient at the step differs between devices whose parameters are alike: it was"
                " not added up over them",
            )
            self._violate(fault, window, optimizer)
            self.judged.add(self.steps)
        else:
            said = "each device has its own part of the parameters"
            self._skip(mark.place, "sharded-parameters", said)
        self._consume(optimizer, columns)
        return True

    def _step_of(
        self, mark: UpdateMark, gradient: np.ndarray[tuple[int, ...], np.dtype[np.float64]]
    ) -> Step:
        return Step(
            self.steps,
            mark.place,
            mark.shapes,
            mark.names,
            gradient,
            np.zeros(0),
            None,
            mark.dtype,
        )

    def _consume(self, optimizer: Optimizer, columns: Iterable[Column]) -> None:
        numbers = {column.number for column in columns}
        for column in self._columns:
            if column.number in numbers:
                column.consumers.add(optimizer.index)

    def _judge(self, optimizer: Optimizer, step: Step, columns: list[Column]) -> None:
        found = explain(optimizer, step, columns)
        place = columns[0].mark.place if columns else step.place
        last = optimizer.last
        if columns:
            optimizer.last = replace(columns[0], gradient=step.gradient, age=0, consumers=set())
        if isinstance(found, Unfitted):
            reason = found.reason
            if not columns and last is not None:
                reason = "no gradient was computed since the optimizer's last step"
            self._skip(step.place, found.name, reason)
            self._consume(optimizer, columns)
            optimizer.before = columns
            return
        if isinstance(found, Stale):
            window = Window(step, columns, [1.0] * len(columns), 0.0)
            name = "stale-parameters" if found.is_all else "stale-window"
            still = "all of" if found.is_all else "still in"
            said = f"{found.what} {still} the gradient at this step"
            self._settle(optimizer, window, columns)
            self._violate(StepFault(name, said), window, optimizer)
            return
        self._settle(optimizer, found, found.columns)
        fault = self._fault_of(found, optimizer)
        if fault is not None:
            self._violate(fault, found, optimizer)
            return
        if found.added:
            said = (
                f"{found.added:.3g} times the parameters is in the gradient at the step, as of L2"
                " regularization"
            )
            self.notes[finding("added-term", said, step.place, "")] += 1
        if any(column.number in self._mixed for column in found.used):
            said = (
                "items depend on other rows of their micro-batch, as with batch normalization or"
                " negatives, so that the loss is no sum over items"
            )
            self.notes[finding("dependent-items", said, place)] += 1
        shown = Shown(found, optimizer)
        if found.lost:
            self._lost.append(shown)
        self._shown.append(shown)

    def _settle(self, optimizer: Optimizer, window: Window, columns: Sequence[Column]) -> None:
        """Note which gradients a step has used, and keep those that may be of another one."""
        self.judged.add(window.step.number)
        used = window.used or list(columns)
        numbers = {column.number for column in (*used, *window.lost)}
        optimizer.sites |= {column.mark.place for column in used}
        optimizer.before = list(used)
        if not window.lost:
            optimizer.lengths[window.length] += 1
        kept = []
        for column in self._columns:
            if select(column, window.step.shapes) is None:
                kept.append(column)
                continue
            if column.number in numbers:
                column.consumers.add(optimizer.index)
            column.age += 1
            whole = column.mark.shapes == tuple(window.step.shapes)
            if column.age < MOST_AGE and not (whole and column.consumers):
                kept.append(column)
        self._columns = kept

    def _fault_of(self, window: Window, optimizer: Optimizer) -> StepFault | None:
        """Return what is wrong with the sum of a window, or None."""
        if not self.judges_sums:
            return None
        if not window.used:
            return StepFault("no-gradient", "nothing of the window is in the gradient at the step")
        first = window.used[0]
        if not all(is_same_point(first, column) for column in window.used):
            return StepFault(
                "stale-parameters",
                "the parameters change inside of the window, so that its gradients are by different"
                " ones",
            )
        if is_of_earlier_step(window, optimizer):
            return StepFault(
                "stale-parameters",
                "the gradient is by parameters of an earlier step, and not by those that the optimizer"
                " has now",
            )
        if clipped_norm(window):
            sizes = ", ".join(f"{c:.3g}" for c in window.coefficients[:6])
            return StepFault(
                "clipped",
                "the gradient of each micro-batch was clipped or normalised before it was added up:"
                f" they weigh {sizes}",
                causes=("in-audit",),
            )
        return None

    def _judge_rules(self, column: Column) -> None:
        """Judge functions with a backward of their own, against JAX's gradient of their forward."""
        for rule, values in zip(column.mark.rules, column.rules, strict=True):
            row = np.atleast_2d(np.asarray(values, np.float64))
            own, entered = row[:, OWN].max(), row[:, ENTERED].max()
            difference, identity = row[:, DIFFERENCE].max(), row[:, IDENTITY].max()
            if not difference > WRONG_RULE * max(own, entered):
                continue
            line = rule.line or str(column.mark.place)
            if entered == 0 or identity == 0:
                why = "where its forward has none" if entered == 0 else "that its forward has not"
                said = (
                    f"`{rule.name}` has a gradient {why}: right for a straight-through estimate or a"
                    " reversal"
                )
                self.notes[finding("custom-gradient", said, line)] += 1
                continue
            fault = StepFault(
                "wrong-backward",
                f"the backward of `{rule.name}` gives a gradient that differs from that of its forward"
                f" by {difference / max(own, entered):.2g} of its size",
            )
            place = Place(line, (line,))
            step = Step(self.steps, place, (), (), np.zeros(0), np.zeros(0), None, "float32")
            window = Window(step, [column], [1.0], 0.0)
            violation = self._violation(fault, window, Optimizer(0))
            self._found.append(replace(violation, where=line, stepped=None))

    def _skip(self, place: Place, name: str, reason: str) -> None:
        self.unknown[Unknown(BOTH, str(place), reason, name=name)] += 1

    def _violation(self, fault: StepFault, window: Window, optimizer: Optimizer) -> Violation:
        found = step_window(window, optimizer.index, window.columns)
        place = window.columns[-1].mark.place if window.columns else window.step.place
        violation = violation_of(fault, found, place)
        where = str(place)
        return _in_jax_words(replace(violation, where=where))

    def _violate(self, fault: StepFault, window: Window, optimizer: Optimizer) -> None:
        self._found.append(self._violation(fault, window, optimizer))

    # What the run shows.

    def violations(self) -> list[Violation]:
        """Return the violations so far, one for each diagnosis and place."""
        self._weigh()
        found = [*self._found, *self._of_lost()]
        for weighed in self._weighed.values():
            found += [_in_jax_words(one) for one in (*weighed.violations, *weighed.provisional)]
        several: defaultdict[tuple[str, str | None], list[Violation]] = defaultdict(list)
        for one in found:
            several[one.diagnosis, one.where].append(one)
        united = []
        for ones in several.values():
            first = min(ones, key=_order)
            united.append(replace(first, occurrences=len({one.step for one in ones})))
        return sorted(united, key=_order)

    @property
    def violated(self) -> set[int]:
        """The steps that are violated."""
        found = [*self._found, *self._of_lost()]
        for weighed in self._weighed.values():
            found += [*weighed.violations, *weighed.provisional]
        return {one.step for one in found if one.step is not None}

    @property
    def weighed(self) -> set[int]:
        """The steps whose weights were judged."""
        return set().union(*(weighed.steps for weighed in self._weighed.values()))

    def all_notes(self) -> Counter[Found]:
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
        for shown in self._lost:
            window, optimizer = shown.window, shown.optimizer
            usual = optimizer.lengths.most_common(1)
            if usual and usual[0][0] == window.length:
                continue  # other windows are as long, and lack nothing: it was discarded
            last = min(column.number for column in window.used)
            is_reset = all(column.number < last for column in window.lost)
            lost = counted(len({column.number for column in window.lost}), "gradient")
            fault = StepFault(
                "reset-inside-window" if is_reset else "dropped-micro-batch",
                f"{lost} of the window, by the same parameters and at the same line, are not in the"
                " gradient at the step",
            )
            found.append(self._violation(fault, window, optimizer))
        return found

    def _weigh(self) -> None:
        if not self.judges_weights or self._weighed_at == len(self._shown):
            return
        self._weighed_at = len(self._shown)
        by_optimizer: defaultdict[int, list[Shown]] = defaultdict(list)
        lost = {id(shown) for shown in self._lost}
        for shown in self._shown:
            if id(shown) not in lost:
                by_optimizer[shown.optimizer.index].append(shown)
        self._weighed.clear()
        for index, several in by_optimizer.items():
            optimizer = several[0].optimizer
            windows = [shown.window for shown in several]
            held = self._held.get(index, [])
            if self._holds_back(optimizer):
                windows = [one for one in held if one is not None]
            pending = [pending_of(window, index) for window in windows]
            self._weighed[index] = self._of_weights(optimizer, windows, pending)

    def _of_weights(
        self, optimizer: Optimizer, windows: Sequence[Window], pending: Sequence[Pending]
    ) -> Weighed:
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
            violation = self._violation(fault, windows[0], optimizer)
            return Weighed([violation], steps={window.step.number for window in windows})
        weighed = judge_weights(pending, typical, self.given, ranks, lambda key: None)
        self._note_shares(windows, pending, weighed)
        self._leave_out_unread(pending, weighed)
        reduced = {
            window.step.number
            for window in windows
            if any(column.mark.reduced for column in window.used)
        }
        for found in (weighed.violations, weighed.provisional):
            found[:] = [_summed_by_jax(one) if one.step in reduced else one for one in found]
        return weighed

    def _leave_out_unread(self, pending: Sequence[Pending], weighed: Weighed) -> None:
        """Take out steps on one pass of several devices whose loss cannot be read.

        That of one pass alone has no weights to compare; devices have.
        """
        for one in pending:
            records = [
                one.window.passes[index].records[device] for device, index in one.coefficients
            ]
            opaque = [
                Unknown("weights", str(record.place), term.opaque)
                for record in records
                for term in record.terms
                if term.opaque
            ]
            if opaque and len(records) > one.length == 1:
                weighed.steps.discard(one.window.number)
                weighed.unknown[opaque[0]] += 1

    def _note_shares(
        self, windows: Sequence[Window], pending: Sequence[Pending], weighed: Weighed
    ) -> None:
        """Note steps on one micro-batch with a share of its mean, as of a window of several."""
        for window, one in zip(windows, pending, strict=True):
            if window.length > 1 or not window.step.is_scaled:
                continue
            for objectives in one.readings[0].values():
                for found in objectives.get("each", ()):
                    shares = found.coefficients.values()
                    divisors = {round(1 / c) for c in shares if 0 < c < 0.6 and _is_share(c)}
                    if found.status == "equal" and not found.right() and divisors:
                        said = (
                            f"every step is on 1/{min(divisors)} of its loss and one micro-batch: a"
                            " coefficient, or an optimizer that steps once per micro-batch"
                        )
                        remedy = "state `--accumulation-steps`"
                        one_share = finding("step-per-micro-batch", said, found.line, remedy)
                        weighed.notes[one_share] += 1

    def _holds_back(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer often gives updates of 0 for gradients that are not."""
        return bool(optimizer.steps) and optimizer.times_withheld > 0.5 * optimizer.steps

    def end(self, *, complete: bool) -> None:
        """Judge what only the end of a run shows.

        Args:
            complete: whether the run ended by itself, and was watched to its end.
        """
        for optimizer in self._by_owner.values():
            self._judge_held(optimizer)
            self._note_never(optimizer)
            if complete:
                self._judge_tail(optimizer)
        for optimizer in self._implicit.values():
            if optimizer.lengths:
                said = (
                    "no optimizer of optax was seen: a change of the parameters is taken for a step,"
                    " up to the learning rate"
                )
                self.notes[finding("changed-parameters", said)] += 1
        self._judge_points()

    def _judge_held(self, optimizer: Optimizer) -> None:
        mark = optimizer.mark
        if mark is None or not optimizer.times_withheld:
            return
        if not optimizer.steps:
            said = f"the optimizer gave updates of 0 in all of its {optimizer.times_withheld} calls"
            self.notes[finding("no-update", said, mark.place)] += 1
        elif self._holds_back(optimizer) and None in self._held.get(optimizer.index, []):
            calls = optimizer.times_withheld + optimizer.steps
            fault = StepFault(
                "step-per-micro-batch",
                f"the optimizer's state moves at each of {calls} gradients, and its updates are held"
                f" back in {optimizer.times_withheld} of them: accumulate gradients, not updates, as"
                " `optax.MultiSteps` does",
                kind="step-count",
            )
            of_optimizer = [one.window for one in self._shown if one.optimizer is optimizer]
            if of_optimizer:
                self._violate(fault, of_optimizer[0], optimizer)

    def _note_never(self, optimizer: Optimizer) -> None:
        if optimizer.reached is None or not optimizer.lengths:
            return
        never = np.flatnonzero(optimizer.reached == 0)
        if not len(never) or len(never) == len(optimizer.reached):
            return
        names = ", ".join(optimizer.names[i] or f"leaf {i}" for i in never[:MOST_NAMES])
        more = f" and {len(never) - MOST_NAMES} more" if len(never) > MOST_NAMES else ""
        said = (
            f"{len(never)} of {len(optimizer.reached)} leaves get a gradient of zeros in every step"
            f" ({names}{more})"
        )
        remedy = "look for a `stop_gradient`, or leave them out of the optimizer"
        self.notes[finding("no-gradient", said, optimizer.place, remedy)] += 1

    def _judge_tail(self, optimizer: Optimizer) -> None:
        usual = optimizer.lengths.most_common(1)
        mark = optimizer.mark
        if not usual or mark is None or optimizer.generation != self._generation:
            return
        parts = [
            one
            for one in self._own_columns(mark.shapes)
            if optimizer.index not in one.consumers and one.mark.place in optimizer.sites
        ]
        last = max((one.number for one in optimizer.before), default=0)
        left = [one for one in parts if one.number > last]
        number = len({one.number for one in left})
        if 0 < number < usual[0][0]:
            fault = StepFault(
                "tail-dropped",
                f"the last {counted(number, 'micro-batch')} went backward and never reached a step",
                kind="step-count",
                causes=("in-audit",),
            )
            step = Step(
                self.steps, mark.place, mark.shapes, (), np.zeros(0), np.zeros(0), None, mark.dtype
            )
            violation = self._violation(
                fault, Window(step, left, [1.0] * len(left), 0.0), optimizer
            )
            self._found.append(
                replace(violation, window=None, found_after=None, step=None, stepped=None)
            )

    def _judge_points(self) -> None:
        """Judge parameters that stay the same while an optimizer steps on their gradients."""
        stale = {one.where for one in self._found if one.diagnosis == "stale-parameters"}
        for points in self._points.values():
            first, mark = points.first, points.first.mark
            steps = [
                after
                for optimizer in self._by_owner.values()
                if mark.place in optimizer.sites
                for after in optimizer.moved_after
                if first.number <= after < points.last.number
            ]
            if len(steps) < FEWEST_STEPS or points.is_moving or str(mark.place) in stale:
                continue
            step = Step(0, mark.place, (), (), np.zeros(0), np.zeros(0), None, mark.dtype)
            fault = StepFault(
                "parameter-not-updated",
                f"the gradients are by the same parameters after {counted(len(steps), 'step')}: the"
                " updates, or what they were added to, are thrown away",
                kind="parameters",
                causes=("thrown-away",),
            )
            violation = self._violation(fault, Window(step, [first], [1.0], 0.0), Optimizer(0))
            self._found.append(replace(violation, stepped=None))


def _order(violation: Violation) -> float:
    return float("inf") if violation.step is None else violation.step


def _are_alike(window: Window) -> bool:
    found = np.array(window.coefficients)
    return bool(found.all() and np.ptp(found) <= 1e-3 * np.abs(found).max())


def _is_share(c: float) -> bool:
    return abs(1 / c - round(1 / c)) < 1e-3


def _in_jax_words(violation: Violation) -> Violation:
    """Return a violation whose explanation speaks of JAX: devices, and remedies for it."""
    text = violation.explanation
    for name in names_of(violation.diagnosis):
        fault = FAULTS[name]
        for remedy in (fault.remedy, *fault.causes.values()):
            if remedy.jax:
                text = text.replace(remedy.torch, remedy.jax)
    sentence, fix, remedy_text = text.partition(FIX)
    sentence = sentence.replace("`.grad`", "the gradient at the step").replace("rank", "device")
    return replace(violation, explanation=f"{sentence}{fix}{remedy_text}")


def _summed_by_jax(violation: Violation) -> Violation:
    """Return a wrong scale with its remedy where `shard_map` has added gradients up by itself."""
    if violation.diagnosis != "wrong-scale":
        return violation
    sentence = violation.explanation.partition(FIX)[0]
    return replace(
        violation,
        explanation=f"{sentence}{FIX}{remedy_of('wrong-scale', ['summed-by-jax'], jax=True)}",
    )
