"""How torch accumulates and resets gradients: what it takes, clones and keeps, on drawn shapes.

What references see, what resets touch, and graphs are in `properties/test_grad_states.py`, in any
order.

These are rules of torch, not of the suite. If one fails on a new version of torch, find out what
changed, and check the loops that rely on the rule.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

shapes = st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple)
seeds = st.integers(0, 2**31 - 1)


def _parameter(shape: tuple[int, ...], seed: int = 0, device: str = "cpu") -> torch.nn.Parameter:
    return torch.nn.Parameter(_values(shape, seed, device))


def _values(shape: tuple[int, ...], seed: int, device: str = "cpu") -> torch.Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).to(device)


def _push(p: torch.Tensor, gradient: torch.Tensor) -> None:
    """Accumulate exactly `gradient` into p.grad."""
    (p * gradient).sum().backward()


def _reset(p: torch.nn.Parameter, *, set_to_none: bool) -> None:
    torch.optim.SGD([p], lr=0.1).zero_grad(set_to_none=set_to_none)


class _Hands(torch.autograd.Function):
    """x -> 0, whose backward hands over a given tensor as x's gradient."""

    @staticmethod
    def forward(ctx, x, gradient):
        ctx.gradient = gradient
        return x.new_zeros(())

    @staticmethod
    def backward(ctx, grad):
        gradient, ctx.gradient = ctx.gradient, None
        return gradient, None


# --- what AccumulateGrad takes, and what it clones


@given(shape=shapes, seed=seeds)
def test_a_gradient_that_nobody_else_holds_is_taken(shape, seed):
    p, gradient = _parameter(shape, seed), _values(shape, seed + 1)
    address = gradient.data_ptr()
    loss = _Hands.apply(p, gradient)
    del gradient
    loss.backward()
    assert p.grad.data_ptr() == address


@given(shape=shapes, seed=seeds)
def test_a_gradient_that_somebody_holds_is_cloned(shape, seed):
    p, gradient = _parameter(shape, seed), _values(shape, seed + 1)
    _Hands.apply(p, gradient).backward()
    assert p.grad.data_ptr() != gradient.data_ptr()
    assert torch.equal(p.grad, gradient)


@given(rows=st.integers(2, 5), columns=st.integers(2, 5), seed=seeds)
def test_a_gradient_of_other_strides_is_cloned_into_the_parameters(rows, columns, seed):
    p, gradient = _parameter((rows, columns), seed), _values((columns, rows), seed + 1).t()
    address = gradient.data_ptr()
    loss = _Hands.apply(p, gradient)
    del gradient
    loss.backward()
    assert p.grad.data_ptr() != address
    assert p.grad.stride() == p.stride()


@given(shape=shapes, seed=seeds)
def test_a_detached_view_of_a_held_buffer_is_taken_all_the_same(shape, seed):
    # the rule behind the aliasing canary: the view is new, its memory is not
    p, buffer = _parameter(shape, seed), _values(shape, seed + 1)
    _Hands.apply(p, buffer.detach()).backward()
    assert p.grad.data_ptr() == buffer.data_ptr()


@given(shape=shapes, seed=seeds)
def test_into_zeros_a_gradient_is_always_added(shape, seed):
    p, buffer = _parameter(shape, seed), _values(shape, seed + 1)
    p.grad = own = torch.zeros_like(p)
    _Hands.apply(p, buffer.detach()).backward()
    assert p.grad is own
    assert own.data_ptr() != buffer.data_ptr()


# --- strides


def _other_strides(p: torch.Tensor) -> torch.Tensor:
    return torch.zeros(p.shape[::-1], dtype=p.dtype).t()


# torch says, once in a process, that such strides are slow
@pytest.mark.filterwarnings(
    "ignore:grad and param do not obey the gradient layout contract:UserWarning"
)
@given(rows=st.integers(2, 5), columns=st.integers(2, 5), seed=seeds)
def test_strides_change_only_through_none(rows, columns, seed):
    p, gradient = _parameter((rows, columns), seed), _values((rows, columns), seed + 1)
    p.grad = _other_strides(p)
    strides = p.grad.stride()
    assert strides != p.stride()
    for _ in range(2):
        _push(p, gradient)
        assert p.grad.stride() == strides
        _reset(p, set_to_none=False)
    _reset(p, set_to_none=True)
    _push(p, gradient)
    assert p.grad.stride() == p.stride()


# --- sparse gradients


