"""How long `gradcheck-suite port` takes: with nothing compiled, and with its programs on disk.

Run it by itself, on an idle machine: `pytest -s studies/properties/benchmarks/bench_port.py`. Each
row is a process of its own, as a user starts it, by the clock and by the processor time; what it
imports is part of both.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's documents call it
from torch import nn

from gradcheck_suite import Port
from gradcheck_suite.run.environment import CACHE_VARIABLE

WORDS, WIDTH, HEADS, LENGTH = 64, 64, 4, 16
ALLOWED = {"small, cold": 10.0, "small, warm": 4.0, "gpt2, cold": 60.0, "gpt2, warm": 60.0}
"""Seconds of the clock that a row may take on an idle machine with two processors."""


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c_fc, self.c_out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (rows, length, width)."""
        q, k, v = self.c_attn(self.ln_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(seen.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))
        return out


class GPT2(nn.Module):
    """GPT-2 with tied embeddings."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h, self.ln_f = nn.ModuleList(Block() for _ in range(layers)), nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits (rows, length, words) of token ids (rows, length)."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        out: torch.Tensor = self.ln_f(x) @ self.wte.weight.T
        return out


def _port(p: Any, ids: Any, layers: int) -> Any:
    def norm(name: str, x: Any) -> Any:
        x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * p[f"{name}.weight"] + p[f"{name}.bias"]

    def dense(name: str, x: Any) -> Any:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    length = ids.shape[1]
    x = p["wte.weight"][ids] + p["wpe.weight"][:length]
    for i in range(layers):
        qkv = dense(f"h.{i}.c_attn", norm(f"h.{i}.ln_1", x)).reshape(*x.shape[:2], 3, HEADS, -1)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH // HEADS) ** 0.5
        weights = jax.nn.softmax(
            jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
        )
        x = x + dense(f"h.{i}.c_proj", jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))
        x = x + dense(f"h.{i}.c_out", jax.nn.gelu(dense(f"h.{i}.c_fc", norm(f"h.{i}.ln_2", x))))
    return norm("ln_f", x) @ p["wte.weight"].T


def _pair(layers: int) -> Port:
    def load(state: dict[str, Any]) -> dict[str, Any]:
        return {name: jnp.asarray(value) for name, value in state.items()}

    torch.manual_seed(0)
    module, rng = GPT2(layers), np.random.default_rng(0)
    return Port(
        module,
        lambda p, ids: _port(p, ids, layers),
        params=load({name: value.detach().numpy() for name, value in module.state_dict().items()}),
        load=load,
        inputs=(rng.integers(0, WORDS, (2, LENGTH)),),
        targets=(rng.integers(0, WORDS, (2, LENGTH)),),
        torch_loss=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
        jax_loss=lambda out, y: optax.softmax_cross_entropy_with_integer_labels(out, y).mean(),
        torch_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        jax_optimizer=optax.adamw(1e-3, weight_decay=0.01),
    )


def small() -> Port:
    """Return a pair of 100,000 parameters: GPT-2 with two layers."""
    return _pair(2)


def gpt2() -> Port:
    """Return GPT-2 with twelve layers of width 64."""
    return _pair(12)


def _times(name: str, store: Path, verdict: Path) -> tuple[float, float]:
    """Judge a pair in a process of its own; return seconds of the clock and of the processor."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "gradcheck_suite",
        "port",
        f"{__file__}:{name}",
        "--json",
        str(verdict),
    ]
    subprocess.run(
        command, env={**os.environ, CACHE_VARIABLE: str(store)}, check=True, capture_output=True
    )
    clock, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("name", ["small", "gpt2"])
def test_port(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = tmp_path / "verdict.json"
    for programs in ("cold", "warm"):
        row, load = f"{name}, {programs}", os.getloadavg()[0]
        clock, processor = _times(name, tmp_path / "programs", verdict)
        judged = json.loads(verdict.read_text())["results"][0]
        with capsys.disabled():
            seconds = (
                f"{clock:.1f} s by the clock, {processor:.1f} s of the processor,"
                f" {judged['seconds']:.1f} s to judge"
            )
            print(f"\n{row}: {seconds}; {ALLOWED[row]:g} s are allowed; load {load:.1f}")
        assert judged["verdict"] == "holds"
        assert clock <= ALLOWED[row] or load > 1, "too slow on an idle machine"
