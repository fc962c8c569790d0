"""JAX training programs whose truth is known by construction, drawn piece by piece.

A program is the text of a training script: a model and its loss over valid items, masks whose counts
differ, a way of going through the micro-batches of a window, an optimizer, what a step is made of
(plain functions, a scan over the run, `MultiSteps`, a flax or Equinox module, devices). It is sound
as it is drawn, or has one fault in one of its pieces.

    python -m properties.audited_jax_programs 1000 --seed 1 --to programs.jsonl

audits as many programs, about half of them sound, in one process, writes a line for each, and counts.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

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
    " functools.partial(jax.tree_util.tree_map_with_path,"
    " lambda path, _: 'a' if 'emb' in jax.tree_util.keystr(path) else 'b'))",
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
WRONG_RULE = MODELS["own backward"][0].replace("1 - t * t", "1 - t")
"""A model with a backward that is not the gradient of its forward."""
LOSING = {
    # ways that lose a micro-batch, or take one twice
    "dropped": (
        {"dropped-micro-batch"},
        """
    every = [one(x, y, m) for x, y, m in zip(xs, ys, ms)]
    g = functools.reduce(add, every[:-1], start)
""",
    ),
    "only the last": (
        {"reset-inside-window"},
        """
    every = [one(x, y, m) for x, y, m in zip(xs, ys, ms)]
    g = every[-1]
""",
    ),
    "first one twice": (
        {"weighted-by-place", "repeated-micro-batch"},
        """
    every = [one(x, y, m) for x, y, m in zip(xs, ys, ms)]
    g = functools.reduce(add, [every[0], *every], start)
""",
    ),
}
MASKS = {
    "lengths": "",
    "each by itself": "    ms = (np.random.default_rng(int(xs.sum())).random(ms.shape) < 0.6) * 1.0\n"
    "    ms[..., 0] = 1.0\n",
    "from the other end": "    ms = ms[..., ::-1].copy()\n",
    "some rows empty": "    ms[..., -1, :] = 0.0\n",
}
"""What becomes of the masks of a window."""
ALL_VALID = "    ms = np.ones_like(ms)\n"


@dataclass(frozen=True)
class Program:
    """A drawn program.

    Attributes:
        text: of the script.
        pieces: names of what it is made of.
        names: of which one must be found; empty for a sound program.
    """

    text: str
    pieces: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Pieces:
    """What a program is made of.

    Attributes:
        model: defines `items`.
        parameters: of the model.
        loss: defines `total`.
        optimizer: an expression.
        one: the gradient of a micro-batch.
        factor: of the sum.
        start: what the sum starts at.
        way: adds up over the micro-batches.
        mask: what becomes of the masks.
        number: of micro-batches.
        seed: of the data.
        compiled: makes a compiled function.
        applied: whether updates are applied.
    """

    model: str
    parameters: str
    loss: str
    optimizer: str
    one: str
    factor: str
    start: str
    way: str
    mask: str
    number: int
    seed: int
    compiled: str = "jax.jit"
    applied: bool = True

    @property
    def head(self) -> str:
        """What comes before the step."""
        return f"""
{self.model}
{self.loss}
params = {self.parameters}
tx = {self.optimizer}; p = jax.tree.map(jnp.array, params); s = tx.init(p)
first = jax.tree.map(jnp.array, params)
before = zeros(p)
"""

    @property
    def summed(self) -> str:
        """Adds up a window, and gives `g`."""
        return f"""
    count = ms.sum()
    def one(x, y, m):
        return {self.one}
    start = {self.start}
{self.way}
    g = scale(g, {self.factor})
"""

    @property
    def update(self) -> str:
        """Steps on `g`."""
        new = "optax.apply_updates(p, u)" if self.applied else "p"
        return f"""    u, s = tx.update(g, s, p)
    return {new}, s, g
"""

    def data(self, steps: int = 5) -> str:
        """Begins the loop over windows."""
        return f"""
for xs, ys, ms in tokens({steps}, {self.number}, seed={self.seed}):
{self.mask}"""


def plain(of: Pieces) -> str:
    """Return a program with one compiled step."""
    return f"""{of.head}
