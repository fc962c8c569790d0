"""The report on one's own records: verdicts by commit, the worst first, violations with their
cases; what changed.
"""

from __future__ import annotations

import json

from gradcheck_suite.__main__ import main
from gradcheck_suite.core.case import Case, Plan
from gradcheck_suite.page import render
from gradcheck_suite.page.report import build
from tests.page.made_up import counterexample, record, verdict

BROKEN = {"kind": "gradient", "diagnosis": "mean-of-means", "explanation": "means are averaged"}


def run_at(reports, commit, monkeypatch):
    """Let records that follow come from a commit."""
    from gradcheck_suite.core import records

    monkeypatch.setattr(records, "this_commit", lambda: commit)


def test_a_violated_loop_is_what_the_page_says_first(tmp_path):
    verdict(tmp_path, "zero_")
    verdict(tmp_path, "mine.py:train", state="violated", violation=BROKEN)
    report = build(tmp_path)
    assert (
        report.answers[0].brief
        == "No: 1 of 2 loops and scripts violated: mine.py:train (mean-of-means)"
    )
    assert report.title == f"{tmp_path.parent.name}: {report.answers[0].brief}"
    assert [name for name, _ in report.answers[0].matrix.rows] == ["mine.py:train", "zero_"]
    assert not [section.key for section in report.sections if section.missing]


def test_own_verdicts_stand_by_commit_with_what_changed(tmp_path, monkeypatch):
    for commit, state in (("a" * 40, "holds"), ("b" * 40, "violated")):
        run_at(tmp_path, commit, monkeypatch)
        verdict(
            tmp_path,
            "mine.py:train",
            state=state,
            violation=BROKEN if state == "violated" else None,
        )
        verdict(tmp_path, "mine.py:other")
    first = build(tmp_path).answers[0]
    assert [column.split(",")[0] for column in first.matrix.columns] == ["bbbbbbb", "aaaaaaa"], (
        "a telephone shows the first columns"
    )
    assert first.matrix.rows == (
        ("mine.py:train", (("bad", ("mean-of-means",)), ("good", ("holds",)))),
        ("mine.py:other", (("good", ("holds",)), ("good", ("holds",)))),
    )
    assert "1 of 2 loops and scripts violated: mine.py:train" in first.brief
    assert "mine.py:train turned from holds to violated (mean-of-means)" in first.answer
    assert "mine.py:other turned" not in first.answer


def test_all_own_loops_that_hold_are_a_yes_and_an_unjudged_script_is_none(tmp_path):
    verdict(tmp_path, "mine.py:train")
    assert build(tmp_path).answers[0].brief == "Yes: 1 of 1 loop or script holds"
    record(tmp_path, "audit", loop="train.py", verdict="unjudged", windows=0, ranks=1, arguments=[])
    first = build(tmp_path).answers[0]
    assert first.brief == "Not known: 1 of 2 loops and scripts hold"
    assert first.matrix.rows[0][0] == "train.py"


def test_the_first_screen_says_what_is_violated_and_links_to_it(tmp_path):
    verdict(tmp_path, "my_loop.py:train", state="violated", violation=BROKEN)
    counterexample(tmp_path)
    overview = (
        render.report_html(build(tmp_path))
        .partition('id="overview"')[2]
        .partition('id="verification"')[0]
    )
    link = overview.partition('<a href="#violations/violation-my_loop.py-train-')[2].partition(
        "</li>"
    )[0]
    assert "my_loop.py:train" in link
    assert "mean-of-means" in link
    assert "weighs 1/2" in link


def test_the_violation_of_an_audit_has_a_page_with_its_lines(tmp_path):
    source = {
        "file": "train.py",
        "lines": [[8, "for x in data:", ""], [9, "    (loss / 4).backward()", "backward"]],
    }
    found = {
        **BROKEN,
        "step": 0,
        "where": "train.py:8",
        "backward": "train.py:9",
        "weights": [],
        "source": source,
    }
    record(tmp_path, "audit", loop="train.py", verdict="violated", windows=1, ranks=1, arguments=[],
           violation=found, violations=[found])  # fmt: skip
    (page,) = build(tmp_path).violations
    assert (page.loop, page.title) == ("train.py", "gradient: mean-of-means at step 0")
    assert page.source["lines"][1] == [9, "    (loss / 4).backward()", "backward"]


TRAINER = {
    "trainer": "mine",
    "about": "",
    "package": None,
    "version": None,
    "problem": "",
    "why": "",
}


def test_questions_to_trainers_stand_beside_loops(tmp_path):
    verdict(tmp_path, "zero_")
    case = Case("model.py:P", Plan((1, 2, 3), 2)).to_json()
    result = {"loop": "mine", "verdict": "violated", "violation": {**BROKEN, "case": case}}
    record(tmp_path, "trainer", **TRAINER, question="unequal counts", result=result)
    record(tmp_path, "trainer", **TRAINER, question="not asked", result=None)
    report = build(tmp_path)
    assert (
        report.answers[0].brief
        == "No: 1 of 2 loops and scripts violated: mine: unequal counts (mean-of-means)"
    )
    assert [section.key for section in report.sections] == ["verified", "trainers", "provenance"]


def test_the_command_writes_the_pages_with_links_to_the_cases(tmp_path, capsys):
    path = counterexample(tmp_path)
    verdict(tmp_path, "my_loop.py:train", state="violated", violation=BROKEN, stored=path.name)
    assert main(["report", "--reports", str(tmp_path)]) == 0
    assert "report.html" in capsys.readouterr().out
    link = f"counterexamples/{path.name}"
    assert f'<a href="{link}" rel="noreferrer">' in (tmp_path / "report.html").read_text()
    story = (tmp_path / "report.md").read_text()
    assert f"[Its case](<{link}>)" in story
    table = next(t for t in build(tmp_path).sections[0].tables if "counterexample" in t.columns)
    assert table.rows[0][table.columns.index("counterexample")] == path.name
    assert table.rows[0][table.columns.index("worst error / allowed")] == 0.125
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["violations"][0]["stored"] == link


def test_records_of_other_kinds_are_no_matter_of_this_page(tmp_path):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "zoo.jsonl").write_text("damaged\n")
    report = build(tmp_path)
    assert (report.answers, report.sections, report.problems) == ((), (), ())
    assert report.title.endswith("nothing was judged yet")


def test_what_changed_between_two_folders_is_told(tmp_path, capsys):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        verdict(folder, "zero_")
    verdict(new, "zero_", state="violated", violation=BROKEN)
    assert main(["report", "--compare", str(old), str(new)]) == 0
    assert (
        capsys.readouterr().out
        == "verify\n  zero_ float64 cpu: holds -> violated (mean-of-means)\n"
    )
    assert main(["report", "--compare", str(old), str(old)]) == 0
    assert capsys.readouterr().out == "nothing changed\n"
