"""What drawn inputs reach once in a while: ties, rows of padding, limits; and where a recurrence
starts, what is gathered, and which output is which.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's documents call it
from torch import nn

from gradcheck_suite.port.compare import judge_function
from gradcheck_suite.port.result import PortResult
from tests.port.pairs import pair_of


def judged(pair: dict[str, Any]) -> PortResult:
    return judge_function(lambda: pair, "pair")


def causes(pair: dict[str, Any]) -> list[str]:
    return [f.cause for f in judged(pair).differences]


def dense(p: Any, x: Any, name: str = "") -> Any:
    return x @ p[f"{name}weight"].T + p[f"{name}bias"]


def numbers(*shape: int) -> Any:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


class Largest(nn.Linear):
    """Keeps the two largest elements of each row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, places = x.topk(2, -1)
        return super().forward(torch.zeros_like(x).scatter(-1, places, values))


def largest(by: str) -> dict[str, Any]:
    def apply(p: Any, x: Any) -> Any:
        values, places = jax.lax.top_k(x, 2)
        if by == "threshold":
            return dense(p, jnp.where(x >= values[..., -1:], x, 0))
        if by == "last":
            places = x.shape[1] - 1 - jax.lax.top_k(x[:, ::-1], 2)[1]
        kept = jax.nn.one_hot(places, x.shape[1], dtype=x.dtype).sum(-2)
        return dense(p, kept * x)

    torch.manual_seed(0)
    return pair_of(Largest(4, 3), apply, (numbers(3, 4),))


@pytest.mark.parametrize("by", ["first", "last"])
def test_any_order_of_ties_that_torch_may_return_is_right(by):
    assert judged(largest(by)).verdict == "holds"


class Masked(nn.Linear):
    """Keeps what is not below the second largest element."""

    def forward(self, x: Any) -> Any:
        return super().forward(x.masked_fill(x < x.topk(2, -1).values[..., -1:], 0))


class Ranked(nn.Linear):
    """Multiplies each element by its place in a stable order."""

    def forward(self, x: Any) -> Any:
        return super().forward(x * x.sort(dim=-1, stable=True, descending=True).indices)


def masked(p: Any, x: Any) -> Any:
    return dense(p, jnp.where(x >= jax.lax.top_k(x, 2)[0][..., -1:], x, 0))


def taken(p: Any, x: Any) -> Any:
    return dense(p, x * jax.nn.one_hot(jax.lax.top_k(x, 2)[1], 4, dtype=x.dtype).sum(-2))


def ranked(p: Any, x: Any) -> Any:
    return dense(p, x * jnp.argsort(-x, stable=True))


def turned(p: Any, x: Any) -> Any:
    return dense(p, x * jnp.argsort(x, stable=True)[..., ::-1])


@pytest.mark.parametrize(
    ("mine", "theirs", "found"),
    [
        (Masked, masked, []),
        (Masked, taken, ["ties"]),
        (Ranked, ranked, []),
        (Ranked, turned, ["ties"]),
        (Largest, taken, []),
        (Largest, masked, ["ties"]),
    ],
)
def test_which_of_equal_elements_are_kept_is_named(mine, theirs, found):
    assert causes(pair_of(mine(4, 3), theirs, (numbers(3, 4),))) == found


class Rounded(nn.Module):
    """Marks the two largest of numbers that are equal at the given inputs already."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((1,), 0.3))

    def forward(self, x: Any) -> Any:
        places = (x.round() + 0 * self.shift).topk(2, -1).indices
        return torch.zeros_like(x).scatter(-1, places, 1.0) * (1 + self.shift)


@pytest.mark.parametrize("by", ["the first", "the last", "a threshold"])
def test_given_inputs_may_have_equal_elements(by):
    def apply(p: Any, x: Any) -> Any:
        y = jnp.round(x) + 0 * p["shift"]
        values, places = jax.lax.top_k(y, 2)
        if by == "the last":
            places = y.shape[1] - 1 - jax.lax.top_k(y[:, ::-1], 2)[1]
        kept = jax.nn.one_hot(places, y.shape[1], dtype=x.dtype).sum(-2)
        if by == "a threshold":
            kept = (y >= values[..., -1:]).astype(x.dtype)
        return kept * (1 + p["shift"])

    result = judged(pair_of(Rounded(), apply, (numbers(5, 4),)))
    assert [f.cause for f in result.differences] == (["ties"] if by == "a threshold" else []), (
        result
    )
    if by == "the first":  # torch takes the last ones here
        assert any("torch's, which promises none" in note for note in result.notes)


def test_a_threshold_that_keeps_more_than_k_where_there_are_ties_differs():
    result = judged(largest("threshold"))
    assert result.verdict == "differs"
    assert "has equal elements" in result.differences[0].words


class Bag(nn.Module):
    """Averages the embeddings of the tokens that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        kept = (ids != 0)[..., None]
        return self.last((self.words(ids) * kept).sum(1) / kept.sum(1).clamp(min=1))


@pytest.mark.parametrize("limited", [True, False])
def test_a_count_of_tokens_that_is_limited_at_1(limited):
    def apply(p: Any, ids: Any) -> Any:
        kept = (ids != 0)[..., None]
        count = jnp.maximum(kept.sum(1), 1) if limited else kept.sum(1)
        return dense(p, (p["words.weight"][ids] * kept).sum(1) / count, "last.")

    torch.manual_seed(0)
    pair = pair_of(Bag(), apply, (np.array([[3, 8, 1, 0], [2, 5, 4, 7], [1, 0, 0, 0]]),))
    assert causes(pair) == ([] if limited else ["missing-operation"])


