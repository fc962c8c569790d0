"""What the parameters of a JAX equation say, in whichever release's words. Imports no framework.

Equations are internals of JAX, and their parameters are renamed between releases: whoever reads
one asks here, so that a new release is one change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ScanParts:
    """How the operands of a `scan` are divided: constants first, then the carry, then the inputs.

    Attributes:
        constants: number of operands that every iteration reads unchanged.
        carried: number of operands that an iteration hands to the next one.
    """

    constants: int
    carried: int


def scan_parts(params: Mapping[str, Any]) -> ScanParts:
    """Return how the operands of a `scan` equation are divided.

    Args:
        params: the parameters of the equation.
    """
    if "num_consts" in params:
        return ScanParts(params["num_consts"], params["num_carry"])
    # JAX 0.11 has a tree of the three groups in place of two counts:
    # https://github.com/jax-ml/jax/blob/main/jax/_src/lax/control_flow/loops.py
    constants, carried, _ = params["ft_in"].unpack()
    return ScanParts(len(constants), len(carried))
