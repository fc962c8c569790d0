"""Counts add up, survive JSON, and mean what their names say."""

from __future__ import annotations

import json
import math
from collections import Counter
from statistics import NormalDist

import pytest

from gradcheck_suite.core.comparison import UNIT_ROUNDOFF
from studies.tally import (
    BINS,
    NEVER,
    Curve,
    Spread,
    Tally,
    curve_from_json,
    exponents,
    share_found,
    size_found,
    spread_from_json,
    surely,
    tally_from_json,
)


def _spread(*ratios: float) -> Spread:
    spread = Spread()
    for ratio in ratios:
        spread.note(ratio)
    return spread


def _through_json(data):
    return json.loads(json.dumps(data, allow_nan=False))


def test_quantiles_are_right_to_the_width_of_a_bin():
    spread = _spread(*(i / 1000 for i in range(1000)))
    for share in (0.1, 0.5, 0.99):
        assert 0 <= spread.quantile(share) - share <= 1 / BINS
    assert spread.largest == 0.999


def test_no_quantile_is_above_the_largest():
    assert _spread(0.01, 0.02).quantile(0.99) == 0.02
    assert Spread().quantile(0.5) is None


def test_ratios_beyond_the_bound_are_in_the_last_bin():
    assert _spread(1.0, 7.0, float("inf")).counts[-1] == 3


def test_spreads_add_up_and_survive_json():
    both = _spread(0.1)
    both.add(_spread(0.1, 0.9))
    assert (sum(both.counts), both.largest) == (3, 0.9)
    assert spread_from_json(_through_json(both.to_json())) == both


def _tally() -> Tally:
    tally = Tally(
        checks=5, cases=1, elements=40, skipped=Counter({"why": 2}), alarms=[{"loop": "zero_"}]
    )
    tally.note_ratio({"linear"}, 0.25)
    tally.layers["linear"] += 1
    tally.rivals["NNSmith 1e-2/1e-3"] += 1
    tally.autocast, tally.rivals_autocast = 1, Counter({"NNSmith 1e-2/1e-3": 1})
    tally.drawn_on.note(0.5)
    return tally


def test_a_tally_survives_json():
    tally = _tally()
    assert tally_from_json(_through_json(tally.to_json())) == tally


def test_tallies_add_up():
    total = _tally()
    total.add(_tally())
    assert (total.checks, total.judged, total.cases, total.elements, total.autocast) == (
        10,
        6,
        2,
        80,
        2,
    )
    assert total.alarms == [{"loop": "zero_"}] * 2
    assert total.skipped == Counter({"why": 4})
    assert sum(total.over["linear"].counts) == sum(total.over[""].counts) == 2


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF)
def test_planted_errors_go_from_one_down_to_a_unit_roundoff(dtype):
    sizes = [2.0**-k for k in exponents(dtype)]
    assert (sizes[0], sizes[-1]) == (1, UNIT_ROUNDOFF[dtype])


def test_the_size_found_in_99_percent_leaves_one_case_in_a_hundred():
    counts = Counter({10: 90, 5: 9, NEVER: 1})
    assert share_found(counts, 5) == 0.99
    assert size_found(counts) == 2.0**-5
    assert size_found(counts, 0.9) == 2.0**-10
    assert size_found(Counter({10: 98, NEVER: 2})) is None
    assert size_found(Counter({0: 98, 3: 2})) == 1


@pytest.mark.parametrize(("found", "cases"), [(1000, 1000), (990, 1000), (198, 200), (25, 25)])
def test_the_lower_bound_is_where_the_counted_share_is_at_the_95_percent_quantile_of_the_score(
    found, cases
):
    low, share = surely(found / cases, cases), found / cases
    assert low < share
    assert (share - low) / math.sqrt(low * (1 - low) / cases) == pytest.approx(
        NormalDist().inv_cdf(0.95)
    )


def test_curves_add_up_and_survive_json():
    curve = Curve(cases=1, skipped=Counter({"why": 1}))
    curve.note("everywhere", {"gradcheck-suite": 7, "other": NEVER})
    total = curve_from_json(_through_json(curve.to_json()))
    assert total == curve
    total.add(curve)
    assert total.cases == 2
    assert total.smallest["everywhere"]["other"] == Counter({NEVER: 2})
