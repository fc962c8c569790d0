"""Memory in a process of its own, against bytes counted by hand."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gradcheck_suite.errors import UsageError
from gradcheck_suite.measure.memory import main

ASKED = {"parameters": 2_000_000, "layout": "few", "micro_batches": 2, "dtype": "float32", "device": "cpu"}


@pytest.mark.parametrize(("mode", "kept"), [("zero_", 8_000_000), ("set_to_none", 0)])
def test_gradients_between_steps_are_all_or_none(mode, kept):
    """Two weights of 1,000 x 1,000 float32: 8 MB; the peak is weights, sums and a fresh gradient of one of them."""
    found = json.loads(main(json.dumps({**ASKED, "mode": mode})))
    assert found["gradients_between"] == kept
    assert found["between"] == 8_000_000 + kept
    assert 8_000_000 + 8_000_000 + 4_000_000 <= found["peak"] < 20_200_000


def test_a_process_of_its_own_counts_resident_pages():
    command = [sys.executable, "-m", "gradcheck_suite.measure.memory", json.dumps({**ASKED, "mode": "zero_"})]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    if found["resident_peak"] is None:
        pytest.skip("the system reports no resident pages")
    assert found["resident_peak"] > found["peak"] - 8_000_000


def test_an_unknown_mode_is_refused():
    with pytest.raises(UsageError, match="mode must be one of zero_"):
        main(json.dumps({**ASKED, "mode": "zero"}))
