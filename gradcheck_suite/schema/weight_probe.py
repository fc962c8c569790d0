"""The weight probe: a case whose accumulated gradient is the weight that a loop gives to each item."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.plan import Plan
from gradcheck_suite.schema.spec import Input, Layer, Loss, ProblemSpec, Reduction

SMALL_SCALE = 2.0**-20
"""A factor of the loss so small that thresholds such as gradient clipping have no effect.

It is a power of two, so a linear loop's weights scale without rounding."""
PARAMETER = "0.weight"
"""The name of the probe's parameter."""


def probe_case(
    plan: Plan, reduction: Reduction = "mean", *, device: str = "cpu", dtype: str = "float64", slopes: str = ""
) -> Case:
    """Return the case whose accumulated gradient is the weights that a loop gives to the items of `plan`.

    If the counts are powers of two, the weights of a correct loop equal 1/N bit for bit.

    Args:
        plan: the plan; its micro-batches without valid targets become ordinary ones.
        reduction: reduction of the loss.
        device: device of the model and the data.
        dtype: dtype of the parameter.
        slopes: derivatives of the item losses as `slopes_text` writes them, repeated over the items; 1 each if empty.
    """
    items = plan.total_items
    options = {"slopes": slopes} if slopes else {}
    loss = Loss("identity", reduction=reduction, **options)
    spec = ProblemSpec(Input("index", items=items), (Layer("readout"),), loss)
    return Case(spec, plan.replace(masked=()), dtype=dtype, device=device)


def is_probe(case: Case) -> bool:
    """Return whether a case is a weight probe, whose right gradient needs no reference."""
    spec = case.spec
    return spec is not None and (spec.input.kind, spec.layer_kinds, spec.loss.kind) == (
        "index",
        ["readout"],
        "identity",
    )


def slopes_text(slopes: Iterable[float]) -> str:
    """Return slopes as text, such as `1 2**10 inf`; each is a power of two, infinite or NaN."""
    return " ".join(_written(slope) for slope in slopes)


def read_slopes(text: str, items: int) -> list[float]:
    """Return the slope of each item's loss; the text's slopes are repeated, and without a text all are 1."""
    slopes = [_read(word) for word in text.split()] or [1.0]
    return [slopes[i % len(slopes)] for i in range(items)]


def slopes_of(case: Case) -> Sequence[float]:
    """Return the derivative of each item's loss on a weight probe."""
    assert case.spec is not None
    return read_slopes(case.spec.loss.o.get("slopes", ""), case.plan.total_items)


def _written(slope: float) -> str:
    if not math.isfinite(slope) or slope == 1:
        return f"{slope:g}"
    mantissa, exponent = math.frexp(slope)
    assert mantissa == 0.5, f"a slope must be a power of two, got {slope}"
    return f"2**{exponent - 1}"


def _read(word: str) -> float:
    base, power, exponent = word.partition("**")
    return float(base) ** int(exponent) if power else float(base)
