"""The text of every layer and every loss, in plain torch, means what the catalogue means; whole scripts of each run."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given

from gradcheck_suite.catalogue import LAYERS, LOSSES
from gradcheck_suite.evidence.zoo.bugs.denominators import no_divide
from gradcheck_suite.execution.instance import generated_instance
from gradcheck_suite.generation.strategies import cases, plans
from gradcheck_suite.report.scripts import losses, models, script_text, subjects
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.plan import Plan
from gradcheck_suite.schema.results import Violation
from gradcheck_suite.verification.check import check
from tests.report.scripts.problems import gradients, layer_problems, load, loss_problems, status

PLAN = Plan((1, 2), 2)
RELATIVE = 1e-12
NAME = "somebodys.py:loop"
IMPORT = re.compile(r"^\s*(import|from)\s+gradcheck_suite", re.MULTILINE)
KINDS = [*(("layer", name) for name in LAYERS), *(("loss", name) for name in LOSSES)]


def problems(what, name):
    return list(layer_problems(name) if what == "layer" else loss_problems(name))


def assert_same(observed, expected):
    __tracebackhide__ = True
    expected = np.asarray(expected)
    largest = max(1.0, np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(np.asarray(observed), expected, rtol=0, atol=RELATIVE * largest)


def assert_text_means_the_same(case, tmp_path):
    """Compare model, loss, count and data of a script with the catalogue's torch, on each micro-batch."""
    __tracebackhide__ = True
    text = script_text(no_divide, NAME, Violation("step-count", "planted", "planted", case))
    assert not IMPORT.search(text)
    script, instance = load(text, tmp_path), generated_instance(case)
    for j, batch in enumerate(script.MICRO_BATCHES):
        own = instance.batch(case.plan.items(j))
        assert batch.keys() == own.keys()
        assert all(torch.equal(batch[key], own[key]) and batch[key].dtype == own[key].dtype for key in own)
        assert script.count(batch).dtype == instance.count(own).dtype
        assert float(script.count(batch)) == float(instance.count(own))
        model, its = script.make_model(), instance.model()
        loss, expected = script.loss(model, batch), instance.problem.loss(its, own)
        assert_same(loss.detach(), expected.detach())
        observed, right = gradients(loss, model), gradients(expected, its)
        assert {n for n, g in observed.items() if g is None} == {n for n, g in right.items() if g is None}
        assert observed.keys() == right.keys()
        for parameter, gradient in right.items():
            if gradient is not None:
                assert_same(observed[parameter], gradient)


def assert_texts_mean_the_same(specs, tmp_path):
    __tracebackhide__ = True
    for seed, spec in enumerate(specs):
        assert_text_means_the_same(Case(spec, PLAN, seed=seed), tmp_path)


@pytest.mark.parametrize(("what", "name"), KINDS)
def test_every_variant_means_what_the_catalogue_means(what, name, tmp_path):
    specs = problems(what, name)
    assert specs
    assert_texts_mean_the_same(specs, tmp_path)


@given(cases(plan=plans(max_epochs=1, max_windows=2, max_accumulation_steps=2)))
def test_drawn_models_mean_what_the_catalogue_means(tmp_path_factory, case):
    """Layers of several kinds behind and inside each other."""
    assert_text_means_the_same(case, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize(("name", "option"), [("leaky_relu", "negative_slope"), ("attention", "causal"),
                                              ("embedding", "padding_idx"), ("conv2d", "stride")])  # fmt: skip
def test_a_planted_slip_in_a_layers_text_is_seen(name, option, tmp_path, monkeypatch):
    """An option that the text forgets, or a wrong one where it cannot be left out."""
    values = {o.o[option] for spec in layer_problems(name) for o in spec.layers if o.kind == name}
    assert len(values) > 1
    real = models.constructor_call

    def slip(module, sources):
        call = real(module, sources)
        if option == "causal":
            return call.replace("causal=True", "causal=False")
        return re.sub(rf"(, )?{option}=[^,()]*(\([^()]*\))?", "", call)

    monkeypatch.setattr(models, "constructor_call", slip)
    with pytest.raises((AssertionError, RuntimeError, UserWarning)):
        assert_texts_mean_the_same(layer_problems(name), tmp_path)


@pytest.mark.parametrize(("name", "slip"), [("mse", ('"mean"', '"sum"')), ("cross_entropy", ("0.1", "0.2")),
                                            ("kl_div", ("batchmean", "sum"))])  # fmt: skip
def test_a_planted_slip_in_a_losss_text_is_seen(name, slip, tmp_path, monkeypatch):
    real = losses.body_text
    monkeypatch.setattr(subjects, "body_text", lambda *a, **o: real(*a, **o).replace(*slip))
    with pytest.raises(AssertionError):
        assert_texts_mean_the_same(loss_problems(name), tmp_path)


@pytest.mark.parametrize(("what", "name"), KINDS)
def test_a_script_is_right_about_its_loop(what, name, tmp_path, capsys):
    """A planted fault: status 1, and JAX's literal is the large batch that the script computes in torch. Mended: 0."""
    # the simplest of some kinds have a gradient of 0, such as a softmax of one feature
    verdicts = (check(no_divide, Case(spec, PLAN, seed=1)) for spec in problems(what, name))
    violation = next(verdict.violation for verdict in verdicts if verdict.violation)
    script = load(script_text(no_divide, NAME, violation), tmp_path)
    recomputed = script.large_batch()
    assert recomputed.keys() == script.EXPECTED.keys()
    for parameter, gradient in recomputed.items():
        assert_same(gradient, script.EXPECTED[parameter])
    assert status(script, no_divide) == 1
    assert "the fault is there" in capsys.readouterr().out
    assert status(script) == 0
    assert "the fault is gone" in capsys.readouterr().out
