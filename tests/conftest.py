"""What tests of several packages share."""

from __future__ import annotations

import os

import pytest

# commands that tests run would each start a second process, which imports torch
os.environ.setdefault("GRADCHECK_SUITE_PROCESSES", "1")


@pytest.fixture
def many_draws(monkeypatch):
    """As many draws for a violation as `verify` makes outside of the tests."""
    from gradcheck_suite.core.comparison import MANY_DRAWS

    for module in ("large_batch", "rounding"):
        monkeypatch.setattr(f"gradcheck_suite.reference.{module}.MANY_DRAWS", MANY_DRAWS)


@pytest.fixture
def only_linear(monkeypatch):
    """Let `verify` draw plans alone, on one small problem, so that next to nothing is compiled."""
    from tests.one_problem import draw_only_linear

    draw_only_linear(monkeypatch)


@pytest.fixture
def without_second_opinion(monkeypatch):
    """Let `verify` ask JAX nothing about users' problems, so that none is exported and compiled."""
    from gradcheck_suite.verification import second_opinion

    def nothing(*_, **_others):
        return second_opinion.SecondOpinion()

    monkeypatch.setattr(second_opinion, "second_opinion", nothing)


@pytest.fixture(scope="session")
def ranks():
    """Ranks that start once for all tests that need them: it takes seconds to import torch."""
    from gradcheck_suite.run.ranks import kept_ranks

    with kept_ranks():
        yield
