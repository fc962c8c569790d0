"""The report's sections on costs, from made-up records whose answers are known."""

from __future__ import annotations

import pytest

from gradcheck_suite.core.records import append_record
from studies.records import KINDS
from studies.tests.report.made_up import build


def _record(reports, measures, *, environment=None, **data):
    shared = {
        "measures": measures,
        "device": "cpu",
        "dtype": "float32",
        "parameters": 1000,
        "layout": "few",
    }
    made_on = environment or {}
    append_record(
        reports,
        KINDS["benchmark"],
        {**shared, **data},
        environment=made_on,
        command=f"bench {measures}",
    )


def _section(reports, key):
    (section,) = (s for s in build(reports).sections if s.key == key)
    return section


def _reset(reports, mode, seconds, *, profile=(), **data):
    # 4,000,000 bytes: 400 us at the copy's 1e10 bytes a second, 500 us at the fill's 8e9
    speeds = {"bytes_per_second": 1e10, "filled_per_second": 8e9}
    _record(reports, "reset", mode=mode, seconds={"median": seconds}, micro_batches=0, predicted_bytes=4_000_000,
            profile=list(profile), **{**speeds, **data})  # fmt: skip


def _entry(name, calls):
    return {"name": name, "calls": calls, "host_us": 20.0, "device_us": 1.5}


def test_the_main_cost_of_a_slow_reset_is_the_fill_or_the_calls(tmp_path):
    _reset(tmp_path, "flat_buffer", 500e-6, profile=[_entry("aten::fill_", 1)])
    calls = [_entry("aten::zero_", 100), _entry("aten::fill_", 99)]
    _reset(tmp_path, "zero_", 1200e-6, profile=calls, memset_per_second=3e10)
    _reset(tmp_path, "zero_", 1200e-6, dtype="bfloat16", filled_per_second=9e9)
    _reset(tmp_path, "zero_grad_foreach", 450e-6)
    (table,) = (t for t in _section(tmp_path, "costs").tables if "below" in t.caption)
    flat, zero, _ = table.rows  # the third reaches 89% of the copy bandwidth
    assert flat[3:] == (
        "flat_buffer",
        pytest.approx(0.8),
        pytest.approx(1),
        1,
        pytest.approx(0, abs=1e-9),
        "filling",
        "aten::fill_ x1, 22 us",
    )
    # 700 us beyond the fill, in 100 calls
    assert zero[4:9] == (
        pytest.approx(1 / 3),
        pytest.approx(5 / 12),
        100,
        pytest.approx(7),
        "overhead",
    )
    assert "a copy read and wrote 10.0 GB/s together" in table.note
    assert (
        "wrote 8.0 to 9.0 GB/s; the C library's memset, on one thread, wrote 30.0 GB/s."
        in table.note
    )


def test_the_peak_of_a_window_in_jax_stands_beside_torchs(tmp_path):
    """Without a donated buffer the old sum of 2 MiB and the new one are alive.

    The temporaries have 1 MiB.
    """
    parts = {"argument": 5 * 2**20, "output": 2 * 2**20, "temp": 2**20}
    window = {"micro_batches": 4, "seconds": {"median": 0.001}}
    for mode, alias in (("jax_where", 0), ("jax_donated", 2 * 2**20)):
        _record(tmp_path, "window", mode=mode, xla_memory_bytes={**parts, "alias": alias}, **window)
    _record(tmp_path, "window", mode="zero_", memory={"peak": 7 * 2**20}, **window)
    (table,) = (
        t
        for t in _section(tmp_path, "costs").tables
        if t.caption.startswith("Peak memory of one window")
    )
    (row,) = table.rows
    shown = dict(zip(table.columns, row, strict=True))
    assert (shown["jax_where"], shown["jax_donated"], shown["zero_"], shown["jax_times_zero"]) == (
        8,
        6,
        7,
        None,
    )


def test_the_time_of_a_release_is_said_from_its_rows(tmp_path):
    for layout, release in (("few", 100e-6), ("many", 900e-6)):
        _reset(tmp_path, "zero_", 500e-6, layout=layout)
        _reset(tmp_path, "flat_buffer", 400e-6, layout=layout)
        _reset(tmp_path, "set_to_none", release, layout=layout)
    said = "set_to_none alone takes 0.1 to 0.9 ms; of 2 settings it is the fastest reset in 1 and the slowest in 1."
    assert said in _section(tmp_path, "costs").text[0]
    _reset(tmp_path, "set_to_none", 450e-6, layout="many")
    said = "set_to_none alone takes 0.1 to 0.45 ms; of 2 settings it is the fastest reset in 1 and the slowest in 0."
    assert said in _section(tmp_path, "costs").text[0]


