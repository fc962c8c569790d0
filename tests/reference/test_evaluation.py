"""numpy evaluates, XLA checks: a fault planted in an operation of numpy is a finding, and never a
loop's.
"""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.reference import large_batch, programs, tape
from gradcheck_suite.reference.evaluation import ProgramRequest, evaluated_by
from gradcheck_suite.reference.programs import CompiledPrograms
from gradcheck_suite.reference.together import Together
from gradcheck_suite.verification.check import check
from gradcheck_suite.verification.verify import verify

LAYERS = (
    Layer("linear", bias=True, features=2),
    Layer("tanh"),
    Layer("linear", bias=False, features=1),
)
CASE = Case(ProblemSpec(Input("vector", size=3), LAYERS, Loss("mse")), Plan((1, 3, 2), 2), seed=3)
X = np.linspace(-1, 1, 6).reshape(2, 3)


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch):
    monkeypatch.setenv("GRADCHECK_SUITE_CACHE", "")
    monkeypatch.setattr(programs, "PROGRAMS", CompiledPrograms())
    monkeypatch.setattr(large_batch.REFERENCES, "_kept", type(large_batch.REFERENCES._kept)())


def _request(function=lambda x: jnp.tanh(x @ x.T), x=X):
    return ProgramRequest.of(("layer", "planted"), function, x)


def _off(monkeypatch, name, by):
    """Plant a relative error in one operation of numpy."""
    rule = tape.RULES[name]

    def wrong(parameters):
        right = rule(parameters)
        return lambda *operands: right(*operands) * (1 + by)

    monkeypatch.setitem(tape.RULES, name, wrong)


def test_numpy_evaluates_and_xla_agrees():
    kept = CompiledPrograms()
    found = kept.evaluate(_request(), X)
    np.testing.assert_allclose(found, np.tanh(X @ X.T), rtol=1e-14)
    assert kept.compiled == 0
    checks = kept.finish_checks()
    assert (checks.programs, checks.differences) == (1, ())
    kept.evaluate(_request(), X)
    assert kept.finish_checks().programs == 1


def test_several_threads_check_each_program_once(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    kept = CompiledPrograms()
    rule = tape.RULES["tanh"]
    monkeypatch.setitem(tape.RULES, "tanh", lambda p: lambda x: rule(p)(x) * (1 + 1e-9))
    for rows in range(1, 21):
        function = jnp.tanh if rows % 5 == 0 else jnp.exp
        x = X[:1].repeat(rows, 0)
        kept.evaluate(_request(function, x), x)
    checks = kept.finish_checks()
    assert checks.programs == 20
    # the names of the programs are the same, so the sentence of the first stands for all
    assert checks.differences
    assert kept.finish_checks().programs == 20


def test_a_check_that_fails_in_a_thread_is_an_error_here(monkeypatch):
    def fails(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(Together, "results", fails)
    kept = CompiledPrograms()
    kept.evaluate(_request(), X)
    with pytest.raises(RuntimeError, match="planted"):
        kept.finish_checks()


def test_jax_derives_a_program_once():
    """XLA compiles the equations that numpy evaluates."""
    traced = []

    def noted(x):
        traced.append(x.shape)
        return jax.grad(lambda y: jnp.sum(jnp.tanh(y @ y.T)))(x)

    kept = CompiledPrograms()
    kept.evaluate(_request(noted), X)
    assert kept.finish_checks().differences == ()
    assert traced == [X.shape]


@pytest.mark.parametrize("by", [1e-12, 1e-3, np.nan])
@pytest.mark.parametrize("name", ["tanh", "dot_general"])
def test_a_fault_of_numpy_is_a_difference(name, by, monkeypatch):
    _off(monkeypatch, name, by)
    kept = CompiledPrograms()
    kept.evaluate(_request(), X)
    (text,) = kept.finish_checks().differences
    assert text.startswith("numpy and XLA evaluate JAX's layer planted differently, result 0 by ")


def test_a_call_with_a_cotangent_is_checked_in_place_of_one_without(monkeypatch):
    kept = CompiledPrograms()
    _off(monkeypatch, "tanh", 1e-3)
    kept.evaluate(_request(), 0 * X, is_telling=False)
    assert not kept.finish_checks().differences
    kept.evaluate(_request(), X)
    assert kept.finish_checks().differences


def test_what_numpy_has_no_operation_for_is_computed_by_xla(monkeypatch):
    monkeypatch.delitem(tape.RULES, "tanh")
    kept = CompiledPrograms()
    np.testing.assert_allclose(kept.evaluate(_request(), X), np.tanh(X @ X.T), rtol=1e-14)
    assert kept.compiled == 1
    assert kept.finish_checks().programs == 0


def test_a_large_program_is_computed_by_xla():
    kept, large = CompiledPrograms(), np.ones((20_000, 1))
    assert kept.evaluate(_request(lambda x: 2 * x, large), large).shape == large.shape
    assert kept.compiled == 1


def test_xla_alone_computes_where_it_is_asked_to(monkeypatch):
    _off(monkeypatch, "tanh", np.nan)
    kept = CompiledPrograms()
    with evaluated_by("xla"):
        assert np.isfinite(kept.evaluate(_request(), X)).all()
    assert (kept.compiled, kept.finish_checks().programs) == (1, 0)


def test_a_loop_is_not_blamed_for_a_fault_of_numpy(monkeypatch):
    """XLA computes again what would be a violation, or a finding on torch, before it is said."""
    _off(monkeypatch, "dot_general", 1e-6)
    verdict = check(MODES["zero_"], CASE)
    assert verdict.holds
    assert verdict.finding is None
    said = programs.PROGRAMS.finish_checks().differences
    assert any("as numpy and as XLA evaluate them" in text for text in said)
    assert any("layer linear" in text for text in said)


@pytest.mark.share(4)
def test_a_run_says_a_fault_of_numpy_as_a_finding(monkeypatch):
    assert verify(MODES["zero_"], examples=2, quiet=True).findings == ()
    monkeypatch.setattr(programs, "PROGRAMS", CompiledPrograms())
    large_batch.REFERENCES._kept.clear()
    _off(monkeypatch, "mul", 1e-6)
    result = verify(MODES["zero_"], examples=2, quiet=True)
    assert result.violation is None
    assert result.findings
    assert all("numpy" in finding for finding in result.findings)
    large_batch.REFERENCES._kept.clear()
    assert verify(MODES["zero_"], examples=2, quiet=True, jax="xla").findings == ()
