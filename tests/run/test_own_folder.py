"""Compiled programs are pickles: where anybody else may have written one, it is not read."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from gradcheck_suite import UsageError
from gradcheck_suite.cli import exit_status, run
from gradcheck_suite.reference.programs import CompiledPrograms

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has no users")
needs_root = pytest.mark.skipif(
    getattr(os, "geteuid", int)() != 0, reason="only root may give files away"
)
OTHER = 65534
"""Another user's number."""
X = np.arange(3.0)


class _Planted:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def _double(x):
    return 2 * x


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder with one program, which is replaced by a pickle that leaves a mark when it is
    read.
    """
    folder = tmp_path / "cache"
    monkeypatch.setenv("GRADCHECK_SUITE_CACHE", str(folder))
    CompiledPrograms().call("double", _double, X)
    (program,) = (f for f in folder.rglob("*") if f.is_file())
    program.write_bytes(pickle.dumps(_Planted(tmp_path / "mark")))
    return folder


def _expect_refused(capsys, folder, *said):
    for what in ("verify --examples 1", "campaign verify"):
        assert run(what.split()) == exit_status.BAD_USAGE
        (line,) = capsys.readouterr().err.splitlines()
        for part in (f"compiled programs in {folder} are not read", *said):
            assert part in line
    with pytest.raises(UsageError, match="are not read"):
        CompiledPrograms().call("double", _double, X)
    assert not (folder.parent / "mark").exists()


def test_a_planted_program_in_a_folder_of_ones_own_is_read(cache, tmp_path):
    CompiledPrograms().call("double", _double, X)
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(cache, capsys, mode):
    cache.chmod(mode)
    said = f"may be written to by others (mode {mode:o}): run chmod go-w {cache}"
    _expect_refused(capsys, cache, said)
    cache.chmod(0o755)
    CompiledPrograms().call("other", _double, X)


def test_a_folder_within_it_that_others_may_write_to_is_refused(cache):
    (within,) = (f for f in cache.iterdir() if f.is_dir() and f.name != "hypothesis")
    within.chmod(0o777)
    with pytest.raises(UsageError, match=f"chmod go-w {within}"):
        CompiledPrograms().call("double", _double, X)


@needs_root
def test_a_folder_of_another_user_is_refused(cache, capsys):
    os.chown(cache, OTHER, OTHER)
    _expect_refused(
        capsys, cache, f"belongs to user {OTHER}: set GRADCHECK_SUITE_CACHE to a folder of your own"
    )


@needs_root
def test_a_program_of_another_user_is_not_read(cache, tmp_path):
    (program,) = (f for f in cache.rglob("*") if f.is_file())
    os.chown(program, OTHER, OTHER)
    np.testing.assert_array_equal(CompiledPrograms().call("double", _double, X), 2 * X)
    assert not (tmp_path / "mark").exists()


def test_a_new_folder_is_the_users_alone_whatever_the_umask(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADCHECK_SUITE_CACHE", str(tmp_path / "new"))
    before = os.umask(0o000)
    try:
        CompiledPrograms().call("double", _double, X)
    finally:
        os.umask(before)
    assert {f.stat().st_mode & 0o077 for f in tmp_path.rglob("*")} == {0}
