"""Chunks: stored as they are done, taken up again where a run was stopped, never where something has changed."""

from __future__ import annotations

import ast

import pytest

from gradcheck_suite.errors import UsageError
from gradcheck_suite.evidence.calibration import campaign, store
from gradcheck_suite.evidence.calibration.campaign import (
    Settings,
    cases_for,
    count_alarms,
    record,
    shares,
    trace_curves,
)
from gradcheck_suite.evidence.calibration.curve import OURS, Curve
from gradcheck_suite.evidence.calibration.store import Store, made_by
from gradcheck_suite.evidence.calibration.styles import LOOPS
from gradcheck_suite.evidence.calibration.summary import better, checks, false_alarms, found
from gradcheck_suite.evidence.calibration.tally import Tally
from gradcheck_suite.numerics.baselines import RIVALS
from gradcheck_suite.records import sources

SETTINGS = Settings(checks=4500, planted=5, seed=1, dtypes=("float64", "bfloat16"))


@pytest.fixture
def done(monkeypatch):
    """Chunks of alarms that were counted and not only read, with nothing judged at all."""
    chunks = []

    def counted(dtype, chunk, limit, seed, progress):
        chunks.append((dtype, chunk, limit))
        progress(limit)
        return Tally(checks=limit, cases=1)

    monkeypatch.setattr(campaign, "alarms_in_chunk", counted)
    return chunks


def _count(path, settings=SETTINGS, progress=lambda n: None):
    into: dict[str, Tally] = {}
    count_alarms(settings, Store(path), progress, into)
    return into


def test_every_dtype_has_its_share():
    assert shares(10, ("a", "b", "c")) == {"a": 4, "b": 3, "c": 3}


def test_chunks_go_through_the_dtypes_in_turn_and_come_to_what_was_asked(tmp_path, done):
    into = _count(tmp_path / "chunks")
    assert done == [(dtype, chunk, limit) for chunk, limit in ((0, 1000), (1, 1000), (2, 250))
                    for dtype in SETTINGS.dtypes]  # fmt: skip
    assert {dtype: tally.checks for dtype, tally in into.items()} == {"float64": 2250, "bfloat16": 2250}


def test_an_interrupted_run_goes_on_where_it_was(tmp_path, done):
    counted = []

    def stop(n):
        counted.append(n)
        if len(counted) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _count(tmp_path / "chunks", progress=stop)
    # as a kill leaves it: half a line
    with (tmp_path / "chunks").open("a") as file:
        file.write('{"key": "{\\"counts\\"')
    again = []
    into = _count(tmp_path / "chunks", progress=again.append)
    assert done.count(("bfloat16", 1, 1000)) == 2
    assert len(done) == len(set(done)) + 1
    assert sum(again) == SETTINGS.checks == sum(tally.checks for tally in into.values())
    before = len(done)
    assert _count(tmp_path / "chunks") == into
    assert len(done) == before


@pytest.mark.parametrize("change", ["seed", "source", "version"])
def test_what_was_counted_otherwise_is_not_taken_over(tmp_path, done, monkeypatch, change):
    _count(tmp_path / "chunks")
    before, settings = len(done), SETTINGS
    if change == "seed":
        settings = Settings(SETTINGS.checks, SETTINGS.planted, 2, SETTINGS.dtypes)
    elif change == "source":
        monkeypatch.setattr(sources, "_essence", lambda source: source)
    else:
        monkeypatch.setattr(store, "version", lambda name: "0")
    made_by.cache_clear()
    try:
        _count(tmp_path / "chunks", settings)
    finally:
        made_by.cache_clear()
    assert len(done) == 2 * before


def test_only_what_a_source_does_counts():
    one = '"""Text."""\nimport os\ndef f(a: int) -> int:\n    """More."""\n    # why\n    return a + 1\n'
    other = "def f(a):\n\n    return (a + 1)"
    assert sources._essence(one) == sources._essence(other)
    assert sources._essence(one) != sources._essence(one.replace("+ 1", "+ 2"))
    ast.parse(sources._essence(one))


def test_a_store_in_no_folder_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot read"):
        Store(tmp_path / "file" / "chunks").put({"a": 1}, {})


def test_a_chunk_has_enough_cases_for_its_checks():
    everywhere = len(LOOPS) - 2
    assert cases_for(everywhere) == 1
    assert cases_for(everywhere + 1) == 2


@pytest.mark.usefixtures("only_linear")
def test_a_small_campaign_from_end_to_end(tmp_path):
    settings = Settings(checks=44, planted=2, seed=1, dtypes=("float64", "float32"))
    tallies: dict[str, Tally] = {}
    curves: dict[str, Curve] = {}
    steps: list[int] = []
    count_alarms(settings, Store(tmp_path / "chunks"), steps.append, tallies)
    trace_curves(settings, Store(tmp_path / "chunks"), steps.append, curves)
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
    # the same from the store alone
    again: dict[str, Curve] = {}
    trace_curves(settings, Store(tmp_path / "chunks"), lambda n: None, again)
    assert again == curves


def test_a_rule_counts_as_better_only_without_false_alarms():
    sizes = {OURS: {"3": 10}, **{rule: {"2": 10} for rule in RIVALS}, "NNSmith 1e-2/1e-3": {"5": 10}}
    data = {
        "alarms": {"float32": Tally(checks=10).to_json()},
        "curves": {"float32": {"cases": 10, "skipped": {}, "smallest": {"everywhere": sizes}}},
    }
    assert better(data) == ["float32, everywhere: NNSmith 1e-2/1e-3 finds 3.1e-02, the bound 1.2e-01"]
    data["alarms"]["float32"]["rivals"] = {"NNSmith 1e-2/1e-3": 1}
    assert better(data) == []
    sizes[OURS] = {"-1": 10}
    assert len(better(data)) == len(RIVALS) - 1
