"""The audit on drawn programs: never a blame on a sound one, never silence on a faulty one."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from gradcheck_suite.auditing import evidence, judge, rules, weighing
from properties.audited_programs import FAULTS, Program, program_of, said
from properties.helpers import scaled


def programs(*, faulty: bool | None = None) -> st.SearchStrategy[Program]:
    """Draw programs: sound ones, or those with a fault, or both."""
    randoms = st.randoms(use_true_random=False)
    return randoms.map(lambda random: program_of(random, faulty=faulty))


@pytest.mark.share(4)
@settings(scaled(3))
@given(programs())
def test_a_sound_program_is_not_blamed_and_the_fault_of_a_faulty_one_is_named(program):
    assert not said(program)


@pytest.mark.full
@pytest.mark.parametrize("name", [*FAULTS])
def test_each_fault_is_named(name):
    program = program_of(Random(0), faulty=True, name=name)
    assert program.fault == name
    assert not said(program)


@pytest.mark.share(6)
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(10140, id="a running count divides .grad in bfloat16"),
        pytest.param(10314, id="the last count divides .grad in bfloat16"),
        pytest.param(20173, id="a sum over single items with a short window"),
        pytest.param(11187, id="weights are uncertain by their own size"),
        pytest.param(20060, id="the input of a reentrant checkpoint is refilled"),
        pytest.param(20063, id="weights of a checkpoint of one's own are written"),
        pytest.param(20154, id="weights of a reentrant checkpoint are written"),
        pytest.param(11380, id="weights that the program uses itself are written"),
        pytest.param(20370, id="an input before a custom function is refilled"),
        pytest.param(10025, id="means over K divided by K once more in bfloat16"),
        pytest.param(60065, id="a running count whose factor is rounded"),
        pytest.param(100296, id="a running count in windows of one pass, by another count"),
        pytest.param(100081, id="means that are kept and added up in bfloat16"),
        pytest.param(60090, id="parameters are put back before the step, under autocast"),
        pytest.param(10812, id="results that are left out, and at last not finite"),
        pytest.param(70070, id="two optimizers step on what a reset has left"),
        pytest.param(130039, id="clipped so far that coefficients are next to nothing"),
        pytest.param(130053, id="one row outside of modules is refilled"),
        pytest.param(130135, id="weights outside of the module that reads them are written"),
        pytest.param(140196, id="weights of the last layer of a checkpoint are written"),
        pytest.param(130363, id="signs of a kept sum in bfloat16 look like the last pass"),
        pytest.param(300428, id="a coarse coefficient beside exact ones"),
        pytest.param(300499, id="noise of which no pass explains anything"),
        pytest.param(603685, id="gradients of two steps are like each other, beside noise"),
        pytest.param(604067, id="rounding in bfloat16 hides a result beside a larger one"),
        pytest.param(400431, id="a count of the last pass, until gradients are not finite"),
    ],
)
def test_a_program_that_was_once_judged_wrongly(number):
    assert not said(program_of(Random(number)))


def _blind(*_):
    return rules.Decided()


@pytest.mark.parametrize(
    ("owner", "name", "broken", "faulty"),
    [
        (judge, "decide", _blind, True),
        pytest.param(weighing, "scales", lambda *_: [], True, marks=pytest.mark.full),
        pytest.param(
            evidence.WindowEvidence, "moved", lambda *_: True, False, marks=pytest.mark.full
        ),
    ],
)
def test_a_fault_of_the_audit_is_found_by_the_property(monkeypatch, owner, name, broken, faulty):
    monkeypatch.setattr(owner, name, broken)
    few = settings(max_examples=40, phases=[Phase.generate], database=None, derandomize=True)
    found = find(programs(faulty=faulty), lambda program: bool(said(program)), settings=few)
    assert bool(found.fault) == faulty
