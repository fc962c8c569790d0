"""The text of every layer and every loss, in plain torch, means what the catalogue means."""

from __future__ import annotations

import math
import re
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradcheck_suite.catalogue.tables import LAYERS, LOSSES
from gradcheck_suite.core.case import Case, Input, Layer, Loss, Plan, ProblemSpec, probe_case
from gradcheck_suite.core.results import Violation
from gradcheck_suite.loops.reset_modes import plain
from gradcheck_suite.reference.large_batch import parameter_gradients
from gradcheck_suite.run.instance import generated_instance
from gradcheck_suite.script import script_text, writer
from gradcheck_suite.strategies.cases import cases
from gradcheck_suite.strategies.plans import plans
from gradcheck_suite.verification.check import check
from studies.zoo.bugs.micro_batches import no_divide
from tests.script.alone import run_alone
from tests.script.problems import layer_problems, load, loss_problems

PLAN = Plan((1, 2), 2)
RELATIVE = 1e-12
KINDS = [*(("layer", name) for name in LAYERS), *(("loss", name) for name in LOSSES)]
NAMES = {"nan": math.nan, "inf": math.inf}
NESTED = st.recursive(
    st.floats(), lambda inner: st.lists(inner, min_size=1, max_size=9), max_leaves=30
)


def bits(value):
    if isinstance(value, list):
        return [bits(entry) for entry in value]
    return "nan" if math.isnan(value) else struct.pack("d", value)


@given(NESTED, st.integers(0, 24))
def test_numbers_come_back_bit_for_bit(value, column):
    assert bits(eval(writer.literal(value, column), NAMES)) == bits(value)


def problems(what, name):
    return list(layer_problems(name) if what == "layer" else loss_problems(name))


def assert_same(observed, expected):
    __tracebackhide__ = True
    expected = np.asarray(expected)
    largest = max(1.0, np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(np.asarray(observed), expected, rtol=0, atol=RELATIVE * largest)


def assert_text_means_the_same(case, *slip):
    """Compare a script's data, count, model and loss with the catalogue's torch.

    Return the script and its text.
    """
    __tracebackhide__ = True
    # the shortest script: without a loop
    text = script_text(
        no_divide, "planted", Violation("not-accumulable", "planted", "planted", case)
    )
    text = re.sub(*slip, text) if slip else text
    script, instance = load(text), generated_instance(case)
    for j, items in enumerate(script.MICRO_BATCHES):
        batch, own = script.batch_of(items), instance.batch(case.plan.items(j))
        assert batch.keys() == own.keys()
        assert all(
            torch.equal(batch[key], own[key]) and batch[key].dtype == own[key].dtype for key in own
        )
        assert script.count(batch).dtype == instance.count(own).dtype
        assert float(script.count(batch)) == float(instance.count(own))
    model, its = script.make_model(), instance.model()
    loss, expected = script.loss(model, batch), instance.problem.loss(its, own)
    assert_same(loss.detach(), expected.detach())
    observed, right = parameter_gradients(loss, model), parameter_gradients(expected, its)
    assert {n for n, g in observed.items() if g is None} == {
        n for n, g in right.items() if g is None
    }
    assert observed.keys() == right.keys()
    for parameter, gradient in right.items():
        if gradient is not None:
            assert_same(observed[parameter], gradient)
    return script, text


def assert_texts_mean_the_same(specs, *slip):
    __tracebackhide__ = True
    return [
        assert_text_means_the_same(Case(spec, PLAN, seed=seed), *slip)
        for seed, spec in enumerate(specs)
    ]


@pytest.mark.parametrize(
    ("what", "name"),
    [pytest.param(*kind, marks=[pytest.mark.full] * (i % 3 > 0)) for i, kind in enumerate(KINDS)],
)
def test_every_variant_means_what_the_catalogue_means(what, name):
    _, text = assert_texts_mean_the_same(problems(what, name))[0]
    assert run_alone(text).status == 0, "the objective is a sum over items"


@pytest.mark.parametrize("tie", [("2", "0"), ("2.0", "0.0"), ("2.0.weight", "0.0.weight")])
def test_ties_mean_what_the_catalogue_means(tie):
    block = Layer("residual", Layer("linear", features=2, bias=True), Layer("tanh"))
    problem = ProblemSpec(
        Input("vector", size=2),
        (block, Layer("tanh"), block),
        Loss("mse", reduction="mean"),
        (tie,),
    )
    script, _ = assert_text_means_the_same(Case(problem, PLAN, seed=1))
    assert len(list(script.make_model().parameters())) == (3 if tie[0].endswith("weight") else 2)


@settings(max_examples=10)
@given(cases(plan=plans(max_epochs=1, max_windows=2, max_accumulation_steps=2)))
def test_drawn_models_mean_what_the_catalogue_means(case):
    """Layers of several kinds behind and inside each other."""
    assert_text_means_the_same(case)


@pytest.mark.parametrize(
    ("what", "name", "slip"),
    [
        ("layer", "leaky_relu", (r"negative_slope=[^,()]*", "")),
        ("layer", "attention", ("causal=True", "causal=False")),
        ("layer", "embedding", (r", padding_idx=\d+", "")),
        ("layer", "conv2d", (r", stride=\([^()]*\)", "")),
        ("loss", "mse", ('reduction="mean"', 'reduction="sum"')),
        ("loss", "cross_entropy", ("0[.]1", "0.2")),
    ],
)
def test_a_planted_slip_in_a_text_is_seen(what, name, slip):
    """An option that the text forgets, or a wrong one where it cannot be left out."""
    with pytest.raises((AssertionError, RuntimeError, UserWarning)):
        assert_texts_mean_the_same(problems(what, name), *slip)


@pytest.mark.full
@pytest.mark.parametrize(("what", "name"), KINDS[1::4])
def test_a_script_is_right_about_its_loop(what, name):
    """With the planted fault: status 1, and JAX's literal is the large batch that the script
    computes. Mended: 0.
    """
    # the simplest of some kinds have a gradient of 0, such as a softmax of one feature
    specs = [probe_case(PLAN).spec] if name in ("readout", "identity") else problems(what, name)
    verdicts = (check(no_divide, Case(spec, PLAN, seed=1)) for spec in specs)
    violation = next(verdict.violation for verdict in verdicts if verdict.violation)
    text = script_text(no_divide, "planted", violation)
    script = load(text)
    recomputed = script.large_batch()
    assert recomputed.keys() == script.EXPECTED.keys()
    for parameter, gradient in recomputed.items():
        # where the loss does not reach a parameter, torch's gradient is None and JAX's is zeros
        assert_same(0.0 if gradient is None else gradient, script.EXPECTED[parameter])
    assert run_alone(text).status == 1
    assert run_alone(script_text(plain, "planted", violation)).status == 0
