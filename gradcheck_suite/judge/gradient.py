"""The name of the fault of a wrong gradient, on a weight probe and on any other case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import numpy as np

from gradcheck_suite.core.case import PARAMETER, SMALL_SCALE, Case, probe_case, slopes_of
from gradcheck_suite.core.comparison import UNIT_ROUNDOFF, Comparison, Vector, within
from gradcheck_suite.core.faults import is_of_weights
from gradcheck_suite.core.text import error_text
from gradcheck_suite.judge.elements import (
    combined_elements,
    diagnose_elements,
    projection,
    shift_of,
    where_wrong,
    wrong_and_right,
    wrong_reduction,
)
from gradcheck_suite.judge.fitted_weights import is_explained, of_one_sign, stolen_buffer
from gradcheck_suite.judge.naming import diagnose, names_nothing
from gradcheck_suite.judge.probe import (
    ProbeRun,
    WeightProbe,
    expected_gradients,
    gradients_of_steps,
    item_weights,
    probe_of,
    probes_of,
    separating_probe,
)
from gradcheck_suite.judge.reruns import (
    SKIPPED,
    Evidence,
    LoopRunner,
    RecordedLosses,
    explain_foreign,
    explain_inputs,
    gradient_of_step,
    run_recorded,
    run_with_finite_losses,
)
from gradcheck_suite.judge.sizes import (
    LOUDER,
    Sizes,
    diagnose_non_finite,
    diagnose_sizes,
    is_linear,
    size_text,
)
from gradcheck_suite.judge.steps import held_steps, named
from gradcheck_suite.judge.weights import (
    WHILE_RIGHT,
    Diagnosis,
    Weights,
    any_of,
    missing_gradient,
    not_linear,
    poisoned_by,
)
from gradcheck_suite.reference.large_batch import REFERENCES
from gradcheck_suite.run.instance import Instance, generated_instance

# Naming the fault that a loop shows on a weight probe, by at most four further runs of the loop.
#
# The observed gradient is the weight of each item times the slope of its loss. Where slopes differ
# from 1, a run with all slopes 1 tells faults of the weights from faults that depend on the size of
# the gradient.


SIZE_DEPENDENT = (
    "a loss 2**-20 times as large does not give a gradient 2**-20 times as large: something"
    " depends on"
)

OF_OTHER_WINDOWS = frozenset(("stale-window", "other-window"))
"""Names that fit a number which is added to every element, too: on the probe, other windows' items have that weight."""


@dataclass(frozen=True)
class StepReading:
    """The weights of a step on a probe.

    Attributes:
        run: the run on which they were read.
        step: index of the step, whose weights are wrong and finite.
    """

    run: ProbeRun
    step: int

    @property
    def probe(self) -> WeightProbe:
        """The probe."""
        return self.run.probe

    @property
    def items(self) -> Vector:
        """(P,): the weight of each item."""
        return self.run.steps[self.step]

    @property
    def window(self) -> int:
        """The index of the window in its epoch."""
        return self.step % len(self.probe.plan.windows)

    @cached_property
    def weights(self) -> Weights | None:
        """The weights of the micro-batches; None where items of one have several."""
        return self.run.weights(self.step)

    @cached_property
    def others(self) -> list[Weights]:
        """The weights of the run's other steps."""
        return self.run.others(self.step)

    def with_table(self, found: Diagnosis) -> Diagnosis:
        """Return a diagnosis with the weights that it rests on."""
        if self.weights is None:
            return found
        return replace(found, weights=item_weights(self.probe, self.weights.observed, self.window))


@dataclass(frozen=True)
class Separation:
    """What two probes say of a step's weights.

    Attributes:
        named: what the first one says; None where there are no weights of micro-batches.
        found: the fault that explains both, or None.
        elsewhere: the weights of the second one, where it took all its steps.
    """

    named: Diagnosis | None = None
    found: Diagnosis | None = None
    elsewhere: list[Weights] = field(default_factory=list)

    @property
    def is_known(self) -> bool:
        """Whether the first probe shows a fault that is no factor."""
        named = self.named
        return named is not None and not names_nothing(named) and "wrong-scale" not in named.names


