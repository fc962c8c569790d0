"""One row for each optimizer: what differs between torch and optax, and how far their steps are apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from gradcheck_suite.schema.results import json_number
from gradcheck_suite.steps.counterpart import Counterpart
from gradcheck_suite.steps.drawn import draw_steps, in_optax

DTYPES = ("float64", "float32")
SCALES = (1.0, 1e-6, 100.0)
"""Sizes of the drawn gradients: at, below and above what the epsilons are made for."""


@dataclass(frozen=True)
class Row:
    """The steps of one optimizer, compared.

    Attributes:
        counterpart: of the optimizer.
        cases: number of runs of `drawn.STEPS` steps, over all dtypes.
        ratios: dtype -> the largest error of a parameter over its bound.
        undecided: number of parameters at which a step jumps within its error, so that they have no bound.
    """

    counterpart: Counterpart
    cases: int
    ratios: dict[str, float]
    undecided: int

    @property
    def agree(self) -> bool:
        """Whether every parameter is within its bound."""
        return all(ratio <= 1 for ratio in self.ratios.values())

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON-ready data."""
        counterpart = self.counterpart
        return {
            "torch": counterpart.torch,
            "optax": counterpart.optax,
            "differs": list(counterpart.differs),
            "outside": counterpart.outside,
            "source": counterpart.source,
            "implementations": list(counterpart.implementations),
            "settings": len(counterpart.variants),
            "cases": self.cases,
            "error_over_allowed": {dtype: json_number(ratio) for dtype, ratio in self.ratios.items()},
            "undecided": self.undecided,
            "agree": self.agree,
        }


def compare(counterpart: Counterpart, seeds: Iterable[int], device: str = "cpu") -> Row:
    """Compare an optimizer's steps under all its settings, in each implementation, dtype and scale of the gradients.

    Args:
        counterpart: of the optimizer.
        seeds: of the drawn numbers.
        device: where torch computes; JAX computes on the CPU.
    """
    drawn, cases, undecided = list(seeds), 0, 0
    ratios = dict.fromkeys(DTYPES, 0.0)
    for name in DTYPES:
        dtype = getattr(torch, name)
        for settings in counterpart.variants:
            for implementation in counterpart.implementations:
                for seed in drawn:
                    scale = SCALES[seed % len(SCALES)]
                    about = {"dtype": dtype, "implementation": implementation, "seed": seed, "scale": scale}
                    steps = draw_steps(counterpart, settings, device=device, **about)
                    found = in_optax(counterpart, steps, dtype, implementation)
                    ratios[name] = max(ratios[name], found.ratio(steps.parameters))
                    undecided += int(found.undecided.sum())
                    cases += 1
    return Row(counterpart, cases, ratios, undecided)
