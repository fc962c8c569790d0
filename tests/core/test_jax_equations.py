"""The parameters of a JAX equation are read in the words of every release."""

from __future__ import annotations

from typing import Any

import pytest

from gradcheck_suite.core.jax_equations import ScanParts, scan_parts


class Tree:
    """Three groups, as JAX 0.11 has them."""

    def __init__(self, *groups: list[Any]) -> None:
        self._groups = groups

    def unpack(self) -> tuple[list[Any], ...]:
        return self._groups


@pytest.mark.parametrize(
    "params",
    [
        {"num_consts": 2, "num_carry": 1},
        {"ft_in": Tree([None, None], [None], [None, None, None]), "ft_out": Tree([None], [None])},
    ],
    ids=["up to 0.10", "since 0.11"],
)
def test_a_scan_is_divided_alike(params):
    assert scan_parts(params) == ScanParts(constants=2, carried=1)


def test_the_installed_jax_is_known():
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    def summed(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda total, row: (total + w * row, total), jnp.zeros(2), x)

    closed = jax.make_jaxpr(summed)(jnp.ones(2), jnp.ones((3, 2)))
    scan = next(eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan")
    assert scan_parts(scan.params) == ScanParts(constants=1, carried=1)
