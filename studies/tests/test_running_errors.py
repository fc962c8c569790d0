"""The running error bound covers what float64 computes, and is 0 where float64 is exact."""

from __future__ import annotations

import math
import operator
from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from studies.zero_or_none import DIGITS, UNIT_ROUNDOFF, Rounded, exact_arithmetic

numbers = st.floats(0.1, 10.0)
dyadic = st.integers(1, 64).map(lambda n: n / 16)
OPERATIONS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": lambda a, b: abs(a) ** 3,
}
steps = st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), numbers), min_size=1, max_size=12)


def computed(start, operations):
    """Return a chain of operations in float64, and as an exact number with its bound.

    The chain ends where cancellation leaves few digits, since the bound is of the first order, and
    before an overflow.
    """
    plain, carried = start, Rounded(Decimal(start))
    for name, number in operations:
        if carried.error * UNIT_ROUNDOFF > abs(carried.value) / 1000 or abs(carried.value) > 10**9:
            break
        plain = OPERATIONS[name](plain, number)
        carried = OPERATIONS[name](carried, Rounded(Decimal(number)))
    return plain, carried


@given(start=numbers, operations=steps)
def test_float64_stays_within_the_bound(start, operations):
    with exact_arithmetic(prec=DIGITS):
        plain, carried = computed(start, operations)
        # the terms of higher order are less than 1%
        allowed = Decimal("1.01") * UNIT_ROUNDOFF * carried.error
        assert not math.isfinite(plain) or abs(Decimal(plain) - carried.value) <= allowed


@given(a=dyadic, b=dyadic, c=dyadic)
def test_exact_operations_allow_no_error(a, b, c):
    with exact_arithmetic(prec=DIGITS):
        x, y, z = (Rounded(Decimal(v)) for v in (a, b, c))
        found = (x * y - z) * x + y / 4 - 2
        assert found.error == 0
        assert float(found.value) == (a * b - c) * a + b / 4 - 2


@given(a=numbers)
def test_a_root_carries_half_the_relative_error(a):
    with exact_arithmetic(prec=DIGITS):
        square = Rounded(Decimal(a)) / 3
        root = square.sqrt()
        relative = square.error / square.value / 2
        tiny = Decimal(10) ** -40  # of the division and the root, which have `DIGITS` digits
        assert relative - tiny <= root.error / root.value <= relative + 1 + tiny
