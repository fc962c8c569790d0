"""What `report --compare OLD NEW` says."""

from __future__ import annotations

from gradcheck_suite.cli import run
from tests.report.made_up import benchmark, claim, fill, record, verdict


def _lines(capsys, old, new):
    assert run(["report", "--compare", str(old), str(new)]) == 0
    return capsys.readouterr().out.splitlines()


def test_changed_verdicts_and_times_are_told_and_others_are_not(tmp_path, capsys):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, median in ((old, 1.0), (new, 2.0)):
        verdict(folder, "same")
        benchmark(folder, "zero_", 1.0 + median / 20)  # within a tenth
        benchmark(folder, "set_to_none", median)
        claim(folder, "C1.1", verdict="confirmed" if folder == old else "refuted")
    violation = {"kind": "gradient", "diagnosis": "mean-of-means"}
    verdict(old, "worse")
    verdict(new, "worse")
    verdict(new, "worse", state="violated", violation=violation)
    verdict(old, "gone")
    verdict(new, "come")
    assert _lines(capsys, old, new) == [
        "verify",
        "  worse float64 cpu: holds -> violated (mean-of-means)",
        "  - gone float64 cpu: was holds",
        "  + come float64 cpu: holds",
        "claim",
        "  claim C1.1: confirmed -> refuted",
        "benchmark",
        "  window set_to_none cpu float32 parameters 1000 layout few micro_batches 1: seconds: 1 -> 2",
    ]


def test_the_same_records_have_not_changed(tmp_path, capsys):
    fill(tmp_path)
    assert _lines(capsys, tmp_path, tmp_path) == ["nothing changed"]


def test_a_record_that_cannot_be_compared_is_named_with_its_folder(tmp_path, capsys):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        verdict(folder, "zero_")
    record(new, "memory", mode="zero_")
    assert _lines(capsys, old, new) == [
        "nothing changed",
        f"left out: {new}: memory, record 1: cannot be read (KeyError: 'device'); left out",
    ]
