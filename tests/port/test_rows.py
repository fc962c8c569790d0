"""Every row of the table of mistakes computes something else than torch for some call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's documents call it
from torch import nn

from gradcheck_suite.port.changes import RAISED, CallArguments, NoArgumentError
from gradcheck_suite.port.mistakes import FORMULAS, is_activation, rows_of
from gradcheck_suite.port.search import Repairs
from gradcheck_suite.port.torch_program import OperationCall, TorchProgram, flat, with_tensors

torch.manual_seed(0)
D = torch.float64
ROWS = torch.randn(4, 6, dtype=D)
IMAGE = torch.randn(2, 4, 6, 6, dtype=D)
SQUARE = torch.randn(4, 4, dtype=D)
CLASSES = torch.tensor([0, 2, 5, 2])
IGNORED = torch.tensor([0, 2, -100, 2])
WEIGHTS = torch.rand(6, dtype=D) + 0.5
GRID = torch.rand(2, 3, 3, 2, dtype=D) * 2.4 - 1.2
MASK = torch.where(torch.ones(4, 6).tril(1) > 0, 0.0, -torch.inf).double()
KERNEL, WIDE = torch.randn(4, 4, 3, 3, dtype=D), torch.randn(8, 2, 3, 3, dtype=D)
SEGMENTS = torch.tensor([0, 0, 2, 2])


def batch_norm(train: bool) -> Any:
    mean, variance = torch.randn(4, dtype=D), torch.rand(4, dtype=D) + 0.5
    return lambda x: F.batch_norm(x, mean.clone(), variance.clone(), training=train)


CALLS: tuple[tuple[Callable[[Any], Any], Any], ...] = (
    (lambda x: F.layer_norm(x, (6,), WEIGHTS, WEIGHTS), ROWS),
    (lambda x: F.group_norm(x, 2), IMAGE),
    (lambda x: F.rms_norm(x, (6,)), ROWS),
    (batch_norm(True), IMAGE),
    (batch_norm(False), IMAGE),
    (lambda x: torch._weight_norm(x, x[:, :1].exp(), 0), ROWS),
    (F.gelu, ROWS),
    (lambda x: F.leaky_relu(x, 0.2), ROWS),
    (F.elu, ROWS),
    (F.softplus, ROWS),
    (torch.relu, ROWS),
    (lambda x: torch.exp(-x).log(), ROWS),
    (lambda x: F.interpolate(x, size=(9, 9), mode="bilinear"), IMAGE),
    (lambda x: F.interpolate(x, size=(9, 9), mode="nearest"), IMAGE),
    (lambda x: F.grid_sample(x, GRID, align_corners=False), IMAGE),
    (lambda x: F.avg_pool2d(x, 3, 2, 1), IMAGE),
    (lambda x: F.max_pool2d(x, 3, 2, 1), -IMAGE.abs() - 1),
    (lambda x: F.adaptive_avg_pool2d(x, 4), IMAGE),
    (lambda x: F.adaptive_max_pool2d(x, 4), IMAGE),
    (lambda x: F.conv2d(x, KERNEL, KERNEL[0, 0, 0, :1].expand(4), stride=2, padding=1), IMAGE),
    (lambda x: F.conv2d(x, WIDE, groups=2, padding=1), IMAGE),
    (lambda x: F.conv2d(x, KERNEL, dilation=2, padding=2), IMAGE),
    (lambda x: x.tril(), SQUARE),
    (lambda x: x.triu(1), SQUARE),
    (lambda x: torch.arange(6) > 2, ROWS),
    (lambda x: torch.arange(6) == 2, ROWS),
    (lambda x: x[1], ROWS),
    (lambda x: x.topk(2)[0], ROWS),
    (lambda x: x.cumsum(1), ROWS),
    (lambda x: x.sort()[0], ROWS),
    (lambda x: F.nll_loss(x.log_softmax(1), CLASSES, WEIGHTS), ROWS),
    (lambda x: F.nll_loss(x.log_softmax(1), IGNORED, WEIGHTS), ROWS),
    (lambda x: F.nll_loss(x.log_softmax(1), IGNORED), ROWS),
    (lambda x: F.binary_cross_entropy(x.sigmoid(), x.abs().clamp(max=1), WEIGHTS), ROWS),
    (lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid(), pos_weight=WEIGHTS), ROWS),
    (lambda x: F.smooth_l1_loss(x, x.flip(0), beta=0.7), ROWS),
    (lambda x: F.huber_loss(x, x.flip(0), delta=0.7), ROWS),
    (lambda x: F.mse_loss(x, x.flip(0)), ROWS),
    (lambda x: x.softmax(1), ROWS),
    (lambda x: (x + MASK.clamp_min(-1e9)).softmax(0), ROWS),
    (lambda x: (x + MASK).softmax(1), ROWS),
    (lambda x: F.embedding(CLASSES, x.T.contiguous(), padding_idx=0), ROWS),
    (lambda x: x[:, CLASSES], ROWS),
    (lambda x: x[CLASSES[:2]], ROWS),
    (lambda x: 10000.0**x, ROWS),
    (lambda x: x * (x.isnan().logical_not()), ROWS),
    (lambda x: x.masked_fill(x > 0, -1e9), ROWS),
    (lambda x: torch.where(x > 0, x, -1.0), ROWS),
    (lambda x: x.T, SQUARE),
    (lambda x: torch.cat([x, 2 * x]), ROWS),
    (lambda x: torch.stack([x, 2 * x, 3 * x, 4 * x]), ROWS),
    (lambda x: x.split(2, 1)[0] - x.split(2, 1)[1], ROWS),
    (lambda x: x.roll(1, 1), ROWS),
    (lambda x: F.pad(x, (1, 0)), ROWS),
    (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), IMAGE),
    (lambda x: torch.maximum(x, x.flip(0)), ROWS),
    (lambda x: x[:, 1:4], ROWS),
    (lambda x: x.std(1), ROWS),
    (lambda x: x.var(1), ROWS),
    (lambda x: x.norm(dim=1), ROWS),
    (lambda x: x.sum(1), SQUARE),
    (lambda x: x.mean(1), SQUARE),
    (lambda x: x.mean((0, 1)), ROWS),
    (lambda x: torch.zeros_like(x).index_add(0, SEGMENTS, x), ROWS),
    (
        lambda x: torch.zeros_like(x).scatter_reduce(
            0, SEGMENTS[:, None].expand_as(x), x, "amax", include_self=False
        ),
        ROWS,
    ),
    (lambda x: F.linear(x, x, x[:, 0]), ROWS),
    (lambda x: x.abs() + 1e-5, ROWS),
    (lambda x: x.abs().clamp_min(1e-3), 1e-2 * ROWS),
    (lambda x: x + x.flip(0), ROWS),
    (lambda x: x - x.flip(0), ROWS),
    (lambda x: x * x.flip(0), ROWS),
    (lambda x: x / x.flip(0), ROWS),
    (lambda x: torch.addcmul(x, x.flip(0), x.flip(1)), ROWS),
    (lambda x: torch.lerp(x, x.flip(0), 0.3), ROWS),
)


class Of(nn.Module):
    """A module of a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


