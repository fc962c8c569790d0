"""Pairs of unusual forms: complex parameters, parameters of 16 bits, masked kernels, shifts, hard
gates.
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

from gradcheck_suite.port.drawing import resampled
from tests.port.pairs import arrays, drawn, head, pair_of
from tests.port.test_parts import is_one_finding, verdict


class Filter(nn.Module):
    """A filter with complex weights, and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))
        self.last = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.fft.irfft(torch.fft.rfft(x, dim=-1) * self.weight, n=6))


@pytest.mark.parametrize("fault", [None, "stop-gradient"])
def test_complex_parameters_are_moved_and_their_gradients_compared(fault):
    def apply(p: Any, x: Any) -> Any:
        weight = jax.lax.stop_gradient(p["weight"]) if fault else p["weight"]
        return jnp.fft.irfft(jnp.fft.rfft(x) * weight, n=6) @ p["last.weight"].T + p["last.bias"]

    torch.manual_seed(0)
    result = verdict(pair_of, Filter(), apply, (drawn(2, 3, 6),))
    assert [row.how for row in result.map] == ["same"] * 3
    assert [f.kind for f in result.findings] == ([] if fault is None else ["gradient"])


def test_a_port_that_keeps_its_parameters_in_16_bits_holds():
    def load(state: dict[str, Any]) -> Any:
        return {name: jnp.asarray(value, jnp.bfloat16) for name, value in state.items()}

    given = head()
    result = verdict(
        pair_of, given["module"], lambda p, x: given["apply"](p, x), given["inputs"], load=load
    )
    assert not [f for f in result.findings if f.kind != "precision"]


class Masked(nn.Module):
    """A convolution that does not see what comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 5, padding=2)
        mask = torch.ones(3, 2, 5)
        mask[..., 2:] = 0
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x, self.conv.weight * self.mask, self.conv.bias, padding=2)


def test_a_masked_convolution_that_sees_the_present():
    def apply(p: Any, x: Any) -> Any:
        mask = jnp.array([1.0, 1, 1, 0, 0])[:, None, None] * jnp.ones((1, 2, 3))
        kernel = p["conv.weight"].transpose(2, 1, 0) * mask
        y = jax.lax.conv_general_dilated(
            x, kernel, (1,), "SAME", dimension_numbers=("NCH", "HIO", "NCH")
        )
        return y + p["conv.bias"][:, None]

    is_one_finding(
        verdict(pair_of, Masked(), apply, (drawn(2, 2, 7),)), "forward", "", "mask-elements"
    )


class Shift(nn.Module):
    """A mixture of each step with the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.shift = nn.Parameter(torch.rand(4)), nn.ZeroPad2d((0, 0, 1, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.mix + self.shift(x) * (1 - self.mix))


def test_a_shift_that_brings_the_last_step_to_the_front():
    def apply(p: Any, x: Any) -> Any:
        before = jnp.roll(x, 1, 1)
        return jnp.tanh(before + (x - before) * p["mix"])

    is_one_finding(
        verdict(pair_of, Shift(), apply, (drawn(2, 5, 4),)), "forward", "shift", "padding-mode"
    )


class Gate(nn.Module):
    """A hard gate; the kernel of its backward has 1/6 in float32."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.map, self.gate = nn.Linear(4, 3), nn.Hardsigmoid(inplace)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(self.map(x))


@pytest.mark.parametrize("inplace", [False, True])
def test_a_hard_gate_holds_although_its_backward_is_rounded(inplace):
    result = verdict(pair_of, Gate(inplace), lambda p, x: jax.nn.hard_sigmoid(x @ p["map.weight"].T + p["map.bias"]),
                     (drawn(3, 4),))  # fmt: skip
    assert not result.findings


def test_a_mean_of_a_divergence_in_place_of_a_sum():
    """The plain sum is one of the port's numbers, and torch's loss: the temperature cancels the
    number of rows.
    """

    def torch_loss(out: Any, y: Any) -> Any:
        return F.kl_div(F.log_softmax(out / 2, -1), F.softmax(y / 2, -1), reduction="batchmean") * 4

    def jax_loss(out: Any, y: Any) -> Any:
        p, q = jax.nn.log_softmax(y / 2), jax.nn.log_softmax(out / 2)
        return (jnp.exp(p) * (p - q)).mean() * 4

    torch.manual_seed(0)
    module = nn.Linear(3, 5)
    more = {"targets": (drawn(4, 5),), "torch_loss": torch_loss, "jax_loss": jax_loss}
    result = verdict(
        pair_of,
        module,
        lambda p, x: x @ p["weight"].T + p["bias"],
        (drawn(4, 3),),
        load=arrays,
        **more,
    )
    is_one_finding(result, "forward", "loss", "reduction")


class Reader(nn.Module):
    """Two recurrent layers, of which the last state of the second is read."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.norm = nn.GRU(3, 4, num_layers=2, batch_first=True), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.gru(x)[1][-1])


@pytest.mark.full
def test_the_state_of_the_first_of_two_layers():
    """The whole second layer is lost, and nothing is wrong there: what reads it should be looked at
    before.
    """

    def apply(p: Any, x: Any) -> Any:
        h = jnp.zeros((x.shape[0], 4))
        for step in jnp.swapaxes(x, 0, 1):
            r, z, n = jnp.split(step @ p["gru.weight_ih_l0"].T + p["gru.bias_ih_l0"], 3, -1)
            own = jnp.split(h @ p["gru.weight_hh_l0"].T + p["gru.bias_hh_l0"], 3, -1)
            z = jax.nn.sigmoid(z + own[1])
            h = (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + own[0]) * own[2]) + z * h
        x = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)
        return x * p["norm.weight"] + p["norm.bias"]

    torch.manual_seed(0)
    found = verdict(pair_of, Reader(), apply, (drawn(2, 5, 3),)).findings
    assert "other-position" in [f.cause for f in found if f.kind == "forward"], str(found)


