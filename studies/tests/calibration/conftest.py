"""One small problem that is drawn in place of random ones, so that next to nothing is compiled."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from gradcheck_suite.core.case import Input, Layer, Loss, ProblemSpec
from gradcheck_suite.strategies.cases import cases
from studies import calibration


def linear(reduction: str) -> ProblemSpec:
    return ProblemSpec(
        Input("vector", size=2),
        (Layer("linear", features=1, bias=False),),
        Loss("mse", reduction=reduction),
    )


@pytest.fixture
def only_linear(monkeypatch):
    def drawn(**options):
        summed = "sum-reduction" in options["assumes"]
        return cases(**options, problem=st.just(linear("sum" if summed else "mean")))

    monkeypatch.setattr(calibration, "cases", drawn)
