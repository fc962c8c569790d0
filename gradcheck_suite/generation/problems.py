"""The Hypothesis strategy for problems. Everything shrinks to the smallest model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import cycle
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from gradcheck_suite.catalogue import CROSS_SAMPLE_LOSSES, INPUTS, LAYERS, LOSSES, input_signal, out_signal
from gradcheck_suite.catalogue.definitions import LayerDefinition
from gradcheck_suite.catalogue.signals import Options, Signal, vector
from gradcheck_suite.errors import UsageError
from gradcheck_suite.generation.plans import check_range, hashable, integers, sampled, valid_assumptions
from gradcheck_suite.schema.contract import (
    DENSE_GRADIENTS,
    EQUAL_MICRO_BATCHES,
    MEAN_REDUCTION,
    NO_LAYER,
    PLAIN_COUNTS,
    SUM_REDUCTION,
    excluded_layers,
)
from gradcheck_suite.schema.spec import REDUCTIONS, Input, Layer, Loss, ProblemSpec, Reduction

MAX_INNER_LAYERS = 2
CHOOSY_WEIGHT = 2
"""Additional places among the choices for a loss that accepts few signals, where it fits."""
MASKABLE_WEIGHT = 8
"""Additional places for a loss that can ignore targets: it is the case in which counts differ from numbers of items."""
Choices = st.SearchStrategy[tuple[Any, st.SearchStrategy[Options]]]
"""A strategy of pairs: a kind, and a strategy of its options."""
_BOOLEANS = st.booleans()


def reductions_within(assumes: frozenset[str]) -> tuple[Reduction, ...]:
    """Return the reductions that are drawn for a loop with these assumptions.

    A loop that assumes equal counts is tested with means only, since counts do not matter to a sum.
    """
    if SUM_REDUCTION in assumes:
        return ("sum",)
    return ("mean",) if assumes & {EQUAL_MICRO_BATCHES, MEAN_REDUCTION} else REDUCTIONS


def expect_layers_left(assumes: Iterable[str]) -> None:
    """Raise `UsageError` where a loop excludes a layer kind that does not exist, or every layer with parameters."""
    excluded, drawn = excluded_layers(assumes), LAYERS.keys() - {"readout"}
    if unknown := sorted(excluded - drawn):
        raise UsageError(f"{NO_LAYER}KIND: KIND must be one of {', '.join(sorted(drawn))}; got {unknown[0]!r}")
    if _inputs(excluded) is None:
        raise UsageError("no model is left to draw: every layer kind with parameters is excluded; drop one exclusion")


def _choices(found: Iterable[tuple[Any, Sequence[Options]]]) -> Choices | None:
    """Return a strategy of the kinds that have variants, or None if none has."""
    kinds = [(kind, st.sampled_from(variants)) for kind, variants in found if variants]
    return st.sampled_from(kinds) if kinds else None


@cache
def _layers(
    signal: Signal,
    *,
    trainable: bool = False,
    keeps_shape: bool = False,
    sparse: bool = False,
    excluded: frozenset[str] = frozenset(),
) -> Choices | None:
    """Return a strategy of the layer kinds that accept a signal, without those excluded.

    Every kind has the same place for every signal, so that shrinking may change the layers before it. The places of
    kinds that do not fit go to layers that mix features or positions, and twice as often to layers that change the
    signal's form. Otherwise the many pointwise activations would dominate.
    """
    places: list[tuple[LayerDefinition, list[Options]]] = []
    for kind in LAYERS.values():
        variants = [o for o in kind.variants(signal) if sparse or not o.get("sparse")]
        if (trainable and not kind.trainable) or (keeps_shape and kind.wraps) or kind.name in excluded:
            variants = []
        if keeps_shape:
            variants = [o for o in variants if out_signal(Layer(kind.name, **o), signal) == signal]
        places.append((kind, variants))
    fitting = [(kind, variants) for kind, variants in places if variants]
    if not fitting:
        return None
    mixing = [(kind, variants) for kind, variants in fitting if kind.axes != 0]
    leading = [
        (k, v) for k, v in mixing if not k.wraps and out_signal(Layer(k.name, **v[0]), signal).form != signal.form
    ]
    others = cycle(leading + mixing or fitting)
    return _choices([place if place[1] else next(others) for place in places])


@st.composite
def _any_layer(
    draw: st.DrawFn, signal: Signal, *, trainable: bool, keeps_shape: bool, sparse: bool, excluded: frozenset[str]
) -> Layer:
    choices = _layers(signal, trainable=trainable, keeps_shape=keeps_shape, sparse=sparse, excluded=excluded)
    if choices is None and excluded:
        reject()  # the layers before it lead to a signal that only excluded kinds accept
    assert choices is not None, f"no layer takes {signal}"
    kind, variants = draw(choices)
    inner: list[Layer] = []
    if kind.wraps:
        count = draw(integers(1, MAX_INNER_LAYERS))
        inside = _layer(signal, trainable=False, keeps_shape=True, sparse=sparse, excluded=excluded)
        inner = [draw(inside) for _ in range(count)]
    return Layer(kind.name, *inner, **draw(variants))


@cache
def _layer(
    signal: Signal, *, trainable: bool, keeps_shape: bool, sparse: bool, excluded: frozenset[str]
) -> st.SearchStrategy[Layer]:
    return _any_layer(signal, trainable=trainable, keeps_shape=keeps_shape, sparse=sparse, excluded=excluded)


@cache
def _losses(signal: Signal, *, uniform: bool) -> Choices | None:
    """Return a strategy of the losses that accept a signal.

    Losses that accept few signals, such as classification losses, are drawn more often where they fit.
    """
    kinds = [kind for kind in LOSSES.values() if kind.drawn and kind.variants(signal)]
    choosy = [kind for kind in kinds if not kind.variants(vector(1))]
    places = [(kind, list(kind.variants(signal))) for kind in kinds + choosy * CHOOSY_WEIGHT]
    ignoring = [(kind, [o for o in kind.variants(signal) if kind.maskable(o)]) for kind in kinds]
    places += [place for place in ignoring if place[1]] * MASKABLE_WEIGHT
    return _choices(
        (kind.name, [o for o in variants if not uniform or kind.uniform(signal, o)]) for kind, variants in places
    )


@cache
def _inputs(excluded: frozenset[str] = frozenset()) -> Choices | None:
    """Return a strategy of the inputs that some trainable layer accepts; None where all of these are excluded."""
    return _choices(
        (
            kind.name,
            [o for o in kind.variants if _layers(kind.signal(o), trainable=True, excluded=excluded) is not None],
        )
        for kind in INPUTS.values()
        if kind.drawn
    )


@cache
def _excluded(assumes: frozenset[str]) -> frozenset[str]:
    """Return the excluded layer kinds; `InvalidArgument` where one does not exist, or none is left."""
    try:
        expect_layers_left(assumes)
    except UsageError as error:
        raise InvalidArgument(str(error)) from None
    return excluded_layers(assumes)


def _drawn(draw: st.DrawFn, choices: Choices | None, what: str) -> tuple[Any, Options]:
    assert choices is not None, what
    kind, variants = draw(choices)
    return kind, draw(variants)


@st.composite
def _problems(
    draw: st.DrawFn, min_layers: int, max_layers: int, sparse: bool, accumulable: bool, assumes: str | tuple[str, ...]
) -> ProblemSpec:
    check_range(min_layers, max_layers, "layers")
    chosen = valid_assumptions(assumes)
    excluded, sparse = _excluded(chosen), sparse and DENSE_GRADIENTS not in chosen
    name, options = _drawn(draw, _inputs(excluded), "no input")
    source = Input(name, **options)
    signal = input_signal(source)
    layers = []
    for left in reversed(range(draw(integers(min_layers, max_layers)))):
        layers.append(draw(_layer(signal, trainable=left == 0, keeps_shape=False, sparse=sparse, excluded=excluded)))
        signal = out_signal(layers[-1], signal)
    reductions = sampled(reductions_within(chosen))
    if not accumulable and (signal.form != "vector" or draw(_BOOLEANS)):
        # after a layer, since the input may be tokens
        at = draw(integers(1, len(layers)))
        layers.insert(at, Layer("batch_norm_train"))
    elif not accumulable:
        kind = draw(sampled(tuple(CROSS_SAMPLE_LOSSES)))
        return ProblemSpec(source, tuple(layers), Loss(kind, reduction=draw(reductions)))
    uniform = bool(chosen & {EQUAL_MICRO_BATCHES, PLAIN_COUNTS})
    loss, options = _drawn(draw, _losses(signal, uniform=uniform), f"no loss takes {signal}")
    return ProblemSpec(source, tuple(layers), Loss(loss, **options, reduction=draw(reductions)))


def problems(
    *,
    min_layers: int = 1,
    max_layers: int = 5,
    sparse: bool = True,
    accumulable: bool = True,
    assumes: Iterable[str] = (),
) -> st.SearchStrategy[ProblemSpec]:
    """Return a strategy of problems: an input, layers of which the last is trainable, a loss that accepts their output.

    Args:
        min_layers: smallest number of layers in the chain.
        max_layers: largest number of layers in the chain.
        sparse: whether embeddings may have sparse gradients, which some optimizers do not support.
        accumulable: whether the objective is a sum over items. If not, one layer is batch normalisation in train mode,
            or the loss is not separable over samples; no loop can be right then.
        assumes: assumptions of the loop, names from `ASSUMPTIONS`.

    Raises:
        InvalidArgument: at the first draw, where an argument is wrong.
    """
    return _problems(min_layers, max_layers, sparse, accumulable, hashable(assumes))
