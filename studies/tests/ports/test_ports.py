"""The zoo of ports: its table names what its functions plant, and each fault is found, each equal
form left alone.
"""

from __future__ import annotations

import inspect

import pytest

from gradcheck_suite.core.causes import CAUSES
from gradcheck_suite.port.result import PortFinding, PortResult
from studies.ports.planted import TABLE, Truth
from studies.ports.scoreboard import (
    Row,
    label,
    largest_difference,
    line,
    run,
    summary,
    tolerances,
    variants,
)
from studies.ports.zoo import ARCHITECTURES

PAIRS = {label(*pair): pair for pair in variants(ARCHITECTURES.values())}
SAMPLE = ["swiglu/gelu", "vae/softplus"]
WITHIN = {
    "accepted-gelu/plain": 2e-3,  # the tanh form of gelu, which the pair accepts
    "moving-average/float32": 2.0**-20,  # an average that is kept in float32
}
"""How far the outputs of sound forms may differ, where these do not compute the same in float64."""
OF_TIES = "chosen/plain"
"""The form that chooses among equal elements, where torch and JAX take others."""
FORMS = [
    name for name, (one, variant) in PAIRS.items() if variant not in one.faults and name != OF_TIES
]


def test_every_row_of_the_table_is_planted_by_its_function_and_named_by_causes():
    assert {row[0] for row in TABLE} == set(PAIRS)
    for name, (one, variant) in PAIRS.items():
        assert variant == "plain" or f'"{variant}"' in inspect.getsource(one.make), name
        assert variant not in one.faults or set(one.faults[variant].causes) <= CAUSES.keys(), name


def test_the_zoo_is_as_large_as_it_is_to_be():
    assert len(ARCHITECTURES) >= 20
    assert len(FORMS) >= 40
    assert len(PAIRS) - len(FORMS) >= 80


EPSILON = Truth(("norm",), ("eps",))


def row(*findings: tuple[str, str], truth: Truth | None = EPSILON, **changes: object) -> Row:
    found = tuple(PortFinding.of("forward", place, cause, "") for place, cause in findings)
    return Row(
        "one/fault", truth, PortResult("one/fault", violations=found, **changes), 1.0, usual=True
    )


def test_a_right_name_counts_at_the_right_place_only():
    right, elsewhere = row(("norm", "eps")), row(("head", "eps"))
    assert (right.placed, right.named, right.misleading, right.passed) == (True, True, False, True)
    assert (elsewhere.placed, elsewhere.named, elsewhere.misleading, elsewhere.passed) == (
        False,
        False,
        True,
        False,
    )
    assert "MISLEADING, place?" in line(elsewhere)


def test_an_unknown_cause_is_no_wrong_one_and_a_miss_never_passes():
    unknown, missed = row(("norm", "unknown")), row()
    assert (unknown.unknown, unknown.misleading, unknown.passed) == (True, False, True)
    assert (missed.found, missed.passed) == (False, False)
    assert not row(unjudged="no time").passed


def test_a_sound_pair_that_is_blamed_is_counted():
    blamed = row(("norm", "eps"), truth=None)
    assert not blamed.passed
    assert "0 of 1 sound pairs not blamed; blamed: one/fault" in summary([blamed])
    assert row(truth=None).passed


@pytest.mark.full
def test_a_missing_bias_that_starts_at_zero_passes_every_tolerance():
    chosen = [PAIRS["swiglu/last_bias"], PAIRS["swiglu/exchanged"], PAIRS["swiglu/plain"]]
    assert largest_difference(*chosen[0], "float32") < 1e-6
    assert largest_difference(*chosen[1], "float32") > 1e-2
    table = {row.check: row for row in tolerances(chosen)}
    for limit in ("1e-5", "1e-4", "1e-3"):
        row = table[f"outputs in float32, {limit}"]
        assert (row.passes, row.faults, row.blamed, row.sound) == (1, 2, 0, 1)


@pytest.mark.share(4)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_fault_is_found_and_an_equal_form_holds(name):
    result = run(*PAIRS[name])
    assert result.passed, line(result)


@pytest.mark.full
@pytest.mark.parametrize("name", FORMS)
def test_an_equal_form_is_equal(name):
    """By a comparison that shares nothing with the judge."""
    assert largest_difference(*PAIRS[name], "float64") < WITHIN.get(name, 1e-10)


@pytest.mark.full
@pytest.mark.parametrize("name", PAIRS)
def test_every_fault_is_found_and_every_equal_form_holds(name):
    result = run(*PAIRS[name])
    assert result.passed, line(result)
