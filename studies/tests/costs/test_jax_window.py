"""The window in JAX under each reset mode: torch's gradients and work, and the buffers that a
program may take.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from gradcheck_suite.loops import jax_modes
from gradcheck_suite.loops.jax_modes import JAX_MODES
from studies import compiled_steps
from studies.compiled_steps import compiled_window, memory_bytes
from studies.reset_modes import RESET_MODES
from studies.workload import BATCH, Size, sized_workload

SMALL = Size(50, "few")
K = 3
SUM = 4 * SMALL.total + 4
"""Bytes of the gradients and of the loss, float32."""


def _window(mode):
    return compiled_window(mode, SMALL, K, "float32", jax.devices("cpu")[0])


def _torchs_gradients():
    work = sized_workload(RESET_MODES["set_to_none"], SMALL, K)
    work.reset()
    inputs = np.random.default_rng(0).random((K, BATCH, SMALL.width))
    for batch, values in zip(work.batches, inputs, strict=True):
        batch.copy_(batch.new_tensor(values))
    work.accumulate()
    return [p.grad.numpy() for p in work.parameters]


def _is_torchs(found):
    return all(
        np.allclose(a, b, rtol=1e-5) for a, b in zip(found, _torchs_gradients(), strict=True)
    )


@pytest.mark.parametrize("mode", JAX_MODES)
def test_every_window_has_torchs_gradients_and_matrix_products(mode):
    program, run = _window(mode)
    # two layers: two products forward, two for the weights' gradients, one for the gradient between
    # the layers
    assert sum(" dot(" in line for line in program.as_text().splitlines()) == 5
    assert _is_torchs(run())
    assert _is_torchs(run())


def test_a_window_that_is_never_reset_is_noticed(monkeypatch):
    """Planted fault."""
    monkeypatch.setitem(jax_modes.RESETS, "jax_where", (lambda kept, first: kept, False))
    _, run = _window("jax_where")
    assert _is_torchs(run())
    assert not _is_torchs(run())


@pytest.mark.parametrize("mode", JAX_MODES)
def test_a_program_that_takes_the_old_sums_buffer_says_so(mode):
    donated = mode in ("jax_donated", "jax_scan_carry")
    program, run = _window(mode)
    assert memory_bytes(program)["alias"] == (SUM if donated else 0)
    before = run()
    run()
    assert all(gradient.is_deleted() == donated for gradient in before)


@pytest.mark.full
def test_buffers_that_are_not_taken_are_told(monkeypatch):
    """Planted fault: JAX drops an argument whose values nobody reads, and with it the donation."""
    jit = jax.jit
    monkeypatch.setattr(
        compiled_steps.jax, "jit", lambda f, donate_argnums, keep_unused: jit(f, donate_argnums=0)
    )
    jitted = compiled_window("jax_scan_carry", SMALL, K, "float32", jax.devices("cpu")[0])[0]
    assert memory_bytes(jitted)["alias"] == 0
