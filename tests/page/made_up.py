"""Made-up records of loops, whose answers are known, and a made-up counterexample."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradcheck_suite.catalogue.description import with_case_described
from gradcheck_suite.core.case import Case, Input, Layer, Loss, Plan, ProblemSpec
from gradcheck_suite.core.comparison import Comparison, Layout
from gradcheck_suite.core.counterexamples import store_counterexample
from gradcheck_suite.core.records import KINDS, append_record
from gradcheck_suite.core.results import Result, Violation, Weight

ENVIRONMENT = {
    "versions": {"torch": "2.13.0", "jax": None}, "platform": "Linux x86_64", "processor": "a processor",
    "processor_count": 2, "devices": {"torch": ["cpu"]}, "precision": {"jax_enable_x64": True},
}  # fmt: skip
EVIL = "</td></script><script>window.planted=1</script><img src=x onerror=window.planted=1>|`*_[a](javascript:1)"


def record(reports, kind, *, kinds=KINDS, **data):
    append_record(
        reports, kinds[kind], data, environment=ENVIRONMENT, command=f"gradcheck-suite {kind}"
    )


def verdict(reports, loop, *, state="holds", **changes):
    data = {
        "loop": loop, "verdict": state, "judged": 200, "dtype": "float64", "device": "cpu",
        "worst_error_over_allowed": 0.125, "violation": None,
        "reached": {"layers": {"linear": 7}, "losses": {}, "splits": {"several windows": 3}}, "stored": None,
    }  # fmt: skip
    record(reports, "verify", **{**data, **changes})


def counterexample(reports, loop="my_loop.py:train"):
    """Store a violation of a mean of means: micro-batches of 1 and 3 items, the second window wrong
    in two elements.
    """
    problem = ProblemSpec(
        Input("vector", size=1), (Layer("linear", bias=False, features=1),), Loss("mse")
    )
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
