"""A weighted regression onto two targets, small enough that a loop's fault is all that is wrong
with it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, Problem, ProblemSpec, check
from gradcheck_suite.core.comparison import Comparison
from gradcheck_suite.core.results import weight_lines
from gradcheck_suite.judge.gradient import explain_gradient
from gradcheck_suite.judge.reruns import Evidence, LoopRunner
from gradcheck_suite.loops.reset_modes import window_count, windows
from gradcheck_suite.reference.large_batch import Reference, WindowReference
from gradcheck_suite.run.instance import user_instance
from gradcheck_suite.run.runner import run_loop
from studies.zoo.bug import train_with_weights
from tests.training import trains
from tests.wording import assert_named

PLAN = Plan((1, 2, 3, 2), 2)
DRAWN = np.random.default_rng(0)
DATA = {"x": DRAWN.integers(1, 10, (8, 3)), "y": DRAWN.integers(1, 10, (8, 2)), "w": np.ones(8)}
MASKED = Case(
    ProblemSpec(
        Input("vector", size=3),
        (Layer("linear", bias=True, features=3),),
        Loss(
            "cross_entropy",
            ignore_index=True,
            label_smoothing=0.0,
            class_weights=False,
            reduction="mean",
        ),
    ),
    Plan((3, 2, 2), 3, masked=(1,)),
    seed=1,
)
"""The second micro-batch has no valid targets: its loss is NaN."""


def share(gradient, share):
    """Return, for each element, a share of the largest one that is finite."""
    return np.full(len(gradient), share * np.abs(gradient[np.isfinite(gradient)]).max())


def model(seed):
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0, -1.0], [0.5, -3.0, 1.0]]))
        model.bias.copy_(torch.tensor([0.25, -0.5]))
    return model


def squares(model, batch):
    return (((model(batch["x"]) - batch["y"]) ** 2).sum(1) * batch["w"]).sum()


def mean(model, batch):
    total = batch["w"].sum()
    return squares(model, batch) / total if total else 0 * squares(model, batch)


def explained(
    loop,
    *,
    plan=PLAN,
    window=0,
    epoch=0,
    dtype="float64",
    optimizer=None,
    sums=False,
    model=model,
    **data,
):
    """Return the diagnosis of one step, which must be wrong: name, explanation, details and
    weights.
    """
    tensors = {
        name: torch.tensor(np.array(values), dtype=torch.float64)
        for name, values in {**DATA, **data}.items()
    }
    problem = Problem(
        model,
        lambda items, seed: {name: tensor[:items] for name, tensor in tensors.items()},
        squares if sums else mean,
        reduction="sum" if sums else "mean",
        count=lambda batch: batch["w"].sum(),
    )
    instance = user_instance(
        Case("regression.py:PROBLEM", plan, dtype, optimizer=optimizer), problem
    )
    reference, outcome = Reference(instance), run_loop(loop, instance)
    assert outcome.raised is None
    observation = outcome.observations[epoch * len(plan.windows) + window]
    right = reference.window(window, observation.parameters if optimizer else None)
    seen = reference.flat(observation.gradients)
    comparison = Comparison(reference.layout, right.expected, seen, share(right.expected, 1e-9))
    assert comparison.ratio > 1000
    runner = LoopRunner(loop)
    # let rounding be a billionth of the largest element: to measure it takes drawing, and is not
    # tested here
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            WindowReference, "allowed", lambda window, draws=0: share(window.expected, 1e-9)
        )
        found = explain_gradient(Evidence(comparison, right, epoch, runner))
    assert runner.runs_left >= 0
    return found.name, found.explanation(), (*found.details, *weight_lines(found.weights))


def told(loop, case=None, **options):
    """Return a row of a table of faults: it runs a loop, on a case or as `explained`, and returns
    name and words.

    The words end with the printed table of weights. A violation of another kind has it before its
    name.
    """

    def row():
        if case is None:
            name, sentence, details = explained(loop, **options)
            return name, "\n".join((sentence, *details[1:]))
        found = check(loop, case, **options).violation
        weights = weight_lines(found.weights)
        name = found.diagnosis if found.kind == "gradient" else f"{found.kind}/{found.diagnosis}"
        return name, "\n".join((found.explanation, *weights))

    return row


def assert_rows(golden, file, named, *, part):
    """Run what is planted, of name -> title -> row, or in a part the first of each name.

    See `assert_named`.
    """
    few = 1 if part else None
    told = {
        (name, title): row() for name, rows in named.items() for title, row in [*rows.items()][:few]
    }
    assert_named(golden, file, told, part=part)


PART_AND_WHOLE = pytest.mark.parametrize(
    "part",
    [
        pytest.param(True, marks=pytest.mark.quick, id="part"),
        pytest.param(False, marks=pytest.mark.full, id="whole"),
    ],
)


def step(run):
    run.optimizer.step()
    run.optimizer.zero_grad()


def by_weights(weight):
    """Return a loop that multiplies each micro-batch's mean loss by a number, given its window and
    itself.
    """
    return lambda run: train_with_weights(run, weight)


def then(*changes):
    """Return a sound loop with a change to the gradients before each step, in turn."""
    return trains(before=lambda run, place: changes[place % len(changes)](run))


def weight_of(run):
    """Return the parameter that is named `weight`; None on the probe."""
    return dict(run.model.named_parameters()).get("weight")


def every(change):
    """Return a change of every parameter's gradient, given it and the parameter."""
    return lambda run: [change(p.grad, p.detach()) for p in run.model.parameters()]


def of_case(change):
    """Return a change of every parameter's gradient, but not on the probe."""
    return lambda run: every(change)(run) if weight_of(run) is not None else None


def of_weight(change):
    """Return a change of the gradient of `weight`, and so none on the probe."""
    return lambda run: change(weight.grad) if (weight := weight_of(run)) is not None else None


def as_it_is(run):
    pass


def fail(run):
    raise ValueError


double = of_weight(lambda g: g.mul_(2))
triple = of_weight(lambda g: g.mul_(3))
forget = of_weight(lambda g: g.zero_())
turn = of_weight(lambda g: g.copy_(g.flip(0)))
"""Hands the first target's gradient to the second, and the other way round."""
mix = of_weight(lambda g: g.add_(0.5 * g.flip(0)))
"""Adds half of the first target's gradient to the second's and the other way round: linear, and nothing known."""


def where_not_finite(then, change=as_it_is):
    """Return a loop that leaves out a loss that is not finite, does something else there, and
    changes the gradients.

    Args:
        then: what is done; the window ends where it returns "end".
        change: of the gradients before each step.
    """

    def loop(run):
        for window in windows(run):
            total = window_count(run, window)
            for batch in window:
                loss = run.loss(run.model, batch)
                if loss.isfinite():
                    (loss * run.count(batch) / total).backward()
                elif then(run) == "end":
                    break
            change(run)
            step(run)

    return loop
