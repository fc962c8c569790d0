"""Which bugs are found, after how many cases, and by which rivals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from gradcheck_suite.core.case import Case, Input, Layer, Loss, Plan, ProblemSpec
from gradcheck_suite.core.contract import Loop, Problem, is_jax
from gradcheck_suite.core.faults import names_of
from gradcheck_suite.core.options import XLA, VerifyOptions
from gradcheck_suite.core.results import Result, Verdict, Violation
from gradcheck_suite.loops.reset_modes import plain
from gradcheck_suite.reference.large_batch import REFERENCES, CannotJudgeError, Reference
from gradcheck_suite.run.instance import Instance, instance_of
from gradcheck_suite.run.ranks import kept_ranks, run_ranks
from gradcheck_suite.run.runner import run_loop
from gradcheck_suite.verification.check import check
from gradcheck_suite.verification.verify import verify
from studies.tally import RIVALS, failed_rules
from studies.zoo.bug import Bug

# Fixed tests of the kind that trainers have: one model, one split, one comparison. The zoo counts
# which bugs they would have found, beside those that drawn cases find.


TOLERANCE = 1e-2
_MODEL = ProblemSpec(
    Input("vector", size=4),
    (Layer("linear", bias=True, features=1),),
    Loss("mse", reduction="mean"),
)


def _instance(plan: Plan, problem: Problem | None, optimizer: str | None = None) -> Instance:
    case = Case(_MODEL if problem is None else "problem", plan, optimizer=optimizer)
    return instance_of(case, problem)


def loss_after_a_step(loop: Loop, problem: Problem | None) -> bool:
    """Train one window of equal micro-batches with SGD.

    Compare the loss with that of one large batch.
    """
    outcome = []
    for subject, plan in ((loop, Plan((2, 2), 2)), (plain, Plan((4,), 1))):
        instance = _instance(plan, problem, "sgd")
        done = run_loop(subject, instance)
        if done.raised is not None or len(done.observations) != 1:
            return False
        model = instance.model()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(done.parameters.get(name, p))
            outcome.append(float(instance.problem.loss(model, instance.batch(range(4)))))
    accumulated, at_once = outcome
    return bool(np.isclose(accumulated, at_once, rtol=TOLERANCE, atol=TOLERANCE))


def gradients_agree(loop: Loop, problem: Problem | None, plan: Plan) -> bool:
    """Compare the gradient of every window with the large batch's."""
    reference = Reference(_instance(plan, problem))
    done = run_loop(loop, reference.instance)
    if done.raised is not None or len(done.observations) != plan.steps:
        return False
    pairs = (
        (reference.flat(observation.gradients), reference.window(step % len(plan.windows)).torch)
        for step, observation in enumerate(done.observations)
    )
    return all(np.allclose(*pair, rtol=TOLERANCE, atol=TOLERANCE) for pair in pairs)


FIXED_TESTS: dict[str, Callable[[Loop, Problem | None], bool]] = {
    "loss after one SGD step, equal parts": loss_after_a_step,
    "one window, equal parts": partial(gradients_agree, plan=Plan((2, 2), 2)),
    "two windows, equal parts": partial(gradients_agree, plan=Plan((2, 2, 2, 2), 2)),
    "one window, unequal parts": partial(gradients_agree, plan=Plan((1, 3), 2)),
}
"""Each returns whether the loop passes."""


# Running the zoo: which bugs are found, after how many cases and seconds, with which diagnosis.


MAX_WINDOWS, MAX_MICRO_BATCHES, MAX_LAYERS = 2, 3, 2
"""The size that every bug's smallest case should have, unless the bug itself needs more."""
OWN_DTYPE = "float64"
"""The dtype in which every bug is found and has its name."""
UNFIT = "gradient/not-linear"


