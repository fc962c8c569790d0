"""Operations with many arguments against torch, for drawn arguments.

Each combination is a program to compile.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gradcheck_suite.bridge.lowered import arguments_of, lower
from properties.helpers import scaled
from tests.bridge.agreeing import assert_exported_agrees
from tests.bridge.comparing import TOLERANCE, compare, error_between
from tests.bridge.samples import tensor

aten = torch.ops.aten
few = scaled(10)
small = st.integers(1, 2)


def _accepted(op, args, kwargs=None):
    """Return whether torch accepts these arguments."""
    try:
        op(*args, **(kwargs or {}))
    except (RuntimeError, IndexError):
        return False
    return True


@few
@given(data=st.data())
def test_convolutions(data):
    n = data.draw(st.integers(1, 2), label="axes")
    groups = data.draw(small, label="groups")
    transposed = data.draw(st.booleans(), label="transposed")

    def each(high, low=0):
        return [data.draw(st.integers(low, high)) for _ in range(n)]

    kernel, stride, padding, dilation = each(3, 1), each(2, 1), each(2), each(2, 1)
    output_padding = each(1) if transposed else [0] * n
    channels = (2 * groups, 2) if transposed else (2, 2)
    weight = tensor(*channels, *kernel, seed=1)
    image = tensor(2, channels[0] if transposed else 2 * groups, *[5, 6][:n])
    bias = (
        tensor(2 * groups if transposed else 2, seed=2)
        if data.draw(st.booleans(), label="bias")
        else None
    )
    args = (image, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    assume(_accepted(aten.convolution.default, args))
    compare(aten.convolution.default, args, {})


@pytest.mark.full
@few
@given(
    causal=st.booleans(),
    mask=st.sampled_from([None, "boolean", "additive"]),
    scale=st.sampled_from([None, 0.3]),
    grouped=st.booleans(),
)
def test_attention(causal, mask, scale, grouped):
    """Torch decomposes it, or chooses its operation for CPUs: where no mask has a gradient and the
    widths are equal.
    """
    assume(not (causal and mask))
    heads = 1 if grouped else 2
    query, key, value = (
        tensor(2, 2, 3, 4),
        tensor(2, heads, 5, 4, seed=1),
        tensor(2, heads, 5, 4, seed=2),
    )
    masks = {
        None: None,
        "boolean": tensor(3, 5, seed=4).detach() > -0.5,
        "additive": tensor(2, 1, 3, 5, seed=4),
    }
    args = (query, key, value, masks[mask], 0.0, causal)
    assert_exported_agrees(
        aten.scaled_dot_product_attention.default, args, {"scale": scale, "enable_gqa": grouped}
    )


@pytest.mark.full
@few
@given(
    dimension=st.integers(-2, 1),
    start=st.integers(-5, 5),
    end=st.integers(-5, 9) | st.none(),
    step=st.integers(1, 3),
    write=st.booleans(),
)
def test_slices(dimension, start, end, step, write):
    x = tensor(4, 4)
    if not write:
        compare(aten.slice.Tensor, (x, dimension, start, end, step), {})
        return
    source = aten.slice.Tensor(x, dimension, start, end, step).detach() * 2
    assert_exported_agrees(
        aten.slice_scatter.default, (x, source.requires_grad_(), dimension, start, end, step), {}
    )


@few
@given(data=st.data())
def test_writes_by_index(data):
    places = st.lists(st.integers(-4, 3), min_size=2, max_size=2)
    accumulate = data.draw(st.booleans(), label="accumulate")
    rows = data.draw(
        places if accumulate else places.filter(lambda p: p[0] % 4 != p[1] % 4), label="rows"
    )
    indices = [torch.tensor(rows)]
    if data.draw(st.booleans(), label="two axes"):
        indices.append(torch.tensor(data.draw(places, label="columns")))
    elif data.draw(st.booleans(), label="second axis"):
        indices = [None, *indices]
    x = tensor(4, 4)
    values = (
        x[tuple(slice(None) if i is None else i for i in indices)].detach() * 3
    ).requires_grad_()
    compare(aten.index_put.default, (x, indices, values, accumulate), {})


@few
@given(
    order=st.sampled_from([0, 1, 2, 3, 0.5, -1, float("inf"), float("-inf")]),
    dims=st.sampled_from([None, [0], [1], [0, 1]]),
    keep=st.booleans(),
)
def test_norms(order, dims, keep):
    compare(aten.linalg_vector_norm.default, (tensor(3, 4), order, dims, keep), {})


@pytest.mark.full
@few
@given(
    reduction=st.integers(0, 2),
    weighted=st.booleans(),
    targets=st.lists(st.sampled_from([0, 1, 2, -100]), min_size=3, max_size=3),
)
def test_negative_log_likelihood(reduction, weighted, targets):
    """Also where no target counts: NaN, with gradient 0."""
    weight = tensor(3, seed=1).detach().abs() if weighted else None
    logs = torch.log_softmax(tensor(3, 3).detach(), 1)
    model = torch.nn.ParameterList([logs])

    def loss(model, batch):
        return aten.nll_loss_forward.default(
            model[0], torch.tensor(targets), weight, reduction, -100
        )[0].sum()

    value, gradient, _ = lower(model, loss, []).value_and_gradient(
        *arguments_of(model, []), jit=False
    )
    expected = loss(model, [])
    expected.backward()
    assert error_between(expected.item(), value) <= TOLERANCE
    assert error_between(model[0].grad, gradient["0"]) <= TOLERANCE


@few
@given(
    mode=st.integers(0, 2),
    padding=st.integers(-1, 3),
    indices=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    cut=st.integers(0, 5),
    last=st.booleans(),
)
def test_bags(mode, padding, indices, cut, last):
    offsets = torch.tensor([0, cut, 5] if last else [0, cut])
    args = (tensor(4, 2), torch.tensor(indices), offsets, False, mode, False, None, last, padding)
    compare(aten._embedding_bag.default, args, {})
