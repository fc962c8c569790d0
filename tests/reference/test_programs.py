"""Compiled programs: found again in memory and on disk, and never trusted further than that."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable

from gradcheck_suite import Input, Layer, Loss, Plan, ProblemSpec, verify
from gradcheck_suite.core.case import Case
from gradcheck_suite.loops.reset_modes import BUILT_IN
from gradcheck_suite.reference import jax_gradients, programs
from gradcheck_suite.reference.jax_gradients import StartedGradients, large_batch_gradients
from gradcheck_suite.reference.large_batch import Reference
from gradcheck_suite.reference.programs import ProgramRequest, Programs
from gradcheck_suite.run.environment import cache_directory
from gradcheck_suite.run.instance import generated_instance
from gradcheck_suite.verification import judge_process as judges
from gradcheck_suite.verification.judge_process import second_process

X = np.arange(3.0)
LOAD = """
import pickle, sys, jax.numpy as jnp
from jax.experimental import serialize_executable
with open(sys.argv[1], "rb") as file:
    program = serialize_executable.deserialize_and_load(*pickle.load(file))
assert program(jnp.diag(jnp.array([1.0, 4.0]))).tolist() == [1.0, 4.0]
"""
TWICE = """
import pickle, jax, jax.numpy as jnp, numpy as np
from jax.experimental import serialize_executable
def function(a):
    return jnp.tanh(jnp.sort(a) @ a.T).sum(0)
for _ in range(2):
    compiled = jax.jit(function).lower(jax.ShapeDtypeStruct((3, 4), np.float32)).compile()
    jax.clear_caches()
loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))
loaded(np.ones((3, 4), np.float32))
"""
THRICE = """
import jax, jax.numpy as jnp, numpy as np
from gradcheck_suite.reference.programs import Programs
for _ in range(3):
    print(*Programs().call("sort", lambda a: jnp.tanh(jnp.sort(a) @ a.T).sum(0), np.ones((3, 4))).round(3))
    jax.clear_caches()
