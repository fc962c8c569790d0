"""Every claim about gradient zeroing comes to the verdict that the report gives it; the printed loops to theirs."""

from __future__ import annotations

import pytest

from gradcheck_suite.evidence.claims import CLAIMS, SOURCES
from gradcheck_suite.evidence.claims.loops import PRINTED
from gradcheck_suite.evidence.claims.printed import verify_printed
from gradcheck_suite.evidence.claims.record import Finding

VERDICTS = {
    "C1.1": "confirmed",
    "C1.2": "confirmed",
    "C1.3": "conditional",
    "C1.4": "conditional",
    "C1.5": "conditional",
    "C1.6": "conditional",
    "C1.7": "conditional",
    "C1.8": "conditional",
    "C1.9": "confirmed",
    "C2.1": "conditional",
    "C2.2": "conditional",
    "C2.3": "refuted",
    "C2.4": "confirmed",
    "C2.5": "refuted",
    "C2.6": "confirmed",
    "C3.1": "confirmed",
    "C3.2": "conditional",
    "C3.3": "conditional",
    "C3.4": "confirmed",
    "C3.5": "conditional",
}


def test_every_claim_is_tested():
    assert VERDICTS.keys() == CLAIMS.keys()
    assert {int(number[1]) for number in CLAIMS} == SOURCES.keys()


@pytest.mark.parametrize("number", VERDICTS)
def test_a_claim_comes_to_its_verdict(number):
    finding = CLAIMS[number].check()
    assert finding.verdict == VERDICTS[number]
    assert finding.figures
    assert finding.sentence.endswith(".")
    if finding.verdict == "refuted":
        assert finding.counterexample, "a refuted claim needs a case against it"


@pytest.mark.parametrize("printed", PRINTED, ids=lambda printed: printed.number)
def test_a_printed_loop_holds_within_what_it_needs_and_needs_it(printed):
    result = verify_printed(printed, examples=60)
    assert result.within.holds, result.within.violation
    assert not result.bare.holds
    assert result.bare.violation.diagnosis


def test_a_condition_goes_with_a_conditional_verdict_alone():
    with pytest.raises(AssertionError):
        Finding("conditional", "s.")
    with pytest.raises(AssertionError):
        Finding("confirmed", "s.", condition="sometimes")
