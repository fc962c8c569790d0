"""What new users stumbled over: layouts, read-only folders, help on narrow terminals, progress."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from gradcheck_suite.cli import PROGRAM
from gradcheck_suite.cli.arguments import set_python_path, top_parser
from gradcheck_suite.core.contract import ASSUMPTIONS
from gradcheck_suite.errors import UsageError
from tests.cli.conftest import files

RELATIVE = "from .helper import sound\n\ndef train(run):\n    sound(run)\n"


@pytest.fixture
def src_layout(project):
    """A package `pkg` with a loop in `src/pkg/sub/loop.py`, which imports relative to it."""
    folder = project / "src" / "pkg" / "sub"
    folder.mkdir(parents=True)
    for name in ("src/pkg/__init__.py", "src/pkg/sub/__init__.py"):
        (project / name).touch()
    (folder / "loop.py").write_text(RELATIVE)
    (folder / "helper.py").write_text((project / "loops.py").read_text())
    yield project
    for name in [name for name in sys.modules if name.partition(".")[0] == "pkg"]:
        del sys.modules[name]


def test_a_relative_import_gets_the_hint_to_name_the_module(run, src_layout):
    said = run("verify", "src/pkg/sub/loop.py:train").err
    assert "; name the module, not the file: pkg.sub.loop:NAME, with src in pythonpath" in said
    assert said.count("\n") == 1


def test_another_failed_import_gets_no_such_hint(run, project):
    (project / "lacks.py").write_text("import nowhere_to_be_found\n")
    assert "name the module" not in run("verify", "lacks.py:train").err


def test_pythonpath_finds_the_package_of_a_src_layout(run, src_layout):
    assert "there is no module" in run("verify", "pkg.sub.loop:train").err
    (src_layout / "pyproject.toml").write_text('[tool.gradcheck-suite]\npythonpath = ["src"]\n')
    outcome = run("verify", "pkg.sub.loop:train", "-n", 2, "-q")
    assert (outcome.status, outcome.err) == (0, "")


def test_the_project_folder_names_pythonpath_wherever_the_command_starts(src_layout, monkeypatch):
    (src_layout / "pyproject.toml").write_text('[tool.gradcheck-suite]\npythonpath = ["src"]\n')
    monkeypatch.chdir(src_layout / "src" / "pkg")
    set_python_path()
    assert sys.path[0] == str(src_layout / "src")


def test_a_pythonpath_that_is_not_there_is_said(project):
    (project / "pyproject.toml").write_text('[tool.gradcheck-suite]\npythonpath = ["scr"]\n')
    with pytest.raises(UsageError, match="there is no folder scr"):
        set_python_path()


@pytest.fixture
def read_only(monkeypatch):
    """A folder in which nothing can be written; permission bits do not stop the superuser."""
    from gradcheck_suite.core import records

    def refused(*, dir):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(records.tempfile, "TemporaryFile", refused)


@pytest.mark.usefixtures("read_only", "untouched")
@pytest.mark.parametrize(("loop", "status"), [("sound", 0), ("no_reset", 1)])
def test_verify_warns_and_judges_in_a_read_only_folder(run, loop, status):
    outcome = run("verify", f"loops.py:{loop}", "-n", 2)
    assert outcome.status == status
    assert outcome.err == (
        "gradcheck-suite verify: warning: counterexamples are not stored: cannot write into ."
        " (Read-only file system); --reports DIR names another folder\n"
    )
    assert "replay" not in outcome.out


@pytest.mark.usefixtures("read_only", "untouched")
def test_a_read_only_folder_that_the_user_named_is_refused(run):
    outcome = run("verify", "loops.py:sound", "-n", 2, "--reports", "kept")
    assert outcome.status == 2
    assert "--reports kept: cannot write into" in outcome.err


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("command", [None, *PROGRAM.commands])
def test_help_fits_the_terminal_and_breaks_no_name(command, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    parser = (
        PROGRAM.parser(command)
        if command
        else top_parser(PROGRAM.name, {n: c.summary for n, c in PROGRAM.commands.items()})
    )
    text = parser.format_help()
    assert [line for line in text.splitlines() if len(line) > 80] == [] or columns == 100
    assert max(map(len, text.splitlines())) <= columns
    for name in ASSUMPTIONS if command == "verify" else ():
        assert re.search(rf"(?<![\w-]){name}(?![\w-])", text), f"{name} is broken"


def test_trainers_prints_answers_alone_where_it_is_to_be_quiet(run):
    quiet = run("trainers", "loops.py:sound", "-n", 1, "-q").out.splitlines()
    told = run("trainers", "loops.py:sound", "-n", 1).out.splitlines()
    assert told[1:-1] == quiet
    assert all("holds" in line for line in quiet)


def test_campaign_takes_cases_and_quiet(run, project):
    outcome = run("campaign", "-q", "-n", 2, "verify", "loops.py:sound")
    assert outcome.out == "loops.py:sound  holds  2 cases\n"
    assert files(project / "reports") == [str(Path("records") / "verify.jsonl")]


class Bar:
    """What `Progress` is asked to show."""

    names: ClassVar[list[str]] = []
    counted = 0

    def __init__(self, **settings):
        Bar.names, Bar.counted = [], 0

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        pass

    def start(self, name, examples=None):
        Bar.names.append(name)

    def advance(self, verdict):
        Bar.counted += 1

    def stop(self):
        pass


def test_trainers_shows_each_question_and_its_cases(run, monkeypatch):
    monkeypatch.setattr("gradcheck_suite.cli.trainers.Progress", Bar)
    questions = run("trainers", "loops.py:sound", "-n", 2, "-q").out.splitlines()
    assert len(Bar.names) == len(questions)
    assert all(name.startswith("loops.py:sound: ") for name in Bar.names)
    assert Bar.counted >= 2 * len(questions)
