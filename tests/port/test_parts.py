"""Faults planted in ports of convolutions, recurrent layers, losses and optimizers; and sound ones in other forms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's documents call it

from gradcheck_suite.port.compare import judge_function
from tests.port.pairs import decoder_pair, head, images, recurrent


def verdict(make: Any, *arguments: Any, **more: Any) -> Any:
    return judge_function(lambda: make(*arguments, **more), "pair")


def is_one_finding(result: Any, kind: str, place: str, cause: str) -> None:
    found = [(f.kind, f.place, f.cause) for f in result.findings]
    assert found == [(kind, place, cause)], str(result)


@pytest.mark.parametrize("make", [images, recurrent, head])
def test_sound_ports_hold(make):
    result = verdict(make)
    assert result.verdict == "holds", str(result)


def test_two_biases_in_one_leaf_hold_and_their_map_is_linear():
    result = verdict(recurrent, merged=True)
    assert result.verdict == "holds", str(result)
    assert {row.leaf: row.how for row in result.map}["outer"] == "linear"


@pytest.mark.full
def test_two_biases_in_one_leaf_step_as_one():
    made: dict[str, Any] = {"torch_optimizer": lambda p: torch.optim.SGD(p, 0.1), "jax_optimizer": optax.sgd(0.1)}
    is_one_finding(verdict(recurrent, merged=True, **made), "update", "gru", "merged-biases")


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        ("padding", "conv"),
        ("eps", "batch"),
        ("batch-statistics", "batch"),
        ("average-window", "pool"),
        ("kernel-flipped", "up"),
        ("group-order", "group"),
    ],
)
def test_a_fault_of_a_convolutional_port(fault, place):
    is_one_finding(verdict(images, fault), "forward", place, fault)


@pytest.mark.full
def test_a_reset_gate_before_the_product():
    is_one_finding(verdict(recurrent, "gru-reset-gate"), "forward", "gru", "gru-reset-gate")


def test_a_gradient_of_the_padding_row():
    is_one_finding(verdict(recurrent, "padding-gradient"), "gradient", "words", "padding-gradient")


LABELS = np.array([1, 0, -100, 2, 2, 1])
WEIGHTS = np.array([1.0, 2.0, 0.5])


def entropy(out: Any, y: Any, *, over: Any = None, smooth: float = 0.0, ignored: int = -100) -> Any:
    valid = y != ignored
    one_hot = optax.smooth_labels(jax.nn.one_hot(jnp.where(valid, y, 0), 3), smooth)
    total = (optax.softmax_cross_entropy(out, one_hot) * valid).sum()
    return total / (valid.sum() if over is None else over)


@pytest.mark.parametrize(
    ("torch_loss", "jax_loss", "cause"),
    [
        (F.cross_entropy, entropy, None),
        (F.cross_entropy, lambda o, y: entropy(o, y, over=6), "ignore-index"),
        (lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1), lambda o, y: entropy(o, y, smooth=0.1), None),
        (lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1), entropy, "label-smoothing"),
        (lambda o, y: o.square().mean(), lambda o, y: (o**2).sum() / 6, "reduction"),
        (lambda o, y: F.huber_loss(o, 0 * o), lambda o, y: optax.huber_loss(o, delta=0.5).mean(), "loss-threshold"),
    ],
)  # fmt: skip
def test_losses(torch_loss, jax_loss, cause):
    result = verdict(head, targets=(LABELS,), torch_loss=torch_loss, jax_loss=jax_loss)
    if cause is None:
        assert result.verdict == "holds", str(result)
        return
    assert {f.place for f in result.findings} == {"loss"}
    assert result.findings[0].cause in (cause, "loss-kind"), str(result)


def clipped(parameters: Any) -> Any:
    parameters = list(parameters)
    optimizer = torch.optim.Adam(parameters, 1e-2)

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def scheduled(parameters: Any) -> Any:
    optimizer = torch.optim.SGD(parameters, 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


def grouped(parameters: Any) -> Any:
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if (p.dim() > 1) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    return torch.optim.AdamW(groups, 1e-2)


def decays(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


averaged = optax.chain(optax.ema(0.9, debias=False), optax.sgd(0.1))
exact_clip = optax.GradientTransformation(
    lambda params: optax.EmptyState(),
    lambda u, s, p=None: (jax.tree.map(lambda g: g * jnp.minimum(1, 1 / (optax.tree.norm(u) + 1e-6)), u), s),
)


@pytest.mark.parametrize(
    ("torchs", "optaxs", "cause"),
    [
        (lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.1), optax.adamw(1e-3, weight_decay=0.1), None),
        (lambda p: torch.optim.Adam(p, 1e-3, weight_decay=0.1), optax.adamw(1e-3, weight_decay=0.1), "decoupled-decay"),
        (lambda p: torch.optim.Adam(p, 1e-3), optax.adam(1e-3, eps=0, eps_root=1e-8), "eps-inside-root"),
        (lambda p: torch.optim.Adam(p, 1e-3), optax.adam(1e-3, b2=0.99), "betas"),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9), None),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9, nesterov=True), "nesterov"),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), averaged, "momentum-convention"),
        (clipped, optax.adam(1e-2), "missing-clipping"),
        (clipped, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), "clip-epsilon"),
        (clipped, optax.chain(exact_clip, optax.adam(1e-2)), None),
        (scheduled, optax.sgd(lambda step: 0.1 * (step + 1) / 4), None),
        (scheduled, optax.sgd(lambda step: 0.1 * step / 4), "learning-rate"),
        (grouped, optax.adamw(1e-2, weight_decay=0.1, mask=decays), None),
        (grouped, optax.adamw(1e-2, weight_decay=0.1), "decay-mask"),
    ],
)  # fmt: skip
def test_optimizers(torchs, optaxs, cause):
    result = verdict(head, torch_optimizer=torchs, jax_optimizer=optaxs)
    assert "updates" in result.judged
    if cause is None:
        assert result.verdict == "holds", str(result)
    else:
        is_one_finding(result, "update", "optimizer", cause)


def test_faults_behind_a_fault_are_found_too():
    def make() -> dict[str, Any]:
        made = decoder_pair("eps")
        made["load"], made["params"] = None, {**made["params"], "last.bias": jnp.zeros(8)}
        return {k: v for k, v in made.items() if v is not None}

    causes = {f.cause for f in judge_function(make, "two faults").findings}
    assert {"eps", "not-loaded"} <= causes


class FrozenTable(torch.nn.Module):
    """As Pegasus and Marian have it: the positions are a parameter without a gradient."""

    def __init__(self, grad: bool) -> None:
        super().__init__()
        self.words, self.out = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 4)
        angles = torch.arange(6.0)[:, None] / torch.tensor([1.0, 100.0])
        self.places = torch.nn.Parameter(torch.cat([angles.sin(), angles.cos()], 1), requires_grad=grad)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(ids) + self.places[: ids.shape[1]])


@pytest.mark.parametrize(("grad", "expected"), [(False, "holds"), (True, "differs")])
def test_a_frozen_parameter_that_the_port_computes_is_a_table(grad, expected):
    """Planted fault: the same table, which torch trains and the port does not have."""

    def make() -> dict[str, Any]:
        torch.manual_seed(0)
        module = FrozenTable(grad)
        angles = np.arange(6.0)[:, None] / np.array([1.0, 100.0])
        table = np.concatenate([np.sin(angles), np.cos(angles)], 1)

        def load(state: dict[str, Any]) -> dict[str, Any]:
            return {"words": state["words.weight"], "kernel": state["out.weight"].T, "bias": state["out.bias"]}

        def apply(p: Any, ids: Any) -> Any:
            return (p["words"][ids] + jnp.asarray(table)[: ids.shape[1]]) @ p["kernel"] + p["bias"]

        params = load({name: value.numpy() for name, value in module.state_dict().items()})
        ids = np.array([[0, 3, 5], [1, 6, 2]])
        return {"module": module, "apply": apply, "params": params, "load": load, "inputs": (ids,)}

    assert verdict(make).verdict == expected
