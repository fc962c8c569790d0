"""Strategies for problems and cases: layers, graphs of layers, losses, and what a draw is focused
on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, cycle
from typing import Any, Literal

from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from gradcheck_suite.catalogue.definitions import (
    FLOATS,
    LayerDefinition,
    LossDefinition,
    Options,
    Signal,
    vector,
)
from gradcheck_suite.catalogue.tables import (
    CROSS_SAMPLE_LAYERS,
    CROSS_SAMPLE_LOSSES,
    INPUTS,
    LAYERS,
    LOSSES,
    chain_signal,
    input_signal,
    loss_definition,
    out_signal,
    output_signal,
)
from gradcheck_suite.core.case import (
    DEVICES,
    DTYPES,
    MAX_SEED,
    REDUCTIONS,
    Case,
    Input,
    Layer,
    Loss,
    Plan,
    ProblemSpec,
    Reduction,
    Scalar,
)
from gradcheck_suite.core.contract import (
    DENSE_GRADIENTS,
    EQUAL_MICRO_BATCHES,
    MEAN_REDUCTION,
    NO_LAYER,
    PLAIN_COUNTS,
    SUM_REDUCTION,
    excluded_layers,
)
from gradcheck_suite.errors import UsageError
from gradcheck_suite.run.optimizers import TAKES_SPARSE, checked_optimizer
from gradcheck_suite.strategies.plans import (
    check_range,
    counts,
    hashable,
    integers,
    plans,
    sampled,
    valid_assumptions,
)

# Focuses: what a case must contain, so that a few hundred cases reach every kind.
#
# A case's first draw is its focus. `NO_FOCUS`, to which it shrinks, leaves everything to the later
# draws.


FREE_SHARE = 0.2
"""Share of cases without a focus."""
RARE_LAYERS = ("scale", "train_scale", "second_input")
RARE_INPUTS = (
    ("values", "tied"),
    ("values", "large"),
    ("length", 5),
    ("vocabulary", 9),
    ("height", 2),
    ("height", 5),
)
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
        ignores: whether some targets of that loss are ignored.
        graph: `"module"` or `"parameter"`, for one under two names, or `"many"`, for more than a
            dozen parameters; None for neither.
        input: an option of the input, and its value; None for any input.
    """

    layer: str | None = None
    sparse: bool = False
    loss: str | None = None
    ignores: bool = False
    graph: Literal["module", "parameter", "many"] | None = None
    input: tuple[str, Scalar] | None = None

    def fits(self, options: Options) -> bool:
        """Return whether a variant of the layer has what the focus asks for."""
        return bool(options.get("sparse")) or not self.sparse


NO_FOCUS = Focus()


@cache
def hosts(focus: Focus) -> Mapping[str, tuple[Options, ...]]:
    """Return the inputs that a focus asks for or accepts, with their variants.

    Empty where any will do.
    """
    if focus.input is None and focus.layer is None and focus.graph is None:
        return {}
    found: dict[str, tuple[Options, ...]] = {}
    for kind in INPUTS.values():
        if not kind.drawn:
            continue
        variants = tuple(o for o in kind.variants if _is_host(focus, kind.signal(o), o))
        if variants:
            found[kind.name] = variants
    return found


def _is_host(focus: Focus, signal: Signal, options: Options) -> bool:
    """Return whether an input, of a signal and options, is what a focus asks for or accepts."""
    if focus.input is not None:
        name, value = focus.input
        return options.get(name) == value
    # graphs are made of linear layers; a parameter is also shared by an embedding and the layer of
    # the output
    if focus.graph == "parameter" and signal.form == "tokens":
        return True
    return any(map(focus.fits, LAYERS[focus.layer or "linear"].variants(signal)))


