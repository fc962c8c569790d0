"""The assertions that the properties share.

Each takes keyword arguments, hides itself from tracebacks, and says what was observed, what it
should be and for which case.
"""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch

from gradcheck_suite import Verdict
from gradcheck_suite.core.comparison import Difference

Gradients = dict[str, torch.Tensor | None]


def assert_equal(*, what: str, observed: Any, expected: Any, case: Any) -> None:
    """Fail unless two values are equal by `==`."""
    __tracebackhide__ = True
    assert observed == expected, f"{what}={observed!r}, but should be {expected!r} [{case!r}]"


def differing(*, observed: Gradients, expected: Gradients, to_the_bit: bool = False) -> list[str]:
    """Return the parameters whose gradients differ.

    Args:
        observed: gradients by parameter.
        expected: gradients by parameter.
        to_the_bit: whether every bit counts, and None is not zeros. Otherwise gradients differ by
            `==`, where None equals zeros and NaN equals NaN.
    """
    same = _same_bits if to_the_bit else _same_values
    return [name for name in expected if not same(observed[name], expected[name])]


def _same_values(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        present = b if a is None else a
        return present is None or not bool(present.count_nonzero())
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) and torch.equal(
        a.isnan(), b.isnan()
    )


def _same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return _bits(a) == _bits(b)


def _bits(gradient: torch.Tensor | None) -> bytes | None:
    return (
        None if gradient is None else gradient.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    )


def assert_gradients_equal(
    *, what: str, observed: Gradients, expected: Gradients, case: Any, to_the_bit: bool = False
) -> None:
    """Fail where gradients differ; see `differing`."""
    __tracebackhide__ = True
    wrong = differing(observed=observed, expected=expected, to_the_bit=to_the_bit)
    if wrong:
        values = "; ".join(
            f"{name}={observed[name]}, but should be {expected[name]}" for name in wrong
        )
        pytest.fail(
            f"{what}: the gradients of {wrong} differ, but should be equal [{case!r}]: {values}"
        )


def assert_within_rounding(*, what: str, difference: Difference, case: Any) -> None:
    """Fail where a difference exceeds what rounding allows."""
    __tracebackhide__ = True
    assert difference.ratio <= 1, (
        f"{what}: error={difference.error:.3g}, but should be at most {difference.allowed:.3g} [{case!r}]"
    )


def assert_holds(*, verdict: Verdict, name: str = "the loop") -> None:
    """Fail where a loop is violated or the references disagree.

    Reject what this machine cannot judge.
    """
    __tracebackhide__ = True
    case = verdict.case
    if verdict.skipped:
        hypothesis.event(f"skipped: {verdict.skipped[:60]}")
        # every operation of the catalogue exists in float64
        assert case.dtype != "float64", (
            f"{name}: skipped ({verdict.skipped}), but should be judged [{case!r}]"
        )
        hypothesis.reject()
    assert verdict.finding is None, (
        f"{name}: torch and JAX disagree, but should agree: {verdict.finding} [{case!r}]"
    )
    if (violation := verdict.violation) is not None:
        lines = (
            f"{name}: {violation.kind} ({violation.diagnosis}): {violation.explanation}",
            *violation.details,
        )
        pytest.fail("\n".join((*lines, repr(case))))
