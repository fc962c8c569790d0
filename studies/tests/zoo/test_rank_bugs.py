"""The bugs between ranks: each is found on two processes under its own name, and the sound loops
are not blamed.
"""

from __future__ import annotations

import pytest

from gradcheck_suite.core.contract import BUSY_RANKS
from gradcheck_suite.verification.check import check
from gradcheck_suite.verification.search import first_cases
from gradcheck_suite.verification.verify import verify
from studies.zoo import BUGS

pytestmark = pytest.mark.usefixtures("ranks")
ON_PROBES = {
    "mean-of-ranks-means": "mean-of-means",
    "local-count": "mean-of-means",
    "count-gathered-gradient-averaged": "wrong-scale",
    "rank-0-count-broadcast": "wrong-scale",
    "no-sync-left-on-at-the-step": "not-reduced",
    "buckets-reduced-before-the-last-backward": "not-reduced",
    "running-sum-reduced-each-micro-batch": "rescaled-accumulator",
}
"""Bugs that the first weight probes show, with the diagnosis there; `full` searches drawn cases for all of them."""


@pytest.mark.full
def test_bugs_between_ranks_are_named_on_the_first_weight_probes():
    for name, diagnosis in ON_PROBES.items():
        bug = BUGS[name]
        probes = first_cases(frozenset(bug.assumes), "float64", "cpu", bug.ranks)
        verdicts = (check(bug.loop, case, assumes=bug.assumes) for case in probes)
        found = next(verdict.violation for verdict in verdicts if verdict.violation)
        assert (found.kind, found.diagnosis) == ("gradient", diagnosis), (name, found.explanation)


@pytest.mark.full
def test_a_bug_on_three_ranks_is_shrunk_to_two():
    bug = BUGS["count-gathered-gradient-averaged"]
    found = verify(bug.loop, examples=40, assumes=(*bug.assumes, BUSY_RANKS), ranks=3).violation
    assert found.diagnosis == "wrong-scale"
    assert found.case.plan.world_size == 2
