"""What the properties share: how many examples to draw, on which devices, and running a loop for its gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Verdict
from gradcheck_suite.execution.instance import Instance
from gradcheck_suite.execution.observer import Observation
from gradcheck_suite.execution.runner import run_loop
from gradcheck_suite.numerics.bounds import quick_bound
from gradcheck_suite.numerics.comparison import Difference, Layout, Vector, worst_difference
from gradcheck_suite.references.noise import Computation, float64_noise
from gradcheck_suite.references.torch_reference import gradients_of
from gradcheck_suite.schema.contract import Loop
from properties.tally import TALLY

Gradients = dict[str, torch.Tensor | None]

DEVICES = (
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(
                not torch.cuda.is_available(), reason=f"torch {torch.__version__} sees no CUDA device here"
            ),
        ],
    ),
)


def _jax_sees(platform: str) -> bool:
    try:
        return bool(jax.devices(platform))
    except RuntimeError:
        return False


JAX_PLATFORMS = (
    "cpu",
    pytest.param(
        "gpu",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not _jax_sees("gpu"), reason=f"jax {jax.__version__} sees no GPU here"),
        ],
    ),
)


def scaled(divisor: int) -> hypothesis.settings:
    """Return settings that draw a `divisor`-th of the profile's examples, at least one."""
    return hypothesis.settings(max_examples=max(1, hypothesis.settings().max_examples // divisor))


def observe(loop: Loop, instance: Instance) -> list[Observation]:
    """Run a loop and return what reached each of its steps; a loop that raises or steps wrongly fails the test."""
    __tracebackhide__ = True
    outcome = run_loop(loop, instance)
    if outcome.raised is not None:
        pytest.fail(f"the loop failed on {instance.case!r}: {outcome.raised}\n{outcome.trace}")
    taken, due = len(outcome.observations), instance.case.plan.steps
    assert taken == due, f"the loop took {taken} steps, should be {due}, on {instance.case!r}"
    return outcome.observations


def assert_holds(verdict: Verdict, name: str = "the loop") -> None:
    """Fail where a loop is violated or the references disagree; leave out what this machine cannot judge."""
    __tracebackhide__ = True
    if verdict.skipped:
        hypothesis.event(f"skipped: {verdict.skipped[:60]}")
        # every operation of the catalogue exists in float64
        assert verdict.case.dtype != "float64", f"{verdict.skipped}\n{verdict.case!r}"
        hypothesis.reject()
    assert verdict.finding is None, f"{verdict.finding}\n{verdict.case!r}"
    if (violation := verdict.violation) is not None:
        lines = (f"{name}: {violation.kind} ({violation.diagnosis}): {violation.explanation}", *violation.details)
        pytest.fail("\n".join((*lines, repr(verdict.case))))
    TALLY.judge(name, verdict.ratio)


def unequal(a: Gradients, b: Gradients) -> list[str]:
    """Return the parameters whose gradients differ by `==`, None standing for zeros and NaN equal to NaN."""
    return [name for name in a if not _same(a[name], b[name])]


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        present = b if a is None else a
        return present is None or not bool(present.count_nonzero())
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) and torch.equal(a.isnan(), b.isnan())


def bit_unequal(a: Gradients, b: Gradients) -> list[str]:
    """Return the parameters whose gradients differ in any bit, or of which just one is None."""
    return [name for name in a if _bits(a[name]) != _bits(b[name])]


def _bits(gradient: torch.Tensor | None) -> bytes | None:
    return None if gradient is None else gradient.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


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
        instance: whose window.
        window: which one.
        a: one accumulation.
        b: another.
        terms: micro-batches added up by the one with the most.
        scale: a factor that both carry.
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
    noise = float64_noise(Computation(instance, model, torch.float64), items, cuts, layout)
    return worst_difference(first, second, 2 * abs(scale) * (quick_bound(expected, terms) + noise))


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
