"""The libraries that a loop imports, by the files that it comes from."""

from __future__ import annotations

import sys

import pytest

from gradcheck_suite.cli.loading import libraries_of, resolve_loop
from gradcheck_suite.loops.reset_modes import BUILT_IN


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("package", "package.inner"):
        sys.modules.pop(name, None)


def test_libraries_are_found_in_the_file_and_in_those_beside_it(folder):
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("from . import inner\n")
    (folder / "package" / "inner.py").write_text("def later():\n    import rich.console\n")
    (folder / "mine.py").write_text(
        "import os, torch, gradcheck_suite\nfrom package import inner\n"
        "def loop(run):\n    import hypothesis, nowhere_to_be_found\n"
        "class Trainer:\n    def __call__(self, run): ...\ntrainer = Trainer()\n"
    )
    for name in ("loop", "trainer"):
        assert sorted(libraries_of(resolve_loop(f"mine.py:{name}"))) == ["hypothesis", "rich"]
    (folder / "alone.py").write_text("def loop(run): ...\n")
    assert libraries_of(resolve_loop("alone.py:loop")) == ()


@pytest.mark.parametrize("loop", [BUILT_IN["plain"], print, len])
def test_what_is_no_users_file_imports_nothing(loop):
    assert libraries_of(loop) == ()
