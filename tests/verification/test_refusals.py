"""A loop that says that it cannot train something is not blamed; what a loop is
tried on first.
"""

from __future__ import annotations

import pytest

from gradcheck_suite import (
    CannotRunHere,
    Case,
    Input,
    Layer,
    Loss,
    Plan,
    ProblemSpec,
    check,
    verify,
)
from gradcheck_suite.__main__ import main
from gradcheck_suite.loops.trainers.problems import MEAN, SUM

pytestmark = pytest.mark.usefixtures("without_second_opinion")
LINEAR = ProblemSpec(
    Input("vector", size=2),
    (Layer("linear", features=1, bias=False),),
    Loss("mse", reduction="mean"),
)


def refuses(run):
    raise CannotRunHere("this trainer takes no such model: pass another")


def two_faults(run):
    """Divide by K, and never step a short last window."""
    for _ in range(run.epochs):
        for i, batch in enumerate(run.loader):
            (run.loss(run.model, batch) / run.accumulation_steps).backward()
            if (i + 1) % run.accumulation_steps == 0:
                run.optimizer.step()
                run.optimizer.zero_grad()


def test_a_generated_case_is_skipped():
    verdict = check(refuses, Case(LINEAR, Plan((1, 2), 2)))
    assert verdict.holds
    assert verdict.skipped == "this trainer takes no such model: pass another"


def test_a_users_problem_is_the_same_in_every_case_so_that_the_run_ends():
    with pytest.raises(CannotRunHere, match="takes no such model"):
        check(refuses, Case("mine", Plan((1, 2), 2)), problem=MEAN)
    with pytest.raises(CannotRunHere, match="takes no such model"):
        verify(refuses, problem=MEAN, examples=3)


def test_on_the_command_line_it_is_one_line_and_status_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import gradcheck_suite\ndef loop(run):\n    raise gradcheck_suite.CannotRunHere('not this one')\n"
    )
    assert (
        main(
            ["verify", "mine.py:loop", "--problem", "gradcheck_suite.loops.trainers.problems:MEAN"]
        )
        == 2
    )
    assert capsys.readouterr().err == "gradcheck-suite verify: error: not this one\n"


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_fault_in_whole_windows_comes_before_one_of_the_short_last_window(seed):
    violation = verify(two_faults, problem=MEAN, examples=20, seed_value=seed).violation
    assert (violation.diagnosis, violation.case.plan.micro_batches) == ("mean-of-means", (1, 2))


def test_a_loop_that_is_sound_in_whole_windows_is_blamed_for_the_short_one():
    result = verify(two_faults, problem=MEAN, assumes=("equal-micro-batches",), examples=20)
    assert result.violation.diagnosis == "tail-leak"


def test_sums_are_sums():
    """Squares of 5 rows, by hand from the batch and the weights."""
    batch = MEAN.batch(5, 1)
    model = MEAN.model(2)
    weight, bias = model.weight[0].tolist(), model.bias.item()
    squares = [
        (sum(w * x for w, x in zip(weight, row, strict=True)) + bias - y) ** 2
        for row, (y,) in zip(batch["x"].tolist(), batch["y"].tolist(), strict=True)
    ]
    assert SUM.loss(model, batch).item() == pytest.approx(sum(squares), rel=1e-5)
    assert MEAN.loss(model, batch).item() == pytest.approx(sum(squares) / 5, rel=1e-5)