def explain_weights(run: ProbeRun, step: int, runner: LoopRunner) -> Diagnosis:
    """Name the fault of the weights of a step, by at most two further runs of the loop.

    Where a name of other windows explains them, the second one tells whether the gradient grows
    with the loss.

    Args:
        run: the run on which the weights were read.
        step: index of the step, whose weights are wrong and finite.
        runner: runs the loop again.
    """
    read = StepReading(run, step)
    # before anything else, and without a run: no weights of micro-batches subtract a mean
    projected = _lost_part(read.probe, read.items, read.window)
    # zeros are what is left of equal weights without their mean, and a missing gradient, too
    if projected and (read.items.any() or read.weights is None):
        return projected
    separation = _separated(runner, read)
    if found := _without_a_small_loss(read, separation, projected, runner):
        return found
    # 2**-20 is a power of two: a loop that is linear gives each bit of the gradient again, and one
    # that clips, decays or adds noise does not
    recorded, outcome = run_recorded(runner, read.probe.instance(scale=SMALL_SCALE))
    if outcome is None or step >= len(outcome.observations):
        return separation.found or not_linear(
            "on the weight probe the items' weights are wrong, and the loop stops if the loss is"
            " small"
        )
    small_step = gradients_of_steps(outcome)[step]
    if not is_linear(read.items, small_step, read.probe.tolerance):
        return _of_sizes(read, separation, recorded, small_step)
    if separation.found:
        return read.with_table(separation.found)
    if found := explain_inputs(recorded, small_step, step):
        return found
    return _of_factors(read, separation, runner)


def _without_a_small_loss(
    read: StepReading, separation: Separation, projected: Diagnosis | None, runner: LoopRunner
) -> Diagnosis | None:
    """Return the diagnosis that two probes give, or None where a run with a small loss must tell."""
    if separation.named is None:
        return None
    separated = separation.found
    if separated and separated.names & OF_OTHER_WINDOWS:
        # the small loss tells other windows from a number that is added, by a fourth run if need be
        runner.runs_left = max(runner.runs_left, 1)
    elif separated:
        return read.with_table(separated)
    if projected and not separated:
        # items that weigh the same leave nothing of a gradient without its mean, and other items
        # something
        return any_of([separation.named, projected])
    if separation.is_known and not runner.runs_left:
        return read.with_table(separation.named)
    return None


def _of_sizes(
    read: StepReading, separation: Separation, recorded: RecordedLosses, small_step: Vector
) -> Diagnosis:
    """Name the fault of weights that do not grow with the loss."""
    probe = read.probe
    right = probe.right_weights(read.window)
    values = _parameters_of(probe)
    found = diagnose_sizes(
        Sizes(
            right,
            read.items,
            small_step,
            parameters=values,
            tolerance=probe.tolerance,
        )
    )
    if found is None or found.name == "added-term":
        # a power of the loss adds a term as well
        by_loss = _by_loss(probe, recorded, read.step, read.items, small_step)
        found = by_loss or found or separation.found
    return found or not_linear(
        f"{SIZE_DEPENDENT} the gradient's size (clipping, normalizing) or on chance (noise)"
    )


def _of_factors(read: StepReading, separation: Separation, runner: LoopRunner) -> Diagnosis:
    """Name the fault of a gradient that is proportional to the loss, and of the right inputs.

    An unexplained factor is a `wrong-scale` all the same.
    """
    named = separation.named
    if read.weights is None or named is None:
        found = _means_of_parts(read.run, runner)
        found = found or _shifted_items(read.probe, read.items, read.window)
        return found or Diagnosis("unequal-items", read.run.unequal_text(read.step))
    # all steps of both runs together refute what one of them shows by chance
    both = diagnose(read.weights, [*read.others, *separation.elsewhere])
    if names_nothing(both) and not separation.elsewhere:
        alone = diagnose(read.weights) if names_nothing(named) else named
        return read.with_table(alone)
    # a name of the first run alone is refuted by the other one
    return read.with_table(both)


MOST_PARTS = 8
"""Largest number of devices, or of other parts of a window, that is tried as an explanation."""
CLOSE = 1e-4
"""Share up to which weights agree that rounding in float32 has touched."""


def _means_of_parts(run: ProbeRun, runner: LoopRunner) -> Diagnosis | None:
    """Return the diagnosis of windows that are cut into parts, such as devices, whose means have
    one weight, or None.

    The parts are seen by the weights of their items alone, so one number of parts has to explain
    the windows of another probe too. A part may have no item.
    """
    if run.probe.reduction != "mean" or run.probe.count is not None:
        return None
    parts = _numbers_of_parts(run)
    if parts:
        separating = separating_probe(run.probe, runner.assumes).observed(runner)
        # a second plan, since some number of parts fits one plan by chance
        parts = parts & _numbers_of_parts(separating) if separating else set()
    if not parts:
        return None
    return Diagnosis(
        "mean-of-means",
        f"a window's items are in {min(parts)} parts, which cut through micro-batches as devices"
        " do, and the mean of each part has one weight, whatever it counts",
    )


