"""ATen operations in torch and in JAX: shapes, dtypes, values and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree

from gradcheck_suite.bridge import ops  # noqa: F401  (fills the table)
from gradcheck_suite.bridge.op_table import is_dynamic, jax_dtype, lowering_of, to_array
from gradcheck_suite.reference.programs import CompiledPrograms

LEAVE_SOME_EMPTY = {
    "_ctc_loss",
    "_embedding_bag",
    "_embedding_bag_forward_only",
    "_linalg_det",
    "_linalg_eigh",
    "_linalg_slogdet",
    "_linalg_solve_ex",
    "_linalg_svd",
    "linalg_qr",
    "log_sigmoid_forward",
}
TOLERANCE = 1e-11
"""Of the largest entry: a few thousand roundings of float64 on a handful of numbers."""
_PROGRAMS = CompiledPrograms()
"""Calls that differ only in their tensors' values share a program."""


def error_between(expected: Any, got: Any) -> float:
    """Return the largest difference over the largest entry.

    NaN and infinities must be at the same places.
    """
    x, y = np.asarray(expected), np.asarray(got)
    if x.dtype.kind in "biu":
        return float(np.max(x != y, initial=0))
    with np.errstate(all="ignore"):
        off = np.abs(x - y)
        off = np.where(
            (x == y) | (np.isnan(x) & np.isnan(y)), 0, np.where(np.isnan(off), np.inf, off)
        )
        worst = float(np.max(off, initial=0))
        size = float(np.max(np.abs(np.where(np.isfinite(x), x, 0)), initial=0))
    return worst / max(size, 1e-300) if worst else 0.0


