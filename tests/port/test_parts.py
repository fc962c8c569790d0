"""Faults planted in ports of convolutions, recurrent layers, losses and optimizers; sound
ports in other forms.
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
from tests.port.pairs import arrays, decoder_pair, drawn, head, images, pair_of, recurrent, rotary


def verdict(make: Any, *arguments: Any, **more: Any) -> Any:
    return judge_function(lambda: make(*arguments, **more), "pair")


def is_one_finding(result: Any, kind: str, place: str, cause: str) -> None:
    found = [(f.kind, f.place, f.cause) for f in result.findings]
    assert found == [(kind, place, cause)], str(result)


@pytest.mark.share(4)
@pytest.mark.parametrize("make", [images, recurrent, head])
def test_sound_ports_hold(make):
    result = verdict(make)
    assert result.verdict == "holds", str(result)


@pytest.mark.share(4)
def test_two_biases_in_one_leaf_hold_and_their_map_is_linear():
    result = verdict(recurrent, merged=True)
    assert result.verdict == "holds", str(result)
    assert {row.leaf: row.how for row in result.map}["outer"] == "linear"


@pytest.mark.full
def test_two_biases_in_one_leaf_step_as_one():
    made: dict[str, Any] = {
        "torch_optimizer": lambda p: torch.optim.SGD(p, 0.1),
        "jax_optimizer": optax.sgd(0.1),
    }
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


@pytest.mark.parametrize(
    ("kind", "place", "fault"),
    [
        pytest.param("forward", "gru", "gru-reset-gate", marks=pytest.mark.full),
        ("gradient", "words", "padding-gradient"),
    ],
)
def test_a_fault_of_a_recurrent_port(kind, place, fault):
    is_one_finding(verdict(recurrent, fault), kind, place, fault)


LABELS = np.array([1, 0, -100, 2, 2, 1])
WEIGHTS = np.array([1.0, 2.0, 0.5])


def entropy(out: Any, y: Any, *, over: Any = None, smooth: float = 0.0, ignored: int = -100) -> Any:
    valid = y != ignored
    one_hot = optax.smooth_labels(jax.nn.one_hot(jnp.where(valid, y, 0), 3), smooth)
    total = (optax.softmax_cross_entropy(out, one_hot) * valid).sum()
    return total / (valid.sum() if over is None else over)


def of_pixels(out: Any, y: Any) -> Any:
    return 1 + F.cross_entropy(out[..., None], y[:, None])


def off_diagonal(out: Any, y: Any) -> Any:
    return (out.exp() * (1 - torch.eye(6, 3))).sum(1).log().mean()


EVERY_OTHER, RARE = np.arange(18.0).reshape(6, 3) % 2, np.array([2.0, 0.5, 3.0])


def multilabel(out: Any, y: Any) -> Any:
    return F.binary_cross_entropy_with_logits(
        out, torch.tensor(EVERY_OTHER), pos_weight=torch.tensor(RARE)
    )


def triplets(out: Any, y: Any) -> Any:
    return F.triplet_margin_loss(out[:2], out[2:4], out[4:], margin=99.0)


def squared_triplets(out: Any, y: Any) -> Any:
    one, other = (((out[:2] - far + 1e-6) ** 2).sum(1) for far in (out[2:4], out[4:]))
    return jax.nn.relu(one - other + 99).mean()


@pytest.mark.parametrize(
    ("torch_loss", "jax_loss", "cause"),
    [
        (F.cross_entropy, entropy, None),
        (F.cross_entropy, lambda o, y: entropy(o, y, over=6), "ignore-index"),
        (lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1), lambda o, y: entropy(o, y, smooth=0.1), None),
        (lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1), entropy, "label-smoothing"),
        (of_pixels, lambda o, y: 1 + entropy(o, y, smooth=0.1), "label-smoothing"),
        (lambda o, y: (o * (y >= 0)[:, None]).square().mean(), lambda o, y: (o**2).mean(), "missing-mask"),
        (off_diagonal, lambda o, y: jax.nn.logsumexp(o, 1).mean(), "missing-mask"),
        (lambda o, y: o.square().mean(), lambda o, y: (o**2).sum() / 6, "reduction"),
        (lambda o, y: (o.sigmoid() ** 2.0).mean(), lambda o, y: (jax.nn.sigmoid(o) ** 2.7).mean(), "constant"),
        (triplets, squared_triplets, "missing-root"),
        (multilabel, lambda o, y: (RARE * optax.sigmoid_binary_cross_entropy(o, EVERY_OTHER)).mean(), "class-weights"),
        (lambda o, y: F.huber_loss(o, 0 * o), lambda o, y: optax.huber_loss(o, delta=0.5).mean(), "loss-threshold"),
    ],
)  # fmt: skip
def test_losses(torch_loss, jax_loss, cause):
    result = verdict(head, targets=(LABELS,), torch_loss=torch_loss, jax_loss=jax_loss)
    if cause is None:
        assert result.verdict == "holds", str(result)
        return
    assert {f.place for f in result.findings} == {"loss"}
    assert len(result.findings) == 1 or cause == "ignore-index"
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


def decays_first(params: Any) -> Any:
    return {name: name == "first.weight" for name in params}


averaged = optax.chain(optax.ema(0.9, debias=False), optax.sgd(0.1))
momentum = optax.sgd(0.1, momentum=0.9)
read_by_numpy = optax.GradientTransformation(
    lambda params: momentum.init(jax.tree.map(np.asarray, params)), momentum.update
)
exact_clip = optax.GradientTransformation(
    lambda params: optax.EmptyState(),
    lambda u, s, p=None: (
        jax.tree.map(lambda g: g * jnp.minimum(1, 1 / (optax.tree.norm(u) + 1e-6)), u),
        s,
    ),
)


@pytest.mark.parametrize(
    ("torchs", "optaxs", "cause"),
    [
        (lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.1), optax.adamw(1e-3, weight_decay=0.1), None),
        (lambda p: torch.optim.Adam(p, 1e-3, weight_decay=0.1), optax.adamw(1e-3, weight_decay=0.1), "decoupled-decay"),
        (lambda p: torch.optim.Adam(p, 1e-3), optax.adam(1e-3, eps=0, eps_root=1e-8), "eps-inside-root"),
        (lambda p: torch.optim.Adam(p, 1e-3), optax.adam(1e-3, b2=0.99), "betas"),
        (lambda p: torch.optim.NAdam(p, 0.1), optax.adam(0.1), "optimizer-kind"),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), momentum, None),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), read_by_numpy, None),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9, nesterov=True), "nesterov"),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), averaged, "momentum-convention"),
        (clipped, optax.adam(1e-2), "missing-clipping"),
        (clipped, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), "clip-epsilon"),
        (clipped, optax.chain(exact_clip, optax.adam(1e-2)), None),
        (scheduled, optax.sgd(lambda step: 0.1 * (step + 1) / 4), None),
        (scheduled, optax.sgd(lambda step: 0.1 * step / 4), "learning-rate"),
        (grouped, optax.adamw(1e-2, weight_decay=0.1, mask=decays), None),
        (grouped, optax.adamw(1e-2, weight_decay=0.1), "decay-mask"),
        (grouped, optax.adamw(1e-2, weight_decay=0.1, mask=decays_first), "decay-mask"),
    ],
)  # fmt: skip
def test_optimizers(torchs, optaxs, cause):
    result = verdict(head, torch_optimizer=torchs, jax_optimizer=optaxs)
    assert "updates" in result.judged
    if cause is None:
        assert result.verdict == "holds", str(result)
    else:
        is_one_finding(result, "update", "optimizer", cause)


class Warming(torch.optim.SGD):
    """SGD whose learning rate rises."""

    def step(self, closure: Any = None) -> Any:
        self.count = getattr(self, "count", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.1 * min(1.0, self.count / 4)
        return super().step(closure)


def test_a_schedule_of_a_subclass_whose_base_class_calls_the_hooks_too():
    # from here on its `step` calls hooks
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    made = {
        "torch_optimizer": lambda p: Warming(p, 0.1, momentum=0.9),
        "jax_optimizer": optax.sgd(lambda step: 0.1 * jnp.minimum(1.0, step / 4), 0.9),
    }
    result = verdict(head, **made)
    is_one_finding(result, "update", "optimizer", "learning-rate")


class Without(torch.nn.Module):
    """A linear map, and a parameter of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.none = torch.nn.Linear(4, 3), torch.nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.map(x) + self.none.sum()


