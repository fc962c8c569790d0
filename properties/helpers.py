"""What the properties share beside assertions: numbers of examples, and running a loop for its gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec
from gradcheck_suite.core.comparison import Difference, Layout, Vector, quick_bound, worst_difference
from gradcheck_suite.core.contract import Loop
from gradcheck_suite.reference.large_batch import gradients_of
from gradcheck_suite.reference.rounding import Computation, RoundingErrors, cancellation
from gradcheck_suite.run.instance import Instance
from gradcheck_suite.run.observer import Observation
from properties.assertions import Gradients
from properties.devices import repeatable_run

REGRESSION = ProblemSpec(
    Input("vector", size=2), (Layer("linear", features=1, bias=True),), Loss("mse", reduction="mean")
)
"""Linear regression on two features."""
TWO_WINDOWS = Case(REGRESSION, Plan((1, 3, 2), 2, 2), seed=1)
"""Two epochs of two windows with unequal micro-batches; the last window is short."""


def scaled(divisor: int) -> hypothesis.settings:
    """Return settings that draw a `divisor`-th of the profile's examples, at least one."""
    return hypothesis.settings(max_examples=max(1, hypothesis.settings().max_examples // divisor))


def observe(loop: Loop, instance: Instance) -> list[Observation]:
    """Run a loop and return the gradients at each of its steps; fail where it raises or miscounts steps."""
    __tracebackhide__ = True
    outcome = repeatable_run(loop, instance)
    if outcome.raised is not None:
        pytest.fail(f"the loop raised {outcome.raised}, but should train [{instance.case!r}]\n{outcome.trace}")
    taken, due = len(outcome.observations), instance.case.plan.steps
    assert taken == due, f"steps={taken}, but should be {due} [{instance.case!r}]"
    return outcome.observations


def flat(gradients: Gradients, layout: Layout) -> Vector:
    """Return gradients as one float64 vector, zeros standing for None."""
    parts = [
        np.zeros(size) if (g := gradients[name]) is None else g.detach().to("cpu", torch.float64).numpy().reshape(-1)
        for name, size in zip(layout.names, layout.sizes, strict=True)
    ]
    return np.concatenate(parts)


def apart(instance: Instance, window: int, a: Gradients, b: Gradients, *, terms: int, scale: float = 1.0) -> Difference:
    """Compare two float64 accumulations of a window's gradient, within what rounding allows each; torch alone.

    Args:
        instance: the instance.
        window: index of the window.
        a: gradients of one accumulation.
        b: gradients of another accumulation.
        terms: the greater number of micro-batches that one of them adds up.
        scale: a factor on both accumulations.
    """
    model, items = instance.model(), instance.case.plan.window_items(window)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    layout = Layout(tuple(shapes), tuple(shapes.values()))
    first, second = flat(a, layout), flat(b, layout)
    expected = flat(gradients_of(instance, model, items), layout)
    quick = worst_difference(first, second, 2 * abs(scale) * quick_bound(expected, terms))
    if quick.ratio <= 1:
        return quick
    cuts = [instance.case.plan.items(j) for j in instance.case.plan.windows[window]]
    computation = Computation(instance, model, torch.float64)
    noise = RoundingErrors(computation, [(items, 1.0)], torch.float64).noise()
    whole = quick_bound(expected, terms) + cancellation(computation, items, cuts, layout) + noise
    return worst_difference(first, second, 2 * abs(scale) * whole)


def with_items(instance: Instance, case: Case, items: list[int]) -> Instance:
    """Return the instance of `case` on chosen items of another instance, in a given order."""
    data = {name: tensor[torch.tensor(items, device=tensor.device)] for name, tensor in instance.data.items()}
    arrays = None if instance.arrays is None else {n: a[np.array(items)] for n, a in instance.arrays.items()}
    return replace(instance, case=case, data=data, arrays=arrays)


def on_leaves(instance: Instance, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Instance:
    """Return the instance with every array of its data changed."""
    return replace(instance, data={name: change(name, tensor.clone()) for name, tensor in instance.data.items()})


def with_loss(instance: Instance, loss: Callable[[torch.nn.Module, Any], torch.Tensor]) -> Instance:
    """Return the instance with another loss; its references are no longer meaningful."""
    return replace(instance, problem=replace(instance.problem, loss=loss))
