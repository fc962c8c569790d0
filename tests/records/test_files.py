"""Files are written whole or not at all."""

from __future__ import annotations

import json
import os
import stat

import pytest

from gradcheck_suite.errors import UsageError
from gradcheck_suite.records import files
from gradcheck_suite.records.files import expect_writable_folder, write_json


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