"""


def _double(x):
    return 2 * x


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADCHECK_SUITE_CACHE", str(tmp_path))
    return tmp_path


def _files(folder):
    return [f for f in folder.rglob("*") if f.is_file()]


def test_a_program_is_compiled_once_and_loaded_by_the_next_process(store):
    first, second = Programs(), Programs()
    for _ in range(2):
        np.testing.assert_array_equal(first.call("double", _double, X), [0.0, 2.0, 4.0])
    np.testing.assert_array_equal(second.call("double", _double, X), [0.0, 2.0, 4.0])
    assert (first.compiled, first.loaded) == (1, 0)
    assert (second.compiled, second.loaded) == (0, 1)
    assert len(_files(store)) == 1


def test_a_prepared_program_is_the_one_that_is_called(store):
    kept, next_process = Programs(), Programs()
    for programs_of_a_process in (kept, next_process):
        programs_of_a_process.prepare(ProgramRequest.of("double", _double, np.ones(n)) for n in (3, 4, 3))
        for n in (3, 4):
            np.testing.assert_array_equal(programs_of_a_process.call("double", _double, np.ones(n)), np.full(n, 2.0))
    assert (kept.compiled, kept.loaded) == (2, 0)
    assert (next_process.compiled, next_process.loaded) == (0, 2)


def test_other_shapes_are_other_programs(store):
    kept = Programs()
    kept.call("double", _double, X)
    kept.call("double", _double, np.arange(4.0))
    kept.call("double", _double, np.arange(3))
    assert kept.compiled == 3


def test_a_damaged_file_is_compiled_again(store):
    Programs().call("double", _double, X)
    (file,) = _files(store)
    file.write_bytes(b"not a program")
    kept = Programs()
    np.testing.assert_array_equal(kept.call("double", _double, X), [0.0, 2.0, 4.0])
    assert (kept.compiled, kept.loaded) == (1, 0)


def test_a_program_that_calls_lapack_is_compiled_by_each_process(store):
    matrix = np.array([[0.0, 2.0], [3.0, 0.0]])
    for _ in range(2):
        kept = Programs()
        values = kept.call("svd", lambda a: jnp.linalg.svd(a, compute_uv=False), matrix)
        np.testing.assert_allclose(values, [3.0, 2.0])
        assert (kept.compiled, kept.loaded) == (1, 0)
    assert not _files(store)


@pytest.mark.xfail(
    strict=jax.__version__ == "0.10.2", reason="jaxlib 0.10.2: a loaded executable calls LAPACK through a null pointer"
)
def test_jax_itself_loads_a_program_that_calls_lapack(tmp_path):
    path = tmp_path / "program"
    compiled = jax.jit(jnp.linalg.eigvalsh).lower(jax.ShapeDtypeStruct((2, 2), jnp.float32)).compile()
    path.write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
    done = subprocess.run([sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _with_jaxs_cache(script, folder):
    """Run a script with JAX's own compilation cache."""
    options = {"COMPILATION_CACHE_DIR": folder, "PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0}
    environment = {**os.environ, **{f"JAX_{name}": str(value) for name, value in options.items()}}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_a_program_from_jaxs_own_cache_is_not_stored(store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("jax")
    for _ in range(2):
        done = _with_jaxs_cache(THRICE, folder)
        assert (done.returncode, done.stdout.split()) == (0, ["2.998"] * 9), done.stderr
    assert any(folder.iterdir())
    assert not _files(store)


@pytest.mark.xfail(
    strict=jax.__version__ == "0.10.2", reason="jaxlib 0.10.2: an executable from the cache is serialised without code"
)
def test_jax_itself_serialises_a_program_from_its_own_cache(tmp_path):
    done = _with_jaxs_cache(TWICE, tmp_path)
    assert done.returncode == 0, done.stderr


def test_memory_is_bounded_and_dropped_programs_come_back(store):
    kept = Programs(maximum=2)
    for n in (1, 2, 3, 1):
        np.testing.assert_array_equal(kept.call("double", _double, np.ones(n)), np.full(n, 2.0))
    assert len(kept._programs) == 2
    assert (kept.compiled, kept.loaded) == (3, 1)


def test_what_is_not_worth_storing_is_not_stored(store):
    Programs().call("double", _double, X, store=False)
    assert _files(store) == []


def test_no_store_where_the_variable_is_empty(monkeypatch):
    monkeypatch.setenv("GRADCHECK_SUITE_CACHE", "")
    assert cache_directory() is None
    np.testing.assert_array_equal(Programs().call("double", _double, X), [0.0, 2.0, 4.0])


def test_a_store_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("GRADCHECK_SUITE_CACHE", str(blocked))
    np.testing.assert_array_equal(Programs().call("double", _double, X), [0.0, 2.0, 4.0])


def test_only_the_latest_environments_are_kept(store):
    for age, name in enumerate("cafebd"):
        (store / name).mkdir()
        os.utime(store / name, (10**9 - age, 10**9 - age))
    Programs().call("double", _double, X)
    (new,) = {path.name for path in store.iterdir()} - set("cafebd")
    assert {path.name for path in store.iterdir()} == {*"cafe", new}


def test_options_that_this_xla_does_not_know_are_left_out(monkeypatch):
    monkeypatch.setenv("GRADCHECK_SUITE_CACHE", "")
    monkeypatch.setattr(programs, "_UNKNOWN", set())
    monkeypatch.setattr(programs, "COMPILER_OPTIONS", {"xla_no_such_option": True, "xla_embed_ir_in_executable": False})
    np.testing.assert_array_equal(Programs().call("double", _double, X), [0.0, 2.0, 4.0])
    assert {"xla_no_such_option"} == programs._UNKNOWN


# Gradients in files: a later process reads the same numbers, and no verdict rests on them alone.


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


def _kept(cache):
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
    assert not _kept(cache)
    monkeypatch.setattr(jax_gradients, "_used_here", True)
    _assert_same(large_batch_gradients(**arguments), expected)
    assert len(_kept(cache)) == 1
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
    assert len(_kept(cache)) == 2
    if name in ("problem", "the windows"):
        assert first[0][0] != second[0][0]


@pytest.mark.parametrize("content", [b"", b"12345678", bytes(8_000)])
def test_a_file_of_another_size_is_written_anew(cache, arguments, content):
    expected = large_batch_gradients(**arguments)
    (file,) = _kept(cache)
    whole = file.read_bytes()
    file.write_bytes(content)
    _assert_same(large_batch_gradients(**arguments), expected)
    assert file.read_bytes() == whole


def test_the_oldest_files_are_deleted(cache, monkeypatch, arguments):
    monkeypatch.setattr(jax_gradients, "MOST_FILES", 4)
    for stop in range(1, 6):
        large_batch_gradients(**{**arguments, "windows": [range(stop)]})
    for age, file in enumerate(sorted(_kept(cache), key=lambda file: file.stat().st_mtime)):
        os.utime(file, (age, age))
    large_batch_gradients(**{**arguments, "windows": [range(1)]})  # read again, so no longer the oldest
    read = max(_kept(cache), key=lambda file: file.stat().st_mtime)
    jax_gradients.use_kept_gradients()
    assert len(_kept(cache)) == 2
    assert read in _kept(cache)


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
        for file in _kept(cache):
            file.write_bytes((2 * np.frombuffer(file.read_bytes())).tobytes())
    assert _kept(cache)
    assert all(result.holds and result.judged == 12 and not result.findings for result in results)
