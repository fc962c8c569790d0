"""Which gradient of a further run is compared with the one that was wrong, and when the case itself is read."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Plan, Problem
from gradcheck_suite.core.comparison import Comparison
from gradcheck_suite.judge.gradient import explain_on_case, gradient_of_step
from gradcheck_suite.judge.reruns import LoopRunner
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.reference.large_batch import Reference, Window
from gradcheck_suite.run.instance import user_instance
from gradcheck_suite.run.observer import Evaluation, Observation
from gradcheck_suite.run.runner import Outcome
from tests.judge.explaining import as_it_is, double, explained, then

CASE = Case("own", Plan((1, 3, 2, 2), 2))


def _reference(case=CASE):
    problem = Problem(
        lambda seed: torch.nn.Linear(1, 1, bias=False),
        lambda items, seed: torch.arange(1.0, items + 1)[:, None],
        lambda model, batch: model(batch).mean(),
    )
    return Reference(user_instance(case, problem))


def _outcome(*calls, **options):
    """Return a run of two steps, of which the second calls its closure and finds these gradients."""

    def step(*values):
        evaluations = tuple(Evaluation({"weight": torch.tensor([[value]])}, {}) for value in values)
        return Observation(evaluations, {}, [], [])

    return Outcome([step(0.0), step(*calls)], {}, {}, **options)


@pytest.mark.parametrize(
    ("calls", "seen", "found"),
    [
        ((1.0, 2.0, 3.0), None, 3.0),
        ((1.0, 2.0, 3.0), 1.25, 1.0),
        ((1.0, 2.0, 3.0), 2.25, 2.0),
        ((1.0, 2.0, 3.0), 4.0, 3.0),
        ((-1.0, 2.0), -2.0, -1.0),  # by its distance, not by its size
        ((2.0, -1.0), -2.0, -1.0),
        ((3.0, 1.0), 0.25, 1.0),
        ((3.0, 8.0), 2.5, 3.0),
        ((math.nan, 2.0), 2.0, math.nan),  # what cannot be compared is no further away
    ],
)
def test_of_several_calls_the_last_or_the_nearest_is_taken(calls, seen, found):
    reference = _reference()
    gradient = gradient_of_step(_outcome(*calls), reference, 1, None if seen is None else np.array([seen]))
    assert gradient == pytest.approx([found], nan_ok=True)


@pytest.mark.parametrize(("step", "there"), [(0, True), (1, True), (2, False), (3, False)])
def test_a_run_that_stopped_before_has_no_gradient(step, there):
    assert (gradient_of_step(_outcome(1.0), _reference(), step) is not None) is there
    assert gradient_of_step(_outcome(1.0, raised="ValueError: no"), _reference(), step) is None


@pytest.mark.parametrize("window", [1, 2])
def test_the_step_is_that_of_the_epoch_and_the_window(window):
    """Of three windows an epoch, the gradient of one in the second epoch alone is doubled."""
    changes = [as_it_is] * 6
    changes[3 + window] = double
    for dtype in ("float64", "float32"):
        name, sentence, _ = explained(then(*changes), plan=Plan((1, 2, 3), 1, 2), window=window, epoch=1, dtype=dtype)
        assert name == "wrong-scale"
        assert sentence.startswith("in weight alone, while bias is right")


def _explained_at(ratio, case, *, moved=False, monkeypatch):
    """Return what is said of a case on which float64, at the start, is wrong by so many times what is allowed."""
    reference = _reference(case)
    parameters = {"weight": torch.full((1, 1), 2.0)} if moved else None
    window = reference.window(0, parameters)

    def compare(self, observed):
        return Comparison(self.reference.layout, observed, observed + ratio, np.ones_like(observed))

    monkeypatch.setattr(Window, "compare", compare)
    wrong = Comparison(reference.layout, window.expected, window.expected * 2, np.full(1, 1e-9))
    runner = LoopRunner(MODES["zero_"])
    found = explain_on_case(runner, window, wrong, 0, is_linear_there=True)
    return found, 3 - runner.runs_left


@pytest.mark.parametrize(("ratio", "read"), [(0.5, False), (1.0, False), (1.5, True)])
def test_a_case_is_read_in_float64_where_that_is_wrong_beyond_the_bound(ratio, read, monkeypatch):
    found, _ = _explained_at(ratio, CASE.replace(dtype="float32"), monkeypatch=monkeypatch)
    assert (found is not None) is read


@pytest.mark.parametrize(
    ("dtype", "moved", "again"), [("float64", True, True), ("float32", True, False), ("float32", False, False)]
)
def test_what_is_right_at_the_start_is_run_again_where_float64_moved_alone(dtype, moved, again, monkeypatch):
    case = CASE.replace(dtype=dtype, optimizer="sgd" if moved else None)
    found, runs = _explained_at(0.5, case, moved=moved, monkeypatch=monkeypatch)
    assert runs == 1 + again
    # the loop is sound, so that the fault is gone
    assert (found is not None and found.name == "not-repeatable") is again


def test_the_case_itself_is_told_by_its_value(monkeypatch):
    """A case that equals the one in float64 at its start is that one, whichever object it is."""
    reference = _reference(replace(CASE))
    window = reference.window(0)
    wrong = Comparison(reference.layout, window.expected, window.expected * 2, np.full(1, 1e-9))
    found = explain_on_case(LoopRunner(MODES["zero_"]), window, wrong, 0, is_linear_there=True)
    assert found.name == "not-repeatable"
    assert "read off" not in found.sentence
