"""From the micro-batches that steps held to the name of the fault: one list of predicates, the
surest first.

A predicate must hold in the run under the loop's own plan and in the one under the plan that
separates faults which look alike, and one of the two must tell: have windows enough that nothing
further down the list looks the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, repeat, zip_longest

import numpy as np
import torch

from gradcheck_suite.core.case import Plan, Reduction, is_probe, slopes_of
from gradcheck_suite.core.comparison import Vector
from gradcheck_suite.core.results import ENDLESS
from gradcheck_suite.core.text import counted
from gradcheck_suite.judge.probe import (
    WeightProbe,
    expected_gradients,
    gradients_of_steps,
    held_by,
    probes_of,
    ranges_text,
    separating_probe,
)
from gradcheck_suite.judge.reruns import NOT_REPEATABLE, SKIPPED, LoopRunner, run_with_finite_losses
from gradcheck_suite.judge.weights import Diagnosis
from gradcheck_suite.run.instance import Instance
from gradcheck_suite.run.runner import Outcome

Held = list[frozenset[int]]
"""For each step the indices of what its gradient holds: micro-batches, or turns."""
SHOWN = 8
"""Number of steps whose micro-batches are printed."""


@dataclass(frozen=True)
class HeldSteps:
    """What the steps of one run on a weight probe held.

    Attributes:
        plan: the plan of the run.
        held: the micro-batches of each step.
    """

    plan: Plan
    held: Held

    @property
    def windows(self) -> Held:
        """The micro-batches of each window of an epoch."""
        return [frozenset(window) for window in self.plan.windows]

    @property
    def right(self) -> Held:
        """The micro-batches that each step should hold."""
        return self.windows * self.plan.epochs

    @property
    def whole(self) -> Held:
        """The windows of an epoch that have `accumulation_steps` micro-batches of every rank."""
        return [
            w for w in self.windows if len(w) == self.plan.accumulation_steps * self.plan.world_size
        ]

    @property
    def tail(self) -> frozenset[int]:
        """The micro-batches of an epoch's short windows."""
        return frozenset().union(*(w for w in self.windows if w not in self.whole))

    @property
    def turns(self) -> Held:
        """The micro-batches of an epoch that are trained at the same time, one of each rank that
        has any left.
        """
        ranks = [self.plan.of_rank(rank) for rank in range(self.plan.world_size)]
        return [frozenset(j for j in turn if j is not None) for turn in zip_longest(*ranks)]

    @property
    def in_turns(self) -> Held:
        """The turns of an epoch that each step holds.

        None at all where a step has a part of one alone.
        """
        turn_of: dict[int, int] = {}
        for number, turn in enumerate(self.turns):
            turn_of |= dict.fromkeys(turn, number)
        steps = [frozenset(turn_of[j] for j in step) for step in self.held]
        # a step in turns holds the micro-batch of every rank for each turn that it holds
        whole = [frozenset().union(*(self.turns[number] for number in step)) for step in steps]
        exact = all(map(frozenset.issuperset, self.held, whole))
        return steps if exact else []


def held_steps(plan: Plan, steps: Iterable[Vector]) -> HeldSteps:
    """Return which micro-batches each step held, given the weight of each item, (total items,) for
    each step.
    """
    return HeldSteps(plan, [frozenset(held_by(plan, items)) for items in steps])


def held_text(run: HeldSteps) -> str:
    """Return what the steps held, in words; of many, those around the first that is wrong."""
    texts = [
        f"[{ranges_text(sorted(step))}]" if len(step) > SHOWN else str(sorted(step))
        for step in run.held
    ]
    texts = [text if step else "nothing" for text, step in zip(texts, run.held, strict=True)]
    # a run of more steps than are due is wrong from the first that nothing asks for
    due = chain(run.right, repeat(None))
    off = (at for at, pair in enumerate(zip(run.held, due, strict=False)) if pair[0] != pair[1])
    first = max(0, next(off, 0) - 1) if len(texts) > SHOWN else 0
    kept = texts[first : first + SHOWN]
    before = f", from step {first} on," if first else ""
    rest = len(texts) - first - len(kept)
    return (
        f"the steps held micro-batches{before}"
        f" {', '.join(kept)}{f' and {rest} more' if rest else ''}"
    )


# The predicates.


def _per_micro_batch(run: HeldSteps) -> bool:
    """Whether each step has the micro-batch whose turn it is, and perhaps what earlier ones left
    behind.
    """
    end = len(run.turns)
    steps = run.in_turns
    return len(steps) == end * run.plan.epochs and all(
        s % end in step for s, step in enumerate(steps)
    )


