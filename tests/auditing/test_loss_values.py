"""Writes between a forward and its backward, told from what the nodes outside of modules have saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as everyone calls it
from torch.utils.checkpoint import checkpoint

from gradcheck_suite.auditing.loss_values import rewritten_outside

Net = Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]


class Cubed(torch.autograd.Function):
    """A function of the program's own, which saves its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x + x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (1 + 3 * x**2)


def _between(function: Callable[[torch.Tensor], torch.Tensor]) -> Net:
    return lambda x, w: F.linear(function(F.linear(x, w[0], w[1])), w[2], w[3])


def _under_autocast(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        return _between(torch.tanh)(x, w)


def _in_place(x, w):
    hidden = x @ w[0].t()
    hidden += w[1]
    return F.linear(hidden.tanh_(), w[2], w[3])


def _normalized(hidden):
    return hidden / (hidden.norm(dim=-1, keepdim=True) + 1e-3)


NETS = {
    "tanh": _between(torch.tanh),
    "relu": _between(torch.relu),
    "sigmoid": _between(torch.sigmoid),
    "softmax": _between(lambda hidden: hidden.softmax(-1)),
    "a function of one's own": _between(Cubed.apply),
    "a norm": _between(_normalized),
    "three dimensions": lambda x, w: _between(torch.tanh)(x[:, None], w).view(-1, 3),
    "in place": _in_place,
    "autocast": _under_autocast,
}
SHAPES = ((8, 5), (8,), (3, 8), (3,))
BIASES = (1, 3)


def _loss(net: str, dtype: torch.dtype, rows: int):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter((torch.randn(shape) / 2).to(dtype)) for shape in SHAPES]
    x = torch.randn(rows, 5).to(dtype)
    out = NETS[net](x, weights).float()
    return F.mse_loss(out, torch.randn(rows, 3)), x, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("net", NETS)
def test_a_bias_that_is_written_is_no_fault_since_no_backward_reads_it(net, rows, dtype):
    loss, _, weights = _loss(net, dtype, rows)
    assert rewritten_outside(loss) is None
    for index in BIASES:
        weights[index].data.add_(1)
    assert rewritten_outside(loss) is None


# of what autocast has cast a copy is read, which nothing here writes to
UNCAST = [net for net in NETS if net != "autocast"]


@pytest.mark.parametrize("net", UNCAST)
def test_an_input_that_is_written_is_found(net):
    loss, x, _ = _loss(net, torch.float32, 6)
    x.data.normal_()
    found = rewritten_outside(loss)
    assert found is not None
    assert found.name == "changed-batch"


@pytest.mark.parametrize("net", UNCAST)
def test_a_weight_that_is_written_is_found(net):
    loss, _, weights = _loss(net, torch.float32, 6)
    weights[2].data.mul_(1.5)
    found = rewritten_outside(loss)
    assert found is not None
    assert found.name == "stale-parameters"


def test_a_checkpoint_is_not_computed_again_to_be_looked_at():
    calls = list[int]()

    def hidden(x, weight):
        calls.append(1)
        return torch.tanh(x @ weight) * x

    weight = torch.nn.Parameter(torch.randn(3, 3))
    loss = checkpoint(hidden, torch.randn(5, 3), weight, use_reentrant=False).square().mean()
    assert rewritten_outside(loss) is None
    assert len(calls) == 1
