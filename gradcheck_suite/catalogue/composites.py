"""Layers made of other layers: a residual connection, a chain that is applied twice, branches that join."""

from __future__ import annotations

from collections.abc import Sequence

from gradcheck_suite.catalogue.definitions import LayerDefinition
from gradcheck_suite.catalogue.signals import FLOATS, Options, Signal, on, same

MAX_JOINED = 2
"""Number of features up to which branches are concatenated, so that few new shapes occur."""


def _concat_variants(signal: Signal) -> Sequence[Options]:
    return ({},) if signal.form in FLOATS and signal.features <= MAX_JOINED else ()


KINDS = (
    LayerDefinition("residual", on(*FLOATS), same, wraps="residual"),
    LayerDefinition("shared", on(*FLOATS), same, wraps="shared"),
    LayerDefinition("sum", on(*FLOATS), same, wraps="sum"),
    LayerDefinition("concat", _concat_variants, same, wraps="concat"),
)
