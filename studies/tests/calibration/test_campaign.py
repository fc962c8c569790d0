"""Chunks of checks, and what a small campaign counts."""

from __future__ import annotations

import pytest

from studies import calibration
from studies.calibration import Settings, count_alarms, record, trace_curves
from studies.tally import OURS, RIVALS, Curve, Tally, better, checks, false_alarms, found

SETTINGS = Settings(checks=4500, planted=5, seed=1, dtypes=("float64", "bfloat16"))


@pytest.fixture
def done(monkeypatch):
    """Chunks of alarms that were counted, with nothing judged at all."""
    chunks = []

    def counted(dtype, chunk, limit, seed, progress):
        chunks.append((dtype, chunk, limit))
        progress(limit)
        return Tally(checks=limit, cases=1)

    monkeypatch.setattr(calibration, "alarms_in_chunk", counted)
    return chunks


def _count():
    into: dict[str, Tally] = {}
    count_alarms(SETTINGS, lambda n: None, into)
    return into


def test_chunks_go_through_the_dtypes_in_turn_and_come_to_what_was_asked(done):
    into = _count()
    assert done == [(dtype, chunk, limit) for chunk, limit in ((0, 1000), (1, 1000), (2, 250))
                    for dtype in SETTINGS.dtypes]  # fmt: skip
    assert {dtype: tally.checks for dtype, tally in into.items()} == {
        "float64": 2250,
        "bfloat16": 2250,
    }


@pytest.mark.usefixtures("only_linear")
def test_a_small_campaign_from_end_to_end():
    settings = Settings(checks=44, planted=2, seed=1, dtypes=("float64", "float32"))
    tallies: dict[str, Tally] = {}
    curves: dict[str, Curve] = {}
    steps: list[int] = []
    count_alarms(settings, steps.append, tallies)
    trace_curves(settings, steps.append, curves)
    assert sum(steps) == 44 + 2 * 2
    data = record(settings, tallies, curves)
    assert (checks(data), false_alarms(data)) == (44, 0)
    assert "linear" not in data["coverage"]["layers"]["missing"]
    assert "gru" in data["coverage"]["layers"]["missing"]
    rows = {(row.dtype, row.place): row for row in found(data)}
    # in float64 2**-45 is the resolution, and the largest element is what it is relative to
    assert 2.0**-45 <= rows["float64", "the largest element"].sizes[OURS] <= 2.0**-43
    assert rows["float64", "the largest element"].sizes["NNSmith 1e-2/1e-3"] > 1e-2
    assert all(row.cases == 2 for row in rows.values())


def test_a_rule_counts_as_better_only_without_false_alarms():
    sizes = {
        OURS: {"3": 10},
        **{rule: {"2": 10} for rule in RIVALS},
        "NNSmith 1e-2/1e-3": {"5": 10},
    }
    data = {
        "alarms": {"float32": Tally(checks=10).to_json()},
        "curves": {"float32": {"cases": 10, "skipped": {}, "smallest": {"everywhere": sizes}}},
    }
    assert better(data) == [
        "float32, everywhere: NNSmith 1e-2/1e-3 finds 3.1e-02, the bound 1.2e-01"
    ]
    data["alarms"]["float32"]["rivals"] = {"NNSmith 1e-2/1e-3": 1}
    assert better(data) == []
    sizes[OURS] = {"-1": 10}
    assert len(better(data)) == len(RIVALS) - 1
