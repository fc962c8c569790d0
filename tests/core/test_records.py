"""Records survive a run that is killed, and damaged lines are reported."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from gradcheck_suite.core import records as files
from gradcheck_suite.core.records import (
    KINDS,
    PACKAGE,
    RecordKind,
    append_record,
    expect_writable_folder,
    is_clean,
    read_records,
    sources_digest,
    write_json,
)
from gradcheck_suite.errors import UsageError

VERIFY = KINDS["verify"]


def _append(reports, value):
    return append_record(
        reports,
        VERIFY,
        {"value": value},
        environment={"python": "3.11"},
        command="gradcheck-suite verify",
    )


def _values(reports):
    records, problems = read_records(reports, VERIFY)
    return [record.data["value"] for record in records], problems


def test_records_come_back_in_order(tmp_path):
    for value in (1, "ü\n<b>", 2.5):
        _append(tmp_path, value)
    assert _values(tmp_path) == ([1, "ü\n<b>", 2.5], [])
    records, _ = read_records(tmp_path, VERIFY)
    assert records[0].command == "gradcheck-suite verify"
    assert records[0].environment == {"python": "3.11"}
    assert records[0].time.endswith("+00:00")


def test_a_record_says_whether_the_tree_was_clean_and_which_judge_made_it(tmp_path, monkeypatch):
    def git(*arguments):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
            cwd=tmp_path,
            check=True,
        )

    def made(reports):
        is_clean.cache_clear()
        _append(reports, 1)
        return read_records(reports, VERIFY)[0][-1]

    monkeypatch.chdir(tmp_path)
    assert made(tmp_path / "reports").clean is None
    (tmp_path / "loop.py").write_text("pass")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "All")
    # the records themselves do not make the tree unclean
    records = [made(tmp_path / "reports"), made(tmp_path / "reports")]
    assert [record.clean for record in records] == [True, True]
    (tmp_path / "loop.py").write_text("changed")
    assert made(tmp_path / "reports").clean is False
    is_clean.cache_clear()
    assert {record.judge for record in records} == {VERIFY.digest()}


SOURCES = {
    "a.py": "import math\n\ndef f(x):\n    import os\n    return x + 1\n\ndef g(x):\n    return x\n",
    "room/b.py": "if True:\n    Y = 1\nX = 1\n",
}


def _digest_of(folder, sources):
    for name, text in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return sources_digest(sources, folder)


@pytest.mark.parametrize(
    "moved",
    [
        {"a.py": SOURCES["a.py"].replace("def g(x):\n    return x\n", ""),
         "room/b.py": SOURCES["room/b.py"] + "def g(x):\n    return x\n"},
        {"c.py": SOURCES["a.py"], "b.py": SOURCES["room/b.py"]},
        dict(reversed(SOURCES.items())),
        {"one.py": "X = 1\n\n" + SOURCES["a.py"] + "if True:\n    Y = 1\n"},
        SOURCES | {"a.py": '"""Text."""\n# a comment\nfrom typing import Any\n'
                           + SOURCES["a.py"].replace("(x):\n", '(x: Any) -> int:\n    """Text."""\n')},
        SOURCES | {"a.py": SOURCES["a.py"].replace("import os", "from os import path")},
        SOURCES | {"a.py": "if TYPE_CHECKING:\n    from typing import Any\n" + SOURCES["a.py"]},
    ],
    ids=["a definition", "files", "the order of files", "into one file", "text", "a lazy import", "a type's import"],
)  # fmt: skip
def test_a_move_or_a_comment_leaves_the_digest(tmp_path, moved):
    assert _digest_of(tmp_path / "after", moved) == _digest_of(tmp_path / "before", SOURCES)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return x + 1", "return x + 2"),
        ("def g(x)", "def h(x)"),
        ("X = 1", "X = 2"),
        ("Y = 1", "Y = 2"),
        ("X = 1\n", ""),
    ],
)
def test_a_changed_statement_changes_the_digest(tmp_path, old, new):
    changed = {name: text.replace(old, new) for name, text in SOURCES.items()}
    assert _digest_of(tmp_path / "after", changed) != _digest_of(tmp_path / "before", SOURCES)


def grown_older(kinds, changed, monkeypatch):
    """Return the names of the kinds whose records are older once a statement was added to a file."""
    before, read = {name: kind.digest() for name, kind in kinds.items()}, Path.read_text
    assert changed.exists()
    monkeypatch.setattr(Path, "read_text", lambda self: read(self) + "X = 1\n" * (self == changed))
    return {
        name for name, kind in kinds.items() if RecordKind.digest.__wrapped__(kind) != before[name]
    }


@pytest.mark.parametrize(
    ("changed", "older"),
    [
        ("auditing/context.py", {"audit"}),
        ("loops/trainers/trainer.py", {"trainer"}),
        ("core/comparison.py", {"audit", "trainer", "verify"}),
        ("page/render.py", set()),
    ],
)
def test_a_changed_statement_makes_the_records_older_that_speak_of_it(monkeypatch, changed, older):
    assert grown_older(KINDS, PACKAGE / changed, monkeypatch) == older


def test_a_missing_file_has_no_records(tmp_path):
    assert read_records(tmp_path, VERIFY) == ([], [])


@pytest.mark.parametrize("kept", range(1, 60, 7))
def test_a_run_killed_while_writing_loses_that_record_alone(tmp_path, kept):
    path = _append(tmp_path, 1)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:kept])
    _append(tmp_path, 2)
    values, problems = _values(tmp_path)
    assert values == [1, 2]
    assert problems == ["verify.jsonl, line 2: damaged; left out"]


def test_foreign_and_old_lines_are_reported(tmp_path):
    path = _append(tmp_path, 1)
    record = json.loads(path.read_bytes())
    lines = [{**record, "schema": 0}, {**record, "kind": "audit"}, {**record, "data": 3}, [1]]
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.write("\xff\x00\n")
    values, problems = _values(tmp_path)
    assert values == [1]
    assert problems == [
        "verify.jsonl, line 2: schema 0, expected 1: another version; left out",
        "verify.jsonl, line 3: not a record of kind 'verify'; left out",
        "verify.jsonl, line 4: not a record of kind 'verify'; left out",
        "verify.jsonl, line 5: not a record of kind 'verify'; left out",
        "verify.jsonl, line 6: damaged; left out",
    ]


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "records").write_text("a file where a folder should be")
    with pytest.raises(UsageError, match="cannot write"):
        _append(tmp_path, 1)


def test_nan_is_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        _append(tmp_path, float("nan"))
    assert read_records(tmp_path, VERIFY) == ([], [])


# Files are written whole or not at all.


def test_folders_are_made(tmp_path):
    write_json(tmp_path / "a" / "b" / "c.json", {"x": [1, 2.5, None]})
    assert json.loads((tmp_path / "a" / "b" / "c.json").read_text()) == {"x": [1, 2.5, None]}


def test_permissions_are_those_of_any_other_file(tmp_path):
    write_json(tmp_path / "a.json", {})
    (tmp_path / "b.json").write_text("{}")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a.json", "b.json")]
    assert modes[0] == modes[1]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_are_refused_before_anything_is_written(tmp_path, number):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"x": number})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_end_half_way_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, error):
    (tmp_path / "a.json").write_text("old")

    def fail(*arguments):
        raise error

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises((UsageError, KeyboardInterrupt)):
        write_json(tmp_path / "a.json", {"new": 1})
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "old"


def test_a_folder_in_the_way_is_one_line(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(UsageError, match=r"cannot write .*a.json: Is a directory"):
        write_json(tmp_path / "a.json", {})
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path):
    expect_writable_folder(tmp_path, "--x")
    expect_writable_folder(tmp_path / "not" / "yet", "--x")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--x: .*file is not a folder"):
        expect_writable_folder(tmp_path / "file" / "below", "--x")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="cannot write into"):
        expect_writable_folder(tmp_path, "--x")
