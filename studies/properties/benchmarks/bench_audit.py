"""What an audit costs: whole runs with its default settings over the same runs without it, in one
process, in turn.

Run it by itself, on an idle machine: `pytest -s studies/properties/benchmarks/bench_audit.py`, with
`-k small-160` for one row. Threads are those that torch takes by itself, unless `OMP_NUM_THREADS`
is set. A row has the ratio of whole runs by the clock and by the processor time of the process,
medians over rounds.

Measured last with torch 2.13.0 and Python 3.11 on two cores of x86-64, of one thread, one pair of
runs each (`GRADCHECK_SUITE_BENCH_ROUNDS=1 OMP_NUM_THREADS=1`): small-160 1.074 (load 0.9), small-2000
1.025 by the clock and 1.028 by the processor (load 1.6). The others were not run since windows are
computed again with the memory of the program's parameters.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradcheck_suite

ROUNDS = int(os.environ.get("GRADCHECK_SUITE_BENCH_ROUNDS", "3"))
PASSES = 4
"""Micro-batches of a window."""

Loss = Callable[[], torch.Tensor]


class Transformer(nn.Module):
    """An encoder whose head shares no weight with its embedding."""

    def __init__(self, vocabulary: int, size: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, size), nn.Embedding(length, size)
        layer = nn.TransformerEncoderLayer(
            size, heads, 4 * size, 0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(size), enable_nested_tensor=False
        )
        self.head = nn.Linear(size, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits (rows, length, vocabulary) of token ids (rows, length)."""
        hidden: torch.Tensor = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        logits: torch.Tensor = self.head(self.layers(hidden))
        return logits


def _transformer(rows: int, **sizes: int) -> tuple[nn.Module, Loss]:
    model, length = Transformer(**sizes), sizes["length"]

    def loss() -> torch.Tensor:
        ids = torch.randint(0, sizes["vocabulary"], (rows, length + 1))
        return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return model, loss


class Adjoint(torch.autograd.Function):
    """Euler steps of an ordinary differential equation, whose backward computes each step again in
    a nested pass.
    """

    @staticmethod
    def forward(
        ctx: Any, field: nn.Module, steps: int, state: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        """Return the last state (rows, size)."""
        ctx.field, ctx.states, ctx.parameters = field, [state], parameters
        with torch.no_grad():
            for _ in range(steps):
                ctx.states.append(ctx.states[-1] + field(ctx.states[-1]) / steps)
        last: torch.Tensor = ctx.states[-1]
        return last

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        """Return the gradients of the first state and of the parameters."""
        steps, sums = len(ctx.states) - 1, [torch.zeros_like(p) for p in ctx.parameters]
        for state in reversed(ctx.states[:-1]):
            with torch.enable_grad():
                here = state.detach().requires_grad_()
                then = here + ctx.field(here) / steps
            gradient, *more = torch.autograd.grad(then, (here, *ctx.parameters), gradient)
            sums = [total + one for total, one in zip(sums, more, strict=True)]
        return None, None, gradient, *sums


def _ode(steps: int) -> tuple[nn.Module, Loss]:
    model = nn.Sequential(
        nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)
    )

    def loss() -> torch.Tensor:
        first = torch.randn(64, 8, requires_grad=True)
        last: torch.Tensor = Adjoint.apply(model, steps, first, *model.parameters())  # type: ignore[no-untyped-call]
        return functional.mse_loss(last, torch.randn(64, 8))

    return model, loss


MODELS: dict[str, Callable[[], tuple[nn.Module, Loss]]] = {
    "small": lambda: _transformer(4, vocabulary=512, size=128, layers=4, heads=4, length=64),
    "large": lambda: _transformer(4, vocabulary=4096, size=256, layers=10, heads=4, length=128),
    "ode": lambda: _ode(40),
}


def _seconds(
    name: str, windows: int, options: dict[str, Any] | None
) -> tuple[float, float, gradcheck_suite.Result | None]:
    """Train, and return the seconds of the clock, those of the processor, and the result of the
    audit.
    """
    torch.manual_seed(0)
    model, loss = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    clock, processor = time.perf_counter(), time.process_time()
    with (
        nullcontext() if options is None else gradcheck_suite.audit(quiet=True, **options) as audit
    ):
        for _ in range(windows):
            for _ in range(PASSES):
                (loss() / PASSES).backward()
            optimizer.step()
            optimizer.zero_grad()
    spent = time.perf_counter() - clock, time.process_time() - processor
    return *spent, None if audit is None else audit.result


def _row(name: str, windows: int, options: dict[str, Any]) -> tuple[float, float]:
    """Return the ratio of audited runs to plain ones by the clock and by the processor, and print
    them.
    """
    pairs: list[tuple[Sequence[Any], Sequence[Any]]] = []
    for _ in range(ROUNDS):
        pairs.append((_seconds(name, windows, None), _seconds(name, windows, options)))
    ratios = [statistics.median(audited[i] / plain[i] for plain, audited in pairs) for i in (0, 1)]
    result = pairs[-1][1][2]
    assert result is not None
    assert not result.violations, result
    count = sum(p.numel() for p in MODELS[name]()[0].parameters())
    plain = statistics.median(plain[0] for plain, _ in pairs) / windows
    print(
        f"\n{name}, {count / 1e6:.2f}M parameters, {windows} windows of {1000 * plain:.1f} ms, "
        f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}, {options or 'default settings'}: "
        f"{ratios[0]:.3f} by the clock, {ratios[1]:.3f} by the processor; {result.windows} judged, "
        f"{sum(result.again.values())} computed again"
    )
    return ratios[0], ratios[1]


ROWS = [("small", 160, 1.10), ("small", 2000, 1.03), ("large", 160, 1.04), ("ode", 160, 1.10)]


@pytest.mark.parametrize(("name", "windows", "allowed"), ROWS)
def test_a_whole_run_takes_little_longer_with_an_audit(
    name: str, windows: int, allowed: float
) -> None:
    """By the processor: other work on the machine changes what the clock says."""
    _seconds(name, 3, {})  # what is loaded and compiled once
    assert _row(name, windows, {})[1] <= allowed


def test_counting_alone_costs_at_most_a_twenty_fifth_of_a_window() -> None:
    _seconds("small", 3, {})
    assert _row("small", 60, {"budget": "none", "without": ("weights", "sums", "batch")})[1] <= 1.04


def test_a_window_that_is_computed_again_takes_at_most_twice_as_long() -> None:
    _seconds("small", 3, {})
    assert _row("small", 20, {"every": 1})[1] <= 2
