"""Sources of items: vectors, sequences, token sequences with padding, images, item indices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradcheck_suite.catalogue.definitions import Arrays, InputDefinition
from gradcheck_suite.catalogue.signals import Options, Signal, product

LENGTHS = (3,)


def _normal(rng: np.random.Generator, items: int, *size: int) -> Arrays:
    return {"x": rng.standard_normal((items, *size))}


def _prefix_mask(rng: np.random.Generator, items: int, length: int) -> npt.NDArray[np.bool_]:
    """Return (items, length), True on a prefix of at least one position of each row."""
    valid: npt.NDArray[np.bool_] = np.arange(length) < rng.integers(1, length + 1, (items, 1))
    return valid


def _sequence(options: Options, rng: np.random.Generator, items: int) -> Arrays:
    arrays = _normal(rng, items, options["length"], options["size"])
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
        product(size=(1, 2, 3, 4)),
        lambda o: Signal("vector", (o["size"],)),
        lambda o, rng, items: _normal(rng, items, o["size"]),
    ),
    InputDefinition(
        "sequence",
        product(length=LENGTHS, size=(2, 4), padded=(False, True)),
        lambda o: Signal("sequence", (o["length"], o["size"]), padded=o["padded"]),
        _sequence,
    ),
    InputDefinition(
        "tokens",
        product(length=LENGTHS, vocabulary=(5,), padded=(False, True)),
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
        product(channels=(2, 4), height=(4,), width=(5,)),
        lambda o: Signal("image", (o["channels"], o["height"], o["width"])),
        lambda o, rng, items: _normal(rng, items, o["channels"], o["height"], o["width"]),
    ),
)