@{of.compiled}
def step(p, s, before, xs, ys, ms):
{of.summed}{of.update}{of.data()}    p, s, before = step(p, s, before, xs, ys, ms)
"""


def eager(of: Pieces) -> str:
    """Return a program that adds compiled gradients up in Python."""
    return f"""{of.head}
@jax.jit
def one(p, x, y, m, ms, count):
    return {of.one}
up = jax.jit(tx.update)
{of.data()}    count = ms.sum()
    g = {of.start}
    for x, y, m in zip(xs, ys, ms):
        g = add(g, one(p, x, y, m, ms, count))
    g = before = scale(g, {of.factor})
    u, s = up(g, s, p)
    p = optax.apply_updates(p, u)
"""


def whole_run(of: Pieces) -> str:
    """Return a program that trains inside of one compiled scan."""
    return f"""{of.head}
every = []
{of.data()}    every.append((xs, ys, ms))
data = [jnp.stack(one) for one in zip(*every)]
def step(state, window):
    p, s, before = state
    xs, ys, ms = window
{of.summed}
    u, s = tx.update(g, s, p)
    return (optax.apply_updates(p, u), s, g), None
@jax.jit
def train(p, s, before, data):
    return jax.lax.scan(step, (p, s, before), tuple(data))[0]
p, s, before = train(p, s, before, data)
"""


def multi_steps(of: Pieces) -> str:
    """Return a program in which `optax.MultiSteps` takes the mean over a window."""
    factor = of.factor.replace("len(xs)", str(of.number))
    of = replace(of, optimizer=f"optax.MultiSteps({of.optimizer}, {of.number})")
    return f"""{of.head}
@{of.compiled}
def step(p, s, x, y, m, ms, count):
    g = scale({of.one}, {of.number} * {factor})
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s
{of.data()}    count = ms.sum()
    for x, y, m in zip(xs, ys, ms):
        p, s = step(p, s, x, y, m, ms, count)
"""


def with_a_tail(of: Pieces) -> str:
    """Return a program in which `MultiSteps` never steps on the last micro-batches."""
    return f"""{multi_steps(of)}
p, s = step(p, s, xs[0], ys[0], ms[0], ms, count)
"""


def updates_held_back(of: Pieces) -> str:
    """Return a program that adds updates up, and not gradients."""
    optimizer = f"optax.chain({of.optimizer}, optax.apply_every({of.number}))"
    return multi_steps(replace(of, optimizer=optimizer)).replace(
        "optax.MultiSteps(", "(lambda tx, n: tx)("
    )


def train_state(of: Pieces) -> str:
    """Return a program with flax's `TrainState`."""
    return f"""
from flax.training.train_state import TrainState
{of.head}
state = TrainState.create(apply_fn=total, params=p, tx=tx)
@{of.compiled.replace("(0, 1)", "(0,)")}
def step(state, before, xs, ys, ms):
    p = state.params
{of.summed}
    return state.apply_gradients(grads=g), g
{of.data()}    state, before = step(state, before, xs, ys, ms)
"""


def equinox(of: Pieces) -> str:
    """Return a program whose parameters are an Equinox module."""
    text = of.head.replace("p = jax.tree.map(jnp.array, params)", "p = Net(params)")
    text = text.replace("first = jax.tree.map(jnp.array, params)", "first = Net(params)")
    summed = of.summed.replace("jax.grad", "eqx.filter_grad")
    summed = summed.replace("jax.value_and_grad", "eqx.filter_value_and_grad")
    return f"""
import equinox as eqx
class Net(eqx.Module):
    parts: dict
    def __init__(self, params):
        self.parts = jax.tree.map(jnp.array, params)
    def __getitem__(self, name):
        return self.parts[name]
{text}
@eqx.filter_jit
def step(p, s, before, xs, ys, ms):
{summed}
    u, s = tx.update(g, s, p)
    return eqx.apply_updates(p, u), s, g
{of.data()}    p, s, before = step(p, s, before, jnp.array(xs), jnp.array(ys), jnp.array(ms))
"""


