"""Trainers by name, on a machine that may have none of them."""

from __future__ import annotations

import importlib.metadata
import json
import runpy
import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest

from gradcheck_suite.__main__ import main
from gradcheck_suite.cli.loading import resolve_loop
from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.loops.reset_modes import plain
from gradcheck_suite.loops.trainers import PACKAGES, TRAINERS, Trainer
from gradcheck_suite.run import environment
from tests.docs.pages import ROOT

ABSENT = Trainer("absent", plain, "nothing", ("no-such-trainer>=1", "accelerate>=1.0"), ("1.0",))
HERE = Trainer("here", plain, "a sound loop", ("pytest>=8",), ("1.0", "2.0"))


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@pytest.fixture
def listed(monkeypatch):
    monkeypatch.setitem(TRAINERS, "absent", ABSENT)
    monkeypatch.setitem(TRAINERS, "here", HERE)


@pytest.mark.usefixtures("listed")
def test_a_trainer_that_is_not_installed_is_one_line_with_the_command(capsys):
    assert main(["verify", "absent"]) == 2
    captured = capsys.readouterr()
    absent = " ".join(name for name in ABSENT.packages if _version(name) is None)
    said = " and ".join(absent.split())
    assert captured.err == (
        f"gradcheck-suite verify: error: absent needs {said}, not installed here: pip install {absent}\n"
    )
    assert "Traceback" not in captured.out


@pytest.mark.usefixtures("listed")
def test_the_study_says_so_too(capsys):
    assert main(["trainers", "absent"]) == 2
    assert "pip install no-such-trainer" in capsys.readouterr().err


@pytest.mark.usefixtures("listed")
def test_an_unknown_trainer_gets_the_names(capsys):
    assert main(["trainers", "hf"]) == 2
    assert f"one of {', '.join(TRAINERS)}; got 'hf'" in capsys.readouterr().err


@pytest.mark.usefixtures("listed")
def test_a_misspelt_trainer_is_suggested():
    with pytest.raises(ValueError, match="did you mean 'hf-trainer'"):
        resolve_loop("hf-trainr")


def test_an_untested_version_is_noted_and_a_tested_one_is_not():
    assert HERE.note == (
        f"here is tested with pytest 1.0 and 2.0; {_version('pytest')} is installed, and is run all the same"
    )
    assert replace(HERE, tested=(_version("pytest"),)).note is None
    assert ABSENT.note is None


def test_an_untested_version_is_run_with_a_note_and_named_in_the_verdict(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(TRAINERS, "here", HERE)
    path = tmp_path / "result.json"
    problem = "gradcheck_suite.loops.trainers.problems:MEAN"
    command = ["verify", "here", "--problem", problem, "--examples", "1", "--reports", str(tmp_path)]
    status = main([*command, "--json", str(path)])
    captured = capsys.readouterr()
    assert captured.err == f"gradcheck-suite: note: {HERE.note}\n"
    assert (status, "here  holds" in captured.out) == (0, True)
    assert f", pytest {HERE.version}: 1 case per loop" in captured.out.splitlines()[0]
    assert json.loads(path.read_text())["environment"]["versions"]["pytest"] == HERE.version


def test_the_environment_lists_the_packages_of_trainers_that_are_installed():
    found = environment.versions(PACKAGES)
    assert {name: found.get(name) for name in PACKAGES} == {name: _version(name) for name in PACKAGES}
    assert {name for name in PACKAGES if name in found} == {name for name in PACKAGES if _version(name)}


def test_a_version_that_lacks_a_name_is_one_line():
    moved = replace(HERE, name="moved", imports=("gradcheck_suite.loops.reset_modes:no_such_loop",), tested=("1.0",))
    with pytest.raises(CannotRunHere, match=r"moved cannot be loaded with pytest .* it is tested with 1.0"):
        moved.load()


def test_extras_and_tox_install_what_the_records_say():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras, groups = project["project"]["optional-dependencies"], project["dependency-groups"]
    pinned = {pin for name, group in groups.items() if name.startswith("trainers-") for pin in group}
    for name, trainer in TRAINERS.items():
        assert trainer.name == name
        assert set(extras[trainer.package]) == set(trainer.requires)
        assert {f"{trainer.package}=={version}" for version in trainer.tested} <= pinned
        if trainer.missing is None:
            assert callable(trainer.load())


def test_the_guide_lists_every_trainer():
    table = runpy.run_path(str(ROOT / "docs" / "conf.py"))["trainers_table"]()
    assert all(f"`{name}`" in table for name in TRAINERS)


def test_listing_the_trainers_imports_none():
    code = (
        "import sys; from gradcheck_suite.__main__ import main; main(['trainers', '--list']);"
        "print([m for m in ('torch', 'transformers', 'accelerate', 'lightning') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *listed, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    assert [line.split()[0] for line in listed] == list(TRAINERS)
