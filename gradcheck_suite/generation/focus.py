"""Focuses: what a case must contain, so that a few hundred cases reach every kind.

A case's first draw is its focus. `NO_FOCUS`, to which it shrinks, leaves everything to the later draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from hypothesis import strategies as st

from gradcheck_suite.catalogue import INPUTS, LAYERS, LOSSES
from gradcheck_suite.catalogue.signals import Options
from gradcheck_suite.schema.spec import Scalar

FREE_SHARE = 0.2
"""Share of cases without a focus."""
RARE_LAYERS = ("scale", "train_scale", "second_input")
RARE_INPUTS = (("values", "tied"), ("values", "large"), ("length", 5), ("vocabulary", 9), ("height", 2), ("height", 5))
"""Options of inputs, and values of them, that are seldom drawn, so that few shapes are compiled."""
RARE_TIMES = 4
"""How often a feature stands among the focuses on which some faults depend altogether, such as a weight's two names."""


@dataclass(frozen=True)
class Focus:
    """What a problem must contain.

    Attributes:
        layer: a layer kind, the first of the model; None for any.
        sparse: whether that layer has sparse gradients.
        loss: a loss kind; None for any.
        graph: `"module"` or `"parameter"`, for one under two names, or `"many"`, for more than a dozen parameters; None
            for neither.
        input: an option of the input, and its value; None for any input.
    """

    layer: str | None = None
    sparse: bool = False
    loss: str | None = None
    graph: Literal["module", "parameter", "many"] | None = None
    input: tuple[str, Scalar] | None = None

    def fits(self, options: Options) -> bool:
        """Return whether a variant of the layer has what the focus asks for."""
        return bool(options.get("sparse")) or not self.sparse


NO_FOCUS = Focus()


@cache
def hosts(focus: Focus) -> Mapping[str, tuple[Options, ...]]:
    """Return the inputs that a focus asks for or accepts, with their variants; empty where any will do."""
    if focus.input is not None:
        name, value = focus.input
        fitting = {k.name: tuple(o for o in k.variants if o.get(name) == value) for k in INPUTS.values() if k.drawn}
        return {kind: variants for kind, variants in fitting.items() if variants}
    if focus.layer is None and focus.graph is None:
        return {}
    # graphs are made of linear layers; a parameter is also shared by an embedding and the layer of the output
    accepted = LAYERS[focus.layer or "linear"].variants
    found = {
        kind.name: tuple(
            o
            for o in kind.variants
            if any(map(focus.fits, accepted(kind.signal(o))))
            or (focus.graph == "parameter" and kind.signal(o).form == "tokens")
        )
        for kind in INPUTS.values()
        if kind.drawn
    }
    return {name: variants for name, variants in found.items() if variants}


def _foci() -> tuple[Focus, ...]:
    layers = [Focus(layer=name) for name in LAYERS if hosts(Focus(layer=name))]
    sparse = [focus for f in layers if hosts(focus := Focus(layer=f.layer, sparse=True))]
    losses = [Focus(loss=kind.name) for kind in LOSSES.values() if kind.drawn]
    graphs = [Focus(graph="module"), Focus(graph="parameter"), Focus(graph="many")]
    inputs = [Focus(input=option) for option in RARE_INPUTS]
    rare = [*graphs, *sparse[:1], *(Focus(layer=name) for name in RARE_LAYERS)]
    chosen = [*layers, *sparse, *losses, *inputs, *rare * RARE_TIMES]
    return (NO_FOCUS,) * round(FREE_SHARE * len(chosen) / (1 - FREE_SHARE)) + tuple(chosen)


FOCI = _foci()
"""All focuses, at most 256, so that one byte selects one."""
FOCUS: st.SearchStrategy[Focus] = st.sampled_from(FOCI)
