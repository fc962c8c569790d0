"""Gradients in files: a later process reads the same numbers, and no verdict rests on them alone."""

from __future__ import annotations

import os

import numpy as np
import pytest

from gradcheck_suite import Input, Layer, Loss, Plan, ProblemSpec, verify
from gradcheck_suite.core.case import Case
from gradcheck_suite.loops.reset_modes import BUILT_IN
from gradcheck_suite.reference import jax_gradients, programs
from gradcheck_suite.reference.jax_gradients import StartedGradients, large_batch_gradients
from gradcheck_suite.reference.large_batch import Reference
from gradcheck_suite.run.instance import generated_instance
from gradcheck_suite.verification import judge_process as judges
from gradcheck_suite.verification.judge_process import second_process

LAYERS = Layer("linear", features=3, bias=True), Layer("tanh"), Layer("linear", features=1, bias=False)
PROBLEM = ProblemSpec(Input("vector", size=2), LAYERS, Loss("mse"))
PLAN = Plan((1, 3, 2, 2), 2)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty folder, in which this process keeps gradients as the second process does."""
    monkeypatch.setenv("GRADCHECK_SUITE_CACHE", str(tmp_path))
    monkeypatch.setattr(jax_gradients, "_used_here", True)
    return tmp_path


@pytest.fixture
def arguments():
    reference = Reference(generated_instance(Case(PROBLEM, PLAN)))
    return {
        "problem": PROBLEM,
        "values": reference.values64,
        "data": reference.instance.arrays,
        "windows": [range(4), range(4, 8)],
    }


def _files(cache):
    return list(cache.glob("*/gradients/*"))


def _refuse(*_):
    raise AssertionError("a program was run")


def _assert_same(found, expected):
    for (loss, gradients), (other_loss, others) in zip(found, expected, strict=True):
        assert loss == other_loss
        assert gradients.keys() == others.keys()
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(gradient, others[name])
            assert gradient.shape == others[name].shape


def test_the_next_run_reads_the_same_numbers_and_runs_no_program(cache, monkeypatch, arguments):
    monkeypatch.setattr(jax_gradients, "_used_here", False)
    expected = large_batch_gradients(**arguments)
    assert not _files(cache)
    monkeypatch.setattr(jax_gradients, "_used_here", True)
    _assert_same(large_batch_gradients(**arguments), expected)
    assert len(_files(cache)) == 1
    monkeypatch.setattr(programs.Programs, "run", _refuse)
    monkeypatch.setattr(programs.Programs, "prepare", _refuse)
    _assert_same(StartedGradients(**arguments).result(), expected)


@pytest.mark.parametrize("name", ["problem", "a parameter", "the data", "the windows"])
def test_what_differs_has_a_file_of_its_own(cache, arguments, name):
    """Each change is of the smallest kind: one bit of one number, or one item."""
    first = large_batch_gradients(**arguments)
    changed = dict(arguments)
    if name == "problem":
        changed["problem"] = ProblemSpec(PROBLEM.input, PROBLEM.layers, Loss("mse", reduction="sum"))
    elif name == "the windows":
        changed["windows"] = [range(3), range(3, 8)]
    else:
        key = "values" if name == "a parameter" else "data"
        arrays = {n: array.copy() for n, array in arguments[key].items()}
        one = next(array for array in arrays.values() if array.dtype == np.float64)
        one.flat[0] = np.nextafter(one.flat[0], np.inf)
        changed[key] = arrays
    second = large_batch_gradients(**changed)
    assert len(_files(cache)) == 2
    if name in ("problem", "the windows"):
        assert first[0][0] != second[0][0]


@pytest.mark.parametrize("content", [b"", b"12345678", bytes(8_000)])
def test_a_file_of_another_size_is_written_anew(cache, arguments, content):
    expected = large_batch_gradients(**arguments)
    (file,) = _files(cache)
    whole = file.read_bytes()
    file.write_bytes(content)
    _assert_same(large_batch_gradients(**arguments), expected)
    assert file.read_bytes() == whole


def test_the_oldest_files_are_deleted(cache, monkeypatch, arguments):
    monkeypatch.setattr(jax_gradients, "MOST_FILES", 4)
    for stop in range(1, 6):
        large_batch_gradients(**{**arguments, "windows": [range(stop)]})
    for age, file in enumerate(sorted(_files(cache), key=lambda file: file.stat().st_mtime)):
        os.utime(file, (age, age))
    large_batch_gradients(**{**arguments, "windows": [range(1)]})  # read again, so no longer the oldest
    read = max(_files(cache), key=lambda file: file.stat().st_mtime)
    jax_gradients.use_kept_gradients()
    assert len(_files(cache)) == 2
    assert read in _files(cache)


@pytest.mark.full
@pytest.mark.usefixtures("only_linear")
def test_wrong_numbers_in_the_files_change_no_verdict(cache, monkeypatch):
    """The second process doubts every case then, and this one computes what it judges by."""
    monkeypatch.setattr(jax_gradients, "_used_here", False)
    monkeypatch.setattr(judges, "_judges", [])
    results = []
    for _ in range(2):
        with second_process() as judge:
            judge.wait()
            results.append(verify(BUILT_IN["plain"], examples=12))
        for file in _files(cache):
            file.write_bytes((2 * np.frombuffer(file.read_bytes())).tobytes())
    assert _files(cache)
    assert all(result.holds and result.judged == 12 and not result.findings for result in results)
