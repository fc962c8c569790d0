"""What a gradient of zeros does to a parameter and its optimizer state that None does not:
predicted, and run by torch.

`zero_or_none_laws` has one record for each optimizer, with its step; `rows` makes the table of the
report. Must not import the report or the command line.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import torch

from studies.reset_modes import RESET_MODES, ResetMode
from studies.zero_or_none_laws import Exact, Law, Settings, State

DIGITS = 60
"""Decimal digits of the exact values: sums and products of a few float64 numbers of moderate size are exact."""
UNIT_ROUNDOFF = Decimal(2) ** -53

exact_arithmetic = localcontext
"""`with exact_arithmetic(prec=DIGITS):` computes with `DIGITS` digits."""


def _operator(compute: Callable[[Rounded, Rounded], Rounded]) -> Callable[[Any, Any], Any]:
    """Return an arithmetic method.

    Python then asks an array of numbers to compute element by element.
    """
    return lambda a, b: compute(a, _of(b)) if isinstance(b, NUMBERS) else NotImplemented


def _comparison(compare: Callable[[Decimal, Decimal], bool]) -> Callable[[Any, Any], bool]:
    """Return a method that compares exact values."""
    return lambda a, b: compare(a.value, _of(b).value)


@dataclass(frozen=True, slots=True, eq=False)
class Rounded:
    """A number, and by how much a float64 computation of it may be off.

    This is running error analysis to first order (Higham, Accuracy and Stability of Numerical
    Algorithms, section 3.3). An operation whose result float64 represents exactly adds nothing, so
    that the bound of a computation in small dyadic numbers is 0: such a result must be right to the
    bit.

    Attributes:
        value: the number, with `DIGITS` digits.
        error: first-order bound on the absolute error of the float64 computation, in units of u =
            2^-53.
    """

    value: Decimal
    error: Decimal = Decimal(0)

    __add__ = __radd__ = _operator(lambda a, b: _rounded(a.value + b.value, a.error + b.error))
    __sub__ = _operator(lambda a, b: a + -b)
    __rsub__ = _operator(lambda a, b: b + -a)
    __mul__ = __rmul__ = _operator(
        lambda a, b: _rounded(a.value * b.value, abs(a.value) * b.error + abs(b.value) * a.error)
    )
    __truediv__ = _operator(lambda a, b: _quotient(a, b))
    __rtruediv__ = _operator(lambda a, b: _quotient(b, a))
    __pow__ = _operator(lambda a, b: _power(a, b.value))
    __rpow__ = _operator(lambda a, b: _power(b, a.value))
    __lt__, __le__, __gt__, __ge__ = map(
        _comparison, (operator.lt, operator.le, operator.gt, operator.ge)
    )

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


def _of(number: Any) -> Rounded:
    return number if isinstance(number, Rounded) else Rounded(Decimal(number))


NUMBERS = (int, Decimal, Rounded)
"""What a `Rounded` number computes with; an array of them computes element by element."""


def _rounded(value: Decimal, error: Decimal) -> Rounded:
    """Return a result, with the rounding of its own where float64 does not represent it."""
    return Rounded(value, error if Decimal(float(value)) == value else error + abs(value))


def _quotient(a: Rounded, b: Rounded) -> Rounded:
    value = a.value / b.value
    return _rounded(value, (a.error + abs(value) * b.error) / abs(b.value))


def _power(base: Rounded, exponent: Decimal) -> Rounded:
    """Return a power of a base that is not negative; the exponent is exact."""
    value = base.value**exponent
    return _rounded(
        value, abs(exponent) * value / base.value * base.error if base.error else Decimal(0)
    )


Point = tuple[Exact, State]
"""A parameter and its state after a window."""


def exact(values: Any) -> Any:
    """Return numbers, in tuples and arrays too, as `Rounded` ones; anything else stays."""
    if isinstance(values, tuple):
        return tuple(map(exact, values))
    if isinstance(values, np.ndarray):
        found = np.empty(values.shape, dtype=object)
        for index, value in np.ndenumerate(values):
            found[index] = exact(value)
        return found
    return Rounded(Decimal(values)) if isinstance(values, float) else values


def predict(law: Law, settings: Mapping[str, Any], start: Any, seen: Sequence[Any]) -> list[Point]:
    """Return parameter and state after each window, as `Rounded` numbers.

    Args:
        law: of the optimizer.
        settings: all of its settings.
        start: the parameter before the first window.
        seen: the gradient that the optimizer finds in each window, or None, which it skips.
    """
    with exact_arithmetic(prec=DIGITS):
        s, theta, state, points = (
            {k: exact(v) for k, v in settings.items()},
            exact(start),
            State(),
            list[Point](),
        )
        for gradient in seen:
            if gradient is not None:
                theta, state = law.step(theta, state, exact(gradient), s)
            points.append((theta, state))
        return points


REACHED, MISSED, FROZEN, ABSENT = "reached", "missed", "frozen", "absent"
"""What a window is to the parameter. Absent: the optimizer does not have it yet."""
ROUTED = (REACHED, REACHED, MISSED, MISSED, REACHED, MISSED)
UNFROZEN = (REACHED, REACHED, FROZEN, FROZEN, REACHED)
ADDED_LATE = (ABSENT, ABSENT, REACHED, MISSED, REACHED)
MISSED_FIRST = (MISSED, MISSED, REACHED, REACHED)
SCENARIOS = {
    "routed": ROUTED,
    "unfrozen": UNFROZEN,
    "added late": ADDED_LATE,
    "missed first": MISSED_FIRST,
}

_MATRIX = ((1.0, -0.5), (0.75, 2.0))
HADAMARD = ((1.0, 1.0), (1.0, -1.0))
SIZES = (1.0, 0.5, 0.25, -0.75, -0.5, -1.0)
"""Window w has the gradient `SIZES[w]` times the matrix of +-1; the signs turn once."""
FALLING = (1.0, 0.5, 0.375, 0.25, 0.125, 0.0625)
"""The sizes for L-BFGS, whose pairs then have positive curvature."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Run:
    """What torch did.

    Attributes:
        settings: all settings of the optimizer.
        seen: for each window the gradient that the step found, or None; None for an element that a
            sparse gradient lacks.
        thetas: the parameter after each window.
        states: the state of the parameter after each window.
    """

    settings: dict[str, Any]
    seen: list[Array | None]
    thetas: list[Array]
    states: list[dict[str, Any]]


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Make torch keep the scalars of the state (`step`, `eta`, `mu`, `mu_product`) in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def start(law: Law) -> Array:
    """Return the parameter before the first window: (2, 2), or (4,) for a law of a vector."""
    return _shaped(law, np.array(_MATRIX))


