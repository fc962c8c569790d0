"""Loops of one's own: any subclass of transformers' Trainer in one line, and `trainers
my_loops.py:loop`.
"""

from __future__ import annotations

import json

import pytest

from gradcheck_suite import Case, Plan, UsageError, check, transformers_loop
from gradcheck_suite.__main__ import main
from gradcheck_suite.cli.loading import resolve_loop, resolve_problem
from tests.one_problem import MEAN_OF_MEANS

OWN = "tests.loops.trainers.own_loops"
EQUAL, UNEQUAL = Plan((2, 2, 2), 3), Plan((1, 3), 2)
FOUND = {
    ("sft", "SFT"): {EQUAL: None, UNEQUAL: None},
    ("reward", "REWARD"): {EQUAL: None, UNEQUAL: "mean-of-means"},
    ("sentences", "SENTENCES"): {EQUAL: None, UNEQUAL: "mean-of-means"},
}
"""Loop and Problem -> plan -> the diagnosis, or None where it holds."""


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("names", FOUND, ids=lambda names: names[0])
def test_a_trainer_of_another_package_is_a_loop_in_one_line(names):
    for package in ("trl", "sentence_transformers"):
        pytest.importorskip(package, reason=f"needs {package}")
    loop, problem = resolve_loop(f"{OWN}:{names[0]}"), resolve_problem(f"{OWN}:{names[1]}")
    for plan, diagnosis in FOUND[names].items():
        violation = check(loop, Case(names[1], plan), problem=problem).violation
        assert (violation and violation.diagnosis) == diagnosis, violation


def test_something_else_than_a_trainer_is_refused():
    with pytest.raises(
        UsageError, match=r"expected a subclass of transformers\.Trainer, got <class 'dict'>"
    ):
        transformers_loop(dict)


@pytest.mark.full
def test_the_questions_are_asked_of_a_loop_in_a_file(tmp_path, capsys):
    file, path = tmp_path / "my_loops.py", tmp_path / "answers.json"
    file.write_text(MEAN_OF_MEANS)
    options = ["--examples", "2", "--json", str(path), "--reports", str(tmp_path)]
    problem = ["--problem", "gradcheck_suite.loops.trainers.problems:MEAN"]
    assert main(["trainers", f"{file}:halves", *problem, *options]) == 1
    answers = json.loads(path.read_text())["answers"]
    assert {a["question"]: (a["result"]["violation"] or {}).get("diagnosis") for a in answers} == {
        "equal counts": None,
        "unequal counts": "mean-of-means",
        "short last window": "mean-of-means",
        "epoch shorter than K": "mean-of-means",
        "several epochs": None,
    }
    assert "my_loops.py:halves own file" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.py:loop"], "none.py"),
        (
            ["--heads", "--problem", "p.py:P"],
            "--heads asks about models of its own: leave out --problem",
        ),
    ],
)
def test_what_cannot_be_asked_is_one_line(arguments, message, capsys):
    assert main(["trainers", *arguments]) == 2
    assert message in capsys.readouterr().err
