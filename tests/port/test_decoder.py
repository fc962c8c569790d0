"""A decoder and faults planted in its port: each is found, placed and named, and the sound port is
not blamed.
"""

from __future__ import annotations

import pytest

from gradcheck_suite.port.compare import judge_function
from tests.port.pairs import decoder_pair

FAULTS = [
    ("eps", "norm"),
    ("scale", "attention"),
    ("mask-diagonal", "attention"),
    ("missing-mask", "attention"),
    ("gelu-approximation", ""),
    ("missing-term", ""),
    ("index-offset", "places"),
    ("weight-transposed", "attention.out"),
    ("not-loaded", "last"),
    ("stop-gradient", "attention"),
]


@pytest.mark.share(4)
def test_a_sound_port_holds_and_says_which_planted_fault_was_found():
    result = judge_function(decoder_pair, "decoder")
    assert result.verdict == "holds", str(result)
    assert {"outputs", "loss", "gradients"} <= set(result.judged)
    assert "found, off by" in result.planted


@pytest.mark.parametrize(
    ("fault", "place"),
    [pytest.param(*one, marks=[pytest.mark.full] * (i % 2)) for i, one in enumerate(FAULTS)],
)
def test_a_planted_fault_is_found_placed_and_named(fault, place):
    result = judge_function(lambda: decoder_pair(fault), fault)
    first = result.findings[0]
    assert (first.place, first.cause) == (place, fault), str(result)
    assert len(result.findings) == 1
