"""Constant, reflection and replication padding. Export decomposes circular padding into slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcheck_suite.bridge.dtypes import Array
from gradcheck_suite.bridge.op_table import register_op


@register_op("aten.constant_pad_nd")
def constant_pad_nd(self: Array, pad: Sequence[int], value: Any = 0) -> Array:
    """Return self padded by (before, after) pairs, the last axis first; negative widths crop."""
    widths = [(0, 0, 0)] * self.ndim
    for i in range(len(pad) // 2):
        widths[self.ndim - 1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    return lax.pad(self, jnp.asarray(value, self.dtype), widths)


def _taken(self: Array, padding: Sequence[int], place: Any) -> Array:
    """Return the entries at `place(positions, length)` along each padded axis."""
    for i in range(len(padding) // 2):
        axis = self.ndim - 1 - i
        length = self.shape[axis]
        positions = np.arange(-padding[2 * i], length + padding[2 * i + 1])
        self = jnp.take(self, place(positions, length), axis=axis)
    return self


def _reflected(positions: Any, length: int) -> Any:
    positions = np.abs(positions)
    return np.where(positions >= length, 2 * (length - 1) - positions, positions)


@register_op("aten.reflection_pad1d", "aten.reflection_pad2d", "aten.reflection_pad3d")
def reflection_pad(self: Array, padding: Sequence[int]) -> Array:
    """Return self padded by reflection at the border entries."""
    return _taken(self, padding, _reflected)


@register_op("aten.replication_pad1d", "aten.replication_pad2d", "aten.replication_pad3d")
def replication_pad(self: Array, padding: Sequence[int]) -> Array:
    """Return self padded with copies of the border entries."""
    return _taken(self, padding, lambda positions, length: np.clip(positions, 0, length - 1))
