"""A name is held to the case that is shown: its weights or elements must give that gradient."""

from __future__ import annotations

import pytest

from gradcheck_suite.core.faults import names_of
from gradcheck_suite.verification.verify import verify
from tests.verification import misnamed
from tests.verification.misnamed import NAMES

DEFAULT = (misnamed.refills_before_the_backward, misnamed.keeps_what_is_not_finite)
"""The loops that are verified in every run of the tests."""
OF_RANKS = (misnamed.a_rank_is_late,)
SOUND = (misnamed.refills_after_the_backward, misnamed.writes_and_restores)


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(loop, marks=() if loop in DEFAULT else pytest.mark.full)
        for loop in NAMES
        if loop not in OF_RANKS
    ],
    ids=lambda loop: loop.__name__,
)
def test_a_fault_that_looks_like_another_has_a_right_name_or_a_general_one(loop):
    violation = verify(loop, examples=60).violation
    assert names_of(violation.diagnosis) <= NAMES[loop], violation.explanation


@pytest.mark.full
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("loop", OF_RANKS, ids=lambda loop: loop.__name__)
def test_a_fault_of_ranks_that_looks_like_another_has_a_right_name(loop):
    violation = verify(loop, examples=20, ranks=2).violation
    assert names_of(violation.diagnosis) <= NAMES[loop], violation.explanation


@pytest.mark.full
@pytest.mark.parametrize("loop", SOUND, ids=lambda loop: loop.__name__)
def test_the_sound_loop_beside_it_holds(loop):
    result = verify(loop, examples=60)
    assert result.violation is None, result.violation.explanation
