"""What `gradcheck-suite trainers` prints."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gradcheck_suite.__main__ import main
from gradcheck_suite.loops.reset_modes import plain
from gradcheck_suite.loops.trainers import TRAINERS, Trainer
from gradcheck_suite.loops.trainers.problems import MEAN
from gradcheck_suite.loops.trainers.trainer import PLANS
from gradcheck_suite.studies.zoo.bugs.micro_batches import mean_of_means


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
GONE = _here("gone", imports=("gradcheck_suite.loops.reset_modes:no_such_loop",), questions=(EQUAL, UNEQUAL))


@pytest.mark.full
def test_the_console_says_who_holds_how_to_read_a_case_and_once_why_a_trainer_was_not_asked(asked):
    status, out, _ = asked(GONE, SOUND, FAULTY)
    header, first, second, sound, faulty, legend, why, summary = out.splitlines()
    assert status == 1
    assert header.startswith("gradcheck-suite ")
    assert "up to 4 cases for each question, seed 0" in header
    assert [line.split() for line in (first, second)] == [
        ["gone", "pytest", GONE.version, *question.name.split(), "not", "asked"] for question in (EQUAL, UNEQUAL)
    ]
    assert sound.split() == ["sound", "pytest", SOUND.version, "unequal", "counts", "holds"]
    assert "unequal counts" in faulty
    assert re.search(r"VIOLATED  mean-of-means  \[(1 2|2 1)\] K=2", faulty)
    assert "windows separated by |" in legend
    assert why.startswith("gone was not asked: gone cannot be loaded with pytest")
    assert summary == "1 of 2 trainers hold on every question: sound"


def test_a_violated_trainer_has_status_0_where_that_is_asked_for(asked):
    status, out, _ = asked(FAULTY, options=["--exit-zero"])
    assert status == 0
    assert "faulty is violated on some question" in out


def test_where_no_question_could_be_asked_nothing_holds(asked):
    status, out, err = asked(GONE)
    assert status == 2
    assert "holds" not in out
    assert "no question could be asked here" in err


def test_models_are_asked_of_one_trainer_alone(asked):
    status, _, err = asked(SOUND, options=["--heads"])
    assert status == 2
    assert "--heads asks hf-trainer alone; got 'sound'" in err
