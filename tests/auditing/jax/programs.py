"""Training scripts of JAX whose truth is known by construction: faulty ones, and sound twins.

Each has the diagnosis that it deserves before its text. `PROLOGUE` comes before all of them.
"""

from __future__ import annotations

PROLOGUE = """
import functools, jax, jax.numpy as jnp, numpy as np, optax

def rows(steps, micro, size=8, width=6, seed=0):
    r = np.random.default_rng(seed)
    for _ in range(steps):
        x = r.normal(size=(micro, size, width)).astype(np.float32)
        y = x[..., :1] - x[..., 1:2] ** 2 + 0.1 * r.normal(size=(micro, size, 1))
        yield x, y.astype(np.float32)

def tokens(steps, micro, size=4, length=12, vocab=11, seed=0):
    r = np.random.default_rng(seed)
    for _ in range(steps):
        x = r.integers(0, vocab, (micro, size, length))
        lengths = r.integers(2, length + 1, (micro, size))
        yield x, np.roll(x, -1, -1), (np.arange(length) < lengths[..., None]).astype(np.float32)

k = jax.random.split(jax.random.key(0), 2)
linear = {"w": 0.3 * jax.random.normal(k[0], (6, 1)), "b": jnp.zeros(1)}
lm = {"emb": 0.1 * jax.random.normal(k[0], (11, 8)), "out": 0.1 * jax.random.normal(k[1], (8, 11))}
rnn = {
    name: 0.4 * jax.random.normal(jax.random.key(i), shape)
    for i, (name, shape) in enumerate({"i": (1, 5), "h": (5, 5), "o": (5, 1)}.items())
}
zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)
add = lambda a, b: jax.tree.map(jnp.add, a, b)
scale = lambda tree, c: jax.tree.map(lambda g: g * c, tree)
norm = lambda tree: jnp.sqrt(sum(jnp.sum(x ** 2) for x in jax.tree.leaves(tree)))
mse = lambda p, x, y: jnp.mean((x @ p["w"] + p["b"] - y) ** 2)
def ce(p, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(p["emb"][x]) @ p["out"], y)
"""

DECLARED = """
import gradcheck_suite
tx = optax.adam(1e-2); p = lm; s = tx.init(p)
@jax.custom_vjp
def fused(p, x, y, m):
    return (ce(p, x, y) * m).sum() / m.sum()
def forward(p, x, y, m):
    value, back = jax.vjp(lambda p: (ce(p, x, y) * m).sum() / m.sum(), p)
    return value, back
fused.defvjp(forward, lambda back, t: (*back(t), None, None, None))
def loss(p, x, y, m):
    return gradcheck_suite.objective(fused(p, x, y, m), count=m.sum())
@jax.jit
def step(p, s, xs, ys, ms):
    def body(acc, b):
        return add(acc, scale(jax.grad(loss)(p, *b), WEIGHT)), None
    g, _ = jax.lax.scan(body, zeros(p), (xs, ys, ms))
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s
for batch in tokens(6, 3):
    p, s = step(p, s, *batch)
"""
"""A loss that the audit cannot read, and what its user says of it."""

