"""`gradcheck-suite audit` on scripts of JAX: what they print, their status, and what is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.auditing.jax.programs import PROLOGUE, SOUND

pytest.importorskip("jax")
pytest.importorskip("optax")
ROOT = Path(__file__).parents[3]

TWO_DEVICES = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
"""
ON_DEVICES = """
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
twice = lambda tree: jax.tree.map(lambda x: jnp.stack([x, x]), tree)
tx = optax.sgd(1e-2)
"""
EXPLICIT = """
wide = {"w": 0.1 * jax.random.normal(k[0], (6, 20)), "v": 0.1 * jax.random.normal(k[1], (20, 1))}
from jax.sharding import AxisType, NamedSharding
mesh = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Explicit,))
cut = lambda a: jax.device_put(a, NamedSharding(mesh, jax.sharding.PartitionSpec("batch")))
whole = lambda a: jax.device_put(a, NamedSharding(mesh, jax.sharding.PartitionSpec()))
p, s = jax.tree.map(whole, (wide, tx.init(wide)))
f = lambda p, x, y: jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"] - y) ** 2)
@functools.partial(jax.jit, donate_argnums=0)
def step(p, s, a, b):
    g = scale(add(jax.grad(f)(p, *a), jax.grad(f)(p, *b)), FACTOR)
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s
with jax.set_mesh(mesh):
    for xs, ys in rows(4, 2):
        p, s = step(p, s, (cut(xs[0]), cut(ys[0])), (cut(xs[1]), cut(ys[1])))
"""
"""A type of each array says how it is cut up over the devices."""

DEVICES = {
    "means of masked means under shard_map": (
        ["mean-of-means"],
        """
p = lm; s = tx.init(p)
@jax.jit
@functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data"), P("data"), P("data")),
                   out_specs=(P(), P()), check_vma=False)
def step(p, s, x, y, m):
    g = jax.grad(lambda p: (ce(p, x, y) * m).sum() / m.sum())(p)
    u, s = tx.update(jax.lax.pmean(g, "data"), s, p)
    return optax.apply_updates(p, u), s
for x, y, m in tokens(4, 1, size=8):
    p, s = step(p, s, x[0], y[0], m[0])
""",
    ),
    "a mean over devices that JAX has summed": (
        ["wrong-scale"],
        """
p = linear; s = tx.init(p)
@jax.jit
@functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")),
                   out_specs=(P(), P()))
def step(p, s, x, y):
    g = jax.lax.pmean(jax.grad(mse)(p, x, y), "data")
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(4, 1, size=16):
    p, s = step(p, s, xs[0], ys[0])
""",
    ),
    "pmap with a mean of the loss alone": (
        ["not-reduced"],
        """
p, s = twice((linear, tx.init(linear)))
@functools.partial(jax.pmap, axis_name="batch")
def step(p, s, x, y):
    loss, g = jax.value_and_grad(mse)(p, x, y)
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s, jax.lax.pmean(loss, "batch")
for xs, ys in rows(4, 2):
    p, s, loss = step(p, s, xs, ys)
""",
    ),
    "pmap in which devices have nothing in common": (
        ["not-reduced"],
        """
p, s = twice((linear, tx.init(linear)))
@functools.partial(jax.pmap, axis_name="batch")
def step(p, s, x, y):
    u, s = tx.update(jax.grad(mse)(p, x, y), s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(4, 2):
    p, s = step(p, s, xs, ys)
""",
    ),
    "pmap without a name, one model on each device": (
        [],
        """
p, s = twice((linear, tx.init(linear)))
@jax.pmap
def step(p, s, x, y):
    u, s = tx.update(jax.grad(mse)(p, x, y), s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(4, 2):
    p, s = step(p, s, xs, ys)
""",
    ),
    "pmap of a loss that is added up, without a mean of gradients": (
        ["wrong-scale"],
        """
p, s = twice((linear, tx.init(linear)))
def loss(p, x, y):
    total = jax.lax.psum(jnp.sum((x @ p["w"] + p["b"] - y) ** 2), "i")
    return total / jax.lax.psum(len(x), "i")
@functools.partial(jax.pmap, axis_name="i")
def step(p, s, x, y):
    g = jax.lax.psum(jax.grad(loss)(p, x, y), "i")
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(4, 2):
    p, s = step(p, s, xs, ys)
""",
    ),
    "explicit axes of a mesh": ([], EXPLICIT.replace("FACTOR", "1 / 2")),
    "explicit axes of a mesh, a sum of means": (
        ["wrong-scale"],
        EXPLICIT.replace("FACTOR", "1.0"),
    ),
    "pmap with a mean, donated": (
        [],
        """
p, s = twice((linear, tx.init(linear)))
@functools.partial(jax.pmap, axis_name="batch", donate_argnums=(0, 1))
def step(p, s, x, y):
    print("traced")
    g = jax.lax.pmean(jax.grad(mse)(p, x, y), "batch")
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(4, 2):
    p, s = step(p, s, xs, ys)
print(p["w"])
""",
    ),
}


