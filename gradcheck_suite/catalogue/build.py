"""From a spec to a torch model and the numbers it works on, drawn by numpy so that both frameworks share them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.catalogue import (
    input_definition,
    input_signal,
    layer_definition,
    loss_definition,
    out_signal,
    output_signal,
)
from gradcheck_suite.catalogue.definitions import Arrays, Tensors, no_extras
from gradcheck_suite.catalogue.signals import Signal
from gradcheck_suite.schema.spec import Layer, ProblemSpec

_PARAMETER_STREAM, _DATA_STREAM = 0, 1


class Chain(torch.nn.Sequential):
    """Layers in a row; each is handed, beside its input, what it asked for of the batch."""

    def __init__(self, layers: Iterable[Layer], signal: Signal, path: str = "") -> None:
        super().__init__()
        self._keys: list[dict[str, str]] = []
        for i, layer in enumerate(layers):
            kind, name = layer_definition(layer), f"{path}{i}"
            if kind.wraps is not None:
                self.append({"residual": Residual, "shared": Shared}[kind.wraps](layer.layers, signal, f"{name}."))
                self._keys.append({"batch": ""})
            else:
                assert kind.torch_module is not None
                self.append(kind.torch_module(signal, layer.o))
                self._keys.append(extra_keys(layer, signal, name))
            signal = out_signal(layer, signal)

    def forward(self, x: torch.Tensor, batch: Tensors) -> torch.Tensor:  # type: ignore[override]
        for module, keys in zip(self, self._keys, strict=True):
            x = module(x, **{name: batch[key] if key else batch for name, key in keys.items()}) if keys else module(x)
        return x


class Residual(Chain):
    """x + layers(x)."""

    def forward(self, x: torch.Tensor, batch: Tensors) -> torch.Tensor:  # type: ignore[override]
        return x + super().forward(x, batch)


class Shared(Chain):
    """layers(layers(x)): every weight is used twice."""

    def forward(self, x: torch.Tensor, batch: Tensors) -> torch.Tensor:  # type: ignore[override]
        return super().forward(super().forward(x, batch), batch)


class GeneratedModel(Chain):
    """The model of a `ProblemSpec`: takes a batch, or its `x` if it needs nothing else; returns what the loss takes."""

    def forward(self, batch: Tensors | torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if isinstance(batch, torch.Tensor):
            return super().forward(batch, {})
        return super().forward(batch["x"], batch)


def needs_batch(problem: ProblemSpec) -> bool:
    """Return whether the model takes the whole batch, since a layer asks for more of it than `x`."""
    return _asks_for_more(problem.layers, input_signal(problem.input))


def _asks_for_more(layers: Iterable[Layer], signal: Signal) -> bool:
    for layer in layers:
        wraps = layer_definition(layer).wraps
        if _asks_for_more(layer.layers, signal) if wraps else extra_keys(layer, signal, ""):
            return True
        signal = out_signal(layer, signal)
    return False


def extra_keys(layer: Layer, signal: Signal, path: str) -> dict[str, str]:
    """Return, for each keyword the layer takes beside its input, the batch's key that holds it."""
    kind = layer_definition(layer)
    keys = {}
    if kind.extras is not no_extras:
        keys = {name: f"{path}.{name}" for name in kind.extras(signal, layer.o, np.random.default_rng(0), 1)}
    if kind.uses_mask and signal.padded:
        keys["mask"] = "mask"
    return keys


def _extras(
    layers: Iterable[Layer], signal: Signal, rng: np.random.Generator, items: int, path: str
) -> Iterator[Arrays]:
    for i, layer in enumerate(layers):
        kind = layer_definition(layer)
        if kind.wraps is not None:
            yield from _extras(layer.layers, signal, rng, items, f"{path}{i}.")
        else:
            yield {f"{path}{i}.{name}": a for name, a in kind.extras(signal, layer.o, rng, items).items()}
        signal = out_signal(layer, signal)


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
    for extras in _extras(problem.layers, input_signal(problem.input), rng, items, ""):
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
        model = GeneratedModel(problem.layers, input_signal(problem.input))
    fill(model, seed)
    return model.to(dtype)
