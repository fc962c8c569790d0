"""Inputs at the ends of their domain, candidates of other shapes, and errors of this package:
none of them ends a judgement.
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

from gradcheck_suite.port import backward, drawn_inputs, forward, updates
from gradcheck_suite.port import judge as judging
from gradcheck_suite.port.compare import judge_function
from gradcheck_suite.port.result import PortResult
from tests.port.pairs import pair_of

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
LABELS = np.array([[0], [1], [1], [0]], np.float32)


def judged(pair: dict[str, Any]) -> PortResult:
    return judge_function(lambda: pair, "pair")


def dense(p: Any, x: Any, name: str = "") -> Any:
    return x @ p[f"{name}weight"].T + p[f"{name}bias"]


def classifier(part_of_zero: float = 1.0) -> dict[str, Any]:
    """Return a binary classifier; another part than 1 of the zeros' loss is a fault."""

    def loss(p: Any, y: Any) -> Any:
        return -(y * jnp.log(p) + part_of_zero * (1 - y) * jnp.log1p(-p)).mean()

    torch.manual_seed(0)
    return pair_of(
        nn.Sequential(nn.Linear(3, 1), nn.Sigmoid()),
        lambda p, x: jax.nn.sigmoid(dense(p, x, "0.")),
        (X,),
        targets=(LABELS,),
        torch_loss=F.binary_cross_entropy,
        jax_loss=loss,
    )


def test_a_target_of_one_stays_in_the_domain_of_the_cross_entropy():
    assert judged(classifier()).verdict == "holds"
    assert [f.place for f in judged(classifier(0.5)).differences] == ["loss"]


class Angle(nn.Linear):
    """Times an arc cosine."""

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * torch.acos(c)[:, None]


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "holds"), (1.001, "differs")])
def test_an_input_at_the_end_of_its_domain_has_a_bound(factor, verdict):
    torch.manual_seed(0)
    cosines = np.array([1, 0.5, -1, 0.2], np.float32)
    apply = lambda p, x, c: factor * dense(p, x) * jnp.arccos(c)[:, None]  # noqa: E731 - one use
    assert judged(pair_of(Angle(3, 2), apply, (X, cosines))).verdict == verdict


class Experts(nn.Module):
    """A mixture of the two best of five experts, and which they are."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.w = nn.Linear(3, 5, bias=False), nn.Parameter(torch.randn(5, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = torch.topk(F.softmax(self.gate(x), -1), 2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        return x + torch.einsum("bk,bkd->bd", weights, self.w[chosen]), chosen


@pytest.mark.parametrize(("divided", "verdict"), [(True, "holds"), (False, "differs")])
def test_a_candidate_of_another_shape_is_no_candidate(divided, verdict):
    """Another k of `topk` gives an output of another shape."""

    def apply(p: Any, x: Any) -> Any:
        weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["gate.weight"].T), 2)
        weights = weights / weights.sum(-1, keepdims=True) if divided else weights
        return x + jnp.einsum("bk,bkd->bd", weights, p["w"][chosen]), chosen

    torch.manual_seed(0)
    assert judged(pair_of(Experts(), apply, (X,))).verdict == verdict


def linear(factor: float = 1.0) -> dict[str, Any]:
    torch.manual_seed(0)
    return pair_of(nn.Linear(3, 2), lambda p, x: factor * dense(p, x), (X,))


def broken(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a fault of ours")


def test_an_error_of_ours_ends_its_stage_alone(monkeypatch):
    monkeypatch.setattr(backward, "wrong_gradients", broken)
    result = judged(linear())
    assert result.verdict == "unjudged"
    assert "the stage 'gradients' was not judged: ZeroDivisionError" in str(result.unjudged)
    assert any("drawn input" in what for what in result.judged)  # the rest is judged


def test_a_difference_stands_whatever_fails_behind_it(monkeypatch):
    monkeypatch.setattr(backward, "wrong_gradients", broken)
    result = judged(linear(2.0))
    assert result.verdict == "differs"
    assert any("the stage 'gradients'" in note for note in result.notes)


def test_an_error_of_ours_in_the_map_leaves_nothing_to_judge(monkeypatch):
    monkeypatch.setattr(judging, "StateMap", broken)
    result = judged(linear())
    assert (result.verdict, result.map) == ("unjudged", ())


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "holds"), (1.01, "differs")])
def test_a_float32_carry_beside_default_dtypes_is_traced_as_its_author_runs_it(factor, verdict):
    class Sums(nn.Linear):
        """Running sums."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).cumsum(0)

    def apply(p: Any, x: Any) -> Any:
        def step(total: Any, row: Any) -> Any:
            total = total + factor * dense(p, row) * jnp.linspace(1, 1, 4)
            return total, total

        return jax.lax.scan(step, jnp.zeros(4, jnp.float32), x)[1]

    torch.manual_seed(0)
    assert judged(pair_of(Sums(3, 4), apply, (X,))).verdict == verdict


