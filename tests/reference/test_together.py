"""Programs that XLA checks are compiled as one, and each is found again, whatever stands beside it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from gradcheck_suite.reference import tape
from gradcheck_suite.reference.evaluation import NumpyProgram, ProgramRequest, Sample
from gradcheck_suite.reference.programs import CompiledPrograms
from gradcheck_suite.reference.together import MOST, Together

X = np.linspace(-1, 1, 6)
FUNCTIONS = {
    "double": lambda tree: {"twice": 2 * tree["x"]},
    "tanh": lambda tree: (jnp.tanh(tree["x"]), tree["x"].sum()),
    "square": lambda tree: tree["x"] ** 2,
}


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADCHECK_SUITE_CACHE", str(tmp_path))
    return tmp_path


def _sample(name, size=6):
    arguments = ({"x": X[:size]},)
    request = ProgramRequest.of((name, size), FUNCTIONS[name], *arguments)
    return Sample(request, NumpyProgram(request), arguments, is_telling=True)


def _expect(samples, found):
    for sample, tree in zip(samples, found, strict=True):
        expected = sample.request.function(*sample.arguments)
        if isinstance(expected, dict):
            np.testing.assert_array_equal(tree["twice"], expected["twice"])
            continue
        for one, other in zip(np.atleast_1d(tree[0]), np.atleast_1d(expected[0]), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-14)


def _checked(*samples):
    """Check in a process of its own; return how many programs it compiled, and how many it loaded."""
    kept = CompiledPrograms()
    _expect(samples, Together(kept).results(samples))
    return kept.compiled, kept.loaded


def test_programs_are_compiled_as_one_and_found_again_in_another_order(store):
    three = [_sample(name) for name in FUNCTIONS]
    assert _checked(*three) == (1, 0)
    assert _checked(*reversed(three)) == (0, 1)


def test_a_program_is_found_without_those_beside_it_and_beside_others(store):
    double, tanh, square = (_sample(name) for name in FUNCTIONS)
    assert _checked(double, tanh) == (1, 0)
    assert _checked(tanh) == (0, 1)
    assert _checked(square, tanh, _sample("tanh", 4)) == (1, 1)
    assert _checked(_sample("tanh", 4), double, square) == (0, 2)


def test_a_damaged_file_is_compiled_again(store):
    both = [_sample("double"), _sample("tanh")]
    assert _checked(*both) == (1, 0)
    for file in store.rglob("*"):
        if file.is_file():
            file.write_bytes(b"not a program")
    assert _checked(*both) == (1, 0)
    assert _checked(*both) == (0, 1)


def test_nothing_is_stored_without_a_store(monkeypatch):
    monkeypatch.setenv("GRADCHECK_SUITE_CACHE", "")
    for _ in range(2):
        assert _checked(_sample("double"), _sample("square")) == (1, 0)


def test_a_fault_is_said_of_its_own_program_alone(store, monkeypatch):
    rule = tape.RULES["tanh"]
    monkeypatch.setitem(
        tape.RULES, "tanh", lambda parameters: lambda x: rule(parameters)(x) * (1 + 1e-6)
    )
    kept = CompiledPrograms()
    for name in FUNCTIONS:
        sample = _sample(name)
        kept.evaluate(sample.request, *sample.arguments)
    checks = kept.finish_checks()
    assert checks.programs == 3
    (text,) = checks.differences
    assert text.startswith("numpy and XLA evaluate JAX's tanh differently")


def test_more_programs_than_fit_into_one_are_checked_too(store):
    kept = CompiledPrograms()
    for size in range(1, 6):
        for name in FUNCTIONS:
            sample = _sample(name, size)
            kept.evaluate(sample.request, *sample.arguments)
    assert kept.finish_checks().programs == 15 > MOST