def _numpy(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return np.asarray(to_array(tensor.to_dense() if tensor.is_sparse else tensor))


def _left_empty(op: Any, args: Any, kwargs: Any, lowering: Any) -> set[int]:
    """Return the indices of the results that only torch's own backward reads.

    Lowerings leave them empty.
    """
    if op._schema.name.partition("::")[2] not in LEAVE_SOME_EMPTY:
        return set()
    leaves, spec = pytree.tree_flatten((list(args), dict(kwargs)))
    arrays = {i: to_array(x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}

    def run(arrays: Any) -> Any:
        a, k = pytree.tree_unflatten([arrays.get(i, x) for i, x in enumerate(leaves)], spec)
        return lowering(*a, **k)

    return {i for i, result in enumerate(jax.eval_shape(run, arrays)) if result.size == 0}


class Call(NamedTuple):
    """A call of an operation, and how its results are compared.

    Attributes:
        op: an overload such as `torch.ops.aten.add.Tensor`.
        args: tensors that require a gradient are differentiated.
        kwargs: likewise.
        tolerance: of gradients, relative to the largest entry.
        jit: whether to compile; operations whose shapes depend on values run one by one.
        skip_gradients_of: numbers of the arguments' leaves whose gradient is not looked at.
    """

    op: Any
    args: Any
    kwargs: Any
    tolerance: float = TOLERANCE
    jit: bool = True
    skip_gradients_of: Any = ()


class _InTorch(NamedTuple):
    """What torch computes of a call, and the function of three trees of arrays with which JAX
    computes it.
    """

    outs: list[torch.Tensor]
    empty: set[int]
    gradients: dict[int, Any]
    key: Any
    function: Any
    arguments: tuple[Any, Any, Any]


def compare(op: Any, args: Any, kwargs: Any, **options: Any) -> None:
    """Assert that JAX's values and gradients of an operation agree with torch's; see `Call`."""
    __tracebackhide__ = True
    compare_all([Call(op, args, kwargs, **options)])


def compare_all(calls: Sequence[Call]) -> None:
    """Assert that JAX's values and gradients agree with torch's, for random cotangents, in one
    compiled program.
    """
    __tracebackhide__ = True
    prepared = [_in_torch(call) for call in calls]
    compiled = [i for i, call in enumerate(calls) if call.jit and not is_dynamic(call.op)]

    def run(*arguments: Any) -> Any:
        return tuple(
            prepared[i].function(*each) for i, each in zip(compiled, arguments, strict=True)
        )

    found = {
        i: prepared[i].function(*prepared[i].arguments)
        for i in range(len(calls))
        if i not in compiled
    }
    if compiled:
        arguments = [prepared[i].arguments for i in compiled]
        results = _PROGRAMS.call(
            tuple(prepared[i].key for i in compiled), run, *arguments, store=False
        )
        found |= dict(zip(compiled, results, strict=True))
    for i, call in enumerate(calls):
        (_, results), gradients = found[i]
        _assert_agree(call, prepared[i], results, gradients)


def _as_exported(op: Any, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments as an exported graph has them: by position, but for those that the
    schema has by name.
    """
    args, named = list(args), dict(kwargs)
    for argument in op._schema.arguments[len(args) :]:
        if argument.kwarg_only or not named:
            break
        args.append(named.pop(argument.name, argument.default_value))
    return args, named


def _in_torch(call: Call) -> _InTorch:
    op, args, kwargs = call.op, *_as_exported(call.op, call.args, call.kwargs)
    lowering = lowering_of(op)
    assert lowering is not None, f"{op} is not in the table"
    leaves, spec = pytree.tree_flatten((list(args), dict(kwargs)))
    leaves = [
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
        for x in leaves
    ]
    a, k = pytree.tree_unflatten(leaves, spec)
    outs = [x for x in pytree.tree_leaves(op(*a, **k)) if isinstance(x, torch.Tensor)]
    inputs = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
    empty = _left_empty(op, args, kwargs, lowering)
    through = [i for i, x in enumerate(outs) if x.requires_grad and i not in empty]
    generator = torch.Generator().manual_seed(20)
    cotangents = {
        i: torch.randn(outs[i].shape, generator=generator, dtype=outs[i].dtype) for i in through
    }
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
        try:
            results = tuple(jax.tree.leaves(lowering(*a, **k)))
        except Exception as error:
            error.add_note(f"in {op}")
            raise
        total = sum(
            (jnp.sum(jnp.real(results[i] * jnp.conj(w))) for i, w in weights.items()), jnp.zeros(())
        )
        return total, results

    arrays = {i: to_array(x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
    moving = {i: arrays.pop(i) for i in inputs}
    weights = {i: to_array(c) for i, c in cotangents.items()}
    function = (
        jax.value_and_grad(run, has_aux=True) if through and inputs else lambda *a: (run(*a), {})
    )
    fixed = tuple(repr(x) for i, x in enumerate(leaves) if i not in moving and i not in arrays)
    gradients = dict(zip(inputs, expected, strict=False))
    return _InTorch(
        outs,
        empty,
        gradients,
        (lowering, str(op), repr(spec), fixed),
        function,
        (moving, arrays, weights),
    )


def _assert_agree(call: Call, torchs: _InTorch, results: Any, gradients: Any) -> None:
    __tracebackhide__ = True
    op, outs = call.op, torchs.outs
    assert len(results) >= len(outs), f"{op}: {len(results)} results, expected {len(outs)}"
    for i, (x, y) in enumerate(zip(outs, results, strict=False)):
        if i in torchs.empty:
            continue
        assert (y.dtype, y.shape) == (jax_dtype(x.dtype), tuple(x.shape)), (
            f"{op}: result {i} is {y.dtype}{y.shape}"
        )
        error = error_between(_numpy(x), y)
        assert error <= TOLERANCE, (
            f"{op}: result {i} is off by {error:.2g}\ntorch {_numpy(x)}\nJAX {y}"
        )
    for i, g in torchs.gradients.items():
        if i in call.skip_gradients_of:
            continue
        want = np.zeros(torchs.arguments[0][i].shape) if g is None else _numpy(g)
        got = np.conj(np.asarray(gradients[i]))
        error = error_between(want, got)
        assert error <= call.tolerance, (
            f"{op}: gradient of argument {i} is off by {error:.2g}\ntorch {want}\nJAX {got}"
        )
