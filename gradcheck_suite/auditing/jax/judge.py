"""Puts the windows of a run of JAX together from its events, and judges their sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gradcheck_suite.auditing.jax.losses import DIFFERENCE, ENTERED, IDENTITY, OWN
from gradcheck_suite.auditing.jax.marks import PassMark, UpdateMark
from gradcheck_suite.auditing.jax.passes import OpenPasses, Shapes
from gradcheck_suite.auditing.jax.replay import Event, MarkEvent, UnreadMarks
from gradcheck_suite.auditing.jax.verdicts import Shown, Verdicts
from gradcheck_suite.auditing.jax.windows import (
    Column,
    Optimizer,
    Stale,
    Step,
    StepGradients,
    Unfitted,
    explain,
    implicit_step,
    is_of_earlier_step,
    is_same_point,
    norms_alike,
)
from gradcheck_suite.auditing.places import Place
from gradcheck_suite.auditing.rules import StepFault
from gradcheck_suite.core.findings import finding

WRONG_RULE = 1e-2
"""By how much the gradient of a rule may differ from that of its function, relative to the larger."""


@dataclass(frozen=True, eq=False)
class Unsure:
    """An update in the direction of the gradient: a step, or a transformation such as clipping.

    What comes next tells: a gradient by the same parameters, or another update of the same shapes,
    shows that nothing has stepped.

    Attributes:
        optimizer: whose update it is.
        given: holds the gradient that it was given.
        event: the update.
        mark: of it.
    """

    optimizer: Optimizer
    given: MarkEvent
    event: MarkEvent
    mark: UpdateMark

    def keeps_direction(self) -> bool:
        """Return whether the update is along the gradient, and not against it."""
        gradient = np.asarray(self.given.values["gradient"]["sample"], float)
        update = np.asarray(self.event.values["update"]["sample"], float)
        return gradient.shape == update.shape and bool(np.vdot(gradient, update) > 0)


@dataclass(eq=False)
class JaxJudge:
    """Takes the events of a run of JAX, and judges its steps.

    Attributes:
        on_step: is called at each step.
        has_optimizer: whether the run has one that is seen.
        verdicts: takes what is found.
        judges_sums: whether sums are judged.
        steps: the number of steps so far.
        judged: the steps whose sums were.
        places: that were seen.
        generation: of what is known: grows where events were not seen.
        optimizers: owner and shapes -> the optimizer.
        implicit: shapes -> what steps where no optimizer is seen.
        passes: gradients that may still be part of a step.
    """

    on_step: Callable[[], None]
    has_optimizer: Callable[[], bool]
    verdicts: Verdicts
    judges_sums: bool = True
    steps: int = 0
    judged: set[int] = field(default_factory=set)
    places: set[Place] = field(default_factory=set)
    generation: int = 0
    optimizers: dict[tuple[int, Shapes], Optimizer] = field(default_factory=dict)
    implicit: dict[Shapes, Optimizer] = field(default_factory=dict)
    passes: OpenPasses = field(default_factory=OpenPasses)

    def __post_init__(self) -> None:
        self._inner: MarkEvent | None = None
        self._has_updates = False
        self._last_update: MarkEvent | None = None
        self._unsure: Unsure | None = None

    # Events.

    def take(self, events: Iterable[Event]) -> None:
        """Take what happened."""
        for event in events:
            # what follows a gap says nothing about the update before it
            if isinstance(event, UnreadMarks):
                self.settle_unsure()
                self.generation += 1
                self.passes.columns.clear()
                self.steps += event.steps
            elif isinstance(event.mark, PassMark):
                self._on_pass(event)
            elif event.mark.inside:
                self._inner = event
            else:
                self._on_update(event, event.mark)

    def _on_pass(self, event: MarkEvent) -> None:
        self._last_update = None
        found = self.passes.read(event)
        mark = found[0].mark
        self.places.add(mark.place)
        self.settle_unsure(now=found[0])
        if not self.has_optimizer():
            self._on_point(found[0])
        self.passes.add(found)
        self._judge_rules(found[0])
        if found[0].copies:
            said = "of the gradients of several copies, as of a `vmap`, those of the first one were read"
            self.verdicts.notes[finding("mapped-copies", said, mark.place)] += 1

    def _on_point(self, column: Column) -> None:
        """Take a change of the parameters for a step, where no optimizer is seen."""
        shapes = column.mark.shapes
        before = [one for one in self.passes.columns if one.mark.shapes == shapes]
        if not before or is_same_point(before[-1], column):
            return
        # the window is what was computed by the parameters that have just been left
        first = [one for one in before if is_same_point(one, before[-1])]
        # the change of the parameters is compared with gradients, which needs the same leaves in
        # both
        if len(first[0].parameters) != len(first[0].gradient):
            return
        # a negative index, by which these are found again should an optimizer be seen after all
        optimizer = self.implicit.setdefault(shapes, Optimizer(-1 - len(self.implicit)))
        step = implicit_step(self.steps, first[-1].mark.place, first, column)
        self._judge(optimizer, step, first)
        self.passes.remove(first)
        self.steps += 1
        self.on_step()

    def _on_update(self, event: MarkEvent, mark: UpdateMark) -> None:
        inner = self._inner
        self._inner = None
        if not self._has_updates:
            self._has_updates = True
            self._withdraw_implicit()
        self.places.add(mark.place)
        given = inner if inner is not None else event
        continues = self._continues(given)
        if self._unsure is not None:
            # a second update before any gradient, and not of what the first one returned: that one
            # was thrown away
            is_of_same = not continues and self._unsure.mark.shapes == mark.shapes
            self.settle_unsure(is_step=not is_of_same)
        self._last_update = event
        if continues:
            return
        optimizer = self._optimizer_of(mark)
        moved = bool(np.all(event.values["moved"]))
        if not moved:
            self._hold_back(
                optimizer,
                given,
                mark,
                is_inner=inner is not None,
            )
            return
        update = Unsure(
            optimizer,
            given,
            event,
            mark,
        )
        # a transformation such as clipping never turns against its gradient. What has done so once
        # is an optimizer, though momentum may carry a later update of it along the gradient
        optimizer.turns = optimizer.turns or not update.keeps_direction()
        if optimizer.turns:
            self._take_step(update)
        else:
            self._unsure = update

    def _hold_back(
        self, optimizer: Optimizer, given: MarkEvent, mark: UpdateMark, *, is_inner: bool
    ) -> None:
        """Take an update that was 0."""
        norms = np.asarray(given.values["gradient"]["norms"])
        # an update of 0 is right for a gradient of zeros, and for one that is not finite where
        # `optax.apply_if_finite` skips it
        if not np.isfinite(norms).all() or not norms.any():
            return
        optimizer.held.all_times += 1
        if not is_inner:  # `MultiSteps` is known to hold back
            optimizer.held.times += 1
            optimizer.held.columns += self.passes.own(mark.shapes)
            self.passes.drop(mark.shapes)

    def settle_unsure(self, now: Column | None = None, *, is_step: bool | None = None) -> None:
        """Tell whether the last update was a step, where it was not clear.

        Args:
            now: the next gradient: by the same parameters as the one before, nothing has stepped.
            is_step: whether it was one, where that is known.
        """
        update = self._unsure
        self._unsure = None
        if update is None:
            return
        if is_step is None:
            columns = self.passes.columns
            before = [one for one in columns if now and one.mark.place == now.mark.place]
            is_step = not (now and before and is_same_point(before[-1], now))
        if is_step:
            self._take_step(update)

    def _take_step(self, update: Unsure) -> None:
        self._step(update.optimizer, update.given, update.event, update.mark)
        self.steps += 1
        update.optimizer.steps += 1
        self.on_step()

    def _withdraw_implicit(self) -> None:
        """Forget steps that were taken from changes of parameters, since there is an optimizer."""
        self.implicit.clear()
        self.verdicts.shown = [one for one in self.verdicts.shown if one.optimizer.index >= 0]
        self.verdicts.lost.clear()

    def _continues(self, event: MarkEvent) -> bool:
        """Return whether an update is given what another one has returned: they are one step."""
        last = self._last_update
        if last is None or last.devices != event.devices:
            return False
        before = np.asarray(last.values["update"]["sample"], float)
        now = np.asarray(event.values["gradient"]["sample"], float)
        # each of the two is rounded by a program of its own
        same = before.shape == now.shape and np.allclose(
            before, now, rtol=1e-4, atol=1e-6 * np.abs(now).max(initial=0.0)
        )
        # zeros are equal whatever they came from
        return bool(same and now.any())

    def _optimizer_of(self, mark: UpdateMark) -> Optimizer:
        key = mark.owner, mark.shapes
        found = self.optimizers.get(key)
        if found is None:
            found = Optimizer(len(self.optimizers), mark=mark)
            found.generation = self.generation
            self.optimizers[key] = found
        return found

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
        # with several devices there is a row for each
        reached = norms.reshape(-1, number).max(0)
        optimizer.reached = reached if optimizer.reached is None else optimizer.reached + reached
        if optimizer.generation != self.generation:
            # what was added up before the gap is not known: this step ends that window
            optimizer.generation = self.generation
            self.passes.drop(mark.shapes)
            optimizer.before = []
            optimizer.last = None
            return
        columns = [
            one for one in self.passes.own(mark.shapes) if optimizer.index not in one.consumers
        ]
        if given.devices:
            if self._differs_over_devices(gradient, parameters, given, optimizer, columns):
                return
            if optimizer.is_apart:  # the first device's steps stand for those of each
                columns = [one for one in columns if all(m.device == 0 for m in one.members)]
            gradient = gradient[0]
            norms = norms[0]
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
            is_lost=mark.is_lost,
        )
        if optimizer.held.columns:
            self._hold(optimizer, step, columns, event)
        self._judge(optimizer, step, columns)
        if step.parameters is not None:
            first = optimizer.parameters[0] if optimizer.parameters else step.parameters
            optimizer.parameters = first, step.parameters
        optimizer.moved_after.append(self.passes.number)

    def _hold(
        self, optimizer: Optimizer, step: Step, columns: list[Column], event: MarkEvent
    ) -> None:
        """Keep what an update that comes after some that were 0 is a sum of."""
        update = np.asarray(event.values["update"]["sample"], np.float64)
        update = update[0] if event.devices else update
        # an update goes against what it was made of
        of_sum = replace(
            step,
            gradient=-update,
            is_scaled=False,
            parameters=None,
        )
        all_columns = [*optimizer.held.columns, *columns]
        # an optimizer without a past, so that nothing counts as left over from an earlier step
        found = explain(Optimizer(-1), of_sum, all_columns)
        alike = isinstance(found, StepGradients) and _are_alike(found)
        self.verdicts.held[optimizer.index].append(
            found if alike and isinstance(found, StepGradients) else None
        )
        optimizer.held.columns = []

    def _differs_over_devices(
        self,
        gradient: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
        parameters: np.ndarray[tuple[int, ...], np.dtype[np.float64]] | None,
        given: MarkEvent,
        optimizer: Optimizer,
        columns: Sequence[Column],
    ) -> bool:
        """Judge a gradient that is another one on each device; return whether that ends the matter.

        Copies under a named `vmap` that began alike may be an ensemble: that they are to train one
        model shows where they are alike again.
        """
        allowed = 1e-5 * np.abs(gradient).max(initial=0.0)
        # NaN on all devices is the same gradient on all of them
        if np.allclose(gradient, gradient[:1], rtol=1e-3, atol=allowed, equal_nan=True):
            return False
        alike = parameters is None or bool((parameters == parameters[:1]).all())
        mark = given.mark
        assert isinstance(mark, UpdateMark)
        if alike and (given.are_devices or optimizer.is_apart):
            window = StepGradients(
                self._step_of(mark, gradient[0]), list(columns), [1.0] * len(columns), 0.0
            )
            fault = StepFault(
                "not-reduced",
                "the gradient at the step differs between devices whose parameters are alike: it was"
                " not added up over them",
            )
            self.verdicts.violate(fault, window, optimizer)
            self.judged.add(self.steps)
        elif alike or optimizer.is_apart:
            self._note_apart(mark, optimizer)
            return False
        else:
            said = "each device has its own part of the parameters"
            self.verdicts.skip(mark.place, "sharded-parameters", said)
        self.passes.consume(optimizer.index, columns)
        return True

    def _note_apart(self, mark: UpdateMark, optimizer: Optimizer) -> None:
        if not optimizer.is_apart:
            said = (
                "copies that began alike step on gradients of their own; the first one was judged"
            )
            remedy = (
                "right for an ensemble; if they train one model, add gradients up over all copies with"
                " `psum`, or average them with `pmean`"
            )
            self.verdicts.notes[finding("ranks-train-apart", said, mark.place, remedy)] += 1
        optimizer.is_apart = True

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

    def _judge(self, optimizer: Optimizer, step: Step, columns: list[Column]) -> None:
        found = explain(optimizer, step, columns)
        place = columns[0].mark.place if columns else step.place
        last = optimizer.last
        if columns:
            # should the next step be on this same gradient, it is found as a column of its own
            optimizer.last = replace(
                columns[0],
                gradient=step.gradient,
                age=0,
                consumers=set(),
            )
        if isinstance(found, Unfitted):
            reason = found.reason
            if not columns and last is not None:
                reason = "no gradient was computed since the optimizer's last step"
            self.verdicts.skip(step.place, found.name, reason)
            self.passes.consume(optimizer.index, columns)
            optimizer.before = columns
            return
        if isinstance(found, Stale):
            window = StepGradients(
                step,
                columns,
                [1.0] * len(columns),
                0.0,
            )
            name = "stale-parameters" if found.is_all else "stale-window"
            still = "all of" if found.is_all else "still in"
            said = f"{found.what} {still} the gradient at this step"
            self._settle(optimizer, window, columns)
            self.verdicts.violate(StepFault(name, said), window, optimizer)
            return
        self._settle(optimizer, found, found.columns)
        fault = self._fault_of(found, optimizer)
        if fault is not None:
            self.verdicts.violate(fault, found, optimizer)
            return
        if found.added:
            said = (
                f"{found.added:.3g} times the parameters is in the gradient at the step, as of L2"
                " regularization"
            )
            self.verdicts.notes[finding("added-term", said, step.place, "")] += 1
        if any(column.number in self.passes.mixed for column in found.used):
            said = (
                "items depend on other rows of their micro-batch, as with batch normalization or"
                " negatives, so that the loss is no sum over items"
            )
            self.verdicts.notes[finding("dependent-items", said, place)] += 1
        shown = Shown(found, optimizer)
        if found.lost:
            self.verdicts.lost.append(shown)
        if self.judges_sums and norms_alike(found):
            self.verdicts.alike.append(shown)
        self.verdicts.shown.append(shown)

    def _settle(
        self, optimizer: Optimizer, window: StepGradients, columns: Sequence[Column]
    ) -> None:
        """Note what a step has used."""
        self.judged.add(window.step.number)
        used = window.used or list(columns)
        optimizer.sites |= {column.mark.place for column in used}
        optimizer.before = list(used)
        # a window that lacks passes does not say how long windows are
        if not window.lost:
            optimizer.lengths[window.length] += 1
        self.passes.settle(optimizer.index, window, used)

    def _fault_of(self, window: StepGradients, optimizer: Optimizer) -> StepFault | None:
        """Return what is wrong with the sum of a window, or None."""
        if not self.judges_sums:
            return None
        if not window.used:
            return StepFault("no-gradient", "nothing of the window is in the gradient at the step")
        first = window.used[0]
        # first: weights of gradients that were taken at different parameters say nothing
        if not all(is_same_point(first, column) for column in window.used):
            return StepFault(
                "stale-parameters",
                "the parameters change inside of the window, so that its gradients are by different"
                " ones",
            )
        if window.step.is_lost:
            return StepFault(
                "parameter-not-updated",
                "no result of the compiled function depends on the update, so that nothing is"
                " trained",
                kind="parameters",
                causes=("thrown-away",),
            )
        if is_of_earlier_step(window, optimizer):
            return StepFault(
                "stale-parameters",
                "the gradient is by parameters of an earlier step, and not by those that the optimizer"
                " has now",
            )
        return None

    def _judge_rules(self, column: Column) -> None:
        """Judge functions with a backward of their own, against JAX's gradient of their forward."""
        for rule, values in zip(column.mark.rules, column.rules, strict=True):
            row = np.atleast_2d(np.asarray(values, np.float64))
            own = row[:, OWN].max()
            entered = row[:, ENTERED].max()
            difference = row[:, DIFFERENCE].max()
            identity = row[:, IDENTITY].max()
            # `not >`, since NaN says that a rule was not called, or could not be checked
            if not difference > WRONG_RULE * max(own, entered):
                continue
            line = rule.line or str(column.mark.place)
            if entered == 0 or identity == 0:
                why = "where its forward has none" if entered == 0 else "that its forward has not"
                said = (
                    f"`{rule.name}` has a gradient {why}: right for a straight-through estimate or a"
                    " reversal"
                )
                self.verdicts.notes[finding("custom-gradient", said, line)] += 1
                continue
            fault = StepFault(
                "wrong-backward",
                f"the backward of `{rule.name}` differs from the gradient of its forward by"
                f" {difference / max(own, entered):.2g} of its size",
            )
            place = Place(line, (line,))
            step = Step(
                self.steps,
                place,
                (),
                (),
                np.zeros(0),
                np.zeros(0),
                None,
                "float32",
            )
            window = StepGradients(
                step,
                [column],
                [1.0],
                0.0,
            )
            violation = self.verdicts.violation(fault, window, Optimizer(0))
            self.verdicts.found.append(replace(violation, where=line, stepped=None))


def _are_alike(window: StepGradients) -> bool:
    found = np.array(window.coefficients)
    return bool(found.all() and np.ptp(found) <= 1e-3 * np.abs(found).max())
