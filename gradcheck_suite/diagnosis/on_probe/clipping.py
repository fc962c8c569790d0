"""Whether a gradient on a weight probe is clipped, and how: by value, by norm, each micro-batch by itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradcheck_suite.diagnosis.further_runs.loop_runner import LoopRunner
from gradcheck_suite.diagnosis.on_probe.probe_weights import WeightProbe
from gradcheck_suite.diagnosis.weight_patterns.weights import Diagnosis
from gradcheck_suite.numerics.bounds import UNIT_ROUNDOFF
from gradcheck_suite.numerics.comparison import Vector
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.weight_probe import slopes_of

FURTHER = 4.0
"""Factor of a large gradient that shows whether the observed one stays where it is."""


def clipping(case: Case, seen: Vector, right: Vector, step: int, runner: LoopRunner) -> Diagnosis | None:
    """Return the diagnosis of a gradient that is cut to some size, which a larger one would be cut to as well."""
    items = np.flatnonzero(right)
    if not (np.abs(seen[items]) <= 1.01 * np.abs(right[items])).all() or not seen[items].any():
        return None
    assert case.spec is not None
    slopes = [slope * FURTHER if abs(slope) > 1 else slope for slope in slopes_of(case)]
    louder = WeightProbe(case.plan, case.spec.loss.reduction, dtype=case.dtype).observed_weights(runner, slopes=slopes)
    if louder is None or step >= len(louder):
        return None
    cut, close = ~np.isclose(seen[items], right[items], rtol=1e-2), max(1e-5, 64 * UNIT_ROUNDOFF[case.dtype])
    if not cut.any() or not np.allclose(louder[step][items][cut], seen[items][cut], rtol=close, atol=0):
        return None
    return Diagnosis("clipped", f"{_cut(case, seen, right, items)}: the contract asks for the gradient itself")


def _cut(case: Case, seen: Vector, right: Vector, items: npt.NDArray[np.intp]) -> str:
    """Return which clipping explains a gradient: by value, by norm, by the norm of each micro-batch."""
    share = seen[items] / right[items]
    size = f"a gradient of norm {np.linalg.norm(right):.4g}"
    largest, norm = np.abs(seen[items]).max(), np.linalg.norm(seen[items])
    if len(items) == 1:
        return f"{size} is clipped to {norm:.4g}, by norm or by value"
    if np.ptp(share) <= 1e-2 * share.max():
        return f"{size} is clipped to norm {norm:.4g}"
    cut = np.abs(share - 1) > 1e-2
    if np.ptp(np.abs(seen[items][cut])) <= 1e-2 * largest:
        return f"{size} is clipped by value to {largest:.4g}"
    return f"{size} is clipped, in parts: its micro-batches' parts have norms {_norms(case, seen)}"


def _norms(case: Case, seen: Vector) -> str:
    plan = case.plan
    norms = [np.linalg.norm(seen[plan.items(j).start : plan.items(j).stop]) for j in range(len(plan.micro_batches))]
    return " and ".join(f"{norm:.4g}" for norm in norms if norm)