def _numbers_of_parts(run: ProbeRun) -> set[int]:
    """Return the numbers of parts, D, with which an item of a part of m items weighs 1 / (D * m) in
    every window.
    """
    found: set[int] = set()
    for number in range(2, MOST_PARTS + 1):
        unequal = False
        for step, items in enumerate(run.steps):
            right = run.probe.right_weights(step % len(run.probe.plan.windows))
            values, times = np.unique(np.round(number * items[right != 0], 6), return_counts=True)
            if items[right == 0].any() or (values <= 0).any():
                break
            # an item of a part of m weighs 1 / (D * m): m items have that weight, or a multiple of
            # m where parts are alike
            sizes = np.maximum(np.round(1 / values), 1)
            # a window whose parts are all equal is right, and shows no number of them
            equal = (
                len(values) == 1
                and np.isclose(items[right != 0], right[right != 0], rtol=CLOSE).all()
            )
            if not equal and (
                not np.isclose(sizes * values, 1, rtol=CLOSE).all() or (times % sizes).any()
            ):
                break
            unequal |= len(values) > 1
        else:
            found |= {number} if unequal else set()
    return found


def _by_loss(
    probe: WeightProbe, recorded: RecordedLosses, step: int, items: Vector, small_step: Vector
) -> Diagnosis | None:
    """Return the diagnosis of weights that the losses' values decide, or None.

    What backward hands to the losses is then all that is wrong: nothing is done to the gradient
    after it.
    """
    of_ranks = recorded.members(step)
    sent = recorded.sent(step)
    # calls and micro-batches are matched by their order, which needs as many of one as of the other
    if [*map(len, sent)] != [*map(len, of_ranks)]:
        return None
    members = list(chain.from_iterable(of_ranks))
    calls = list(chain.from_iterable(sent))
    handed = np.zeros(len(small_step))
    plain = small_step / SMALL_SCALE
    right = probe.right_weights(step % len(probe.plan.windows))
    changes, wrong = (
        ~np.isclose(items, other, rtol=max(probe.tolerance, 1e-9), atol=0)
        for other in (plain, right)
    )
    if not changes[wrong].all():
        return None  # something else makes a weight wrong that is the same with a small loss
    for j, call in zip(members, calls, strict=True):
        assert call.cotangent is not None
        share = probe.counts[j] if probe.reduction == "mean" else 1.0
        if not share:
            continue  # without valid targets, nothing is handed to its items
        handed[probe.plan.items(j).start : probe.plan.items(j).stop] = (
            SMALL_SCALE * float(call.cotangent) / share
        )
    if not np.allclose(handed, small_step, rtol=1e-9, atol=0):
        return None
    starts = [probe.plan.items(j).start for j in members]
    place = int(np.argmax(changes[starts]))
    which = "first" if not place else f"micro-batch {members[place]}"
    item = starts[place]
    return Diagnosis(
        "weighted-by-loss",
        f"a micro-batch's weight depends on the value of its loss: that of the window's {which} is "
        f"{items[item]:.6g}, and {plain[item]:.6g} with a loss 2**-20 times as large",
    )


def _lost_part(probe: WeightProbe, items: Vector, window: int) -> Diagnosis | None:
    """Return the diagnosis of a window's right gradient without one of its parts, or None."""
    right = probe.right_weights(window)
    what = projection(
        right, items, probe.tolerance * float(np.abs(right).max()), _parameters_of(probe)
    )
    return (
        Diagnosis("projected-gradient", f"{what} has been subtracted from the gradient")
        if what
        else None
    )


def _shifted_items(probe: WeightProbe, items: Vector, window: int) -> Diagnosis | None:
    """Return the diagnosis of a gradient whose elements stand at other items' places, or None."""
    right = probe.right_weights(window)
    shift = shift_of(right, items, probe.tolerance * float(np.abs(right).max()))
    if shift is None:
        return None
    return Diagnosis(
        "misplaced-gradient",
        f"the elements of the gradient are shifted by {abs(shift)}: a flat buffer is taken apart at"
        " other places than it is filled",
    )


