"""Parameters over several windows and epochs: every reset mode, torch's large batch, and JAX with
optax.

Each gradient is judged before its step, at the parameters that the step finds. The steps in optax
then take JAX's gradients, and keep parameters and state of their own from the first step to the
last. What the bound of each gradient allows is carried through all later steps. The same is done
with JAX alone, which takes the gradients at its own parameters: there the bound is also carried
through the second derivatives of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, check
from gradcheck_suite.core.comparison import FEW_DRAWS
from gradcheck_suite.loops.reset_modes import BUILT_IN, MODES, backward_window, windows
from gradcheck_suite.reference.large_batch import Reference
from gradcheck_suite.run.instance import generated_instance
from gradcheck_suite.run.optimizers import FOR_ANY_LOOP, OPTIMIZERS
from properties.helpers import REGRESSION, observe
from studies.optimizer_steps import Trajectory, follow, settings_of
from studies.optimizers import COUNTERPARTS
from studies.zoo import BUGS

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
    pytest.param(name, marks=() if name == "sgd" else pytest.mark.full)
    for name in FOR_ANY_LOOP
    if name != "normalized"
]
"""The optimizers of torch that train any model with any loop. Drawn gradients judge the others."""


def large_batch(run):
    """Send each window backward in one batch."""
    for window in windows(run):
        run.optimizer.zero_grad()
        run.loss(
            run.model, {name: torch.cat([batch[name] for batch in window]) for name in window[0]}
        ).backward()
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
        followed = [*(e.parameters for e in observation.evaluations[1:]), observation.after]
        for evaluation, then in zip(observation.evaluations, followed, strict=True):
            window = reference.window(step % len(case.plan.windows), evaluation.parameters)
            comparison = window.compare(reference.flat(evaluation.gradients))
            assert comparison.ratio <= 1, (
                f"step {step}: gradient off by {comparison.ratio:.3g} of what is allowed"
            )
            if all(torch.equal(value, then[name]) for name, value in evaluation.parameters.items()):
                continue  # L-BFGS moves after each call of the closure but the last that it makes
            expected.append(arrays(window.expected))
            allowed.append(arrays(window.allowed(FEW_DRAWS)))
            after.append(reference.flat({name: then[name] for name in names}))
    settings = settings_of(observations[0].settings[0], instance.dtype)
    first = observations[0].evaluations[0].parameters
    start = arrays(reference.flat({name: first[name] for name in names}))
    return Run(settings, start, expected, allowed, np.stack(after))


def in_optax(run: Run, case: Case, allowed=None, *, alone=False) -> Trajectory:
    """Take the run's steps in optax, on JAX's gradients: at the parameters of the run, or alone at
    those of optax.
    """
    counterpart = COUNTERPARTS[CLASSES.get(case.optimizer, case.optimizer)]
    read, gradient = (padded_windows(case), gradient_of_deep) if alone else (run.expected, None)
    unit = {"float64": 2.0**-53, "float32": 2.0**-24}[case.dtype]
    errors = allowed or run.allowed
    return follow(
        counterpart, run.settings, run.start, read, errors=errors, unit=unit, gradient=gradient
    )


def padded_windows(case: Case) -> list[list[np.ndarray]]:
    """Return inputs, targets and weights of every window's items, with items of weight zero up to
    the same number.
    """
    instance = generated_instance(case)
    found, items = [], max(map(len, map(case.plan.window_items, range(len(case.plan.windows)))))
    for window in windows(instance.run(0)):
        x, target = (
            np.concatenate([batch[name].double().numpy() for batch in window])
            for name in ("x", "target")
        )
        padding = [(0, items - len(x)), (0, 0)]
        found.append(
            [np.pad(x, padding), np.pad(target, padding), np.pad(np.ones(len(x)), padding[:1])]
        )
    return found


def gradient_of_deep(parameters, window):
    """Return JAX's gradient of the loss of `DEEP`, written from the mathematics."""
    x, target, weight = window

    def loss(parameters):
        first, bias, second, other_bias = parameters
        out = jnp.tanh(x @ first.T + bias) @ second.T + other_bias
        return (weight[:, None] * (out - target) ** 2).sum() / (weight.sum() * target.shape[1])

    return jax.grad(loss)(parameters)


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
    assert np.abs(np.diff(accumulated.parameters, axis=0)).max() > 1e3 * np.median(
        accumulated.allowed
    )

    whole = judged(large_batch, case)
    assert in_optax(whole, case).ratio(whole.parameters) <= 1
    # against the accumulated run: its gradients were taken at parameters that differ, and JAX says
    # by how much
    apart = [
        [np.abs(g - h) + e for g, h, e in zip(*step, strict=True)]
        for step in zip(whole.expected, run.expected, whole.allowed, strict=True)
    ]
    assert in_optax(run, case, apart).ratio(whole.parameters) <= 1


