"""Planted errors are as large as they say, where they say.

What finds them is what arithmetic says.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from gradcheck_suite.core.comparison import Layout, worst_difference
from studies.calibration import PLACES, Sound, smallest_found
from studies.tally import NEVER, OURS

LAYOUT = Layout(("weight", "bias"), ((2, 2), (2,)))
GRADIENT = np.array([1.0, -2.0, 0.0, 0.5, 0.0, 4.0])
FIRST = np.array([1.0, -3.0, 0.0, 0.25, 0.0, 1.0])


def _sound(gradient=GRADIENT, dtype="float64") -> Sound:
    return Sound(gradient, [FIRST, gradient - FIRST], LAYOUT, dtype)


def _directions(place: str, sound: Sound) -> set[tuple[float, ...]]:
    return {tuple(PLACES[place](sound, np.random.default_rng(seed)).tolist()) for seed in range(40)}


def test_every_place_is_where_it_says():
    sound = _sound()
    assert _directions("everywhere", sound) == {tuple(GRADIENT)}
    assert _directions("one micro-batch", sound) == {tuple(FIRST), tuple(GRADIENT - FIRST)}
    weight, bias = GRADIENT * (np.arange(6) < 4), GRADIENT * (np.arange(6) >= 4)
    assert _directions("one parameter", sound) == {tuple(weight), tuple(bias)}
    assert _directions("the largest element", sound) == {(0, 0, 0, 0, 0, 4.0)}
    one_each = {tuple(np.where(np.arange(6) == i, GRADIENT, 0)) for i in (0, 1, 3, 5)}
    assert _directions("an element not 0", sound) == one_each


@pytest.mark.parametrize("place", PLACES)
def test_there_is_nothing_to_err_in_where_everything_is_0(place):
    zero = Sound(np.zeros(6), [np.zeros(6)], LAYOUT, "float64")
    assert PLACES[place](zero, np.random.default_rng(0)) is None


def test_a_parameter_or_micro_batch_of_zeros_is_never_chosen():
    gradient = np.array([1.0, 2.0, 3.0, 4.0, 0.0, 0.0])
    sound = Sound(gradient, [gradient, np.zeros(6)], LAYOUT, "float64")
    for place in ("one parameter", "one micro-batch"):
        assert _directions(place, sound) == {tuple(gradient)}


def test_a_planted_error_has_its_size():
    planted = _sound().with_error(GRADIENT, 2.0**-10)
    assert (planted[GRADIENT != 0] / GRADIENT[GRADIENT != 0]).tolist() == [1 + 2.0**-10] * 4
    assert (planted[GRADIENT == 0] == 0).all()


@pytest.mark.parametrize(("dtype", "digits"), [("bfloat16", 7), ("float16", 10), ("float32", 23)])
def test_what_no_gradient_of_the_dtype_can_hold_is_rounded_away(dtype, digits):
    sound = _sound(dtype=dtype)
    assert (sound.with_error(GRADIENT, 2.0**-digits) == GRADIENT * (1 + 2.0**-digits)).all()
    # half of that is as near to no error, which is even
    assert (sound.with_error(GRADIENT, 2.0 ** -(digits + 1)) == GRADIENT).all()


def _window(allowed: float) -> SimpleNamespace:
    """A window whose bound is a share of the largest element, and whose large batch has no error at
    all.
    """
    bound = np.full(6, allowed * 4.0)
    return SimpleNamespace(
        bound=SimpleNamespace(large_batch=GRADIENT),
        expected=GRADIENT,
        compare=lambda observed: worst_difference(observed, GRADIENT, bound),
    )


def test_each_rule_finds_what_is_above_its_tolerance():
    found = smallest_found(
        _sound(dtype="float32"), _window(0.01), _directions_of("the largest element")
    )
    assert (
        found
        == {
            OURS: 6,  # 2**-6 is 0.016, 2**-7 is 0.008
            "torch.testing.assert_close": 18,  # 4 s above 4 * 1.3e-6 + 1e-5: s above 3.80e-6, and 2**-18 is 3.81e-6
            "chex.assert_trees_all_close": 19,  # s above 1e-6
            "twice the reference's rmse": 23,  # anything that float32 can hold, since the large batch is exact
            "NNSmith 1e-2/1e-3": 6,  # s above 1e-2 + 2.5e-4
        }
    )


def _directions_of(place: str) -> np.ndarray:
    return PLACES[place](_sound(), np.random.default_rng(0))


def test_an_error_that_no_size_up_to_1_shows_is_never_found():
    found = smallest_found(
        _sound(dtype="float32"), _window(1.01), _directions_of("the largest element")
    )
    assert found[OURS] == NEVER


def test_a_size_counts_only_with_all_larger_ones():
    """A rule that misses 1/2 finds 1 and nothing smaller, whatever it says of 1/4."""
    window = _window(0.01)
    blind = np.array([6.0])
    sighted = window.compare
    window.compare = lambda v: (
        worst_difference(v[:0], v[:0], v[:0]) if v[5] == blind[0] else sighted(v)
    )
    assert smallest_found(_sound(), window, _directions_of("the largest element"))[OURS] == 0