def test_the_costs_say_that_no_setting_shows_a_difference(tmp_path):
    _step(tmp_path, -0.001, 8)
    _step(tmp_path, -0.002, 9, parameters=5)
    (answer,) = (answer for answer in build(tmp_path).answers if answer.key == "costs")
    assert answer.brief == "Time: no difference shown in any of 2 CPU settings"
    assert answer.answer == (
        "Time: no difference shown in any of 2 CPU settings (21 pairs of steps each; medians: None 50% slower "
        "to 25% slower)."
    )


def _step(reports, saved, faster, **data):
    _record(reports, "step", items=1, micro_batches=8, zero=0.004, none=0.003, saved=saved, faster=faster, pairs=21,
            bytes_between=2**20, mode="both", **data)  # fmt: skip


def test_the_decision_gives_the_share_of_a_step(tmp_path):
    _step(tmp_path, 0.001, 20, faults=[10.4, 20.6], saved_quartiles=[0.0004, 0.0012])
    _step(tmp_path, -0.002, 1, parameters=5)
    _record(tmp_path, "window", bytes_per_second=2**32, seconds={"median": 1.0}, mode="zero_", micro_batches=1,
            predicted_bytes=0)  # fmt: skip
    section = _section(tmp_path, "decision")
    assert "of 2 settings releasing is faster in 1, zeroing in 1, neither in 0" in section.text[1]
    assert "saves at most 25% of a step" in section.text[1]
    answers = {answer.key: answer for answer in build(tmp_path).answers}
    # a saving of 1 ms and a cost of 2 ms, of 4 ms
    assert answers["costs"].answer == (
        "Time: no difference shown in 0 of 2 CPU settings (21 pairs of steps each; medians: None 50% slower to "
        "25% faster); faster: None in 1, zero_ in 1."
    )
    (figure,) = answers["costs"].figures
    ratios = {
        row["size"]: (row["low"], row["ratio"], row["high"])
        for row in figure.spec["data"]["values"]
    }
    assert ratios["5"] == (None, 1.5, None)
    assert ratios["1 k"] == pytest.approx((0.7, 0.75, 0.9))
    (table,) = section.tables
    five, thousand = table.rows
    # four times 2**20 bytes at 2**32 a second are 2**-10 seconds
    assert five[3:9] == (4.0, 1000 / 1024, -2.0, -50.0, "1 of 21", "zero_")
    assert thousand[3:] == (4.0, 1000 / 1024, 1.0, 25.0, "20 of 21", "set_to_none", 1.0, 10, 21)
    assert "Not run on a GPU" in section.missing
    assert [source.command for source in section.sources] == ["bench step"]


def test_rows_of_another_machine_or_version_are_left_out(tmp_path):
    """The newest row decides; two generations in one table would compare machines, not modes."""
    for parameters, version in ((1, "2.12"), (2, "2.12"), (3, "2.13"), (4, "2.13")):
        environment = {"processor": "P", "versions": {"torch": version}}
        _step(tmp_path, 0.001, 20, parameters=parameters, environment=environment)
    (table,) = _section(tmp_path, "decision").tables
    assert [row[0] for row in table.rows] == [3, 4]


def test_a_record_that_does_not_say_its_device_is_of_the_same_machine(tmp_path):
    """The claims' steps once lacked it, and pushed out the rows of the benchmarks."""

    def shown(faster, device):
        environment = {"processor": "P", **({} if device is None else {"device": device})}
        _step(tmp_path, 0.001, faster, environment=environment)
        (table,) = _section(tmp_path, "decision").tables
        return table.rows[0][7]

    assert shown(20, {"torch_threads": 2}) == "20 of 21"
    assert shown(1, {"torch_threads": 1}) == "1 of 21"
    assert shown(3, None) == "24 of 63"
    assert shown(5, {"torch_threads": 1}) == "9 of 63"


