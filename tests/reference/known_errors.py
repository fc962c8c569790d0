"""Rounding errors that are known, in place of measured ones: ratios to a bound are then exact."""

from __future__ import annotations

import numpy as np


class KnownErrors:
    """Rounding errors of a size, (P,), whatever is drawn."""

    def __init__(self, allowed, unevenness=1.0):
        self._allowed, self._unevenness = allowed, unevenness

    def noise(self, draws):
        """Return the errors, however many are drawn."""
        return self._allowed

    likely = noise

    def unevenness(self):
        """Return how unlike the draws of each element were, (P,)."""
        return np.full_like(self._allowed, self._unevenness)
