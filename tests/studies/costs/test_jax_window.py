"""The window in JAX: the gradients and the work of torch's window, in the buffers of the gradients before."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from gradcheck_suite.loops.reset_modes import RESET_MODES
from gradcheck_suite.studies import compiled_steps
from gradcheck_suite.studies.compiled_steps import compiled_window, memory_bytes, runner
from gradcheck_suite.studies.workload import Size, sized_workload

SMALL = Size(50, "few")
K = 3


def _window():
    return compiled_window(SMALL, K, "float32", jax.devices("cpu")[0])


def test_a_window_takes_the_buffers_of_the_gradients_before():
    program, (weights, batches, old) = _window()
    assert memory_bytes(program)["alias"] == 4 * SMALL.total
    runner(program, (weights, batches, old))()
    assert all(gradient.is_deleted() for gradient in old)


def test_buffers_that_are_not_taken_are_told(monkeypatch):
    """Planted fault: JAX drops an argument whose values nobody reads, and with it the donation."""
    jit = jax.jit
    monkeypatch.setattr(compiled_steps.jax, "jit", lambda f, donate_argnums, keep_unused: jit(f, donate_argnums=2))
    assert memory_bytes(_window()[0])["alias"] == 0


def test_a_window_has_torchs_gradients_and_matrix_products():
    program, (weights, batches, old) = _window()
    # two layers: two products forward, two for the weights' gradients, one for the gradient between the layers
    assert sum(" dot(" in line for line in program.as_text().splitlines()) == 5
    work = sized_workload(RESET_MODES["set_to_none"], SMALL, K)
    work.reset()
    rows = np.asarray(batches).shape[1]
    for batch, values in zip(work.batches, np.asarray(batches), strict=True):
        assert len(batch) == rows
        batch.copy_(batch.new_tensor(values))
    work.accumulate()
    found, losses = program(weights, batches, old)
    assert losses.shape == (K,)
    for p, gradient in zip(work.parameters, found, strict=True):
        assert np.asarray(gradient) == pytest.approx(p.grad.numpy(), rel=1e-5)
