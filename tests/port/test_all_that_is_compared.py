"""Buffers, gradients by inputs, outputs by name, learning rates, orders and complex numbers; and
that a cause repairs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's documents call it
from torch import nn

from gradcheck_suite.port.compare import judge_function
from gradcheck_suite.port.pair import perturbed
from gradcheck_suite.port.result import PortResult
from tests.port.pairs import arrays, drawn, pair_of

X = drawn(4, 3)


def judged(pair: dict[str, Any]) -> PortResult:
    return judge_function(lambda: pair, "pair")


def dense(p: Any, x: Any, name: str = "") -> Any:
    return x @ p[f"{name}weight"].T + p[f"{name}bias"]


# Buffers.


class Normal(nn.Linear):
    """A normalizer that has seen nothing yet."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("obs_mean", torch.zeros(3))
        self.register_buffer("obs_std", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x - self.obs_mean) / self.obs_std)


@pytest.mark.parametrize(
    ("apply", "cause"),
    [
        (lambda p, x: dense(p, (x - p["obs_mean"]) / p["obs_std"]), None),
        (lambda p, x: dense(p, (x - p["obs_mean"]) * p["obs_std"]), "scale"),
        (dense, "missing-norm"),
    ],
    ids=["sound", "multiplied", "left out"],
)
def test_buffers_that_the_port_loads_are_moved(apply, cause):
    torch.manual_seed(0)
    result = judged(pair_of(Normal(), apply, (X,)))
    assert [f.cause for f in result.differences] == [c for c in [cause] if c]


def test_a_buffer_that_the_port_has_not_is_said():
    torch.manual_seed(0)
    load = lambda s: {k: jnp.asarray(s[k]) for k in ("weight", "bias")}  # noqa: E731 - one use
    result = judged(pair_of(Normal(), dense, (X,), load))
    assert [f.cause for f in result.differences] == ["not-loaded"]
    assert "obs_mean" in result.differences[0].words


class Table(nn.Linear):
    """Positions from a table that a port may compute itself."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("table", torch.arange(4.0)[:, None].cos())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.table


def test_a_table_that_the_port_computes_is_none_of_these():
    torch.manual_seed(0)
    load = lambda s: {k: jnp.asarray(s[k]) for k in ("weight", "bias")}  # noqa: E731 - one use
    apply = lambda p, x: dense(p, x) + jnp.cos(jnp.arange(4.0))[:, None]  # noqa: E731 - one use
    assert judged(pair_of(Table(), apply, (X,), load, sizes="given")).verdict == "holds"


def test_moved_shares_stay_between_0_and_1_and_in_order():
    shares = np.linspace(0.9, 0.1, 9)
    new = perturbed(np.random.default_rng(0))(shares, "alphas")
    assert (np.diff(new) <= 0).all()
    assert 0 < new.min() < new.max() < 1
    assert not np.array_equal(new, shares)


# Gradients by inputs.


class Distance(nn.Linear):
    """Of the features of two inputs."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (super().forward(x) - super().forward(y)).square().mean()


@jax.custom_vjp
def closed(x: Any) -> Any:
    return x


closed.defvjp(lambda x: (x, None), lambda _, g: (jnp.zeros_like(g),))


@pytest.mark.parametrize(("way", "verdict"), [(lambda x: x, "holds"), (closed, "differs")])
def test_gradients_by_inputs_are_compared(way, verdict):
    torch.manual_seed(0)
    apply = lambda p, x, y: ((dense(p, way(x)) - dense(p, y)) ** 2).mean()  # noqa: E731 - one use
    result = judged(pair_of(Distance(3, 4), apply, (X, X[::-1].copy())))
    assert result.verdict == verdict
    if verdict == "differs":
        (finding,) = result.differences
        assert (finding.kind, finding.cause) == ("gradient", "stop-gradient")
        assert "input 0" in finding.words


# Outputs.


class TwoOutputs(nn.Module):
    """A dict of two outputs of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.a(x), "aux": self.b(x)}


def two(names: dict[str, str]) -> dict[str, Any]:
    torch.manual_seed(0)
    return pair_of(
        TwoOutputs(),
        lambda p, x: {name: dense(p, x, f"{part}.") for name, part in names.items()},
        (X,),
    )


def test_outputs_are_compared_by_name():
    assert judged(two({"logits": "a", "aux": "b"})).verdict == "holds"
    assert judged(two({"logits": "a", "aux": "b", "also": "a"})).verdict == "holds"
    assert judged(two({"logits": "b", "aux": "a"})).verdict == "differs"


def test_other_names_are_said_and_the_nearest_outputs_compared():
    result = judged(two({"a": "a", "b": "b"}))
    assert result.verdict == "holds"
    assert any("torch's output 'logits' is compared with the port's 'a'" in n for n in result.notes)


def test_an_output_that_is_left_out_differs_and_the_rest_is_judged():
    result = judged(two({"logits": "a"}))
    assert [f.cause for f in result.differences] == ["shape"]
    assert "the output 'aux'" in result.differences[0].words
    assert "gradients" in result.judged


# A cause repairs.


class Tanh(nn.Linear):
    """A product of functions of one value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = super().forward(x)
        return torch.tanh(h) * torch.sigmoid(h)


def test_no_cause_is_named_that_leaves_the_error_as_it_is():
    torch.manual_seed(0)

    def apply(p: Any, x: Any) -> Any:
        h = dense(p, x)
        t = jnp.arctan(h * 1.37) ** 3
        return t * jax.nn.sigmoid(t) + jnp.sum(t)

    result = judged(pair_of(Tanh(3, 2), apply, (X,), sizes="given"))
    assert {f.cause for f in result.differences} == {"unknown"}