def _parameters_of(probe: WeightProbe) -> Vector:
    model = generated_instance(probe_case(probe.plan, probe.reduction, dtype=probe.dtype)).model()
    values: Vector = model.get_parameter(PARAMETER).detach().double().numpy()
    return values


def _separated(runner: LoopRunner, read: StepReading) -> Separation:
    """Return the fault that explains a run and one on the separating probe, with a small loss.

    The second run is made where one is left beside that with a small loss, or where it is all that
    can tell: it shows either what separates known faults, or what the gradient's size does, which
    may be a factor.
    """
    if read.weights is None:
        return Separation()
    first = Separation(diagnose(read.weights, read.others))
    if not first.is_known and runner.runs_left <= 1:
        return first
    separating = separating_probe(read.probe, runner.assumes)
    # with a small loss, one run tells both: what separates known faults, and what the gradient's
    # size does
    second = separating.observed(runner, scale=SMALL_SCALE)
    if second is None or not np.isfinite(second.steps).all():
        return first
    miscounted = len(second.steps) != separating.plan.steps
    other = _steps_of_whole_windows(second) if miscounted else second.all_weights
    found = None
    if not all(w.is_right for w in other):
        found = diagnose(read.weights, [*read.others, *other], known_only=True)
    if found is not None and not names_nothing(found):
        return replace(first, found=found)
    if not miscounted:
        return replace(first, elsewhere=other)
    own = held_steps(read.probe.plan, read.run.steps)
    # steps that hold what they should have wrong weights for another reason
    return first if own.held == own.right else replace(first, found=_by_steps(second))


def _steps_of_whole_windows(run: ProbeRun) -> list[Weights]:
    """Return the weights of the first steps, as long as each holds all micro-batches of its window
    and no other.

    A loop that miscounts its steps only later, such as at a short last window, gives the weights of
    its other fault there.
    """
    found: list[Weights] = []
    for step in range(min(len(run.steps), len(run.probe.plan.windows))):
        weights = run.weights(step)
        # the first step that holds anything else is where the count of steps goes wrong
        if weights is None or tuple(np.flatnonzero(weights.observed)) != weights.window:
            break
        found.append(weights)
    return found


def _by_steps(run: ProbeRun) -> Diagnosis | None:
    """Return the fault of a loop that takes the right number of steps under one plan and a wrong
    one under another.
    """
    plan = run.probe.plan
    found = named([held_steps(plan, run.steps)], plan)
    # a loop that steps under one plan and never under another has a reason that no step shows
    if found is None or found.name == "never-stepped":
        return None
    sentence = (
        f"under another plan the loop takes {len(run.steps)} steps, not"
        f" {plan.steps}{found.sentence}"
    )
    return replace(found, sentence=sentence)


COARSE = ("bfloat16", "float16")
"""Dtypes too coarse to tell weights apart; a fault of the weights is read in float64."""


def explain_probe(e: Evidence, steps: Sequence[Vector]) -> Diagnosis:
    """Name the fault of a wrong gradient on a weight probe.

    Args:
        e: what is known of it.
        steps: the gradient of every step of the plan; the right one for a step that a gradient
            scaler skipped.
    """
    case = e.instance.case
    step = e.step
    runner = e.runner
    seen = steps[step]
    if case.spec is not None and "slopes" not in case.spec.loss.o:
        return _diagnosis_of_weights(case, steps, step, runner)
    # the same plan with all slopes 1: what is wrong there is wrong at any size
    plain = probe_of(case, case.dtype).observed(runner)
    expected = expected_gradients(case) * case.plan.epochs
    if plain is not None and step < len(plain.steps):
        if not _is_right(plain.steps[step], case, step):
            return _diagnosis_of_weights(case, plain.steps, step, runner)
        if step and np.isfinite(seen).all() and _is_right(expected[step], case, step):
            return _after_another(plain, seen, step, expected[step - 1])
    return _size_fault(e, expected, seen)


def _after_another(plain: ProbeRun, seen: Vector, step: int, before: Vector) -> Diagnosis:
    """Name the fault of an ordinary gradient that is right where the gradients before it are
    ordinary as well.

    Args:
        plain: the run with the same plan and all slopes 1.
        seen: the wrong gradient.
        step: the index of the step.
        before: the right gradient of the step before.
    """
    size = size_text(before[before != 0]) if np.isfinite(before).all() else "infinite or NaN"
    where = (
        f" (only after a window whose gradient is {size}: after one of ordinary size it is right)"
    )
    run = replace(plain, steps=[*plain.steps[:step], seen])
    weights = run.weights(step)
    if weights is None:
        return Diagnosis("unequal-items", run.unequal_text(step) + where)
    return diagnose(weights, plain.all_weights, where=where)


