"""Accelerate: its own accumulation divides by K whatever the window, its recipe for unequal counts
does not.
"""

from __future__ import annotations

import pytest

pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[accelerate]'")

from gradcheck_suite import CannotRunHere, Case, Plan, check
from gradcheck_suite.__main__ import main
from gradcheck_suite.loops.trainers import TRAINERS
from gradcheck_suite.loops.trainers.problems import MEAN
from gradcheck_suite.loops.trainers.trainer import PLANS
from tests.loops.trainers.expecting import at_version, cells, diagnosis

RIGHT = (None,) * len(PLANS)
# equal counts, unequal counts, short last window, epoch shorter than K, several epochs, sum loss
FOUND = {
    "accelerate": (None, "mean-of-means", "mean-of-means", "mean-of-means", None, "wrong-scale"),
    "accelerate-counted": RIGHT,
    "accelerate-no-sync": RIGHT,
}
pytestmark = at_version("accelerate", "1.15.0")


@pytest.mark.parametrize(("trainer", "question", "wanted"), cells(FOUND, PLANS))
def test_accelerate(trainer, question, wanted):
    assert diagnosis(trainer, question) == wanted


def test_a_case_that_failed_leaves_nothing_to_the_next():
    """Accelerate's state belongs to the process: an epoch that was left in the middle must not move
    later steps.
    """
    loop, plan = TRAINERS["accelerate"].load(), Plan((1, 1, 1, 1), 2)

    def fails(run):
        calls = []

        def loss(model, batch):
            calls.append(0)
            if len(calls) == 3:
                raise RuntimeError("in the middle of a window")
            return run.loss(model, batch)

        loop(type(run)(**{**vars(run), "loss": loss}))

    assert check(fails, Case("dense", plan), problem=MEAN).violation.kind == "raised"
    assert check(loop, Case("dense", plan), problem=MEAN).holds


def test_the_scaler_is_refused_on_the_cpu():
    with pytest.raises(CannotRunHere, match="`verify` has --device cuda"):
        check(TRAINERS["accelerate-scaler"].load(), Case("dense", Plan((1,), 1)), problem=MEAN)


def test_several_ranks_are_refused_with_what_to_do_instead(tmp_path, capsys):
    """The adapter reduces nothing between ranks: its trainer would be blamed for that."""
    problem = "gradcheck_suite.loops.trainers.problems:MEAN"
    command = ["verify", "accelerate", "--ranks", "2", "--problem", problem, "--examples", "1"]
    assert main([*command, "--reports", str(tmp_path)]) == 2
    assert (
        "`torchrun --nproc-per-node 2 -m gradcheck_suite audit train.py`" in capsys.readouterr().err
    )
