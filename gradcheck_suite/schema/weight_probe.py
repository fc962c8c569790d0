"""The weight probe: a case whose accumulated gradient is the weight that a loop gives to each item."""

from __future__ import annotations

from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.plan import Plan
from gradcheck_suite.schema.spec import Input, Layer, Loss, ProblemSpec, Reduction

SMALL_SCALE = 2.0**-20
"""A factor of the loss so small that thresholds such as gradient clipping have no effect.

It is a power of two, so a linear loop's weights scale without rounding."""


def probe_case(plan: Plan, reduction: Reduction = "mean", *, device: str = "cpu") -> Case:
    """Return the case whose accumulated gradient is the weights that a loop gives to the items of `plan`.

    If the counts are powers of two, the weights of a correct loop equal 1/N bit for bit.

    Args:
        plan: the plan; its micro-batches without valid targets become ordinary ones.
        reduction: reduction of the loss.
        device: device of the model and the data.
    """
    items = plan.total_items
    spec = ProblemSpec(Input("index", items=items), (Layer("readout"),), Loss("identity", reduction=reduction))
    return Case(spec, plan.replace(masked=()), device=device)
