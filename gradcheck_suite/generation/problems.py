"""The Hypothesis strategy for problems. Everything shrinks to the smallest model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from gradcheck_suite.catalogue import (
    CROSS_SAMPLE_LOSSES,
    INPUTS,
    LAYERS,
    LOSSES,
    chain_signal,
    input_signal,
    out_signal,
)
from gradcheck_suite.catalogue.definitions import LossDefinition
from gradcheck_suite.catalogue.signals import FLOATS, Options, Signal, vector
from gradcheck_suite.errors import UsageError
from gradcheck_suite.generation.focus import FOCUS, NO_FOCUS, Focus, hosts
from gradcheck_suite.generation.graphs import Frame, frame_of
from gradcheck_suite.generation.layers import (
    Choices,
    Limits,
    choices_of,
    is_accepted,
    layer_strategy,
    options_of,
    picked_layer,
)
from gradcheck_suite.generation.plans import check_range, counts, hashable, integers, sampled, valid_assumptions
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

CHOOSY_WEIGHT = 2
"""Additional places among the choices for a loss that accepts few signals, where it fits."""
MASKABLE_WEIGHT = 8
"""Additional places for a loss that can ignore targets: it is the case in which counts differ from numbers of items."""
USUAL_LOSS = "mse"
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


@cache
def _losses(signal: Signal, *, uniform: bool) -> Choices | None:
    """Return a strategy of the losses that accept a signal.

    Losses that accept few signals, such as classification losses, are drawn more often where they fit.
    """
    kinds = [kind for kind in LOSSES.values() if kind.drawn and kind.variants(signal)]
    choosy = [kind for kind in kinds if not kind.variants(vector(1))]
    usual = [kind for kind in kinds if kind.name == USUAL_LOSS] * len(kinds)
    places = [(kind, list(kind.variants(signal))) for kind in kinds + usual + choosy * CHOOSY_WEIGHT]
    ignoring = [(kind, [o for o in kind.variants(signal) if kind.maskable(o)]) for kind in kinds]
    places += [place for place in ignoring if place[1]] * MASKABLE_WEIGHT
    return choices_of((kind.name, _within(kind, signal, variants, uniform)) for kind, variants in places)


def _within(kind: LossDefinition, signal: Signal, variants: Sequence[Options], uniform: bool) -> Sequence[Options]:
    return [o for o in variants if not uniform or kind.uniform(signal, o)]


@cache
def _inputs(excluded: frozenset[str] = frozenset()) -> Choices | None:
    """Return a strategy of the inputs that some trainable layer accepts; None where all of these are excluded."""
    found = _leading(Limits(trainable=True, excluded=excluded))
    return choices_of(found.items(), every_usual=True)


def _leading(limits: Limits) -> dict[str, list[Options]]:
    """Return the inputs that a layer within limits accepts, with their variants."""
    return {
        kind.name: [o for o in kind.variants if is_accepted(kind.signal(o), limits)]
        for kind in INPUTS.values()
        if kind.drawn
    }


@cache
def _hosts(focus: Focus, excluded: frozenset[str]) -> Mapping[str, Sequence[Options]]:
    """Return the inputs from which the layer or the loss of a focus can be reached; empty where any will do."""
    if focus.loss is None:
        return hosts(focus)
    found = _leading(Limits(trainable=True, excluded=excluded, loss=focus.loss))
    floats = {name: [o for o in variants if INPUTS[name].signal(o).form in FLOATS] for name, variants in found.items()}
    return {name: variants for name, variants in floats.items() if variants}


@cache
def _excluded(assumes: frozenset[str]) -> frozenset[str]:
    """Return the excluded layer kinds; `InvalidArgument` where one does not exist, or none is left."""
    try:
        expect_layers_left(assumes)
    except UsageError as error:
        raise InvalidArgument(str(error)) from None
    return excluded_layers(assumes)


def _drawn(
    draw: st.DrawFn, choices: Choices | None, what: str, instead: Mapping[str, Sequence[Options]] | None = None
) -> tuple[Any, Options]:
    """Draw a kind and its options; if `instead` is given, a kind that is not in it becomes its first.

    The kind is drawn in any case, so that later draws keep their places while a focus shrinks to none.
    """
    assert choices is not None, what
    kind, variants = draw(choices)
    if instead:
        kind = kind if kind in instead else next(iter(instead))
        variants = partial(options_of, instead[kind], every_usual=True)
    return kind, draw(variants())


def _loss(draw: st.DrawFn, focus: Focus, signal: Signal, *, uniform: bool) -> tuple[str, Options]:
    """Draw a loss that accepts a signal: that of the focus, if possible."""
    wanted: dict[str, Sequence[Options]] = {}
    if focus.loss is not None:
        kind = LOSSES[focus.loss]
        if variants := _within(kind, signal, kind.variants(signal), uniform):
            wanted = {focus.loss: variants}
    return _drawn(draw, _losses(signal, uniform=uniform), f"no loss takes {signal}", wanted)


def _chain(
    draw: st.DrawFn, signal: Signal, counted: tuple[int, int], limits: Limits, focus: Focus, number: int
) -> tuple[list[Layer], Frame]:
    """Draw layers, the last of them trainable, and put those around them that the focus asks for.

    Args:
        draw: draws from a strategy.
        signal: what the first layer accepts.
        counted: how many layers, and how many at most.
        limits: of all layers.
        focus: what the problem must contain.
        number: picks the options of layers that are not drawn.

    Returns:
        The layers, and the frame that is part of them.
    """
    count, most = counted
    frame = frame_of(focus, signal, limits, number)
    if focus.layer is not None and not LAYERS[focus.layer].trainable:
        # it cannot be the last layer
        frame, focus = Frame((picked_layer(focus, signal, limits, number),)), NO_FOCUS
    room = most - len(frame.first) - len(frame.last)
    if room < 1:
        frame, room, focus = Frame(), most, replace(focus, graph=None)
    layers = list(frame.first)
    signal = chain_signal(layers, signal)
    count = min(count, room)
    keeps_shape = focus.loss is not None or focus.graph is not None
    for i in range(count):
        last = i == count - 1
        # so that the loss of the focus stays within reach, or the layer after the chain fits
        here = replace(limits, trainable=last, keeps_shape=keeps_shape and (not last or focus.loss is None))
        here = replace(here, loss=focus.loss) if last else here
        layers.append(draw(layer_strategy(signal, here, focus if i == 0 else NO_FOCUS)))
        signal = out_signal(layers[-1], signal)
    return [*layers, *frame.last], frame


@st.composite
def _problems(
    draw: st.DrawFn, min_layers: int, max_layers: int, sparse: bool, accumulable: bool, assumes: str | tuple[str, ...]
) -> ProblemSpec:
    check_range(min_layers, max_layers, "layers")
    chosen = valid_assumptions(assumes)
    limits = Limits(sparse=sparse and DENSE_GRADIENTS not in chosen, excluded=_excluded(chosen))
    focus, number = draw(FOCUS), draw(integers(0, 255))
    if (focus.sparse and not limits.sparse) or focus.layer in limits.excluded:
        focus = NO_FOCUS
    name, options = _drawn(draw, _inputs(limits.excluded), "no input", _hosts(focus, limits.excluded))
    source = Input(name, **options)
    counted = draw(counts(min_layers, max_layers)), max_layers
    layers, frame = _chain(draw, input_signal(source), counted, limits, focus, number)
    signal = chain_signal(layers, input_signal(source))
    reductions = sampled(reductions_within(chosen))
    if not accumulable and (signal.form != "vector" or draw(_BOOLEANS)):
        # after a layer, since the input may be tokens
        at = draw(integers(1, len(layers)))
        layers.insert(at, Layer("batch_norm_train"))
    elif not accumulable:
        kind = draw(sampled(tuple(CROSS_SAMPLE_LOSSES)))
        return ProblemSpec(source, tuple(layers), Loss(kind, reduction=draw(reductions)))
    loss, options = _loss(draw, focus, signal, uniform=bool(chosen & {EQUAL_MICRO_BATCHES, PLAIN_COUNTS}))
    ties = frame.ties(len(layers)) if accumulable else ()
    return ProblemSpec(source, tuple(layers), Loss(loss, **options, reduction=draw(reductions)), ties)


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
        accumulable: whether the objective is a sum over items. If not, one layer is batch normalization in train mode,
            or the loss is not separable over samples; no loop can be right then.
        assumes: assumptions of the loop, names from `ASSUMPTIONS`.

    Raises:
        InvalidArgument: at the first draw, where an argument is wrong.
    """
    return _problems(min_layers, max_layers, sparse, accumulable, hashable(assumes))
