"""Which calls of the forward a backward may make once more: only these are noted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gradcheck_suite.auditing.repeated_calls import may_be_repeated


class Asked(torch.nn.Module):
    """A module that keeps what it is told in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return twice the input."""
        self.told.append(may_be_repeated())
        return 2 * x


class OwnCheckpoint(torch.autograd.Function):
    """Calls a module in its forward with a gradient, and once more in its backward."""

    @staticmethod
    def forward(ctx: Any, module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return what the module gives."""
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.enable_grad():
            output: torch.Tensor = module(x.detach().requires_grad_())
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        """Return the gradient of a second call."""
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.module(x)
        return None, torch.autograd.grad(output, x, gradient)[0]


def _under_hooks(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
        output: torch.Tensor = module(x)
    return output


@pytest.mark.parametrize(
    ("called", "expected"),
    [
        pytest.param(lambda module, x: module(x), False, id="plain"),
        pytest.param(
            lambda module, x: checkpoint(module, x, use_reentrant=False), True, id="non-reentrant"
        ),
        pytest.param(
            lambda module, x: checkpoint(module, x, use_reentrant=True), True, id="reentrant"
        ),
        pytest.param(OwnCheckpoint.apply, True, id="a function of one's own"),
        pytest.param(_under_hooks, True, id="hooks on what is saved"),
    ],
)
def test_a_call_is_noted_where_a_backward_may_make_it_again(called: Any, expected: bool) -> None:
    module = Asked()
    called(module, torch.ones(2, requires_grad=True))
    assert module.told == [expected]
