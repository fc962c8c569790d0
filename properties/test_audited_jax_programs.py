"""The audit on drawn JAX programs: never a blame on a sound one, never silence on a faulty one.

A program is the text of a training script: a way of going through the micro-batches of a window, a
loss, an optimizer, and masks whose counts differ. It is sound as it is drawn, or has one fault in
one of its pieces, so what is true of it is known before it runs.
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

LOSSES = {
    # the sum over the valid items of a micro-batch
    "tokens": "def total(p, x, y, m):\n    return (ce(p, x, y) * m).sum()\n",
    "selected": "def total(p, x, y, m):\n    return jnp.where(m > 0, ce(p, x, y), 0.0).sum()\n",
    "rows": "def total(p, x, y, m):\n    return jnp.sum(jnp.sum(ce(p, x, y) * m, -1))\n",
}
OPTIMIZERS = {
    "sgd": "optax.sgd(1e-2)",
    "adam": "optax.adam(1e-3)",
    "clipped": "optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3))",
    "scheduled": "optax.inject_hyperparams(optax.sgd)(optax.cosine_decay_schedule(1e-2, 50))",
}
WAYS = {
    # adds up `one(x, y, m)` over the micro-batches, from `start`
    "unrolled": """
    g = start
    for x, y, m in zip(xs, ys, ms):
        g = add(g, one(x, y, m))
""",
    "scan": """
    g, _ = jax.lax.scan(lambda g, b: (add(g, one(*b)), None), start, (xs, ys, ms))
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
}
SOUND_SCALES = {
    # the gradient of a micro-batch, and the factor of the sum
    "divided at the end": ("jax.grad(total)(p, x, y, m)", "1 / ms.sum()"),
    "divided in the loss": ("jax.grad(lambda p: total(p, x, y, m) / ms.sum())(p)", "1.0"),
    "weighted means": (
        "scale(jax.grad(lambda p: total(p, x, y, m) / m.sum())(p), m.sum() / ms.sum())",
        "1.0",
    ),
    "with a scale that is taken out": (
        "jax.grad(lambda p: 64 * total(p, x, y, m))(p)",
        "1 / (64 * ms.sum())",
    ),
    "value_and_grad": ("jax.value_and_grad(total)(p, x, y, m)[1]", "1 / ms.sum()"),
    "remat": ("jax.grad(jax.checkpoint(total))(p, x, y, m)", "1 / ms.sum()"),
    "vjp": ("jax.vjp(lambda p: total(p, x, y, m), p)[1](1.0)[0]", "1 / ms.sum()"),
}
FAULTS = {
    # what may name it, the gradient of a micro-batch, the factor, what the sum starts at
    "mean of means": (
        {"mean-of-means"},
        "jax.grad(lambda p: total(p, x, y, m) / m.sum())(p)",
        "1 / len(xs)",
        "zeros(p)",
    ),
    "sum of means": (
        {"mean-of-means", "wrong-scale"},
        "jax.grad(lambda p: total(p, x, y, m) / m.sum())(p)",
        "1.0",
        "zeros(p)",
    ),
    "divided twice": (
        {"wrong-scale"},
        "jax.grad(lambda p: total(p, x, y, m) / ms.sum())(p)",
        "1 / len(xs)",
        "zeros(p)",
    ),
    "not begun anew": (
        {"stale-window"},
        "jax.grad(lambda p: total(p, x, y, m) / ms.sum())(p)",
        "1.0",
        "before",
    ),
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
    loss = draw(st.sampled_from(sorted(LOSSES)))
    optimizer = draw(st.sampled_from(sorted(OPTIMIZERS)))
    way = draw(st.sampled_from(sorted(WAYS)))
    number = draw(st.integers(3, 4))
    seed = draw(st.integers(0, 99))
    donate = draw(st.booleans())
    jit = "functools.partial(jax.jit, donate_argnums=(0, 1))" if donate else "jax.jit"
    return f"""
{LOSSES[loss]}
tx = {OPTIMIZERS[optimizer]}; p = jax.tree.map(jnp.array, lm); s = tx.init(p)
@{jit}
def step(p, s, before, xs, ys, ms):
    def one(x, y, m):
        return {one}
    start = {start}
{WAYS[way]}
    u, s = tx.update(scale(g, {factor}), s, p)
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


def _result(program: Program):
    with tempfile.TemporaryDirectory() as folder:
        return audited(Path(folder), "drawn", program.text)[0]


@given(sound_programs())
@scaled(24)
def test_no_sound_program_is_blamed(program):
    result = _result(program)
    assert result.violations == ()
    assert result.holds, result.unjudged


@given(faulty_programs())
@scaled(24)
def test_each_faulty_program_is_named(program):
    result = _result(program)
    assert {violation.diagnosis for violation in result.violations} & program.names
    assert {violation.diagnosis for violation in result.violations} <= program.names


def test_the_prologue_runs_by_itself():
    assert audited(Path(tempfile.mkdtemp()), "prologue", "")[0].unjudged
    assert "tokens" in PROLOGUE
