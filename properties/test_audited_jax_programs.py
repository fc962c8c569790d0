"""The audit on drawn JAX programs: never a blame on a sound one, never silence on a faulty one.

`properties.audited_jax_programs` draws them, and audits more of them from the command line.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given

from properties.audited_jax_programs import faulty_programs, result_of, sound_programs
from properties.helpers import scaled
from tests.auditing.jax.programs import PROLOGUE
from tests.auditing.jax.test_programs import audited

for package in ("jax", "optax", "flax", "equinox"):
    pytest.importorskip(package)


@given(sound_programs())
@scaled(24)
def test_no_sound_program_is_blamed(program):
    result = result_of(program)
    assert result.violations == ()
    assert result.holds, result.unjudged


@given(faulty_programs())
@scaled(24)
def test_each_faulty_program_is_named(program):
    result = result_of(program)
    assert {violation.diagnosis for violation in result.violations} & program.names
    assert {violation.diagnosis for violation in result.violations} <= program.names


def test_the_prologue_runs_by_itself():
    assert audited(Path(tempfile.mkdtemp()), "prologue", "")[0].unjudged
    assert "tokens" in PROLOGUE
