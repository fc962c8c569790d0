"""Layers made of layers: a residual connection, and one whose weights are used twice."""

from __future__ import annotations

from gradcheck_suite.catalogue.kinds import LayerKind, Signal, same


def _any_float(signal: Signal) -> tuple[dict[str, object], ...]:
    return () if signal.form == "tokens" else ({},)


KINDS = (
    LayerKind("residual", _any_float, same, wraps="residual"),
    LayerKind("shared", _any_float, same, wraps="shared"),
)