def _leaks(run: HeldSteps) -> bool:
    first = run.whole[:1]
    rest = run.whole[1:]
    # what the short window leaves behind is still there when the first window of the next epoch
    # begins
    leaking = [first[0] | run.tail, *rest] if first else []
    return run.held == run.whole + leaking * (run.plan.epochs - 1)


def _repeats(run: HeldSteps) -> bool:
    # a step right after a reset holds nothing, and repeats the one before it all the same
    distinct = [step for step, _ in groupby(filter(None, run.held))]
    return len(run.held) > len(run.right) and distinct == [step for step, _ in groupby(run.right)]


def _has_missing_steps(run: HeldSteps) -> bool:
    # `in` uses up the iterator as far as what it finds: steps are looked for in their order
    remaining = iter(run.right)
    return 0 < len(run.held) < len(run.right) and all(step in remaining for step in run.held)


def _cut_elsewhere(run: HeldSteps) -> bool:
    """Whether steps hold micro-batches in the loader's order, none twice.

    The micro-batches after an epoch's last step may be missing.
    """
    steps = run.in_turns
    end = len(run.turns)
    epochs = run.plan.epochs
    size = max(map(len, steps), default=0)
    due = 0
    passes = 1
    for step in steps:
        left = set(step)
        while left:
            if due not in left:
                # only the rest after an epoch's last whole window may be missing, which is shorter
                # than a window
                if not due or end - due >= size:
                    return False
                due = 0
                passes = passes + 1
                continue
            left.remove(due)
            due += 1
    # a loop that goes by the number of whole windows ends before as many micro-batches as these
    # have left over
    return (
        all(steps)
        and bool(steps)
        and passes <= epochs
        and end - due + end * (epochs - passes) < epochs * size
    )


def _is_whole(run: HeldSteps) -> bool:
    """Whether the steps together hold every micro-batch as often as there are epochs."""
    return sum(map(len, run.held)) == run.plan.epochs * len(run.plan.micro_batches)


def _cut_text(run: HeldSteps) -> str:
    k = run.plan.accumulation_steps
    end = len(run.turns)
    steps = run.in_turns
    (size, _), *_ = Counter(map(len, steps)).most_common(1)
    of = " of each rank" if run.plan.ranks else ""
    # `if i % k:` in place of `if i % k == 0:`
    if {max(step) for step in steps} == {i for i in range(end) if (i + 1) % k}:
        sentence = "it steps after the micro-batches that do not end a window"
    # a step with the last and the first micro-batch of an epoch, and not all between them
    elif size == k and any({0, end - 1} <= step and len(step) < end for step in steps):
        sentence = f"windows run on from one epoch into the next, {k} micro-batches{of} each"
        if (rest := run.plan.epochs * end - sum(map(len, steps))) >= k:
            sentence += f"; it ends before the last {rest} micro-batches"
    elif size != k:
        sentence = f"its windows have {size} micro-batches{of}, where accumulation_steps is {k}"
    else:
        sentence = (
            f"it steps at other places than after {k} micro-batches{of} and at the end of every"
            " epoch"
        )
    return sentence


def _repeated_text(run: HeldSteps) -> str:
    empty = sum(not step for step in run.held)
    if empty:
        return f"{empty} of its steps came right after a reset and held nothing"
    times = max(len(list(group)) for _, group in groupby(run.held))
    return f"it stepped up to {times} times on the gradient of one window"


def _stops_with_a_rank(run: HeldSteps) -> bool:
    ranks = {*run.plan.owners}
    busy = [w for w in run.windows if {run.plan.owners[j] for j in w} == ranks]
    return bool(run.plan.ranks) and run.held == busy * run.plan.epochs


def _dropped_text(run: HeldSteps) -> str:
    if _stops_with_a_rank(run):
        return "it stops as soon as one rank has no micro-batch left, while others have some"
    missing: list[int] = []
    end = len(run.right)
    for step in reversed(run.held):
        # as late as possible: what is missing is then the first
        at = max(i for i in range(end) if run.right[i] == step)
        missing[:0] = range(at + 1, end)
        end = at
    missing[:0] = range(end)
    named = ", ".join(
        "window {1} of epoch {0}".format(*divmod(i, len(run.windows))) for i in missing[:3]
    )
    return f"no step has the gradient of {named}{' and others' if len(missing) > 3 else ''}"


