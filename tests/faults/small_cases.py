"""Small cases on which known faults show, so that a test needs no search."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from gradcheck_suite import Case, Input, Layer, Loss, Plan, Problem, ProblemSpec, check
from gradcheck_suite.core.contract import EQUAL_MICRO_BATCHES, WHOLE_WINDOWS


def _linear(kind: str, loss: Loss, features: int = 2, **options: object) -> ProblemSpec:
    return ProblemSpec(Input("vector", size=3), (Layer(kind, features=features, **options),), loss)


SQUARED = Loss("mse", reduction="mean")
REGRESSION = _linear("linear", SQUARED, bias=True)
PART_FROZEN = _linear("part_frozen_linear", SQUARED, frozen="bias")
CLASSES = _linear(
    "linear",
    Loss(
        "cross_entropy",
        ignore_index=True,
        label_smoothing=0.0,
        class_weights=False,
        reduction="mean",
    ),
    features=3,
    bias=True,
)
CASES = (
    *(
        Case(REGRESSION, plan, seed=1)
        for plan in (
            Plan((2, 2, 2), 2),
            Plan((1, 2), 2),
            Plan((1,), 2, 2),
            Plan((1, 1, 1, 1), 2, 2),
            Plan((1, 3, 2), 3),
            Plan((1, 1, 1, 1, 1), 5),
        )
    ),
    Case(CLASSES, Plan((3, 2, 2), 3, masked=(1,)), seed=1),
    Case(PART_FROZEN, Plan((1, 2), 2), seed=1),
    Case(replace(REGRESSION, loss=Loss("mse", reduction="sum")), Plan((1, 2), 2), seed=1),
)
"""Equal, unequal and single micro-batches; whole windows and short ones; one window and several; targets that are
ignored; a parameter that is frozen; a sum over items."""


def diagnoses(
    loop, problem: Problem | None = None, assumes: tuple[str, ...] = (), device: str = "cpu"
) -> Iterator[str]:
    """Yield `kind/diagnosis` for each of the cases, within what the loop assumes, on which the loop
    is violated.
    """
    for case in CASES:
        plan = case.plan
        unequal = EQUAL_MICRO_BATCHES in assumes and len(set(plan.micro_batches)) > 1
        if unequal or (WHOLE_WINDOWS in assumes and plan.has_short_window):
            continue
        case = (
            case.replace(device=device)
            if problem is None
            else case.replace(problem="problem", device=device)
        )
        if (violation := check(loop, case, problem=problem, assumes=assumes).violation) is not None:
            yield f"{violation.kind}/{violation.diagnosis}"


def until(wanted: Collection[str], names: Iterable[str]) -> Iterator[str]:
    """Yield names up to the first wanted one, so that no further case is run."""
    for name in names:
        yield name
        if name in wanted:
            return
