"""Checksums of what parameters are at each pass: whether two passes are of the same parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gradcheck_suite.auditing.places import live_instances
from gradcheck_suite.auditing.samples import BatchedSampler

Points = dict[int, int]
"""Key of a parameter -> a checksum of its values, or its version where they lie on a device."""


class ParameterPoints:
    """Takes a checksum of each parameter.

    A version does not tell of `.data`, by which averages are swapped in and parameters perturbed.

    Attributes:
        has_versions_alone: whether of some parameter only the version is known.
    """

    def __init__(self) -> None:
        self.has_versions_alone = False
        self._values_of = BatchedSampler()
        self._last: Points = {}
        self._step = 0
        self._moved: set[int] = set()
        self._renormed: set[int] = set()

    def unmoved(self, parameters: Mapping[int, torch.Tensor], step: int) -> set[int]:
        """Return the ids of those that are what they were when the last pass had ended, where no step
        has come since.
        """
        known = {key: p for key, p in parameters.items() if key in self._last}
        if step != self._step or not known:
            return set()
        marks = zip(known.items(), self._values_of.marks([*known.values()]), strict=True)
        return {id(p) for (key, p), mark in marks if mark is not None and mark == self._last[key]}

    def now(self, parameters: Mapping[int, torch.Tensor], step: int) -> Points:
        """Return the checksums.

        Those of weights that their own forward writes are left out, from the first write on.

        Args:
            parameters: by their keys.
            step: the number of steps so far.
        """
        marks = self._values_of.marks([*parameters.values()])
        self.has_versions_alone = self.has_versions_alone or None in marks
        points = {
            key: parameters[key]._version if mark is None else mark
            for key, mark in zip(parameters, marks, strict=True)
        }
        before = self._last if step == self._step else {}
        if points == before:
            points = before  # those of thousands of parameters are kept for each pass of a window
        self._last = points
        self._step = step
        moved = {key for key, point in points.items() if before.get(key, point) != point}
        new = moved - self._moved
        if new:
            # a search through all objects, once for each parameter that is written between passes
            self._moved |= new
            renormed = _renormed_weights()
            self._renormed |= {key for key in new if id(parameters[key]) in renormed}
        if not self._renormed:
            return points
        return {key: point for key, point in points.items() if key not in self._renormed}


def _renormed_weights() -> set[int]:
    """Return the ids of weights that their own forward writes: those of embeddings with a
    `max_norm`.
    """
    modules = live_instances(torch.nn.Embedding, torch.nn.EmbeddingBag)
    bounded = [one for one in modules if one.__dict__.get("max_norm") is not None]
    return {id(one.__dict__["_parameters"].get("weight")) for one in bounded}
