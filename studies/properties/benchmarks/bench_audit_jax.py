"""What an audit of a JAX script costs, by the processor time of its process: small scripts as a
whole, the first step of a transformer, which compiles, and its later windows.

Run it by itself, on an idle machine: `pytest -s studies/properties/benchmarks/bench_audit_jax.py`.
Each ratio is the median over rounds, in each of which the script runs without the audit and with it.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.auditing.jax.programs import PROLOGUE, SOUND

ROOT = Path(__file__).resolve().parents[3]
ROUNDS = int(os.environ.get("GRADCHECK_SUITE_BENCH_ROUNDS", "3"))
MOST_SMALL = 1.5
MOST_FIRST = 2.2
MOST_LATER = 1.03
"""What is asked of small scripts, of a first step and of later windows."""
SMALL = ("momentum_by_hand", "inject_hyperparams", "chunked_loss_in_a_scan")
STEPS = 60
LATER = 30
"""The windows of a run, and the last ones of them, which are mostly counted."""
TRANSFORMER = """
import functools, json, time
import jax, jax.numpy as jnp, numpy as np, optax

WORDS, SIZE, HEADS, LAYERS, LENGTH = 512, 128, 4, 5, 32
keys = iter(jax.random.split(jax.random.key(0), 64))

def normal(*shape):
    return 0.02 * jax.random.normal(next(keys), shape)

def layer():
    return {
        **{name: normal(SIZE, SIZE) for name in "qkvo"},
        "up": normal(SIZE, 4 * SIZE), "down": normal(4 * SIZE, SIZE),
        "before": jnp.ones(SIZE), "after": jnp.ones(SIZE),
    }

params = {
    "words": normal(WORDS, SIZE), "places": normal(LENGTH, SIZE), "head": normal(SIZE, WORDS),
    "layers": [layer() for _ in range(LAYERS)],
}

def norm(x, gain):
    return gain * (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)

def loss(p, x, y, m):
    h = p["words"][x] + p["places"]
    rows = x.shape[0]
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for l in p["layers"]:
        a = norm(h, l["before"])
        q, k, v = ((a @ l[n]).reshape(rows, LENGTH, HEADS, SIZE // HEADS) for n in "qkv")
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(SIZE // HEADS)
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
        h = h + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(rows, LENGTH, SIZE) @ l["o"]
        h = h + jax.nn.gelu(norm(h, l["after"]) @ l["up"]) @ l["down"]
    return (optax.softmax_cross_entropy_with_integer_labels(h @ p["head"], y) * m).sum()

tx = optax.adamw(1e-3)

@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(p, s, xs, ys, ms):
    def body(total, b):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(p, *b)), None
    g, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, p), (xs, ys, ms))
    u, s = tx.update(jax.tree.map(lambda a: a / ms.sum(), g), s, p)
    return optax.apply_updates(p, u), s

p, s = params, tx.init(params)
r = np.random.default_rng(0)
seconds = []
for _ in range(STEPS):
    x = r.integers(0, WORDS, (4, 8, LENGTH))
    m = (np.arange(LENGTH) < r.integers(4, LENGTH, (4, 8, 1))).astype(np.float32)
    start = time.process_time()
    p, s = jax.block_until_ready(step(p, s, x, np.roll(x, -1, -1), m))
    seconds.append(time.process_time() - start)
print(json.dumps(seconds))
"""


@dataclass(frozen=True)
class Run:
    """A run of a script.

    Attributes:
        seconds: the processor time of its process.
        printed: its last line.
    """

    seconds: float
    printed: str


def run(path: Path, *command: str) -> Run:
    """Run a script as it is, or under a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *command, str(path)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(seconds, (done.stdout.splitlines() or [""])[-1])


def pairs(path: Path) -> list[tuple[Run, Run]]:
    """Return a run without the audit and one with it, for each round."""
    return [(run(path), run(path, "-m", "gradcheck_suite", "audit")) for _ in range(ROUNDS)]


@pytest.mark.parametrize("name", SMALL)
def test_a_small_script(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.py"
    path.write_text(PROLOGUE + SOUND[name])
    rounds = pairs(path)
    ratio = statistics.median(audited.seconds / plain.seconds for plain, audited in rounds)
    print(
        f"\n{name}: {rounds[0][0].seconds:.2f} s of the processor, {ratio:.2f} times with the audit"
    )


def test_a_transformer_of_a_million_parameters(tmp_path: Path) -> None:
    path = tmp_path / "transformer.py"
    path.write_text(TRANSFORMER.replace("STEPS", str(STEPS)))
    first = []
    later = []
    for plain, audited in pairs(path):
        without = json.loads(plain.printed)
        with_it = json.loads(audited.printed)
        first.append(with_it[0] / without[0])
        later.append(sum(with_it[-LATER:]) / sum(without[-LATER:]))
    print(
        f"\ntransformer: first step {statistics.median(first):.2f} times its compilation,"
        f" windows {STEPS - LATER} to {STEPS}: {statistics.median(later):.3f} times"
    )
    assert statistics.median(first) <= MOST_FIRST
    assert statistics.median(later) <= MOST_LATER
