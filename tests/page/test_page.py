"""The page as text: whole from records, plain where there are none, nothing fetched, nothing of a record executed."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tomllib
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest

from gradcheck_suite.core.records import records_path
from gradcheck_suite.core.results import Weight
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.page import render as pages
from gradcheck_suite.page.render import REPOSITORIES, with_links
from studies.tests.report.made_up import EVIL, build, counterexample, fill
from studies.zoo import BUGS

KEPT = Path(__file__).parents[2] / "reports"
MOST_BYTES = 3 * 2**20
VENDOR = resources.files("gradcheck_suite.page").joinpath("vendor")


class _Page(HTMLParser):
    """Notes tags that are opened and never closed, scripts, and whatever would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.text: list[str] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href", "action")]
        self.handlers += [k for k, _ in attrs if k.startswith("on")]
        if tag not in ("meta", "link", "br", "img", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data):
        (self.scripts if self.open[-1:] == ["script"] else self.text).append(data)


def _read(html):
    page = _Page()
    page.feed(html)
    page.close()
    return page


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    fill(folder)
    counterexample(folder)
    return pages.report_html(build(folder))


@pytest.mark.parametrize(
    ("cited", "home"),
    [
        ("Lightning#6147", "Lightning-AI/pytorch-lightning"),
        ("sentence-transformers#1822", "UKPLab/sentence-transformers"),
        ("pytorch/examples#1172", "pytorch/examples"),
        ("NeMo Automodel#3359", "NVIDIA-NeMo/Automodel"),
        ("transformers#1", "huggingface/transformers"),
    ],
)
def test_a_citation_has_the_repository_of_its_whole_name(cited, home):
    assert f'"https://github.com/{home}/issues/{cited.partition("#")[2]}"' in with_links(f"see {cited}, {cited}")
    assert with_links(f"my-{cited} x/{cited}") == f"my-{cited} x/{cited}"


def test_almost_every_bug_of_the_zoo_has_a_link():
    cited = {name for bug in BUGS.values() for name in bug.citations if "#" in name}
    assert {name for name in cited if "<a " not in with_links(name)} <= {"AnimaLoraStudio#305"}  # of which fork?


def test_every_page_is_there_with_its_figures(html):
    text = "".join(_read(html).text)
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


def test_what_came_from_outside_is_text(html):
    page = _read(html)
    assert page.tags.count("script") == 1 + len(pages.vendored()) + len(pages.SCRIPTS)
    assert "img" not in page.tags
    assert page.handlers == []
    assert EVIL in "".join(page.text)
    assert "".join(page.scripts).count("window.planted=1") == EVIL.count("window.planted=1") * html.count(
        json.dumps(EVIL)[1:-1].replace("<", "\\u003c").replace(">", "\\u003e")
    )


def test_the_page_is_whole_and_fetches_nothing(html):
    page = _read(html)
    assert page.open == []
    outside = [link for link in page.links if not link.startswith(("#", "data:", "counterexamples/"))]
    issues = [f"https://github.com/{repository}/issues/" for repository in REPOSITORIES.values()]
    assert all(link.startswith(tuple(issues)) for link in outside)
    assert all(f'<a href="{link}" rel="noreferrer">' in html for link in outside)  # followed on a click alone
    assert len(html.encode()) < MOST_BYTES
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert "default-src &#39;none&#39;" in policy
    assert "unsafe-eval" not in policy
    for script in [s for s in page.scripts if not s.startswith('{"config"')]:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert digest.replace("+", "&#43;") in policy or digest in policy


