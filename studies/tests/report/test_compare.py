"""What `report --compare OLD NEW` says."""

from __future__ import annotations

import pytest

from gradcheck_suite.cli import run
from studies.commands import PROGRAM
from studies.records import KINDS
from studies.tests.report.made_up import benchmark, claim, fill, record, verdict

HOLDS = {"verdict": "holds", "violation": None}
LEAKS = {
    "verdict": "violated",
    "violation": {"kind": "gradient", "diagnosis": "tail-leak", "explanation": "it leaks"},
}
BUG = {"name": "no-reset", "found": 2, "runs": 2, "rightly_named": 2}
MEMORY = {
    "mode": "zero_", "device": "cpu", "dtype": "float32", "parameters": 10, "layout": "few", "micro_batches": 4,
}  # fmt: skip
STEP = {
    "measures": "step",
    "device": "cpu",
    "dtype": "float32",
    "parameters": 10,
    "items": 1,
    "micro_batches": 8,
}
TRAINER = {"trainer": "mine", "version": "1.0", "question": "sum loss"}
MODEL = {"architecture": "GPT2", "version": "5", "widened": True, "allowed": 1e-6}
POINT = {"operation": "relu", "point": "x = 0", "dtype": "float64", "torch": 0.0}
TRAFFIC = {"loop": "ddp/zero_", "ranks": 2, "accumulation_steps": 4}
RESET = {"optimizer": "SGD", "variant": "momentum"}
CHANGED = {
    "verify": ({"loop": "mine", "dtype": "float32", **HOLDS}, {"loop": "mine", "dtype": "float32", **LEAKS},
               "mine float32: holds -> violated (tail-leak)"),
    "claim": ({"number": "C1.1", "verdict": "confirmed"}, {"number": "C1.1", "verdict": "refuted"},
              "claim C1.1: confirmed -> refuted"),
    "zoo": ({"dtype": "bfloat16", "bugs": [BUG]}, {"dtype": "bfloat16", "bugs": [{**BUG, "rightly_named": 1}]},
            "no-reset bfloat16: found 2 of 2, rightly named 2 -> found 2 of 2, rightly named 1"),
    "zoo-count": ({"bug": "no-reset", "examples": 9, "seeds": [0, 1], "cases": [1, 2]},
                  {"bug": "no-reset", "examples": 9, "seeds": [0, 1], "cases": [1, None]},
                  "no-reset: found after at most 2 cases -> found after at most 9 cases"),
    "calibration": ({"alarms": {"float64": {"alarms": [], "judged": 50}}},
                    {"alarms": {"float64": {"alarms": ["one"], "judged": 50}}},
                    "false alarms float64: 0 of 50 -> 1 of 50"),
    "trainer": ({**TRAINER, "result": None}, {**TRAINER, "result": {"loop": "mine", **LEAKS}},
                "mine 1.0, sum loss: not asked -> violated (tail-leak)"),
    "bridge": ({**MODEL, "gradient_error": 1e-6}, {**MODEL, "gradient_error": 2e-6},
               "GPT2 5 widened: agrees -> differs"),
    "benchmark": ({**STEP, "zero": 1.0, "saved": 0.1}, {**STEP, "zero": 1.0, "saved": 0.2},
                  "step cpu float32 parameters 10 items 1 micro_batches 8: saved by None, share of the step: "
                  "0.1 -> 0.2"),
    "memory": ({**MEMORY, "peak": 1000}, {**MEMORY, "peak": 2000},
               "zero_ cpu float32 10 few 4: peak bytes: 1e+03 -> 2e+03"),
    "atlas": ({"rows": [{**POINT, "jax": 0.0}]}, {"rows": [{**POINT, "jax": 0.5}]},
              "relu at x = 0 float64: torch 0.0, jax 0.0 -> torch 0.0, jax 0.5"),
    "zero-or-none": ({**RESET, "zero_changes": []}, {**RESET, "zero_changes": ["parameter", "momentum_buffer"]},
                     "SGD, momentum: zeros change: nothing -> parameter, momentum_buffer"),
    "traffic": ({**TRAFFIC, "observed": {"all-reduce": [3, 56], "broadcast": [1, 8]}},
                {**TRAFFIC, "observed": {"all-reduce": [12, 224], "broadcast": [1, 8]}},
                "ddp/zero_ on 2 ranks, K = 4: 4 collectives of 64 bytes -> 13 collectives of 232 bytes"),
    "audit": ({"loop": "train.py", **HOLDS}, {"loop": "train.py", **LEAKS},
              "train.py: holds -> violated (tail-leak)"),
    "public-script": ({"key": "a/b train.py", "verdict": "holds", "outcome": "right"},
                      {"key": "a/b train.py", "verdict": "violated", "outcome": "wrong"},
                      "a/b train.py: holds, right -> violated, wrong"),
    "gpu": ({"part": "correctness", "task": "verify", "device": "cuda", "result": "holds"},
            {"part": "correctness", "task": "verify", "device": "cuda", "result": "violated"},
            "correctness verify on cuda: holds -> violated"),
    "step": ({"rows": [{"torch": "Adam", "agree": True}]}, {"rows": [{"torch": "Adam", "agree": False}]},
             "step of Adam: agrees with optax -> differs from optax"),
}  # fmt: skip
"""Kind of record -> what a record says before, what it says afterwards, and the line that tells the change."""


def _lines(capsys, old, new, status=0):
    assert run(["report", "--compare", str(old), str(new)], PROGRAM) == status
    return capsys.readouterr().out.splitlines()


def test_changed_verdicts_and_times_are_told_and_others_are_not(tmp_path, capsys):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, median in ((old, 1.0), (new, 2.0)):
        verdict(folder, "same")
        benchmark(folder, "zero_", 1.0 + median / 20)  # within a tenth
        benchmark(folder, "set_to_none", median)
        claim(folder, "C1.1", verdict="confirmed" if folder == old else "refuted")
    violation = {
        "kind": "gradient",
        "diagnosis": "mean-of-means",
        "explanation": "means are averaged",
    }
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
        "benchmark",
        "  window set_to_none cpu float32 parameters 1000 layout few micro_batches 1: seconds: 1 -> 2",
        "claim",
        "  claim C1.1: confirmed -> refuted",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_in_any_kind_of_record_is_told(tmp_path, capsys, kind):
    before, after, told = CHANGED[kind]
    old, new = tmp_path / "old", tmp_path / "new"
    record(old, kind, **before)
    record(new, kind, **before)
    assert _lines(capsys, old, new) == ["nothing changed"]
    record(new, kind, **after)  # the newest record counts
    assert _lines(capsys, old, new) == [kind, f"  {told}"]


def test_the_same_records_have_not_changed(tmp_path, capsys):
    fill(tmp_path)
    assert _lines(capsys, tmp_path, tmp_path) == ["nothing changed"]


def test_a_record_that_cannot_be_compared_is_named_with_its_folder(tmp_path, capsys):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        verdict(folder, "zero_")
    record(new, "memory", mode="zero_")
    assert _lines(capsys, old, new, status=1) == [
        "nothing changed",
        f"left out: {new}: memory, record 1: cannot be read (KeyError: 'device')",
    ]
