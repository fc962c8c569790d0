"""Judging one loop on one case: what divergence, drift and a broken large batch are, and are not."""

from __future__ import annotations

import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, check
from gradcheck_suite.loops import MODES

CHAIN = (*(Layer("prelu", per_feature=False),) * 3, Layer("linear", features=2, bias=False))
DIVERGES = Case(
    ProblemSpec(Input("vector", size=4), CHAIN, Loss("mse", reduction="sum")),
    Plan((8,) * 24, 1, 3),
    seed=6,
)
"""Four factors in a row and a summed loss: with a learning rate of 0.1 the parameters run away within a few steps."""


def _last_parameters(optimizer: str) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []

    def loop(run):
        MODES["zero_"](run)
        kept.extend(p.detach() for p in run.model.parameters())

    check(loop, DIVERGES.replace(optimizer=optimizer))
    return kept


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov"])
def test_a_sound_loop_that_diverges_is_not_blamed(optimizer):
    assert not all(bool(p.isfinite().all()) for p in _last_parameters(optimizer)), "the case no longer diverges"
    verdict = check(MODES["set_to_none"], DIVERGES.replace(optimizer=optimizer))
    assert verdict.violation is None
    assert verdict.ratio > 0


def test_a_fault_before_the_divergence_is_still_found():
    def no_divide(run):
        for batch in run.loader:
            run.optimizer.zero_grad()
            (2 * run.loss(run.model, batch)).backward()
            run.optimizer.step()

    verdict = check(no_divide, DIVERGES.replace(optimizer="sgd", plan=Plan((8,) * 24, 1, 1)))
    assert verdict.violation is not None
    assert verdict.violation.diagnosis == "wrong-scale"
    assert verdict.violation.window == 0
