"""Running the zoo: what finds which bug, after how many cases and seconds, under which name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from gradcheck_suite.evidence.zoo.fixed_tests import FIXED_TESTS
from gradcheck_suite.evidence.zoo.record import Bug
from gradcheck_suite.execution.runner import run_loop
from gradcheck_suite.numerics.baselines import RIVALS, Compared
from gradcheck_suite.numerics.comparison import Layout
from gradcheck_suite.references.reference import REFERENCES, CannotJudgeError
from gradcheck_suite.schema.contract import Loop, Problem
from gradcheck_suite.schema.results import Result, Verdict, Violation
from gradcheck_suite.schema.spec import Layer, ProblemSpec
from gradcheck_suite.verification.check import check
from gradcheck_suite.verification.verify import verify

MAX_WINDOWS, MAX_MICRO_BATCHES, MAX_LAYERS = 2, 3, 2
"""The size that every bug's smallest case should have, unless the bug itself needs more."""
UNFIT = "gradient/not-linear"


@dataclass(frozen=True)
class Row:
    """What the suite makes of one bug, over several seeds.

    Attributes:
        bug: the bug.
        runs: one result per seed.
        others: rivals and fixed tests by name -> whether they find the bug.
        within: in how many runs it was not found because what it does there lies within rounding: the smallest case of
            a float64 run, run again in this dtype, holds.
        other_dtype: whether the runs are in another dtype than the bug's own.
    """

    bug: Bug
    runs: tuple[Result, ...]
    others: dict[str, bool]
    within: int = 0
    other_dtype: bool = False

    @property
    def found(self) -> int:
        """In how many runs it was found."""
        return sum(not run.holds for run in self.runs)

    @property
    def cases(self) -> float | None:
        """Median number of cases until it was found."""
        seen = [run.found_after for run in self.runs if run.found_after is not None]
        return median(seen) if seen else None

    @property
    def seconds(self) -> float:
        """Median seconds of a run, shrinking included."""
        return median(run.seconds for run in self.runs)

    @property
    def names(self) -> Counter[str]:
        """The names it was found under."""
        return Counter(f"{v.kind}/{v.diagnosis}" for run in self.runs if (v := run.violation) is not None)

    @property
    def rightly_named(self) -> int:
        """In how many runs under a name that is wanted."""
        return sum(count for name, count in self.names.items() if name in self.bug.wanted)

    @property
    def unnamed(self) -> int:
        """In how many runs it was found with no weights that fit, where in its own dtype it has a name."""
        return self.names[UNFIT] if self.other_dtype and UNFIT not in self.bug.wanted else 0

    @property
    def wrongly_named(self) -> int:
        """In how many runs it was found under another name than those wanted."""
        return self.found - self.rightly_named - self.unnamed

    @property
    def largest(self) -> tuple[int, int, int]:
        """Windows, micro-batches and layers of the largest smallest case."""
        sizes = [_size(run.violation) for run in self.runs if run.violation is not None]
        return max(sizes, default=(0, 0, 0))

    @property
    def small(self) -> bool:
        """Whether every smallest case is as small as it should be."""
        windows, micro_batches, layers = (
            max((_size(run.violation)[i] for run in self.runs if run.violation), default=0) for i in range(3)
        )
        allowed = max(MAX_MICRO_BATCHES, self.bug.least_micro_batches)
        return windows <= MAX_WINDOWS and micro_batches <= allowed and layers <= MAX_LAYERS

    @property
    def passed(self) -> bool:
        """Whether it was found in every run, but those where it lies within rounding, and never under a wrong name.

        Where rounding is coarse the weights that fit best need not fit, and then the fault is left unnamed.
        """
        return self.wrongly_named == 0 and self.found + self.within == len(self.runs)

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON-ready data."""
        windows, micro_batches, layers = self.largest
        return {
            "number": self.bug.number,
            "name": self.bug.name,
            "citations": list(self.bug.citations),
            "mechanism": self.bug.mechanism,
            "needs": self.bug.needs,
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


def run_bug(
    bug: Bug,
    seeds: Iterable[int],
    *,
    examples: int,
    dtype: str | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Row:
    """Verify one bug's loop once per seed, and try the rivals and fixed tests on it.

    Args:
        bug: the bug.
        seeds: of the runs.
        examples: cases per run.
        dtype: in place of the bug's own.
        progress: called after every run.
    """
    runs: list[Result] = []
    first: Violation | None = None
    own, within = bug.dtype, 0
    bug = bug if dtype is None else replace(bug, dtype=dtype)
    for seed in seeds:
        shown: list[Violation] = []

        def note(verdict: Verdict, shown: list[Violation] = shown) -> None:
            if verdict.violation is not None and not shown:
                shown.append(verdict.violation)

        result = verify(
            bug.loop,
            name=bug.name,
            problem=bug.problem,
            problem_name=bug.name,
            examples=examples,
            seed_value=seed,
            dtype=bug.dtype,
            optimizer=bug.optimizer,
            assumes=bug.assumes,
            progress=note,
        )
        runs.append(result)
        if result.holds and bug.dtype != own:
            within += _lies_within_rounding(bug, own, seed, examples)
        first = first or (shown[0] if shown else result.violation)
        progress()
    return Row(bug, tuple(runs), {**_rivals(bug, first), **_fixed(bug.loop, bug.problem)}, within, bug.dtype != own)


def _lies_within_rounding(bug: Bug, own: str, seed: int, examples: int) -> bool:
    """Whether what a run in the bug's own dtype finds is no violation in this one."""
    found = verify(
        bug.loop,
        problem=bug.problem,
        problem_name=bug.name,
        examples=examples,
        seed_value=seed,
        dtype=own,
        optimizer=bug.optimizer,
        assumes=bug.assumes,
    ).violation
    if found is None:
        return False
    verdict = check(bug.loop, found.case.replace(dtype=bug.dtype), problem=bug.problem)
    return verdict.holds and verdict.skipped is None


