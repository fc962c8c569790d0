"""Trainers by name, on a machine that may have none of them."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest

from gradcheck_suite.__main__ import main
from gradcheck_suite.cli.loading import resolve_loop
from gradcheck_suite.core.contract import jax_training_loop
from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.loops.reset_modes import plain
from gradcheck_suite.loops.trainers import PACKAGES, TRAINERS, Trainer
from gradcheck_suite.loops.trainers.problems import MEAN
from gradcheck_suite.loops.trainers.trainer import PLANS, PLANS_OF_JAX
from gradcheck_suite.run import environment
from studies.zoo.bugs.micro_batches import mean_of_means
from tests.docs.conftest import folder  # noqa: F401  (a fixture)
from tests.docs.pages import ROOT, Block, Page, blocks

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


@pytest.mark.full
def test_an_untested_version_is_run_with_a_note_and_named_in_the_verdict(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.setitem(TRAINERS, "here", HERE)
    path = tmp_path / "result.json"
    problem = "gradcheck_suite.loops.trainers.problems:MEAN"
    command = [
        "verify",
        "here",
        "--problem",
        problem,
        "--examples",
        "1",
        "--reports",
        str(tmp_path),
    ]
    status = main([*command, "--json", str(path)])
    captured = capsys.readouterr()
    assert captured.err == f"gradcheck-suite: note: {HERE.note}\n"
    assert (status, "here  holds" in captured.out) == (0, True)
    assert f", pytest {HERE.version}: 1 case per loop" in captured.out.splitlines()[0]
    assert json.loads(path.read_text())["environment"]["versions"]["pytest"] == HERE.version


def test_the_environment_lists_the_packages_of_trainers_that_are_installed():
    found = environment.versions(PACKAGES)
    assert {name: found.get(name) for name in PACKAGES} == {
        name: _version(name) for name in PACKAGES
    }
    assert {name for name in PACKAGES if name in found} == {
        name for name in PACKAGES if _version(name)
    }


def test_a_version_that_lacks_a_name_is_one_line():
    moved = replace(
        HERE,
        name="moved",
        imports=("gradcheck_suite.loops.reset_modes:no_such_loop",),
        tested=("1.0",),
    )
    with pytest.raises(
        CannotRunHere, match=r"moved cannot be loaded with pytest .* it is tested with 1.0"
    ):
        moved.load()


def test_extras_and_tox_install_what_the_records_say():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras, groups = project["project"]["optional-dependencies"], project["dependency-groups"]
    pinned = {
        pin for name, group in groups.items() if name.startswith("trainers-") for pin in group
    }
    for name, trainer in TRAINERS.items():
        assert trainer.name == name
        assert set(extras[trainer.package]) == set(trainer.requires)
        assert {f"{trainer.package}=={version}" for version in trainer.tested} <= pinned
        if trainer.missing is None:
            assert callable(trainer.load())


def test_the_guide_lists_every_trainer():
    page = PAGE.read_text()
    assert all(f"`{name}`" in page for name in TRAINERS)


def test_listing_the_trainers_imports_none():
    code = (
        "import sys; from gradcheck_suite.__main__ import main; main(['trainers', '--list']);"
        "print([m for m in ('torch', 'transformers', 'accelerate', 'lightning') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *listed, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    assert [line.split()[0] for line in listed] == list(TRAINERS)


# What `gradcheck-suite trainers` prints.


def _here(name, loop=plain, **changes):
    return Trainer(name, loop, "a loop of the suite's own", ("pytest",), ("1.0",), **changes)


@pytest.fixture
def asked(monkeypatch, tmp_path, capsys):
    """Ask some trainers, with few cases; return the status, what was printed, and the errors."""

    def ask(*trainers, options=()):
        for trainer in trainers:
            monkeypatch.setitem(TRAINERS, trainer.name, trainer)
        names = [trainer.name for trainer in trainers]
        status = main(["trainers", *names, "--examples", "4", "--reports", str(tmp_path), *options])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return ask


def problem():
    """Return a problem, as a function that a question may name."""
    return MEAN


EQUAL, UNEQUAL = PLANS[:2]
SOUND = _here("sound", questions=(replace(UNEQUAL, problem=f"{__name__}:problem"),))
FAULTY = _here("faulty", mean_of_means, questions=(UNEQUAL,))
GONE = _here(
    "gone", imports=("gradcheck_suite.loops.reset_modes:no_such_loop",), questions=(EQUAL, UNEQUAL)
)


@pytest.mark.full
def test_the_first_line_says_in_which_dtype_loops_of_jax_run(asked):
    of_jax = _here("of-jax", jax_training_loop(lambda run: None), questions=PLANS_OF_JAX[:1])
    assert "seed 0, float32 on cpu\n" in asked(of_jax)[1]
    assert "seed 0, float32 on cpu of JAX and float64 on cpu\n" in asked(of_jax, FAULTY)[1]


@pytest.mark.full
def test_a_violated_trainer_has_status_0_where_that_is_asked_for(asked):
    status, out, _ = asked(FAULTY, options=["--exit-zero"])
    assert status == 0
    assert "faulty is violated on some question" in out


def test_where_no_question_could_be_asked_nothing_holds(asked):
    status, out, err = asked(GONE)
    assert status == 2
    assert "holds" not in out
    assert "no question could be asked here" in err
    # as in a shard of a campaign over all trainers
    assert asked(GONE, options=["--exit-zero"])[0] == 0


def test_models_are_asked_of_one_trainer_alone(asked):
    status, _, err = asked(SOUND, options=["--heads"])
    assert status == 2
    assert "--heads asks hf-trainer alone; got 'sound'" in err


# What the guide shows of trainers is what they do: its blocks on a release are run where that
# release is installed.


PAGE = ROOT / "docs" / "check-my-trainer.md"
RELEASE = re.compile(r"\b(transformers|accelerate|lightning) (\d[\d.]*\d)\b")


def _shown() -> list[Block]:
    """Return the blocks that show a command with what a release makes of it."""
    return [
        b
        for b in blocks(PAGE.read_text())
        if b.language == "text" and b.text.startswith("$ ") and RELEASE.search(b.text)
    ]


@pytest.mark.parametrize("block", _shown(), ids=lambda block: f"line {block.line}")
def test_the_guide(block, folder):  # noqa: F811
    for package, version in sorted(set(RELEASE.findall(block.text))):
        if _version(package) != version:
            pytest.skip(f"needs {package} {version}; here is {_version(package)}")
    Page(PAGE.name, folder, few=False).run(Block("console", block.text, block.line))


def test_every_question_about_a_model_has_its_problem():
    """A class of transformers that is imported under its own name would be taken for the problem of
    that name.
    """
    pytest.importorskip("transformers")
    models = importlib.import_module("gradcheck_suite.loops.trainers.models")
    assert [name for name in models.NAMES if isinstance(getattr(models, name), type)] == []
