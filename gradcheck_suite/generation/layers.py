"""The Hypothesis strategy for a layer that accepts a signal. It shrinks to the first kind of the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import cycle
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st

from gradcheck_suite.catalogue import LAYERS, LOSSES, out_signal
from gradcheck_suite.catalogue.definitions import LayerDefinition
from gradcheck_suite.catalogue.signals import Options, Signal
from gradcheck_suite.generation.focus import NO_FOCUS, Focus
from gradcheck_suite.generation.plans import integers
from gradcheck_suite.schema.spec import Layer

MAX_INNER_LAYERS = 2
USUAL_FEATURES = 2
_FEATURES = ("features", "size", "channels")
Choices = st.SearchStrategy[tuple[Any, Callable[[], st.SearchStrategy[Options]]]]
"""A strategy of pairs: a kind, and a function that returns a strategy of its options; few of them are ever drawn."""


@dataclass(frozen=True)
class Limits:
    """Which layers may be drawn.

    Attributes:
        trainable: only kinds with a parameter that receives a gradient from every item.
        keeps_shape: only layers whose output has the signal of their input, none that wraps others.
        sparse: also layers with sparse gradients.
        excluded: names of kinds that are not drawn.
        loss: only layers whose output this loss accepts; None for any.
    """

    trainable: bool = False
    keeps_shape: bool = False
    sparse: bool = False
    excluded: frozenset[str] = frozenset()
    loss: str | None = None

    def variants(self, kind: LayerDefinition, signal: Signal) -> list[Options]:
        """Return the options with which a kind is within the limits; empty if none is."""
        if (self.trainable and not kind.trainable) or kind.name in self.excluded:
            return []
        if kind.wraps and (self.keeps_shape or self.loss):
            return []
        found = [o for o in kind.variants(signal) if self.sparse or not o.get("sparse")]
        if self.keeps_shape:
            found = [o for o in found if out_signal(Layer(kind.name, **o), signal) == signal]
        if self.loss is not None:
            takes = LOSSES[self.loss].variants
            found = [o for o in found if takes(out_signal(Layer(kind.name, **o), signal))]
        return found


def options_of(variants: Sequence[Options], *, every_usual: bool = False) -> st.SearchStrategy[Options]:
    """Return a strategy that draws one variant four times as often as all the others together.

    It is the first with the usual number of features, or the first of all. Most layers then have the same shapes and
    share compiled programs. With `every_usual`, the same variant with and without padding takes its place.
    """
    usual = next((o for o in variants if USUAL_FEATURES in (o.get(name) for name in _FEATURES)), variants[0])
    often = [o for o in variants if o == {**usual, "padded": o.get("padded")}] if every_usual else []
    often = often or [usual]
    return st.sampled_from([variants[0], *often * (4 * len(variants) // len(often)), *variants[1:]])


def choices_of(found: Iterable[tuple[Any, Sequence[Options]]], *, every_usual: bool = False) -> Choices | None:
    """Return a strategy of the kinds that have variants, or None if none has."""
    kinds = [
        (kind, cache(partial(options_of, variants, every_usual=every_usual))) for kind, variants in found if variants
    ]
    return st.sampled_from(kinds) if kinds else None


@cache
def is_accepted(signal: Signal, limits: Limits) -> bool:
    """Return whether any layer kind accepts a signal, within limits."""
    return any(limits.variants(kind, signal) for kind in LAYERS.values())


@cache
def layer_choices(signal: Signal, limits: Limits) -> Choices | None:
    """Return a strategy of the layer kinds that accept a signal, within limits; None if there is none.

    Every kind has the same place for every signal, so that shrinking may change the layers before it. The places of
    kinds that do not fit go to layers that mix features or positions, and twice as often to layers that change the
    signal's form. Otherwise the many pointwise activations would dominate.
    """
    places = [(kind, limits.variants(kind, signal)) for kind in LAYERS.values()]
    fitting = [(kind, variants) for kind, variants in places if variants]
    if not fitting:
        return None
    mixing = [(kind, variants) for kind, variants in fitting if kind.axes != 0]
    leading = [
        (k, v) for k, v in mixing if not k.wraps and out_signal(Layer(k.name, **v[0]), signal).form != signal.form
    ]
    others = cycle(leading + mixing or fitting)
    return choices_of([place if place[1] else next(others) for place in places])


@st.composite
def _any_layer(draw: st.DrawFn, signal: Signal, limits: Limits, focus: Focus) -> Layer:
    choices = layer_choices(signal, limits)
    if choices is None and limits.excluded:
        reject()  # the layers before it lead to a signal that only excluded kinds accept
    assert choices is not None, f"no layer takes {signal}"
    kind, variants = draw(choices)
    if focus.layer is not None:
        # the drawn kind goes unused, so that the later choices keep their places when the focus shrinks to none
        kind = LAYERS[focus.layer]
        variants = partial(options_of, _of_focus(focus, signal, limits))
    inner: list[Layer] = []
    if kind.wraps:
        count = draw(integers(1, MAX_INNER_LAYERS)) + kind.parallel
        inner = [draw(layer_strategy(signal, _inside(limits))) for _ in range(count)]
    return Layer(kind.name, *inner, **draw(variants()))


def _of_focus(focus: Focus, signal: Signal, limits: Limits) -> list[Options]:
    assert focus.layer is not None
    dense_or_sparse = Limits(sparse=limits.sparse)
    return [o for o in dense_or_sparse.variants(LAYERS[focus.layer], signal) if focus.fits(o)]


def _inside(limits: Limits) -> Limits:
    return replace(limits, trainable=False, keeps_shape=True, loss=None)


@cache
def layer_strategy(signal: Signal, limits: Limits, focus: Focus = NO_FOCUS) -> st.SearchStrategy[Layer]:
    """Return a strategy of layers that accept a signal, or of layers that a focus asks for."""
    return _any_layer(signal, limits, focus)


def picked_layer(focus: Focus, signal: Signal, limits: Limits, number: int) -> Layer:
    """Return the layer of a focus, its options and inner layer picked by a number, so that nothing is drawn for it."""
    assert focus.layer is not None
    kind = LAYERS[focus.layer]
    inner = []
    if kind.wraps:
        within = replace(_inside(limits), trainable=True, sparse=False)
        fitting = [Layer(k.name, **o) for k in LAYERS.values() for o in within.variants(k, signal)]
        inner = [fitting[number % len(fitting)]] if fitting else [Layer("tanh")]
        inner += [Layer("tanh")] * kind.parallel
    variants = _of_focus(focus, signal, limits)
    return Layer(kind.name, *inner, **variants[number % len(variants)])