@given(rows=st.integers(1, 6), features=st.integers(2, 3), data=st.data())
def test_a_sparse_gradient_grows_uncoalesced_until_dense_would_be_smaller(rows, features, data):
    draws = data.draw(
        st.lists(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4), min_size=1, max_size=5)
    )
    table = torch.nn.Embedding(rows, features, sparse=True, dtype=torch.float64)
    looked_up, entries = list[int](), 0
    for ids in draws:
        table(torch.tensor(ids)).sum().backward()
        looked_up += ids
        entries += len(ids)
        # adding in place coalesces once there are more entries than the dense table has elements
        if len(looked_up) > len(ids) and entries > rows * features:
            entries = len(set(looked_up))
            event("coalesced on the way")
        assert table.weight.grad.is_sparse
        assert table.weight.grad._nnz() == entries
    counts = torch.bincount(torch.tensor(looked_up), minlength=rows).to(torch.float64)
    assert torch.equal(table.weight.grad.to_dense(), counts[:, None].expand(rows, features))
    _reset(table.weight, set_to_none=False)
    assert table.weight.grad.is_sparse
    assert table.weight.grad._nnz() == 0
    _reset(table.weight, set_to_none=True)
    assert table.weight.grad is None


def _one_lookup(*, sparse: bool) -> torch.nn.Embedding:
    """Return a table of one feature after the backward of one lookup: its gradient is 1 in row 0."""
    table = torch.nn.Embedding(2, 1, sparse=sparse)
    torch.nn.init.zeros_(table.weight)
    table(torch.tensor([0])).sum().backward()
    return table


# A defect of torch, from 2.13 or before: adding a coalesced sparse tensor to a dense one copies
# `values.stride(0)` numbers of each row where it should copy a row's length. The gradient of `sum`
# is an expanded scalar with strides of 0, a single row of it counts as coalesced, and with one
# feature nothing makes it contiguous: 0 numbers are copied. Strict, so that the version which fixes
# it says so; then these become plain tests.
lost_row = pytest.mark.xfail(
    strict=True, reason="torch copies values.stride(0) numbers of a coalesced sparse row"
)


@lost_row
def test_a_sparse_row_of_one_feature_reads_as_it_is():
    assert _one_lookup(sparse=True).weight.grad.to_dense().tolist() == [[1.0], [0.0]]


@lost_row
def test_a_sparse_row_of_one_feature_is_stepped():
    weights = []
    for sparse in (False, True):
        table = _one_lookup(sparse=sparse)
        torch.optim.SGD(table.parameters(), lr=1.0).step()
        weights.append(table.weight.tolist())
    assert weights[0] == [[-1.0], [0.0]]
    assert weights[0] == weights[1]


@lost_row
def test_a_sparse_row_of_one_feature_accumulates_into_zeros():
    table = _one_lookup(sparse=True)
    table.weight.grad = torch.zeros_like(table.weight)
    table(torch.tensor([0])).sum().backward()
    assert table.weight.grad.tolist() == [[1.0], [0.0]]


@lost_row
def test_a_sparse_row_does_not_spill_into_the_next():
    values = torch.arange(1.0, 6.0)[None, :3].as_strided((1, 3), (5, 1))
    dense = torch.sparse_coo_tensor([[0]], values, (3, 3)).to_dense()
    assert dense.tolist() == [[1.0, 2.0, 3.0], [0.0] * 3, [0.0] * 3]


# --- the sign of zero


@given(shape=shapes)
def test_a_negative_zero_survives_only_after_none(shape):
    negative = torch.full(shape, -0.0, dtype=torch.float64)
    after_none, after_zeros = _parameter(shape), _parameter(shape)
    after_zeros.grad = torch.zeros_like(after_zeros)
    for p in (after_none, after_zeros):
        _Hands.apply(p, negative).backward()
    assert after_none.grad.signbit().all()
    assert not after_zeros.grad.signbit().any()
    assert torch.equal(after_none.grad, after_zeros.grad)


def test_negative_zeros_stay_negative_when_nothing_else_is_added():
    p = _parameter(())
    for _ in range(2):
        _Hands.apply(p, torch.tensor(-0.0, dtype=torch.float64)).backward()
    assert math.copysign(1, p.grad.item()) == -1


# --- surprises that the state machine of `properties/test_grad_states.py` came upon


def test_a_backward_under_inference_mode_leaves_a_gradient_that_no_backward_can_add_to():
    # none known upstream; that inference tensors refuse changes in place is documented, that
    # `.grad` becomes one is not
    p = _parameter((2,))
    loss = (p * 3).sum()
    with torch.inference_mode():
        loss.backward()
    assert p.grad.is_inference()
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        _push(p, torch.ones(2, dtype=torch.float64))
    assert p.grad.tolist() == [4.0, 4.0], "the refused backward has been added all the same"


def test_a_deep_copy_of_a_parameter_has_no_gradient():
    # https://github.com/pytorch/pytorch/issues/95711, open; a copy of a tensor has one
    p, tensor = _parameter((2,)), torch.ones(2, requires_grad=True)
    for each in (p, tensor):
        each.sum().backward()
    assert copy.deepcopy(p).grad is None
    assert copy.deepcopy(tensor).grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_conversion_that_swaps_loses_hooks(register):
    # none known upstream. A module always swaps parameters of a wrapper subclass, as DTensor;
    # others keep their hooks
    layer, calls, before = (
        torch.nn.Linear(1, 1),
        [],
        torch.__future__.get_swap_module_params_on_conversion(),
    )
    getattr(layer.weight, register)(lambda _: calls.append(1))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    layer(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
    assert not calls
