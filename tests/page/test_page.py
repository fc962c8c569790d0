"""The page as text: whole from records, plain where there are none, nothing fetched, nothing of a
record executed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tomllib
from html.parser import HTMLParser
from importlib import resources

import pytest

from gradcheck_suite.core.results import Weight
from gradcheck_suite.page import render as pages
from gradcheck_suite.page.render import REPOSITORIES, with_links
from studies.tests.report.made_up import EVIL, build, counterexample, fill

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


def read(html):
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
    assert f'"https://github.com/{home}/issues/{cited.partition("#")[2]}"' in with_links(
        f"see {cited}, {cited}"
    )
    assert with_links(f"my-{cited} x/{cited}") == f"my-{cited} x/{cited}"


def test_what_came_from_outside_is_text(html):
    page = read(html)
    assert page.tags.count("script") == 1 + len(pages.vendored()) + len(pages.SCRIPTS)
    assert "img" not in page.tags
    assert page.handlers == []
    assert EVIL in "".join(page.text)
    assert "".join(page.scripts).count("window.planted=1") == EVIL.count(
        "window.planted=1"
    ) * html.count(json.dumps(EVIL)[1:-1].replace("<", "\\u003c").replace(">", "\\u003e"))


def test_the_page_is_whole_and_fetches_nothing(html):
    page = read(html)
    assert page.open == []
    outside = [
        link for link in page.links if not link.startswith(("#", "data:", "counterexamples/"))
    ]
    issues = [f"https://github.com/{repository}/issues/" for repository in REPOSITORIES.values()]
    assert all(link.startswith(tuple(issues)) for link in outside)
    # followed on a click alone
    assert all(f'<a href="{link}" rel="noreferrer">' in html for link in outside)
    assert len(html.encode()) < MOST_BYTES
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert "default-src &#39;none&#39;" in policy
    assert "unsafe-eval" not in policy
    for script in [s for s in page.scripts if not s.startswith('{"config"')]:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert digest.replace("+", "&#43;") in policy or digest in policy


def test_a_finding_keeps_no_tag_and_no_harmful_link():
    html = pages._markdown(
        f"## A\n\n{EVIL} [x](javascript:alert(1)) [y](https://a.b)\n\n| a |\n| --- |\n| b |\n"
    )
    page = read(html)
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