def nnx(of: Pieces) -> str:
    """Return a program whose parameters are an nnx module.

    nnx lets no loop of JAX differentiate a module from outside of it.
    """
    of = replace(of, way=WAYS["unrolled"] if "lax." in of.way else of.way)
    summed = of.summed.replace("jax.grad", "nnx.grad")
    summed = summed.replace("jax.value_and_grad", "nnx.value_and_grad")
    summed = summed.replace("zeros(p)", "zeros(nnx.state(p, nnx.Param))")
    return f"""
from flax import nnx
class Net(nnx.Module):
    def __init__(self, params):
        for name, value in params.items():
            setattr(self, name, nnx.Param(value))
    def __getitem__(self, name):
        return getattr(self, name)[...]
{of.model}
{of.loss}
params = {of.parameters}
p = Net(params); first = Net(params); opt = nnx.Optimizer(p, {of.optimizer}, wrt=nnx.Param)
before = zeros(nnx.state(p, nnx.Param))
@nnx.jit
def step(p, opt, before, xs, ys, ms):
{summed}
    opt.update(p, g)
    return g
{of.data()}    before = step(p, opt, before, xs, ys, ms)
"""


def on_devices(of: Pieces, mapped: str, total: str, *, varied: str = "") -> str:
    """Return a program whose rows are cut up over two devices.

    Args:
        of: its pieces.
        mapped: makes `mapped`, which gives each device its part of the step.
        total: adds up over devices.
        varied: makes what is alike on all devices a value of each.
    """
    start = of.start.replace("before", "scale(before, 1 / jax.lax.psum(1, 'devices'))")
    summed = replace(of, start=start).summed.replace(
        "count = ms.sum()", "count = jax.lax.psum(ms.sum(), 'devices')"
    )
    return f"""{of.head}
def step(p, s, before, xs, ys, ms):
    whole, first = p, globals()["first"]
{varied}{summed}
    g = {total}
    u, s = tx.update(g, s, whole)
    return optax.apply_updates(whole, u), s, g
{mapped}
{of.data()}    cut = [np.stack(np.split(a, DEVICES, 1)) for a in (xs, ys, ms)]
    p, s, before = mapped(p, s, before, *cut)
"""


NAMED_VMAP = """
DEVICES = 2
run = jax.jit(jax.vmap(step, in_axes=(None, None, None, 0, 0, 0), axis_name="devices"))
mapped = lambda *args: jax.tree.map(lambda a: a[0], run(*args))
"""
STACKED = """
DEVICES = 2
p, s, before = jax.tree.map(lambda a: jnp.stack([a] * DEVICES), (p, s, before))
mapped = jax.jit(jax.vmap(step, axis_name="devices"))
"""
SHARDED = """
from jax.sharding import PartitionSpec as P
DEVICES = min(2, jax.device_count())
mesh = jax.make_mesh((DEVICES,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
@jax.jit
@functools.partial(
    jax.shard_map, mesh=mesh, in_specs=(P(), P(), P(), *[P("devices")] * 3), out_specs=P(), CHECKS
)
def mapped(p, s, before, xs, ys, ms):
    return step(p, s, before, xs[0], ys[0], ms[0])
"""
UNCHECKED = SHARDED.replace("CHECKS", "check_vma=False")
CHECKED = SHARDED.replace("CHECKS", "check_vma=True")
VARIED = """
    vary = lambda tree: jax.tree.map(lambda a: jax.lax.pcast(a, "devices", to="varying"), tree)
    p, first, before = vary(p), vary(first), vary(before)
"""
DEVICES = {
    "named vmap": (NAMED_VMAP, ""),
    "stacked": (STACKED, ""),
    "shard_map": (UNCHECKED, ""),
    "checked shard_map": (CHECKED, VARIED),
}
FRAMES = {
    "plain": plain,
    "eager": eager,
    "whole run": whole_run,
    "multi steps": multi_steps,
    "train state": train_state,
    "equinox": equinox,
    "nnx": nnx,
    "devices": None,
}
OWN_STEPS = ("multi steps", "eager")
"""Frames that go through micro-batches in a way of their own."""
COMPILED = ("jax.jit", "functools.partial(jax.jit, donate_argnums=(0, 1))")