def _is_right(observed: Vector, case: Case, step: int) -> bool:
    right = probe_of(case, case.dtype).right_weights(step % len(case.plan.windows))
    unit = UNIT_ROUNDOFF[case.dtype]
    largest = np.abs(right).max(initial=0.0)
    # traces below the rounding of the weights show as themselves where gradients are tiny
    return np.allclose(
        observed,
        right,
        rtol=max(1e-9, 64 * unit),
        atol=unit * largest,
    )


def _diagnosis_of_weights(
    case: Case, steps: Sequence[Vector], step: int, runner: LoopRunner
) -> Diagnosis:
    """Name a fault of the weights, read in float64 where the case's dtype is coarse."""
    dtype = "float64" if case.dtype in COARSE else case.dtype
    probe = probe_of(case, dtype)
    run = ProbeRun(probe, list(steps), runner.alike)
    if dtype != case.dtype:
        finer = probe.observed(runner)
        right = probe.right_weights(step % len(case.plan.windows))
        if finer is None:
            return not_linear(
                f"the weights are wrong in {case.dtype}, and the loop raises in float64"
            )
        # right in float64: the fault is one of precision, or of a scaler that skips steps in
        # float16
        if step >= len(finer.steps) or np.allclose(finer.steps[step], right, rtol=1e-9):
            return Diagnosis(
                "low-precision",
                f"the items' weights are right in float64 and wrong in {case.dtype} by more than"
                " rounding explains",
            )
        run = finer
    if not np.isfinite(run.steps[step]).all():
        return not_linear(
            "on the weight probe, whose gradients are finite, the loop's gradient is NaN or"
            " infinite"
        )
    return explain_weights(run, step, runner)


def _size_fault(e: Evidence, expected: Sequence[Vector], seen: Vector) -> Diagnosis:
    """Name the fault of a gradient that is wrong because of its size, or because it is infinite or
    NaN.

    Args:
        e: what is known of it, on a probe with slopes.
        expected: the right gradient of every step.
        seen: the wrong one.
    """
    case = e.instance.case
    plan = e.instance.case.plan
    step = e.step
    window = e.window.index
    items = list(plan.window_items(window))
    right = expected[step]
    finite = np.isfinite(right)
    if not finite.all():
        members = map(plan.items, plan.windows[window])
        poisoned = [items for items in members if not finite[list(items)].all()]
        beside = [item for item in chain(*poisoned) if finite[item]]
        return diagnose_non_finite(right, seen, beside)
    # 0 times NaN is NaN: a reset by scaling does not clear it
    poison = [earlier for earlier in range(step) if not np.isfinite(expected[earlier]).all()]
    if poison and not np.isfinite(seen).all():
        return poisoned_by(poison[-1] % len(plan.windows))
    # one run is kept for a larger gradient
    if e.runner.runs_left > 1 and (found := e.of_inputs):
        return found

    def louder() -> Vector | None:
        steps = probe_of(case, case.dtype).run(e.runner, scale=LOUDER, slopes=slopes_of(case))
        gradients = gradients_of_steps(steps) if steps else []
        return gradients[step][items] if step < len(gradients) else None

    unit = 64 * UNIT_ROUNDOFF[case.dtype]
    sizes = Sizes(
        right[items],
        seen[items],
        louder=louder,
        tolerance=unit,
        dtype=case.dtype,
    )
    return diagnose_sizes(sizes) or not_linear(
        f"a gradient of {size_text(right[items])} comes out as one of {size_text(seen[items])},"
        " while one of about 1 is right: something depends on the gradient's size (clipping,"
        " normalizing, a coarser dtype)"
    )


# Naming a fault that depends on the model, from the violated case itself and not from a weight
# probe.


