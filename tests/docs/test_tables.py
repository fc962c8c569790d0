"""The guide's tables list what the code has: nothing is missing, nothing made up."""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import gradcheck_suite
from gradcheck_suite import bridge
from gradcheck_suite.cli import COMMANDS, exit_status
from gradcheck_suite.cli.arguments import DEFAULTS, MARKER_OPTIONS
from gradcheck_suite.core.contract import ASSUMPTIONS
from gradcheck_suite.core.results import ViolationKind
from gradcheck_suite.judge.weights import names_of
from gradcheck_suite.pytest_plugin import OVERRIDES, SECOND_OPINION_S
from gradcheck_suite.run.optimizers import NEEDS, NEEDS_CLOSURE
from gradcheck_suite.studies.optimizers import COUNTERPARTS
from gradcheck_suite.studies.zoo import BUGS
from tests.bridge.architectures import ARCHITECTURES
from tests.bridge.architectures.__main__ import MARK, table
from tests.docs.pages import ROOT

PACKAGE = Path(gradcheck_suite.__file__).parent
GUIDE = ROOT / "docs"


def _section(page: str, title: str) -> str:
    """Return a page's text from a title to the next one of the same level."""
    text = (GUIDE / page).read_text()
    level = title.split(" ")[0]
    found = re.search(rf"^{re.escape(title)}\n(.*?)(?=^{level} |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no section {title!r}"
    return found[1]


def _first_cells(text: str) -> list[str]:
    """Return the names in the first column of the tables in a text."""
    rows = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
    return [row.split(" ")[0].split("(")[0] for row in rows]


def diagnoses_in(source: str) -> Iterator[str]:
    """Yield the diagnoses that a source can name.

    They stand as the first argument of `Diagnosis` and `ParameterFault`, as the second of `Violation`, in what is
    assigned to `diagnosis`, alone or as one of several, and as the first of what a function returns to be assigned so.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            place = {"Diagnosis": 0, "Pattern": 0, "ParameterFault": 0, "Violation": 1}.get(node.func.id)
            if place is not None:
                yield from _names(node.args[place])
        elif isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
            yield from (name for name in _names(node.value) if "-" in name and " " not in name)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            yield from (name for name in _names(node.targets[0].slice) if "-" in name)
        elif isinstance(node, ast.Assign):
            yield from _assigned(node.targets[0], node.value)
        elif isinstance(node, ast.FunctionDef) and _returns(node) == "tuple[str, str] | None":
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    yield from (name for name in _names(inner.value) if "-" in name and " " not in name)


def _returns(node: ast.FunctionDef) -> str:
    return "" if node.returns is None else ast.unparse(node.returns)


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name) and target.id == "diagnosis":
        if isinstance(value, ast.Constant | ast.IfExp):
            yield from _names(value)
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        # not strict: a starred target takes what it takes, and is no diagnosis
        for one, its_value in zip(target.elts, value.elts, strict=False):
            yield from _assigned(one, its_value)


def _names(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from _names(node.body)
        yield from _names(node.orelse)
    elif isinstance(node, ast.Tuple):
        yield from _names(node.elts[0])


def _in_the_code() -> set[str]:
    return {name for path in sorted(PACKAGE.rglob("*.py")) for name in diagnoses_in(path.read_text()) if name}


def test_every_diagnosis_has_one_row_and_every_row_is_a_diagnosis():
    rows = _first_cells(_section("read-a-verdict.md", "## Diagnoses"))
    assert len(rows) == len(set(rows))
    assert set(rows) == _in_the_code()


@pytest.mark.parametrize(
    "source",
    [
        'return Diagnosis("new-name", f"in {where}")',
        'Violation("gradient", "new-name", explanation, case)',
        'diagnosis = "new-name"',
        'diagnosis = "new-name" if late else other',
        'kind, diagnosis = "raised", "new-name"',
        'def read() -> tuple[str, str] | None:\n    return "new-name", ", and more"',
        'PATTERN = Pattern("new-name", fits, sentence)',
        'def faults() -> Iterator[tuple[str, str]]:\n    yield "new-name", f"{what}"',
        'found["new-name"] = "what"',
        'def read() -> tuple[str, str] | None:\n    return ("new-name", "what") if seen else None',
    ],
)
def test_a_new_diagnosis_is_seen_wherever_the_code_may_name_it(source):
    assert "new-name" in set(diagnoses_in(source))


def test_the_known_bugs_are_named_by_diagnoses_of_the_table():
    """Names from another source than the one that the table is held against."""
    rows = set(_first_cells(_section("read-a-verdict.md", "## Diagnoses")))
    wanted = {one for bug in BUGS.values() for name in bug.wanted for one in names_of(name.partition("/")[2])}
    assert len(wanted) > 10
    assert wanted <= rows


def test_every_kind_of_violation_has_one_row():
    assert sorted(_first_cells(_section("read-a-verdict.md", "## Kinds"))) == sorted(get_args(ViolationKind))


def test_every_assumption_has_one_row():
    assert sorted(_first_cells(_section("check-my-loop.md", "## Or declare what the loop assumes"))) == sorted(
        ASSUMPTIONS
    )


def test_every_option_of_the_marker_has_one_row_with_its_default():
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", _section("in-your-tests.md", "## The fixture"), re.MULTILINE)
    assert [name for name, _ in rows] == list(MARKER_OPTIONS)
    for name, shown in rows:
        default = SECOND_OPINION_S if name == "second_opinion_s" else getattr(DEFAULTS, name)
        if default not in (None, ()):
            assert shown.replace("`", "").replace('"', "") == (
                f"{default:g}" if type(default) is float else str(default)
            )


def test_every_option_of_pytest_has_one_row():
    rows = _first_cells(_section("in-your-tests.md", "## Options of the command line"))
    assert rows == [*(f"--gradcheck-{option.field}" for option in OVERRIDES), "--gradcheck-reports"]


def test_every_field_of_a_run_is_explained():
    shown = re.findall(r"`(\w+)(?:\([^`]*\))?`", _section("check-my-loop.md", "## What a loop receives"))
    assert set(gradcheck_suite.TrainingRun.__dataclass_fields__) <= set(shown)


def test_every_public_name_is_in_the_reference():
    listed = re.findall(r"^\.\. [\w:]+:: gradcheck_suite\.(\w+)$", (GUIDE / "api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(gradcheck_suite.__all__)


def test_every_name_of_the_bridge_is_in_the_reference():
    listed = re.findall(r"auto\w+:: gradcheck_suite\.bridge\.(\w+)$", (GUIDE / "api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(bridge.__all__)


def test_every_command_has_a_section_and_every_status_a_row():
    titles = re.findall(r"^## (\w+)$", (GUIDE / "commands.md").read_text(), re.MULTILINE)
    assert titles == list(COMMANDS)
    known = {value for name, value in vars(exit_status).items() if name.isupper() and isinstance(value, int)}
    assert {int(row) for row in _first_cells(_section("commands.md", "## Exit statuses"))} == known


def test_every_page_is_in_the_table_of_contents():
    listed = re.findall(r"^[a-z-]+$", (GUIDE / "index.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in GUIDE.glob("*.md") if path.stem != "index")


def test_the_commands_for_a_gpu_are_toxs():
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    commands = tox["testenv:gpu-installed"]["commands"].replace(" {posargs}", "").strip()
    page = (ROOT / "CONTRIBUTING.md").read_text()
    # outside of an environment a system may have no `python`
    assert f"```\n{commands.replace('python ', 'python3 ')}\n```" in page


def test_what_a_user_sets_for_a_gpu_reaches_the_commands():
    """`tox -e gpu` runs tox again, and either environment keeps only the variables that it passes on."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    assert tox["testenv:gpu"]["pass_env"] == "{[testenv:gpu-installed]pass_env}"
    assert {"CUDA_*", "PYTORCH_*", "XLA_*"} <= set(tox["testenv:gpu-installed"]["pass_env"].split())


def test_the_guide_has_what_differs_in_every_optimizer():
    text = _section("optimizers.md", "## Where the formulas differ")
    assert _first_cells(text) == [counterpart.torch for counterpart in COUNTERPARTS.values()]
    for counterpart in COUNTERPARTS.values():
        assert f"| {counterpart.optax} | {'; '.join(counterpart.differs)}" in text, counterpart.torch
    needs = _first_cells(_section("optimizers.md", "# The step of each optimizer"))[:3]
    assert set(needs) == {*NEEDS, *NEEDS_CLOSURE}


def test_the_guide_has_the_architectures_of_the_records():
    page = (GUIDE / "architectures.md").read_text()
    assert page.partition(MARK)[2] == "\n" + table(ROOT / "reports")
    shown = re.findall(r"^\| (\w+) \| (?:\d+|refused) \|", page, re.MULTILINE)
    assert set(shown) - {"LSTM", "Transformer"} <= set(ARCHITECTURES)
