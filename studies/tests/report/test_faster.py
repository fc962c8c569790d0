"""Which mode is faster, over many settings at once."""

from __future__ import annotations

import pytest

from studies.report.faster import answer, pooled, step_times, summary


def row(faster, pairs=12, **data):
    return {"device": "cpu", "faster": faster, "pairs": pairs, "parameters": 10**6, "items": 1, "micro_batches": 8,
            "zero": 0.004, "none": 0.003, "saved": 0.001, "bytes_between": 2**20, **data}  # fmt: skip


# of 12 pairs, a fair coin falls as unevenly as 10 to 2 with probability 2 * 79 / 4096 = 0.039, as 9
# to 3 with 0.146
@pytest.mark.parametrize(
    ("faster", "better"),
    [(7, "neither"), (9, "neither"), (3, "neither"), (10, "none"), (2, "zero"), (12, "none")],
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
    assert said["counterexample"] == "1,000,000 parameters, 1 item, K = 8"
    assert said["figures"]["100,000 parameters, 1 item, K = 8: saved by releasing"].startswith(
        "-2.000 ms of 4.000 (-50%), faster in 0 of 12 pairs; 1.0 MiB"
    )


def test_the_claim_is_answered_for_each_device():
    said = answer([row(12), row(0, device="cuda", saved=-0.002)])
    assert said["sentence"].startswith(
        "On the CPU, of 1 settings releasing is faster in 1, zeroing in 0,"
    )
    assert "On the GPU, of 1 settings releasing is faster in 0, zeroing in 1," in said["sentence"]
    assert said["counterexample"] == "1,000,000 parameters, 1 item, K = 8"
    assert "1,000,000 parameters, 1 item, K = 8 on the GPU: saved by releasing" in said["figures"]


@pytest.mark.parametrize(
    ("faster", "verdict"),
    [((), "conditional"), ((0, 0), "confirmed"), ((12, 0), "conditional"), ((12, 12), "refuted")],
)
def test_the_claim_that_zeroing_might_be_sufficient_can_be_refuted(faster, verdict):
    said = answer([row(n, parameters=10 ** (5 + i)) for i, n in enumerate(faster)])
    assert said["verdict"] == verdict
    assert bool(said["condition"]) == (verdict == "conditional")


def test_nothing_timed_is_nothing_said():
    assert step_times([]).faster == ()


def test_runs_that_disagree_decide_nothing():
    """Planted: two runs of a setting, each significant alone, on opposite sides.

    And two on the same side.
    """
    opposite, alike = [row(20, 21), row(0, 21)], [row(20, 21, items=64), row(15, 21, items=64)]
    first, second = pooled([*opposite, *alike])
    assert (first["faster"], first["pairs"], first["runs"], first["agree"]) == (20, 42, 2, False)
    assert (second["faster"], second["pairs"], second["agree"]) == (35, 42, True)
    assert step_times([{**first, "faster": 40}, second]).faster == ("neither", "none")
    assert "one whose runs disagree counts as neither" in summary([first, second], "CPU")


def test_runs_are_put_together():
    first = row(12, saved_quartiles=[-0.001, 0.002])
    second = row(2, saved=0.003, zero=0.006, none=0.003, saved_quartiles=[0.0, 0.004])
    (found,) = pooled(
        [{**first, "none": 0.002}, second, {**row(0, none=0.1), "disturbed": "the process waited"}]
    )
    assert found["saved_quartiles"] == (-0.001, 0.004)
    assert (found["zero"], found["none"], found["saved"]) == pytest.approx((0.005, 0.0025, 0.002))
    assert found["runs"] == 2


def test_a_setting_that_was_disturbed_in_every_run_stays_disturbed():
    (found,) = pooled([row(12, none=0.003, disturbed="the process waited")] * 2)
    assert step_times([found]).disturbed == (found,)


def test_how_often_runs_came_out_differently_is_said():
    """Planted: three runs of two settings.

    Alone, the first finds releasing faster in both, the others in one.
    """
    first = [row(12), row(12), row(12)]
    second = [row(12, items=64), row(6, items=64), row(6, items=64)]
    rows = pooled([*first, *second])
    assert "Run by run, releasing is faster in 2, 1, 1 settings, zeroing in 0, 0, 0." in summary(
        rows, "CPU"
    )
    said = answer(rows)
    assert said["verdict"] == "conditional"
    assert (
        "Of 3 runs, each judged by itself, the claim is conditional in 2, refuted in 1."
        in said["sentence"]
    )
    assert "judged by itself" not in answer(pooled([row(12)]))["sentence"]
