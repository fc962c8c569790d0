"""The mutation score, counted by hand from what Cosmic Ray prints of five mutants."""

from __future__ import annotations

import ast
import difflib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutation import run
from mutation.run import ROOT, TARGETS
from mutation.score import Mutant, explained, mutants, report, stale, unexplained
from mutation.statements import apply, changed_statement

REASONS = """
[[explained]]
module = "a.py"
statement = "if short != k:"
mutants = ["if short < k:"]
reason = "no window is longer"
"""
SOURCES = {
    "a.py": """
def f(short, k):
    if (short
            != k):  # no longer
        return 1
    while low < high: low += 1
""",
    "b.py": "x = 1\n",
}


def _dumped(module, outcome, *, line="", changed="", output="1 failed"):
    item = {"job_id": "1", "mutations": [{"module_path": module}]}
    if outcome is None:
        return json.dumps([item, None])
    if outcome == "skipped":
        return json.dumps([item, {"worker_outcome": "skipped", "test_outcome": None, "diff": None, "output": None}])
    before = SOURCES[module]
    assert before.count(line) == 1
    diff = difflib.unified_diff(before.split("\n"), before.replace(line, changed).split("\n"), "a", "b", lineterm="")
    result = {"worker_outcome": "normal", "test_outcome": outcome, "output": output}
    return json.dumps([item, {**result, "diff": "\n".join(["--- mutation diff ---", *diff])}])


FIVE = [
    _dumped("a.py", "survived", line="            != k", changed="            < k"),
    _dumped("a.py", "killed", line="            != k", changed="            == k"),
    _dumped("a.py", "killed", line="low < high", changed="low > -high", output="timeout"),
    _dumped("a.py", "skipped"),
    _dumped("b.py", "survived", line="x = 1", changed="x = 2"),
]
read = SOURCES.__getitem__


@pytest.fixture
def reasons(tmp_path):
    path = tmp_path / "explained.toml"
    path.write_text(REASONS, encoding="utf-8")
    return explained(path)


def test_mutants_are_read_with_their_statements():
    assert mutants(FIVE, read) == [
        Mutant("a.py", "survived", "if short != k:", "if short < k:"),
        Mutant("a.py", "killed", "if short != k:", "if short == k:"),
        Mutant("a.py", "killed", "while low < high:", "while low > -high:", timed_out=True),
        Mutant("a.py", "skipped"),
        Mutant("b.py", "survived", "x = 1", "x = 2"),
    ]
    assert mutants([_dumped("a.py", None)], read) == [Mutant("a.py", "not tried")]


@given(lines=st.lists(st.sampled_from("abcdef"), max_size=12), changed=st.lists(st.sampled_from("abcdef"), max_size=12))
def test_a_diff_is_applied(lines, changed):
    diff = list(difflib.unified_diff(lines or [""], changed or [""], "before", "after", lineterm=""))
    assert apply(diff, "\n".join(lines)) == "\n".join(changed)


@pytest.mark.parametrize(("before", "after"), [("!= k", "< k"), ("return 1", "return 2"), ("+= 1", "-= 1")])
def test_formatting_does_not_change_the_statement(before, after):
    text = SOURCES["a.py"]
    formatted = ast.unparse(ast.parse(text))
    assert formatted != text
    changed = {changed_statement(t, t.replace(before, after)) for t in (text, formatted)}
    assert len(changed) == 1


def test_a_reason_for_a_statement_that_is_gone_is_stale(reasons):
    assert stale(reasons, read) == []
    assert stale(reasons, lambda module: "") == [("a.py", "if short != k:", "if short < k:")]


def test_every_target_and_its_tests_are_there():
    for target, aim in TARGETS.items():
        for path in (f"gradcheck_suite/{target}.py", *aim.tests.split()):
            assert (ROOT / path).exists(), path


def test_a_survivor_without_a_reason_is_left(reasons):
    found = mutants(FIVE, read)
    assert unexplained(found, reasons) == [found[4]]
    assert unexplained(found[:4], reasons) == []
    (untried,) = mutants([_dumped("a.py", None)], read)
    assert unexplained([untried], reasons) == [untried]


def test_the_score_leaves_out_what_is_skipped_or_explained(reasons):
    """Of a.py's three mutants two are killed and one is explained; b.py's only one survives: 2 of 3 in all."""
    text = report(mutants(FIVE, read), reasons, "8.7.0")
    assert "| `a.py` | 3 | 2 | 1 | 1 | 100.0% |" in text
    assert "| `b.py` | 1 | 0 | 0 | 0 | 0.0% |" in text
    assert "| all | 4 | 2 | 1 | 1 | 66.7% |" in text
    assert "- `b.py`: `x = 1` became `x = 2` (survived)" in text
    assert "with Cosmic Ray 8.7.0" in text
    assert "1 mutants of `|` are left out" in text
    assert "- `if short != k:`: no window is longer\n  - `if short < k:`\n" in text


def test_a_reason_for_what_is_killed_is_not_shown(reasons):
    assert "no window is longer" not in report(mutants(FIVE, read)[1:], reasons, "8.7.0")


def test_every_kept_reason_is_about_a_statement_that_is_there():
    reasons = explained(ROOT / "mutation" / "explained.toml")
    assert reasons
    assert stale(reasons, lambda module: (ROOT / module).read_text()) == []


@pytest.mark.parametrize("others", [False, True], ids=["alone", "the others were run before"])
def test_a_module_alone_does_not_rewrite_the_report_of_all(others, tmp_path, monkeypatch, capsys):
    """Cosmic Ray is played by files that hold what it prints of each module."""
    (tmp_path / "README.md").write_text("of all", encoding="utf-8")
    (tmp_path / "explained.toml").write_text(REASONS, encoding="utf-8")
    first, *rest = TARGETS
    dumped = {
        target: _dumped("b.py", "killed", line="x = 1", changed=f"x = {i}") for i, target in enumerate(TARGETS, 2)
    }
    for name in ("HERE", "BUILD"):
        monkeypatch.setattr(run, name, tmp_path)
    monkeypatch.setattr(run, "_copy_tree", lambda: tmp_path)
    monkeypatch.setattr(run, "_run", lambda target, tree, *, again: run._session(target).write_text(dumped[target]))
    monkeypatch.setattr(run, "_call", lambda tree, *command: run.Path(command[-1]).read_text() + "\n")
    monkeypatch.setattr(run, "version", lambda name: "8.7.0")
    for target in rest if others else ():
        run._session(target).write_text(dumped[target])
    (tmp_path / "b.py").write_text(SOURCES["b.py"])
    monkeypatch.setattr("sys.argv", ["run.py", first])
    assert run.main() == 0
    said = (tmp_path / "README.md").read_text(encoding="utf-8")
    if others:
        assert f"| `b.py` | {len(TARGETS)} | {len(TARGETS)} | 0 | 0 | 100.0% |" in said
    else:
        assert said == "of all"
        assert f"stays as it is: not run here: {', '.join(rest)}\n" in capsys.readouterr().out
