"""A loop for each diagnosis: one sound loop of torch, one of JAX, and what makes each of them wrong.

The zoo has bugs as they were reported. This table has the diagnoses that no bug of the zoo gets, in
each framework, so that together they have all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from gradcheck_suite.core.case import Case, Layer, Plan
from gradcheck_suite.verification.search import slopes_case
from tests.faults.small_cases import REGRESSION

TORCH = """
import math
import time
from itertools import islice

import torch

def windows_of(run):
    batches = iter(run.loader)
    return iter(lambda: list(islice(batches, run.accumulation_steps)), [])

def train(run):
    {first}
    for epoch in range({epochs}):
        for number, window in enumerate(windows_of(run)):
            total = sum(run.count(batch) for batch in window) if run.reduction == "mean" else 1.0
            for j, batch in enumerate({batches}):
                {forward}
                loss = run.loss({model}, batch)
                share = run.count(batch) / total if run.reduction == "mean" else 1.0
                ({loss} * {weight}).backward()
                {after}
            {before}
            {step}
            {reset}
"""
SOUND_TORCH = {
    "first": "pass",
    "epochs": "run.epochs",
    "batches": "window",
    "forward": "pass",
    "model": "run.model",
    "loss": "loss",
    "weight": "share",
    "after": "pass",
    "before": "pass",
    "step": "run.optimizer.step()",
    "reset": "run.optimizer.zero_grad()",
}
JAX = """
import time
from itertools import islice

import gradcheck_suite
import jax
import jax.numpy as jnp
import optax

def windows_of(run):
    batches = iter(run.batches)
    return iter(lambda: list(islice(batches, run.accumulation_steps)), [])

def added(sums, parts):
    return jax.tree.map(lambda a, b: (a + b).astype(a.dtype), sums, parts)

