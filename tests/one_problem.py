"""One small problem in place of drawn ones: a search then compiles one program. What is drawn is tested elsewhere."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from gradcheck_suite.generation.cases import cases
from gradcheck_suite.schema.spec import Input, Layer, Loss, ProblemSpec
from gradcheck_suite.verification import verify as verification

LINEAR = ProblemSpec(Input("vector", size=2), (Layer("linear", features=1, bias=False),), Loss("mse", reduction="mean"))


def draw_only_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `verify` draw plans alone, on `LINEAR` unless a problem is given."""
    monkeypatch.setattr(verification, "cases", lambda **o: cases(**{**o, "problem": o["problem"] or st.just(LINEAR)}))
    # what it keeps is of the other strategy
    monkeypatch.setattr(verification, "_cases", verification._cases.__wrapped__)
