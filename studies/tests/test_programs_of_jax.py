"""What jaxlib does with its own compiled programs, for which the suite keeps some of them in one
process.
"""

from __future__ import annotations

import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import serialize_executable

from tests.reference.test_programs import with_jaxs_cache

pytestmark = pytest.mark.full

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


@pytest.mark.xfail(
    strict=jax.__version__ == "0.10.2",
    reason="jaxlib 0.10.2: a loaded executable calls LAPACK through a null pointer",
)
def test_jax_itself_loads_a_program_that_calls_lapack(tmp_path):
    path = tmp_path / "program"
    compiled = (
        jax.jit(jnp.linalg.eigvalsh).lower(jax.ShapeDtypeStruct((2, 2), jnp.float32)).compile()
    )
    path.write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.xfail(
    strict=jax.__version__ == "0.10.2",
    reason="jaxlib 0.10.2: an executable from the cache is serialised without code",
)
def test_jax_itself_serialises_a_program_from_its_own_cache(tmp_path):
    done = with_jaxs_cache(TWICE, tmp_path)
    assert done.returncode == 0, done.stderr
