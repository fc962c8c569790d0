"""Signals, the type and shape of an item between two layers, and the rules of layers and losses about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gradcheck_suite.errors import UsageError

Options = Mapping[str, Any]
Form = Literal["vector", "sequence", "image", "tokens"]
Variants = Callable[["Signal"], Sequence[Options]]

ROWS: tuple[Form, ...] = ("vector", "sequence")
"""Signals made of feature rows."""
FLOATS: tuple[Form, ...] = (*ROWS, "image")
"""Signals of floating-point values."""


@dataclass(frozen=True)
class Signal:
    """Type and shape of one item between two layers.

    Attributes:
        form: `"vector"`, `"sequence"`, `"image"` or `"tokens"`.
        size: shape of one item: (D,), (T, D), (C, H, W) or (T,).
        padded: whether the batch has a `mask`, (n, T), True at valid positions and False at padding.
        vocabulary: number of distinct token ids, 0 for other forms. Id 0 is the padding token.
    """

    form: Form
    size: tuple[int, ...]
    padded: bool = False
    vocabulary: int = 0

    @property
    def features(self) -> int:
        """Length of the feature axis: D, or C for an image."""
        return self.size[0] if self.form == "image" else self.size[-1]

    def with_features(self, features: int) -> Signal:
        """Return a signal of the same form whose feature axis has another length."""
        size = (features, *self.size[1:]) if self.form == "image" else (*self.size[:-1], features)
        return Signal(self.form, size, self.padded)


def feature_axis(signal: Signal) -> int:
    """Return the axis of a batch that holds the features: 1 for images, the last one otherwise."""
    return 1 if signal.form == "image" else -1


def vector(size: int) -> Signal:
    """Return the signal of vectors with `size` features."""
    return Signal("vector", (size,))


def product(**choices: Sequence[Any]) -> list[Options]:
    """Return every combination of the choices, ordered by the sum of their positions: simplest first."""
    combinations: list[dict[str, Any]] = [{}]
    for name, values in choices.items():
        combinations = [{**c, name: v} for c in combinations for v in values]
    return sorted(combinations, key=lambda c: sum(choices[n].index(v) for n, v in c.items()))


def on(*forms: Form, min_features: int = 1, **choices: Sequence[Any]) -> Variants:
    """Return `variants`: every combination of the choices, for signals of these forms with enough features."""
    options = product(**choices)

    def variants(signal: Signal) -> Sequence[Options]:
        return options if signal.form in forms and signal.features >= min_features else ()

    return variants


_FORM_NAMES = {
    ROWS: "a vector or a sequence",
    FLOATS: "floating values",
    ("sequence", "image"): "a sequence or an image",
    ("tokens",): "tokens",
    ("image",): "an image",
}


def expect(condition: bool, kind: str, expected: str, received: object) -> None:
    """Raise a layer's `UsageError` where its options or its input do not fit."""
    if not condition:
        raise UsageError(f"layer {kind!r}: expected {expected}, got {received}")


def expect_form(signal: Signal, kind: str, *forms: Form) -> None:
    """Raise a layer's `UsageError` where its input has none of these forms."""
    expect(signal.form in forms, kind, _FORM_NAMES.get(forms, f"a {forms[0]}"), signal)


def keeps_signal(name: str, *forms: Form) -> Callable[[Signal, Options], Signal]:
    """Return `out` of a layer that accepts these forms and returns its input's signal."""

    def out(signal: Signal, options: Options) -> Signal:
        expect_form(signal, name, *forms)
        return signal

    return out


def rows_to_features(name: str, *counts: str) -> Callable[[Signal, Options], Signal]:
    """Return `out` of a layer that maps feature rows to rows of `features` features.

    Args:
        name: the kind's name in specs.
        counts: further options that must be at least 1.
    """

    def out(signal: Signal, options: Options) -> Signal:
        expect_form(signal, name, *ROWS)
        for option in ("features", *counts):
            expect(options[option] >= 1, name, f"{option} of at least 1", options[option])
        return signal.with_features(options["features"])

    return out


def same(signal: Signal, options: Options) -> Signal:
    """Return the input signal: `out` of a layer that accepts every signal and keeps its shape."""
    return signal
