"""How often rounding errors are drawn before two gradients differ: as often as it takes, and never
more.
"""

from __future__ import annotations

import numpy as np
import pytest

from gradcheck_suite.core.comparison import (
    DRAWS,
    FEW_DRAWS,
    MANY_DRAWS,
    RARE_DRAWS,
    Comparison,
    Layout,
)
from gradcheck_suite.reference.large_batch import compare_within, is_rarely_rounding

pytestmark = pytest.mark.usefixtures("many_draws")
QUICK, SUMMING = 0.25, 0.5
"""The parts of the bound that need no draws."""


class _Errors:
    """Rounding errors that are known for each number of draws; `asked` has the numbers in order."""

    def __init__(self, sizes, unevenness=(1.0, 1.0)):
        self._sizes, self._unevenness, self.asked = sizes, np.array(unevenness), []

    def noise(self, draws):
        self.asked.append(draws)
        return np.full(2, self._sizes.get(draws, 0.0))

    def likely(self, draws):
        self.asked.append(("likely", draws))
        return np.full(2, self._sizes.get("likely", 0.0))

    def unevenness(self):
        return self._unevenness


class _Bound:
    def __init__(self, errors, of_parts=None, length=2):
        self.quick, self.summing = np.full(length, QUICK), np.full(length, SUMMING)
        self.errors, self.errors_of_parts = errors, of_parts


def _evidence(error, length=2):
    """Return a comparison whose second element is wrong by an error; its first is right."""
    observed = np.zeros(length)
    observed[1] = error
    return Comparison(
        Layout(("w",), ((length,),)), np.zeros(length), observed, np.full(length, QUICK)
    )


def test_what_the_quick_bound_allows_needs_no_draw():
    evidence, errors = _evidence(QUICK), _Errors({})
    assert compare_within(_Bound(errors), evidence) is evidence
    assert errors.asked == []


FIRST = ("likely", FEW_DRAWS)


@pytest.mark.parametrize(
    ("sizes", "asked", "ratio"),
    [
        # an error of 1.5, of which 0.5 is allowed before any draw
        ({"likely": 1.0}, [FIRST], 1.0),
        ({"likely": 2.5}, [FIRST], 0.5),
        ({"likely": 0.5, DRAWS: 1.0}, [FIRST, DRAWS], 1.0),
        ({"likely": 0.5, DRAWS: 0.5, MANY_DRAWS: 1.0}, [FIRST, DRAWS, MANY_DRAWS], 1.0),
        ({"likely": 0.5, DRAWS: 0.5, MANY_DRAWS: 0.25}, [FIRST, DRAWS, MANY_DRAWS], 2.0),
    ],
)
def test_more_is_drawn_until_it_is_allowed(sizes, asked, ratio):
    errors = _Errors(sizes)
    found = compare_within(_Bound(errors), _evidence(1.5))
    assert errors.asked == asked
    assert found.ratio == ratio
    assert (found.observed[1], found.expected[1]) == (1.5, 0.0)


@pytest.mark.parametrize("roughly", [False, True])
def test_the_micro_batches_errors_are_drawn_where_the_large_batchs_do_not_suffice(roughly):
    def ratio(error, **options):
        draws = ("likely", FEW_DRAWS, DRAWS, MANY_DRAWS)
        errors, of_parts = (_Errors(dict.fromkeys(draws, size)) for size in (1.0, 3.0))
        found = compare_within(
            _Bound(errors, of_parts), _evidence(error), roughly=roughly, **options
        )
        return found.ratio, bool(of_parts.asked)

    assert ratio(1.5) == (1.0, False)
    assert ratio(0.75) == (0.5, False)
    assert ratio(3.5) == (1.0, True)
    assert ratio(1.75) == (0.5, True)
    found, asked = ratio(3.5, accumulated=False)
    assert found > 1
    assert not asked
    assert ratio(7.0)[0] > 1


DOUBLED = [2**k * MANY_DRAWS for k in range(1, 12) if 2**k * MANY_DRAWS <= RARE_DRAWS]


@pytest.mark.parametrize("last", DOUBLED)
@pytest.mark.parametrize("of_parts", [False, True])
def test_a_rare_error_as_large_as_the_difference_is_rounding(last, of_parts):
    rare, other = _Errors({last: 1.0}, (1.0, 9.0)), _Errors({})
    bound = _Bound(other, rare) if of_parts else _Bound(rare)
    assert is_rarely_rounding(bound, _evidence(1.5))
    assert rare.asked == [draws for draws in DOUBLED if draws <= last]
    # both are drawn where one is uneven
    assert other.asked == (rare.asked if of_parts else [])


def test_a_rare_error_that_is_smaller_than_the_difference_is_none():
    errors = _Errors(dict.fromkeys(DOUBLED, 0.5), (1.0, 9.0))
    assert not is_rarely_rounding(_Bound(errors), _evidence(1.5))


@pytest.mark.parametrize(("uneven", "drawn"), [((9.0, 8.0), False), ((1.0, 8.001), True)])
def test_only_errors_that_are_uneven_at_the_wrong_element_are_drawn_on(uneven, drawn):
    errors = _Errors({RARE_DRAWS: 9.0}, uneven)
    assert is_rarely_rounding(_Bound(errors), _evidence(1.5)) is drawn
    assert bool(errors.asked) is drawn