def _shaped(law: Law, matrix: Array) -> Array:
    return matrix.ravel() if law.of == "vector" else matrix


def gradient(law: Law, window: int) -> Array:
    """Return the gradient of a window that reaches the parameter.

    None for the elements that a sparse one lacks.
    """
    values = np.array(HADAMARD) * (FALLING if law.reads_none_as_zero else SIZES)[window]
    if law.sparse:
        values = values.astype(object)
        values[window % 2] = None
    return _shaped(law, values)


def expected_gradients(law: Law, windows: Sequence[str], mode: ResetMode) -> list[Array | None]:
    """Return the gradient that each step must find, from what a reset leaves and a backward adds.

    A release leaves None. Zeroing leaves zeros once there has been a gradient, or from the start
    where the loop allocates one. A frozen parameter keeps what the reset has left.
    """
    found, present = list[Array | None](), mode.preallocate is not None
    for w, window in enumerate(windows):
        full = gradient(law, w)
        zeros = np.full(full.shape, None) if law.sparse else 0 * full
        if window == REACHED:
            present = True
            found.append(full)
        elif law.reads_none_as_zero:
            # the first row is a parameter that every window reaches
            found.append(full * [[1], [0]])
        else:
            found.append(zeros if present and not mode.releases and window != ABSENT else None)
    return found


def train(
    law: Law, variant: Settings, windows: Sequence[str], mode: ResetMode, **implementation: Any
) -> Run:
    """Train in windows of two micro-batches, and return what each step found and left.

    Args:
        law: of the optimizer.
        variant: settings that differ from torch's defaults.
        windows: for each window one of `REACHED`, `MISSED`, `FROZEN`, `ABSENT`.
        mode: how gradients are reset after each step.
        implementation: further settings, such as `foreach=True`.
    """
    with float64_by_default(), torch.sparse.check_sparse_tensor_invariants():
        return _train(law, {**variant, **implementation}, windows, mode)


