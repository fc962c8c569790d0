"""Specs: generated problems as data, made of an input, a chain of layers and a loss.

Hypothesis shrinks and prints specs, and they convert to and from JSON, so they contain no module and no tensor. The
catalogue implements them in torch and in JAX.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from gradcheck_suite.errors import UsageError

Scalar = bool | int | float | str | None
Reduction = Literal["mean", "sum"]
REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum")
Objective = Literal["mean", "sum", "batch"]
"""A reduction over items, or `"batch"`: a function of a whole window that is no sum over items."""
OBJECTIVES: tuple[Objective, ...] = (*REDUCTIONS, "batch")


def _freeze(options: Mapping[str, Any], where: str) -> tuple[tuple[str, Scalar], ...]:
    for name, value in options.items():
        if name in ("kind", "layers"):
            raise UsageError(f"{where}: option {name!r} has a name that JSON uses for something else; choose another")
        if not isinstance(value, bool | int | float | str | None):
            raise UsageError(
                f"{where}: option {name!r} must be a bool, int, float, str or None, got {type(value).__name__}"
            )
    return tuple(sorted(options.items()))


@dataclass(frozen=True, init=False, repr=False)
class _Spec:
    """The name of a kind and its options. Base of `Input`, `Layer` and `Loss`."""

    kind: str
    options: tuple[tuple[str, Scalar], ...]

    def __init__(self, kind: str, /, **options: Scalar) -> None:
        if not isinstance(kind, str):
            raise UsageError(f"{type(self).__name__}: kind must be a string, got {type(kind).__name__}")
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "options", _freeze(options, f"{type(self).__name__}({kind!r})"))

    @property
    def o(self) -> Mapping[str, Any]:
        """The options by name."""
        return MappingProxyType(dict(self.options))

    def _arguments(self) -> list[str]:
        return [repr(self.kind), *(f"{name}={value!r}" for name, value in self.options)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._arguments())})"

    def to_json(self) -> dict[str, Any]:
        """Return the spec as JSON-ready data."""
        return {"kind": self.kind, **dict(self.options)}


class Input(_Spec):
    """A source of items: `Input("vector", size=3)`, `Input("tokens", length=3, vocabulary=5)`..."""


class Loss(_Spec):
    """A loss with its options and its `reduction`: `Loss("cross_entropy", reduction="mean")`."""

    @property
    def reduction(self) -> Reduction:
        """How the item losses are reduced: `"mean"` or `"sum"`."""
        reduction: Reduction = self.o.get("reduction", "mean")
        return reduction


@dataclass(frozen=True, init=False, repr=False)
class Layer(_Spec):
    """A layer with its options, and the inner layers of a kind that wraps others.

    `Layer("linear", features=2)`, `Layer("residual", Layer("tanh"))`.
    """

    layers: tuple[Layer, ...]

    def __init__(self, kind: str, /, *layers: Layer, **options: Scalar) -> None:
        super().__init__(kind, **options)
        for layer in layers:
            if not isinstance(layer, Layer):
                raise UsageError(f"Layer({kind!r}): inner layers must be Layer, got {type(layer).__name__}")
        object.__setattr__(self, "layers", tuple(layers))

    def _arguments(self) -> list[str]:
        kind, *options = super()._arguments()
        return [kind, *(repr(layer) for layer in self.layers), *options]

    def to_json(self) -> dict[str, Any]:
        """Return the layer and its inner layers as JSON-ready data."""
        inner = {"layers": [layer.to_json() for layer in self.layers]} if self.layers else {}
        return {**super().to_json(), **inner}


Tie = tuple[str, str]


@dataclass(frozen=True, repr=False)
class ProblemSpec:
    """A generated problem.

    Attributes:
        input: the source of items.
        layers: the model: a chain of layers.
        loss: the loss of the model's output.
        ties: modules or parameters under a second name: pairs of that name and the first one, such as
            `("2.weight", "0.weight")`; the first one is of an earlier layer.
    """

    input: Input
    layers: tuple[Layer, ...]
    loss: Loss
    ties: tuple[Tie, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "ties", tuple(map(_checked_tie, self.ties)))
        if not isinstance(self.input, Input) or not isinstance(self.loss, Loss):
            raise UsageError("ProblemSpec: expected an Input, a sequence of Layer and a Loss")
        for layer in self.layers:
            if not isinstance(layer, Layer):
                raise UsageError(f"ProblemSpec: layers must be Layer, got {type(layer).__name__}")

    @property
    def layer_kinds(self) -> list[str]:
        """The kinds of all layers, in the model's order; a layer comes before those inside it."""

        def walk(layers: Iterable[Layer]) -> Iterator[str]:
            for layer in layers:
                yield layer.kind
                yield from walk(layer.layers)

        return list(walk(self.layers))

    def __repr__(self) -> str:
        ties = f", ties={self.ties!r}" if self.ties else ""
        return f"ProblemSpec(input={self.input!r}, layers={self.layers!r}, loss={self.loss!r}{ties})"

    def to_json(self) -> dict[str, Any]:
        """Return the problem as JSON-ready data; without ties where there are none, so that digests stay."""
        return {
            "input": self.input.to_json(),
            "layers": [layer.to_json() for layer in self.layers],
            "loss": self.loss.to_json(),
            **({"ties": [list(tie) for tie in self.ties]} if self.ties else {}),
        }


def _checked_tie(tie: Any) -> Tie:
    """Return a tie as a tuple of two names, the second of them of an earlier layer."""
    try:
        name, original = tie
        if int(name.partition(".")[0]) > int(original.partition(".")[0]):
            return name, original
    except (AttributeError, TypeError, ValueError):
        pass
    raise UsageError(f"ProblemSpec: ties must be pairs of a name and one of an earlier layer, got {tie!r}")


def _kind_and_options(data: Any, where: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(data, Mapping) or not isinstance(data.get("kind"), str):
        raise UsageError(f"{where}: expected an object with a string 'kind', got {data!r}")
    options = {str(name): value for name, value in data.items() if name not in ("kind", "layers")}
    return data["kind"], options


def layer_from_json(data: Any) -> Layer:
    """Return the layer of JSON data; `UsageError` says why the data is not a layer."""
    kind, options = _kind_and_options(data, "layer")
    inner = data.get("layers", [])
    if not isinstance(inner, Sequence) or isinstance(inner, str):
        raise UsageError(f"layer {kind!r}: 'layers' must be a list, got {inner!r}")
    return Layer(kind, *map(layer_from_json, inner), **options)


def problem_from_json(data: Any) -> ProblemSpec:
    """Return the problem of JSON data; `UsageError` says why the data is not a problem."""
    if not isinstance(data, Mapping) or not {"input", "layers", "loss"} <= data.keys():
        raise UsageError("problem: expected an object with 'input', 'layers' and 'loss'")
    input_kind, input_options = _kind_and_options(data["input"], "input")
    loss_kind, loss_options = _kind_and_options(data["loss"], "loss")
    if not isinstance(data["layers"], Sequence) or isinstance(data["layers"], str):
        raise UsageError(f"problem: 'layers' must be a list, got {data['layers']!r}")
    ties = data.get("ties", [])
    if not isinstance(ties, list) or not all(isinstance(tie, list) for tie in ties):
        raise UsageError(f"problem: 'ties' must be a list of pairs, got {ties!r}")
    return ProblemSpec(
        input=Input(input_kind, **input_options),
        layers=tuple(map(layer_from_json, data["layers"])),
        loss=Loss(loss_kind, **loss_options),
        ties=tuple(map(tuple, ties)),
    )