def explain_on_case(e: Evidence) -> Diagnosis | None:
    """Name a fault that depends on the model, from the case in float64 at parameters that stay
    where they are.
    """
    case = e.instance.case.replace(dtype="float64", optimizer=None)
    if case == e.instance.case:
        return _at_rest(e, "this very case")
    window = REFERENCES.get(case, e.instance.users_problem).window(e.window.index)
    recorded, outcome = run_recorded(e.runner, window.reference.instance)
    seen = None if outcome is None else gradient_of_step(outcome, window.reference, e.step)
    if seen is None:
        return None
    there = replace(
        e,
        comparison=window.compare(seen),
        window=window,
        known_calls=(recorded, seen),
    )
    # right in float64, and where parameters stay: what the case shows is precision, or what moved
    if there.comparison.ratio <= 1:
        if not e.window.moved or e.instance.case.dtype != "float64":
            return None
        return e.of_inputs
    place = (
        "the same case in float64"
        if e.instance.case.dtype != "float64"
        else "the same case at its start"
    )
    found = _at_rest(there, place)
    return found and replace(found, sentence=f"{found.sentence} (read off {place})")


def _at_rest(e: Evidence, place: str) -> Diagnosis | None:
    """Name a fault from evidence in float64 at parameters that stay where they are.

    `place` says of which case.
    """
    if not np.isfinite(e.comparison.observed).all():
        return None
    if found := e.of_inputs:
        return found
    found = e.of_weights
    # weights that the probe does not show fit a clipped gradient by chance: one run is made to
    # tell, whatever is left
    e.runner.runs_left = max(e.runner.runs_left, 1)
    if e.small is None:
        return None
    if is_linear(e.comparison.observed, e.small):
        return found
    # a loop that takes its losses from elsewhere than run.loss does not see that they were made
    # small
    if found is None or e.calls[0].called:
        found = diagnose_sizes(
            Sizes(
                e.comparison.expected,
                e.comparison.observed,
                e.small,
                parameters=e.parameters,
            )
        )
    sentence = (
        f"on {place}, {SIZE_DEPENDENT} the gradient's size (clipping, decay, normalizing) or on"
        " chance (noise)"
    )
    return found or not_linear(f"{sentence}; it is {e.place}")


# Naming the fault of a wrong gradient, from the evidence and up to three further runs of the loop,
# as a rule.


RIGHT_ON_PROBE = (
    "on the weight probe the items' weights are right, so the fault depends on the values of the"
    " gradient or of the batch, or on the model"
)
UNNAMED = ("not-linear", "unequal-items", "unrecognised-weights")
"""Diagnoses that say less than what the case itself may show."""
NOT_BY_VALUES = frozenset(
    (
        "no-gradient",
        "reset-inside-window",
        "first-only",
        "dropped-micro-batch",
        "repeated-micro-batch",
        "not-reduced",
    )
)
"""Diagnoses that the probe, where it is right, shows to depend on values or on the model."""
OF_ELEMENTS = frozenset(
    (
        "projected-gradient",
        "misplaced-gradient",
        "partial-gradient",
        "low-precision",
    )
)
"""Diagnoses of the case itself that no weights of micro-batches give."""


def explain_gradient(e: Evidence) -> Diagnosis:
    """Name the fault of a wrong gradient.

    `not-linear` where no weights of micro-batches explain it. The first run is on the weight probe,
    and a second one on the probe that separates faults which look alike. Where the weights are
    right, or the loop cannot run on the probe, the case itself is read, in float64: one run records
    what the losses are computed from, and one has a loss 2**-20 times as large. Runs that are left
    repeat the case, since a fault that not every run shows has no other name.
    """
    comparison = e.comparison
    window = e.window
    numbers = (_worst_element(comparison),)
    # what the gradient shows by itself comes first: a run may take minutes
    for without_a_run in (_poisoned, _of_whole_window, _diagnosis_of_ranks):
        if found := without_a_run(e):
            return replace(found, details=numbers)
    on_probe = _by_probes(e)
    if on_probe is None and _is_right_with_finite_losses(e):
        return replace(SKIPPED, details=numbers)
    diagnosis = on_probe or not_linear(f"{RIGHT_ON_PROBE}: it is {e.place}")
    if diagnosis.name in UNNAMED:
        diagnosis = _read_on_case(e, diagnosis)
        # what was read off the same case in float64 is chance where the case itself does not repeat
        e.runner.runs_left = max(e.runner.runs_left, 1)
    if on_probe is None and diagnosis.names & NOT_BY_VALUES:
        diagnosis = replace(diagnosis, sentence=f"{diagnosis.sentence}; but {RIGHT_ON_PROBE}")
    if on_probe is None:
        diagnosis = of_one_sign(diagnosis, window, comparison) or diagnosis
    if diagnosis.name in UNNAMED:
        diagnosis = combined_elements(window, comparison) or diagnosis
    if diagnosis.name == "stale-window" and not diagnosis.causes:
        diagnosis = explain_foreign(e, diagnosis)
    diagnosis = e.confirmed(diagnosis)
    return replace(diagnosis, details=numbers + diagnosis.details)


