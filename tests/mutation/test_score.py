"""The mutation score: counted by hand on what Cosmic Ray prints of five mutants."""

from __future__ import annotations

import json

import pytest

from mutation.score import Mutant, explained, mutants, report, unexplained

REASONS = """
[[explained]]
module = "a.py"
line = "if short != k:"
mutants = ["if short < k:"]
reason = "no window is longer"
"""


def _dumped(module, outcome, *, line="", changed="", output="1 failed"):
    item = {"job_id": "1", "mutations": [{"module_path": module}]}
    if outcome is None:
        return json.dumps([item, None])
    if outcome == "skipped":
        return json.dumps([item, {"worker_outcome": "skipped", "test_outcome": None, "diff": None, "output": None}])
    diff = ["--- mutation diff ---", f"--- a/{module}", f"+++ b/{module}", "@@ -1 +1 @@", "     same", f"-    {line}"]
    result = {"worker_outcome": "normal", "test_outcome": outcome, "output": output}
    return json.dumps([item, {**result, "diff": "\n".join([*diff, f"+    {changed}"])}])


FIVE = [
    _dumped("a.py", "survived", line="if short != k:", changed="if short < k:"),
    _dumped("a.py", "killed", line="if short != k:", changed="if short == k:"),
    _dumped("a.py", "killed", line="while low < high:", changed="while low > -high:", output="timeout"),
    _dumped("a.py", "skipped"),
    _dumped("b.py", "survived", line="x = 1", changed="x = 2"),
]


@pytest.fixture
def reasons(tmp_path):
    path = tmp_path / "explained.toml"
    path.write_text(REASONS, encoding="utf-8")
    return explained(path)


def test_mutants_are_read_with_their_lines():
    assert mutants(FIVE) == [
        Mutant("a.py", "survived", "if short != k:", "if short < k:"),
        Mutant("a.py", "killed", "if short != k:", "if short == k:"),
        Mutant("a.py", "killed", "while low < high:", "while low > -high:", timed_out=True),
        Mutant("a.py", "skipped"),
        Mutant("b.py", "survived", "x = 1", "x = 2"),
    ]
    assert mutants([_dumped("a.py", None)]) == [Mutant("a.py", "not tried")]


def test_a_survivor_without_a_reason_is_left(reasons):
    found = mutants(FIVE)
    assert unexplained(found, reasons) == [found[4]]
    assert unexplained(found[:4], reasons) == []
    (untried,) = mutants([_dumped("a.py", None)])
    assert unexplained([untried], reasons) == [untried]


def test_the_score_leaves_out_what_is_skipped_or_explained(reasons):
    """Of a.py's three mutants two are killed and one is explained; b.py's only one survives: 2 of 3 in all."""
    text = report(mutants(FIVE), reasons, "8.7.0")
    assert "| `a.py` | 3 | 2 | 1 | 1 | 100.0% |" in text
    assert "| `b.py` | 1 | 0 | 0 | 0 | 0.0% |" in text
    assert "| all | 4 | 2 | 1 | 1 | 66.7% |" in text
    assert "- `b.py`: `x = 1` became `x = 2` (survived)" in text
    assert "with Cosmic Ray 8.7.0" in text
    assert "1 mutants of `|` are left out" in text
    assert "- `if short != k:`: no window is longer\n  - `if short < k:`\n" in text


def test_a_reason_for_what_is_killed_is_not_shown(reasons):
    assert "no window is longer" not in report(mutants(FIVE)[1:], reasons, "8.7.0")