def _foci() -> tuple[Focus, ...]:
    layers = [Focus(layer=name) for name in LAYERS if hosts(Focus(layer=name))]
    as_sparse = [replace(focus, sparse=True) for focus in layers]
    sparse = [focus for focus in as_sparse if hosts(focus)]
    losses = [Focus(loss=kind.name) for kind in LOSSES.values() if kind.drawn]
    graphs = [Focus(graph="module"), Focus(graph="parameter"), Focus(graph="many")]
    inputs = [Focus(input=option) for option in RARE_INPUTS]
    # of the zoo's faults those of ignored targets take the most cases to be found: with two of
    # these up to 36 over ten seeds, with five up to 20; all others that were counted at most 8
    ignoring = [Focus(loss="cross_entropy", ignores=True)] * 5
    # sparse embeddings twice: only some of their cases add one sparse gradient to another
    rare = [*graphs, *ignoring, *sparse[:1] * 2, *(Focus(layer=name) for name in RARE_LAYERS)]
    chosen = [*layers, *sparse, *losses, *inputs, *rare * RARE_TIMES]
    return (NO_FOCUS,) * round(FREE_SHARE * len(chosen) / (1 - FREE_SHARE)) + tuple(chosen)


FOCI = _foci()
"""All focuses, at most 256, so that one byte selects one."""
FOCUS: st.SearchStrategy[Focus] = st.sampled_from(FOCI)


# The Hypothesis strategy for a layer that accepts a signal. It shrinks to the first kind of the
# catalogue.


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


def mostly_usual(
    variants: Sequence[Options], *, every_usual: bool = False
) -> st.SearchStrategy[Options]:
    """Return a strategy that draws one variant four times as often as all the others together.

    It is the first with the usual number of features, or the first of all. Most layers then have
    the same shapes and share compiled programs. With `every_usual`, the same variant with and
    without padding takes its place.
    """
    with_usual = (o for o in variants if USUAL_FEATURES in (o.get(name) for name in _FEATURES))
    usual = next(with_usual, variants[0])
    often = []
    if every_usual:
        often = [o for o in variants if o == {**usual, "padded": o.get("padded")}]
    often = often or [usual]
    times = 4 * len(variants) // len(often)
    # the first variant comes first, since Hypothesis shrinks to what stands there
    return st.sampled_from([variants[0], *often * times, *variants[1:]])


def choices_of(
    found: Iterable[tuple[Any, Sequence[Options]]], *, every_usual: bool = False
) -> Choices | None:
    """Return a strategy of the kinds that have variants, or None if none has."""
    kinds = [
        (kind, cache(partial(mostly_usual, variants, every_usual=every_usual)))
        for kind, variants in found
        if variants
    ]
    return st.sampled_from(kinds) if kinds else None


@cache
def takes_signal(signal: Signal, limits: Limits) -> bool:
    """Return whether any layer kind accepts a signal, within limits."""
    return any(limits.variants(kind, signal) for kind in LAYERS.values())


