"""What each wrapper for several ranks communicates in a window, under each reset mode, beside its
law.

    pytest studies/properties/benchmarks/bench_traffic.py --full [--bench-records DIR]

Collectives and bytes are counted, so a busy machine does not disturb them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from gradcheck_suite.loops.ranks import RANK_LOOPS
from studies.traffic import traffic_rows


@pytest.mark.full
def test_traffic(benchmark: Any, keep: Callable[..., None]) -> None:
    """Every window takes exactly the collectives and bytes that its wrapper's law predicts."""
    rows = benchmark.pedantic(traffic_rows)
    assert {row.loop for row in rows} == set(RANK_LOOPS)
    for row in rows:
        keep({"device": "cpu", **asdict(row)}, kind="traffic")
        assert row.observed == row.predicted, row
