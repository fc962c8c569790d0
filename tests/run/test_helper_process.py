"""A further process is this Python with these modules, whatever the current folder holds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gradcheck_suite.run.processes import Child

ROOT = Path(__file__).parents[2]


@pytest.fixture
def _shadowed(tmp_path, monkeypatch):
    """A current folder with a file of the name of each module that a start could import."""
    for name in ("json", "os", "importlib", "socket", "gradcheck_suite"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'w')")
    here = {"", str(Path.cwd())} - {str(ROOT)}
    monkeypatch.setattr(sys, "path", [str(ROOT), *(p for p in sys.path if p not in here)])
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_shadowed")
def test_it_imports_nothing_from_the_current_folder(tmp_path):
    child = Child("tests.run.answering", "a b", "\n")
    assert child.connection.recv() == ["a b", "\n", os.getpid()]
    assert child.process.wait(60) == 0
    assert not (tmp_path / "imported").exists()
    child.close()


def test_an_orphan_is_no_child_of_this_process():
    child = Child("tests.run.answering", orphan=True)
    assert child.process.wait(60) == 0
    (parent,) = child.connection.recv()
    assert parent not in (os.getpid(), child.process.pid)
    child.close()
