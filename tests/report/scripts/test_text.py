"""The parts that make text: numbers, copied definitions, functions with what is known put in."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradcheck_suite.report.scripts.literals import WIDTH, literal
from gradcheck_suite.report.scripts.losses import Known, body_text
from gradcheck_suite.report.scripts.sources import Sources

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
    sources = Sources()
    sources.add("gradcheck_suite.catalogue.routing", "Branch")
    definitions = sources.definitions
    firsts = [text.splitlines()[0] for text in definitions]
    assert firsts.index("class Routed(torch.nn.Module):") < firsts.index("class Branch(Routed):")
    assert any(line.startswith("THRESHOLD = ") for line in firsts)
    assert sources.imports == ["import torch"]


def test_a_decorator_of_the_suites_own_is_left_out_and_a_foreign_one_kept():
    sources = Sources()
    sources.add("gradcheck_suite.loops.sound", "summed")
    sources.add("gradcheck_suite.schema.contract", "TrainingRun")
    text = "\n\n".join(sources.definitions)
    assert "training_loop" not in text
    assert "@dataclass(frozen=True)\nclass TrainingRun" in text
    assert "from dataclasses import dataclass" in sources.imports
    assert "def windows(" in text


def test_one_name_cannot_stand_for_two_things():
    sources = Sources()
    sources.add("gradcheck_suite.catalogue.convolution", "_length")
    with pytest.raises(AssertionError, match=r"_length of gradcheck_suite\.catalogue\.pooling and of another"):
        sources.add("gradcheck_suite.catalogue.pooling", "_length")


def decided(options, out, batch, reduction):
    """Not copied."""
    weight, power = None, options["power"]
    if options["weight"] and reduction != "sum":
        weight = batch["weight"]
    if not out.ndim == 2:  # noqa: SIM201
        out = out.flatten()
    loss = (out - batch.get("target")) ** power
    return loss.mean(weight=weight, other=batch.get("other"))


def test_what_is_known_is_put_in():
    known = Known({"power": 2, "weight": False}, ("x", "target"), {"reduction": "mean", "out.ndim": 3})
    assert body_text(decided, known, Sources()).splitlines() == [
        "out = out.flatten()",
        'loss = (out - batch["target"]) ** 2',
        "return loss.mean()",
    ]
    known = Known({"power": 2, "weight": True}, ("target", "other"), {"reduction": "mean", "out.ndim": 2})
    assert body_text(decided, known, Sources(), convert="to(torch.float64)").splitlines() == [
        'weight = batch["weight"]',
        'loss = (out - batch["target"]) ** 2',
        'return loss.mean(weight=weight, other=batch["other"]).to(torch.float64)',
    ]


def undecided(options, out, batch, reduction):
    if out.sum() > 0:
        return out.mean()
    return out.sum()


def handed_on(options, out, batch, reduction):
    size = len(options)
    return out.mean() / size


@pytest.mark.parametrize(("function", "told"), [(undecided, "cannot decide out.sum"), (handed_on, "cannot be put in")])
def test_what_cannot_be_put_in_is_never_guessed(function, told):
    with pytest.raises(AssertionError, match=told):
        body_text(function, Known({}, ()), Sources())
