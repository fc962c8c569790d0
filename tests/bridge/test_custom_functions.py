"""Custom `autograd.Function`s: sound ones and planted faults."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from gradcheck_suite.bridge import accept_backward, arguments_of, lower, wrong_backwards
from gradcheck_suite.bridge.exporting import ACCEPTED
from gradcheck_suite.errors import UsageError
from tests.bridge.agreeing import assert_agrees
from tests.bridge.comparing import error_between

X = torch.linspace(-1.3, 2, 12, dtype=torch.float64).reshape(3, 4)


@pytest.fixture(autouse=True)
def _none_accepted_afterwards():
    before = set(ACCEPTED)
    yield
    ACCEPTED.intersection_update(before)


def _scaled_tanh(slope):
    """Return y = s tanh(x / s), whose backward multiplies its derivative by `slope`."""

    class ScaledTanh(Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.scale = scale
            out = scale * torch.tanh(x / scale)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx, gradient):
            (out,) = ctx.saved_tensors
            return slope * gradient * (1 - (out / ctx.scale) ** 2), None

    return ScaledTanh


class Attention(Function):
    """Weights and their product with values.

    The forward detaches, and a second output has no derivative.
    """

    @staticmethod
    def forward(x, values, mask):
        with torch.no_grad():
            weights = torch.softmax(x.detach().masked_fill(~mask, -math.inf), -1)
        return weights @ values, weights.argmax(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, values, mask = inputs
        ctx.save_for_backward(torch.softmax(x.masked_fill(~mask, -math.inf), -1), values)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, gradient, _):
        weights, values = ctx.saved_tensors
        g = gradient @ values.T
        return weights * (g - (g * weights).sum(-1, keepdim=True)), weights.T @ gradient, None


class AttentionWithoutMean(Attention):
    """The planted fault: the softmax's derivative lacks its second term."""

    @staticmethod
    def backward(ctx, gradient, _):
        weights, values = ctx.saved_tensors
        return weights * (gradient @ values.T), weights.T @ gradient, None


class Rounded(Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class BoundedRoot(Function):
    """A square root whose derivative is at most `1 / (2 * 0.1)`."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient / (2 * x.clamp(min=0.01).sqrt())


class Doubled(Function):
    """The planted fault: an operation in place whose derivative is 2."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)).double()


def _tanh_loss(slope):
    function = _scaled_tanh(slope)
    return lambda model, batch: function.apply(model(batch), 0.7).pow(2).mean()


def _attention_loss(function):
    def loss(model, batch):
        out, best = function.apply(model[0](batch), model[1].weight.T, torch.arange(5) < 4)
        return (out**2).sum() + best.sum()

    return loss


def _root_loss(least):
    return lambda model, batch: BoundedRoot.apply(model(batch) ** 2 + least).mean()


SOUND = (_tanh_loss(1), _attention_loss(Attention), _root_loss(0.02))
FAULTY = {
    "AttentionWithoutMean": (_attention_loss(AttentionWithoutMean), "argument 0 is off by"),
    "BoundedRoot": (_root_loss(1e-4), "argument 0 is off by"),
    "Doubled": (
        lambda model, batch: Doubled.apply(model(batch).clone()).mean(),
        "argument 0 is 1.5 times",
    ),
    "Rounded": (
        lambda model, batch: Rounded.apply(3 * model(batch)).sum(),
        "argument 0 is not 0, and the derivative is",
    ),
    "ScaledTanh": (_tanh_loss(2), "argument 0 is 2 times the derivative"),
}


def _sound(model, batch):
    return sum(loss(model, batch) for loss in SOUND)


def _faulty(model, batch):
    return sum(loss(model, batch) for loss, _ in FAULTY.values())


@pytest.mark.full
@pytest.mark.parametrize("reentrant", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_function_in_an_activation_checkpoint_is_differentiated(reentrant):
    """Checkpointing packs what the function saves under `no_grad`.

    The reentrant one runs all of it under `no_grad`.
    """
    function = _scaled_tanh(1)

    def loss(model, batch):
        return checkpoint(function.apply, model(batch), 0.7, use_reentrant=reentrant).pow(2).mean()

    assert_agrees(_model(), loss, X, jit=False)


@pytest.mark.full
def test_sound_functions_are_carried_over_and_not_named():
    assert_agrees(_model(), _sound, X)
    assert wrong_backwards(_model(), _sound, X) == ()


@pytest.mark.full
def test_a_backward_that_is_not_the_derivative_is_named_and_the_rest_of_the_loss_agrees():
    model = _model()
    found = wrong_backwards(model, _faulty, X)
    for wrong, (name, (_, says)) in zip(found, FAULTY.items(), strict=True):
        assert wrong.function.__name__ == name
        assert says in str(wrong)
        assert f"accept_backward({name})" in str(wrong)
    own, derivative = (
        lower(model, _faulty, X, own_backwards=kept) for kept in ([w.function for w in found], ())
    )
    _faulty(model, X).backward()
    for lowered, agrees in ((own, True), (derivative, False)):
        _, gradient, _ = lowered.value_and_gradient(*arguments_of(model, X))
        errors = [
            error_between(x.grad.numpy(), gradient[name]) for name, x in model.named_parameters()
        ]
        assert (max(errors) < 1e-12) == agrees


def test_an_accepted_backward_is_called_and_not_named():
    accept_backward(Rounded)
    loss = FAULTY["Rounded"][0]
    assert wrong_backwards(_model(), loss, X) == ()
    assert_agrees(_model(), loss, X, jit=False)


def test_only_a_custom_function_can_be_accepted():
    with pytest.raises(
        UsageError, match=r"expected a subclass of torch.autograd.Function, got <built-in"
    ):
        accept_backward(torch.sin)
