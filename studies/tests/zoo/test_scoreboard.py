"""What passes on the scoreboard: a right name, in a coarser dtype also none, never a wrong one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradcheck_suite import Problem
from studies.zoo import BUGS
from studies.zoo.bug import train_soundly
from studies.zoo.scoreboard import CaseCounts, Row, count_cases, counts_line, line, run_bug


@pytest.fixture(scope="module")
def row() -> Row:
    return run_bug(BUGS["no-divide"], [0], examples=20)


def _named(row: Row, name: str, **changes: object) -> Row:
    run = row.runs[0]
    assert run.violation is not None
    renamed = replace(run, violations=(replace(run.violation, diagnosis=name),))
    return replace(row, runs=(renamed,), **changes)


def test_a_right_name_passes(row):
    assert row.passed
    assert (row.rightly_named, row.unnamed, row.wrongly_named) == (1, 0, 0)
    assert "diagnosis" not in line(row).lower()


@pytest.mark.parametrize("other_dtype", [False, True])
def test_a_wrong_name_never_passes(row, other_dtype):
    wrong = _named(row, "first-only", other_dtype=other_dtype)
    assert not wrong.passed
    assert wrong.wrongly_named == 1
    assert "WRONG DIAGNOSIS" in line(wrong)


def test_no_name_passes_in_another_dtype_only(row):
    assert not _named(row, "not-linear").passed
    coarse = _named(row, "not-linear", other_dtype=True)
    assert coarse.passed
    assert "no diagnosis x1" in line(coarse)


def test_one_of_two_names_that_the_evidence_leaves_open_passes(row):
    assert _named(row, "first-only or wrong-scale").passed
    assert not _named(row, "first-only or dropped-micro-batch").passed


def test_a_miss_never_passes(row):
    run = replace(row.runs[0], violations=())
    assert not replace(row, runs=(run,), other_dtype=True).passed
    assert replace(row, runs=(run,), other_dtype=True, within=1).passed


@pytest.mark.full
def test_what_cannot_be_judged_is_not_within_rounding():
    def model(seed):
        torch.manual_seed(seed)
        return torch.nn.Linear(1, 1)

    # the loss is finite in float64 and overflows in float16
    problem = Problem(
        model,
        lambda items, seed: torch.ones(items, 1, dtype=torch.float64),
        lambda model, batch: 1e6 * model(batch).square().mean(),
    )
    row = run_bug(replace(BUGS["no-divide"], problem=problem), [0], examples=2, dtype="float16")
    assert (row.found, row.within, row.passed) == (0, 0, False)


def test_a_bug_that_a_probe_shows_is_found_after_no_case_whatever_the_seed():
    counts = count_cases(BUGS["no-divide"], range(3), examples=20)
    assert counts.cases == (0, 0, 0)
    assert (counts.middle, counts.most) == (0, 0)


@pytest.mark.full
def test_a_bug_of_some_models_alone_is_found_after_as_many_cases_as_a_run_says():
    bug = BUGS["biases-are-not-reset"]
    counts = count_cases(bug, [4], examples=60)
    run = run_bug(bug, [4], examples=60).runs[0]
    assert run.violation is not None
    assert counts.cases == (run.violation.found_after,)


def test_a_run_that_shows_nothing_counts_as_more_than_all_its_cases():
    sound = replace(BUGS["no-divide"], loop=train_soundly)
    counts = count_cases(sound, [0], examples=3)
    assert counts.cases == (None,)
    assert (counts.middle, counts.most) == (4, 4)


def test_the_counts_of_a_bug_are_one_line():
    counts = CaseCounts(BUGS["no-divide"], (0, 1, 2), (4, None, 7), 20)
    assert counts_line(counts).split() == ["no-divide", "7", "21", "4", "-", "7"]