def mixed(p: Any, x: Any) -> Any:
    return jnp.einsum("oi,nihw->nohw", p["0.weight"][..., 0, 0], x) + p["0.bias"][:, None, None]


def pooled(x: Any, spans: Any) -> Any:
    rows = jnp.stack([x[:, :, a:b].mean(2) for a, b in spans], 2)
    return jnp.stack([rows[..., a:b].mean(3) for a, b in spans], 3)


@pytest.mark.parametrize(
    ("spans", "cause"),
    [
        (((0, 3), (2, 5), (4, 7)), None),
        (((0, 2), (2, 4), (4, 7)), "average-window"),
        (((0, 3), (3, 5), (5, 7)), "average-window"),
    ],
)
def test_windows_of_a_pooling_to_a_size_that_does_not_divide(spans, cause):
    module = nn.Sequential(nn.Conv2d(2, 3, 1), nn.AdaptiveAvgPool2d(3))
    port = lambda p, x: pooled(mixed(p, x), spans)  # noqa: E731 - one use
    result = verdict(pair_of, module, port, (drawn(2, 2, 7, 7),), sizes="given")
    if cause is None:
        assert result.verdict == "holds", str(result)
        return
    is_one_finding(result, "forward", "1", cause)


def test_an_instance_norm_over_all_channels():
    def apply(p: Any, x: Any) -> Any:
        x = mixed(p, x)
        x = (x - x.mean((1, 2, 3), keepdims=True)) / jnp.sqrt(
            x.var((1, 2, 3), keepdims=True) + 1e-5
        )
        return x * p["1.weight"][:, None, None] + p["1.bias"][:, None, None]

    module = nn.Sequential(nn.Conv2d(2, 3, 1), nn.InstanceNorm2d(3, affine=True))
    is_one_finding(
        verdict(pair_of, module, apply, (drawn(2, 2, 4, 4),)), "forward", "1", "norm-axis"
    )


