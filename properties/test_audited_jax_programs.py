"""The audit on drawn JAX programs: never a blame on a sound one, never silence on a faulty one.

A program is the text of a training script: a model and its loss over valid items, a way of going
through the micro-batches of a window, an optimizer, devices, and masks whose counts differ. It is
sound as it is drawn, or has one fault in one of its pieces, so what is true of it is known before it
runs.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties.helpers import scaled
from tests.auditing.jax.programs import PROLOGUE
from tests.auditing.jax.test_programs import audited

pytest.importorskip("jax")
pytest.importorskip("optax")

MODELS = {
    # the losses of all items of a micro-batch, and the parameters
    "table": ("def items(p, x, y):\n    return ce(p, x, y)\n", "lm"),
    "recurrent": (
        """
def items(p, x, y):
    def cell(h, e):
        h = jnp.tanh(e + h @ p["h"])
        return h, h
    e = jnp.moveaxis(p["emb"][x], 1, 0)
    hs = jnp.moveaxis(jax.lax.scan(cell, jnp.zeros_like(e[0]), e)[1], 0, 1)
    return optax.softmax_cross_entropy_with_integer_labels(hs @ p["out"], y)
""",
        '{**lm, "h": 0.1 * jax.random.normal(jax.random.key(5), (8, 8))}',
    ),
    "regression": (
        "def items(p, x, y):\n    return ((p['emb'][x] @ p['out'])[..., 0] - y / 11.0) ** 2\n",
        "lm",
    ),
    "own backward": (
        """
@jax.custom_vjp
def act(x):
    return jnp.tanh(x)
