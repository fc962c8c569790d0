"""From a spec to a torch model and the numbers it works on, drawn by numpy so that both frameworks share them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial, reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.catalogue import (
    input_definition,
    input_signal,
    layer_definition,
    loss_definition,
    output_signal,
    with_signals,
)
from gradcheck_suite.catalogue.definitions import Arrays, Tensors, no_extras
from gradcheck_suite.catalogue.signals import Signal, feature_axis
from gradcheck_suite.errors import UsageError
from gradcheck_suite.schema.spec import Layer, ProblemSpec

_PARAMETER_STREAM, _DATA_STREAM = 0, 1


class Chain(torch.nn.Sequential):
    """Layers in a row; each is handed, beside its input, what it asked for of the batch."""

    parallel = False

    def __init__(self, layers: Iterable[Layer], signal: Signal, path: str = "") -> None:
        super().__init__()
        self._keys: list[dict[str, str]] = []
        for i, (layer, given) in enumerate(with_signals(layers, signal, parallel=self.parallel)):
            kind, name = layer_definition(layer), f"{path}{i}"
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


COMPOSITES: dict[str, type[Chain]] = {"residual": Residual, "shared": Shared, "sum": Sum, "concat": Concat}


class GeneratedModel(Chain):
    """The model of a `ProblemSpec`: takes a batch, or its `x` if it needs nothing else; returns what the loss takes."""

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
        raise UsageError(f"ties: the model has no module or parameter of that name: {error}") from None
    shapes = [{key: p.shape for key, p in _named(member)} for member in (found, replaced)]
    if type(found) is not type(replaced) or shapes[0] != shapes[1]:
        raise UsageError(f"ties: expected two modules or two parameters of one shape, got {name!r} and {original!r}")
    setattr(model.get_submodule(parent), last, found)


def _member(model: torch.nn.Module, name: str) -> torch.nn.Module | torch.nn.Parameter:
    parent, _, last = name.rpartition(".")
    module = model.get_submodule(parent)
    return module.get_parameter(last) if last in module._parameters else module.get_submodule(last)


def _named(member: torch.nn.Module | torch.nn.Parameter) -> Iterable[tuple[str, torch.Tensor]]:
    return [("", member)] if isinstance(member, torch.nn.Parameter) else member.named_parameters()


def value_names(path: str, names: Iterable[str], ties: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the model's name of each parameter and buffer of a layer, by its name within the layer.

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
    return own | {n.removeprefix(f"{path}."): first for n, first in ties if n.startswith(f"{path}.")}


def needs_batch(problem: ProblemSpec) -> bool:
    """Return whether the model takes the whole batch, since a layer asks for more of it than `x`."""
    return _asks_for_more(problem.layers, input_signal(problem.input))


def _asks_for_more(layers: Iterable[Layer], signal: Signal, *, parallel: bool = False) -> bool:
    for layer, given in with_signals(layers, signal, parallel=parallel):
        kind = layer_definition(layer)
        inside = _asks_for_more(layer.layers, given, parallel=kind.parallel)
        if inside or (not kind.wraps and extra_keys(layer, given, "")):
            return True
    return False


@lru_cache(maxsize=1024)
def _extra_names(layer: Layer, signal: Signal) -> tuple[str, ...]:
    """Return the names of what a layer draws beside its input."""
    kind = layer_definition(layer)
    return () if kind.extras is no_extras else tuple(kind.extras(signal, layer.o, np.random.default_rng(0), 1))


def extra_keys(layer: Layer, signal: Signal, path: str) -> dict[str, str]:
    """Return, for each keyword the layer takes beside its input, the batch's key that holds it."""
    kind = layer_definition(layer)
    keys = {name: f"{path}.{name}" for name in _extra_names(layer, signal)}
    if kind.uses_mask and signal.padded:
        keys["mask"] = "mask"
    return keys


def _extras(
    layers: Iterable[Layer],
    signal: Signal,
    rng: np.random.Generator,
    items: int,
    path: str = "",
    *,
    parallel: bool = False,
) -> Iterator[Arrays]:
    for i, (layer, given) in enumerate(with_signals(layers, signal, parallel=parallel)):
        kind = layer_definition(layer)
        if kind.wraps is not None:
            yield from _extras(layer.layers, given, rng, items, f"{path}{i}.", parallel=kind.parallel)
        else:
            yield {f"{path}{i}.{name}": a for name, a in kind.extras(given, layer.o, rng, items).items()}


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
    for extras in _extras(problem.layers, input_signal(problem.input), rng, items):
        arrays |= extras
    out = output_signal(problem)
    ignored = masked
    if out.form == "sequence":
        ignored = np.broadcast_to(masked[:, None], (items, out.size[0]))
        if out.padded:
            ignored = ignored | ~arrays["mask"]
    return arrays | loss_definition(problem.loss).targets(out, problem.loss.o, rng, ignored)


def _value(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Draw a parameter or buffer so that signals keep a size of about 1 and no symmetry hides an error."""
    last = name.rpartition(".")[2]
    if last == "running_var":
        return rng.uniform(0.5, 1.5, shape)
    values = rng.standard_normal(shape)
    if len(shape) >= 2:
        return values / np.sqrt(np.prod(shape[1:]))
    return 1 + 0.3 * values if last == "weight" else 0.5 * values


def fill(model: torch.nn.Module, seed: int) -> None:
    """Fill a generated model's parameters and floating buffers in place."""
    rng = np.random.default_rng((seed, _PARAMETER_STREAM))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.as_tensor(_value(rng, name, tuple(tensor.shape))))


def build_model(problem: ProblemSpec, seed: int, dtype: torch.dtype) -> GeneratedModel:
    """Build a problem's model in train mode with drawn values, leaving torch's random state untouched."""
    with torch.random.fork_rng(devices=[]):
        model = GeneratedModel(problem)
    fill(model, seed)
    return model.to(dtype)
