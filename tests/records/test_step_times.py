"""Which mode is faster, over many settings at once."""

from __future__ import annotations

import pytest

from gradcheck_suite.records.step_times import answer, step_times, summary


def row(faster, pairs=12, **data):
    return {"faster": faster, "pairs": pairs, "parameters": 10**6, "items": 1, "micro_batches": 8, "zero": 0.004,
            "saved": 0.001, "bytes_between": 2**20, **data}  # fmt: skip


# of 12 pairs, a fair coin falls as unevenly as 10 to 2 with probability 2 * 79 / 4096 = 0.039, as 9 to 3 with 0.146
@pytest.mark.parametrize(
    ("faster", "better"), [(7, "neither"), (9, "neither"), (3, "neither"), (10, "none"), (2, "zero"), (12, "none")]
)
def test_a_sign_test_at_five_percent_decides_one_setting(faster, better):
    assert step_times([row(faster)]).faster == (better,)


def test_one_setting_of_twelve_at_four_percent_is_chance():
    """0.039 is below 5% and above 5% / 12; twelve such settings at once are no chance."""
    alone = step_times([row(10), *(row(6) for _ in range(11))])
    assert alone.faster == ("neither",) * 12
    assert step_times([row(10)] * 12).faster == ("none",) * 12


def test_disturbed_settings_count_for_nothing():
    rows = [row(12), row(12, disturbed="the process waited")]
    assert step_times(rows).faster == ("none",)
    assert "of 1 settings releasing is faster in 1" in summary(rows, "CPU")
    assert "1 more settings were disturbed" in summary(rows, "CPU")


def test_the_claim_and_the_summary_say_the_same():
    rows = [row(12), row(0, parameters=10**5, saved=-0.002)]
    said = answer(rows)
    assert said["sentence"].startswith(summary(rows, "CPU"))
    assert "releasing is faster in 1, zeroing in 1, neither in 0" in said["sentence"]
    assert "A release saves at most 25% of a step." in said["sentence"]
    assert said["counterexample"] == "1e+06 parameters, 1 items, K = 8"
    assert said["figures"]["1e+05 parameters, 1 items, K = 8: saved by releasing"].startswith(
        "-2.000 ms of 4.000 (-50%), faster in 0 of 12 pairs; 1.0 MiB"
    )


def test_nothing_timed_is_nothing_said():
    assert step_times([]).faster == ()
