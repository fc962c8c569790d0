"""The reference of a case, or the violation that its problem is not accumulable, before any loop is blamed."""

from __future__ import annotations

from dataclasses import replace

from gradcheck_suite.catalogue import is_accumulable
from gradcheck_suite.errors import UsageError
from gradcheck_suite.execution.instance import generated_instance, user_instance
from gradcheck_suite.execution.tracebacks import users_line
from gradcheck_suite.records.description import error_text
from gradcheck_suite.references.errors import CannotJudgeError
from gradcheck_suite.references.reference import REFERENCES, Reference
from gradcheck_suite.references.window import Window
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import Problem
from gradcheck_suite.schema.results import Violation
from gradcheck_suite.verification.batch_dependence import AS_A_BATCH, batch_dependence
from gradcheck_suite.verification.separability import objective_fault


def _not_accumulable(case: Case, explanation: str | None) -> Violation | None:
    return Violation("not-accumulable", "not-accumulable", explanation, case) if explanation else None


def gradient_fault(reference: Reference, window: Window) -> Violation | None:
    """Return why a problem that passes the forward-only check is not accumulable, or None where it is.

    The forward-only check compares one value, with a tolerance for float32 inside a model. So before a loop is blamed,
    torch's own accumulation in float64 must give the large batch's gradient.
    """
    comparison = window.compare(window.accumulated())
    difference = comparison.worst
    if difference.ratio <= 1:
        return None
    parameter, _ = reference.layout.place(difference.index)
    instance = reference.instance
    explanation = (
        "the objective is not a sum over items, so no plain accumulation can equal the large batch and no loop is to "
        f"blame: {batch_dependence(instance, window.model())}. {AS_A_BATCH}. The gradients of {parameter} in window "
        f"{window.index}, of the large batch and as the sum of the micro-batches', differ by "
        f"{error_text(difference.error, difference.allowed)}"
    )
    found = Violation("not-accumulable", "not-accumulable", explanation, instance.case)
    return replace(found, parameter=parameter, epoch=0, window=window.index, evidence=comparison)


def _cross_sample(case: Case) -> tuple[Reference | None, Violation | None]:
    """Return what `reference_of` does, for a generated problem with a kind that is not separable over samples."""
    try:
        fault = objective_fault(generated_instance(case))
    except (RuntimeError, ValueError) as error:
        # batch normalization refuses an epoch of one item, or one without valid targets
        raise CannotJudgeError(f"the plain large batch fails: {error}") from error
    if fault:
        return None, _not_accumulable(case, fault)
    reference = REFERENCES.get(case, None)
    for index in range(len(case.plan.windows)):
        if found := gradient_fault(reference, reference.window(index)):
            return None, found
    # on this case's items it makes no difference, and a loop can be judged
    return reference, None


def reference_of(case: Case, problem: Problem | None) -> tuple[Reference | None, Violation | None]:
    """Return the case's reference, and why the problem is not accumulable, where that is so."""
    if problem is None:
        if case.spec is not None and not is_accumulable(case.spec):
            return _cross_sample(case)
        return REFERENCES.get(case, problem), None
    try:
        instance = user_instance(case, problem)
        if fault := _not_accumulable(case, objective_fault(instance)):
            return None, fault
        reference = REFERENCES.get(case, problem)
        for window in range(len(case.plan.windows)):
            reference.window(window)
    except (UsageError, CannotJudgeError):
        raise
    except (Exception, SystemExit) as error:
        # a user's own code, which may raise anything
        fewest, most = min(case.plan.micro_batches), case.plan.total_items
        items = f"{most} item{'s' * (most > 1)}"
        batches = f"batches of {fewest} to {items}" if fewest < most else f"one batch of {items}"
        raise UsageError(
            f"the problem {case.problem} failed before any loop ran, on {batches}: "
            f"{type(error).__name__}: {error} ({users_line(error)})"
        ) from error
    return reference, None
