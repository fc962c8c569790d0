"""The tables of inputs, layers and losses, and the torch model that a spec describes.

To add a kind, add its record to the `KINDS` of a file; to add a file, add it to the tables below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial, reduce
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.catalogue import definitions, losses, positions, rows
from gradcheck_suite.catalogue.definitions import (
    Arguments,
    Arrays,
    InputDefinition,
    LayerDefinition,
    LossDefinition,
    Options,
    Signal,
    Tensors,
    expect_form,
    feature_axis,
    no_extras,
)
from gradcheck_suite.core.case import REDUCTIONS, Input, Layer, Loss, ProblemSpec, Tie
from gradcheck_suite.errors import UsageError

_KindT = TypeVar("_KindT")

# The strategies draw kinds by their place in these tables, so their order belongs to what a seed
# means.
INPUTS: Mapping[str, InputDefinition] = {kind.name: kind for kind in definitions.KINDS}
_LAYERS = {kind.name: kind for kind in (*rows.KINDS, *positions.KINDS)}
LAYERS: Mapping[str, LayerDefinition] = {
    name: kind for name, kind in _LAYERS.items() if kind.separable
}
CROSS_SAMPLE_LAYERS: Mapping[str, LayerDefinition] = {
    name: k for name, k in _LAYERS.items() if not k.separable
}
_LOSSES = {kind.name: kind for kind in losses.KINDS}
LOSSES: Mapping[str, LossDefinition] = {
    name: kind for name, kind in _LOSSES.items() if kind.separable
}
CROSS_SAMPLE_LOSSES: Mapping[str, LossDefinition] = {
    name: k for name, k in _LOSSES.items() if not k.separable
}
"""Kinds that are not separable over samples, so that no accumulation is right; drawn only where asked for."""


def _look_up(table: Mapping[str, _KindT], what: str, name: str) -> _KindT:
    try:
        return table[name]
    except KeyError:
        raise UsageError(
            f"{what} kind must be one of {', '.join(sorted(table))}; got {name!r}"
        ) from None


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
    """Raise `UsageError` where options differ in name or type from the kind's variants, if it has
    any for its input.
    """
    fitting = [v for v in variants if v.keys() == options.keys()]
    if not fitting:
        if names := [sorted(v) for v in variants]:
            raise UsageError(f"{what}: expected options {names[0]}, got {sorted(options)}")
        return
    for name, value in options.items():
        # no isinstance, which takes True for an int
        types = {type(v[name]) for v in fitting}
        if type(value) not in types and not (type(value) is int and float in types):
            expected = " or ".join(sorted(t.__name__ for t in types))
            raise UsageError(f"{what}: expected option {name!r} of type {expected}, got {value!r}")


@cache
def out_signal(layer: Layer, signal: Signal) -> Signal:
    """Return the output signal of a layer.

    Raises `UsageError` where its options or its input do not fit.
    """
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
            raise UsageError(
                f"layer {layer.kind!r}: inner layers must keep the shape {signal.size}, got"
                f" {inner.size}"
            )
    _check_options(f"layer {layer.kind!r}", layer.o, kind.variants(signal))
    try:
        expect_form(signal, *kind.variants.forms)
        out = kind.out(signal, layer.o)
    except UsageError as error:
        raise UsageError(f"layer {layer.kind!r}: {error}") from None
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"layer {layer.kind!r}: missing or ill-typed option {error} in {dict(layer.o)}"
        ) from None
    return out


def _joined_signal(layer: Layer, signal: Signal) -> Signal:
    """Return the output signal of branches that join."""
    outs = [out_signal(branch, signal) for branch in layer.layers]
    joined = (
        outs[0].with_features(sum(out.features for out in outs))
        if layer.kind == "concat"
        else outs[0]
    )
    for out in outs[1:]:
        alike = outs[0].with_features(out.features) if layer.kind == "concat" else outs[0]
        if out != alike:
            raise UsageError(
                f"layer {layer.kind!r}: branches must have outputs that join, got {outs[0]} and"
                f" {out}"
            )
    return joined


def with_signals(
    layers: Iterable[Layer], signal: Signal, *, parallel: bool = False
) -> Iterator[tuple[Layer, Signal]]:
    """Yield layers with their input signals: of a chain, or of branches that all receive the first
    one's.
    """
    for layer in layers:
        yield layer, signal
        if not parallel:
            signal = out_signal(layer, signal)


def walk(
    layers: Iterable[Layer], signal: Signal, path: str = "", *, parallel: bool = False
) -> Iterator[tuple[str, Layer, Signal]]:
    """Yield each layer with its name in the model and its input signal, those inside of a layer
    after it.
    """
    for i, (layer, given) in enumerate(with_signals(layers, signal, parallel=parallel)):
        yield f"{path}{i}", layer, given
        yield from walk(
            layer.layers, given, f"{path}{i}.", parallel=layer_definition(layer).parallel
        )


def chain_signal(layers: Iterable[Layer], signal: Signal) -> Signal:
    """Return the output signal of a chain of layers."""
    for layer in layers:
        signal = out_signal(layer, signal)
    return signal


def input_signal(spec: Input) -> Signal:
    """Return the signal that the first layer receives."""
    kind = input_definition(spec)
    if spec.o.keys() not in [variant.keys() for variant in kind.variants]:
        raise UsageError(
            f"input {spec.kind!r}: expected options {sorted(kind.variants[0])}, got"
            f" {sorted(spec.o)}"
        )
    return kind.signal(spec.o)


def output_signal(problem: ProblemSpec) -> Signal:
    """Return the signal that the loss receives."""
    return chain_signal(problem.layers, input_signal(problem.input))


def checked_loss(problem: ProblemSpec) -> LossDefinition:
    """Return the kind of a problem's loss.

    `UsageError` where it does not take the output or its options do not fit.
    """
    kind = loss_definition(problem.loss)
    signal = output_signal(problem)
    options = dict(problem.loss.o)
    reduction = options.pop("reduction", "mean")
    if reduction not in REDUCTIONS:
        raise UsageError(
            f"loss {kind.name!r}: reduction must be one of {', '.join(REDUCTIONS)}; got"
            f" {reduction!r}"
        )
    variants = kind.variants(signal)
    if not variants:
        raise UsageError(
            f"loss {kind.name!r} does not take {signal}: choose another loss or another last layer"
        )
    _check_options(f"loss {kind.name!r}", options, variants)
    return kind


def is_accumulable(problem: ProblemSpec) -> bool:
    """Return whether all layers and the loss of a problem are separable over samples."""
    return problem.loss.kind not in CROSS_SAMPLE_LOSSES and CROSS_SAMPLE_LAYERS.keys().isdisjoint(
        problem.layer_kinds
    )


# From a spec to a torch model and the numbers it works on, drawn by numpy so that both frameworks
# share them.


_PARAMETER_STREAM = 0
_DATA_STREAM = 1


class Chain(torch.nn.Sequential):
    """Layers in a row; each is handed, beside its input, what it asked for of the batch."""

    parallel = False

    def __init__(self, layers: Iterable[Layer], signal: Signal, path: str = "") -> None:
        super().__init__()
        self._keys: list[dict[str, str]] = []
        for i, (layer, given) in enumerate(with_signals(layers, signal, parallel=self.parallel)):
            kind = layer_definition(layer)
            name = f"{path}{i}"
            if kind.wraps is not None:
                self.append(COMPOSITES[kind.wraps](layer.layers, given, f"{name}."))
                self._keys.append({"batch": ""})
            else:
                assert kind.torch_module is not None
                self.append(kind.torch_module(given, layer.o))
                self._keys.append(extra_keys(layer, given, name))

    def forward(self, x: torch.Tensor, batch: Tensors) -> torch.Tensor:  # type: ignore[override]
        for call in self._calls(batch):
            x = call(x)
        return x

    def _calls(self, batch: Tensors) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        for module, keys in zip(self, self._keys, strict=True):
            given = {name: batch[key] if key else batch for name, key in keys.items()}
            yield partial(module, **given) if given else module


class Residual(Chain):
    """x + layers(x)."""

    def forward(self, x: torch.Tensor, batch: Tensors) -> torch.Tensor:  # type: ignore[override]
        return x + super().forward(x, batch)


class Shared(Chain):
    """layers(layers(x)): every weight is used twice."""

    def forward(self, x: torch.Tensor, batch: Tensors) -> torch.Tensor:  # type: ignore[override]
        return super().forward(super().forward(x, batch), batch)


class Sum(Chain):
    """The sum of the layers' outputs for the same input."""

    parallel = True

    def forward(self, x: torch.Tensor, batch: Tensors) -> torch.Tensor:  # type: ignore[override]
        return reduce(torch.add, [call(x) for call in self._calls(batch)])


