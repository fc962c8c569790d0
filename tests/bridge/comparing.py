"""One ATen operation in torch and in JAX: shapes, dtypes, values and gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree

from gradcheck_suite.bridge import ops  # noqa: F401  (fills the table)
from gradcheck_suite.bridge.dtypes import jax_dtype, to_array
from gradcheck_suite.bridge.op_table import is_dynamic, lowering_of
from gradcheck_suite.references.programs import Programs

LEAVE_SOME_EMPTY = {
    "_batch_norm_with_update_functional",
    "_ctc_loss",
    "_embedding_bag",
    "_embedding_bag_forward_only",
    "_linalg_det",
    "_linalg_eigh",
    "_linalg_slogdet",
    "_linalg_solve_ex",
    "_linalg_svd",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "linalg_qr",
    "log_sigmoid_forward",
    "native_batch_norm",
}
TOLERANCE = 1e-11
"""Of the largest entry: a few thousand roundings of float64 on a handful of numbers."""
_PROGRAMS = Programs()
"""Calls that differ only in their tensors' values share a program."""


def error_between(expected: Any, got: Any) -> float:
    """Return the largest difference over the largest entry; NaN and infinities must be at the same places."""
    x, y = np.asarray(expected), np.asarray(got)
    if x.dtype.kind in "biu":
        return float(np.max(x != y, initial=0))
    with np.errstate(all="ignore"):
        off = np.abs(x - y)
        off = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0, np.where(np.isnan(off), np.inf, off))
        worst = float(np.max(off, initial=0))
        size = float(np.max(np.abs(np.where(np.isfinite(x), x, 0)), initial=0))
    return worst / max(size, 1e-300) if worst else 0.0


def _numpy(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return np.asarray(to_array(tensor.to_dense() if tensor.is_sparse else tensor))


def _left_empty(op: Any, args: Any, kwargs: Any, lowering: Any) -> set[int]:
    """Return the indices of the results that only torch's own backward reads; lowerings leave them empty."""
    if op._schema.name.partition("::")[2] not in LEAVE_SOME_EMPTY:
        return set()
    as_array = lambda x: to_array(x) if isinstance(x, torch.Tensor) else x  # noqa: E731
    results = lowering(*pytree.tree_map(as_array, list(args)), **pytree.tree_map(as_array, dict(kwargs)))
    return {i for i, result in enumerate(results) if result.size == 0}


def compare(
    op: Any, args: Any, kwargs: Any, *, tolerance: float = TOLERANCE, jit: bool = True, skip_gradients_of: Any = ()
) -> None:
    """Assert that JAX's values and gradients of an operation agree with torch's, for random cotangents.

    Args:
        op: an overload such as `torch.ops.aten.add.Tensor`.
        args: tensors that require a gradient are differentiated.
        kwargs: likewise.
        tolerance: of gradients, relative to the largest entry.
        jit: whether to compile; operations whose shapes depend on values run one by one.
        skip_gradients_of: numbers of the arguments' leaves whose gradient is not looked at.
    """
    __tracebackhide__ = True
    lowering = lowering_of(op)
    assert lowering is not None, f"{op} is not in the table"
    leaves, spec = pytree.tree_flatten((list(args), dict(kwargs)))
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in leaves]
    a, k = pytree.tree_unflatten(leaves, spec)
    outs = [x for x in pytree.tree_leaves(op(*a, **k)) if isinstance(x, torch.Tensor)]
    inputs = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
    through = [i for i, x in enumerate(outs) if x.requires_grad]
    generator = torch.Generator().manual_seed(20)
    empty = _left_empty(op, args, kwargs, lowering)
    through = [i for i in through if i not in empty]
    cotangents = {i: torch.randn(outs[i].shape, generator=generator, dtype=outs[i].dtype) for i in through}
    expected: Any = ()
    if through and inputs:
        expected = torch.autograd.grad(
            [outs[i] for i in through],
            [leaves[i] for i in inputs],
            [cotangents[i] for i in through],
            allow_unused=True,
        )

    def run(moving: Any, still: Any, weights: Any) -> Any:
        full = [moving.get(i, still.get(i, x)) for i, x in enumerate(leaves)]
        a, k = pytree.tree_unflatten(full, spec)
        results = tuple(jax.tree.leaves(lowering(*a, **k)))
        total = sum((jnp.sum(jnp.real(results[i] * jnp.conj(w))) for i, w in weights.items()), jnp.zeros(()))
        return total, results

    arrays = {i: to_array(x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
    moving = {i: arrays.pop(i) for i in inputs}
    weights = {i: to_array(c) for i, c in cotangents.items()}
    function = jax.value_and_grad(run, has_aux=True) if through and inputs else lambda *a: (run(*a), {})
    if jit and not is_dynamic(op):
        fixed = tuple(repr(x) for i, x in enumerate(leaves) if i not in moving and i not in arrays)
        key = (lowering, str(op), repr(spec), fixed)
        (_, results), gradient = _PROGRAMS.call(key, function, moving, arrays, weights, store=False)
    else:
        (_, results), gradient = function(moving, arrays, weights)

    assert len(results) >= len(outs), f"{op}: {len(results)} results, expected {len(outs)}"
    for i, (x, y) in enumerate(zip(outs, results, strict=False)):
        if i in empty:
            continue
        assert (y.dtype, y.shape) == (jax_dtype(x.dtype), tuple(x.shape)), f"{op}: result {i} is {y.dtype}{y.shape}"
        error = error_between(_numpy(x), y)
        assert error <= TOLERANCE, f"{op}: result {i} is off by {error:.2g}\ntorch {_numpy(x)}\nJAX {y}"
    for i, g in zip(inputs, expected, strict=False):
        if i in skip_gradients_of:
            continue
        want = np.zeros(moving[i].shape) if g is None else _numpy(g)
        got = np.conj(np.asarray(gradient[i]))
        error = error_between(want, got)
        assert error <= tolerance, f"{op}: gradient of argument {i} is off by {error:.2g}\ntorch {want}\nJAX {got}"