def run(path, *command):
    """Run a script as it is, or under a command; return what it printed and its status."""
    return subprocess.run(
        [sys.executable, *command, str(path)],
        check=False,
        capture_output=True,
        text=True,
        cwd=path.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )


def audit_of(path):
    """Return what an audit of a script printed, and its result."""
    stored = path.with_suffix(".json")
    done = run(path, "-m", "gradcheck_suite", "audit", "--json", str(stored))
    return done, json.loads(stored.read_text())["results"][0]


@pytest.mark.share(8)
@pytest.mark.parametrize("name", DEVICES)
def test_devices_are_judged_together(tmp_path, name):
    truth, text = DEVICES[name]
    path = tmp_path / "train.py"
    path.write_text(TWO_DEVICES + PROLOGUE + ON_DEVICES + text)
    plain = run(path)
    done, result = audit_of(path)
    assert plain.returncode == 0, plain.stderr
    assert done.stdout == plain.stdout
    assert [violation["diagnosis"] for violation in result["violations"]] == truth
    assert done.returncode == (1 if truth else 0)
    assert "torch.distributed" not in done.stderr
    assert "DistributedDataParallel" not in done.stderr


EFFECTS = (
    SOUND["debug_print_and_callback"]
    + """
import sys
@jax.jit
def traced_once(x):
    print("traced")
    return jax.grad(lambda x: (x ** 2).sum())(x)
traced_once(np.ones(3, np.float32)); traced_once(np.ones(3, np.float32))
print(p["w"].ravel(), np.random.rand())
print("torch" in sys.modules)
sys.exit(7)
"""
)


@pytest.mark.share(4)
def test_a_run_prints_computes_and_ends_as_without_the_audit(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(PROLOGUE + "np.random.seed(0)\n" + EFFECTS)
    plain = run(path)
    done, result = audit_of(path)
    assert done.stdout == plain.stdout
    assert "False" in plain.stdout
    assert done.returncode == plain.returncode == 7
    assert result["verdict"] == "holds"


@pytest.mark.share(4)
def test_a_script_of_torch_alone_never_imports_jax(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import sys, torch\n"
        "model = torch.nn.Linear(2, 1); step = torch.optim.SGD(model.parameters(), 0.1)\n"
        "model(torch.ones(3, 2)).mean().backward(); step.step()\n"
        "print('jax' in sys.modules)\n"
    )
    done, result = audit_of(path)
    assert done.stdout == "False\n"
    assert result["steps"] == 1


@pytest.mark.full
def test_a_script_of_both_is_judged_as_both(tmp_path):
    path = tmp_path / "train.py"
    of_torch = (
        "import torch\n"
        "model = torch.nn.Linear(2, 1); step = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(3):\n"
        "    model(torch.ones(3, 2)).mean().backward(); step.step()\n"
    )
    path.write_text(PROLOGUE + SOUND["example_libraries"] + of_torch)
    _, result = audit_of(path)
    assert result["steps"] == 9
    assert [violation["diagnosis"] for violation in result["violations"]] == ["stale-window"]


@pytest.mark.full
def test_an_error_of_the_script_is_its_own(tmp_path):
    path = tmp_path / "train.py"
    fails = """
@jax.jit
def step(p):
    print("once")
    raise ValueError("of the script")
step(linear)
"""
    path.write_text(PROLOGUE + fails)
    plain = run(path)
    done, result = audit_of(path)
    assert done.returncode == plain.returncode == 1
    assert done.stdout == plain.stdout == "once\n"
    assert "ValueError: of the script" in done.stderr
    assert result["verdict"] == "unjudged"


@pytest.mark.share(4)
def test_an_error_of_the_audit_never_reaches_the_script(tmp_path):
    path = tmp_path / "train.py"
    breaks = """
from gradcheck_suite.auditing.jax import marks
def broken(*args, **kwargs):
    raise RuntimeError("of the audit")
marks.batching.fancy_primitive_batchers[marks.mark_p] = broken
"""
    path.write_text(PROLOGUE + breaks + SOUND["seeds_under_vmap"] + 'print("end")\n')
    done, result = audit_of(path)
    assert done.stdout == "end\n"
    assert "Traceback" not in done.stderr
    assert "of the audit" in result["unjudged"]