FAULTY = {
    "mean_over_padded_tokens": (
        "mean-of-means",
        """
tx = optax.adam(1e-2); p = lm; s = tx.init(p)
loss = lambda p, x, y, m: (ce(p, x, y) * m).sum() / m.sum()
@jax.jit
def step(p, s, xs, ys, ms):
    g = zeros(p)
    for x, y, m in zip(xs, ys, ms):
        g = add(g, jax.grad(loss)(p, x, y, m))
    u, s = tx.update(scale(g, 1 / len(xs)), s, p)
    return optax.apply_updates(p, u), s
for batch in tokens(6, 3):
    p, s = step(p, s, *batch)
""",
    ),
    "dropped_last_micro_batch": (
        "dropped-micro-batch",
        """
tx = optax.adam(1e-2); p = linear; s = tx.init(p); f = jax.jit(jax.value_and_grad(mse))
up = jax.jit(tx.update)
for xs, ys in rows(6, 4):
    g = zeros(p)
    for i in range(4):
        _, one = f(p, xs[i], ys[i])
        if i < 3:
            g = add(g, scale(one, 1 / 3))
    u, s = up(g, s, p); p = optax.apply_updates(p, u)
""",
    ),
    "only_the_last_micro_batch": (
        "reset-inside-window",
        """
tx = optax.sgd(1e-2); p = linear; s = tx.init(p)
@jax.jit
def step(p, s, xs, ys):
    def body(acc, b):
        g = jax.grad(mse)(p, *b)
        return g, None
    g, _ = jax.lax.scan(body, zeros(p), (xs, ys))
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(6, 4):
    p, s = step(p, s, xs, ys)
""",
    ),
    "repeated_micro_batch": (
        "weighted-by-place",
        """
tx = optax.adam(1e-2); p = linear; s = tx.init(p)
@jax.jit
def step(p, s, xs, ys):
    gs = [jax.grad(mse)(p, x, y) for x, y in zip(xs, ys)]
    g = functools.reduce(add, [gs[0], *gs])
    u, s = tx.update(scale(g, 1 / 4), s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(6, 4):
    p, s = step(p, s, xs, ys)
""",
    ),
    "step_per_micro_batch_adam_then_apply_every": (
        "step-per-micro-batch",
        """
tx = optax.chain(optax.adam(1e-2), optax.apply_every(4)); p = linear; s = tx.init(p)
@jax.jit
def step(p, s, x, y):
    u, s = tx.update(jax.grad(mse)(p, x, y), s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(16, 1):
    p, s = step(p, s, xs[0], ys[0])
""",
    ),
    "clipped_per_micro_batch": (
        "clipped",
        """
tx = optax.adam(1e-2); p = linear; s = tx.init(p)
def clip(g):
    n = norm(g)
    return jax.tree.map(lambda x: x * jnp.minimum(1.0, 0.5 / n), g)
@jax.jit
def step(p, s, xs, ys):
    def body(acc, b):
        return add(acc, clip(jax.grad(mse)(p, *b))), None
    g, _ = jax.lax.scan(body, zeros(p), (xs, ys))
    u, s = tx.update(scale(g, 1 / 4), s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(6, 4):
    p, s = step(p, s, xs, ys)
""",
    ),
    "weighted_by_long_rows": (
        "unrecognised-weights",
        """
tx = optax.adam(1e-2); p = lm; s = tx.init(p)
loss = lambda p, x, y, m: (ce(p, x, y) * m).sum() / m.sum()
@jax.jit
def step(p, s, xs, ys, ms):
    def body(acc, b):
        x, y, m = b
        g = jax.grad(loss)(p, x, y, m)
        return (add(acc[0], scale(g, (m.sum(1) > 6).sum() * 1.0)), acc[1] + (m.sum(1) > 6).sum()), None
    (g, n), _ = jax.lax.scan(body, (zeros(p), 0), (xs, ys, ms))
    u, s = tx.update(scale(g, 1.0 / n), s, p)
    return optax.apply_updates(p, u), s
for batch in tokens(6, 3, size=8):
    p, s = step(p, s, *batch)
""",
    ),
    "wrong_custom_vjp": (
        "wrong-backward",
        """
@jax.custom_vjp
def square(x):
    return x ** 2
square.defvjp(lambda x: (x ** 2, x), lambda x, t: (t * x,))
tx = optax.adam(1e-2); p = linear; s = tx.init(p)
@jax.jit
def step(p, s, x, y):
    g = jax.grad(lambda p: jnp.mean(square(x @ p["w"] + p["b"] - y)))(p)
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(6, 1):
    p, s = step(p, s, xs[0], ys[0])
""",
    ),
    "wrong_custom_vjp_in_a_branch": (
        "wrong-backward",
        """
@jax.custom_vjp
def square(x):
    return x ** 2
square.defvjp(lambda x: (x ** 2, x), lambda x, t: (t * x,))
tx = optax.adam(1e-2); p = linear; s = tx.init(p)
def loss(p, x, y):
    off = x @ p["w"] + p["b"] - y
    return jnp.mean(jax.lax.cond(x.sum() < 1e9, square, jnp.abs, off))
@jax.jit
def step(p, s, x, y):
    u, s = tx.update(jax.grad(loss)(p, x, y), s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(6, 1):
    p, s = step(p, s, xs[0], ys[0])
""",
    ),
    "not_reduced_under_named_vmap": (
        "not-reduced",
        """
tx = optax.sgd(1e-2); p = linear; s = tx.init(p)
@jax.jit
@functools.partial(jax.vmap, in_axes=(None, None, 0, 0), axis_name="devices")
def step(p, s, x, y):
    u, s = tx.update(jax.grad(mse)(p, x, y), s, p)
    return optax.apply_updates(p, u), s
first = lambda tree: jax.tree.map(lambda x: x[0], tree)
for xs, ys in rows(6, 2):
    p, s = map(first, step(p, s, xs, ys))
""",
    ),
    "jit_over_nnx_state": (
        "parameter-not-updated",
        """
from flax import nnx
class Net(nnx.Module):
    def __init__(self, rngs):
        self.one = nnx.Linear(6, 1, rngs=rngs)
    def __call__(self, x):
        return self.one(x)
model = Net(nnx.Rngs(0)); opt = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)
graph, state = nnx.split((model, opt))
@jax.jit
def step(graph, state, x, y):
    model, opt = nnx.merge(graph, state)
    loss, g = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
    opt.update(model, g)
    return loss
for xs, ys in rows(8, 1):
    step(graph, state, xs[0], ys[0])
""",
    ),
    "divided_twice": (
        "wrong-scale",
        """
tx = optax.sgd(1e-2); p = linear; s = tx.init(p); K = 4
@jax.jit
def step(p, s, xs, ys):
    def body(acc, b):
        return add(acc, jax.grad(lambda p: mse(p, *b) / K)(p)), None
    g, _ = jax.lax.scan(body, zeros(p), (xs, ys))
    u, s = tx.update(scale(g, 1 / K), s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(6, K):
    p, s = step(p, s, xs, ys)
""",
    ),
    "short_window_divided_by_k": (
        "wrong-scale",
        """
tx = optax.sgd(1e-2); p = linear; s = tx.init(p); K = 4; f = jax.jit(jax.grad(mse))
up = jax.jit(tx.update)
for _ in range(3):
    g, n = zeros(p), 0
    data = list(rows(10, 1))
    for i, (xs, ys) in enumerate(data):
        g = add(g, scale(f(p, xs[0], ys[0]), 1 / K)); n += 1
        if n == K or i == len(data) - 1:
            u, s = up(g, s, p); p = optax.apply_updates(p, u); g, n = zeros(p), 0
""",
    ),
    "stale_gradient_of_the_step_before": (
        "stale-window",
        """
tx = optax.sgd(1e-2); p = linear; s = tx.init(p)
@jax.jit
def step(p, s, before, x, y):
    g = jax.grad(mse)(p, x, y)
    u, s = tx.update(add(g, scale(before, 0.5)), s, p)
    return optax.apply_updates(p, u), s, g
before = zeros(p)
for xs, ys in rows(8, 1):
    p, s, before = step(p, s, before, xs[0], ys[0])
""",
    ),
    "pmean_of_unequal_means": (
        "mean-of-means",
        """
tx = optax.sgd(1e-2); p = lm; s = tx.init(p)
loss = lambda p, x, y, m: (ce(p, x, y) * m).sum() / m.sum()
@jax.jit
@functools.partial(jax.vmap, in_axes=(None, None, 0, 0, 0), axis_name="devices")
def step(p, s, x, y, m):
    g = jax.lax.pmean(jax.grad(loss)(p, x, y, m), "devices")
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s
first = lambda tree: jax.tree.map(lambda x: x[0], tree)
for batch in tokens(6, 2):
    p, s = map(first, step(p, s, *batch))
""",
    ),
    "eager_means_of_tokens": (
        "mean-of-means",
        """
tx = optax.adam(1e-2); p = lm; s = tx.init(p)
loss = lambda p, x, y, m: (ce(p, x, y) * m).sum() / m.sum()
for xs, ys, ms in tokens(3, 3):
    g = zeros(p)
    for x, y, m in zip(xs, ys, ms):
        g = add(g, jax.grad(loss)(p, x, y, m))
    u, s = tx.update(scale(g, 1 / 3), s, p); p = optax.apply_updates(p, u)
""",
    ),
    "parameters_closed_over": (
        "stale-parameters",
        """
tx = optax.sgd(1e-2); p = first = linear; s = tx.init(p)
f = jax.jit(lambda x, y: jax.grad(lambda p: mse(p, x, y))(first))
for xs, ys in rows(8, 1):
    u, s = tx.update(f(xs[0], ys[0]), s, p); p = optax.apply_updates(p, u)
""",
    ),
    "gradient_before_the_previous_step": (
        "stale-parameters",
        """
tx = optax.sgd(1e-2); p = linear; s = tx.init(p); f = jax.jit(jax.grad(mse)); next_g = None
for xs, ys in rows(8, 1):
    g, next_g = next_g, f(p, xs[0], ys[0])
    if g is not None:
        u, s = tx.update(g, s, p); p = optax.apply_updates(p, u)
""",
    ),
    "whole_run_in_one_scan": (
        "wrong-scale",
        """
tx = optax.adam(1e-2); p = linear
data = [np.stack(one) for one in zip(*rows(12, 3))]
@jax.jit
def train(p, data):
    def step(state, batch):
        p, s = state
        acc, _ = jax.lax.scan(lambda a, b: (add(a, jax.grad(mse)(p, *b)), None), zeros(p), batch)
        u, s = tx.update(acc, s, p)
        return (optax.apply_updates(p, u), s), None
    return jax.lax.scan(step, (p, tx.init(p)), tuple(data))[0]
train(p, data)
""",
    ),
    "wrong_custom_vjp_inside_a_scan": (
        "wrong-backward",
        """
@jax.custom_vjp
def activation(x):
    return jnp.tanh(x)
def backward(t, ct):
    return (ct * t * (1 - t),)
activation.defvjp(lambda x: (jnp.tanh(x), jnp.tanh(x)), backward)
tx = optax.adam(1e-2); s = tx.init(rnn); p = rnn
@jax.jit
def step(p, s, x, y):
    def loss(p):
        def cell(h, row):
            return activation(row @ p["i"] + h @ p["h"]), None
        h, _ = jax.lax.scan(cell, jnp.zeros((8, 5)), jnp.moveaxis(x, -1, 0)[..., None])
        return jnp.mean((h @ p["o"] - y) ** 2)
    u, s = tx.update(jax.grad(loss)(p), s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(6, 1):
    p, s = step(p, s, xs[0], ys[0])
""",
    ),
    "clipped_by_optax_per_micro_batch": (
        "clipped",
        """
tx = optax.adam(1e-2); p = linear; s = tx.init(p); clip = optax.clip_by_global_norm(0.3)
@jax.jit
def step(p, s, xs, ys):
    def body(acc, b):
        g, _ = clip.update(jax.grad(mse)(p, *b), optax.EmptyState())
        return add(acc, scale(g, 1 / 4)), None
    g, _ = jax.lax.scan(body, zeros(p), (xs, ys))
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(6, 4):
    p, s = step(p, s, xs, ys)
""",
    ),
    "two_steps_whose_updates_are_thrown_away": (
        "parameter-not-updated",
        """
tx = optax.adam(1e-2); p = linear; s = tx.init(p)
@jax.jit
def step(p, s, x, y):
    loss, g = jax.value_and_grad(mse)(p, x, y)
    u, s = tx.update(g, s, p)
    p = optax.apply_updates(p, u)
    return loss
for xs, ys in rows(2, 1):
    step(p, s, xs[0], ys[0])
""",
    ),
    "declared_means_that_weigh_the_same": (
        "mean-of-means",
        DECLARED.replace("WEIGHT", "1 / 3"),
    ),
    "scan_outside_of_compiled_functions": (
        "wrong-scale",
        """
tx = optax.adam(1e-2); p = linear; s = tx.init(p)
for xs, ys in rows(4, 3):
    g, _ = jax.lax.scan(lambda a, b: (add(a, jax.grad(mse)(p, *b)), None), zeros(p), (xs, ys))
    u, s = tx.update(g, s, p); p = optax.apply_updates(p, u)
""",
    ),
    "vmap_outside_of_compiled_functions": (
        "not-reduced",
        """
tx = optax.sgd(1e-2); p = linear; s = tx.init(p)
@functools.partial(jax.vmap, in_axes=(None, None, 0, 0), axis_name="devices")
def step(p, s, x, y):
    u, s = tx.update(jax.grad(mse)(p, x, y), s, p)
    return optax.apply_updates(p, u), s
first = lambda tree: jax.tree.map(lambda x: x[0], tree)
for xs, ys in rows(4, 2):
    p, s = map(first, step(p, s, xs, ys))
""",
    ),
    "last_short_window_of_multi_steps": (
        "tail-dropped",
        """
tx = optax.MultiSteps(optax.adam(1e-2), 3); p = linear; s = tx.init(p)
@jax.jit
def step(p, s, x, y):
    u, s = tx.update(jax.grad(mse)(p, x, y), s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(8, 1):
    p, s = step(p, s, xs[0], ys[0])
""",
    ),
    "means_weighted_by_rows": (
        "wrong-count",
        """
tx = optax.adam(1e-2); p = lm; s = tx.init(p)
def loss(p, x, y, m):
    return jnp.average(ce(p, x, y), weights=m), m.any(-1).sum()
@jax.jit
def step(p, s, xs, ys, ms):
    def body(acc, b):
        (_, n), g = jax.value_and_grad(loss, has_aux=True)(p, *b)
        return (add(acc[0], scale(g, n)), acc[1] + n), None
    (g, n), _ = jax.lax.scan(body, (zeros(p), 0), (xs, ys, ms))
    u, s = tx.update(scale(g, 1 / n), s, p)
    return optax.apply_updates(p, u), s
for i, (xs, ys, ms) in enumerate(tokens(6, 4, size=6)):
    for j in range(4):
        ms[j, : (i + j) % 4] = 0
    p, s = step(p, s, xs, ys, ms)
""",
    ),
}
"""Name -> diagnosis, script."""

