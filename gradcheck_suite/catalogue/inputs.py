"""Sources of items: vectors, sequences, token sequences with padding, images, item indices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradcheck_suite.catalogue.definitions import Arrays, InputDefinition, Options, Signal, product

LENGTHS = (3,)


def _normal(rng: np.random.Generator, items: int, *size: int) -> Arrays:
    return {"x": rng.standard_normal((items, *size))}


def _prefix_mask(rng: np.random.Generator, items: int, length: int) -> npt.NDArray[np.bool_]:
    """Return (items, length), True on a prefix of at least one position of each row."""
    valid: npt.NDArray[np.bool_] = np.arange(length) < rng.integers(1, length + 1, (items, 1))
    return valid


def _vector_signal(options: Options) -> Signal:
    return Signal("vector", (options["size"],))


def _vector(options: Options, rng: np.random.Generator, items: int) -> Arrays:
    return _normal(rng, items, options["size"])


def _sequence_signal(options: Options) -> Signal:
    return Signal("sequence", (options["length"], options["size"]), padded=options["padded"])


def _sequence(options: Options, rng: np.random.Generator, items: int) -> Arrays:
    arrays = _normal(rng, items, options["length"], options["size"])
    if options["padded"]:
        arrays["mask"] = _prefix_mask(rng, items, options["length"])
    return arrays


def _tokens_signal(options: Options) -> Signal:
    return Signal("tokens", (options["length"],), padded=options["padded"], vocabulary=options["vocabulary"])


def _tokens(options: Options, rng: np.random.Generator, items: int) -> Arrays:
    x = rng.integers(1, options["vocabulary"], (items, options["length"]))
    if not options["padded"]:
        return {"x": x}
    mask = _prefix_mask(rng, items, options["length"])
    return {"x": np.where(mask, x, 0), "mask": mask}


def _image_signal(options: Options) -> Signal:
    return Signal("image", (options["channels"], options["height"], options["width"]))


def _image(options: Options, rng: np.random.Generator, items: int) -> Arrays:
    return _normal(rng, items, options["channels"], options["height"], options["width"])


def _index_signal(options: Options) -> Signal:
    return Signal("tokens", (1,), vocabulary=options["items"])


def _index(options: Options, rng: np.random.Generator, items: int) -> Arrays:
    return {"x": np.arange(items)[:, None] % options["items"]}


KINDS = (
    InputDefinition("vector", product(size=(1, 2, 3, 4)), _vector_signal, _vector),
    InputDefinition("tokens", product(length=LENGTHS, vocabulary=(5,), padded=(False, True)), _tokens_signal, _tokens),
    InputDefinition(
        "sequence", product(length=LENGTHS, size=(2, 4), padded=(False, True)), _sequence_signal, _sequence
    ),
    InputDefinition("index", ({"items": 1},), _index_signal, _index, drawn=False),
    InputDefinition("image", product(channels=(2, 4), height=(4,), width=(5,)), _image_signal, _image),
)
