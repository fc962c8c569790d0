"""The parts that make text: numbers, copied definitions, functions with what is known put in."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradcheck_suite.script.copied_source import CopiedSource
from gradcheck_suite.script.writer import WIDTH, literal

NAMES = {"nan": math.nan, "inf": math.inf}
NESTED = st.recursive(st.floats(), lambda inner: st.lists(inner, min_size=1, max_size=9), max_leaves=30)


def bits(value):
    if isinstance(value, list):
        return [bits(entry) for entry in value]
    return "nan" if math.isnan(value) else struct.pack("d", value)


@given(NESTED, st.integers(0, 24), st.integers(0, 24))
def test_numbers_come_back_bit_for_bit(value, indent, before):
    text = literal(value, indent, before)
    assert bits(eval(text, NAMES)) == bits(value)
    assert all(len(line) <= WIDTH for line in text.splitlines()[1:])


def test_a_definition_comes_after_what_it_needs():
    sources = CopiedSource()
    sources.add("gradcheck_suite.catalogue.rows", "Branch")
    definitions = sources.take()
    firsts = [text.splitlines()[0] for text in definitions]
    assert firsts.index("class Routed(torch.nn.Module):") < firsts.index("class Branch(Routed):")
    assert any(line.startswith("THRESHOLD = ") for line in firsts)
    assert sources.imports() == "import torch"


def test_a_decorator_of_the_suites_own_is_left_out_and_a_foreign_one_kept():
    sources = CopiedSource()
    sources.add("gradcheck_suite.loops.reset_modes", "summed")
    sources.add("gradcheck_suite.core.contract", "TrainingRun")
    text = "\n\n".join(sources.take())
    assert "training_loop" not in text
    assert "@dataclass(frozen=True)\nclass TrainingRun" in text
    assert "from dataclasses import dataclass" in sources.imports()
    assert "def windows(" in text


def test_one_name_cannot_stand_for_two_things():
    sources = CopiedSource()
    sources.add("gradcheck_suite.catalogue.losses", "_weights")
    with pytest.raises(AssertionError, match=r"_weights of gradcheck_suite\.catalogue\.description and of another"):
        sources.add("gradcheck_suite.catalogue.description", "_weights")
