"""Every claim about gradient zeroing and every printed loop comes to the verdict that the report gives it."""

from __future__ import annotations

import pytest

from gradcheck_suite.studies import claims, step_times
from gradcheck_suite.studies.claims import CLAIMS, PRINTED, SOURCES, Finding, verify_printed
from properties.assertions import assert_equal
from tests.one_problem import draw_only_linear

FEW = 8
"""Cases for each verified loop, on one small model; `tox -e full` runs as many as the records, on drawn models."""
SLOW = ("C1.7", "C3.2", "C3.3", "C3.5")
"""Claims that `tox -e full` alone comes to."""
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


@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.full] * (n in SLOW)) for n in VERDICTS])
def test_a_claim_comes_to_its_verdict(number, monkeypatch):
    draw_only_linear(monkeypatch)
    monkeypatch.setattr(claims, "CASES", FEW)
    monkeypatch.setattr(step_times, "PARAMETERS", {"cpu": (10**4,)})
    monkeypatch.setattr(step_times, "PAIRS", 5)
    monkeypatch.setattr(step_times, "flush", lambda device: lambda: None)
    assert_verdict(number)


@pytest.mark.full
@pytest.mark.parametrize("number", ["C1.8", "C3.2", "C3.3"])
def test_a_claim_comes_to_its_verdict_over_all_its_cases(number):
    assert_verdict(number)


def assert_verdict(number: str) -> None:
    """Fail unless a claim comes to its verdict, with figures, a sentence, and a counterexample where it is refuted."""
    __tracebackhide__ = True
    finding = CLAIMS[number].check()
    assert_equal(what="verdict", observed=finding.verdict, expected=VERDICTS[number], case=number)
    assert finding.figures, f"{number}: a claim needs figures"
    assert finding.sentence.endswith(".")
    if finding.verdict == "refuted":
        assert finding.counterexample, f"{number}: a refuted claim needs a counterexample"


@pytest.mark.parametrize("examples", [FEW, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("printed", PRINTED, ids=lambda printed: printed.number)
def test_a_printed_loop_holds_only_under_what_it_relies_on(printed, examples, monkeypatch):
    if examples == FEW:
        draw_only_linear(monkeypatch)
    result = verify_printed(printed, examples=examples)
    assert result.within.holds, result.within.violation
    assert not result.bare.holds
    assert result.bare.violation.diagnosis


def test_a_condition_goes_with_a_conditional_verdict_alone():
    with pytest.raises(AssertionError):
        Finding("conditional", "s.")
    with pytest.raises(AssertionError):
        Finding("confirmed", "s.", condition="sometimes")