def test_numbers_in_another_order_are_told_from_other_numbers():
    torch.manual_seed(0)
    module = nn.Linear(3, 4)
    turned = judged(pair_of(module, lambda p, x: dense(p, x)[:, jnp.array([2, 0, 3, 1])], (X,)))
    assert [f.cause for f in turned.differences] in (["permuted"], ["order-of-elements"])
    odd = judged(pair_of(module, lambda p, x: jnp.where(x[:, :1] > 0, dense(p, x), jnp.inf), (X,)))
    assert [f.cause for f in odd.differences] == ["unknown"]
    assert "the port gives inf at" in odd.differences[0].words


# Orders and complex numbers.


class Shuffle(nn.Module):
    """Channels shuffled before a depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(6, 6, 1, groups=3), nn.Conv1d(6, 6, 3, padding=1, groups=6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.channel_shuffle(self.a(x), 3))


@pytest.mark.parametrize(
    ("order", "cause"),
    [
        ((0, 2, 4, 1, 3, 5), None),
        ((0, 3, 1, 4, 2, 5), "permuted"),
        ((0, 2, 4, 3, 1, 5), "permuted"),
    ],
    ids=["sound", "inverse", "a part"],
)
def test_another_order_of_an_axis_is_read_off(order, cause):
    def conv(p: Any, name: str, x: Any, groups: int, pad: int) -> Any:
        y = jax.lax.conv_general_dilated(
            x, p[f"{name}.weight"], (1,), [(pad, pad)], feature_group_count=groups
        )
        return y + p[f"{name}.bias"][:, None]

    torch.manual_seed(0)
    apply = lambda p, x: conv(p, "b", conv(p, "a", x, 3, 0)[:, jnp.array(order)], 6, 1)  # noqa: E731 - one use
    result = judged(pair_of(Shuffle(), apply, (drawn(2, 6, 5),)))
    # the inverse is of the shuffle itself; another order is seen where it is read
    place = "" if order == (0, 3, 1, 4, 2, 5) else "b"
    assert [(f.place, f.cause) for f in result.differences] == [(place, c) for c in [cause] if c]


class Filter(nn.Module):
    """A filter of complex weights, kept as pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.w), n=x.shape[-1])


@pytest.mark.parametrize(("sign", "cause"), [(1, None), (-1, "conjugated")])
def test_a_conjugated_weight_is_named(sign, cause):
    def apply(p: Any, x: Any) -> Any:
        weight = jax.lax.complex(p["w"][:, 0], sign * p["w"][:, 1])
        return jnp.fft.irfft(jnp.fft.rfft(x) * weight, n=x.shape[-1])

    torch.manual_seed(0)
    result = judged(pair_of(Filter(), apply, (drawn(3, 7),)))
    assert [f.cause for f in result.differences] == [c for c in [cause] if c]


# Learning rates.


def scheduled(rate: Any, theirs: Any) -> dict[str, Any]:
    torch.manual_seed(0)

    def optimizer(parameters: Any) -> Any:
        adam = torch.optim.AdamW(parameters, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(adam, rate)
        adam.register_step_post_hook(lambda *_: schedule.step())
        return adam

    return pair_of(
        nn.Linear(3, 2), dense, (X,), arrays, torch_optimizer=optimizer, jax_optimizer=theirs
    )


@pytest.mark.parametrize(
    ("theirs", "cause", "words"),
    [
        (lambda n: 0.1 / (n + 1), None, ""),
        (lambda n: 0.1 / jnp.maximum(n, 1) * (n > 0), "learning-rate", "one step behind"),
        (lambda n: 0.1 / (n + 2), "learning-rate", "one step ahead"),
        (lambda n: 0.1 * 0.8**n, "learning-rate", "learning rates 0.1, 0.08, 0.064, 0.0512"),
    ],
    ids=["sound", "late", "early", "another"],
)
def test_learning_rates_are_read_off_the_steps(theirs, cause, words):
    adamw = optax.adamw(theirs, b2=0.95, weight_decay=0.1)
    result = judged(scheduled(lambda n: 1 / (n + 1), adamw))
    assert [f.cause for f in result.differences] == [c for c in [cause] if c]
    assert all(words in f.words for f in result.differences)


def test_a_schedule_and_a_setting_are_told_apart():
    adamw = optax.adamw(lambda n: 0.1 * 0.8**n, b2=0.99, weight_decay=0.1)
    result = judged(scheduled(lambda n: 1 / (n + 1), adamw))
    assert [f.cause for f in result.differences] == ["betas and learning-rate"]


# What comes behind an unknown difference.


class Bent(nn.Module):
    """Two linear maps with a function between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.erfinv(0.5 * torch.tanh(self.a(x))))


@pytest.mark.share(4)
@pytest.mark.parametrize("learns", [True, False])
def test_gradients_and_updates_behind_an_unknown_difference_are_compared(learns):
    def apply(p: Any, x: Any) -> Any:
        h = dense(p, x, "a.")
        h = jnp.tanh(h) * jnp.exp(-0.3 * h**2) + 0.11 * jnp.cos(3 * h)
        weight = p["b.weight"] if learns else jax.lax.stop_gradient(p["b.weight"])
        return h @ weight.T + p["b.bias"]

    torch.manual_seed(0)
    optimizers = {
        "torch_optimizer": lambda p: torch.optim.SGD(p, 0.1),
        "jax_optimizer": optax.sgd(0.2),
    }
    result = judged(pair_of(Bent(), apply, (X,), **optimizers))
    kinds = [(f.kind, f.cause) for f in result.differences]
    assert ("forward", "unknown") in kinds
    assert ("update", "learning-rate") in kinds
    assert [f.kind for f in result.differences].count("gradient") == (0 if learns else 1)
    assert any("of what comes behind the unknown difference alone" in n for n in result.notes)
