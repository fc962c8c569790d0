"""The catalogue: the inputs, layers and losses of generated problems, each implemented in torch and in JAX.

Must not run or judge a loop. To add a kind, add its record to a family's `KINDS`; to add a family, add its module to
the tables below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Protocol, TypeVar

from gradcheck_suite.catalogue import (
    activations,
    attention,
    composites,
    convolution,
    cross_sample,
    dropout,
    embedding_bag,
    embeddings,
    feature_activations,
    frozen_linear,
    inputs,
    linear,
    normalization,
    pooling,
    recurrent,
    reshaping,
    routing,
    scaling,
    second_input,
    sequence_pooling,
    tied_weights,
    transformer,
    weight_norm,
    weight_probe,
)
from gradcheck_suite.catalogue.definitions import InputDefinition, LayerDefinition, LossDefinition
from gradcheck_suite.catalogue.losses import binary, classification, combined, margin, probabilistic, regression
from gradcheck_suite.catalogue.signals import Options, Signal
from gradcheck_suite.errors import UsageError
from gradcheck_suite.schema.spec import REDUCTIONS, Input, Layer, Loss, ProblemSpec


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_KindT = TypeVar("_KindT", bound=_Named)


def _table(*families: Iterable[_KindT]) -> Mapping[str, _KindT]:
    return {kind.name: kind for family in families for kind in family}


INPUTS: Mapping[str, InputDefinition] = _table(inputs.KINDS)
LAYERS: Mapping[str, LayerDefinition] = _table(
    linear.KINDS,
    embeddings.KINDS,
    activations.KINDS,
    feature_activations.KINDS,
    attention.KINDS,
    transformer.KINDS,
    recurrent.KINDS,
    tied_weights.KINDS,
    frozen_linear.KINDS,
    routing.KINDS,
    convolution.KINDS,
    pooling.KINDS,
    sequence_pooling.KINDS,
    normalization.KINDS,
    reshaping.KINDS,
    dropout.KINDS,
    weight_norm.KINDS,
    embedding_bag.KINDS,
    scaling.KINDS,
    second_input.KINDS,
    composites.KINDS,
    weight_probe.LAYERS,
)
LOSSES: Mapping[str, LossDefinition] = _table(
    regression.KINDS,
    classification.KINDS,
    binary.KINDS,
    probabilistic.KINDS,
    margin.KINDS,
    combined.KINDS,
    weight_probe.LOSSES,
)


CROSS_SAMPLE_LAYERS: Mapping[str, LayerDefinition] = _table(cross_sample.LAYERS)
CROSS_SAMPLE_LOSSES: Mapping[str, LossDefinition] = _table(cross_sample.LOSSES)
"""Kinds that are not separable over samples, so that no accumulation is right; drawn only where asked for."""


def _look_up(table: Mapping[str, _KindT], what: str, name: str) -> _KindT:
    try:
        return table[name]
    except KeyError:
        raise UsageError(f"{what} kind must be one of {', '.join(sorted(table))}; got {name!r}") from None


def input_definition(spec: Input) -> InputDefinition:
    """Return the kind of an input; raises `UsageError` for an unknown name."""
    return _look_up(INPUTS, "input", spec.kind)


def layer_definition(spec: Layer) -> LayerDefinition:
    """Return the kind of a layer; raises `UsageError` for an unknown name."""
    return CROSS_SAMPLE_LAYERS.get(spec.kind) or _look_up(LAYERS, "layer", spec.kind)


def loss_definition(spec: Loss) -> LossDefinition:
    """Return the kind of a loss; raises `UsageError` for an unknown name."""
    return CROSS_SAMPLE_LOSSES.get(spec.kind) or _look_up(LOSSES, "loss", spec.kind)


def _check_options(what: str, options: Options, variants: Sequence[Options]) -> None:
    """Raise `UsageError` where options differ in name or type from the kind's variants, if it has any for its input."""
    fitting = [v for v in variants if v.keys() == options.keys()]
    if not fitting:
        if names := [sorted(v) for v in variants]:
            raise UsageError(f"{what}: expected options {names[0]}, got {sorted(options)}")
        return
    for name, value in options.items():
        types = {type(v[name]) for v in fitting}
        if type(value) not in types and not (type(value) is int and float in types):
            expected = " or ".join(sorted(t.__name__ for t in types))
            raise UsageError(f"{what}: expected option {name!r} of type {expected}, got {value!r}")