@cache
def recorded() -> list[tuple[OperationCall, Any, Any, Any]]:
    """Return calls with their arguments and results."""
    found = []
    for function, x in CALLS:
        program = TorchProgram(
            Of(function), (x.numpy(),), (), {}, lambda out: (out, out.double().sum())
        )
        run = Repairs().run(program)
        for call, results in zip(program.calls, run.seen, strict=True):
            if results:
                args, kwargs = with_tensors((call.args, call.kwargs), run.get)
                found.append((call, args, kwargs, results))
    return found


def computes_otherwise(row: Any, value: Any, given: CallArguments, results: list[Any]) -> bool:
    try:
        made = flat(row.make(given, value))
    except RAISED:
        return False
    return any(
        isinstance(new, torch.Tensor)
        and (new.shape != old.shape or not torch.equal(new.double(), old.double()))
        for new, old in zip(made, results, strict=False)
    )


@pytest.mark.parametrize(
    "number", range(len(FORMULAS)), ids=[f"{r.cause} of {r.where}"[:50] for r in FORMULAS]
)
def test_every_row_fires(number):
    row = FORMULAS[number]
    for call, args, kwargs, results in recorded():
        if row not in rows_of(call.name, is_activation(call)):
            continue
        given = CallArguments(call, args, kwargs)
        for value in row.values(given, results[0]):
            if computes_otherwise(row, value, given, results):
                return
    pytest.fail(f"no call at which {row.cause!r} of {row.where} gives another result")


def test_a_misspelt_argument_of_an_overload_is_told_from_one_of_python():
    call, args, kwargs, _ = next(c for c in recorded() if c[0].name == "relu")
    with pytest.raises(NoArgumentError):
        _ = CallArguments(call, args, kwargs).normalized_shape
    assert not issubclass(AttributeError, RAISED)
    assert not issubclass(TypeError, RAISED)