@dataclass(frozen=True)
class Row:
    """The verdicts on one bug, over several seeds.

    Attributes:
        bug: the bug.
        runs: one result per seed.
        others: name of a rival rule or fixed test -> whether it finds the bug.
        within: number of runs in which the bug's effect lies within rounding: the smallest case of
            a float64 run holds in this dtype.
        other_dtype: whether the runs are in another dtype than float64.
    """

    bug: Bug
    runs: tuple[Result, ...]
    others: dict[str, bool]
    within: int = 0
    other_dtype: bool = False

    @property
    def found(self) -> int:
        """Number of runs that found the bug."""
        return sum(run.violation is not None for run in self.runs)

    @property
    def cases(self) -> float | None:
        """Median number of cases until the bug was found."""
        found = (run.violation.found_after for run in self.runs if run.violation is not None)
        seen = [after for after in found if after is not None]
        return median(seen) if seen else None

    @property
    def seconds(self) -> float:
        """Median seconds of a run, shrinking included."""
        return median(run.seconds for run in self.runs)

    @property
    def names(self) -> Counter[str]:
        """`kind/diagnosis` -> number of runs."""
        return Counter(
            f"{v.kind}/{v.diagnosis}" for run in self.runs if (v := run.violation) is not None
        )

    @property
    def rightly_named(self) -> int:
        """Number of runs with a diagnosis that is wanted, or `a or b` of which one is."""
        return sum(count for name, count in self.names.items() if self.bug.wanted & _readings(name))

    @property
    def unnamed(self) -> int:
        """Number of runs in another dtype where no weights fit, although the bug has a diagnosis in
        float64.
        """
        return self.names[UNFIT] if self.other_dtype and UNFIT not in self.bug.wanted else 0

    @property
    def wrongly_named(self) -> int:
        """Number of runs with a diagnosis that is not wanted."""
        return self.found - self.rightly_named - self.unnamed

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """Windows, micro-batches and layers of the runs' smallest cases."""
        cases = [run.violation.case for run in self.runs if run.violation is not None]
        layers = [0 if case.spec is None else len(case.spec.layer_kinds) for case in cases]
        return [
            (len(c.plan.windows), len(c.plan.micro_batches), n)
            for c, n in zip(cases, layers, strict=True)
        ]

    @property
    def largest(self) -> tuple[int, int, int]:
        """The largest of the sizes."""
        return max(self.sizes, default=(0, 0, 0))

    @property
    def small(self) -> bool:
        """Whether every smallest case is as small as it should be."""
        allowed = (MAX_WINDOWS, max(MAX_MICRO_BATCHES, self.bug.least_micro_batches), MAX_LAYERS)
        return all(
            number <= most
            for size in self.sizes
            for number, most in zip(size, allowed, strict=True)
        )

    @property
    def passed(self) -> bool:
        """Whether every run found the bug or its effect lies within rounding, and none gave it a
        wrong diagnosis.

        In a coarse dtype the weights that fit best may not fit well; then the fault has no
        diagnosis, which passes.
        """
        return self.wrongly_named == 0 and self.found + self.within == len(self.runs)

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON-ready data."""
        windows, micro_batches, layers = self.largest
        return {
            **{
                field: getattr(self.bug, field)
                for field in ("number", "name", "citations", "mechanism", "needs")
            },
            "runs": len(self.runs),
            "found": self.found,
            "within_rounding": self.within,
            "median_cases": self.cases,
            "median_seconds": round(self.seconds, 3),
            "names": dict(self.names.most_common()),
            "wanted": sorted(self.bug.wanted),
            "rightly_named": self.rightly_named,
            "unnamed": self.unnamed,
            "windows": windows,
            "micro_batches": micro_batches,
            "layers": layers,
            "small": self.small,
            "others": dict(self.others),
        }


def _readings(name: str) -> set[str]:
    """Return a name and, of `kind/a or b`, both `kind/a` and `kind/b`."""
    kind, _, diagnosis = name.partition("/")
    return {name, *(f"{kind}/{one}" for one in names_of(diagnosis))}


@kept_ranks()
def run_bug(bug: Bug, seeds: Iterable[int], *, examples: int, dtype: str | None = None) -> Row:
    """Verify one bug's loop once per seed, and try the rival rules and fixed tests on it.

    Args:
        bug: the bug.
        seeds: of the runs.
        examples: cases per run.
        dtype: of the cases, float64 if None.
    """
    own = None if is_jax(bug.loop) else OWN_DTYPE  # a loop of JAX has a dtype of its own
    runs: list[Result] = []
    shown: list[Violation] = []
    within = 0

    def note(verdict: Verdict) -> None:
        if verdict.violation is not None and not shown:
            shown.append(verdict.violation)

    for seed in seeds:
        options = VerifyOptions(
            jax=XLA,
            examples=examples,
            seed=seed,
            dtype=dtype or own,
            assumes=bug.assumes,
            ranks=bug.ranks,
        )
        result = _verify(bug, options, note)
        runs.append(result)
        if result.violation is not None:
            shown = shown or [result.violation]
        elif options.dtype != own:
            within += _lies_within_rounding(bug, options)
    # a fixed test has one process, and is of torch
    fits = bug.ranks == 1 and not is_jax(bug.loop)
    fixed = {
        name: fits and not passes(bug.loop, bug.problem) for name, passes in FIXED_TESTS.items()
    }
    other_dtype = dtype not in (None, OWN_DTYPE)
    return Row(
        bug,
        tuple(runs),
        {**_rivals(bug, shown[0] if shown else None), **fixed},
        within,
        other_dtype,
    )


def _verify(
    bug: Bug, options: VerifyOptions, progress: Callable[[Verdict], None] | None = None
) -> Result:
    return verify(
        bug.loop,
        options,
        name=bug.name,
        problem=bug.problem,
        problem_name=bug.name,
        progress=progress,
        quiet=True,
    )


def _lies_within_rounding(bug: Bug, options: VerifyOptions) -> bool:
    """Return whether the smallest case of the run in float64 is no violation in this dtype."""
    found = _verify(bug, replace(options, dtype=OWN_DTYPE)).violation
    if found is None:
        return False
    verdict = check(bug.loop, found.case.replace(dtype=options.dtype), problem=bug.problem)
    return verdict.holds and verdict.skipped is None


def _rivals(bug: Bug, violation: Violation | None) -> dict[str, bool]:
    """Return which rival rules find the bug on the case that first showed it.

    They compare gradients: any of them finds a loop that raises, takes too few steps or has no
    gradient.
    """
    if violation is None:
        return dict.fromkeys(RIVALS, False)
    if violation.kind not in ("gradient", "non-finite", "parameters"):
        return dict.fromkeys(RIVALS, violation.kind != "not-accumulable")
    case = violation.case
    failed: set[str] = set()
    try:
        reference = REFERENCES.get(case, bug.problem)
        outcome = run_ranks(bug.loop, reference.instance)[violation.rank or 0]
        for step, observation in enumerate(outcome.observations):
            window = reference.window(
                step % len(case.plan.windows), observation.parameters if case.optimizer else None
            )
            failed |= failed_rules(
                window, reference.layout, reference.flat(observation.gradients), case.dtype
            )
    except CannotJudgeError:
        failed.clear()
    return {name: name in failed for name in RIVALS}


# After how many cases each seed finds a bug: what the rarest ones say of what is drawn.


@dataclass(frozen=True)
class CaseCounts:
    """After how many drawn cases a bug is found, without its name and without shrinking.

    Attributes:
        bug: the bug.
        seeds: of the runs.
        cases: for each seed the number of drawn cases until one showed the bug, 0 where a weight
            probe does; None where none of `examples` cases did.
        examples: cases per run.
    """

    bug: Bug
    seeds: tuple[int, ...]
    cases: tuple[int | None, ...]
    examples: int

    @property
    def most(self) -> int:
        """The largest number; one more than the cases of a run where a run missed the bug."""
        return max(self.examples + 1 if number is None else number for number in self.cases)

    @property
    def middle(self) -> float:
        """The median number."""
        return median(self.examples + 1 if number is None else number for number in self.cases)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON-ready data."""
        return {
            "bug": self.bug.name,
            "ranks": self.bug.ranks,
            "examples": self.examples,
            "seeds": list(self.seeds),
            "cases": list(self.cases),
        }


