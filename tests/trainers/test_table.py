"""What `gradcheck-suite trainers` prints."""

from __future__ import annotations

import pytest

from gradcheck_suite.__main__ import main
from gradcheck_suite.trainers import TRAINERS, Trainer


def _here(name, place="gradcheck_suite.loops.sound:plain"):
    return Trainer(name, ("pytest",), place, ("1.0",), "a loop of the suite's own")


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


SOUND, FAULTY = _here("sound"), _here("faulty", "gradcheck_suite.evidence.zoo.bugs.denominators:mean_of_means")
GONE = _here("gone", "gradcheck_suite.loops.modes:no_such_loop")


def test_the_console_says_who_holds_and_how_to_read_a_case(asked):
    status, out, _ = asked(SOUND, FAULTY)
    header, *lines, legend, summary = out.splitlines()
    assert status == 1
    assert header.startswith("gradcheck-suite ")
    assert "up to 4 cases for each question, seed 0" in header
    assert len(lines) == 12
    assert lines[0].split() == ["sound", "pytest", SOUND.version, "equal", "counts", "holds"]
    assert any("unequal counts" in line and "VIOLATED  mean-of-means  [2 1] K=2" in line for line in lines)
    assert "windows apart by |" in legend
    assert summary == "1 of 2 trainers hold on every question: sound"


def test_a_violated_trainer_is_an_answer_where_that_is_asked_for(asked):
    status, out, _ = asked(FAULTY, options=["--exit-zero"])
    assert status == 0
    assert "faulty is violated on some question" in out


def test_one_that_cannot_be_loaded_stops_no_other_and_says_why_once(asked):
    status, out, _ = asked(GONE, SOUND)
    assert status == 0
    assert out.count("not asked") == 7
    assert out.count("gone was not asked: gone cannot be loaded with pytest") == 1
    assert "sound holds on every question" in out


def test_where_no_question_could_be_put_nothing_holds(asked):
    status, out, err = asked(GONE)
    assert status == 2
    assert "holds" not in out
    assert "no question could be put here" in err


def test_heads_are_asked_of_one_trainer_alone(asked):
    status, _, err = asked(SOUND, options=["--heads"])
    assert status == 2
    assert "--heads asks hf-trainer alone; got 'sound'" in err