SOUND = {
    "clip_before_update_by_hand": """
tx = optax.adam(1e-2); p = linear; s = tx.init(p); clip = optax.clip_by_global_norm(0.5); c = clip.init(p)
@jax.jit
def step(p, s, xs, ys):
    g = scale(functools.reduce(add, [jax.grad(mse)(p, x, y) for x, y in zip(xs, ys)]), 1 / 4)
    g, _ = clip.update(g, c)
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(6, 4):
    p, s = step(p, s, xs, ys)
""",
    "equinox": """
import equinox as eqx
model = eqx.nn.MLP(6, 1, 8, 1, key=jax.random.key(0)); tx = optax.adamw(1e-2)
s = tx.init(eqx.filter(model, eqx.is_array))
@eqx.filter_jit
def step(model, s, x, y):
    loss, g = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - y) ** 2))(model)
    u, s = tx.update(g, s, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, u), s, loss
for xs, ys in rows(6, 1):
    model, s, loss = step(model, s, xs[0], ys[0])
""",
    "linen_train_state": """
import flax.linen as nn
from flax.training.train_state import TrainState
class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.relu(nn.Dense(8)(x)))
net = Net(); first = net.init(jax.random.key(0), np.zeros((1, 6)))["params"]
state = TrainState.create(apply_fn=net.apply, params=first, tx=optax.adam(1e-2))
@functools.partial(jax.jit, donate_argnums=0)
def step(state, xs, ys):
    loss = lambda p, x, y: jnp.mean((state.apply_fn({"params": p}, x) - y) ** 2)
    def body(acc, b):
        return add(acc, jax.grad(loss)(state.params, *b)), None
    g, _ = jax.lax.scan(body, zeros(state.params), (xs, ys))
    return state.apply_gradients(grads=scale(g, 1 / 4))
for xs, ys in rows(6, 4):
    state = step(state, xs, ys)
""",
    "remat_in_a_fori_loop": """
tx = optax.adam(1e-2); p = linear; s = tx.init(p)
@jax.jit
def step(p, s, xs, ys):
    def body(i, acc):
        return add(acc, jax.grad(jax.checkpoint(mse))(p, xs[i], ys[i]))
    g = jax.lax.fori_loop(0, 4, body, zeros(p))
    u, s = tx.update(scale(g, 1 / 4), s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(6, 4):
    p, s = step(p, s, xs, ys)
""",
    "while_loop_over_micro_batches": """
tx = optax.adam(1e-2); p = linear; s = tx.init(p)
@jax.jit
def step(p, s, xs, ys, n):
    def body(c):
        return c[0] + 1, add(c[1], jax.grad(mse)(p, xs[c[0]], ys[c[0]]))
    _, g = jax.lax.while_loop(lambda c: c[0] < n, body, (0, zeros(p)))
    u, s = tx.update(jax.tree.map(lambda x: x / n, g), s, p)
    return optax.apply_updates(p, u), s
for i, (xs, ys) in enumerate(rows(6, 4)):
    p, s = step(p, s, xs, ys, 2 + i % 3)
""",
    "right_custom_vjp_and_straight_through": """
@jax.custom_vjp
def square(x):
    return x ** 2
square.defvjp(lambda x: (x ** 2, x), lambda x, t: (2 * t * x,))
@jax.custom_vjp
def rounded(x):
    return jnp.round(x)
rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, t: (t,))
tx = optax.adam(1e-2); p = linear; s = tx.init(p)
@jax.jit
def step(p, s, x, y):
    g = jax.grad(lambda p: jnp.mean(square(x @ rounded(4 * p["w"]) / 4 + p["b"] - y)))(p)
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(6, 1):
    p, s = step(p, s, xs[0], ys[0])
""",
    "gradient_penalty": """
tx = optax.adam(1e-2); p = linear; s = tx.init(p)
def loss(p, x, y):
    f = lambda x: jnp.tanh(x @ p["w"] + p["b"]).sum()
    return mse(p, x, y) + 0.1 * jnp.mean(jnp.sum(jax.grad(f)(x) ** 2, -1))
@jax.jit
def step(p, s, xs, ys):
    g = scale(functools.reduce(add, [jax.grad(loss)(p, x, y) for x, y in zip(xs, ys)]), 1 / 2)
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(6, 2):
    p, s = step(p, s, xs, ys)
""",
    "maml": """
tx = optax.adam(1e-2); p = linear; s = tx.init(p)
def outer(p, x, y):
    inner = jax.grad(mse)(p, x[:4], y[:4])
    return mse(jax.tree.map(lambda a, g: a - 0.1 * g, p, inner), x[4:], y[4:])
@jax.jit
def step(p, s, xs, ys):
    g = jax.tree.map(lambda g: g.mean(0), jax.vmap(jax.grad(outer), (None, 0, 0))(p, xs, ys))
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s
@jax.jit
def single(p, s, x, y):
    u, s = tx.update(jax.grad(outer)(p, x, y), s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(6, 1):
    p, s = single(p, s, xs[0], ys[0])
""",
    "wrong_custom_vjp_in_a_branch_that_is_not_taken": """
@jax.custom_vjp
def square(x):
    return x ** 2
square.defvjp(lambda x: (x ** 2, x), lambda x, t: (t * x,))
tx = optax.adam(1e-2); p = linear; s = tx.init(p)
def loss(p, x, y):
    off = x @ p["w"] + p["b"] - y
    return jnp.mean(jax.lax.switch(jnp.int32(x.sum() > 1e9), [jnp.abs, square], off))
@jax.jit
def step(p, s, x, y):
    u, s = tx.update(jax.grad(loss)(p, x, y), s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(6, 1):
    p, s = step(p, s, xs[0], ys[0])
""",
    "counts_that_give_gradients_one_norm": """
tx = optax.adam(1e-2); p = {"w": linear["w"]}; s = tx.init(p)
def loss(p, x, y, m):
    return (m * ((x @ p["w"])[:, 0] - y[:, 0]) ** 2).sum() / m.sum()
@jax.jit
def step(p, s, xs, ys, ms):
    g = zeros(p)
    for x, y, m in zip(xs, ys, ms):
        g = add(g, scale(jax.grad(loss)(p, x, y, m), m.sum() / ms.sum()))
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(6, 1):  # rows of zeros count, and add nothing to a gradient
    x = np.stack([xs[0], -xs[0], xs[0] * np.float32([1, -1, 1, -1, 1, -1])]); y = np.stack([ys[0], -ys[0], 0 * ys[0]])
    x[:, 4:] = 0; y[2] = y[0]
    p, s = step(p, s, x, y, (np.arange(8) < np.array([[5], [6], [8]])).astype(np.float32))
""",
    "seeds_under_vmap": """
tx = optax.adam(1e-2)
def begin(key):
    return {"w": jax.random.normal(key, (6, 1)), "b": jnp.zeros(1)}
p = jax.vmap(begin)(jax.random.split(jax.random.key(0), 3))
s = jax.vmap(tx.init)(p)
@jax.jit
@functools.partial(jax.vmap, in_axes=(0, 0, None, None))
def step(p, s, xs, ys):
    g, _ = jax.lax.scan(lambda a, b: (add(a, jax.grad(mse)(p, *b)), None), zeros(p), (xs, ys))
    u, s = tx.update(scale(g, 1 / 4), s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(6, 4):
    p, s = step(p, s, xs, ys)
""",
    "inject_hyperparams": """
rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 20)
tx = optax.inject_hyperparams(optax.adamw)(learning_rate=rate); p = linear; s = tx.init(p)
@jax.jit
def step(p, s, xs, ys):
    g, _ = jax.lax.scan(lambda a, b: (add(a, jax.grad(mse)(p, *b)), None), zeros(p), (xs, ys))
    u, s = tx.update(scale(g, 1 / 4), s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(8, 4):
    p, s = step(p, s, xs, ys)
""",
    "apply_every_of_plain_sgd": """
tx = optax.chain(optax.sgd(1e-2 / 4), optax.apply_every(4)); p = linear; s = tx.init(p)
@jax.jit
def step(p, s, x, y):
    u, s = tx.update(jax.grad(mse)(p, x, y), s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(16, 1):
    p, s = step(p, s, xs[0], ys[0])
""",
    "example_libraries": """
from jax.example_libraries import optimizers
init, update, params = optimizers.adam(1e-2); s = init(linear)
@jax.jit
def step(i, s, xs, ys):
    g = scale(functools.reduce(add, [jax.grad(mse)(params(s), x, y) for x, y in zip(xs, ys)]), 1 / 2)
    return update(i, g, s)
for i, (xs, ys) in enumerate(rows(6, 2)):
    s = step(i, s, xs, ys)
""",
    "loss_scale_of_float16": """
tx = optax.adam(1e-2); p = linear; s = tx.init(p)
@jax.jit
def step(p, s, xs, ys):
    def scaled(p, x, y):
        low = jax.tree.map(lambda a: a.astype(jnp.float16), p)
        out = x.astype(jnp.float16) @ low["w"] + low["b"]
        return 128.0 * jnp.mean((out.astype(jnp.float32) - y) ** 2)
    g, _ = jax.lax.scan(lambda a, b: (add(a, jax.grad(scaled)(p, *b)), None), zeros(p), (xs, ys))
    g = scale(g, 1 / 128.0 / 4)
    ok = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(g)]).all()
    g = jax.tree.map(lambda x: jnp.where(ok, x, 0), g)
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(6, 4):
    p, s = step(p, s, xs, ys)
""",
    "warm_up_call_and_eager_loss": """
tx = optax.sgd(1e-2); p = linear; s = tx.init(p); f = jax.jit(jax.value_and_grad(mse))
f(p, np.zeros((8, 6), np.float32), np.ones((8, 1), np.float32))
for xs, ys in rows(6, 2):
    g = zeros(p)
    for x, y in zip(xs, ys):
        _, one = f(p, x, y); g = add(g, scale(one, 1 / 2))
    u, s = tx.update(g, s, p); p = optax.apply_updates(p, u)
""",
    "empty_micro_batches_and_weighted_means": """
tx = optax.sgd(1e-2); p = lm; s = tx.init(p)
loss = lambda p, x, y, m: (ce(p, x, y) * m).sum() / jnp.maximum(m.sum(), 1)
@jax.jit
def step(p, s, xs, ys, ms):
    g = zeros(p)
    for x, y, m in zip(xs, ys, ms):
        g = add(g, scale(jax.grad(loss)(p, x, y, m), m.sum() / ms.sum()))
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s
for i, (xs, ys, ms) in enumerate(tokens(6, 4)):
    ms[i % 4] = 0
    p, s = step(p, s, xs, ys, ms)
""",
    "two_parts_of_one_loss": """
one, two = optax.adam(1e-2), optax.sgd(1e-2)
a, b = {"w": jnp.ones((6, 4))}, {"v": jnp.ones((4, 1))}; s, t = one.init(a), two.init(b)
f = lambda a, b, x, y: jnp.mean((jnp.tanh(x @ a["w"]) @ b["v"] - y) ** 2)
@jax.jit
def step(a, b, s, t, x, y):
    g, h = jax.grad(f, (0, 1))(a, b, x, y)
    u, s = one.update(g, s, a)
    v, t = two.update(h, t, b)
    return optax.apply_updates(a, u), optax.apply_updates(b, v), s, t
for xs, ys in rows(5, 1):
    a, b, s, t = step(a, b, s, t, xs[0], ys[0])
""",
    "momentum_by_hand": """
p = {"w": jnp.ones((6, 8)), "v": jnp.ones((8, 1))}; m = zeros(p)
f = lambda p, x, y: jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"] - y) ** 2)
@jax.jit
def step(p, m, x, y):
    m = add(scale(m, 0.9), jax.grad(f)(p, x, y))
    return add(p, scale(m, -0.01)), m
f1 = jax.jit(jax.value_and_grad(f))
for xs, ys in rows(8, 1):
    p, m = step(p, m, xs[0], ys[0])
""",
    "chunked_loss_in_a_scan": """
tx = optax.adam(1e-2); p = lm; s = tx.init(p)
def loss(p, x, y, m):
    def chunk(total, b):
        return total + (ce(p, b[0], b[1]) * b[2]).sum(), None
    return jax.lax.scan(chunk, 0.0, (x, y, m))[0]
@jax.jit
def step(p, s, xs, ys, ms):
    g, _ = jax.lax.scan(lambda a, b: (add(a, jax.grad(loss)(p, *b)), None), zeros(p), (xs, ys, ms))
    u, s = tx.update(scale(g, 1 / ms.sum()), s, p)
    return optax.apply_updates(p, u), s
for batch in tokens(6, 3):
    p, s = step(p, s, *batch)
""",
    "steps_in_a_scan_of_epochs": """
tx = optax.adam(1e-2)
data = [np.stack(one) for one in zip(*rows(60, 1))]
@jax.jit
def train(p, data):
    def step(state, b):
        p, s = state
        loss, g = jax.value_and_grad(mse)(p, b[0][0], b[1][0])
        u, s = tx.update(g, s, p)
        return (optax.apply_updates(p, u), s), loss
    return jax.lax.scan(step, (p, tx.init(p)), tuple(data))
(p, s), losses = train(linear, data)
""",
    "debug_print_and_callback": """
tx = optax.adam(1e-2); p = linear; s = tx.init(p); seen = []
@jax.jit
def step(p, s, x, y):
    loss, g = jax.value_and_grad(mse)(p, x, y)
    jax.debug.print("loss {}", loss)
    jax.debug.callback(lambda v: seen.append(float(v)), loss)
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(4, 1):
    p, s = step(p, s, xs[0], ys[0])
jax.effects_barrier()
assert len(seen) == 4, seen
""",
    "right_custom_vjp_inside_a_scan_over_time": """
@jax.custom_vjp
def soft(x):
    return jnp.log1p(jnp.exp(x))
soft.defvjp(lambda x: (jnp.log1p(jnp.exp(x)), x), lambda x, t: (t * jax.nn.sigmoid(x),))
tx = optax.adam(1e-2); s = tx.init(rnn); p = rnn
def loss(p, x, y):
    def cell(h, row):
        h = soft(row @ p["i"] + h @ p["h"])
        return 0.5 * h, h @ p["o"]
    _, out = jax.lax.scan(cell, jnp.zeros((8, 5)), x)
    return jnp.mean((out - y) ** 2)
@jax.jit
def step(p, s, xs, ys):
    g = scale(functools.reduce(add, [jax.grad(loss)(p, x, y) for x, y in zip(xs, ys)]), 1 / 2)
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s
for xs, _ in rows(6, 2, size=7, width=8):
    p, s = step(p, s, xs[..., None], np.cumsum(xs, 1)[..., None])
""",
    "steps_by_hand_along_what_optax_gives": """
tx = optax.scale_by_adam(); p = linear; s = tx.init(p)
@jax.jit
def step(p, s, xs, ys):
    g, _ = jax.lax.scan(lambda a, b: (add(a, jax.grad(mse)(p, *b)), None), zeros(p), (xs, ys))
    u, s = tx.update(scale(g, 1 / 4), s, p)
    return jax.tree.map(lambda a, b: a - 1e-2 * b, p, u), s
for xs, ys in rows(6, 4):
    p, s = step(p, s, xs, ys)
""",
    "transformation_for_its_state_alone": """
tx = optax.sgd(1e-2); mean = optax.ema(0.9); p = linear; s = tx.init(p), mean.init(p)
@jax.jit
def step(p, s, x, y):
    g = jax.grad(mse)(p, x, y)
    _, kept = mean.update(p, s[1])
    u, s = tx.update(g, s[0], p)
    return optax.apply_updates(p, u), (s, kept)
for xs, ys in rows(6, 1):
    p, s = step(p, s, xs[0], ys[0])
""",
    "declared_means_weighted_by_their_counts": DECLARED.replace("WEIGHT", "b[2].sum() / ms.sum()"),
    "backward_that_leaves_a_compiled_function": """
tx = optax.sgd(1e-2); p = linear; s = tx.init(p)
@jax.jit
def forward(p, x, y):
    return jax.vjp(lambda p: mse(p, x, y), p)
@jax.jit
def step(p, s, back):
    u, s = tx.update(back(1.0)[0], s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(6, 1):
    loss, back = forward(p, xs[0], ys[0])
    p, s = step(p, s, back)
""",
    "loops_outside_of_compiled_functions": """
tx = optax.adam(1e-2); p = linear; s = tx.init(p)
for xs, ys in rows(4, 3):
    xs, ys = jnp.array(xs), jnp.array(ys)
    share = lambda i: scale(jax.grad(mse)(p, xs[i], ys[i]), 1 / 3)
    g = jax.lax.fori_loop(0, jnp.int32(3), lambda i, a: add(a, share(i)), zeros(p))
    u, s = tx.update(g, s, p); p = optax.apply_updates(p, u)
""",
    "run_in_one_scan_without_jit": """
tx = optax.adam(1e-2); data = [np.stack(one) for one in zip(*rows(6, 1))]
def step(state, b):
    p, s = state
    g = jax.grad(mse)(p, b[0][0], b[1][0])
    u, s = tx.update(g, s, p)
    return (optax.apply_updates(p, u), s), None
jax.lax.scan(step, (linear, tx.init(linear)), tuple(data))
""",
    "ensemble_that_starts_equal": """
tx = optax.adam(1e-2); p = jax.tree.map(lambda a: jnp.stack([a] * 3), linear); s = jax.vmap(tx.init)(p)
@jax.jit
@jax.vmap
def step(p, s, x, y):
    u, s = tx.update(jax.grad(mse)(p, x, y), s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(6, 3):
    p, s = step(p, s, xs, ys)
""",
}
"""Name -> script."""