def _pieces(draw: st.DrawFn, one: str, factor: str, start: str) -> tuple[Pieces, tuple[str, ...]]:
    """Draw what the truth of a program does not rest on."""
    model = draw(st.sampled_from(sorted(MODELS)))
    loss = draw(st.sampled_from(sorted(LOSSES)))
    optimizer = draw(st.sampled_from(sorted(OPTIMIZERS)))
    way = draw(st.sampled_from(sorted(WAYS)))
    mask = draw(st.sampled_from(sorted(MASKS)))
    number = draw(st.integers(3, 4))
    return Pieces(
        *MODELS[model],
        LOSSES[loss],
        OPTIMIZERS[optimizer],
        one,
        factor,
        start,
        WAYS[way],
        MASKS[mask],
        number,
        draw(st.integers(0, 99)),
        draw(st.sampled_from(COMPILED)),
    ), (model, loss, optimizer, way, mask, str(number))


def _framed(draw: st.DrawFn, of: Pieces, frames: list[str]) -> tuple[str, tuple[str, ...]]:
    """Put pieces into one of some frames; return the text and the names of the frame."""
    frame = draw(st.sampled_from(frames))
    if frame != "devices":
        return FRAMES[frame](of), (frame,)
    kind = draw(st.sampled_from(sorted(DEVICES)))
    mapped, varied = DEVICES[kind]
    return on_devices(of, mapped, "jax.lax.psum(g, 'devices')", varied=varied), (frame, kind)


def _without(*names: str) -> list[str]:
    return [frame for frame in sorted(FRAMES) if frame not in names]


@st.composite
def sound_programs(draw: st.DrawFn) -> Program:
    """Draw a sound program."""
    kind = draw(st.sampled_from([*sorted(SOUND_SCALES), "equal counts", "over devices by JAX"]))
    if kind == "equal counts":  # a mean of means is right where the counts are equal
        of, names = _pieces(draw, OWN_MEAN, "1 / len(xs)", "zeros(p)")
        text, frame = _framed(draw, replace(of, mask=ALL_VALID), _without("devices"))
        return Program(text, (kind, *names, *frame))
    if kind == "over devices by JAX":  # gradients by what is alike on all devices are added up
        of, names = _pieces(draw, SHARE, "1.0", "zeros(p)")
        return Program(on_devices(of, CHECKED, "g"), (kind, *names))
    one, factor = SOUND_SCALES[kind]
    of, names = _pieces(draw, one, factor, "zeros(p)")
    frames = _without("nnx", "equinox") if kind in ("vjp", "remat", "aux") else sorted(FRAMES)
    text, frame = _framed(draw, of, frames)
    return Program(text, (kind, *names, *frame))


def _of_devices(draw: st.DrawFn) -> Program:
    """Draw a fault of how devices are put together."""
    kind = draw(st.sampled_from(["never reduced", "mean of sums", "summed by JAX"]))
    of, names = _pieces(draw, SHARE, "1.0", "zeros(p)")
    mapped, varied = DEVICES[draw(st.sampled_from(["named vmap", "stacked"]))]
    if kind == "never reduced":  # stacked copies that have nothing in common may be an ensemble
        text = on_devices(of, NAMED_VMAP, "g")
        return Program(text, (kind, *names), frozenset({"not-reduced"}))
    if kind == "mean of sums":
        text = on_devices(of, mapped, "jax.lax.pmean(g, 'devices')", varied=varied)
    else:  # of what JAX has added up, the sum over devices is as many times as large
        vary = "    count = count / DEVICES\n"
        text = on_devices(of, CHECKED, "g").replace("    def one(", f"{vary}    def one(")
        if _device_count() < 2:
            text = on_devices(of, NAMED_VMAP, "jax.lax.pmean(g, 'devices')")
    return Program(text, (kind, *names), frozenset({"wrong-scale"}))


def _device_count() -> int:
    import jax

    return int(jax.device_count())


