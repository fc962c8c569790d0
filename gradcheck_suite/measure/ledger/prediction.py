"""What each reset mode must do to gradients, as formulas: the ledger measures the same and must agree exactly.

The laws hold for P parameters that every micro-batch reaches with a dense gradient which autograd can take as it is
(of the parameter's own strides, and nobody else's). E elements of b bytes make G = E b bytes of gradients; a window has
K micro-batches. `add_` reads two operands and writes one, `zero_` writes one, taking a gradient moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradcheck_suite.errors import UsageError
from gradcheck_suite.measure.ledger.traffic import Traffic

MAIN_ITEMSIZE = 4
"""Bytes of an element of a float32 main gradient."""


@dataclass(frozen=True)
class Cost:
    """What one window does to gradients, from the reset that prepares it to the end of its step.

    Attributes:
        mode: the reset mode's name, as in `gradcheck_suite.loops`.
        reset: zeroing or releasing the gradients of the window before.
        accumulate: adding each micro-batch's gradients to the sum. The gradients themselves are made by the backward
            and released after being added, in every mode alike, and that is not counted.
        handling: what the loop does to gradients beside, between backward and step.
        kept: bytes of gradients alive from the end of the reset to the first backward.
        held: bytes of gradients alive when the step begins.
    """

    mode: str
    reset: Traffic
    accumulate: Traffic
    handling: Traffic
    kept: int
    held: int

    @property
    def operations(self) -> int:
        """Operations of the window on gradients, views left out: as many kernels on a device."""
        return self.reset.operations + self.accumulate.operations + self.handling.operations

    @property
    def moved(self) -> int:
        """Bytes that the window reads and writes for its gradients' sake."""
        return self.reset.moved + self.accumulate.moved + self.handling.moved


@dataclass(frozen=True)
class _Sizes:
    parameters: int
    bytes: int
    elements: int
    itemsize: int
    micro_batches: int


def _zeroing(operations: int, size: int) -> Traffic:
    return Traffic(operations=operations, written=size)


def _adding(additions: int, operations: int, size: int) -> Traffic:
    """Return `additions` of everything to the sums, `operations` in all."""
    return Traffic(operations=operations, read=2 * additions * size, written=additions * size)


def _zeroed(mode: str, sizes: _Sizes, *, first: bool, calls: int) -> Cost:
    """The gradients stay: zeroed, then added to K times. In the first window there are none: as after a release."""
    added = sizes.micro_batches - first
    return Cost(
        mode,
        reset=Traffic() if first else _zeroing(calls, sizes.bytes),
        accumulate=_adding(added, sizes.parameters * added, sizes.bytes),
        handling=Traffic(),
        kept=0 if first else sizes.bytes,
        held=sizes.bytes,
    )


def _released(mode: str, sizes: _Sizes, *, first: bool, **_: Any) -> Cost:
    """The gradients go: the first micro-batch's are taken, K - 1 are added."""
    added = sizes.micro_batches - 1
    return Cost(
        mode,
        reset=Traffic(freed=0 if first else sizes.bytes),
        accumulate=_adding(added, sizes.parameters * added, sizes.bytes),
        handling=Traffic(),
        kept=0,
        held=sizes.bytes,
    )


def _flat(mode: str, sizes: _Sizes, *, first: bool, **_: Any) -> Cost:
    """One buffer, there from the start: one call zeroes it, and the first window adds as often as any other."""
    k = sizes.micro_batches
    return Cost(
        mode,
        reset=Traffic() if first else _zeroing(1, sizes.bytes),
        accumulate=_adding(k, sizes.parameters * k, sizes.bytes),
        handling=Traffic(),
        kept=sizes.bytes,
        held=sizes.bytes,
    )


def _in_backward(mode: str, sizes: _Sizes, **_: Any) -> Cost:
    """Each gradient is stepped on and released as soon as the last micro-batch's is added: none is left to reset."""
    added = sizes.micro_batches - 1
    return Cost(
        mode,
        reset=Traffic(),
        accumulate=_adding(added, sizes.parameters * added, sizes.bytes),
        handling=Traffic(),
        kept=0,
        held=0,
    )


def _main(mode: str, sizes: _Sizes, *, first: bool, **_: Any) -> Cost:
    """Sums in float32 or wider: each micro-batch's gradient is taken, added to them and released.

    At the end of a window the sums are rounded to the parameters' dtype, which is a copy only where it is narrower.
    """
    k, wide = sizes.micro_batches, sizes.elements * max(MAIN_ITEMSIZE, sizes.itemsize)
    copied = sizes.itemsize < MAIN_ITEMSIZE
    rounded = sizes.bytes if copied else 0
    zeroing = Traffic(operations=sizes.parameters, written=wide, freed=rounded)
    copying = Traffic(operations=sizes.parameters, read=wide, written=rounded, allocated=rounded)
    return Cost(
        mode,
        reset=Traffic() if first else zeroing,
        accumulate=Traffic(operations=sizes.parameters * k, read=k * (wide + sizes.bytes), written=k * wide),
        handling=copying if copied else Traffic(),
        kept=wide,
        held=wide + rounded,
    )


_Law = Callable[..., Cost]
_LAWS: dict[str, tuple[_Law, bool]] = {
    "zero_": (_zeroed, False),
    "zero_grad": (_zeroed, False),
    "zero_before_forward": (_zeroed, False),
    "zero_between": (_zeroed, False),
    "zero_grad_foreach": (_zeroed, True),
    "foreach_zero": (_zeroed, True),
    "set_to_none": (_released, False),
    "grad_none": (_released, False),
    "flat_buffer": (_flat, True),
    "optimizer_in_backward": (_in_backward, False),
    "main_gradients": (_main, False),
}
"""Mode -> its law, and whether one call resets all."""


def cost_table(
    parameters: int, elements: int, itemsize: int, micro_batches: int, *, first: bool = False
) -> dict[str, Cost]:
    """Return what one window costs in each reset mode.

    Args:
        parameters: P, tensors that get a gradient.
        elements: E, of all of them together.
        itemsize: bytes of an element, 1 to 8.
        micro_batches: K, in the window.
        first: whether it is the first window of a run, which finds no gradients.

    Returns:
        Mode's name -> its cost. Zeroing with one call (`foreach`) supposes one dtype and device.

    Raises:
        UsageError: a number is out of range.
    """
    given = {"parameters": parameters, "elements": elements, "itemsize": itemsize, "micro_batches": micro_batches}
    for name, value in given.items():
        least = 0 if name == "elements" else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"cost_table: {name} must be an integer of at least {least}, got {value!r}")
    sizes = _Sizes(parameters, elements * itemsize, elements, itemsize, micro_batches)
    return {
        mode: law(mode, sizes, first=first, calls=1 if at_once else parameters)
        for mode, (law, at_once) in _LAWS.items()
    }
