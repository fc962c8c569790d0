"""Judge the parameters of a run step by step: only the optimizer's steps may change them, each as its rule says."""

from __future__ import annotations

from gradcheck_suite.execution.optimizers import OPTIMIZERS
from gradcheck_suite.execution.replay import ParameterFault, at_start, fault_before, fault_between, fault_of_step
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.results import Violation


class Trajectory:
    """The parameters of a run, judged in the order in which they change: before a step, at it, after the last one."""

    def __init__(self, case: Case, outcome: Outcome) -> None:
        self._case, self._outcome = case, outcome
        self._make = None if case.optimizer is None else OPTIMIZERS[case.optimizer]
        self._previous = at_start(outcome.start, outcome.start_state)

    def before(self, step: int) -> Violation | None:
        """Return what changed parameters or state between the previous step and this one, or None."""
        observation = self._outcome.observations[step]
        fault = fault_before(self._previous, observation, self._outcome.start, moves=self._make is not None)
        return None if fault is None else self._violation(fault, step)

    def at(self, step: int) -> Violation | None:
        """Return how a step changed parameters otherwise than the case's optimizer does, or None."""
        observation = self._outcome.observations[step]
        fault = fault_of_step(self._make, self._previous, observation)
        self._previous = observation
        return None if fault is None else self._violation(fault, step)

    def end(self) -> Violation | None:
        """Return what changed parameters after the last step, or None."""
        fault = fault_between(self._previous, self._outcome.parameters, self._outcome.start)
        return None if fault is None else self._violation(fault, None)

    def _violation(self, fault: ParameterFault, step: int | None) -> Violation:
        epoch, window = (None, None) if step is None else divmod(step, len(self._case.plan.windows))
        return Violation(
            "parameters",
            fault.diagnosis,
            fault.sentence,
            self._case,
            parameter=fault.parameter,
            epoch=epoch,
            window=window,
            error=fault.error,
            allowed=None if fault.error is None else fault.allowed,
        )
