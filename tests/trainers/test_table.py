"""The table in the page: latest answers, a row for each version, and nobody's words lost."""

from __future__ import annotations

import pytest

from gradcheck_suite.__main__ import main
from gradcheck_suite.records.store import append_record
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.plan import Plan
from gradcheck_suite.trainers import TRAINERS, Trainer
from gradcheck_suite.trainers.table import END, START, write_table


def _answer(trainer, version, question, plan=None, diagnosis="mean-of-means", explanation="why: what to do"):
    violation = plan and {"diagnosis": diagnosis, "explanation": explanation, "case": Case("x", plan).to_json()}
    result = {"violation": violation}
    return {"trainer": trainer, "package": "p", "version": version, "question": question, "result": result}


def _page(tmp_path, *answers):
    for answer in answers:
        append_record(tmp_path, "trainer", answer, environment={}, command="")
    return write_table(tmp_path).read_text().splitlines()


def test_a_row_for_each_version_and_the_latest_answer(tmp_path):
    lines = _page(
        tmp_path,
        _answer("accelerate", "1", "equal", Plan((1, 2), 2)),
        _answer("accelerate", "1", "equal"),
        _answer("hf-trainer", "2", "unequal", Plan((1, 2, 1), 2, 2)),
    )
    assert [line for line in lines if line.startswith("|")] == [
        "| trainer | version | equal | unequal |",
        "| --- | --- | --- | --- |",
        "| `hf-trainer` | p 2 |  | **mean-of-means** [1 2 &#124; 1] K=2, 2 epochs |",
        "| `accelerate` | p 1 | holds |  |",
    ]


def test_heads_have_a_table_of_their_own(tmp_path):
    lines = _page(tmp_path, _answer("hf-trainer", "2", "head BertForMaskedLM", Plan((1,), 2)))
    assert "| `BertForMaskedLM` | p 2 | **mean-of-means** [1] K=2 | why |" in lines
    assert not any("trainer |" in line for line in lines)


def test_what_stands_around_the_table_stays(tmp_path):
    (tmp_path / "trainers.md").write_text(f"before\n\n{START}\nlast time\n{END}\n\nafter\n")
    text = "\n".join(_page(tmp_path, _answer("accelerate", "1", "equal")))
    assert text.startswith("before\n\n<!-- table")
    assert text.endswith("<!-- end of table -->\n\nafter")
    assert "last time" not in text
    again = write_table(tmp_path).read_text()
    assert again.rstrip("\n") == text


def test_a_page_without_a_place_for_the_table_gets_it_at_its_end(tmp_path):
    (tmp_path / "trainers.md").write_text("mine\n")
    assert _page(tmp_path, _answer("accelerate", "1", "equal"))[:3] == ["mine", "", START]


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
    header, *lines, legend, summary, table = out.splitlines()
    assert status == 1
    assert header.startswith("gradcheck-suite ")
    assert "up to 4 cases for each question, seed 0" in header
    assert len(lines) == 12
    assert lines[0].split() == ["sound", "pytest", SOUND.version, "equal", "counts", "holds"]
    assert any("unequal counts" in line and "VIOLATED  mean-of-means  [2 1] K=2" in line for line in lines)
    assert "windows apart by |" in legend
    assert summary == "1 of 2 trainers hold on every question: sound"
    assert table.startswith("table  ")


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