@cache
def out_signal(layer: Layer, signal: Signal) -> Signal:
    """Return the output signal of a layer; raises `UsageError` where its options or its input do not fit."""
    kind = layer_definition(layer)
    if kind.wraps is None and layer.layers:
        raise UsageError(f"layer {layer.kind!r}: expected no inner layers, got {len(layer.layers)}")
    if kind.wraps is not None:
        if not layer.layers:
            raise UsageError(f"layer {layer.kind!r}: expected at least one inner layer, got none")
        if kind.parallel:
            return _joined_signal(layer, signal)
        inner = chain_signal(layer.layers, signal)
        if inner != signal:
            raise UsageError(f"layer {layer.kind!r}: inner layers must keep the shape {signal.size}, got {inner.size}")
    _check_options(f"layer {layer.kind!r}", layer.o, kind.variants(signal))
    try:
        out = kind.out(signal, layer.o)
    except (KeyError, TypeError) as error:
        raise UsageError(f"layer {layer.kind!r}: missing or ill-typed option {error} in {dict(layer.o)}") from None
    if out.form == "tokens":
        raise UsageError(f"layer {layer.kind!r}: expected floating values, got {signal}: embed tokens first")
    return out


def _joined_signal(layer: Layer, signal: Signal) -> Signal:
    """Return the output signal of branches that join."""
    outs = [out_signal(branch, signal) for branch in layer.layers]
    joined = outs[0].with_features(sum(out.features for out in outs)) if layer.kind == "concat" else outs[0]
    for out in outs[1:]:
        alike = outs[0].with_features(out.features) if layer.kind == "concat" else outs[0]
        if out != alike:
            raise UsageError(f"layer {layer.kind!r}: branches must have outputs that join, got {outs[0]} and {out}")
    return joined


def with_signals(layers: Iterable[Layer], signal: Signal, *, parallel: bool = False) -> Iterator[tuple[Layer, Signal]]:
    """Yield layers with their input signals: of a chain, or of branches that all receive the first one's."""
    for layer in layers:
        yield layer, signal
        if not parallel:
            signal = out_signal(layer, signal)


def chain_signal(layers: Iterable[Layer], signal: Signal) -> Signal:
    """Return the output signal of a chain of layers."""
    for layer in layers:
        signal = out_signal(layer, signal)
    return signal


def input_signal(spec: Input) -> Signal:
    """Return the signal that the first layer receives."""
    kind = input_definition(spec)
    if spec.o.keys() not in [variant.keys() for variant in kind.variants]:
        raise UsageError(f"input {spec.kind!r}: expected options {sorted(kind.variants[0])}, got {sorted(spec.o)}")
    return kind.signal(spec.o)


def output_signal(problem: ProblemSpec) -> Signal:
    """Return the signal that the loss receives."""
    return chain_signal(problem.layers, input_signal(problem.input))


def checked_loss(problem: ProblemSpec) -> LossDefinition:
    """Return the kind of a problem's loss; `UsageError` where it does not take the output or its options do not fit."""
    kind, signal, options = loss_definition(problem.loss), output_signal(problem), dict(problem.loss.o)
    reduction = options.pop("reduction", "mean")
    if reduction not in REDUCTIONS:
        raise UsageError(f"loss {kind.name!r}: reduction must be one of {', '.join(REDUCTIONS)}; got {reduction!r}")
    variants = kind.variants(signal)
    if not variants:
        raise UsageError(f"loss {kind.name!r} does not take {signal}: choose another loss or another last layer")
    _check_options(f"loss {kind.name!r}", options, variants)
    return kind


def is_accumulable(problem: ProblemSpec) -> bool:
    """Return whether all layers and the loss of a problem are separable over samples."""
    return problem.loss.kind not in CROSS_SAMPLE_LOSSES and CROSS_SAMPLE_LAYERS.keys().isdisjoint(problem.layer_kinds)
