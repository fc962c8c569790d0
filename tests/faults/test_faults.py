"""Every planted fault is found and named on a small case; a search finds it among drawn cases and shrinks it."""

from __future__ import annotations

import pytest

from gradcheck_suite import check, verify
from properties.devices import DEVICES
from studies.zoo.bugs.micro_batches import mean_of_means
from tests.faults.loops import WANTED, updates_by_hand_as_well
from tests.faults.small_cases import diagnoses, until

EXAMPLES = 200
SEARCHED = (updates_by_hand_as_well,)
"""Searched for in every run of the tests, as are faults of gradients in `studies/tests/zoo`."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loop", WANTED, ids=lambda loop: loop.__name__)
def test_a_fault_is_found_and_named_on_a_small_case(loop, device):
    names = list(until(WANTED[loop], diagnoses(loop, device=device)))
    assert WANTED[loop].intersection(names), names


@pytest.mark.parametrize(
    "loop",
    [pytest.param(loop, marks=() if loop in SEARCHED else pytest.mark.full) for loop in WANTED],
    ids=lambda loop: loop.__name__,
)
def test_a_fault_is_found_named_and_shrunk(loop):
    result = verify(loop, examples=EXAMPLES)
    violation = result.violation
    assert violation is not None, "not found"
    assert result.violation.found_after is not None
    assert result.violation.found_after <= EXAMPLES
    assert f"{violation.kind}/{violation.diagnosis}" in WANTED[loop], violation.explanation

    case = violation.case
    assert len(case.plan.windows) <= 2, case
    assert len(case.plan.micro_batches) <= 3, case
    assert len(case.problem.layer_kinds) == 1, case

    again = check(loop, case).violation
    assert again is not None
    assert (again.kind, again.diagnosis) == (violation.kind, violation.diagnosis)


@pytest.mark.full
def test_the_same_seed_finds_the_same_smallest_case():
    first, second = (verify(mean_of_means, examples=EXAMPLES) for _ in range(2))
    assert first.violation.case == second.violation.case
    assert first.violation.found_after == second.violation.found_after
