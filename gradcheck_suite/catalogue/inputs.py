"""Sources of items: vectors, sequences, token sequences with padding, images, item indices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from gradcheck_suite.catalogue.definitions import Arrays, InputDefinition
from gradcheck_suite.catalogue.signals import Options, Signal, product
from gradcheck_suite.errors import UsageError

Floats = npt.NDArray[np.float64]
LARGE = 30.0
VALUES: dict[str, Callable[[Floats], Floats]] = {"tied": np.round, "large": lambda x: LARGE * x}
"""What the option `values` makes of normal numbers: many that are equal or 0, or large ones. Layers are differentiated
on torch's side of a kink, so that torch and JAX agree at ties and zeros."""


def _normal(options: Options, rng: np.random.Generator, items: int, *size: int) -> Arrays:
    x = rng.standard_normal((items, *size))
    values = options.get("values")
    if values is not None and values not in VALUES:
        raise UsageError(f"input: values must be one of {', '.join(VALUES)}; got {values!r}")
    return {"x": x if values is None else VALUES[values](x)}


def _prefix_mask(rng: np.random.Generator, items: int, length: int) -> npt.NDArray[np.bool_]:
    """Return (items, length), True on a prefix of at least one position of each row."""
    valid: npt.NDArray[np.bool_] = np.arange(length) < rng.integers(1, length + 1, (items, 1))
    return valid


def _sequence(options: Options, rng: np.random.Generator, items: int) -> Arrays:
    arrays = _normal(options, rng, items, options["length"], options["size"])
    if options["padded"]:
        arrays["mask"] = _prefix_mask(rng, items, options["length"])
    return arrays


def _tokens(options: Options, rng: np.random.Generator, items: int) -> Arrays:
    x = rng.integers(1, options["vocabulary"], (items, options["length"]))
    if not options["padded"]:
        return {"x": x}
    mask = _prefix_mask(rng, items, options["length"])
    return {"x": np.where(mask, x, 0), "mask": mask}


KINDS = (
    InputDefinition(
        "vector",
        (*product(size=(1, 2, 3, 4)), *product(size=(2,), values=tuple(VALUES))),
        lambda o: Signal("vector", (o["size"],)),
        lambda o, rng, items: _normal(o, rng, items, o["size"]),
    ),
    InputDefinition(
        "sequence",
        (
            *product(length=(3,), size=(2, 4), padded=(False, True)),
            *product(length=(5,), size=(2,), padded=(False, True)),
            *product(length=(3,), size=(2,), padded=(False, True), values=tuple(VALUES)),
        ),
        lambda o: Signal("sequence", (o["length"], o["size"]), padded=o["padded"]),
        _sequence,
    ),
    InputDefinition(
        "tokens",
        tuple(
            o for n, v in ((3, 5), (5, 5), (3, 9)) for o in product(length=(n,), vocabulary=(v,), padded=(False, True))
        ),
        lambda o: Signal("tokens", (o["length"],), padded=o["padded"], vocabulary=o["vocabulary"]),
        _tokens,
    ),
    InputDefinition(
        "index",
        ({"items": 1},),
        lambda o: Signal("tokens", (1,), vocabulary=o["items"]),
        lambda o, rng, items: {"x": np.arange(items)[:, None] % o["items"]},
        drawn=False,
    ),
    InputDefinition(
        "image",
        (
            *product(channels=(2, 4), height=(4,), width=(5,)),
            *({"channels": 2, "height": size, "width": size} for size in (2, 5)),
            *product(channels=(2,), height=(4,), width=(5,), values=tuple(VALUES)),
        ),
        lambda o: Signal("image", (o["channels"], o["height"], o["width"])),
        lambda o, rng, items: _normal(o, rng, items, o["channels"], o["height"], o["width"]),
    ),
)