def test_the_claim_about_small_models_is_answered_from_the_same_steps(tmp_path):
    """The claim's record says what an earlier run found.

    The report says what its own table of steps shows.
    """
    claim = {"number": "C1.8", "source": "S", "text": "t", "how": "h", "verdict": "conditional", "condition": "c",
             "sentence": "On the CPU, of 9 settings", "figures": {"old": 1.0}, "counterexample": ""}  # fmt: skip
    append_record(tmp_path, KINDS["claim"], claim, environment={}, command="claims")
    _step(tmp_path, 0.001, 20)
    _step(tmp_path, -0.001, 1, parameters=2000)
    steps, claims = _section(tmp_path, "decision"), _section(tmp_path, "claims")
    (found,) = claims.claims
    assert found.sentence.startswith(steps.text[1])
    assert "of 9 settings" not in found.sentence
    assert found.verdict == "conditional"
    assert found.condition.endswith("as in 1 of the 2 settings timed here")
    assert found.counterexample == "1,000 parameters, 1 item, K = 8"
    (name, value), _ = found.numbers
    assert name == "1,000 parameters, 1 item, K = 8: saved by releasing"
    assert value.startswith("+1.000 ms of 4.000 (+25%)")


def test_a_gpu_shows_host_device_and_kernels(tmp_path):
    gpu = {
        "device": "cuda",
        "mode": "zero_",
        "micro_batches": 4,
        "predicted_bytes": 1,
        "bytes_per_second": 1,
    }
    three = {"host": {"median": 0.009}, "busy_seconds": 0.004, "kernels": 100, "regime": "in cache"}
    _record(tmp_path, "window", seconds={"median": 0.006}, **gpu, **three)
    _record(tmp_path, "captured", seconds={"median": 0.005}, place="inside the graph", finding="right", **gpu,
            host={"median": 0.009}, regime="in cache")  # fmt: skip
    eager = {"part": "step", "compiled": False, "graphs": 0}
    _record(tmp_path, "compiled", seconds={"median": 0.007}, **eager, **gpu, **three)
    _step(
        tmp_path,
        0.001,
        20,
        device="cuda",
        host=[0.005, 0.004],
        busy=[0.002, 0.001],
        regime="in cache",
    )
    section = _section(tmp_path, "costs")
    (window,) = (t for t in section.tables if t.caption.startswith("One window"))
    assert 9.0 in window.rows[0]  # JAX is timed on the host's clock, so torch is compared on it
    (times,) = (t for t in section.tables if t.caption.startswith("Host, device"))
    assert times.rows[0][6:] == ("in cache", 9.0, 6.0, 4.0, 100)
    shown = {(row[0], row[5]): row[7:] for row in times.rows}
    assert shown["step, 1 item", "zero_"] == (5.0, 4.0, 2.0, None)
    assert shown["step, 1 item", "set_to_none"] == (4.0, 3.0, 1.0, None)
    assert shown["captured window, reset inside the graph", "zero_"] == (9.0, 5.0, None, None)
    assert shown["window with its step, eager step", "zero_"] == (9.0, 7.0, 4.0, 100)


def test_graphs_and_captures_stand_beside_eager_times(tmp_path):
    about = {"part": "step", "mode": "zero_", "micro_batches": 4}
    _record(tmp_path, "compiled", compiled=False, graphs=0, seconds={"median": 0.006}, **about)
    _record(tmp_path, "compiled", compiled=True, graphs=1, seconds={"median": 0.002}, **about)
    section = _section(tmp_path, "compiled")
    assert section.tables[0].rows == (("cpu", "step", "zero_", 1, 6.0, 2.0),)
    assert "No CUDA graph was captured" in section.missing
    assert len(section.text) == 1
    for mode, graphs, seconds in (("zero_", 1, 0.004), ("set_to_none", 8, 0.0025)):
        turns = {"part": "step, experts by turns", "mode": mode, "micro_batches": 1}
        _record(
            tmp_path, "compiled", compiled=True, graphs=graphs, seconds={"median": seconds}, **turns
        )
    said = "takes 2.5 ms (8 graphs) under set_to_none and 4 ms (1 graph) under zero_."
    assert said in _section(tmp_path, "compiled").text[1]
    on_gpu = {"device": "cuda", "mode": "zero_", "micro_batches": 4}
    _record(
        tmp_path,
        "window",
        seconds={"median": 0.004},
        **on_gpu,
        predicted_bytes=1,
        bytes_per_second=1,
    )
    _record(
        tmp_path,
        "captured",
        place="inside the graph",
        finding="right",
        seconds={"median": 0.001},
        **on_gpu,
    )
    section = _section(tmp_path, "compiled")
    assert section.missing is None
    assert section.tables[1].rows == ((4, "zero_", "inside the graph", "right", 1.0, 4.0),)


@pytest.mark.parametrize("key", ["decision", "compiled"])
def test_a_section_without_records_says_how_to_make_them(tmp_path, key):
    section = _section(tmp_path, key)
    assert "--bench-records reports" in section.missing
    assert not section.tables
