"""What passes on the scoreboard: a right name, in a coarser dtype also none, never a wrong one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradcheck_suite import Problem
from studies.zoo import BUGS
from studies.zoo.scoreboard import Row, line, run_bug


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