class Concat(Chain):
    """The layers' outputs for the same input, one after the other along the features."""

    parallel = True

    def __init__(self, layers: Iterable[Layer], signal: Signal, path: str = "") -> None:
        super().__init__(layers, signal, path)
        self._axis = feature_axis(signal)

    def forward(self, x: torch.Tensor, batch: Tensors) -> torch.Tensor:  # type: ignore[override]
        return torch.cat([call(x) for call in self._calls(batch)], self._axis)


COMPOSITES: dict[str, type[Chain]] = {
    "residual": Residual,
    "shared": Shared,
    "sum": Sum,
    "concat": Concat,
}


class GeneratedModel(Chain):
    """The model of a `ProblemSpec`: takes a batch, or its `x` if it needs nothing else.

    Returns what the loss takes.
    """

    def __init__(self, problem: ProblemSpec) -> None:
        super().__init__(problem.layers, input_signal(problem.input))
        for name, original in problem.ties:
            _tie(self, name, original)

    def forward(self, batch: Tensors | torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if isinstance(batch, torch.Tensor):
            return super().forward(batch, {})
        return super().forward(batch["x"], batch)


def _tie(model: torch.nn.Module, name: str, original: str) -> None:
    """Put a module or a parameter under a second name."""
    parent, _, last = name.rpartition(".")
    try:
        found, replaced = (_member(model, place) for place in (original, name))
    except AttributeError as error:
        raise UsageError(
            f"ties: the model has no module or parameter of that name: {error}"
        ) from None
    shapes = [
        {key: p.shape for key, p in _named_parameters_of(member)} for member in (found, replaced)
    ]
    if type(found) is not type(replaced) or shapes[0] != shapes[1]:
        raise UsageError(
            f"ties: expected two modules or two parameters of one shape, got {name!r} and"
            f" {original!r}"
        )
    setattr(model.get_submodule(parent), last, found)


def _member(model: torch.nn.Module, name: str) -> torch.nn.Module | torch.nn.Parameter:
    parent, _, last = name.rpartition(".")
    module = model.get_submodule(parent)
    return module.get_parameter(last) if last in module._parameters else module.get_submodule(last)


def _named_parameters_of(
    member: torch.nn.Module | torch.nn.Parameter,
) -> Iterable[tuple[str, torch.Tensor]]:
    return [("", member)] if isinstance(member, torch.nn.Parameter) else member.named_parameters()


def value_names(path: str, names: Iterable[str], ties: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the model's name of each parameter and buffer of a layer, by its name within the
    layer.

    Args:
        path: of the layer in the model, such as `"1.0"`.
        names: of the model's parameters and buffers, each only once.
        ties: of the problem: pairs of a second name and the first one.
    """
    prefix = f"{path}."
    for name, original in ties:
        if prefix.startswith(f"{name}."):
            prefix = original + prefix.removeprefix(name)
    own = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    return own | {
        n.removeprefix(f"{path}."): first for n, first in ties if n.startswith(f"{path}.")
    }


def needs_batch(problem: ProblemSpec) -> bool:
    """Return whether the model takes the whole batch, since a layer asks for more of it than `x`."""
    walked = walk(problem.layers, input_signal(problem.input))
    return any(extra_keys(layer, given, "") for _, layer, given in walked if not layer.layers)


@lru_cache(maxsize=1024)
def _extra_names(layer: Layer, signal: Signal) -> tuple[str, ...]:
    """Return the names of what a layer draws beside its input."""
    kind = layer_definition(layer)
    return (
        ()
        if kind.extras is no_extras
        else tuple(kind.extras(signal, layer.o, np.random.default_rng(0), 1))
    )


def extra_keys(layer: Layer, signal: Signal, path: str) -> dict[str, str]:
    """Return, for each keyword the layer takes beside its input, the batch's key that holds it."""
    kind = layer_definition(layer)
    keys = {name: f"{path}.{name}" for name in _extra_names(layer, signal)}
    if kind.uses_mask and signal.padded:
        keys["mask"] = "mask"
    return keys


def draw_data(problem: ProblemSpec, seed: int, masked: npt.NDArray[np.bool_]) -> Arrays:
    """Draw a problem's items in float64.

    Args:
        problem: what to draw for.
        seed: of the draw.
        masked: (items,), True for the items whose targets are all ignored.

    Returns:
        Arrays by name with leading dimension items.
    """
    rng = np.random.default_rng((seed, _DATA_STREAM))
    items = len(masked)
    arrays = dict(input_definition(problem.input).draw(problem.input.o, rng, items))
    for name, layer, given in walk(problem.layers, input_signal(problem.input)):
        if not layer.layers:
            drawn = layer_definition(layer).extras(given, layer.o, rng, items)
            arrays |= {f"{name}.{key}": array for key, array in drawn.items()}
    out = output_signal(problem)
    ignored = masked
    if out.form == "sequence":
        ignored = np.broadcast_to(masked[:, None], (items, out.size[0]))
        if out.padded:
            ignored = ignored | ~arrays["mask"]
    return arrays | loss_definition(problem.loss).targets(out, problem.loss.o, rng, ignored)


def _value(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Draw a parameter or buffer so that signals keep a size of about 1 and no symmetry hides an
    error.
    """
    last = name.rpartition(".")[2]
    if last == "running_var":
        return rng.uniform(0.5, 1.5, shape)
    values = rng.standard_normal(shape)
    if len(shape) >= 2:
        return values / np.sqrt(np.prod(shape[1:]))
    # never negative: the losses of the probe are these, and the sign of one in a thousand would
    # look like a counter
    return np.abs(1 + 0.3 * values) if last == "weight" else 0.5 * values


def fill_parameters(model: torch.nn.Module, seed: int) -> None:
    """Fill a generated model's parameters and floating buffers in place."""
    rng = np.random.default_rng((seed, _PARAMETER_STREAM))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.as_tensor(_value(rng, name, tuple(tensor.shape))))


def build_model(problem: ProblemSpec, seed: int, dtype: torch.dtype) -> GeneratedModel:
    """Build a problem's model in train mode with drawn values, leaving torch's random state
    untouched.
    """
    with torch.random.fork_rng(devices=[]):
        model = GeneratedModel(problem)
    fill_parameters(model, seed)
    return model.to(dtype)


# From a spec to a function of JAX: the layers' mathematics, composed.


class _ModelInputs(NamedTuple):
    values: Arguments
    batch: Arguments
    ties: Sequence[Tie]


def _apply(
    layers: Iterable[Layer],
    signal: Signal,
    given: _ModelInputs,
    x: jax.Array,
    path: str = "",
    start: int = 0,
) -> jax.Array:
    for i, layer in enumerate(layers, start):
        kind = layer_definition(layer)
        name = f"{path}{i}"
        if kind.parallel:
            outs = [
                _apply([b], signal, given, x, f"{name}.", j) for j, b in enumerate(layer.layers)
            ]
            x = (
                sum(outs[1:], outs[0])
                if kind.wraps == "sum"
                else jnp.concatenate(outs, feature_axis(signal))
            )
        elif kind.wraps == "residual":
            x = x + _apply(layer.layers, signal, given, x, f"{name}.")
        elif kind.wraps == "shared":
            for _ in range(2):
                x = _apply(
                    layer.layers,
                    signal,
                    given,
                    x,
                    f"{name}.",
                )
        else:
            assert kind.jax_apply is not None
            names = value_names(name, given.values, given.ties)
            extras = {k: given.batch[key] for k, key in extra_keys(layer, signal, name).items()}
            x = kind.jax_apply(
                layer.o, {own: given.values[n] for own, n in names.items()}, x, extras
            )
        signal = out_signal(layer, signal)
    return x


def jax_output(problem: ProblemSpec, values: Arguments, batch: Arguments) -> jax.Array:
    """Return what a problem's model returns for a batch, given its parameters and floating buffers
    by name.
    """
    return _apply(
        problem.layers,
        input_signal(problem.input),
        _ModelInputs(values, batch, problem.ties),
        batch["x"],
    )


def objective(loss: Loss, out: Any, batch: Any, weight: Any) -> Any:
    """Return (sum of the item losses) / (sum of the counts) for a mean, the sum of the item losses
    for a sum.

    Args:
        loss: the loss and its reduction.
        out: output of the model, (n, *size).
        batch: the arrays that the loss reads.
        weight: (n,), 1.0 for an item and 0.0 for padding.
    """
    kind = loss_definition(loss)
    total = jnp.sum(weight * kind.jax_items(loss.o, out, batch))
    if loss.reduction == "sum":
        return total
    return total / jnp.sum(weight * kind.jax_counts(loss.o, batch))