def _epochs_without_tail(run: HeldSteps) -> list[int]:
    """Return the epochs that lack the steps of their short windows; none where something else is
    wrong, too.
    """
    found: list[int] = []
    rest = run.held if run.tail else []
    for epoch in range(run.plan.epochs):
        if rest[: len(run.windows)] == run.windows:
            rest = rest[len(run.windows) :]
        elif rest[: len(run.whole)] == run.whole:
            found.append(epoch)
            rest = rest[len(run.whole) :]
        else:
            return []
    return [] if rest else found


def _dropped_tail_text(run: HeldSteps) -> str:
    epochs = _epochs_without_tail(run)
    some = f" in epoch {', '.join(map(str, epochs))} alone" if len(epochs) < run.plan.epochs else ""
    return f"{_tail_text(run)}{some}: its items contribute to no step"


def _tail_text(run: HeldSteps) -> str:
    if run.plan.ranks:
        k = run.plan.accumulation_steps
        return f"a window in which some rank has fewer than {k} micro-batches is never stepped"
    return f"the short last window (micro-batches {sorted(run.tail)}) is never stepped"


@dataclass(frozen=True)
class StepPredicate:
    """A fault as a statement about the steps of a run.

    Attributes:
        name: the name of the fault.
        holds: whether the steps are as the fault makes them.
        tells: whether they tell the fault from those that follow in the list.
        text: what the loop did.
        numbers: how many steps the fault may make, from a run without any; none where that says
            nothing.
        causes: causes of the fault for which the table of faults has remedies of their own.
    """

    name: str
    holds: Callable[[HeldSteps], bool]
    tells: Callable[[HeldSteps], bool]
    text: Callable[[HeldSteps], str]
    numbers: Callable[[HeldSteps], tuple[int, ...]] = lambda run: ()
    causes: Callable[[HeldSteps], tuple[str, ...]] = lambda run: ()


def _of_short(run: HeldSteps) -> tuple[int, ...]:
    return (len(run.whole) * run.plan.epochs,) if run.tail else ()


def _of_all_epochs(run: HeldSteps) -> tuple[int, ...]:
    """Return the steps of windows that run on from one epoch into the next, without and with the
    rest of the last.
    """
    whole, rest = divmod(len(run.turns) * run.plan.epochs, run.plan.accumulation_steps)
    return (whole, whole + bool(rest)) if run.tail else ()


