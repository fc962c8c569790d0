"""Compiled programs: found again in memory and on disk, and never trusted further than that."""

from __future__ import annotations

import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from gradcheck_suite.reference import programs
from gradcheck_suite.reference.evaluation import ProgramRequest
from gradcheck_suite.reference.programs import CompiledPrograms
from gradcheck_suite.run.environment import cache_directory

X = np.arange(3.0)
THRICE = """
import jax, jax.numpy as jnp, numpy as np
from gradcheck_suite.reference.programs import CompiledPrograms
for _ in range(3):
    print(*CompiledPrograms().call("sort", lambda a: jnp.tanh(jnp.sort(a) @ a.T).sum(0), np.ones((3, 4))).round(3))
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
    first, second = CompiledPrograms(), CompiledPrograms()
    for _ in range(2):
        np.testing.assert_array_equal(first.call("double", _double, X), [0.0, 2.0, 4.0])
    np.testing.assert_array_equal(second.call("double", _double, X), [0.0, 2.0, 4.0])
    assert (first.compiled, first.loaded) == (1, 0)
    assert (second.compiled, second.loaded) == (0, 1)
    assert len(_files(store)) == 1


def test_a_prepared_program_is_the_one_that_is_called(store):
    kept, next_process = CompiledPrograms(), CompiledPrograms()
    for programs_of_a_process in (kept, next_process):
        programs_of_a_process.prepare(
            ProgramRequest.of("double", _double, np.ones(n)) for n in (3, 4, 3)
        )
        for n in (3, 4):
            np.testing.assert_array_equal(
                programs_of_a_process.call("double", _double, np.ones(n)), np.full(n, 2.0)
            )
    assert (kept.compiled, kept.loaded) == (2, 0)
    assert (next_process.compiled, next_process.loaded) == (0, 2)


def test_other_shapes_are_other_programs(store):
    kept = CompiledPrograms()
    kept.call("double", _double, X)
    kept.call("double", _double, np.arange(4.0))
    kept.call("double", _double, np.arange(3))
    assert kept.compiled == 3


def test_a_damaged_file_is_compiled_again(store):
    CompiledPrograms().call("double", _double, X)
    (file,) = _files(store)
    file.write_bytes(b"not a program")
    kept = CompiledPrograms()
    np.testing.assert_array_equal(kept.call("double", _double, X), [0.0, 2.0, 4.0])
    assert (kept.compiled, kept.loaded) == (1, 0)


def test_a_program_that_calls_lapack_is_compiled_by_each_process(store):
    matrix = np.array([[0.0, 2.0], [3.0, 0.0]])
    for _ in range(2):
        kept = CompiledPrograms()
        values = kept.call("svd", lambda a: jnp.linalg.svd(a, compute_uv=False), matrix)
        np.testing.assert_allclose(values, [3.0, 2.0])
        assert (kept.compiled, kept.loaded) == (1, 0)
    assert not _files(store)


def with_jaxs_cache(script, folder):
    """Run a script with JAX's own compilation cache."""
    options = {"COMPILATION_CACHE_DIR": folder, "PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0}
    environment = {**os.environ, **{f"JAX_{name}": str(value) for name, value in options.items()}}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.full
def test_a_program_from_jaxs_own_cache_is_not_stored(store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("jax")
    for _ in range(2):
        done = with_jaxs_cache(THRICE, folder)
        assert (done.returncode, done.stdout.split()) == (0, ["2.998"] * 9), done.stderr
    assert any(folder.iterdir())
    assert not _files(store)


def test_memory_is_bounded_and_dropped_programs_come_back(store):
    kept = CompiledPrograms(maximum=2)
    for n in (1, 2, 3, 1):
        np.testing.assert_array_equal(kept.call("double", _double, np.ones(n)), np.full(n, 2.0))
    assert len(kept._programs) == 2
    assert (kept.compiled, kept.loaded) == (3, 1)


def test_what_is_not_worth_storing_is_not_stored(store):
    CompiledPrograms().call("double", _double, X, store=False)
    assert _files(store) == []


def test_no_store_where_the_variable_is_empty(monkeypatch):
    monkeypatch.setenv("GRADCHECK_SUITE_CACHE", "")
    assert cache_directory() is None
    np.testing.assert_array_equal(CompiledPrograms().call("double", _double, X), [0.0, 2.0, 4.0])


def test_a_store_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("GRADCHECK_SUITE_CACHE", str(blocked))
    np.testing.assert_array_equal(CompiledPrograms().call("double", _double, X), [0.0, 2.0, 4.0])


def test_only_the_latest_environments_are_kept(store):
    for age, name in enumerate("cafebd"):
        (store / name).mkdir()
        os.utime(store / name, (10**9 - age, 10**9 - age))
    CompiledPrograms().call("double", _double, X)
    (new,) = {path.name for path in store.iterdir()} - set("cafebd")
    assert {path.name for path in store.iterdir()} == {*"cafe", new}


def test_options_that_this_xla_does_not_know_are_left_out(monkeypatch):
    monkeypatch.setenv("GRADCHECK_SUITE_CACHE", "")
    monkeypatch.setattr(programs, "_UNKNOWN", set())
    monkeypatch.setattr(
        programs,
        "COMPILER_OPTIONS",
        {"xla_no_such_option": True, "xla_embed_ir_in_executable": False},
    )
    np.testing.assert_array_equal(CompiledPrograms().call("double", _double, X), [0.0, 2.0, 4.0])
    assert {"xla_no_such_option"} == programs._UNKNOWN
