"""A mark is an identity under each transformation of JAX, and lowers to nothing."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from gradcheck_suite.auditing.jax import marks  # noqa: E402
from gradcheck_suite.auditing.places import Place  # noqa: E402

X = np.linspace(-1.0, 1.0, 6, dtype=np.float32).reshape(2, 3)


def marked(x):
    """Return a value that went through a mark."""
    mark = marks.UpdateMark(Place("here:1"), ((3,),), ("x",), 0, "test", results=1)
    (through,) = marks.put_mark(mark, [x], [x])
    return through


def plain(x):
    """Return the value."""
    return x


def in_scan(function):
    return lambda x: jax.lax.scan(lambda c, row: (c + function(row), function(row)), X[0], x)


def in_while(function):
    return lambda x: jax.lax.fori_loop(0, 3, lambda i, c: jnp.sin(function(c)), x)


def in_dynamic_while(function):
    def run(x):
        body = lambda c: (c[0] + 1, jnp.sin(function(c[1])))  # noqa: E731
        return jax.lax.while_loop(lambda c: c[0] < jnp.int32(3), body, (jnp.int32(0), x))

    return run


def in_cond(function):
    return lambda x: jax.lax.cond(x.sum() > 5, lambda y: function(y), lambda y: -function(y), x)


def in_shard_map(function, *, check_vma):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)


AROUND = {
    "nothing": lambda function: function,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "vmap of the last axis": lambda function: jax.vmap(function, in_axes=1, out_axes=1),
    "vmap of vmap": lambda function: jax.vmap(jax.vmap(function)),
    "vmap with a name": lambda function: jax.vmap(
        lambda x: jax.lax.psum(function(x), "n"), axis_name="n"
    ),
    "jvp": lambda function: lambda x: jax.jvp(lambda y: jnp.sin(function(y)), (x,), (x,)),
    "grad": lambda function: jax.grad(lambda x: jnp.sum(function(x) ** 3)),
    "second derivative": lambda function: jax.hessian(lambda x: jnp.sum(function(x) ** 3)),
    "linearize": lambda function: lambda x: jax.linearize(lambda y: jnp.sin(function(y)), x)[1](x),
    "remat": lambda function: jax.grad(lambda x: jnp.sum(jax.checkpoint(function)(x) ** 3)),
    "scan": in_scan,
    "gradient of a scan": lambda function: jax.grad(lambda x: in_scan(function)(x)[1].sum() ** 2),
    "fori_loop": in_while,
    "while_loop": in_dynamic_while,
    "vmap of a while_loop": lambda function: jax.vmap(in_dynamic_while(function)),
    "cond": in_cond,
    "vmap of cond": lambda function: jax.vmap(in_cond(function)),
    "shard_map": lambda function: in_shard_map(function, check_vma=True),
    "shard_map without check_vma": lambda function: in_shard_map(function, check_vma=False),
    "vmap in shard_map": lambda function: in_shard_map(jax.vmap(function), check_vma=True),
    "custom_vjp": lambda function: jax.grad(lambda x: _with_rule(function)(x).sum()),
    "pmap": lambda function: lambda x: jax.pmap(function)(x[None]),
}


def _with_rule(function):
    @jax.custom_vjp
    def run(x):
        return function(x)

    run.defvjp(lambda x: (function(x), x), lambda x, t: (3 * t * x,))
    return run


def _leaves(tree):
    return [np.asarray(one) for one in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_mark_changes_no_value(name, compiled):
    around = AROUND[name]
    with_mark, without = around(marked), around(plain)
    if compiled:
        with_mark, without = jax.jit(with_mark), jax.jit(without)
    for found, expected in zip(_leaves(with_mark(X)), _leaves(without(X)), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_mark_keeps_the_sign_of_zero():
    negative = np.full((2, 3), -0.0, np.float32)
    assert np.signbit(np.asarray(jax.vmap(marked)(negative))).all()


def test_a_mark_lowers_to_nothing():
    def text(function):
        lines = jax.jit(function).lower(X).as_text().splitlines()
        return [line for line in lines if "stablehlo" in line or "return" in line]

    step = lambda function: lambda x: jnp.sin(function(x))  # noqa: E731
    assert text(step(marked)) == text(step(plain))