PREDICATES = (
    StepPredicate(
        "never-stepped",
        lambda run: not run.held,
        lambda run: bool(run.whole),
        lambda run: "run.optimizer was never stepped",
        lambda run: (0,),
    ),
    StepPredicate(
        "wrong-step-count",
        lambda run: (
            bool(run.held) and run.held == run.windows * (len(run.held) // len(run.windows))
        ),
        lambda run: len(run.windows) > 1,
        lambda run: (
            f"it makes {len(run.held) // len(run.windows)} pass(es), run.epochs = {run.plan.epochs}"
        ),
    ),
    StepPredicate(
        "tail-dropped",
        lambda run: bool(_epochs_without_tail(run)),
        lambda run: bool(run.whole),
        _dropped_tail_text,
        _of_short,
    ),
    StepPredicate(
        "tail-leak",
        lambda run: bool(run.tail) and _leaks(run),
        lambda run: bool(run.whole) and run.plan.epochs > 1,
        lambda run: f"{_tail_text(run)}, and its gradient leaks into the next epoch's first window",
        _of_short,
    ),
    StepPredicate(
        "step-per-micro-batch",
        _per_micro_batch,
        lambda run: True,
        lambda run: "it stepped once per micro-batch",
        lambda run: (len(run.turns) * run.plan.epochs,),
    ),
    StepPredicate(
        "repeated-step",
        _repeats,
        lambda run: True,
        _repeated_text,
        causes=lambda run: ("held-nothing",) if not all(run.held) else (),
    ),
    StepPredicate(
        "dropped-window",
        _has_missing_steps,
        lambda run: True,
        _dropped_text,
        causes=lambda run: ("ranks",) if _stops_with_a_rank(run) else (),
    ),
    StepPredicate(
        "wrong-windows",
        _cut_elsewhere,
        lambda run: any(step not in run.windows for step in run.held),
        _cut_text,
        _of_all_epochs,
    ),
)


def named(runs: Sequence[HeldSteps], own: Plan, right: HeldSteps | None = None) -> Diagnosis | None:
    """Return the first fault that all runs show and one tells, None without one.

    Its sentence continues another one. A run under another plan is described where it alone shows
    the fault. `right` is a run with the right number of steps, which refutes a fault that makes
    another number there.
    """
    for fault in PREDICATES:
        if (
            right is not None
            and fault.numbers(right)
            and len(right.held) not in fault.numbers(right)
        ):
            continue
        telling = next((run for run in runs if fault.tells(run)), None)
        if telling is not None and all(map(fault.holds, runs)):
            sentence = [f": {fault.text(run)}" for run in runs if run.plan == own]
            if telling.plan != own:
                k = telling.plan.accumulation_steps
                windows = len(telling.windows)
                under = f"; under a plan of {windows} windows with accumulation_steps = {k}: "
                sentence.append(f"{under}{fault.text(telling)}")
            return Diagnosis(fault.name, "".join(sentence), causes=fault.causes(telling))
    return None


# Naming the fault of a loop that stepped too seldom or too often, by further runs of it.


def explain_steps(instance: Instance, outcome: Outcome, runner: LoopRunner) -> Diagnosis:
    """Name the fault of a loop that stepped too seldom or too often.

    `wrong-step-count` where no known one fits. Two runs are on weight probes, whose steps show
    which micro-batches each of them was about: one under the loop's own plan, one under the plan
    that separates faults which look alike. The others repeat the case.

    Args:
        instance: what the loop trained.
        outcome: what it did.
        runner: runs the loop again.
    """
    plan = instance.case.plan
    taken = len(outcome.observations)
    times = f"{taken} or more times" if outcome.endless else counted(taken, "time")
    asked = (
        f"the optimizer was called {times}, expected {plan.steps} "
        f"({counted(plan.epochs, 'epoch')} of {counted(len(plan.windows), 'window')})"
    )
    if outcome.endless:
        return Diagnosis("wrong-step-count", f"{asked}; {ENDLESS}")

    def is_same(rerun: Outcome) -> bool:
        return len(rerun.observations) == taken

    # once before the probes, which cost further runs, and again after them: a loop whose number of
    # steps changes from run to run has no pattern to name
    if not runner.repeats(instance, is_same, 1):
        return NOT_REPEATABLE
    found = _explained(instance, outcome, runner, asked)
    return found if runner.repeats(instance, is_same) else NOT_REPEATABLE


def step_pattern(plan: Plan, outcome: Outcome) -> Diagnosis:
    """Return what the number of steps alone suggests, without a sentence and without a further run
    of the loop.
    """
    if outcome.endless:
        return Diagnosis("wrong-step-count", ENDLESS)
    none = HeldSteps(plan, [])
    taken = len(outcome.observations)
    known = (fault.name for fault in PREDICATES if taken in fault.numbers(none))
    return Diagnosis(next(known, "wrong-step-count"), "")


def _explained(instance: Instance, outcome: Outcome, runner: LoopRunner, asked: str) -> Diagnosis:
    plan = instance.case.plan
    taken = len(outcome.observations)
    # a loop that skips steps by the values of losses is no loop that counts wrong
    finite = run_with_finite_losses(runner, instance)
    if finite is not None and len(finite.observations) == plan.steps:
        return replace(SKIPPED, sentence=f"{asked}: {SKIPPED.sentence}")
    dtype = instance.case.dtype if is_probe(instance.case) else "float64"
    reduction: Reduction = "sum" if instance.problem.reduction == "sum" else "mean"
    # every micro-batch has valid targets, so that one that is skipped for its counts is not missed
    probe = WeightProbe(plan.replace(masked=()), reduction, dtype=dtype)
    own = _run_on(probe, runner)
    if own is None:
        known = step_pattern(plan, outcome).name
        return Diagnosis(known, asked + (_never(outcome) if known == "never-stepped" else ""))
    if len(own.held) == plan.steps:
        if _drops_ignored(instance, taken, runner):
            return Diagnosis(
                "dropped-window", asked + NO_STEP_IF_IGNORED, causes=("ignored-targets",)
            )
        return _by_values(instance, outcome, asked)
    if len(own.held) != taken:
        # two numbers of steps from two runs may be chance: the probe is run twice before it is
        # believed
        if _run_on(probe, runner) not in (own, None):
            return NOT_REPEATABLE
        asked += f"; on the weight probe, under the same plan, it takes {len(own.held)}"
    found = _named_by_two(own, _run_on(separating_probe(probe, runner.assumes), runner))
    name = found.name
    sentence = found.sentence
    if name == "never-stepped":
        sentence = _never(outcome)
    if _may_skip(instance, outcome) and name in ("dropped-window", "never-stepped"):
        # torch.amp.GradScaler skips the step of a window whose gradients overflow, which looks the
        # same from outside
        name = f"{name} or skipped-by-size"
        sentence = f"{sentence}; or: steps are skipped because gradients overflow"
    details = f"; {held_text(own)}" if own.held and len(own.held) == taken else ""
    return Diagnosis(name, asked + sentence + details, causes=found.causes)


def _drops_ignored(instance: Instance, taken: int, runner: LoopRunner) -> bool:
    """Whether the loop takes as few steps on a probe where micro-batches have no valid targets."""
    *_, counting = probes_of(instance)
    if 0 not in counting.counts:
        return False
    # one run is made to tell whether they are the cause, whatever is left
    runner.runs_left = max(runner.runs_left, 1)
    seen = _run_on(counting, runner)
    return seen is not None and taken == len(seen.held) < instance.case.plan.steps


def _named_by_two(own: HeldSteps, separating: HeldSteps | None) -> Diagnosis:
    """Return the name of the steps under the loop's own plan and, if there is one, another plan."""
    runs = [own]
    right = None
    if separating is not None and len(separating.held) == separating.plan.steps:
        # a run with the right number of steps names nothing, and refutes names that would change it
        right = separating
    elif separating is not None:
        runs.append(separating)
    # a name of a small plan alone may be a coincidence, unless its steps hold everything
    tries = [runs, runs[-1:]]
    if _is_whole(own):
        tries.append([own])
    for some in tries:
        found = named(some, own.plan, right)
        if found is not None:
            return found
    return Diagnosis("wrong-step-count", "")


def _run_on(probe: WeightProbe, runner: LoopRunner) -> HeldSteps | None:
    run = probe.observed(runner)
    return None if run is None else held_steps(probe.plan, run.steps)


def _by_values(instance: Instance, outcome: Outcome, asked: str) -> Diagnosis:
    """Return the diagnosis of a loop that takes the right number of steps on the probe."""
    case = instance.case
    sentence = f"{asked}; on the weight probe, under the same plan, it takes the right number"
    if len(outcome.observations) >= case.plan.steps:
        return Diagnosis(
            "wrong-step-count",
            f"{sentence}, so the number depends on the values of gradients or losses",
        )
    if not is_probe(case) or {*slopes_of(case)} == {1.0}:
        return Diagnosis(
            "skipped-by-size", f"{sentence}, so it skips steps by the values of gradients or losses"
        )
    taken = held_steps(case.plan, gradients_of_steps(outcome)).held
    due = [*zip(held_steps(case.plan, ()).windows, expected_gradients(case), strict=True)]
    finite = [right for window, right in due if window not in taken and np.isfinite(right).all()]
    if not finite:
        return NO_STEP
    is_finite = [bool(np.isfinite(right).all()) for _, right in due]
    # `False` at the end: without an infinite gradient, the first one is behind the last window
    first = [*is_finite, False].index(False)
    if all((window in taken) == (i < first) for i, (window, _) in enumerate(due)):
        return NO_STEP_FROM_THERE
    norms = ", ".join(f"{np.linalg.norm(right):.3g}" for right in finite[:4])
    return Diagnosis(
        "skipped-by-size",
        f"the loop takes no step where the gradient's norm is {norms}, and takes one where it is"
        " about 1: the contract asks for one step per window",
    )


NO_STEP = Diagnosis(
    "skipped-non-finite",
    "the loop takes no step where a gradient is infinite or NaN, and the contract asks for one step"
    " per window",
)


NO_STEP_FROM_THERE = Diagnosis(
    "skipped-non-finite",
    "the loop takes no step where a gradient is infinite or NaN, nor in any window after it: it does"
    " not reset that gradient, and what is added to it stays infinite or NaN",
    causes=("not-reset",),
)


NO_STEP_IF_IGNORED = (
    "; on the weight probe, under the same plan, it takes the right number where every micro-batch"
    " has valid targets: a micro-batch without is skipped together with its step"
)


def _may_skip(instance: Instance, outcome: Outcome) -> bool:
    """Whether a GradScaler may have skipped steps on the probe, too: there are too few, and float16
    takes part.
    """
    too_few = len(outcome.observations) < instance.case.plan.steps
    return too_few and "float16" in (instance.case.dtype, outcome.compute)


def _never(outcome: Outcome) -> str:
    moved = any(
        not torch.equal(value, outcome.start[name]) for name, value in outcome.parameters.items()
    )
    return ": run.optimizer was never stepped" + (
        ", yet the parameters moved, so something else was" if moved else ""
    )
