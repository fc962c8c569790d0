"""Made-up records, whose answers are known, and a made-up counterexample."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradcheck_suite.catalogue.description import with_case_described
from gradcheck_suite.core.case import Case, Input, Layer, Loss, Plan, ProblemSpec
from gradcheck_suite.core.comparison import Comparison, Layout
from gradcheck_suite.core.counterexamples import store_counterexample
from gradcheck_suite.core.records import append_record
from gradcheck_suite.core.results import Result, Violation, Weight

ENVIRONMENT = {
    "versions": {"torch": "2.13.0", "jax": None}, "platform": "Linux x86_64", "processor": "a processor",
    "processor_count": 2, "devices": {"torch": ["cpu"]}, "precision": {"jax_enable_x64": True},
}  # fmt: skip
EVIL = "</td></script><script>window.planted=1</script><img src=x onerror=window.planted=1>|`*_[a](javascript:1)"


def record(reports, kind, **data):
    append_record(reports, kind, data, environment=ENVIRONMENT, command=f"gradcheck-suite {kind}")


def benchmark(reports, mode, median, *, measures="window", **changes):
    data = {
        "measures": measures, "mode": mode, "dtype": "float32", "parameters": 1000, "layout": "few",
        "micro_batches": 1 if measures == "window" else 0, "device": "cpu", "bytes_per_second": 1e10,
        "predicted_bytes": {"zero_": 16000, "set_to_none": 0}.get(mode, 0), "seconds": {"median": median}, "rounds": 5,
    }  # fmt: skip
    record(reports, "benchmark", **{**data, **changes})


def verdict(reports, loop, *, state="holds", **changes):
    data = {
        "loop": loop, "verdict": state, "judged": 200, "dtype": "float64", "device": "cpu",
        "worst_error_over_allowed": 0.125, "violation": None,
        "reached": {"layers": {"linear": 7}, "losses": {}, "splits": {"several windows": 3}}, "stored": None,
    }  # fmt: skip
    record(reports, "verify", **{**data, **changes})


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
    coverage = {"layers": {"reached": 1, "missing": ["gru"]}, "losses": {"reached": 2, "missing": []}}
    record(reports, "calibration", asked={}, alarms={"float16": tally}, curves={"float16": curve}, loops=20,
            coverage=coverage)  # fmt: skip


def counterexample(reports, loop="my_loop.py:train"):
    """Store a violation of a mean of means: micro-batches of 1 and 3 items, the second window wrong in two elements."""
    problem = ProblemSpec(Input("vector", size=1), (Layer("linear", bias=False, features=1),), Loss("mse"))
    case = Case(problem, Plan((2, 2, 1, 3), 2, masked=(0,)))
    layout = Layout(("0.weight", "0.bias"), ((2, 3), (2,)))
    expected = np.arange(8.0)
    observed = expected + np.array([0, 0, 1e-12, 0, 0, 5.0, 0, 0])
    violation = Violation(
        "gradient", "mean-of-means", f"each micro-batch's mean weighs 1/2 {EVIL}", case, parameter="0.weight", epoch=0,
        window=1, error=5.0, allowed=1e-14, details=("2 of 8 elements differ",),
        weights=(
            Weight(micro_batches="2", count=1, expected=0.25, observed=0.5),
            Weight(micro_batches="3", count=3, expected=0.25, observed=1 / 6),
        ),
        evidence=Comparison(layout, expected, observed, np.full(8, 1e-14)),
    )  # fmt: skip
    violation = with_case_described(replace(violation, found_after=3))
    path = store_counterexample(reports, Result(loop, 3, 0.5, (violation,)), ENVIRONMENT)
    path.with_suffix(".py").write_text(f"# {EVIL}\nprint('the script')\n")
    return path
