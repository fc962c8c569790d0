"""A search that is stopped while it shrinks keeps the smallest case so far, and says that a smaller one may exist."""

from __future__ import annotations

import pytest

from gradcheck_suite import verify
from gradcheck_suite.cli.verdict_text import result_lines
from gradcheck_suite.core.contract import VerifyOptions
from gradcheck_suite.strategies.cases import size_of
from gradcheck_suite.studies.zoo import BUGS
from gradcheck_suite.verification.verify import Search

pytestmark = pytest.mark.usefixtures("only_linear")
LOOP = BUGS["tail-dropped"].loop


def last_line(result):
    return result_lines(result, None, VerifyOptions(), 10)[-1].strip()


@pytest.fixture
def seen(monkeypatch):
    """The sizes of the violated cases, in the order in which the search met them."""
    sizes, check = [], Search._check

    def note(self, case, *, shrinking=False):
        verdict = check(self, case, shrinking=shrinking)
        if verdict.violation is not None and shrinking:
            sizes.append(size_of(case))
            if len(sizes) == note.interrupt_at:
                raise KeyboardInterrupt
        return verdict

    note.interrupt_at = None
    monkeypatch.setattr(Search, "_check", note)
    return sizes, note


def test_an_interrupt_keeps_the_smallest_case_so_far(seen):
    sizes, note = seen
    whole = verify(LOOP, examples=30)
    assert whole.shrinking is None
    assert last_line(whole).endswith("then shrunk to this one")
    sizes.clear()
    note.interrupt_at = 5
    result = verify(LOOP, examples=30)
    assert result.interrupted
    assert result.violation.diagnosis == whole.violation.diagnosis
    # the last one raised the interrupt, and was never judged
    assert size_of(result.violation.case) == min(sizes[:-1])
    assert last_line(result).endswith("; shrinking was interrupted, so a smaller case may exist")
    assert result.to_json()["shrinking"] == "shrinking was interrupted, so a smaller case may exist"


def test_a_second_interrupt_keeps_the_first_case(seen, monkeypatch):
    _, note = seen
    note.interrupt_at = 5

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "settle", interrupted)
    result = verify(LOOP, examples=30)
    assert result.interrupted
    assert result.violation is not None


def test_a_time_limit_is_said(monkeypatch):
    monkeypatch.setattr("gradcheck_suite.verification.verify.SHRINK_SECONDS", 0.0)
    result = verify(LOOP, examples=30)
    assert not result.interrupted
    assert last_line(result).endswith("; shrinking stopped after 0 s, so a smaller case may exist")