def _train(law: Law, settings: Settings, windows: Sequence[str], mode: ResetMode) -> Run:
    # L-BFGS has one state for all parameters: the first row of the matrix is one that every window
    # reaches
    rows = [
        torch.nn.Parameter(torch.tensor(row))
        for row in (start(law) if law.reads_none_as_zero else ())
    ]
    subject = rows[1] if rows else torch.nn.Parameter(torch.tensor(start(law)))
    other = rows[0] if rows else torch.nn.Parameter(torch.zeros(2, 2))
    late = windows[0] == ABSENT
    optimizer = getattr(torch.optim, law.optimizer)(
        [other] if late else [other, subject], **settings
    )
    if mode.preallocate is not None:
        mode.preallocate([other, subject])
    done = Run(dict(optimizer.param_groups[0]), [], [], [])
    for w, window in enumerate(windows):
        if late and window != ABSENT:
            optimizer.add_param_group({"params": [subject]})
            late = False
        subject.requires_grad_(window not in (FROZEN, ABSENT))
        for half in range(2):  # the other micro-batch reaches the other parameter alone
            reached = [subject] if window != MISSED and half else []
            _backward(law, w, other, reached, gradient(law, w))
        done.seen.append(_seen(law, subject, other))
        optimizer.step(_closure) if law.reads_none_as_zero else optimizer.step()
        both = torch.stack([other, subject]) if rows else subject
        done.thetas.append(both.detach().numpy().copy())
        state = optimizer.state[other if rows else subject]
        done.states.append(
            {
                name: _plain(value)
                for name, value in state.items()
                if name not in ("al", "prev_loss")
            }
        )
        mode.reset([other, subject], optimizer)  # type: ignore[misc]
    return done


def _closure() -> float:
    return 0.0


def _backward(
    law: Law, window: int, other: torch.Tensor, reached: Sequence[torch.Tensor], full: Array
) -> None:
    if law.sparse:
        row = torch.tensor([1 - window % 2])
        given = torch.tensor(full[row].astype(float))
        rows = [torch.nn.functional.embedding(row, p, sparse=True) for p in (other, *reached)]
        loss = rows[0].sum() + sum(((part * given).sum() for part in rows[1:]), torch.zeros(()))
    elif law.reads_none_as_zero:
        mine, its = torch.tensor(full)
        loss = (other * mine / 2).sum() + sum(((p * its).sum() for p in reached), torch.zeros(()))
    else:
        loss = other.sum() + sum(((p * torch.tensor(full)).sum() for p in reached), torch.zeros(()))
    loss.backward()


def _seen(law: Law, subject: torch.Tensor, other: torch.Tensor) -> Array | None:
    if law.reads_none_as_zero:
        rows = [torch.zeros_like(p) if p.grad is None else p.grad for p in (other, subject)]
        return torch.stack(rows).numpy().copy()
    if subject.grad is None:
        return None
    if not law.sparse:
        return subject.grad.numpy().copy()
    found = np.full(subject.shape, None)
    entries = subject.grad.coalesce()
    for row, values in zip(entries.indices()[0].tolist(), entries.values().tolist(), strict=True):
        found[row] = values
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_plain(part) for part in value] if isinstance(value, list) else value


SLACK = 4
"""Factor on the running error bound, as torch orders the operations of a formula otherwise than the recurrence does.

It fuses products with sums, and writes `a + w (b - a)` for `(1 - w) a + w b`: up to twice the operations, and results
in between of up to twice the size. A bound of 0 stays 0.
"""
PARAMETER = "parameter"


@dataclass(frozen=True)
class Difference:
    """The worst element of one entry after one window.

    Attributes:
        window: its index.
        entry: `PARAMETER`, or a key of the optimizer's state.
        error: |observed - predicted|; infinite where the entry is missing or has another shape.
        allowed: what rounding explains; 0 where every operation is exact.
    """

    window: int
    entry: str
    error: float
    allowed: float

    @property
    def is_wrong(self) -> bool:
        """Whether rounding does not explain the error."""
        return not self.error <= self.allowed


def differences(predicted: Sequence[Point], run: Run) -> list[Difference]:
    """Return the difference of every entry after every window."""
    found = []
    for w, (theta, state) in enumerate(predicted):
        observed = {PARAMETER: run.thetas[w], **run.states[w]}
        expected = {PARAMETER: theta, **state}
        if not state and "step" in observed and not observed["step"]:
            # Adagrad makes its state before the first step
            observed = {PARAMETER: observed[PARAMETER]}
        found += [
            _difference(w, name, expected.get(name), observed.get(name))
            for name in expected.keys() | observed
        ]
    return found


