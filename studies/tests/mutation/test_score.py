"""Mutants and their score, counted by hand."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from mutation.score import (
    TARGETS,
    Mutant,
    Tried,
    explained,
    path,
    report,
    stale,
    unexplained,
    write_report,
)
from mutation.statements import Code, changed_statement
from tests.docs.pages import ROOT

REASONS = """
[[explained]]
module = "a.py"
statement = "if short != k:"
mutants = ["if short < k:"]
reason = "no window is longer"
"""
SOURCE = """
LIMIT: int | None = 7
def f(short, k: int | None = 5, *, low) -> int | None:
    if (short
            != k):  # no longer
        return 1
    while low < high: low += 1
    if k is not None and short == "sum":
        return zip(short, k + 3, strict=True)
"""
A = [
    Mutant("a.py", "Eq_Lt", 0, "if short != k:", "if short < k:", "survived"),
    Mutant("a.py", "Eq_NotEq", 0, "if short != k:", "if short == k:", "killed"),
    Mutant("a.py", "Not", 0, "while low < high:", "while not low < high:", "time limit"),
]
B = [Mutant("b.py", "Number", 0, "x = 1", "x = 2", "not executed")]


@pytest.fixture
def reasons(tmp_path):
    path = tmp_path / "explained.toml"
    path.write_text(REASONS, encoding="utf-8")
    return explained(path)


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ("!= k", "< k", [4, 5]),
        ("return 1", "return 2", [6]),
        ("+= 1", "-= 1", [7]),
        ("= 7", "= 8", []),
    ],
)
def test_formatting_does_not_change_the_statement(before, after, lines):
    formatted = ast.unparse(ast.parse(SOURCE))
    assert formatted != SOURCE
    changed = [changed_statement(t, t.replace(before, after)) for t in (SOURCE, formatted)]
    assert changed[0][1:] == changed[1][1:]
    assert list(changed[0][0]) == lines, "outside of a function no line is executed by a test"


@pytest.mark.parametrize(
    ("text", "operator", "tells"),
    [
        ("int | None = 7", "ReplaceBinaryOperator_BitOr_Add", False),
        ("int | None = 5", "ReplaceBinaryOperator_BitOr_Add", False),
        ("*", "ReplaceBinaryOperator_Mul_Div", False),
        ("+", "ReplaceBinaryOperator_Add_Sub", True),
        ("+", "ReplaceBinaryOperator_Add_BitXor", False),
        ("5", "NumberReplacer", True),
        ("7", "NumberReplacer", True),
        ("True", "ReplaceTrueWithFalse", False),
        ("!=", "ReplaceComparisonOperator_NotEq_Lt", True),
        ("!=", "ReplaceComparisonOperator_NotEq_IsNot", False),
        ("==", "ReplaceComparisonOperator_Eq_NotEq", True),
        ("==", "ReplaceComparisonOperator_Eq_GtE", False),
        ("is not", "ReplaceComparisonOperator_IsNot_Is", True),
    ],
)
def test_what_no_test_may_tell_is_no_mutant(text, operator, tells):
    at = SOURCE.index(text) + (text.find("|") if "|" in text else 0)
    row, column = SOURCE.count("\n", 0, at) + 1, at - SOURCE.rfind("\n", 0, at) - 1
    end = 1 if "|" in text else len(text)
    assert Code(SOURCE).tells(operator, (row, column), (row, column + end)) == tells


def test_a_reason_for_a_statement_that_is_gone_is_stale(reasons, tmp_path):
    (tmp_path / "a.py").write_text(SOURCE)
    assert stale(reasons, tmp_path) == []
    (tmp_path / "a.py").write_text("")
    assert stale(reasons, tmp_path) == [("a.py", "if short != k:", "if short < k:")]


def test_every_kept_reason_is_about_a_statement_that_is_there():
    assert stale(explained(ROOT / "mutation" / "explained.toml"), ROOT) == []


def test_the_score_leaves_out_what_is_explained(reasons):
    """Of a.py's three mutants two are killed and one is explained.

    B.py's only one survives: 2 of 3 in all.
    """
    assert unexplained(A + B, reasons) == B
    text = report(
        {"a": Tried("abc", 7, 30, "", A), "b": Tried("abd", 7, 5, "", B)}, reasons, "8.7.0"
    )
    assert "| `a` | 30 | 3 | 2 | 1 | 1 | 0 | 100.0% | abc |" in text
    assert "| `b` | 5 | 1 | 0 | 0 | 0 | 1 | 0.0% | abd |" in text
    assert "| all | 35 | 4 | 2 | 1 | 1 | 1 | 66.7% |" in text
    assert "at most 3 mutants of each module, of seed 7;" in text
    assert "- `b.py`: `x = 1` became `x = 2` (not executed)" in text
    long = replace(B[0], statement="f(" + 500 * "a" + ", 1)", changed="f(" + 500 * "a" + ", 2)")
    assert "a, 1)...` became `...aaa" in report(
        {"b": Tried("abd", 7, 5, "", [long])}, reasons, "8.7.0"
    )
    said = report({"b": Tried("abd", 7, 5, "", [long])}, {long.key: "both do"}, "8.7.0")
    assert "a, 1)...`: both do\n  - `...aaa" in said
    assert "- `a.py`: `if short != k:`: no window is longer\n  - `if short < k:`\n" in text
    assert "no window is longer" not in report(
        {"a": Tried("abc", 7, 30, "", A[1:])}, reasons, "8.7.0"
    )


def test_every_target_and_its_tests_are_there():
    for target, tests in TARGETS.items():
        for place in (path(target), *tests):
            assert (ROOT / place).exists(), place


def test_a_module_alone_does_not_rewrite_the_report_of_all(tmp_path, reasons, capsys):
    file = tmp_path / "README.md"
    file.write_text("of all", encoding="utf-8")
    first, *rest = TARGETS
    tried = {target: Tried("abc", 7, 5, "", B) for target in TARGETS}
    write_report(file, {first: tried[first]}, reasons, "8.7.0")
    assert file.read_text(encoding="utf-8") == "of all"
    assert (
        capsys.readouterr().out == f"README.md stays as it is: not tried here: {', '.join(rest)}\n"
    )
    write_report(file, tried, reasons, "8.7.0")
    assert file.read_text(encoding="utf-8") == report(tried, reasons, "8.7.0")
