"""Fixed tests of the kind that trainers have: one model, one split, one comparison.

The zoo counts which bugs they would have found, beside those that drawn cases find.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from gradcheck_suite.execution.instance import Instance, instance_of
from gradcheck_suite.execution.runner import run_loop
from gradcheck_suite.loops.sound import plain
from gradcheck_suite.references.reference import Reference
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import Loop, Problem
from gradcheck_suite.schema.plan import Plan
from gradcheck_suite.schema.spec import Input, Layer, Loss, ProblemSpec

TOLERANCE = 1e-2
_MODEL = ProblemSpec(Input("vector", size=4), (Layer("linear", bias=True, features=1),), Loss("mse", reduction="mean"))


def _instance(plan: Plan, problem: Problem | None, optimizer: str | None = None) -> Instance:
    case = Case(_MODEL if problem is None else "problem", plan, optimizer=optimizer)
    return instance_of(case, problem)


def loss_after_a_step(loop: Loop, problem: Problem | None) -> bool:
    """Train one window of equal micro-batches with SGD; compare the loss with that of one large batch, to 1e-2."""
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


def _gradients_agree(loop: Loop, problem: Problem | None, plan: Plan) -> bool:
    reference = Reference(_instance(plan, problem))
    done = run_loop(loop, reference.instance)
    if done.raised is not None or len(done.observations) != plan.steps:
        return False
    for step, observation in enumerate(done.observations):
        expected = reference.window(step % len(plan.windows)).torch
        if not np.allclose(reference.flat(observation.gradients), expected, rtol=TOLERANCE, atol=TOLERANCE):
            return False
    return True


def gradient_of_one_window(loop: Loop, problem: Problem | None) -> bool:
    """Compare the gradient of one window of two equal micro-batches with the large batch's, to 1e-2."""
    return _gradients_agree(loop, problem, Plan((2, 2), 2))


def gradients_of_two_windows(loop: Loop, problem: Problem | None) -> bool:
    """The same over two windows."""
    return _gradients_agree(loop, problem, Plan((2, 2, 2, 2), 2))


def gradient_of_unequal_parts(loop: Loop, problem: Problem | None) -> bool:
    """Compare the gradient of one window of micro-batches of 1 and 3 items with the large batch's, to 1e-2."""
    return _gradients_agree(loop, problem, Plan((1, 3), 2))


FIXED_TESTS: dict[str, Callable[[Loop, Problem | None], bool]] = {
    "loss after one SGD step, equal parts": loss_after_a_step,
    "one window, equal parts": gradient_of_one_window,
    "two windows, equal parts": gradients_of_two_windows,
    "one window, unequal parts": gradient_of_unequal_parts,
}
"""Each returns whether the loop passes."""