def _read_on_case(e: Evidence, diagnosis: Diagnosis) -> Diagnosis:
    """Return what the case itself shows where the probes name no fault, else their diagnosis."""
    # a stolen buffer changes gradients by the reset mode, and looks like wrong weights of single
    # parameters
    on_case = stolen_buffer(e.instance) or explain_on_case(e)
    if on_case is None:
        return diagnosis
    refuted = diagnosis.name == "unrecognised-weights" or diagnosis.refutes_weights
    # weights that no fault gives under two plans fit one on a small case by chance
    if refuted and is_of_weights(on_case.name):
        return diagnosis
    return replace(on_case, refutes_weights=diagnosis.refutes_weights)


def _worst_element(comparison: Comparison) -> str:
    worst = comparison.worst
    layout = comparison.layout
    name, where = layout.place(worst.index)
    expected, observed = (
        layout.part(vector, name)[where] for vector in (comparison.expected, comparison.observed)
    )
    # digits that rounding decides say nothing, unless the two numbers agree in all others
    digits = 6 if f"{expected:.6g}" != f"{observed:.6g}" else 17
    return (
        f"{worst.count} of {len(comparison.expected)} elements of the gradient differ; the worst is"
        f" {name}{list(where)}: expected {expected:.{digits}g}, observed {observed:.{digits}g}, off"
        f" by {error_text(worst.error, worst.allowed)}"
    )


def _poisoned(e: Evidence) -> Diagnosis | None:
    """Return the diagnosis of a NaN or infinity that an earlier window left behind, or None."""
    bad = ~np.isfinite(e.comparison.observed) & np.isfinite(e.comparison.expected)
    if not bad.any() or e.window.moved:
        return None
    earlier = range(len(e.instance.case.plan.windows)) if e.epoch else range(e.window.index)
    sources = (
        i for i in earlier if not np.isfinite(e.window.reference.window(i).expected[bad]).all()
    )
    source = next(sources, None)
    return None if source is None else poisoned_by(source)


def _diagnosis_of_ranks(e: Evidence) -> Diagnosis | None:
    """Return the diagnosis of a gradient that is another combination of the ranks' own than their
    sum, or None.
    """
    if not e.instance.case.plan.ranks:
        return None
    return wrong_reduction(
        e.window,
        e.comparison,
        e.runner.rank,
        alike=e.runner.alike,
    )


def _of_whole_window(e: Evidence) -> Diagnosis | None:
    """Name the fault of a wrong gradient where the objective is a function of the whole window.

    Return None where it is a sum over items.
    """
    if e.instance.problem.reduction != "batch":
        return None
    window = e.window
    comparison = e.comparison
    if len(window.members) > 1 and np.isfinite(comparison.observed).all():
        parts = window.contributions()
        plan = e.instance.case.plan
        counts = np.array([float(plan.micro_batches[j]) for j in window.members])
        for shares, how in (
            (np.ones(len(parts)), "the sum"),
            (np.ones(len(parts)) / len(parts), "the mean"),
            (counts / counts.sum(), "the mean, weighted by items,"),
        ):
            if (
                np.abs(shares @ np.stack(parts) - comparison.observed) <= 4 * comparison.allowed
            ).all():
                return Diagnosis(
                    "plain-accumulation",
                    f"the gradient is {how} of those of the micro-batches' own losses, and the"
                    " objective is a function of the whole window",
                )
    return diagnose_elements(comparison, {}) or not_linear(
        f"it is {e.place}; the objective is a function of the whole window, so weights of"
        " micro-batches cannot be read off it"
    )


def _by_probes(e: Evidence) -> Diagnosis | None:
    """Name the fault from the weights of a step on the probe; None where they are right.

    The probe in which micro-batches without valid targets have count 0 comes first: it shows every
    fault but those of such micro-batches' own weights. Where every item has the same count, the
    probe that counts items comes first: it shows every fault but those of counts that are not the
    number of items.
    """
    *probes, last = reversed(list(probes_of(e.instance)))
    for probe in probes:
        if found := _on_probe(e, probe, or_another=probe.count is None):
            return found
        # the second probe of items that all count the same, and not 1, is not one of the runs that
        # other cases have
        e.runner.runs_left += probe.count is None
    return _on_probe(e, last)