@gradcheck_suite.jax_training_loop
def train(run):
    params, state = run.params, run.optimizer.init(run.params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    kept = zeros
    {first}
    for epoch in range({epochs}):
        for number, window in enumerate(windows_of(run)):
            total = sum(run.count(batch) for batch in window)
            sums = {start}
            for j, batch in enumerate({batches}):
                share = run.count(batch) / total if run.reduction == "mean" else 1.0
                def objective(params):
                    loss = run.loss(params, batch)
                    return {loss}
                part = jax.grad(objective)({params})
                part = jax.tree.map(lambda g: (g * {weight}).astype(g.dtype), part)
                {after}
                sums = {sum}
            {before}
            {step}
            params = optax.apply_updates(params, updates)
"""
SOUND_JAX = {
    "first": "pass",
    "epochs": "run.epochs",
    "start": "zeros",
    "batches": "window",
    "loss": "loss",
    "params": "params",
    "weight": "share",
    "after": "pass",
    "sum": "added(sums, part)",
    "before": "pass",
    "step": "updates, state = run.optimizer.update(sums, state, params)",
}
EACH = "sums = jax.tree.map(lambda g: {}, sums)"
"""A change of each gradient of a window, in JAX."""
LONG = Case(REGRESSION, Plan((1, 2, 3, 1, 2), 3), seed=1)
TWO = Case(REGRESSION, Plan((1, 2, 1, 3), 2, 2), seed=1)
ONE = Case(REGRESSION, Plan((2, 1), 2), seed=1)
MOVED = Case(REGRESSION, Plan((1, 2, 1), 1, 2), seed=1, optimizer="adamw")


@dataclass(frozen=True)
class Planted:
    """A loop that gets a diagnosis.

    Attributes:
        diagnosis: the diagnosis.
        case: the case on which it gets that.
        jax: whether it is a loop of JAX.
        changes: what is written in place of parts of the sound loop.
        no_script: how the reason begins for which there is no script; empty where there is one.
    """

    diagnosis: str
    case: Case
    jax: bool = False
    changes: dict[str, str] = field(default_factory=dict)
    no_script: str = ""

    @property
    def id(self) -> str:
        """The name of the test's case."""
        return f"{'jax-' if self.jax else ''}{self.diagnosis}"

    def write(self, file: Path, *, sound: bool = False) -> None:
        """Write the file of the loop, or of the sound one."""
        text, parts = (JAX, SOUND_JAX) if self.jax else (TORCH, SOUND_TORCH)
        file.write_text(text.format(**{**parts, **({} if sound else self.changes)}))


def _torch(diagnosis: str, case: Case, no_script: str = "", **changes: str) -> Planted:
    return Planted(diagnosis, case, changes=changes, no_script=no_script)


def _jax(diagnosis: str, case: Case, no_script: str = "", **changes: str) -> Planted:
    return Planted(diagnosis, case.replace(dtype="float32"), True, changes, no_script)


MODED = Case(
    replace(REGRESSION, layers=(*REGRESSION.layers, Layer("train_scale", factor=2.0))),
    Plan((1, 2), 2),
)
DEEP = LONG.replace(problem=replace(REGRESSION, layers=REGRESSION.layers * 2))
ALL = "run.model.parameters()"
FIRST_ITEM = "{name: leaf[:1] for name, leaf in batch.items()}"
SET_FIRST = "p = next(run.model.parameters())"
OF_PARAMETERS = "a script of JAX shows"
PLANTED = (
    _torch("weighted-by-place", LONG, weight="share * (1 + 0.3 * j)"),
    _torch("weighted-by-loss", LONG, loss="loss * loss.detach()"),
    _torch(
        "unequal-items",
        LONG,
        loss=(
            "sum((i + 1) * run.loss(run.model, {n: t[i : i + 1] for n, t in batch.items()})"
            " for i in range(len(batch['x'])))"
        ),
    ),
    _torch("wrong-mode", MODED, first="run.model.eval()"),
    _torch(
        "stale-parameters",
        DEEP,
        first=f"*_, p, _ = {ALL}",
        loss="(p.data.mul_(0.5), loss)[1]",
        after="p.data.mul_(2)",
    ),
    _torch(
        "not-summed",
        LONG,
        first="seen = []",
        after=f"seen.append([p.grad.clone() for p in {ALL}]); run.optimizer.zero_grad()",
        before=(
            f"for p, parts in zip({ALL}, zip(*seen)): p.grad = torch.stack(parts).amax(0)"
            "\n            seen.clear()"
        ),
    ),
    _torch(
        "overflow",
        slopes_case(frozenset(), "float32", "cpu"),
        before=f"for p in {ALL}: p.grad += 0 * p.grad ** 3",
    ),
    _torch("never-stepped", ONE, step="pass"),
    _torch("wrong-step-count", TWO, epochs="run.epochs + 1"),
    _torch("parameter-drift", MOVED, reset=f"{SET_FIRST}; p.data.mul_(0.9)"),
    _torch("optimizer-state-changed", MOVED, before="number and run.optimizer.state.clear()"),
    _torch("changed-settings", MOVED, reset="run.optimizer.param_groups[0]['lr'] *= 0.5"),
    _torch("parameter-not-updated", MOVED, first="run.optimizer.param_groups[0]['params'].pop()"),
    _torch(
        "wrong-update",
        MOVED,
        first=(
            "state = run.optimizer.state"
            "\n    for p in run.model.parameters():"
            "\n        state[p] = {'step': torch.tensor(1.0)}"
            "\n        state[p] |= {'exp_avg': torch.ones_like(p), 'exp_avg_sq': torch.ones_like(p)}"
        ),
    ),
    _torch("changed-model", ONE, first=f"{SET_FIRST}; p.requires_grad_(False)"),
    _torch(
        "changed-torch",
        ONE,
        first=(
            "linear = torch.nn.functional.linear"
            "\n    torch.nn.functional.linear = lambda *given: linear(*given)"
        ),
    ),
    _torch("timed-out", ONE, first="time.sleep(100)"),
    _torch("raised", ONE, first="raise ValueError('planted')"),
    _jax("weighted-by-place", LONG, weight="share * (1 + 0.3 * j)"),
    _jax("unrecognised-weights", LONG, weight="share * (0.9, 0.2, 0.7, 0.35, 0.8)[3 * number + j]"),
    _jax(
        "unequal-items",
        LONG,
        loss=f"loss + run.loss(params, {FIRST_ITEM})",
    ),
    _jax("rescaled-accumulator", LONG, sum="jax.tree.map(lambda a: a / 2, added(sums, part))"),
    _jax("repeated-micro-batch", LONG, batches="[*window, window[-1]]"),
    _jax("dropped-micro-batch", LONG, weight="share * (j != 1)"),
    _jax("reset-inside-window", LONG, sum="part"),
    _jax("first-only", LONG, weight="share * (j == 0)"),
    _jax("no-gradient", LONG, before="sums = zeros"),
    _jax("other-window", TWO, before="sums, kept = kept, sums"),
    _jax("stale-window", TWO, start="kept", before="kept = sums"),
    _jax("mean-of-means", LONG, weight="1 / len(window)"),
    _jax("wrong-scale", LONG, weight="share * 2"),
    _jax("misplaced-gradient", LONG, before=EACH.format("jnp.flip(g) if g.ndim == 2 else g")),
    _jax("partial-gradient", LONG, before=EACH.format("g.at[0].set(0) if g.ndim == 2 else g")),
    _jax("projected-gradient", LONG, before=EACH.format("g - g.mean()")),
    _jax("clipped", LONG, before=EACH.format("jnp.clip(g, -1e-3, 1e-3)")),
    _jax("normalised", LONG, before=EACH.format("jnp.sign(g)")),
    _jax("added-term", LONG, before="sums = added(sums, params)"),
    _jax("not-linear", LONG, before=EACH.format("jnp.sin(3 * g) + g * g")),
    _jax("tail-dropped", LONG, before="if len(window) < run.accumulation_steps: continue"),
    _jax(
        "tail-leak",
        LONG.replace(plan=replace(LONG.plan, epochs=2)),
        start="kept",
        before=(
            "short = len(window) < run.accumulation_steps"
            "\n            kept = sums if short else zeros"
            "\n            if short: continue"
        ),
    ),
    _jax(
        "step-per-micro-batch",
        ONE,
        after="updates, state = run.optimizer.update(part, state, params)",
        step="pass",
    ),
    _jax("dropped-window", TWO, before="if not epoch and not number: continue"),
    _jax("never-stepped", ONE, step="updates = zeros"),
    _jax(
        "repeated-step",
        ONE,
        before="updates, state = run.optimizer.update(sums, state, params)",
    ),
    _jax("wrong-step-count", TWO, epochs="run.epochs + 1"),
    _jax("raised", ONE, first="raise ValueError('planted')"),
    _jax("timed-out", ONE, first="time.sleep(100)"),
    _jax(
        "parameter-drift",
        MOVED,
        OF_PARAMETERS,
        after="params = jax.tree.map(lambda p: p * 0.9, params)",
    ),
)
