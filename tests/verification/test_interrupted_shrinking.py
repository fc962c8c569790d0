"""A search that is stopped while it shrinks keeps the smallest case so far, and says that a smaller
one may exist.
"""

from __future__ import annotations

import pytest

from gradcheck_suite import verify
from gradcheck_suite.core.results import result_lines
from gradcheck_suite.strategies.cases import size_of
from gradcheck_suite.verification.search import SearchState
from tests.verification.planted import before_step

pytestmark = pytest.mark.usefixtures("only_linear")


@before_step
def LOOP(run):  # noqa: N802
    """Double one column in a model without a bias, which no probe has: the fault shows on drawn
    cases alone.
    """
    for p in run.model.parameters():
        if (
            p.grad.ndim == 2
            and p.grad.shape[1] > 1
            and not any(p.ndim == 1 for p in run.model.parameters())
        ):
            p.grad[:, 1] *= 2


def last_line(result):
    return result_lines(result)[-1].strip()


@pytest.fixture
def seen(monkeypatch):
    """The sizes of the violated cases, in the order in which the search met them."""
    sizes, check = [], SearchState.check

    def note(self, case, *, shrinking=False):
        verdict = check(self, case, shrinking=shrinking)
        if verdict.violation is not None and shrinking:
            sizes.append(size_of(case))
            if len(sizes) == note.interrupt_at:
                raise KeyboardInterrupt
        return verdict

    note.interrupt_at = None
    monkeypatch.setattr(SearchState, "check", note)
    return sizes, note


@pytest.mark.full
def test_an_interrupt_keeps_the_smallest_case_so_far(seen):
    sizes, note = seen
    whole = verify(LOOP, examples=30)
    assert whole.shrinking is None
    assert last_line(whole).partition(";")[0].endswith("then shrunk to this one")
    sizes.clear()
    note.interrupt_at = 5
    result = verify(LOOP, examples=30)
    assert result.interrupted
    assert result.violation.diagnosis == whole.violation.diagnosis
    # the last one raised the interrupt, and was never judged
    assert size_of(result.violation.case) == min(sizes[:-1])
    assert (
        last_line(result).split("; ")[1] == "shrinking was interrupted, so a smaller case may exist"
    )
    assert result.to_json()["shrinking"] == "shrinking was interrupted, so a smaller case may exist"


@before_step
def _doubles(run):
    for p in run.model.parameters():
        p.grad.mul_(2 if p.grad.abs().max() > 1e3 else 1)


def test_an_interrupt_keeps_what_a_probe_shows(monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("gradcheck_suite.verification.search.smallest_probe", interrupted)
    result = verify(_doubles, examples=30)
    assert result.interrupted
    assert result.violation is not None
