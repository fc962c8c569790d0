"""Exact arithmetic that carries a bound on the rounding error of the same formula in float64.

Running error analysis, in units of the unit roundoff and to first order (Higham, Accuracy and Stability of Numerical
Algorithms, section 3.3). An operation whose result float64 represents exactly adds nothing, so that the bound of a
computation in small dyadic numbers is 0: such a result must be right to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, localcontext
from typing import Any

DIGITS = 60
"""Decimal digits of the exact values: sums and products of a few float64 numbers of moderate size are exact."""
UNIT_ROUNDOFF = Decimal(2) ** -53

exact_arithmetic = localcontext
"""`with exact_arithmetic(prec=DIGITS):` computes with `DIGITS` digits."""


@dataclass(frozen=True, slots=True, eq=False)
class Rounded:
    """A number, and by how much a float64 computation of it may be off.

    Attributes:
        value: the number, with `DIGITS` digits.
        error: first-order bound on the absolute error of the float64 computation, in units of u = 2^-53.
    """

    value: Decimal
    error: Decimal = Decimal(0)

    def __add__(self, other: Any) -> Rounded:
        """Return the sum."""
        if not isinstance(other, NUMBERS):
            return NotImplemented
        b = _of(other)
        return _rounded(self.value + b.value, self.error + b.error)

    def __mul__(self, other: Any) -> Rounded:
        """Return the product."""
        if not isinstance(other, NUMBERS):
            return NotImplemented
        b = _of(other)
        return _rounded(self.value * b.value, abs(self.value) * b.error + abs(b.value) * self.error)

    def __truediv__(self, other: Any) -> Rounded:
        """Return the quotient."""
        if not isinstance(other, NUMBERS):
            return NotImplemented
        b = _of(other)
        value = self.value / b.value
        return _rounded(value, (self.error + abs(value) * b.error) / abs(b.value))

    def __pow__(self, exponent: Any) -> Rounded:
        """Return the power; the base is not negative, and the exponent is exact."""
        if not isinstance(exponent, NUMBERS):
            return NotImplemented
        n = _of(exponent).value
        value = self.value**n
        return _rounded(value, abs(n) * value / self.value * self.error if self.error else Decimal(0))

    def __neg__(self) -> Rounded:
        """Return the negative, which is exact."""
        return Rounded(-self.value, self.error)

    def __abs__(self) -> Rounded:
        """Return the magnitude, which is exact."""
        return Rounded(abs(self.value), self.error)

    def sqrt(self) -> Rounded:
        """Return the square root."""
        value = self.value.sqrt()
        return _rounded(value, self.error / (2 * value) if self.error else Decimal(0))

    def __sub__(self, other: Any) -> Rounded:
        """Return the difference."""
        return self + (-_of(other))

    def __rsub__(self, other: Any) -> Rounded:
        """Return the difference."""
        return _of(other) - self

    def __rtruediv__(self, other: Any) -> Rounded:
        """Return the quotient."""
        return _of(other) / self

    def __rpow__(self, base: Any) -> Rounded:
        """Return the power."""
        return _of(base) ** self

    __radd__, __rmul__ = __add__, __mul__

    def __lt__(self, other: Any) -> bool:
        """Compare the exact values."""
        return self.value < _of(other).value

    def __le__(self, other: Any) -> bool:
        """Compare the exact values."""
        return self.value <= _of(other).value

    def __ge__(self, other: Any) -> bool:
        """Compare the exact values."""
        return self.value >= _of(other).value

    def __gt__(self, other: Any) -> bool:
        """Compare the exact values."""
        return self.value > _of(other).value


def _of(number: Any) -> Rounded:
    return number if isinstance(number, Rounded) else Rounded(Decimal(number))


NUMBERS = (int, Decimal, Rounded)
"""What a `Rounded` number computes with; an array of them computes element by element."""


def _rounded(value: Decimal, error: Decimal) -> Rounded:
    """Return a result, with the rounding of its own where float64 does not represent it."""
    return Rounded(value, error if Decimal(float(value)) == value else error + abs(value))
