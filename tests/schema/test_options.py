"""Options of a verification: what they accept, and the keyword arguments of `verify` that set them."""

from __future__ import annotations

import pytest

from gradcheck_suite import UsageError, verify
from gradcheck_suite.loops import MODES
from gradcheck_suite.schema.options import VerifyOptions


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"examples": 0}, "examples must be a positive integer, got 0"),
        ({"examples": True}, "examples must be a positive integer, got True"),
        ({"ranks": True}, "ranks must be a number from 1 to"),
        ({"seed": "1"}, "seed must be an integer, got '1'"),
        ({"seed": True}, "seed must be an integer, got True"),
        ({"time_limit_s": True}, "time_limit_s must be a positive number of seconds or None, got True"),
        ({"dtype": "int8"}, "dtype must be one of float64, float32, bfloat16, float16; got 'int8'"),
        ({"device": "tpu"}, "device must be one of cpu, cuda; got 'tpu'"),
        ({"optimizer": "lion"}, "optimizer must be one of sgd, momentum, .*, normalized; got 'lion'"),
        ({"assumes": ("luck",)}, "assumption must be one of equal-micro-batches, .*, no-layer:KIND; got 'luck'"),
        ({"autocast": "tf32"}, "autocast must be one of bfloat16, float16; got 'tf32'"),
        ({"time_limit_s": 0}, "time_limit_s must be a positive number of seconds or None, got 0"),
        ({"second_opinion_s": -1}, "second_opinion_s must be a number of seconds, 0 or more, got -1"),
        ({"quiet_loop": "yes"}, "quiet_loop must be True or False, got 'yes'"),
        ({"exampels": 3}, "expected some of examples, seed, dtype, .*; got exampels"),
    ],
)
def test_a_wrong_option_is_one_usage_error(fields, says):
    with pytest.raises(UsageError, match=says):
        VerifyOptions().replace(**fields)
    with pytest.raises(UsageError, match=says):
        verify(MODES["zero_"], **fields)


def test_keyword_arguments_override_options():
    options = VerifyOptions(examples=3, assumes=("whole-windows",))
    results = [verify(MODES["zero_"], options, seed_value=7), verify(MODES["zero_"], options, examples=2)]
    assert [result.cases for result in results] == [3, 2]
    assert {result.assumes for result in results} == {("whole-windows",)}


def test_the_seed_draws_the_cases():
    def drawn(**fields):
        verdicts = []
        verify(MODES["zero_"], VerifyOptions(examples=3), progress=verdicts.append, **fields)
        return [verdict.case for verdict in verdicts]

    assert drawn(seed=7) == drawn(seed_value=7) != drawn(seed=8)
