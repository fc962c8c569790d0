"""What the properties share beside assertions: numbers of examples, and running a loop for its
gradients.
"""

from __future__ import annotations

import hypothesis
import pytest

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec
from gradcheck_suite.core.contract import Loop
from gradcheck_suite.run.instance import Instance
from gradcheck_suite.run.observer import Observation
from properties.devices import repeatable_run

REGRESSION = ProblemSpec(
    Input("vector", size=2),
    (Layer("linear", features=1, bias=True),),
    Loss("mse", reduction="mean"),
)
"""Linear regression on two features."""
TWO_WINDOWS = Case(REGRESSION, Plan((1, 3, 2), 2, 2), seed=1)
"""Two epochs of two windows with unequal micro-batches; the last window is short."""


def scaled(divisor: int) -> hypothesis.settings:
    """Return settings that draw a `divisor`-th of the profile's examples, at least one."""
    return hypothesis.settings(max_examples=max(1, hypothesis.settings().max_examples // divisor))


def observe(loop: Loop, instance: Instance) -> list[Observation]:
    """Run a loop and return the gradients at each of its steps.

    Fail where it raises or miscounts steps.
    """
    __tracebackhide__ = True
    outcome = repeatable_run(loop, instance)
    if outcome.raised is not None:
        pytest.fail(
            f"the loop raised {outcome.raised}, but should train [{instance.case!r}]\n{outcome.trace}"
        )
    taken, due = len(outcome.observations), instance.case.plan.steps
    assert taken == due, f"steps={taken}, but should be {due} [{instance.case!r}]"
    return outcome.observations
