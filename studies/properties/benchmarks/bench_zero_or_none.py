"""What zeros do to a parameter that a window does not reach, and None does not: the table of the
report.

    pytest studies/properties/benchmarks/bench_zero_or_none.py [--bench-records DIR]

Each optimizer and choice of settings becomes a record under `DIR/records/zero-or-none.jsonl`.
Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from studies.zero_or_none import rows
from studies.zero_or_none_laws import LAWS


@pytest.mark.parametrize("name", LAWS)
def test_rows(keep: Callable[..., None], name: str) -> None:
    for row in rows(LAWS[name]):
        keep({**row.to_json(), "device": "cpu"}, "zero-or-none")
        assert row.as_predicted, row
