"""Made-up records, whose answers are known, and a made-up counterexample."""

from __future__ import annotations

from gradcheck_suite.page import report
from studies.records import KINDS
from studies.report.build import CONTENTS
from tests.page import made_up
from tests.page.made_up import EVIL, counterexample, verdict

__all__ = [
    "EVIL",
    "benchmark",
    "build",
    "calibration",
    "claim",
    "counterexample",
    "fill",
    "record",
    "verdict",
]


def build(reports):
    """Build the report of the studies."""
    return report.build(reports, CONTENTS)


def record(reports, kind, **data):
    made_up.record(reports, kind, kinds=KINDS, **data)


def benchmark(reports, mode, median, *, measures="window", **changes):
    data = {
        "measures": measures, "mode": mode, "dtype": "float32", "parameters": 1000, "layout": "few",
        "micro_batches": 1 if measures == "window" else 0, "device": "cpu", "bytes_per_second": 1e10,
        "predicted_bytes": {"zero_": 16000, "set_to_none": 0}.get(mode, 0), "seconds": {"median": median}, "rounds": 5,
    }  # fmt: skip
    record(reports, "benchmark", **{**data, **changes})


def claim(reports, number, **changes):
    data = {
        "number": number, "source": "an answer", "text": "Zeroing is slow.", "how": "by running",
        "verdict": "conditional", "sentence": "It depends.", "condition": "it rains", "figures": {},
        "counterexample": "",
    }  # fmt: skip
    record(reports, "claim", **{**data, **changes})


def fill(reports):
    """Write records of most kinds, one with text that a page must not execute."""
    verdict(reports, "zero_")
    verdict(reports, "set_to_none")
    violation = {"kind": "gradient", "diagnosis": "mean-of-means", "explanation": EVIL}
    verdict(reports, EVIL, state="violated", violation=violation, stored="mine-abc.json")
    for mode, median in (("zero_", 0.003), ("set_to_none", 0.002), ("jax_scan_carry", 0.001)):
        benchmark(reports, mode, median)
    benchmark(reports, "zero_", 0.0001, measures="reset", predicted_bytes=4000)
    claim(reports, "C2.1", text=EVIL, figures={"held": [1.0, 2.5]})
    bug = {
        "number": 1, "name": "mean-of-means", "citations": ["transformers#24725"], "mechanism": "m", "needs": "n",
        "runs": 2, "found": 2, "median_cases": 7, "median_seconds": 1.5, "names": {"gradient/mean-of-means": 2},
        "wanted": [], "rightly_named": 2, "windows": 1, "micro_batches": 2, "layers": 1, "small": True,
        "others": {"torch.testing.assert_close": True},
    }  # fmt: skip
    record(
        reports, "zoo", seeds=2, examples=200, bugs=[bug],
        sound=[{"loop": "zero_", "cases": 1000, "blamed": False, "worst": 0.1}],
    )  # fmt: skip


def calibration(reports, *, alarms=0):
    tally = {
        "checks": 60, "judged": 50, "cases": 3, "elements": 400, "skipped": {EVIL: 10}, "findings": {},
        "alarms": [{"loop": EVIL, "explanation": EVIL}] * alarms,
        "over": {k: {"counts": [50] + [0] * 19, "largest": 0.03} for k in ("", "linear")},
        "drawn_on": {"counts": [7] + [0] * 19, "largest": 0.04}, "layers": {"linear": 50}, "losses": {"mse": 50},
        "loops": {"zero_": 50}, "rivals": {"chex.assert_trees_all_close": 4}, "autocast": 5, "rivals_autocast": {},
    }  # fmt: skip
    found = {"gradcheck-suite": {"9": 200}, "torch.testing.assert_close": {"4": 200},
             "chex.assert_trees_all_close": {"11": 200}, "twice the reference's rmse": {"-1": 3, "8": 197},
             "NNSmith 1e-2/1e-3": {"2": 200}}  # fmt: skip
    curve = {"cases": 200, "skipped": {}, "smallest": {"everywhere": found}}
    coverage = {
        "layers": {"reached": 1, "missing": ["gru"]},
        "losses": {"reached": 2, "missing": []},
    }
    record(reports, "calibration", asked={}, alarms={"float16": tally}, curves={"float16": curve}, loops=20,
            coverage=coverage)  # fmt: skip
