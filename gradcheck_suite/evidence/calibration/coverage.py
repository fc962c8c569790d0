"""The kinds of layers and losses that the strategies draw: a campaign should reach all of them."""

from __future__ import annotations

from functools import cache

from gradcheck_suite.catalogue import INPUTS, LAYERS, LOSSES, out_signal
from gradcheck_suite.catalogue.signals import Signal
from gradcheck_suite.schema.spec import Layer


@cache
def _signals() -> frozenset[Signal]:
    """Return every signal that a chain of drawn layers can produce from a drawn input."""
    waiting = [kind.signal(options) for kind in INPUTS.values() if kind.drawn for options in kind.variants]
    found: set[Signal] = set()
    while waiting:
        signal = waiting.pop()
        if signal not in found:
            found.add(signal)
            waiting += {
                out_signal(Layer(kind.name, **options), signal)
                for kind in LAYERS.values()
                if not kind.wraps
                for options in kind.variants(signal)
            }
    return frozenset(found)


@cache
def drawn_layers() -> frozenset[str]:
    """Return the layer kinds that the strategies draw."""
    return frozenset(kind.name for kind in LAYERS.values() if any(kind.variants(signal) for signal in _signals()))


@cache
def drawn_losses() -> frozenset[str]:
    """Return the loss kinds that the strategies draw."""
    kinds = (kind for kind in LOSSES.values() if kind.drawn)
    return frozenset(kind.name for kind in kinds if any(kind.variants(signal) for signal in _signals()))
