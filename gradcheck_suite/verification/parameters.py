"""Judge the parameters of a run step by step: only the optimizer's steps may change them, each as its rule says."""

from __future__ import annotations

from dataclasses import replace

from gradcheck_suite.diagnosis.weight_patterns.weights import Diagnosis
from gradcheck_suite.execution.autocast import Compute
from gradcheck_suite.execution.observer import Evaluation
from gradcheck_suite.execution.optimizers import OPTIMIZERS
from gradcheck_suite.execution.replay import ParameterFault, at_start, fault_before, fault_between, fault_of_step
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.references.errors import CannotJudgeError
from gradcheck_suite.references.window import Window
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import EDITS_PARAMETERS
from gradcheck_suite.schema.results import Violation

ON_PURPOSE = (
    f"; if the loop does so on purpose, as an average or clipping of weights does, assume {EDITS_PARAMETERS}: each "
    "gradient is then judged at the parameters that its step finds"
)


def stale_parameters(window: Window, outcome: Outcome, evaluation: Evaluation, autocast: Compute) -> Diagnosis | None:
    """Return the diagnosis of a wrong gradient that is right at parameters of an earlier step, else None."""
    reference = window.reference
    seen = reference.flat(evaluation.gradients)
    step = next(k for k, o in enumerate(outcome.observations) if any(e is evaluation for e in o.evaluations))
    for k in reversed(range(step)):
        parameters = outcome.observations[k].evaluations[0].parameters
        if all(parameters[name] is value for name, value in evaluation.parameters.items()):
            continue
        try:
            if reference.window(window.index, parameters, autocast).compare(seen).ratio > 1:
                continue
        except CannotJudgeError:
            continue
        when = "initial parameters" if k == 0 else f"parameters before the step {step - k} steps earlier"
        return Diagnosis(
            "stale-parameters",
            f"the gradient is right at the {when} and wrong at those that the step changes: look for a copy of the "
            "model that is not updated, and for a forward that runs before the previous step",
        )
    return None


class Trajectory:
    """The parameters of a run, judged in the order in which they change: before a step, at it, after the last one."""

    def __init__(self, case: Case, outcome: Outcome, *, edited: bool) -> None:
        """Start before the first step.

        Args:
            case: what the loop trained.
            outcome: what it did.
            edited: whether the loop may change parameters between steps. What a step does to those that it finds, and
                the optimizer's state, are judged all the same.
        """
        self._case, self._outcome, self._edited = case, outcome, edited
        self._make = None if case.optimizer is None else OPTIMIZERS[case.optimizer]
        self._previous = at_start(outcome.start, outcome.start_state)

    def before(self, step: int) -> Violation | None:
        """Return what changed parameters or state between the previous step and this one, or None."""
        observation = self._outcome.observations[step]
        if self._edited:
            self._previous = replace(self._previous, after=observation.evaluations[0].parameters)
        fault = fault_before(self._previous, observation, self._outcome.start)
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
        return None if fault is None or self._edited else self._violation(fault, None)

    def _violation(self, fault: ParameterFault, step: int | None) -> Violation:
        epoch, window = (None, None) if step is None else divmod(step, len(self._case.plan.windows))
        return Violation(
            "parameters",
            fault.diagnosis,
            fault.sentence + (ON_PURPOSE if fault.diagnosis == "parameter-drift" else ""),
            self._case,
            parameter=fault.parameter,
            epoch=epoch,
            window=window,
            error=fault.error,
            allowed=None if fault.error is None else fault.allowed,
        )
