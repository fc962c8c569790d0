"""The weight read-out probe: which weight a loop gives each item, exactly."""

from __future__ import annotations

from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.plan import Plan
from gradcheck_suite.schema.spec import Input, Layer, Loss, ProblemSpec, Reduction

SMALL_SCALE = 2.0**-20
"""A scale of a loss at which no threshold bites; a power of two, so that a linear loop's weights scale unrounded."""


def probe_case(plan: Plan, reduction: Reduction = "mean", *, device: str = "cpu") -> Case:
    """Return the case whose accumulated gradient is the weights that a loop gives to the items of `plan`.

    With power-of-two counts the weights of a sound loop are 1/N bit for bit.
    """
    items = plan.total_items
    spec = ProblemSpec(Input("index", items=items), (Layer("readout"),), Loss("identity", reduction=reduction))
    return Case(spec, plan.replace(masked=()), device=device)