def count_cases(bug: Bug, seeds: Sequence[int], *, examples: int) -> CaseCounts:
    """Count for each seed the drawn cases until one shows a bug."""
    counts: list[int | None] = []
    for seed in seeds:
        counts.append(_cases_until_found(bug, seed, examples))
        if counts == [0]:
            # the weight probes are the same whatever the seed
            counts *= len(seeds)
            break
    return CaseCounts(bug, tuple(seeds), tuple(counts), examples)


def _cases_until_found(bug: Bug, seed: int, examples: int) -> int | None:
    found = False

    def stop_at_the_first(verdict: Verdict) -> None:
        nonlocal found
        if verdict.violation is not None:
            found = True
            # as from the keyboard: `verify` then returns what it has, and shrinks nothing
            raise KeyboardInterrupt

    options = VerifyOptions(
        jax=XLA,
        examples=examples,
        seed=seed,
        dtype=None if is_jax(bug.loop) else OWN_DTYPE,
        assumes=bug.assumes,
        ranks=bug.ranks,
    )
    result = _verify(bug, options, stop_at_the_first)
    # a violation of a probe has no drawn case before it, and is known without the progress
    found = found or result.violation is not None
    if result.interrupted and not found:
        raise KeyboardInterrupt
    return result.cases if found else None


