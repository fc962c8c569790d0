"""Layers made of other layers: a residual connection, and a chain that is applied twice."""

from __future__ import annotations

from gradcheck_suite.catalogue.definitions import LayerDefinition
from gradcheck_suite.catalogue.signals import FLOATS, on, same

KINDS = (
    LayerDefinition("residual", on(*FLOATS), same, wraps="residual"),
    LayerDefinition("shared", on(*FLOATS), same, wraps="shared"),
)