@pytest.mark.full
@pytest.mark.parametrize("name", [name for p in NAMES for name in p.values])
def test_jax_alone_trains_alike(name):
    for dtype in ("float64", "float32"):
        case = Case(DEEP, PLAN, seed=3, optimizer=name, dtype=dtype)
        for loop in (MODES["zero_"], large_batch):
            run = judged(loop, case)
            alone = in_optax(run, case, alone=True)
            assert alone.ratio(run.parameters) <= 1
            assert not alone.undecided.any()
            assert np.abs(np.diff(alone.parameters, axis=0)).max() > 1e3 * np.median(alone.allowed)


CHOSEN = {
    "lbfgs": (
        BUILT_IN["closure"],
        # one window: from one objective to the next, a curvature may be negative, and torch skips
        # the pair
        Case(REGRESSION, Plan((1, 3, 2), 3, epochs=3), seed=3, optimizer="lbfgs"),
    ),
    "muon": (
        MODES["set_to_none"],
        Case(
            ProblemSpec(
                Input("vector", size=3),
                (
                    Layer("linear", bias=False, features=2),
                    Layer("tanh"),
                    Layer("linear", bias=False, features=2),
                ),
                Loss("mse", reduction="mean"),
            ),
            PLAN,
            seed=3,
            optimizer="muon",
        ),
    ),
    "sparseadam": (
        MODES["set_to_none"],
        Case(
            ProblemSpec(
                Input("tokens", length=2, padded=False, vocabulary=5),
                (Layer("embedding", features=2, sparse=True, padding_idx=False),),
                Loss("mse", reduction="mean"),
            ),
            PLAN,
            seed=3,
            optimizer="sparseadam",
        ),
    ),
}
"""The optimizers that train some models alone, or need a closure -> a loop and a case for them."""


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", CHOSEN)
def test_optimizers_of_some_models_train_as_in_optax(name, dtype):
    loop, case = CHOSEN[name]
    case = case.replace(dtype=dtype)
    assert check(loop, case).holds
    run = judged(loop, case)
    run.settings["history_size"] = len(run.expected)  # all that L-BFGS can have kept
    # a row that no item reaches has no gradient, and not one within the bound of zero
    if name == "sparseadam":
        errors = [
            [np.where(g.any(1)[:, None], e, 0) for g, e in zip(*step, strict=True)]
            for step in zip(run.expected, run.allowed, strict=True)
        ]
        run = replace(run, allowed=errors)
    found = in_optax(run, case)
    assert found.ratio(run.parameters) <= 1
    assert not found.undecided.any()
    slower = replace(run, settings={**run.settings, "lr": 0.5 * run.settings["lr"]})
    assert in_optax(slower, case).ratio(run.parameters) > 1


def state_lost(run):
    """Lose the optimizer's state after every step, as where a checkpoint lacks it."""
    for window in windows(run):
        run.optimizer.zero_grad()
        backward_window(run, window)
        run.optimizer.step()
        run.optimizer.state.clear()


def parameters_rounded(run):
    """Round the parameters to float32 after every step."""
    for window in windows(run):
        run.optimizer.zero_grad()
        backward_window(run, window)
        run.optimizer.step()
        with torch.no_grad():
            for p in run.model.parameters():
                p.copy_(p.float())


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("loop", [state_lost, parameters_rounded])
def test_what_is_lost_between_right_steps_is_found(loop, alone):
    case = Case(DEEP, PLAN, seed=3, optimizer="momentum")
    run = judged(loop, case)
    assert in_optax(run, case, alone=alone).ratio(run.parameters) > 1e3


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