def _numbers(entry: Any) -> list[Rounded]:
    """Return the elements of an entry; nothing where there is none."""
    elements = np.array([] if entry is None else entry, dtype=object).ravel()
    return [e if isinstance(e, Rounded) else Rounded(Decimal(e)) for e in elements]


def _difference(window: int, entry: str, expected: Any, observed: Any) -> Difference:
    mine, other = _numbers(expected), _numbers(observed)
    if expected is None or observed is None or len(mine) != len(other):
        return Difference(window, entry, float("inf"), 0.0)
    pairs = zip(mine, other, strict=True)
    found = [(abs(o.value - e.value), SLACK * UNIT_ROUNDOFF * e.error) for e, o in pairs]
    error, allowed = max(
        found, key=lambda pair: pair[0] - pair[1], default=(Decimal(0), Decimal(0))
    )
    return Difference(window, entry, float(error), float(allowed))


WINDOWS = (REACHED, REACHED, MISSED)
ELEMENT = 2
"""The element of the parameter, counted by rows, whose values the table shows."""
ZERO, NONE = RESET_MODES["zero_"], RESET_MODES["set_to_none"]


@dataclass(frozen=True)
class Row:
    """One optimizer under one choice of settings.

    Attributes:
        optimizer: name of the law: the class in `torch.optim`, and "of a vector" where vectors have
            rows of their own.
        variant: name of the settings.
        settings: that differ from torch's defaults.
        law: what a zero gradient does, as formulas.
        before: an element of the parameter after two windows that reach it.
        after_zero: the same after a window that misses it, with a gradient of zeros.
        after_none: the same with None.
        zero_changes: what the step of that window changed under zeros: `parameter`, or entries of
            the state.
        none_changes: the same under None.
        same: whether parameter and state are the same under both.
        to_the_bit: whether the prediction allows no error, since every operation is exact.
        as_predicted: whether torch did what its law predicts, in every window and entry.
    """

    optimizer: str
    variant: str
    settings: dict[str, Any]
    law: str
    before: float
    after_zero: float
    after_none: float
    zero_changes: tuple[str, ...]
    none_changes: tuple[str, ...]
    same: bool
    to_the_bit: bool
    as_predicted: bool

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON-ready data."""
        return asdict(self)


def rows(law: Law) -> list[Row]:
    """Return a row for each variant of an optimizer, from runs of torch."""
    return [_row(law, variant) for variant in law.variants]


def _row(law: Law, variant: str) -> Row:
    settings = dict(law.variants[variant])
    zero, none = (train(law, settings, WINDOWS, mode) for mode in (ZERO, NONE))
    compared = [
        difference
        for run, mode in ((zero, ZERO), (none, NONE))
        for difference in differences(
            predict(law, run.settings, start(law), expected_gradients(law, WINDOWS, mode)), run
        )
    ]
    return Row(
        law.name,
        variant,
        settings,
        law.zero,
        before=float(zero.thetas[1].flat[ELEMENT]),
        after_zero=float(zero.thetas[2].flat[ELEMENT]),
        after_none=float(none.thetas[2].flat[ELEMENT]),
        zero_changes=changes(law, zero),
        none_changes=changes(law, none),
        same=_equal([zero.thetas[2], zero.states[2]], [none.thetas[2], none.states[2]]),
        to_the_bit=not any(d.allowed for d in compared),
        as_predicted=not any(d.is_wrong for d in compared),
    )


def changes(law: Law, run: Run) -> tuple[str, ...]:
    """Return what the last step changed: `parameter`, then entries of the state in alphabetic
    order.
    """
    own = slice(1, None) if law.reads_none_as_zero else slice(None)
    before, after = ({PARAMETER: run.thetas[w][own], **run.states[w]} for w in (-2, -1))
    changed = [name for name in after if not _equal(before.get(name), after[name])]
    return tuple(sorted(changed, key=lambda name: (name != PARAMETER, name)))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(_equal(one[k], other[k]) for k in one)
        )
    if isinstance(one, Sequence):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(np.array_equal(one, other))