@cache
def layer_choices(signal: Signal, limits: Limits) -> Choices | None:
    """Return a strategy of the layer kinds that accept a signal, within limits.

    None if there is none. Every kind has the same place for every signal, so that shrinking may
    change the layers before it. The places of kinds that do not fit go to layers that mix features
    or positions, and twice as often to layers that change the signal's form. Otherwise the many
    pointwise activations would dominate.
    """
    places = [(kind, limits.variants(kind, signal)) for kind in LAYERS.values()]
    fitting = [(kind, variants) for kind, variants in places if variants]
    if not fitting:
        return None
    mixing = [(kind, variants) for kind, variants in fitting if kind.axes != 0]
    leading = [
        (k, v)
        for k, v in mixing
        if not k.wraps and out_signal(Layer(k.name, **v[0]), signal).form != signal.form
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
        # the drawn kind goes unused, so that the later choices keep their places when the focus
        # shrinks to none
        kind = LAYERS[focus.layer]
        variants = partial(mostly_usual, _of_focus(focus, signal, limits))
    inner: list[Layer] = []
    if kind.wraps:
        count = draw(integers(1, MAX_INNER_LAYERS)) + kind.parallel
        inner = [draw(layer_strategy(signal, _limits_inside(limits))) for _ in range(count)]
    return Layer(kind.name, *inner, **draw(variants()))


def _of_focus(focus: Focus, signal: Signal, limits: Limits) -> list[Options]:
    assert focus.layer is not None
    dense_or_sparse = Limits(sparse=limits.sparse)
    return [o for o in dense_or_sparse.variants(LAYERS[focus.layer], signal) if focus.fits(o)]


def _limits_inside(limits: Limits) -> Limits:
    return replace(
        limits,
        trainable=False,
        keeps_shape=True,
        loss=None,
    )


@cache
def layer_strategy(
    signal: Signal, limits: Limits, focus: Focus = NO_FOCUS
) -> st.SearchStrategy[Layer]:
    """Return a strategy of layers that accept a signal, or of layers that a focus asks for."""
    return _any_layer(signal, limits, focus)


def picked_layer(focus: Focus, signal: Signal, limits: Limits, number: int) -> Layer:
    """Return the layer of a focus, its options and inner layer picked by a number, so that nothing
    is drawn for it.
    """
    assert focus.layer is not None
    kind = LAYERS[focus.layer]
    inner = []
    if kind.wraps:
        within = replace(_limits_inside(limits), trainable=True, sparse=False)
        fitting: list[Layer] = []
        for each in LAYERS.values():
            fitting += [Layer(each.name, **o) for o in within.variants(each, signal)]
        inner = [fitting[number % len(fitting)]] if fitting else [Layer("tanh")]
        inner += [Layer("tanh")] * kind.parallel
    variants = _of_focus(focus, signal, limits)
    return Layer(kind.name, *inner, **variants[number % len(variants)])


# Layers that go around a drawn chain, so that the model is a graph: a weight under two names, many
# parameters.


BRANCHES = 7
"""Linear layers side by side in a model with many parameters: each has a weight and a bias."""


@dataclass(frozen=True)
class Frame:
    """Layers around a chain that keeps the signal's shape.

    Attributes:
        first: the layers before the chain.
        last: the layers after it.
        tied: what the last layer shares with the first: `""` for the whole module, `".weight"` for
            its weight; None for nothing.
    """

    first: tuple[Layer, ...] = ()
    last: tuple[Layer, ...] = ()
    tied: str | None = None

    def ties(self, layers: int) -> tuple[tuple[str, str], ...]:
        """Return the ties of a model with so many layers."""
        return () if self.tied is None else ((f"{layers - 1}{self.tied}", f"0{self.tied}"),)


def frame_of(focus: Focus, signal: Signal, limits: Limits, number: int) -> Frame:
    """Return the layers that a focus puts around the chain.

    None where excluded kinds are among them.

    Args:
        focus: what the problem must contain.
        signal: the signal of the input: rows, or tokens for a parameter that two layers share.
        limits: the limits of the layers.
        number: picks among several graphs, so that nothing is drawn for them.
    """
    linear = Layer("linear", features=signal.features, bias=True)
    if focus.graph == "many":
        frame = Frame((Layer("sum", *[linear] * BRANCHES),))
    elif focus.graph == "module":
        layer = (linear, Layer("residual", linear, Layer("tanh")), Layer("shared", linear))[
            number % 3
        ]
        frame = Frame((layer,), (layer,), "")
    elif focus.graph == "parameter" and signal.form == "tokens":
        sparse, padding, bias = (bool(number & bit) for bit in (1, 2, 4))
        embedding = Layer(
            "embedding", features=2, padding_idx=padding, sparse=sparse and limits.sparse
        )
        frame = Frame(
            (embedding,), (Layer("linear", features=signal.vocabulary, bias=bias),), ".weight"
        )
    elif focus.graph == "parameter":
        frame = Frame(
            (linear,), (Layer("linear", features=signal.features, bias=False),), ".weight"
        )
    else:
        frame = Frame()
    # an assumption excludes a kind wherever it is, inside of another layer too
    outer = [*frame.first, *frame.last]
    used = {layer.kind for layer in chain(outer, *(layer.layers for layer in outer))}
    return frame if used.isdisjoint(limits.excluded) else Frame()


# The Hypothesis strategy for problems. Everything shrinks to the smallest model.


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
    """Raise `UsageError` where a loop excludes a layer kind that does not exist, or every layer
    with parameters.
    """
    excluded = excluded_layers(assumes)
    drawn = LAYERS.keys() - {"readout"}
    if unknown := sorted(excluded - drawn):
        raise UsageError(
            f"{NO_LAYER}KIND: KIND must be one of {', '.join(sorted(drawn))}; got {unknown[0]!r}"
        )
    if _inputs(excluded) is None:
        raise UsageError(
            "no model is left to draw: every layer kind with parameters is excluded; drop one"
            " exclusion"
        )


@cache
def _losses(signal: Signal, *, uniform: bool) -> Choices | None:
    """Return a strategy of the losses that accept a signal.

    Losses that accept few signals, such as classification losses, are drawn more often where they
    fit.
    """
    kinds = [kind for kind in LOSSES.values() if kind.drawn and kind.variants(signal)]
    choosy = [kind for kind in kinds if not kind.variants(vector(1))]
    usual = [kind for kind in kinds if kind.name == USUAL_LOSS] * len(kinds)
    places = [
        (kind, list(kind.variants(signal))) for kind in kinds + usual + choosy * CHOOSY_WEIGHT
    ]
    ignoring = [(kind, [o for o in kind.variants(signal) if kind.maskable(o)]) for kind in kinds]
    places += [place for place in ignoring if place[1]] * MASKABLE_WEIGHT
    # the last variant has every option, such as label smoothing with class weights; `mostly_usual`
    # prefers the first
    places += [(kind, variants[::-1]) for kind, variants in ignoring if variants[1:]]
    return choices_of(
        (kind.name, _uniform_options(kind, signal, variants, uniform)) for kind, variants in places
    )


def _uniform_options(
    kind: LossDefinition, signal: Signal, variants: Sequence[Options], uniform: bool
) -> Sequence[Options]:
    return [o for o in variants if not uniform or kind.uniform(signal, o)]


@cache
def _inputs(excluded: frozenset[str] = frozenset()) -> Choices | None:
    """Return a strategy of the inputs that some trainable layer accepts.

    None where all of these are excluded.
    """
    found = _leading(Limits(trainable=True, excluded=excluded))
    return choices_of(found.items(), every_usual=True)


def _leading(limits: Limits) -> dict[str, list[Options]]:
    """Return the inputs that a layer within limits accepts, with their variants."""
    return {
        kind.name: [o for o in kind.variants if takes_signal(kind.signal(o), limits)]
        for kind in INPUTS.values()
        if kind.drawn
    }


@cache
def _hosts(focus: Focus, excluded: frozenset[str]) -> Mapping[str, Sequence[Options]]:
    """Return the inputs from which the layer or the loss of a focus can be reached.

    Empty where any will do.
    """
    if focus.loss is None:
        return hosts(focus)
    found = _leading(Limits(trainable=True, excluded=excluded, loss=focus.loss))
    floats = {
        name: [o for o in variants if INPUTS[name].signal(o).form in FLOATS]
        for name, variants in found.items()
    }
    return {name: variants for name, variants in floats.items() if variants}


@cache
def _excluded(assumes: frozenset[str]) -> frozenset[str]:
    """Return the excluded layer kinds.

    `InvalidArgument` where one does not exist, or none is left.
    """
    try:
        expect_layers_left(assumes)
    except UsageError as error:
        raise InvalidArgument(str(error)) from None
    return excluded_layers(assumes)


def _drawn(
    draw: st.DrawFn,
    choices: Choices | None,
    what: str,
    instead: Mapping[str, Sequence[Options]] | None = None,
) -> tuple[Any, Options]:
    """Draw a kind and its options.

    If `instead` is given, a kind that is not in it becomes its first. The kind is drawn in any
    case, so that later draws keep their places while a focus shrinks to none.
    """
    assert choices is not None, what
    kind, variants = draw(choices)
    if instead:
        kind = kind if kind in instead else next(iter(instead))
        variants = partial(mostly_usual, instead[kind], every_usual=True)
    return kind, draw(variants())


def _loss(draw: st.DrawFn, focus: Focus, signal: Signal, *, uniform: bool) -> tuple[str, Options]:
    """Draw a loss that accepts a signal: that of the focus, if possible."""
    wanted: dict[str, Sequence[Options]] = {}
    if focus.loss is not None:
        kind = LOSSES[focus.loss]
        fitting = [o for o in kind.variants(signal) if kind.maskable(o) or not focus.ignores]
        if variants := _uniform_options(kind, signal, fitting, uniform):
            wanted = {focus.loss: variants}
    return _drawn(draw, _losses(signal, uniform=uniform), f"no loss takes {signal}", wanted)


def _chain(
    draw: st.DrawFn,
    signal: Signal,
    counted: tuple[int, int],
    limits: Limits,
    focus: Focus,
    number: int,
) -> tuple[list[Layer], Frame]:
    """Draw layers, the last of them trainable, and put those around them that the focus asks for.

    Args:
        draw: draws from a strategy.
        signal: what the first layer accepts.
        counted: how many layers, and how many at most.
        limits: the limits of all layers.
        focus: what the problem must contain.
        number: picks the options of layers that are not drawn.

    Returns:
        The layers, and the frame that is part of them.
    """
    count, most = counted
    frame = frame_of(focus, signal, limits, number)
    if focus.layer is not None and not LAYERS[focus.layer].trainable:
        # it cannot be the last layer
        frame = Frame((picked_layer(focus, signal, limits, number),))
        focus = NO_FOCUS
    room = most - len(frame.first) - len(frame.last)
    if room < 1:
        frame = Frame()
        room = most
        focus = replace(focus, graph=None)
    layers = list(frame.first)
    signal = chain_signal(layers, signal)
    count = min(count, room)
    keeps_shape = focus.loss is not None or focus.graph is not None
    for i in range(count):
        last = i == count - 1
        # so that the loss of the focus stays within reach, or the layer after the chain fits
        here = replace(
            limits, trainable=last, keeps_shape=keeps_shape and (not last or focus.loss is None)
        )
        here = replace(here, loss=focus.loss) if last else here
        layers.append(draw(layer_strategy(signal, here, focus if i == 0 else NO_FOCUS)))
        signal = out_signal(layers[-1], signal)
    return [*layers, *frame.last], frame


@st.composite
def _problems(
    draw: st.DrawFn,
    min_layers: int,
    max_layers: int,
    sparse: bool,
    accumulable: bool,
    assumes: str | tuple[str, ...],
) -> ProblemSpec:
    check_range(min_layers, max_layers, "layers")
    chosen = valid_assumptions(assumes)
    limits = Limits(sparse=sparse and DENSE_GRADIENTS not in chosen, excluded=_excluded(chosen))
    focus = draw(FOCUS)
    number = draw(integers(0, 255))
    if (focus.sparse and not limits.sparse) or focus.layer in limits.excluded:
        focus = NO_FOCUS
    name, options = _drawn(
        draw, _inputs(limits.excluded), "no input", _hosts(focus, limits.excluded)
    )
    source = Input(name, **options)
    counted = draw(counts(min_layers, max_layers)), max_layers
    layers, frame = _chain(
        draw,
        input_signal(source),
        counted,
        limits,
        focus,
        number,
    )
    signal = chain_signal(layers, input_signal(source))
    reductions = sampled(reductions_within(chosen))
    if not accumulable and (signal.form != "vector" or draw(_BOOLEANS)):
        # after a layer, since the input may be tokens
        at = draw(integers(1, len(layers)))
        layers.insert(at, Layer("batch_norm_train"))
    elif not accumulable:
        kind = draw(sampled(tuple(CROSS_SAMPLE_LOSSES)))
        return ProblemSpec(source, tuple(layers), Loss(kind, reduction=draw(reductions)))
    loss, options = _loss(
        draw, focus, signal, uniform=bool(chosen & {EQUAL_MICRO_BATCHES, PLAIN_COUNTS})
    )
    ties = frame.ties(len(layers)) if accumulable else ()
    return ProblemSpec(
        source, tuple(layers), Loss(loss, **options, reduction=draw(reductions)), ties
    )


def problems(
    *,
    min_layers: int = 1,
    max_layers: int = 5,
    sparse: bool = True,
    accumulable: bool = True,
    assumes: Iterable[str] = (),
) -> st.SearchStrategy[ProblemSpec]:
    """Return a strategy of problems: an input, layers of which the last is trainable, a loss that
    accepts their output.

    Args:
        min_layers: smallest number of layers in the chain.
        max_layers: largest number of layers in the chain.
        sparse: whether embeddings may have sparse gradients, which some optimizers do not support.
        accumulable: whether the objective is a sum over items. If not, one layer is batch
            normalization in train mode, or the loss is not separable over samples; no loop can be
            right then.
        assumes: assumptions of the loop, names from `ASSUMPTIONS`.

    Raises:
        InvalidArgument: at the first draw, where an argument is wrong.
    """
    return _problems(
        min_layers,
        max_layers,
        sparse,
        accumulable,
        hashable(assumes),
    )


# The Hypothesis strategy for cases, and how large a case is.


SMALL_MICRO_BATCHES = 3
MOVING_STEPS = range(2, 7)
"""Numbers of steps of a case whose optimizer may be drawn: at one step nothing has moved, many are expensive."""
SOMETIMES_MOVING: st.SearchStrategy[str | None] = st.sampled_from((*[None] * 5, "normalized"))
"""The optimizer where no other is asked for. It moves parameters in some cases, so that gradients of earlier parameters
are found."""
GROUPS = (1, 1, 1, 1, 1, 2, 3)
"""Numbers of parameter groups, as often as they are drawn."""
DISTINCT = {14: 1, 15: 2}
"""Remainder of a case's seed by 16 -> number of its different items, so that equal items take no draw of their own."""
_PLACES: dict[str, int] = {}
for _kinds in (LAYERS, LOSSES, CROSS_SAMPLE_LAYERS, CROSS_SAMPLE_LOSSES):
    _PLACES |= {name: place for place, name in enumerate(_kinds)}


def _takes_sparse(dtype: str, optimizer: str | None) -> bool:
    """Return whether gradients may be sparse.

    `InvalidArgument` where there is no such optimizer.
    """
    try:
        # torch on the CPU cannot add sparse gradients in float16, nor in bfloat16 if their values
        # are not contiguous
        return dtype not in ("float16", "bfloat16") and (
            optimizer is None or checked_optimizer(optimizer) in TAKES_SPARSE
        )
    except UsageError as error:
        raise InvalidArgument(str(error)) from None


def _has_sparse_gradients(layers: Sequence[Layer]) -> bool:
    return any(layer.o.get("sparse") or _has_sparse_gradients(layer.layers) for layer in layers)


def _adds_up(plan: Plan) -> bool:
    """Return whether some rank has two micro-batches in a window, whose gradients are added up."""
    owners = plan.owners
    return any(len(window) > len({owners[j] for j in window}) for window in plan.windows)


@cache
def _plans_that_add_up(
    assumes: str | tuple[str, ...], maskable: bool, ranks: int
) -> st.SearchStrategy[Plan]:
    drawn = plans(
        assumes=assumes,
        maskable=maskable,
        ranks=ranks,
        min_accumulation_steps=2,
    )
    return drawn.filter(_adds_up)


@cache
def _plans_of_size(
    assumes: str | tuple[str, ...], maskable: bool, small: bool, ranks: int
) -> st.SearchStrategy[Plan]:
    if not small:
        return plans(assumes=assumes, maskable=maskable, ranks=ranks)
    few = plans(
        max_windows=2,
        max_accumulation_steps=SMALL_MICRO_BATCHES,
        assumes=assumes,
        maskable=maskable,
        ranks=ranks,
    )
    return few.filter(lambda plan: len(plan.micro_batches) <= SMALL_MICRO_BATCHES * plan.world_size)


@cache
def _problems_of_cases(
    assumes: str | tuple[str, ...], dtype: str, optimizer: str | None, small: bool
) -> st.SearchStrategy[ProblemSpec]:
    return problems(
        sparse=_takes_sparse(dtype, optimizer), assumes=assumes, max_layers=1 if small else 5
    )


def _check(problem: object, plan: object, dtype: str, device: str) -> None:
    """Raise `InvalidArgument` where an argument of `cases` is wrong."""
    if dtype not in DTYPES:
        raise InvalidArgument(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    if device not in DEVICES:
        raise InvalidArgument(f"device must be one of {', '.join(DEVICES)}; got {device!r}")
    if not isinstance(problem, st.SearchStrategy | str | None):
        raise InvalidArgument(
            f"problem must be a strategy or the name of a user's problem, got {problem!r}"
        )
    if not isinstance(plan, st.SearchStrategy | None):
        raise InvalidArgument(f"plan must be a strategy, such as just(Plan(...)), got {plan!r}")


@st.composite
def _cases(
    draw: st.DrawFn,
    problem: st.SearchStrategy[ProblemSpec] | str | None,
    plan: st.SearchStrategy[Plan] | None,
    assumes: str | tuple[str, ...],
    small: bool,
    ranks: int,
    optimizer: st.SearchStrategy[str | None] | None,
    fixed: Mapping[str, Any],
) -> Case:
    _check(problem, plan, fixed["dtype"], fixed["device"])
    valid_assumptions(assumes)
    if problem is None:
        problem = _problems_of_cases(assumes, fixed["dtype"], fixed["optimizer"], small)
    else:
        _takes_sparse(fixed["dtype"], fixed["optimizer"])
    if isinstance(problem, str):
        draw(FOCUS)  # of no use here, but the first draw of every case is its focus
    drawn = problem if isinstance(problem, str) else draw(problem)
    if plan is None:
        maskable = not isinstance(drawn, str) and loss_definition(drawn.loss).maskable(drawn.loss.o)
        adds_up = not small and not isinstance(drawn, str) and _has_sparse_gradients(drawn.layers)
        plan = (
            _plans_that_add_up(assumes, maskable, ranks)
            if adds_up
            else _plans_of_size(assumes, maskable, small, ranks)
        )
    seed = draw(integers(0, MAX_SEED))
    case = Case(
        drawn,
        draw(plan),
        seed=seed,
        **fixed,
        groups=draw(sampled(GROUPS)),
    )
    if not case.plan.masked:
        case = case.replace(distinct_items=DISTINCT.get(seed % 16, 0))
    if optimizer is not None and case.plan.steps in MOVING_STEPS:
        return case.replace(optimizer=draw(optimizer))
    return case


def cases(
    *,
    problem: st.SearchStrategy[ProblemSpec] | str | None = None,
    plan: st.SearchStrategy[Plan] | None = None,
    dtype: str = "float64",
    device: str = "cpu",
    optimizer: str | st.SearchStrategy[str | None] | None = None,
    assumes: Iterable[str] = (),
    small: bool = False,
    ranks: int = 1,
) -> st.SearchStrategy[Case]:
    """Return a strategy of cases.

    Args:
        problem: a strategy of problems, or the `FILE.py:NAME` of a user's problem; `problems()` if
            None.
        plan: a strategy of plans; `plans()` if None.
        dtype: dtype of every case, one of `DTYPES`.
        device: device of every case, `"cpu"` or `"cuda"`.
        optimizer: optimizer of every case; None for one whose step changes nothing. It may be a
            strategy of optimizers that take sparse gradients, such as `SOMETIMES_MOVING`.
        assumes: assumptions of the loop, names from `ASSUMPTIONS`.
        small: whether to draw only one layer and at most `SMALL_MICRO_BATCHES` micro-batches
            in each rank.
        ranks: largest number of ranks of the plans that are drawn.

    Raises:
        InvalidArgument: at the first draw, where an argument is wrong.
    """
    drawn, same = (
        (optimizer, None) if isinstance(optimizer, st.SearchStrategy) else (None, optimizer)
    )
    fixed = {"dtype": dtype, "device": device, "optimizer": same}
    return _cases(
        problem,
        plan,
        hashable(assumes),
        small,
        ranks,
        drawn,
        fixed,
    )


def size_of(case: Case) -> tuple[int, ...]:
    """Return the size of a case, for comparison with another.

    It is the number of layers, micro-batches, epochs, K, items and features, then the places of the
    kinds in the catalogue, where plain ones come first, then parameter groups, repeated items and
    the length of the options.
    """
    plan = case.plan
    shape: tuple[int, ...] = (0, 0, 0)
    if (spec := case.spec) is not None:
        features = sum(input_signal(spec.input).size) + sum(output_signal(spec).size)
        shape = (
            len(spec.layer_kinds),
            features,
            sum(map(_PLACES.__getitem__, [*spec.layer_kinds, spec.loss.kind])),
        )
    layers, features, kinds = shape
    split = len(plan.micro_batches), plan.epochs, plan.accumulation_steps, plan.total_items
    return (
        layers,
        *split,
        features,
        kinds,
        case.groups,
        case.distinct_items,
        len(repr(case.problem)),
    )
