"""Layers made of layers: a residual connection, and one whose weights are used twice."""

from __future__ import annotations

from gradcheck_suite.catalogue.definitions import LayerDefinition, Signal, same


def _any_float(signal: Signal) -> tuple[dict[str, object], ...]:
    return () if signal.form == "tokens" else ({},)


KINDS = (
    LayerDefinition("residual", _any_float, same, wraps="residual"),
    LayerDefinition("shared", _any_float, same, wraps="shared"),
)
