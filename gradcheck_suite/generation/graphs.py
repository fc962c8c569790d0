"""Layers that go around a drawn chain, so that the model is a graph: a weight under two names, many parameters."""

from __future__ import annotations

from dataclasses import dataclass

from gradcheck_suite.catalogue.signals import Signal
from gradcheck_suite.generation.focus import Focus
from gradcheck_suite.generation.layers import Limits
from gradcheck_suite.schema.spec import Layer

BRANCHES = 7
"""Linear layers side by side in a model with many parameters: each has a weight and a bias."""


@dataclass(frozen=True)
class Frame:
    """Layers around a chain that keeps the signal's shape.

    Attributes:
        first: the layers before the chain.
        last: the layers after it.
        tied: what the last layer shares with the first: `""` for the whole module, `".weight"` for its weight; None
            for nothing.
    """

    first: tuple[Layer, ...] = ()
    last: tuple[Layer, ...] = ()
    tied: str | None = None

    def ties(self, layers: int) -> tuple[tuple[str, str], ...]:
        """Return the ties of a model with so many layers."""
        return () if self.tied is None else ((f"{layers - 1}{self.tied}", f"0{self.tied}"),)


def frame_of(focus: Focus, signal: Signal, limits: Limits, number: int) -> Frame:
    """Return the layers that a focus puts around the chain; none where excluded kinds are among them.

    Args:
        focus: what the problem must contain.
        signal: of the input: rows, or tokens for a parameter that two layers share.
        limits: of the layers.
        number: picks among several graphs, so that nothing is drawn for them.
    """
    linear = Layer("linear", features=signal.features, bias=True)
    if focus.graph == "many":
        frame = Frame((Layer("sum", *[linear] * BRANCHES),))
    elif focus.graph == "module":
        layer = (linear, Layer("residual", linear, Layer("tanh")), Layer("shared", linear))[number % 3]
        frame = Frame((layer,), (layer,), "")
    elif focus.graph == "parameter" and signal.form == "tokens":
        sparse, padding, bias = (bool(number & bit) for bit in (1, 2, 4))
        embedding = Layer("embedding", features=2, padding_idx=padding, sparse=sparse and limits.sparse)
        frame = Frame((embedding,), (Layer("linear", features=signal.vocabulary, bias=bias),), ".weight")
    elif focus.graph == "parameter":
        frame = Frame((linear,), (Layer("linear", features=signal.features, bias=False),), ".weight")
    else:
        frame = Frame()
    used = {kind for layer in (*frame.first, *frame.last) for kind in (layer.kind, *(i.kind for i in layer.layers))}
    return frame if used.isdisjoint(limits.excluded) else Frame()
