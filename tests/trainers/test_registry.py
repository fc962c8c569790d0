"""Trainers by name, on a machine that may have none of them."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import pytest

from gradcheck_suite.__main__ import main
from gradcheck_suite.cli.loading import resolve_loop
from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.execution import environment
from gradcheck_suite.trainers import TRAINERS, Trainer

ABSENT = Trainer("absent", ("no-such-trainer", "accelerate"), "gradcheck_suite.loops.modes:zero_", ("1.0",), "nothing")
HERE = Trainer("here", ("pytest",), "gradcheck_suite.loops.modes:MODES", ("1.0", "2.0"), "something installed")


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
    assert "one of hf-trainer, hf-trainer-plain" in capsys.readouterr().err


@pytest.mark.usefixtures("listed")
def test_a_misspelt_trainer_is_suggested():
    with pytest.raises(ValueError, match="did you mean 'hf-trainer'"):
        resolve_loop("hf-trainr")


def test_an_untested_version_is_noted_and_a_tested_one_is_not():
    assert HERE.note == (
        f"here is tested with pytest 1.0 and 2.0; {_version('pytest')} is installed, and is run all the same"
    )
    assert Trainer("here", ("pytest",), HERE.place, (_version("pytest"),), "").note is None
    assert ABSENT.note is None


def test_the_note_goes_to_standard_error_and_the_run_goes_on(capsys, monkeypatch, tmp_path):
    known = Trainer("here", ("pytest",), "gradcheck_suite.loops.sound:plain", ("1.0",), "a sound loop")
    monkeypatch.setitem(TRAINERS, "here", known)
    problem = "gradcheck_suite.trainers.dense:MEAN"
    status = main(["verify", "here", "--problem", problem, "--examples", "2", "--reports", str(tmp_path)])
    captured = capsys.readouterr()
    assert captured.err == f"gradcheck-suite: note: {known.note}\n"
    assert (status, "here  holds" in captured.out) == (0, True)


def test_the_verdict_says_which_version_it_is_about(capsys, monkeypatch, tmp_path):
    known = Trainer("here", ("pytest",), "gradcheck_suite.loops.sound:plain", (_version("pytest"),), "a sound loop")
    monkeypatch.setitem(TRAINERS, "here", known)
    path = tmp_path / "result.json"
    problem = "gradcheck_suite.trainers.dense:MEAN"
    command = ["verify", "here", "--problem", problem, "--examples", "1", "--reports", str(tmp_path)]
    assert main([*command, "--json", str(path)]) == 0
    assert f", pytest {known.version}: 1 case per loop" in capsys.readouterr().out.splitlines()[0]
    assert json.loads(path.read_text())["environment"]["versions"]["pytest"] == known.version


def test_the_environment_names_every_package_that_brings_a_trainer():
    wanted = {package for trainer in TRAINERS.values() for package in trainer.packages}
    assert wanted == set(environment.TRAINERS)
    found = environment.versions()
    assert {name: found.get(name) for name in wanted} == {name: _version(name) for name in wanted}
    assert {name for name in wanted if name in found} == {name for name in wanted if _version(name)}


def test_a_version_whose_names_moved_is_one_line():
    moved = Trainer("moved", ("pytest",), "gradcheck_suite.loops.modes:no_such_loop", ("1.0",), "")
    with pytest.raises(CannotRunHere, match=r"moved cannot be loaded with pytest .* it is tested with 1.0"):
        moved.load()


def test_every_trainer_has_a_row_of_its_own_and_an_adapter():
    for name, trainer in TRAINERS.items():
        assert trainer.name == name
        assert trainer.about
        assert trainer.tested
        assert trainer.place.startswith("gradcheck_suite.trainers.")
        if trainer.missing is None:
            assert callable(trainer.load())


def test_listing_the_trainers_imports_none():
    code = (
        "import sys; from gradcheck_suite.__main__ import main; main(['trainers', '--list']);"
        "print([m for m in ('torch', 'transformers', 'accelerate', 'lightning') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *listed, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    assert [line.split()[0] for line in listed] == list(TRAINERS)