class Average(nn.Linear):
    """A moving average over time, from zero or from the first value."""

    def __init__(self, start: str) -> None:
        super().__init__(3, 4)
        self.start = start

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        out = [x[:, 0]] if self.start == "first" else [torch.zeros_like(x[:, 0])]
        for t in range(int(self.start == "first"), x.shape[1]):
            out.append(0.7 * out[-1] + 0.3 * x[:, t])
        return torch.stack(out[self.start != "first" :], 1)


@pytest.mark.parametrize("mine", ["zero", "first"])
@pytest.mark.parametrize("theirs", ["zero", "first"])
def test_where_an_average_starts(mine, theirs):
    def apply(p: Any, x: Any) -> Any:
        x = dense(p, x).swapaxes(0, 1)

        def step(h: Any, row: Any) -> Any:
            return (0.7 * h + 0.3 * row,) * 2

        start = x[0] if theirs == "first" else jnp.zeros_like(x[0])
        return jax.lax.scan(step, start, x)[1].swapaxes(0, 1)

    torch.manual_seed(0)
    found = causes(pair_of(Average(mine), apply, (numbers(2, 5, 3),)))
    assert found == ([] if mine == theirs else ["initial-accumulator"])


class Last(nn.Module):
    """Normalizes the last state of a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.norm = nn.RNN(3, 4, batch_first=True), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.rnn(x)[1][-1])


@pytest.mark.parametrize("takes", ["last", "mean"])
def test_the_mean_of_all_states_for_the_last_one(takes):
    def apply(p: Any, x: Any) -> Any:
        bias = p["rnn.bias_ih_l0"] + p["rnn.bias_hh_l0"]

        def step(h: Any, row: Any) -> Any:
            new = jnp.tanh(row @ p["rnn.weight_ih_l0"].T + h @ p["rnn.weight_hh_l0"].T + bias)
            return new, new

        states = jax.lax.scan(step, jnp.zeros((len(x), 4), x.dtype), x.swapaxes(0, 1))[1]
        h = states[-1] if takes == "last" else states.mean(0)
        h = h - h.mean(-1, keepdims=True)
        h = h / jnp.sqrt((h**2).mean(-1, keepdims=True) + 1e-5)
        return h * p["norm.weight"] + p["norm.bias"]

    torch.manual_seed(0)
    pair = pair_of(Last(), apply, (numbers(2, 5, 3),))
    assert causes(pair) == ([] if takes == "last" else ["reduction"])


class Both(nn.Module):
    """Two outputs with names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mean": self.a(x), "scale": F.softplus(self.b(x))}


@pytest.mark.parametrize("exchanged", [False, True])
def test_outputs_under_each_others_names(exchanged):
    def apply(p: Any, x: Any) -> Any:
        mean, scale = dense(p, x, "a."), jax.nn.softplus(dense(p, x, "b."))
        return {"scale": mean, "mean": scale} if exchanged else {"scale": scale, "mean": mean}

    torch.manual_seed(0)
    result = judged(pair_of(Both(), apply, (numbers(4, 3),)))
    assert [f.cause for f in result.differences] == (["swapped-outputs"] if exchanged else [])
    assert "gradients" in result.judged


class Degrees(nn.Linear):
    """The mean over the edges into each node."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        h = super().forward(x)
        total = torch.zeros_like(h).index_add(0, target, h[: len(target)])
        ones = torch.ones(len(target), dtype=h.dtype)
        degree = torch.zeros(len(x), dtype=h.dtype).index_add(0, target, ones)
        return total / degree.clamp(min=1)[:, None]


@pytest.mark.parametrize(
    ("count", "cause"), [("clamped", None), ("plus one", "count"), ("none", "reduction")]
)
def test_a_divisor_is_a_count_and_no_index(count, cause):
    def apply(p: Any, x: Any, target: Any) -> Any:
        total = jax.ops.segment_sum(dense(p, x)[: len(target)], target, num_segments=len(x))
        degree = jax.ops.segment_sum(jnp.ones(len(target), x.dtype), target, num_segments=len(x))
        if count == "none":
            return total
        limited = jnp.maximum(degree, 1) if count == "clamped" else degree + 1
        return total / limited[:, None]

    torch.manual_seed(0)
    pair = pair_of(Degrees(3, 2), apply, (numbers(4, 3), np.array([0, 1, 1, 3])))
    assert causes(pair) == ([] if cause is None else [cause])


def test_low_precision_is_placed_at_the_cast_that_costs_most():
    def apply(p: Any, x: Any) -> Any:
        h = dense(p, x.astype(jnp.float32))
        return h.astype(jnp.bfloat16).astype(jnp.float32)

    torch.manual_seed(0)
    result = judged(pair_of(nn.Linear(3, 4), apply, (numbers(4, 3),)))
    assert result.holds
    (finding,) = result.findings
    line = apply.__code__.co_firstlineno + 2
    assert finding.jax is not None
    assert finding.jax.endswith(f":{line}")
    assert f":{line}, which alone is off by" in finding.words
