"""Loops that are wrong for some parameters or some models only: a few hundred drawn cases hold one that shows it.

Every loop divides the accumulated gradient of the summed loss by the window's count, or that of a sum by a loss scale,
parameter by parameter, or is the same loop with one fault. Only the cases that the fault concerns are run.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradcheck_suite import Case, cases, check
from gradcheck_suite.loops.reset_modes import backward_window, windows
from gradcheck_suite.strategies.drawing import draw_cases

LOSS_SCALE = 4.0
Parameters = Callable[[torch.nn.Module], list[torch.nn.Parameter]]


def _every(model):
    return list(model.parameters())


def loop_that_divides(parameters: Parameters, *, training: bool = True, keys: frozenset[str] | None = None):
    """Return the loop with the parameters that it divides, the mode it trains in, and the keys it keeps of a batch."""

    def loop(run):
        run.model.train(training)
        for window in windows(run):
            counted = [(batch, count) for batch in window if (count := float(run.count(batch)))]
            for batch, count in counted:
                if keys is not None:
                    batch = {k: v if k in keys else torch.zeros_like(v) for k, v in batch.items()}
                loss = run.loss(run.model, batch)
                (loss * (count if run.reduction == "mean" else LOSS_SCALE)).backward()
            for p in parameters(run.model):
                if p.grad is not None:
                    p.grad /= sum(count for _, count in counted) if run.reduction == "mean" else LOSS_SCALE
            run.optimizer.step()
            run.optimizer.zero_grad()

    return loop


def loop_that_resets(parameters):
    """Return the loop with the parameters of a run whose gradients it resets."""

    def loop(run):
        for window in windows(run):
            backward_window(run, window)
            run.optimizer.step()
            for p in parameters(run):
                p.grad = None

    return loop


def _has(*kinds: str) -> Callable[[Case], bool]:
    return lambda case: not set(kinds).isdisjoint(case.problem.layer_kinds)


FAULTS = {
    "resets the first parameter group only": (
        loop_that_resets(lambda run: run.optimizer.param_groups[0]["params"]),
        lambda case: case.groups > 1,
    ),
    "divides a tied parameter once for each name": (
        loop_that_divides(lambda model: [p for _, p in model.named_parameters(remove_duplicate=False)]),
        lambda case: bool(case.problem.ties),
    ),
    "skips parameters without dimensions": (
        loop_that_divides(lambda model: [p for p in model.parameters() if p.ndim]),
        _has("scale"),
    ),
    "skips parameters of more than two axes": (
        loop_that_divides(lambda model: [p for p in model.parameters() if p.ndim <= 2]),
        _has("conv1d", "conv2d"),
    ),
    "divides the first twelve parameters only": (
        loop_that_divides(lambda model: _every(model)[:12]),
        lambda case: case.problem.layer_kinds.count("linear") > 6,
    ),
    "skips sparse gradients": (
        loop_that_divides(lambda model: [p for p in model.parameters() if p.grad is not None and not p.grad.is_sparse]),
        lambda case: any(layer.kind == "embedding" and layer.o["sparse"] for layer in case.problem.layers),
    ),
    "trains in eval mode": (loop_that_divides(_every, training=False), _has("train_scale")),
    "drops the second input": (loop_that_divides(_every, keys=frozenset({"x", "target"})), _has("second_input")),
}
"""What each loop does wrong -> the loop, and whether a case concerns it."""


@pytest.fixture(scope="module")
def drawn():
    """The cases of one run, as many as `verify` draws."""
    return draw_cases(cases(), examples=200, seed_value=0)


@pytest.mark.parametrize("fault", FAULTS)
def test_cases_of_one_run_show_the_fault(fault, drawn):
    loop, concerned = FAULTS[fault]
    chosen = [case for case in drawn if concerned(case)]
    assert any(check(loop, case, shrinking=True).violation for case in chosen), f"none of {len(chosen)} cases shows it"
    for case in chosen[:3]:
        for sound in (loop_that_divides(_every), loop_that_resets(lambda run: run.model.parameters())):
            verdict = check(sound, case)
            assert verdict.holds, verdict