UNJUDGED = {
    "multi_steps_begun_anew_in_each_epoch": (
        "no-update",
        """
tx = optax.MultiSteps(optax.adam(1e-2), 8); p = linear
@jax.jit
def step(p, s, x, y):
    u, s = tx.update(jax.grad(mse)(p, x, y), s, p)
    return optax.apply_updates(p, u), s
for epoch in range(4):
    s = tx.init(p)
    for xs, ys in rows(5, 1, seed=epoch):
        p, s = step(p, s, xs[0], ys[0])
""",
    ),
    "loss_that_looks_at_values": (
        "untraced-loss",
        """
tx = optax.sgd(1e-2); p = linear; s = tx.init(p)
def loss(p, x, y):
    value = mse(p, x, y)
    if value > 1e6:
        print("large")
    return value
for xs, ys in rows(4, 1):
    g = jax.grad(loss)(p, xs[0], ys[0])
    u, s = tx.update(g, s, p); p = optax.apply_updates(p, u)
""",
    ),
    "per_sample_clipping": (
        "unexplained-gradient",
        """
tx = optax.adam(1e-2); p = linear; s = tx.init(p)
@jax.jit
def step(p, s, x, y):
    one = jax.vmap(jax.grad(mse), (None, 0, 0))(p, x, y)
    c = jnp.minimum(1.0, 1.0 / jax.vmap(norm)(one))
    g = jax.tree.map(lambda a: jnp.mean(a * c.reshape(-1, *[1] * (a.ndim - 1)), 0), one)
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(6, 1):
    p, s = step(p, s, xs[0], ys[0])
""",
    ),
    "few_elements_clipped_one_by_one": (
        "too-few-elements",
        """
tx = optax.sgd(1e-2); p = linear; s = tx.init(p)
@jax.jit
def step(p, s, xs, ys):
    g, _ = jax.lax.scan(lambda a, b: (add(a, jax.grad(mse)(p, *b)), None), zeros(p), (xs, ys))
    u, s = tx.update(jax.tree.map(lambda x: jnp.clip(x / 8, -0.1, 0.1), g), s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(6, 8):
    p, s = step(p, s, xs, ys)
""",
    ),
    "callback_for_a_result": (
        "unobserved-program",
        """
from jax.experimental import io_callback
tx = optax.adam(1e-2); p = linear; s = tx.init(p)
@jax.jit
def step(p, s, x, y):
    rate = io_callback(lambda: np.float32(0.5), jax.ShapeDtypeStruct((), np.float32))
    g = jax.grad(lambda p: rate * mse(p, x, y))(p)
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s
for xs, ys in rows(4, 1):
    p, s = step(p, s, xs[0], ys[0])
""",
    ),
}
"""Name -> the name of the reason why nothing is judged, script."""
