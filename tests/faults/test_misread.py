"""Loops that used to get a misleading name have a right one, or a general one with the numbers, on
the probes.
"""

from __future__ import annotations

import pytest

from gradcheck_suite import check
from gradcheck_suite.core.faults import is_general
from gradcheck_suite.verification.search import first_cases, slopes_case
from tests.faults.misread import RIGHT, float32_copies_from_the_second_on

# the parameters of the probes are numbers of float32, so that a search alone shows the copies
ON_PROBES = [loop for loop in RIGHT if loop is not float32_copies_from_the_second_on]


@pytest.mark.parametrize("loop", ON_PROBES, ids=lambda loop: loop.__name__)
@pytest.mark.full
def test_a_loop_gets_a_right_name_or_a_general_one(loop):
    asked = frozenset(), "float64", "cpu"
    verdicts = (check(loop, case) for case in (*first_cases(*asked), slopes_case(*asked)))
    found = next(verdict.violation for verdict in verdicts if verdict.violation is not None)
    assert f"{found.kind}/{found.diagnosis}" in RIGHT[loop] or is_general(
        found.kind, found.diagnosis
    ), found
