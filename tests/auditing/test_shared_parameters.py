"""Windows that are computed again with the program's own parameters."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

import gradcheck_suite
from gradcheck_suite.auditing import module_calls, shared_parameters
from tests.auditing.running import accumulate


def clamped(weight):
    with torch.no_grad():
        weight.clamp_(-0.01, 0.01)


def by_data(weight):
    weight.data.mul_(0.5)


def by_slice(weight):
    weight.data[0] = 0.0


def by_foreach(weight):
    torch._foreach_mul_([weight.detach()], 0.5)


def by_out(weight):
    torch.mul(weight.detach(), 0.5, out=weight.data)


def by_numpy(weight):
    weight.detach().numpy()[0] = 0.0


def by_dlpack(weight):
    np.from_dlpack(weight.detach())[...]
    torch.from_dlpack(weight.detach()).mul_(0.5)


def by_storage(weight):
    weight.detach().untyped_storage().fill_(0)


WRITES = [clamped, by_data, by_slice, by_foreach, by_out, by_numpy, by_dlpack, by_storage]


class Writing(torch.nn.Module):
    """Writes to its parameter in the second computation alone."""

    def __init__(self, write):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))
        self.write = write
        self.calls = 0

    def forward(self, x):
        found = x @ self.weight
        if type(self).writes:
            self.write(self.weight)
        return found

    writes = False


@pytest.mark.parametrize("write", WRITES)
def test_what_a_call_writes_to_a_parameter_is_put_back(write):
    model = Writing(write)
    before = model.weight.detach().clone()
    version = model.weight._version
    with shared_parameters.put_back([model.weight]):
        leaf = shared_parameters.shared(model.weight)
        write(leaf)
        assert not torch.equal(leaf, before)
        assert torch.equal(leaf, model.weight)
    assert torch.equal(model.weight, before)
    assert model.weight._version == version
    assert "numpy" not in vars(torch.Tensor)


def test_what_a_backward_writes_is_put_back():
    class Halving(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.weight = weight
            return x * weight

        @staticmethod
        def backward(ctx, gradient):
            ctx.weight.data.mul_(0.5)
            return gradient, gradient

    weight = torch.nn.Parameter(torch.randn(4))
    before = weight.detach().clone()
    with shared_parameters.put_back([weight]):
        leaf = shared_parameters.shared(weight)
        torch.autograd.grad(Halving.apply(torch.ones(4), leaf).sum(), [leaf])
        assert not torch.equal(weight, before)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("write", WRITES)
def test_the_parameters_of_a_program_that_writes_in_its_forward_are_those_without_an_audit(write):
    def trained(audit):
        torch.manual_seed(0)
        model = torch.nn.Sequential(Writing(write), torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Writing.writes = True
        with audit:
            for _ in range(5):
                for _ in range(2):
                    (model(torch.randn(3, 4)).square().mean() / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    try:
        plain = trained(contextlib.nullcontext())
        audited = trained(gradcheck_suite.audit(quiet=True))
    finally:
        Writing.writes = False
    assert all(map(torch.equal, plain, audited))


def test_a_window_is_computed_again_without_a_copy_of_its_parameters(monkeypatch):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    own = {p.data_ptr() for p in model.parameters()}
    seen = list[set[int]]()
    replaced = module_calls._Replacements.of

    def noted(*args):
        found = replaced(*args)
        seen.append({leaf.data_ptr() for leaf in found.leaves})
        return found

    monkeypatch.setattr(module_calls._Replacements, "of", staticmethod(noted))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_suite.audit(quiet=True) as audit:
        accumulate(model, optimizer)
    assert audit.result.verdict == "holds", audit.result
    assert seen
    assert all(one == own for one in seen)


def test_a_number_that_a_node_has_saved_can_be_read():
    weight = torch.nn.Parameter(torch.randn(4))
    with shared_parameters.put_back([weight]):
        product = shared_parameters.shared(weight) * 0.25
        assert float(product.grad_fn._saved_other) == 0.25
        (gradient,) = torch.autograd.grad((product * torch.ones(4)).sum(), [product])
    assert gradient.tolist() == [1.0] * 4
