"""Each kind of public report is judged rightly: the verdict, the diagnosis, and what is worth
knowing beside it.
"""

from __future__ import annotations

import pytest

from tests.auditing.reported import REPORTED
from tests.auditing.running import audited


@pytest.mark.filterwarnings(
    "ignore:optimizer contains a parameter group", "ignore:Detected call of"
)
@pytest.mark.parametrize("name", REPORTED)
def test_a_reported_script_is_judged_rightly(name, tmp_path):
    script, said = REPORTED[name]
    path = tmp_path / f"{name}.py"
    path.write_text(script.text)
    result, _ = audited(path)
    assert (result.verdict, [v.diagnosis for v in result.violations]) == (
        script.verdict,
        [*script.said] if script.verdict == "violated" else [],
    ), result
    if script.verdict == "unjudged":
        assert script.said[0] in result.unjudged
    assert any(said.removeprefix("!") in finding for finding in (*result.findings, "")) == (
        said[:1] != "!"
    ), result
    told = len(result.violations) or result.windows == result.steps or script.verdict == "unjudged"
    assert told or any("not judged" in finding for finding in result.findings), result


@pytest.mark.parametrize(
    ("name", "line", "done"),
    [
        ("faulty_skipped_and_reset", "zero_grad()\n        continue", "reset"),
        ("faulty_most_parameters_reset", ".grad = None", "reset"),
        ("faulty_zeroed_in_place", ".grad.zero_()", "reset"),
        ("faulty_zeroed_together", "_foreach_zero_", "reset"),
        ("faulty_clipped_inside", "clip()  # each", "changed"),
    ],
)
def test_the_line_that_lost_or_changed_a_gradient_is_named(name, line, done, tmp_path):
    path = tmp_path / f"{name}.py"
    path.write_text(REPORTED[name][0].text)
    number = 1 + path.read_text()[: path.read_text().index(line)].count("\n")
    assert f"{done} at {path}:{number})" in audited(path)[0].violation.explanation


@pytest.mark.parametrize(
    ("name", "hit"),
    [
        ("faulty_most_parameters_reset", "0.weight, 0.bias, 2.weight"),
        ("faulty_zeroed_in_place", "0.weight, 0.bias"),
    ],
)
def test_the_parameters_that_were_hit_are_named(name, hit, tmp_path):
    path = tmp_path / "hit.py"
    path.write_text(REPORTED[name][0].text)
    assert f"in {hit}: only" in audited(path)[0].violation.explanation


@pytest.mark.parametrize("coefficient", ["", "3 * "])
def test_the_line_of_a_term_beside_a_right_one_is_its_own(coefficient, tmp_path):
    text, path = REPORTED["faulty_means_beside_a_sum"][0].text, tmp_path / "beside.py"
    path.write_text(text.replace("F.cross", f"{coefficient}F.cross"))
    assert (
        audited(path)[0].violation.where
        == f"{path}:{1 + text.partition('# means')[0].count(chr(10))}"
    )