@pytest.mark.full
def test_figures_older_than_their_code_have_a_badge(tmp_path):
    fill(tmp_path)
    badge = ">older than the code</span>"
    assert badge not in pages.report_html(build(tmp_path))
    path = records_path(tmp_path, "zoo")
    path.write_text(json.dumps({**json.loads(path.read_text()), "judge": "0" * 16}) + "\n")
    html = pages.report_html(build(tmp_path))
    assert html.count(badge) == 1
    assert html.index('id="zoo-title"') < html.index(badge) < html.index('class="panel"', html.index('id="zoo-title"'))
    markdown = pages.report_markdown(build(tmp_path), lambda figure: "")
    assert markdown.count("**older than the code it speaks of**") == 1
    # of two runs one is older: the newest, whose command the line shows, need not be
    path = records_path(tmp_path, "verify")
    older, *others = path.read_text().splitlines()
    older = json.dumps({**json.loads(older), "judge": "0" * 16, "time": "2020-01-02T03:04:05+00:00"})
    path.write_text("\n".join([older, *others]) + "\n")
    markdown, html = pages.report_markdown(build(tmp_path), lambda figure: ""), pages.report_html(build(tmp_path))
    assert markdown.count("**1 of these 2 runs: older than the code it speaks of**") == 2  # the answer, the section
    assert (html.count(">some older than the code</span>"), html.count(badge)) == (2, 1)


def test_the_kept_pages_are_as_small_as_promised():
    assert (KEPT / "report.html").stat().st_size < MOST_BYTES
    assert len((KEPT / "report.md").read_text().splitlines()) <= 300
    shown = re.findall(
        r"!\[([^\]]+)\]\((docs/_static/(?:report|violation)\.png)\)", (KEPT.parent / "README.md").read_text()
    )
    assert [(KEPT.parent / path).is_file() for _, path in shown] == [True, True]


def test_a_finding_keeps_no_tag_and_no_harmful_link():
    html = pages._markdown(f"## A\n\n{EVIL} [x](javascript:alert(1)) [y](https://a.b)\n\n| a |\n| --- |\n| b |\n")
    page = _read(html)
    assert page.links == ["https://a.b"]
    assert set(page.tags) <= {"h4", "p", "a", "div", "table", "thead", "tr", "th", "tbody", "td"}


def test_json_in_a_script_ends_no_element():
    text = pages.json_for_script({"a": "</script><!--&\u2028"})
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"a": "</script><!--&\u2028"}
    with pytest.raises(ValueError, match="Out of range"):
        pages.json_for_script([float("nan")])


def test_vendored_files_are_those_that_were_published():
    table = tomllib.loads(VENDOR.joinpath("vendor.toml").read_text())
    licences = VENDOR.joinpath("LICENSES.txt").read_text()
    assert {path.name for path in VENDOR.iterdir()} == {*table, "vendor.toml", "LICENSES.txt"}
    for name, about in table.items():
        assert hashlib.sha256(VENDOR.joinpath(name).read_bytes()).hexdigest() == about["sha256"]
        assert f"{about['package']} {about['version']}" in licences
        assert "</script" not in pages.vendored()[name].lower()


def test_an_empty_folder_says_what_to_run(tmp_path):
    page = _read(pages.report_html(build(tmp_path)))
    text = "".join(page.text)
    for expected in ("Nothing has been verified yet", "Nothing has been measured yet", "have not been tested yet",
                     "bounds have not been calibrated yet", "Not verified yet."):  # fmt: skip
        assert expected in text
    assert page.open == []


def test_a_static_picture_keeps_its_words_and_drops_only_digits_of_places(tmp_path):
    from gradcheck_suite.page.violation import weights_plot

    rows = [Weight(micro_batches="0", count=4, expected=0.0714, observed=0.25)]
    plot = pages.Figure("weights", weights_plot(rows), "weights of <items>")
    drawn, whole = str(pages.static(plot)), pages.svg(plot.spec, plot.alt)
    words = re.compile(r">([^<]+)</(?:text|title)>")
    assert words.findall(drawn) == words.findall(whole)
    assert "0.25" in words.findall(drawn)
    assert len(drawn) < len(whole)
    assert "var(--c4)" in drawn  # a theme changes its colours