def _rivals(bug: Bug, violation: Violation | None) -> dict[str, bool]:
    """Return which rival rules find the bug on the case that first showed it.

    They compare gradients: a loop that raises, steps too seldom or has no gradient to show is found by anybody.
    """
    if violation is None:
        return dict.fromkeys(RIVALS, False)
    if violation.kind not in ("gradient", "non-finite", "parameters"):
        return dict.fromkeys(RIVALS, violation.kind != "not-accumulable")
    try:
        reference = REFERENCES.get(violation.case, bug.problem)
        outcome = run_loop(bug.loop, reference.instance)
        found = dict.fromkeys(RIVALS, False)
        for step, observation in enumerate(outcome.observations):
            window = reference.window(step % len(violation.case.plan.windows), observation.parameters or None)
            observed = reference.flat(observation.gradients)
            for compared in _by_parameter(reference.layout, observed, window.torch, window.expected, bug.dtype):
                for name, rule in RIVALS.items():
                    found[name] |= not rule(compared)
    except CannotJudgeError:
        return dict.fromkeys(RIVALS, False)
    return found


def _by_parameter(layout: Layout, observed: Any, large_batch: Any, exact: Any, dtype: str) -> Iterable[Compared]:
    for name in layout.names:
        first, second, third = (layout.part(vector, name).reshape(-1) for vector in (observed, large_batch, exact))
        yield Compared(first, second, third, dtype)


def _fixed(loop: Loop, problem: Problem | None) -> dict[str, bool]:
    return {name: not passes(loop, problem) for name, passes in FIXED_TESTS.items()}


def _size(violation: Violation) -> tuple[int, int, int]:
    plan, problem = violation.case.plan, violation.case.problem
    layers = _depth(problem.layers) if isinstance(problem, ProblemSpec) else 0
    return len(plan.windows), len(plan.micro_batches), layers


def _depth(layers: Sequence[Layer]) -> int:
    return sum(1 + _depth(layer.layers) for layer in layers)
