"""Small problems with a given layer or loss in them, and scripts as modules of this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType

from gradcheck_suite.catalogue.definitions import Signal
from gradcheck_suite.catalogue.tables import INPUTS, LAYERS, LOSSES, out_signal
from gradcheck_suite.core.case import Input, Layer, Loss, ProblemSpec


def load(text: str) -> ModuleType:
    """Return a script as a module."""
    # a dataclass looks its module up by name
    module = sys.modules["script"] = ModuleType("script")
    exec(compile(text, "script", "exec"), vars(module))
    return module


@cache
def _sources() -> dict[Signal, tuple[Input, tuple[Layer, ...]]]:
    """Return, for each signal, an input and a trainable layer or none that lead to it.

    The shortest way is taken.
    """
    inputs = [
        Input(kind.name, **o) for kind in INPUTS.values() if kind.drawn for o in kind.variants
    ]
    inputs.append(Input("index", items=4))
    found: dict[Signal, tuple[Input, tuple[Layer, ...]]] = {}
    for source in inputs:
        found.setdefault(INPUTS[source.kind].signal(source.o), (source, ()))
    for signal, (source, _) in list(found.items()):
        for kind in LAYERS.values():
            for options in kind.variants(signal) if kind.trainable else ():
                layer = Layer(kind.name, **options)
                found.setdefault(out_signal(layer, signal), (source, (layer,)))
    return found


def _trained(signal: Signal) -> tuple[Layer, ...]:
    """Return a trainable layer that leaves a signal as it is."""
    if signal.form == "image":
        geometry = {"kernel": 1, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
        return (Layer("conv2d", features=signal.features, bias=True, **geometry),)
    return (
        () if signal.form == "tokens" else (Layer("linear", features=signal.features, bias=True),)
    )


def layer_problems(name: str) -> Iterator[ProblemSpec]:
    """Yield problems with each variant of a layer kind in them, on the simplest signal of each form
    that takes it.

    A layer behind a trainable one hands its gradient on; the loss is one that every output takes.
    """
    kind = LAYERS[name]
    pair = (Layer("tanh"), Layer("dropout", p=0.5))
    inner = {"shared": (Layer("tanh"), Layer("softplus", beta=2.0, threshold=1.0))}.get(
        name, pair if kind.wraps else ()
    )
    seen = set()
    for signal, (source, before) in _sources().items():
        for options in kind.variants(signal):
            place = (signal.form, signal.padded, tuple(options.items()))
            if place in seen or (name == "readout") != (source.kind == "index"):
                continue
            seen.add(place)
            layer = Layer(name, *inner, **options)
            loss = "identity" if name == "readout" else "mse"
            first = () if kind.trainable else _trained(signal)
            yield ProblemSpec(source, (*before, *first, layer), Loss(loss, reduction="mean"))


def loss_problems(name: str) -> Iterator[ProblemSpec]:
    """Yield problems with each variant of a loss kind, for the first signal of each form that takes
    it.
    """
    if name == "identity":
        yield from layer_problems("readout")
        return
    seen = set()
    for signal, (source, before) in _sources().items():
        for options in LOSSES[name].variants(signal):
            place = (signal.form, tuple(options.items()))
            if place in seen:
                continue
            seen.add(place)
            layers = (*before, *_trained(signal))
            for reduction in ("mean", "sum")[: 2 if len(seen) == 1 else 1]:
                yield ProblemSpec(source, layers, Loss(name, reduction=reduction, **options))
