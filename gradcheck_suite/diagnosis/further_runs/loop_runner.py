"""Running a loop a few more times to name its fault."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gradcheck_suite.execution.instance import Instance
from gradcheck_suite.execution.ranks.run import run_ranks
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.schema.contract import Loop, assumptions_of
from gradcheck_suite.schema.options import DEFAULT_TIME_LIMIT

MAX_RUNS = 3
"""Runs that one diagnosis may take beside that which showed the violation; `diagnosis.gradient` may allow one more."""


class LoopRunner:
    """Runs one loop, up to a number of times.

    Attributes:
        runs_left: number of runs that may still be asked for.
        assumes: what the loop assumes, names from `ASSUMPTIONS`.
        rank: the rank whose outcome is looked at.
        alike: whether all ranks had the same gradients at each step, in every run so far.
    """

    def __init__(
        self,
        loop: Loop,
        *,
        time_limit_s: float | None = DEFAULT_TIME_LIMIT,
        max_runs: int = MAX_RUNS,
        assumes: Iterable[str] = (),
        rank: int = 0,
        alike: bool = False,
    ) -> None:
        self._loop, self._time_limit_s, self.runs_left = loop, time_limit_s, max_runs
        self.rank, self.alike = rank, alike
        self.assumes = frozenset(assumes) | assumptions_of(loop)

    def run(self, instance: Instance) -> Outcome | None:
        """Return what the loop does with an instance, or None where no run is left."""
        if not self.runs_left:
            return None
        self.runs_left -= 1
        outcomes = run_ranks(self._loop, instance, time_limit_s=self._time_limit_s)
        failed = next((outcome for outcome in outcomes if outcome.raised is not None), None)
        if failed is None:
            self.alike &= outcomes[self.rank].alike
        return failed or outcomes[self.rank]

    def repeat(self, instance: Instance, times: int = 2) -> Iterator[Outcome]:
        """Yield what the loop does with the very instance that showed the violation, while runs are left."""
        for _ in range(times):
            outcome = self.run(instance)
            if outcome is None:
                return
            yield outcome