def test_the_steps_of_a_parameter_without_elements():
    def apply(p: Any, x: Any) -> Any:
        return x @ p["map.weight"].T + p["map.bias"]

    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    made: dict[str, Any] = {
        "torch_optimizer": lambda p: torch.optim.Adam(p, 1e-2),
        "jax_optimizer": clipped,
    }
    result = verdict(lambda: pair_of(Without(), apply, (drawn(5, 4),), **made))
    is_one_finding(result, "update", "optimizer", "clipping")


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
        self.places = torch.nn.Parameter(
            torch.cat([angles.sin(), angles.cos()], 1), requires_grad=grad
        )

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
            return {
                "words": state["words.weight"],
                "kernel": state["out.weight"].T,
                "bias": state["out.bias"],
            }

        def apply(p: Any, ids: Any) -> Any:
            return (p["words"][ids] + jnp.asarray(table)[: ids.shape[1]]) @ p["kernel"] + p["bias"]

        params = load({name: value.numpy() for name, value in module.state_dict().items()})
        ids = np.array([[0, 3, 5], [1, 6, 2]])
        return {"module": module, "apply": apply, "params": params, "load": load, "inputs": (ids,)}

    assert verdict(make).verdict == expected


def test_tables_that_both_sides_round_to_float32_differ_in_precision_alone():
    adam = {"torch_optimizer": lambda p: torch.optim.Adam(p, 0.1), "jax_optimizer": optax.adam(0.1)}
    result = verdict(rotary, **adam)
    assert result.verdict == "holds", str(result)
    assert {"outputs", "gradients", "updates"} <= set(result.judged)
    is_one_finding(result, "precision", "", "low-precision")