def _of_summed_losses(probe: WeightProbe, weights: Vector, instance: Instance) -> Vector:
    """Return the weights that a probe shows as weights of an instance, whose items may count more
    or less.
    """
    if probe.reduction == "sum":
        return weights
    plan = instance.case.plan
    batches = [instance.batch(plan.items(j)) for j in range(len(weights))]
    counts = [float(instance.count(batch)) for batch in batches]
    return weights * np.array(
        [seen / own if own else 1.0 for seen, own in zip(probe.counts, counts, strict=True)]
    )


def _on_probe(e: Evidence, probe: WeightProbe, *, or_another: bool = False) -> Diagnosis | None:
    """Return what the weights of a step on a probe show, or None where they are right.

    With `or_another`, return None also where they do not explain the gradient of the case: what is
    counted may differ.
    """
    runner = e.runner
    window = e.window
    comparison = e.comparison
    step = e.step
    run = probe.observed(runner)
    if run is None and e.instance.case.dtype == "float32":
        # a loop may run in its own precision alone
        runner.runs_left += 1
        probe = replace(probe, dtype="float32")
        run = probe.observed(runner)
    if run is None:
        return not_linear("the weight probe cannot be used: the loop raised on it")
    if step >= len(run.steps):
        return not_linear(
            f"the weight probe cannot be used: the loop took {len(run.steps)} step(s) on it"
        )
    items = run.steps[step]
    right = probe.right_weights(step % len(probe.plan.windows))
    if not np.isfinite(items).all():
        return not_linear(
            "on the weight probe, whose item gradients are all 1, the loop's gradient is NaN or"
            " infinite"
        )
    # relative to each weight: a small one is as wrong as a large one
    if np.allclose(items, right, rtol=probe.tolerance, atol=0):
        return None
    read = run.weights(step)
    # weights of the probe stand for the fault only where they give the case's own gradient
    weights = None if read is None else _of_summed_losses(probe, read.observed, e.instance)
    if weights is None or is_explained(window, comparison, weights):
        return explain_weights(run, step, runner)
    return None if or_another else _not_by_probe(e, run, weights)


def _not_by_probe(e: Evidence, run: ProbeRun, weights: Vector) -> Diagnosis:
    """Name the fault where the weights of a probe do not give the gradient of the case: chance,
    other inputs, or a second fault.

    Args:
        e: the evidence of the wrong gradient.
        run: the loop's run on the probe.
        weights: what the probe shows, as weights of the case's items.
    """
    window = e.window
    comparison = e.comparison
    if found := combined_elements(window, comparison) or e.of_inputs:
        return replace(found, refutes_weights=True)
    here = e.of_weights
    # a loop that takes its losses from elsewhere than run.loss has other ones on the probe
    if here is not None and (
        WHILE_RIGHT in here.sentence or here.names & OF_ELEMENTS or not e.calls[0].called
    ):
        return here
    found = explain_weights(run, e.step, e.runner)
    wrong, others = wrong_and_right(comparison)
    # the same weights, in some parameters alone: they are frozen, clipped or reset by group
    if others and is_explained(window, comparison, weights, only=wrong):
        return replace(found, sentence=f"{where_wrong(comparison)}{found.sentence}")
    if not is_of_weights(found.name):
        return found
    unnamed = not_linear(
        f"the weights that the weight probe shows, those of {found.name}, do not give the gradient"
        f" of this case: it depends on the model or on the values of the batch; it is {e.place}"
    )
    return replace(unnamed, refutes_weights=True)


def _is_right_with_finite_losses(e: Evidence) -> bool:
    """Return whether a step's gradient is right once losses that are not finite are made finite."""
    if wrong_and_right(e.comparison)[1]:
        return False  # a micro-batch that is left out is missing in every parameter
    outcome = run_with_finite_losses(e.runner, e.instance)
    rerun = None if outcome is None else gradient_of_step(outcome, e.window.reference, e.step)
    return rerun is not None and within(rerun, e.comparison.expected, e.comparison.allowed)


def explain_missing(parameter: str, e: Evidence) -> Diagnosis:
    """Name the fault of a parameter's gradient that is None at the step."""
    return SKIPPED if _is_right_with_finite_losses(e) else e.confirmed(missing_gradient(parameter))
