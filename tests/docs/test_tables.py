"""The guide's tables list what the code has: nothing is missing, nothing made up."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

import gradcheck_suite
from gradcheck_suite import bridge
from gradcheck_suite.cli import PROGRAM, exit_status
from gradcheck_suite.core.faults import FAULTS, names_of
from gradcheck_suite.core.findings import FINDINGS
from gradcheck_suite.core.results import ViolationKind
from gradcheck_suite.judge.weights import Diagnosis
from gradcheck_suite.pytest_plugin import OVERRIDES
from tests.docs import generated
from tests.docs.pages import ROOT

PACKAGE = Path(gradcheck_suite.__file__).parent
GUIDE = ROOT / "docs"


def section(page: str, title: str, folder: Path = GUIDE) -> str:
    """Return a page's text from a title to the next one of the same level."""
    text = (folder / page).read_text()
    level = title.split(" ")[0]
    found = re.search(
        rf"^{re.escape(title)}\n(.*?)(?=^{level} |\Z)", text, re.MULTILINE | re.DOTALL
    )
    assert found, f"{page} has no section {title!r}"
    return found[1]


def first_cells(text: str) -> list[str]:
    """Return the names in the first column of the tables in a text."""
    rows = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
    return [row.split(" ")[0].split("(")[0] for row in rows]


def names_in(source: str) -> set[str]:
    """Return the texts of a source that have the form of a name, and the parts of those of the form
    `a or b`.
    """
    texts = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    found = (names_of(text) for text in texts if isinstance(text, str))
    return {name for names in found for name in names if re.fullmatch(r"[a-z]+(-[a-z]+)*", name)}


def test_every_fault_is_named_somewhere_beside_the_table():
    code = [path for path in PACKAGE.rglob("*.py") if path.name != "faults.py"]
    assert set(FAULTS) <= set().union(
        *(names_in(path.read_text()) for path in code if "zoo" not in path.parts)
    )


def test_every_finding_is_named_somewhere_beside_the_table():
    code = [path for path in PACKAGE.rglob("*.py") if path.name != "findings.py"]
    assert set(FINDINGS) <= set().union(*(names_in(path.read_text()) for path in code))
    assert not FINDINGS.keys() & FAULTS.keys(), "a finding that is a fault has no row of its own"


@pytest.mark.parametrize("name", ["new-name", "missing-gradient", "first-only or new-name"])
def test_a_name_without_a_row_is_refused(name):
    with pytest.raises(AssertionError, match=r"no row in core/faults.py"):
        Diagnosis(name, "sentence")


PAGES = sorted(GUIDE.glob("*.md"))
MOST_WORDS = 16_400
"""In all pages of the guide, apart from the generated blocks, which are looked up and not read."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_generated_is_what_the_code_has(page):
    text = page.read_text()
    assert generated.written(text) == text, "python -m tests.docs.generated writes the tables"


def test_every_generated_block_stands_on_a_page():
    marked = re.findall(
        r"<!-- generated: ([\w. -]+?) -->", "".join(page.read_text() for page in PAGES)
    )
    assert sorted(marked) == sorted(generated.TABLES)


def words(text: str) -> int:
    """Return the number of words of a page.

    Code, what it prints, and the bars of tables are none.
    """
    read = re.sub(r"<!-- generated: .*?<!-- end -->", "", text, flags=re.DOTALL)
    read = re.sub(r"^```.*?^```", "", read, flags=re.MULTILINE | re.DOTALL)
    return len(re.findall(r"\S*\w\S*", read))


def test_the_guide_can_be_read_in_an_evening():
    assert sum(words(page.read_text()) for page in PAGES) <= MOST_WORDS
    assert words((ROOT / "README.md").read_text()) <= 750


def test_every_kind_of_violation_has_one_row():
    assert sorted(first_cells(section("diagnoses.md", "## Kinds"))) == sorted(
        get_args(ViolationKind)
    )


def test_every_option_of_pytest_has_one_row():
    rows = first_cells(section("pytest-plugin.md", "## Options of the command line"))
    assert rows == [*(f"--gradcheck-{option.name}" for option in OVERRIDES), "--gradcheck-reports"]


def test_every_field_of_a_run_is_explained():
    shown = re.findall(
        r"`(\w+)(?:\([^`]*\))?`", section("check-my-loop.md", "## What a loop receives")
    )
    assert set(gradcheck_suite.TrainingRun.__dataclass_fields__) <= set(shown)


def test_every_public_name_is_in_the_reference():
    listed = re.findall(
        r"^### `gradcheck_suite\.(\w+)`$", (GUIDE / "api.md").read_text(), re.MULTILINE
    )
    assert sorted(listed) == sorted(gradcheck_suite.__all__)


def test_every_name_of_the_bridge_is_in_the_reference():
    listed = re.findall(
        r"^### `gradcheck_suite\.bridge\.(\w+)`$", (GUIDE / "api.md").read_text(), re.MULTILINE
    )
    assert sorted(listed) == sorted(bridge.__all__)


def test_every_command_has_a_section():
    titles = re.findall(r"^## ([a-z]+)$", (GUIDE / "commands.md").read_text(), re.MULTILINE)
    assert titles == list(PROGRAM.commands)


def test_every_page_is_in_the_table_of_contents():
    sections = (GUIDE / "index.md").read_text().partition("\n## ")[2]
    listed = {*re.findall(r"\]\(([\w-]+)\.md\)", sections)}
    assert listed == {path.stem for path in GUIDE.glob("*.md") if path.stem != "index"}


READ_AS_FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]


@pytest.mark.parametrize("page", READ_AS_FILES, ids=lambda page: page.name)
def test_a_page_can_be_read_as_a_file(page):
    """The repository's file view is the documentation: it knows no directive and includes no file."""
    assert not re.findall(r"^(?:```\{|:::|\.\. [\w:-]+::)", page.read_text(), re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as file views make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", READ_AS_FILES, ids=lambda page: page.name)
def test_every_link_and_picture_leads_to_a_file_and_a_heading(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        place, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        target = (page.parent / place) if place else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_the_promise_of_stability_names_every_command_status_and_fixture():
    """What is added without a promise is missed on this page."""
    rows = dict(
        re.findall(r"^\| ([\w ]+) \| (.*) \|$", (GUIDE / "stability.md").read_text(), re.MULTILINE)
    )
    assert set(re.findall(r"`([\w-]+)`", rows["commands"])) == set(PROGRAM.commands)
    statuses = {
        value
        for name, value in vars(exit_status).items()
        if name.isupper() and isinstance(value, int)
    }
    assert {int(number) for number in re.findall(r"\d+", rows["exit statuses"])} == statuses
    plugin = ast.parse((PACKAGE / "pytest_plugin.py").read_text())
    fixtures = {
        node.name
        for node in plugin.body
        if isinstance(node, ast.FunctionDef)
        and any("fixture" in ast.unparse(one) for one in node.decorator_list)
    }
    assert set(re.findall(r"`(\w+)`", rows["pytest"])) == fixtures
