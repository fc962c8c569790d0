"""Parameters over several windows and epochs: every reset mode, torch's large batch, and JAX with optax.

Each gradient is judged before its step, at the parameters that the step finds. The steps in optax then take JAX's
gradients, and keep parameters and state of their own from the first step to the last. What the bound of each gradient
allows is carried through all later steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, check
from gradcheck_suite.evidence.zoo import BUGS
from gradcheck_suite.execution.instance import generated_instance
from gradcheck_suite.execution.optimizers import FOR_ANY_LOOP, OPTIMIZERS
from gradcheck_suite.loops import MODES
from gradcheck_suite.loops.windows import windows
from gradcheck_suite.numerics.bounds import FEW_DRAWS
from gradcheck_suite.references.reference import Reference
from gradcheck_suite.steps import COUNTERPARTS, Trajectory, follow, settings_of
from properties.helpers import observe

DEEP = ProblemSpec(
    Input("vector", size=3),
    (Layer("linear", bias=True, features=2), Layer("tanh"), Layer("linear", bias=True, features=2)),
    Loss("mse", reduction="mean"),
)
PLAN = Plan((1, 3, 2, 2, 1), 2, epochs=2)
"""Six steps in two epochs; two windows are short."""
CLASSES = {"momentum": "sgd", "nesterov": "sgd"}
"""Names of `OPTIMIZERS` that are not those of their class."""
NAMES = [
    pytest.param(name, marks=() if name == "sgd" else pytest.mark.full) for name in FOR_ANY_LOOP if name != "normalized"
]
"""The optimizers of torch that train any model with any loop. Drawn gradients judge the others."""


def large_batch(run):
    """Send each window backward in one batch."""
    for window in windows(run):
        run.optimizer.zero_grad()
        run.loss(run.model, {name: torch.cat([batch[name] for batch in window]) for name in window[0]}).backward()
        run.optimizer.step()


@dataclass(frozen=True)
class Run:
    """What a loop did, and what JAX says of its gradients.

    Attributes:
        settings: of the optimizer.
        start: the parameters before the first step.
        expected: JAX's gradient at the parameters that each step found.
        allowed: how far rounding may have moved the gradient that the step used.
        parameters: after each step, flattened.
    """

    settings: dict[str, Any]
    start: list[np.ndarray]
    expected: list[list[np.ndarray]]
    allowed: list[list[np.ndarray]]
    parameters: np.ndarray


def judged(loop, case: Case) -> Run:
    """Run a loop, and fail unless the gradient of every step is right."""
    __tracebackhide__ = True
    instance = generated_instance(case)
    reference, observations = Reference(instance), observe(loop, instance)
    names, shapes = reference.layout.names, reference.layout.shapes

    def arrays(flat):
        parts = np.split(flat, np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    expected, allowed, after = [], [], []
    for step, observation in enumerate(observations):
        window = reference.window(step % len(case.plan.windows), observation.parameters)
        comparison = window.compare(reference.flat(observation.gradients))
        assert comparison.ratio <= 1, f"step {step}: gradient off by {comparison.ratio:.3g} of what is allowed"
        expected.append(arrays(window.expected))
        allowed.append(arrays(window.allowed(FEW_DRAWS)))
        after.append(reference.flat({name: observation.after[name] for name in names}))
    settings = settings_of(observations[0].settings[0], instance.dtype)
    first = observations[0].parameters
    start = arrays(reference.flat({name: first[name] for name in names}))
    return Run(settings, start, expected, allowed, np.stack(after))


def in_optax(run: Run, case: Case, allowed=None) -> Trajectory:
    """Take the run's steps in optax, on JAX's gradients."""
    counterpart = COUNTERPARTS[CLASSES.get(case.optimizer, case.optimizer)]
    unit = {"float64": 2.0**-53, "float32": 2.0**-24}[case.dtype]
    return follow(counterpart, run.settings, run.start, run.expected, errors=allowed or run.allowed, unit=unit)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", NAMES)
def test_accumulated_large_batch_and_optax_train_alike(name, dtype):
    case = Case(DEEP, PLAN, seed=3, optimizer=name, dtype=dtype)
    first, *others = MODES.values()
    run = judged(first, case)
    left = observe(first, generated_instance(case))
    for loop in others:
        # equal gradients are equal in every bit, so the parameters are
        for mine, other in zip(left, observe(loop, generated_instance(case)), strict=True):
            assert all(torch.equal(value, other.after[name]) for name, value in mine.after.items())
    accumulated = in_optax(run, case)
    assert accumulated.ratio(run.parameters) <= 1
    assert not accumulated.undecided.any()
    assert np.abs(np.diff(accumulated.parameters, axis=0)).max() > 1e3 * np.median(accumulated.allowed)

    whole = judged(large_batch, case)
    assert in_optax(whole, case).ratio(whole.parameters) <= 1
    # against the accumulated run: its gradients were taken at parameters that differ, and JAX says by how much
    apart = [
        [np.abs(g - h) + e for g, h, e in zip(*step, strict=True)]
        for step in zip(whole.expected, run.expected, whole.allowed, strict=True)
    ]
    assert in_optax(run, case, apart).ratio(whole.parameters) <= 1


class InsideTheRoot(torch.optim.Adam):
    """Adam with epsilon inside the root."""

    @torch.no_grad()
    def step(self, closure=None):
        """Take one step."""
        if closure is not None:
            closure()
        (group,) = self.param_groups
        (b1, b2), eps = group["betas"], group["eps"]
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
            state["step"] += 1
            state["mean"].lerp_(p.grad, 1 - b1)
            state["square"].lerp_(p.grad**2, 1 - b2)
            square = state["square"] / (1 - b2 ** state["step"])
            p.sub_(group["lr"] * state["mean"] / (1 - b1 ** state["step"]) / (square + eps).sqrt())


@pytest.mark.full
def test_a_faulty_step_that_repeats_itself_is_found_by_optax_alone(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "adam", lambda p: InsideTheRoot(p, lr=0.01, eps=1e-4))
    case = Case(DEEP, PLAN, seed=3, optimizer="adam")
    assert check(MODES["zero_"], case).holds
    run = judged(MODES["zero_"], case)
    assert in_optax(run, case).ratio(run.parameters) > 1e6


def test_a_wrong_gradient_is_found_before_its_step():
    with pytest.raises(AssertionError, match="step 0: gradient off by"):
        judged(BUGS["mean-of-means"].loop, Case(DEEP, PLAN, seed=3, optimizer="sgd"))