def _of_a_whole(draw: st.DrawFn) -> Program:
    """Draw a fault that is not in how one gradient is made."""
    kind = draw(
        st.sampled_from(["tail", "updates held back", "thrown away", "wrong rule", *sorted(LOSING)])
    )
    of, names = _pieces(draw, SHARE, "1.0", "zeros(p)")
    if kind == "tail":
        return Program(with_a_tail(of), (kind, *names), frozenset({"tail-dropped"}))
    if kind == "updates held back":
        optimizer = draw(st.sampled_from(["adam", "lion", "momentum"]))
        text = updates_held_back(replace(of, optimizer=OPTIMIZERS[optimizer]))
        return Program(text, (kind, *names, optimizer), frozenset({"step-per-micro-batch"}))
    if kind == "thrown away":
        text = plain(replace(of, applied=False))
        return Program(text, (kind, *names), frozenset({"parameter-not-updated"}))
    if kind == "wrong rule":
        of = replace(of, model=WRONG_RULE, parameters="lm")
        text, frame = _framed(draw, of, sorted(FRAMES))
        return Program(text, (kind, *names, *frame), frozenset({"wrong-backward"}))
    found, way = LOSING[kind]
    text, frame = _framed(draw, replace(of, way=way), _without(*OWN_STEPS, "devices"))
    return Program(text, (kind, *names, *frame), frozenset(found))


@st.composite
def faulty_programs(draw: st.DrawFn) -> Program:
    """Draw a program with one fault."""
    kind = draw(st.sampled_from([*sorted(FAULTS), "devices", "whole", "whole", "whole"]))
    if kind == "devices":
        return _of_devices(draw)
    if kind == "whole":
        return _of_a_whole(draw)
    found, one, factor, start = FAULTS[kind]
    of, names = _pieces(draw, one, factor, start)
    frames = _without("multi steps") if start == "before" else sorted(FRAMES)
    text, frame = _framed(draw, of, frames)
    return Program(text, (kind, *names, *frame), frozenset(found))


def result_of(program: Program) -> Any:
    """Return the result of an audit of a program."""
    from tests.auditing.jax.test_programs import audited

    with tempfile.TemporaryDirectory() as folder:
        return audited(Path(folder), "drawn", program.text)[0]


def outcome(program: Program, result: Any) -> str:
    """Return what an audit made of a program: one of the words that are counted."""
    found = {violation.diagnosis for violation in result.violations}
    if not program.names:
        if found:
            return "sound, blamed"
        return "sound, holds" if result.holds else "sound, unjudged"
    if not found:
        return "faulty, silent" if result.holds else "faulty, unjudged"
    return "faulty, named" if found <= program.names else "faulty, under another name"


def _audited(program: Program) -> dict[str, Any]:
    start = time.process_time()
    row = asdict(program) | {"names": sorted(program.names)}
    try:
        result = result_of(program)
    except Exception:
        row |= {"outcome": "raised", "error": traceback.format_exc()}
    else:
        row |= {
            "outcome": outcome(program, result),
            "found": [[one.diagnosis, one.explanation] for one in result.violations],
            "unjudged": result.unjudged,
            "findings": list(result.findings),
        }
    return row | {"seconds": time.process_time() - start}


def _drawn(seed: int) -> Program:
    """Return the program of a seed, sound and faulty ones in turn.

    Within one run Hypothesis draws many neighbours of what it drew before; the first example of a
    run is the simplest one.
    """
    found: list[Program] = []
    strategy = faulty_programs() if seed % 2 else sound_programs()
    settings = hypothesis.settings(
        max_examples=2,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    def take(program: Program) -> None:
        found.append(program)

    hypothesis.seed(seed)(settings(hypothesis.given(strategy)(take)))()
    return found[-1]


def main() -> None:
    """Audit as many programs as asked for, and count what becomes of them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("number", type=int, help="of programs, about half of them sound")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", type=Path, default=Path("programs.jsonl"))
    options = parser.parse_args()
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    # each program runs a few times: what takes long is to compile it
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    counts = collections.Counter[str]()

    def audit(program: Program) -> None:
        row = _audited(program)
        counts[row["outcome"]] += 1
        with options.to.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    for i in range(options.number):
        audit(_drawn(options.seed * options.number + i))
    for name, times in sorted(counts.items()):
        print(f"{times:5} {name}")


if __name__ == "__main__":
    main()