class Force(nn.Module):
    """The slope of an energy, whose own gradient is taken through `create_graph`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = self.b(torch.tanh(self.a(x)).exp()).sigmoid().sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return slope


@pytest.mark.parametrize(("stopped", "verdict"), [(False, "holds"), (True, "differs")])
def test_a_module_that_takes_a_gradient_itself_is_judged(stopped, verdict):
    def apply(p: Any, x: Any) -> Any:
        def energy(x: Any) -> Any:
            h = jnp.exp(jnp.tanh(dense(p, x, "a.")))
            return jax.nn.sigmoid(dense(p, h, "b.")).sum()

        slope = jax.grad(energy)(x)
        return jax.lax.stop_gradient(slope) if stopped else slope

    torch.manual_seed(0)
    result = judged(pair_of(Force(), apply, (X,)))
    assert (result.verdict, {f.kind for f in result.differences}) == (
        verdict,
        {"gradient"} if stopped else set(),
    )


class Detached(nn.Linear):
    """Reads its result again, detached."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(super().forward(x))
        return h * h.detach()


@pytest.mark.parametrize(("stopped", "verdict"), [(True, "holds"), (False, "differs")])
def test_a_detach_of_the_author_is_none_of_autograd(stopped, verdict):
    def apply(p: Any, x: Any) -> Any:
        h = jnp.tanh(dense(p, x))
        return h * (jax.lax.stop_gradient(h) if stopped else h)

    torch.manual_seed(0)
    assert judged(pair_of(Detached(3, 2), apply, (X,))).verdict == verdict


def misspelt(search: Any, place: int) -> Any:
    yield from search.no_such_attribute


def test_a_mistake_of_ours_in_a_search_is_said_and_the_others_are_tried(monkeypatch):
    monkeypatch.setattr(forward, "FAMILIES", ((misspelt, "order"), *forward.FAMILIES))
    torch.manual_seed(0)
    apply = lambda p, x: x @ p["weight"].T - p["bias"]  # noqa: E731 - one use
    result = judged(pair_of(nn.Linear(3, 2), apply, (X,)))
    assert [f.cause for f in result.differences] == ["sign"]
    assert any("could not be tried: AttributeError" in note for note in result.notes)


def stepped(theirs: Any) -> dict[str, Any]:
    return linear() | {
        "torch_optimizer": lambda p: torch.optim.SGD(p, 0.1),
        "jax_optimizer": theirs,
    }


def test_a_mistake_of_ours_among_settings_is_said_and_the_others_are_tried(monkeypatch):
    monkeypatch.delattr(updates.Recipe, "put")  # what sets momentum, but no learning rate
    result = judged(stepped(optax.sgd(0.2)))
    assert [f.cause for f in result.differences] == ["learning-rate"]
    assert any("a setting could not be tried: AttributeError at" in n for n in result.notes)


@pytest.mark.full
def test_what_an_optimizer_does_not_take_is_no_mistake_of_ours():
    """Nothing explains these steps, so that all of optax's kinds are tried: some need a value, and
    some take no schedule.
    """
    result = judged(stepped(optax.sign_sgd(0.03)))
    assert [f.cause for f in result.differences] == ["unknown"]
    assert not any("could not be tried" in note for note in result.notes)


def test_a_mistake_of_ours_at_a_drawn_input_is_said(monkeypatch):
    monkeypatch.delattr(drawn_inputs, "run_with")
    result = judged(linear())
    assert any("a drawn input could not be tried: NameError at" in n for n in result.notes)


class OneSizeError(Exception):
    """What a module raises that takes one size alone."""


def test_a_drawn_input_that_a_module_refuses_in_its_own_way_is_counted():
    class OneSize(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) != len(X):
                raise OneSizeError
            return super().forward(x)

    torch.manual_seed(0)
    result = judged(pair_of(OneSize(3, 2), dense, (X,)))
    assert result.verdict == "holds"
    assert any("refused by torch" in what for what in result.judged)
    assert not any("could not be tried" in note for note in result.notes)


def test_statistics_of_layers_that_differ_alike_are_one_finding():
    class Layers(nn.Module):
        """Two batch norms."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x)))

    def apply(p: Any, x: Any) -> Any:
        after = {}
        for name in ("a", "b"):
            mean, var = x.mean(0), x.var(0)
            new = {"running_mean": mean, "running_var": var * len(x) / (len(x) - 1)}
            for key, value in new.items():
                after[f"{name}.{key}"] = 0.1 * p[f"{name}.{key}"] + 0.9 * value
            x = (x - mean) / jnp.sqrt(var + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]
            x = jnp.tanh(x) if name == "a" else x
        return x, after

    torch.manual_seed(0)
    result = judged(pair_of(Layers(), apply, (X,), train=True, sizes="given"))
    by_cause = {(f.kind, f.cause) for f in result.differences}
    assert by_cause == {("state", "momentum-convention")}
    assert [f.place for f in result.differences] == ["a"]
    assert "b.running_mean" in result.differences[0].words
