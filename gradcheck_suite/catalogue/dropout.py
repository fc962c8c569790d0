"""Dropout whose mask is part of the batch, so that every split of the items drops the same elements."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
import torch

from gradcheck_suite.catalogue.definitions import Arguments, Arrays, LayerDefinition
from gradcheck_suite.catalogue.signals import FLOATS, Options, Signal, expect, expect_form, product


class MaskedDropout(torch.nn.Module):
    """x * keep / (1 - p) for a mask `keep` of the input's shape."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return x * keep / (1 - self.p)


def _variants(signal: Signal) -> Sequence[Options]:
    return () if signal.form == "tokens" else product(p=(0.5, 0.1) if signal.form == "vector" else (0.5,))


def _out(signal: Signal, options: Options) -> Signal:
    expect_form(signal, "dropout", *FLOATS)
    expect(0 <= options["p"] < 1, "dropout", "p of at least 0 and below 1", options["p"])
    return signal


def _extras(signal: Signal, options: Options, rng: np.random.Generator, items: int) -> Arrays:
    return {"keep": rng.random((items, *signal.size)) >= options["p"]}


def _jax(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return jax.numpy.where(extras["keep"], x / (1 - options["p"]), 0.0)


KINDS = (LayerDefinition("dropout", _variants, _out, lambda signal, o: MaskedDropout(o["p"]), _jax, extras=_extras),)
