"""Scripts whose first line says what is true of them get that verdict, under that name, at that line."""

from __future__ import annotations

import re

import pytest

from tests.auditing.running import audited
from tests.auditing.scripts_with_truth import WITH_TRUTH

TRUTH = re.compile(
    r"# TRUTH (?P<verdict>sound|faulty) ?(?P<name>(?!line )[a-z-]+)? ?(line (?P<line>\d+))?"
)


@pytest.fixture
def result_of(tmp_path):
    def result(name):
        path = tmp_path / f"{name}.py"
        path.write_text(WITH_TRUTH[name].lstrip())
        return audited(path)[0]

    return result


@pytest.mark.filterwarnings("ignore")
@pytest.mark.share(6)
@pytest.mark.parametrize("name", WITH_TRUTH)
def test_the_verdict_is_what_is_true_of_the_script(name, result_of):
    truth = TRUTH.match(WITH_TRUTH[name].lstrip())
    result = result_of(name)
    assert result.verdict == ("holds" if truth["verdict"] == "sound" else "violated"), result
    if truth["name"] is not None and truth["verdict"] == "faulty":
        # one cause has one name
        assert {one.diagnosis for one in result.violations} == {truth["name"]}, result
    if truth["line"] is not None:
        places = {str(one.where).rpartition(":")[2] for one in result.violations}
        assert truth["line"] in places, result


@pytest.mark.parametrize("name", ["m_s3a", "m_s3c", "m_s3e", "late", "prune"])
def test_elements_that_are_set_to_zero_after_each_pass_are_a_finding(name, result_of):
    result = result_of(name)
    (edited,) = [one for one in result.named_findings if one.name == "edited-gradient"]
    assert "nothing stands in them at the step" in edited.sentence
    windows = 6 if name == "late" else result.windows
    assert edited.steps == windows


def test_parameters_of_another_pass_are_said_as_they_were_measured(result_of):
    """In a window that is not computed again: both forwards had the same parameters."""
    (stale,) = result_of("f6_ema_swap").violations
    assert stale.step == 5
    assert (
        "when one backward pass of the window began than when another one did" in stale.explanation
    )
    assert "computed with different ones" not in stale.explanation
    assert "f6_ema_swap.py:29)" in stale.explanation
    assert "f6_ema_swap.py:24 or " in stale.explanation
    assert stale.explanation.endswith("also where the values are put back")


@pytest.mark.parametrize(("name", "step"), [("m_embreset", 4), ("m_stem", 5)])
def test_a_fault_of_rows_that_few_passes_reach_is_found_when_it_begins(name, step, result_of):
    assert min(one.step for one in result_of(name).violations) == step
