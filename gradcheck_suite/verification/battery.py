"""Running the battery of weight probes on a loop, and making the violated one as small as it goes.

The first probes show most faults; for such a fault drawn cases are searched, too. What the other probes show is a fault
that no drawn case can show: their violation, made smaller, is the verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from gradcheck_suite.diagnosis.further_runs.loop_runner import LoopRunner
from gradcheck_suite.diagnosis.on_probe.probe_faults import linear_fault
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.plan import Plan
from gradcheck_suite.schema.results import Verdict, Violation
from gradcheck_suite.verification.probe_plans import first_cases, long_cases, slopes_case
from gradcheck_suite.verification.smallest_probe import Checked, smallest_probe

SHARE_OF_LIMIT = 0.25
"""Share of the time limit that a probe may be expected to take; one that would take longer is left out and reported."""


@dataclass(frozen=True)
class Battery:
    """What the battery shows of a loop.

    Attributes:
        violation: of the first probe that is violated, made smaller where `final`; None where all hold.
        final: whether no drawn case can show the violation.
        skipped: why probes were not judged.
    """

    violation: Violation | None = None
    final: bool = False
    skipped: tuple[str, ...] = ()


def run_battery(
    checked: Checked,
    runner: Callable[[], LoopRunner],
    *,
    assumes: frozenset[str],
    dtype: str,
    device: str,
    time_limit_s: float | None,
    ranks: int = 1,
) -> Battery:
    """Check a loop on the battery, within its assumptions.

    Args:
        checked: returns the loop's verdict on a case.
        runner: returns a new runner of the loop.
        assumes: assumptions of the loop.
        dtype: of the probe's parameter.
        device: of the runs.
        time_limit_s: seconds after which the loop is stopped on one probe.
        ranks: number of ranks of the probes.
    """
    pace = _Pace(time_limit_s)
    for case in first_cases(assumes, dtype, device, ranks):
        verdict = pace.timed(checked, case)
        if verdict.skipped:
            return Battery(skipped=(f"the weight probes: {verdict.skipped}",))
        if verdict.violation is not None:
            return Battery(_with_size_fault(verdict.violation, slopes_case(assumes, dtype, device, ranks), runner))
    skipped: list[str] = []
    for case in (slopes_case(assumes, dtype, device, ranks), *long_cases(assumes, dtype, device, ranks)):
        if reason := pace.too_slow(case):
            skipped.append(reason)
            continue
        verdict = pace.timed(checked, case)
        if verdict.skipped:
            skipped.append(f"a weight probe: {verdict.skipped}")
        if verdict.violation is not None:
            return Battery(smallest_probe(checked, verdict.violation, assumes), final=True, skipped=tuple(skipped))
    return Battery(skipped=tuple(skipped))


class _Pace:
    """The time that a loop takes per micro-batch, from its latest probe."""

    def __init__(self, time_limit_s: float | None) -> None:
        self._time_limit_s, self._seconds = time_limit_s, 0.0

    def timed(self, checked: Checked, case: Case) -> Verdict:
        """Return the verdict on a case and note the time."""
        began = time.perf_counter()
        verdict = checked(case)
        self._seconds = (time.perf_counter() - began) / _micro_batches(case.plan)
        return verdict

    def too_slow(self, case: Case) -> str | None:
        """Return why a case is left out: it would come close to the time limit. None where it would not."""
        needed = self._seconds * _micro_batches(case.plan)
        if self._time_limit_s is None or needed <= SHARE_OF_LIMIT * self._time_limit_s:
            return None
        return (
            f"the weight probe of {_micro_batches(case.plan)} micro-batches was left out: it would take this loop "
            f"{needed:.0f} s of the time limit of {self._time_limit_s:g} s, which --time-limit raises"
        )


def _micro_batches(plan: Plan) -> int:
    return plan.epochs * len(plan.micro_batches)


def _with_size_fault(violation: Violation, case: Case, runner: Callable[[], LoopRunner]) -> Violation:
    """Return a violation with a line about a further fault that depends on the size of the gradient, if there is one.

    The weights are wrong anyway, so the loop is held to its own weights on the same plan with slopes of 1.
    """
    if violation.kind != "gradient":
        return violation
    fault = linear_fault(case, runner())
    if fault is None or fault.name in (violation.diagnosis, "not-linear"):
        return violation
    return replace(violation, details=(*violation.details, f"a further fault, {fault.name}: {fault.sentence}"))