act.defvjp(lambda x: (jnp.tanh(x), jnp.tanh(x)), lambda t, ct: (ct * (1 - t * t),))
def items(p, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(act(p["emb"][x]) @ p["out"], y)
""",
        "lm",
    ),
    "sixteen bits": (
        """
def items(p, x, y):
    low = (p["emb"][x]).astype(jnp.bfloat16) @ p["out"].astype(jnp.bfloat16)
    return optax.softmax_cross_entropy_with_integer_labels(low.astype(jnp.float32), y)
""",
        "lm",
    ),
}
LOSSES = {
    # the sum over the valid items of a micro-batch
    "tokens": "def total(p, x, y, m):\n    return (items(p, x, y) * m).sum()\n",
    "selected": "def total(p, x, y, m):\n    return jnp.where(m > 0, items(p, x, y), 0.0).sum()\n",
    "rows": "def total(p, x, y, m):\n    return jnp.sum(jnp.sum(items(p, x, y) * m, -1))\n",
    "product": "def total(p, x, y, m):\n    return jnp.vdot(items(p, x, y), m)\n",
    "weighted": "def total(p, x, y, m):\n    return jnp.average(items(p, x, y), weights=m) * m.sum()\n",
}
OPTIMIZERS = {
    "sgd": "optax.sgd(1e-2)",
    "momentum": "optax.sgd(1e-2, momentum=0.9, nesterov=True)",
    "adam": "optax.adam(1e-3)",
    "lion": "optax.lion(1e-4)",
    "adafactor": "optax.adafactor(1e-3)",
    "clipped": "optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3))",
    "scheduled": "optax.inject_hyperparams(optax.sgd)(optax.cosine_decay_schedule(1e-2, 50))",
    "labelled": "optax.multi_transform({'a': optax.adam(1e-3), 'b': optax.sgd(1e-2)},"
    " {k: 'a' if k == 'emb' else 'b' for k in params})",
}
WAYS = {
    # adds up `one(x, y, m)` over the micro-batches, from `start`
    "unrolled": """
    g = start
    for x, y, m in zip(xs, ys, ms):
        g = add(g, one(x, y, m))
""",
    "list": """
    g = functools.reduce(add, [one(x, y, m) for x, y, m in zip(xs, ys, ms)], start)
""",
    "scan": """
    g, _ = jax.lax.scan(lambda g, b: (add(g, one(*b)), None), start, (xs, ys, ms))
""",
    "scan backwards": """
    g, _ = jax.lax.scan(lambda g, b: (add(g, one(*b)), None), start, (xs, ys, ms), reverse=True)
""",
    "fori_loop": """
    g = jax.lax.fori_loop(0, len(xs), lambda i, g: add(g, one(xs[i], ys[i], ms[i])), start)
""",
    "while_loop": """
    _, g = jax.lax.while_loop(
        lambda c: c[0] < len(xs),
        lambda c: (c[0] + 1, add(c[1], one(xs[c[0]], ys[c[0]], ms[c[0]]))),
        (0, start),
    )
""",
    "cond": """
    def body(g, b):
        return jax.lax.cond(b[2].sum() > 0, lambda: add(g, one(*b)), lambda: g), None
    g, _ = jax.lax.scan(body, start, (xs, ys, ms))
""",
}
SOUND_SCALES = {
    # the gradient of a micro-batch, and the factor of the sum
    "divided at the end": ("jax.grad(total)(p, x, y, m)", "1 / count"),
    "divided in the loss": ("jax.grad(lambda p: total(p, x, y, m) / count)(p)", "1.0"),
    "weighted means": (
        "scale(jax.grad(lambda p: total(p, x, y, m) / m.sum())(p), m.sum() / count)",
        "1.0",
    ),
    "with a scale that is taken out": (
        "jax.grad(lambda p: 64 * total(p, x, y, m))(p)",
        "1 / (64 * count)",
    ),
    "value_and_grad": ("jax.value_and_grad(total)(p, x, y, m)[1]", "1 / count"),
    "aux": (
        "jax.value_and_grad(lambda p: (total(p, x, y, m), m.sum()), has_aux=True)(p)[1]",
        "1 / count",
    ),
    "remat": ("jax.grad(jax.checkpoint(total))(p, x, y, m)", "1 / count"),
    "vjp": ("jax.vjp(lambda p: total(p, x, y, m), p)[1](1.0)[0]", "1 / count"),
}
OWN_MEAN = "jax.grad(lambda p: total(p, x, y, m) / m.sum())(p)"
SHARE = "jax.grad(lambda p: total(p, x, y, m) / count)(p)"
CLIPPED = "(lambda g: scale(g, jnp.minimum(1.0, 0.02 / norm(g))))(" + SHARE + ")"
FAULTS = {
    # what may name it, the gradient of a micro-batch, the factor, what the sum starts at
    "mean of means": ({"mean-of-means"}, OWN_MEAN, "1 / len(xs)", "zeros(p)"),
    "sum of means": ({"mean-of-means", "wrong-scale"}, OWN_MEAN, "1.0", "zeros(p)"),
    "divided twice": ({"wrong-scale"}, SHARE, "1 / len(xs)", "zeros(p)"),
    "not begun anew": ({"stale-window"}, SHARE, "1.0", "before"),
    "means by longest rows": (
        # where all of them are as long, a mean of means
        {"wrong-count", "unrecognised-weights", "mean-of-means"},
        f"scale({OWN_MEAN}, m.any(0).sum() / ms.any(-2).sum())",
        "1.0",
        "zeros(p)",
    ),
    "clipped one by one": ({"clipped", "unrecognised-weights"}, CLIPPED, "1.0", "zeros(p)"),
    "old parameters": ({"stale-parameters"}, SHARE.replace("(p)", "(first)"), "1.0", "zeros(p)"),
}
STATES = {
    # the step that is called, with and without donated buffers
    "jit": "jax.jit",
    "donated": "functools.partial(jax.jit, donate_argnums=(0, 1))",
}


@dataclass(frozen=True)
class Program:
    """A drawn program.

    Attributes:
        text: of the script.
        names: of which one must be found; empty for a sound program.
    """

    text: str
    names: frozenset[str] = frozenset()


def _text(draw: st.DrawFn, one: str, factor: str, start: str) -> str:
    model, parameters = MODELS[draw(st.sampled_from(sorted(MODELS)))]
    loss = draw(st.sampled_from(sorted(LOSSES)))
    optimizer = draw(st.sampled_from(sorted(OPTIMIZERS)))
    way = draw(st.sampled_from(sorted(WAYS)))
    number = draw(st.integers(3, 4))
    seed = draw(st.integers(0, 99))
    compiled = STATES[draw(st.sampled_from(sorted(STATES)))]
    on_devices = draw(st.booleans())
    parts = f"""
{model}
{LOSSES[loss]}
params = {parameters}
tx = {OPTIMIZERS[optimizer]}; p = jax.tree.map(jnp.array, params); s = tx.init(p)
first = jax.tree.map(jnp.array, params)
"""
    if on_devices:
        return f"""{parts}
def total_gradient(p, before, xs, ys, ms):
    count = jax.lax.psum(ms.sum(), "devices")
    def one(x, y, m):
        return {one}
    start = {start.replace("before", "scale(before, 1 / 2)")}
{WAYS[way]}
    return jax.lax.psum(scale(g, {factor}), "devices")
mapped = jax.vmap(total_gradient, in_axes=(None, None, 0, 0, 0), axis_name="devices")
@{compiled}
def step(p, s, before, xs, ys, ms):
    cut = [a.reshape(2, {number}, 2, -1) for a in (xs, ys, ms)]
    g = jax.tree.map(lambda a: a[0], mapped(p, before, *cut))
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s, g
before = zeros(p)
for batch in tokens(5, {number}, seed={seed}):
    p, s, before = step(p, s, before, *batch)
"""
    return f"""{parts}
@{compiled}
def step(p, s, before, xs, ys, ms):
    count = ms.sum()
    def one(x, y, m):
        return {one}
    start = {start}
{WAYS[way]}
    g = scale(g, {factor})
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s, g
before = zeros(p)
for batch in tokens(5, {number}, seed={seed}):
    p, s, before = step(p, s, before, *batch)
"""


@st.composite
def sound_programs(draw: st.DrawFn) -> Program:
    """Draw a sound program."""
    one, factor = SOUND_SCALES[draw(st.sampled_from(sorted(SOUND_SCALES)))]
    return Program(_text(draw, one, factor, "zeros(p)"))


@st.composite
def faulty_programs(draw: st.DrawFn) -> Program:
    """Draw a program with one fault."""
    names, one, factor, start = FAULTS[draw(st.sampled_from(sorted(FAULTS)))]
    return Program(_text(draw, one, factor, start), frozenset(names))


def result_of(program: Program):
    """Return the result of an audit of a program."""
    with tempfile.TemporaryDirectory() as folder:
        return audited(Path(folder), "drawn", program.text)[0]


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
