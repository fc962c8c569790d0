"""Loops that used to get a misleading name have a right one, or a general one with the numbers."""

from __future__ import annotations

import pytest

from gradcheck_suite import Case, Plan, check
from gradcheck_suite.core.contract import BUSY_RANKS, DENSE_GRADIENTS
from gradcheck_suite.core.faults import is_general
from gradcheck_suite.verification.probe_plans import first_cases, slopes_case
from tests.faults.misread import RANKS, RIGHT
from tests.one_problem import LINEAR


@pytest.mark.parametrize("loop", RIGHT, ids=lambda loop: loop.__name__)
def test_a_loop_gets_a_right_name_or_a_general_one(loop):
    ranks = RANKS.get(loop, 1)
    asked = frozenset({BUSY_RANKS, DENSE_GRADIENTS} if ranks > 1 else ()), "float64", "cpu", ranks
    ordinary = [Case(LINEAR, Plan((1, 2, 1), 3))] if ranks == 1 else []
    cases = (*first_cases(*asked), *ordinary, slopes_case(*asked))
    verdicts = (check(loop, case, assumes=asked[0]) for case in cases)
    found = next(verdict.violation for verdict in verdicts if verdict.violation is not None)
    assert f"{found.kind}/{found.diagnosis}" in RIGHT[loop] or is_general(found.kind, found.diagnosis), found
