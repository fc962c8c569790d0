"""A loop of JAX on the command line: the decorator, or `--framework jax`; its
counterexample; its reset modes.
"""

from __future__ import annotations

import pytest

LOOP = """
import jax, optax, gradcheck_suite

def undeclared(run):
    tx = optax.MultiSteps(run.optimizer, every_k_schedule=run.accumulation_steps)
    params, state = run.params, tx.init(run.params)
    @jax.jit
    def step(params, state, batch):
        updates, state = tx.update(jax.grad(run.loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state
    for _ in range(run.epochs):
        for batch in run.batches:
            params, state = step(params, state, batch)

@gradcheck_suite.jax_training_loop
def train(run):
    undeclared(run)
"""


@pytest.fixture
def loops(project):
    (project / "jax_loops.py").write_text(LOOP)


@pytest.mark.full
@pytest.mark.usefixtures("loops", "script_runs")
def test_a_declared_loop_is_verified_and_its_counterexample_replayed(run, project):
    found = run("verify", "jax_loops.py:train")
    assert found.status == 1
    assert ": mean-of-means: " in found.out
    assert "50 cases per loop, seed 0, float32 on cpu" in found.out
    (case,) = (project / "reports" / "counterexamples").glob("*.json")
    assert run("replay", str(case)).status == 1
    assert "    script  python reports/counterexamples/" in found.out


@pytest.mark.full
@pytest.mark.usefixtures("loops")
def test_a_loop_without_the_decorator_needs_the_option(run):
    refused = run("verify", "jax_loops.py:undeclared", "--examples", 1)
    assert refused.status == 2
    assert "say --framework jax" in refused.err
    assert len(refused.err.splitlines()) == 1
    assumed = ("--assume", "equal-micro-batches", "--assume", "whole-windows")
    assert (
        run(
            "verify", "jax_loops.py:undeclared", "--examples", 1, "--framework", "jax", *assumed
        ).status
        == 0
    )


@pytest.mark.full
def test_a_reset_mode_is_verified_by_its_name(run):
    assert run("verify", "jax_where", "--examples", 1).status == 0


def test_an_unknown_framework_is_refused(run):
    refused = run("verify", "zero_", "--framework", "tensorflow")
    assert refused.status == 2
    assert "expected one of torch, jax, all; got 'tensorflow'" in refused.err