class LastWord(nn.Module):
    """What is said of the last word that is no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.words(ids))[torch.arange(len(ids)), (ids != 0).sum(1) - 1]


@pytest.mark.parametrize("pads", [True, False])
def test_the_last_position_in_place_of_the_last_word(pads):
    def apply(p: Any, ids: Any) -> Any:
        out = p["words.weight"][ids] @ p["last.weight"].T + p["last.bias"]
        return out[jnp.arange(len(ids)), (ids != 0).sum(1) - 1] if pads else out[:, -1]

    result = verdict(
        pair_of, LastWord(), apply, (np.array([[3, 7, 0, 0], [5, 2, 8, 1], [4, 6, 2, 0]]),)
    )
    if pads:
        assert result.verdict == "holds", str(result)
        return
    is_one_finding(result, "forward", "", "other-position")


@pytest.mark.parametrize("kind", ["other", "ends"])
@pytest.mark.parametrize("step", [1, -1])
def test_drawn_ids_are_padded_as_the_given_ones(kind, step):
    given, rng = np.array([[3, 5, 0, 0], [2, 4, 6, 1]])[:, ::step], np.random.default_rng(0)
    found = [resampled(given, rng, kind)[:, ::step] for _ in range(20)]
    assert any((ids == 0).any() for ids in found)
    assert all(
        (np.diff((ids == 0).astype(int), axis=1) >= 0).all() and ids.max() <= 6 for ids in found
    )


class Continued(nn.Module):
    """Scores of the last two positions for all of five: a query sees what is before it, and itself."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.arange(5) <= torch.arange(3, 5)[:, None]
        return (self.query(x)[:, 3:] @ x.mT).masked_fill(~seen, -1e9).softmax(-1) @ x


@pytest.mark.parametrize(("diagonal", "cause"), [(3, None), (0, "mask-diagonal")])
def test_a_triangle_that_is_no_square(diagonal, cause):
    def apply(p: Any, x: Any) -> Any:
        scores = (x @ p["query.weight"].T + p["query.bias"])[:, 3:] @ x.swapaxes(1, 2)
        return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((2, 5)), diagonal) > 0, scores, -1e9)) @ x

    result = verdict(pair_of, Continued(), apply, (drawn(2, 5, 4),))
    if cause is None:
        assert result.verdict == "holds", str(result)
        return
    is_one_finding(result, "forward", "", cause)


class Merged(nn.Module):
    """Four neighbours side by side, column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1))


def test_neighbours_that_are_joined_row_by_row():
    def apply(p: Any, x: Any) -> Any:
        rows = jnp.concatenate([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1)
        rows = (rows - rows.mean(-1, keepdims=True)) / jnp.sqrt(rows.var(-1, keepdims=True) + 1e-5)
        return rows * p["norm.weight"] + p["norm.bias"]

    result = verdict(pair_of, Merged(), apply, (drawn(2, 4, 4, 2),))
    is_one_finding(result, "forward", "", "order-of-parts")


class Patches(nn.Module):
    """The mean over patches, behind a class token; norms of channels that come last."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(4, 3), nn.LayerNorm(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.map(self.norm(x @ self.map.weight.T)[:, 1:].mean(1) @ self.map.weight)


@pytest.mark.parametrize(
    ("first", "axes", "place", "cause"),
    [(1, (-1,), "", None), (0, (-1,), "", "other-slice"), (1, (1, 2), "norm", "norm-axis")],
)
def test_a_mean_of_all_elements_and_a_norm_over_two_axes(first, axes, place, cause):
    def apply(p: Any, x: Any) -> Any:
        x = x @ p["map.weight"].T
        x = (x - x.mean(axes, keepdims=True)) / jnp.sqrt(x.var(axes, keepdims=True) + 1e-5)
        x = (x * p["norm.weight"] + p["norm.bias"])[:, first:].mean(1) @ p["map.weight"]
        return x @ p["map.weight"].T + p["map.bias"]

    result = verdict(pair_of, Patches(), apply, (drawn(2, 5, 2, 4),))
    if cause is None:
        assert result.verdict == "holds", str(result)
        return
    is_one_finding(result, "forward", place, cause)
