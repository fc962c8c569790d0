"""Small problems in place of drawn ones: a search on one compiles one program.

What is drawn is tested elsewhere.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from gradcheck_suite.core.case import Input, Layer, Loss, ProblemSpec
from gradcheck_suite.strategies.cases import cases
from gradcheck_suite.verification import verify as verification

LINEAR = ProblemSpec(
    Input("vector", size=2),
    (Layer("linear", features=1, bias=False),),
    Loss("mse", reduction="mean"),
)
OVERFLOWING_SUM = ProblemSpec(
    Input("vector", size=2, values="large"),
    (
        Layer("second_input"),
        Layer("scale"),
        Layer("unused", features=1),
        Layer("linear", bias=False, features=1),
    ),
    Loss("mse", reduction="mean"),
)
"""The gradient of the mean over five items is 32000, so that of their sum is infinite in float16."""

MEAN_OF_MEANS = """
def halves(run):
    for _ in range(run.epochs):
        for i, batch in enumerate(run.loader):
            (run.loss(run.model, batch) / run.accumulation_steps).backward()
            if (i + 1) % run.accumulation_steps == 0 or i + 1 == len(run.loader):
                run.optimizer.step()
                run.optimizer.zero_grad()
"""
"""The text of the README's loop, whose micro-batches' means have equal weights."""


def draw_only_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `verify` draw plans alone, on `LINEAR` unless a problem is given."""
    monkeypatch.setattr(
        verification,
        "cases",
        lambda **o: cases(**{**o, "problem": o["problem"] or st.just(LINEAR)}),
    )
    # what it keeps is of the other strategy
    monkeypatch.setattr(verification, "_cases", verification._cases.__wrapped__)