def counts_line(counts: CaseCounts) -> str:
    """Return a bug's line: the median and the largest number, and that of each seed."""
    each = " ".join("-" if number is None else str(number) for number in counts.cases)
    return f"{counts.bug.name:<40} {counts.middle:>6g} {counts.most:>6}  {each}"


# The scoreboard on a terminal.


HEADER = f"{'bug':<31} {'found':>7} {'cases':>6} {'seconds':>8}  {'smallest':<9} diagnosis"


def line(row: Row) -> str:
    """Return a bug's line: found in how many runs, median cases and seconds, size of the smallest
    case, its names.
    """
    windows, micro_batches, layers = row.largest
    size = f"{windows}w {micro_batches}m {layers}l"
    cases = "-" if row.cases is None else f"{row.cases:g}"
    names = ", ".join(f"{name} x{count}" for name, count in row.names.most_common())
    marks = [] if row.found + row.within == len(row.runs) else ["MISSED"]
    marks += [f"within rounding x{row.within}"] if row.within else []
    marks += [f"no diagnosis x{row.unnamed}"] if row.unnamed else []
    marks += ["WRONG DIAGNOSIS"] if row.wrongly_named else []
    marks += [] if row.small else ["LARGE"]
    return (
        f"{row.bug.number or '-':>3} {row.bug.name:<27} {row.found:>3}/{len(row.runs):<3}"
        f" {cases:>6} {row.seconds:>8.2f}  {size:<9} {' '.join([*marks, names])}"
    )


def summary(rows: Sequence[Row], sound: Sequence[Result], *, asked: int, interrupted: bool) -> str:
    """Return the last lines: how many bugs are found, with which diagnoses, and whether a sound
    loop is blamed.
    """
    runs, within = sum(len(row.runs) for row in rows), sum(row.within for row in rows)
    found, named = sum(row.found for row in rows), sum(row.rightly_named for row in rows)
    unnamed = sum(row.unnamed for row in rows)
    blamed = [result.loop for result in sound if result.violation]
    cases = [row.cases for row in rows if row.cases is not None]
    lines = [
        f"{sum(row.found == len(row.runs) for row in rows)} of {asked} bugs found in every run; "
        f"{found} of {runs} runs, {named} of them with a right diagnosis"
        + (f", {unnamed} with none" if unnamed else "")
        + (f"; in {within} runs what the bug does lies within rounding" if within else ""),
        (
            f"median over the bugs: {median(cases):g} cases,"
            f" {median(row.seconds for row in rows):.2f} s"
            if cases
            else "nothing was found"
        ),
        f"{len(sound) - len(blamed)} of {len(sound)} sound loops not blamed, over"
        f" {sum(r.cases for r in sound):,} cases"
        + (f"; blamed: {', '.join(blamed)}" if blamed else ""),
    ]
    if interrupted:
        lines.append(f"interrupted after {len(rows)} of {asked} bugs and {len(sound)} sound loops")
    return "\n".join(lines)