def test_a_wrong_gradient_is_found_beside_a_rounded_table():
    is_one_finding(verdict(rotary, "stop-gradient"), "gradient", "", "no-gradient")


def test_another_base_of_the_positions():
    result = verdict(rotary, "base")
    is_one_finding(result, "forward", "", "constant")
    assert "base 500000" in result.findings[0].words


def test_rows_that_are_masked_as_a_whole():
    seen = np.ones((2, 9), bool)
    seen[1, :3] = False
    assert verdict(rotary, seen=seen).verdict == "holds"
    is_one_finding(verdict(rotary, "mask-value", seen=seen), "forward", "", "mask-value")


def triplet(o: Any, eps: float, margin: float) -> Any:
    near, far = (jnp.sqrt(((o[0] - o[i] + eps) ** 2).sum(-1)) for i in (1, 2))
    return jnp.maximum(near - far + margin, 0).mean()


@pytest.mark.parametrize(
    ("eps", "margin", "cause"), [(1e-6, 0.3, None), (0.0, 0.3, "eps"), (1e-6, 0.5, "constant")]
)
def test_a_loss_whose_hinge_does_not_bind_at_the_given_inputs(eps, margin, cause):
    def make() -> Any:
        x = drawn(4, 5)
        module = torch.nn.Linear(5, 3)
        one: dict[str, Any] = {
            "torch_loss": lambda o: F.triplet_margin_loss(*o, margin=0.3),
            "jax_loss": lambda o: triplet(o, eps, margin),
        }

        class Three(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.map = module

            def forward(self, *given: Any) -> Any:
                return tuple(map(self.map, given))

        def apply(p: Any, *given: Any) -> Any:
            return tuple(g @ p["map.weight"].T + p["map.bias"] for g in given)

        return pair_of(
            Three(), apply, (x, x + drawn(1, 5) / 100, 30 * drawn(4, 5)[::-1].copy()), **one
        )

    result = verdict(make)
    assert [f.cause for f in result.findings] == ([] if cause is None else [cause]), str(result)


class Rooted(torch.nn.Module):
    """A signed root, and a roll that is undone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y = y.sign() * (y.abs() + 1e-5).sqrt()
        return x + self.last(y.roll(1, 0)).roll(-1, 0)


@pytest.mark.parametrize("left_out", ["", "root", "roll"])
def test_an_operation_that_is_left_out(left_out):
    def apply(p: Any, x: Any) -> Any:
        y = x @ p["first.weight"].T + p["first.bias"]
        y = y if left_out == "root" else jnp.sign(y) * jnp.sqrt(jnp.abs(y) + 1e-5)
        y = jnp.roll(y, 1, 0) @ p["last.weight"].T + p["last.bias"]
        return x + (y if left_out == "roll" else jnp.roll(y, -1, 0))

    result = verdict(lambda: pair_of(Rooted(), apply, (drawn(5, 4),)))
    assert [f.cause for f in result.findings] == ["missing-operation"] * bool(left_out), str(result)


class Peephole(torch.nn.Module):
    """A cell whose output gate sees its new state."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.peep = torch.nn.Linear(3, 6), torch.nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c, found = x.new_zeros(x.shape[0], 3), []
        for row in x.unbind(1):
            g, o = self.map(row).chunk(2, -1)
            c = 0.5 * c + g.tanh()
            found.append(torch.sigmoid(o + self.peep * c) * c.tanh())
        return torch.stack(found, 1)


@pytest.mark.full
def test_a_term_that_starts_at_zero_is_not_missing():
    """The port's output gate sees the state of the time step before."""

    def apply(p: Any, x: Any) -> Any:
        def step(c: Any, row: Any) -> Any:
            g, o = jnp.split(row @ p["map.weight"].T + p["map.bias"], 2, -1)
            new = 0.5 * c + jnp.tanh(g)
            return new, jax.nn.sigmoid(o + p["peep"] * c) * jnp.tanh(new)

        return jax.lax.scan(step, jnp.zeros((len(x), 3)), x.swapaxes(0, 1))[1].swapaxes(0, 1)

    result = verdict(lambda: pair_of(Peephole(), apply, (drawn(2, 4, 3),)))
    assert {f.cause for f in result.findings} <= {"unknown", "other-value"}, str(result)
    assert result.verdict == "differs"


class Fused(torch.nn.Module):
    """Cross-attention: queries of one input, keys and values of another."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
        torch.nn.init.normal_(self.attention.in_proj_bias)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.attention(x, y, y, need_weights=False)[0]
        return out


def test_keys_and_values_of_a_fused_projection_that_are_exchanged():
    def load(s: Any) -> Any:
        order = np.r_[0:4, 8:12, 4:8]
        return arrays({n: v[order] if "in_proj" in n else v for n, v in s.items()})

    def apply(p: Any, x: Any, y: Any) -> Any:
        w, b = (jnp.split(p[f"attention.in_proj_{n}"], 3) for n in ("weight", "bias"))
        q, k, v = (
            (a @ w[i].T + b[i]).reshape(*a.shape[:2], 2, 2).swapaxes(1, 2)
            for i, a in enumerate((x, y, y))
        )
        out = jax.nn.softmax(q @ k.swapaxes(2, 3) / np.sqrt(2)) @ v
        out = out.swapaxes(1, 2).reshape(x.shape)
        return out @ p["attention.out_proj.weight"].T + p["attention.out_proj.bias"]

    result = verdict(lambda: pair_of(Fused(), apply, (drawn(2, 3, 4), drawn(2, 5, 4)), load))
    is_one_finding(result, "load", "attention", "blocks-swapped")


class Gated(torch.nn.Module):
    """A product of the input with a maximum of an affine map of it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(x * self.gate(x).amax(1, keepdim=True))
        return out


def test_a_stopped_layer_is_one_finding():
    def apply(p: Any, x: Any) -> Any:
        gate = jax.lax.stop_gradient(
            (x @ p["gate.weight"].T + p["gate.bias"]).max(1, keepdims=True)
        )
        return x * gate @ p["last.weight"].T + p["last.bias"]

    result = verdict(lambda: pair_of(Gated(), apply, (drawn(2, 4, 3),)))
    is_one_finding(result, "gradient", "gate", "stop-gradient")


class Layers(torch.nn.Module):
    """Layers of one kind; the first reads the embeddings, the others what the one before returns."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(5, 4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = torch.sub(x, layer(x).tanh())
        return x


def test_the_same_stop_gradient_in_each_layer_is_one_finding():
    def apply(p: Any, ids: Any) -> Any:
        x = p["words.weight"][ids]
        for i in range(3):
            inner = jnp.tanh(x @ p[f"layers.{i}.weight"].T + p[f"layers.{i}.bias"])
            x = jax.lax.stop_gradient(x) - inner
        return x

    is_one_finding(
        verdict(lambda: pair_of(Layers(), apply, (np.arange(5)[None],))),
        "gradient",
        "",
        "stop-gradient",
    )


class Codes(torch.nn.Module):
    """Two distances, in each of which one side is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.code = torch.nn.Linear(4, 3), torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.map(x)
        near = (z - self.code.detach()) ** 2
        return near / 4 + (self.code - z.detach()) ** 2


def test_stop_gradients_on_the_other_sides():
    def apply(p: Any, x: Any) -> Any:
        z, stop = x @ p["map.weight"].T + p["map.bias"], jax.lax.stop_gradient
        return (stop(z) - p["code"]) ** 2 / 4 + (stop(p["code"]) - z) ** 2

    is_one_finding(
        verdict(lambda: pair_of(Codes(), apply, (drawn(2, 4),))), "gradient", "", "stop-gradient"
    )


class Cosine(torch.nn.Module):
    """Rows of length 1, the longest first."""

    def __init__(self) -> None:
        super().__init__()
        self.map = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.map(x)
        return F.normalize(x[x[:, 0].argsort(descending=True)], dim=-1, eps=1e-3)


@pytest.mark.parametrize("fault", [None, "eps-place", "reversed"])
def test_an_epsilon_inside_of_the_root_and_another_order(fault):
    def apply(p: Any, x: Any) -> Any:
        x = x @ p["map.weight"].T + p["map.bias"]
        x = x[jnp.argsort(x[:, 0] if fault == "reversed" else -x[:, 0])]
        squares = (x**2).sum(-1, keepdims=True)
        return x / (
            jnp.sqrt(squares + 1e-6)
            if fault == "eps-place"
            else jnp.maximum(jnp.sqrt(squares), 1e-3)
        )

    result = verdict(lambda: pair_of(Cosine(), apply, (drawn(5, 4),)))
    assert [f.cause for f in result.findings] == ([] if fault is None else [fault]), str(result)


class Cell(torch.nn.Module):
    """A recurrent layer that computes more than it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.map = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, found = x.new_zeros(len(x), 3), []
        for row in x.unbind(1):
            h = self.map(torch.cat([row, h], -1)).tanh()
            found.append(h)
            _ = h.exp()
        return torch.stack(found, 1)


@pytest.mark.parametrize("fault", [None, "missing-activation"])
def test_a_state_that_starts_in_float32(fault):
    """As flax's recurrent cells do, which then raise on float64."""

    def apply(p: Any, x: Any) -> Any:
        def step(h: Any, row: Any) -> Any:
            h = jnp.concatenate([row, h], -1) @ p["map.weight"].T + p["map.bias"]
            h = h if fault else jnp.tanh(h)
            return h, h

        return jax.lax.scan(step, jnp.zeros((len(x), 3), jnp.float32), x.swapaxes(0, 1))[
            1
        ].swapaxes(0, 1)

    result = verdict(lambda: pair_of(Cell(), apply, (drawn(2, 4, 3),)))
    found = [f.cause for f in result.findings if f.kind != "precision"]
    assert found == ([] if fault is None else [fault]), str(result)


class Places(torch.nn.Module):
    """Embeddings of words and of positions that do not count padding, and an attention over all of
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(6, 4), torch.nn.Embedding(6, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        kept = ids.ne(0).long()
        x = self.words(ids) + self.places(kept.cumsum(1) * kept)
        return (x @ x.mT).softmax(-1) @ x


def test_a_number_that_is_wrong_in_one_row_and_right_in_another():
    """Padding on the left has position 0 on both sides, that on the right in torch alone."""

    def apply(p: Any, ids: Any) -> Any:
        x = p["words.weight"][ids] + p["places.weight"][jnp.cumsum(ids != 0, 1)]
        return jax.nn.softmax(x @ x.swapaxes(1, 2), -1) @ x

    ids = np.array([[1, 2, 3, 0, 0], [0, 0, 4, 5, 1]])
    is_one_finding(verdict(lambda: pair_of(Places(), apply, (ids,))), "forward", "", "missing-mask")


class Pooled(torch.nn.Linear):
    """The mean of the features that are not padded."""

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        kept = kept[..., None].to(x.dtype)
        return (super().forward(x) * kept).sum(1) / kept.sum(1)


def test_a_mean_that_counts_padding():
    def apply(p: Any, x: Any, kept: Any) -> Any:
        return ((x @ p["weight"].T + p["bias"]) * kept[..., None]).mean(1)

    inputs = drawn(3, 5, 4), np.arange(5) < np.array([[5], [2], [3]])
    is_one_finding(verdict(lambda: pair_of(Pooled(4, 2), apply, inputs)), "forward", "", "count")


# A weight in two uses.


class Twice(nn.Module):
    """Applies one layer two times."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return self.out(self.a(self.a(x).tanh()).tanh())


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("order", "found"),
    [
        (lambda w: w, []),
        (lambda w: w.T, [("load", "a", "weight-transposed")]),
        (lambda w: w[::-1], [("load", "a", "weight-permuted")]),
        (lambda w: w[:, [2, 0, 3, 1]], [("load", "a", "weight-permuted")]),
        (lambda w: w[[2, 0, 3, 1]], [("load", "a", "weight-permuted")]),
    ],
)
def test_a_weight_in_another_order_is_one_finding_in_two_uses(order, found):
    def load(state: Any) -> Any:
        return {**state, "a.weight": order(state["a.weight"])}

    def layer(p: Any, x: Any, name: str) -> Any:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def apply(p: Any, x: Any) -> Any:
        return layer(p, jnp.tanh(layer(p, jnp.tanh(layer(p, x, "a")), "a")), "out")

    torch.manual_seed(0)
    module = Twice()
    state = {name: value.numpy() for name, value in module.state_dict().items()}
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    pair = {"module": module, "apply": apply, "load": load, "params": load(state), "inputs": (x,)}
    result = judge_function(lambda: pair, "pair")
    assert [(f.kind, f.place, f.cause) for f in result.differences] == found
