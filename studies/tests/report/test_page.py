"""The page of the studies' report: every answer with its figures, what is older than its code, what
is missing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gradcheck_suite.core.records import records_path
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.page import render as pages
from gradcheck_suite.page.render import with_links
from studies.tests.report.made_up import build, fill
from studies.zoo import BUGS
from tests.page.test_page import MOST_BYTES, read

KEPT = Path(__file__).parents[3] / "reports"


def test_almost_every_bug_of_the_zoo_has_a_link():
    cited = {name for bug in BUGS.values() for name in bug.citations if "#" in name}
    # of which fork?
    assert {name for name in cited if "<a " not in with_links(name)} <= {"AnimaLoraStudio#305"}


def test_every_page_is_there_with_its_figures(tmp_path):
    fill(tmp_path)
    text = "".join(read(pages.report_html(build(tmp_path))).text)
    for expected in (
        "Does every mode hold?",
        f"Yes, 2 of {len(MODES)} modes were verified and hold: in 200 random cases each, the gradient is that of one "
        "large batch",
        "Of 1 widely read claims 0 are true (confirmed), 1 true under a condition, 0 false (refuted).",
        "True where: it rains",
        "200 cases for each of",
        "There are no records of a CUDA device",
        "1 of 1 reported bugs",
        "a processor, 2 cores",
        "gradcheck-suite verify",
    ):
        assert expected in text, expected


@pytest.mark.full
def test_figures_older_than_their_code_have_a_badge(tmp_path):
    fill(tmp_path)
    badge = ">older than the code</span>"
    assert badge not in pages.report_html(build(tmp_path))
    path = records_path(tmp_path, "zoo")
    path.write_text(json.dumps({**json.loads(path.read_text()), "judge": "0" * 16}) + "\n")
    html = pages.report_html(build(tmp_path))
    assert html.count(badge) == 1
    assert (
        html.index('id="zoo-title"')
        < html.index(badge)
        < html.index('class="panel"', html.index('id="zoo-title"'))
    )
    markdown = pages.report_markdown(build(tmp_path), lambda figure: "")
    assert markdown.count("**older than the code it speaks of**") == 1
    # of two runs one is older: the newest, whose command the line shows, need not be
    path = records_path(tmp_path, "verify")
    older, *others = path.read_text().splitlines()
    older = json.dumps(
        {**json.loads(older), "judge": "0" * 16, "time": "2020-01-02T03:04:05+00:00"}
    )
    path.write_text("\n".join([older, *others]) + "\n")
    markdown, html = (
        pages.report_markdown(build(tmp_path), lambda figure: ""),
        pages.report_html(build(tmp_path)),
    )
    # the answer, the section
    assert markdown.count("**1 of these 2 runs: older than the code it speaks of**") == 2
    assert (html.count(">some older than the code</span>"), html.count(badge)) == (2, 1)


@pytest.mark.share(4)
def test_the_pages_of_the_kept_records_are_as_small_as_promised():
    assert len(pages.report_html(build(KEPT)).encode()) < MOST_BYTES
    assert len((KEPT / "report.md").read_text().splitlines()) <= 300
    shown = re.findall(
        r"!\[([^\]]+)\]\((docs/_static/(?:report|violation)\.png)\)",
        (KEPT.parent / "README.md").read_text(),
    )
    assert [(KEPT.parent / path).is_file() for _, path in shown] == [True, True]


def test_an_empty_folder_says_what_to_run(tmp_path):
    page = read(pages.report_html(build(tmp_path)))
    text = "".join(page.text)
    for expected in ("Nothing has been verified yet", "Nothing has been measured yet", "have not been tested yet",
                     "bounds have not been calibrated yet", "Not verified yet."):  # fmt: skip
        assert expected in text
    assert page.open == []
