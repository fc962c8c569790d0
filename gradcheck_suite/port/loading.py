"""Whether every tensor of torch that matters reaches the JAX parameters, and is one leaf there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gradcheck_suite.port.changes import Hypothesis
from gradcheck_suite.port.judgement import Judgement
from gradcheck_suite.port.matching import outputs_error
from gradcheck_suite.port.number_sets import Array
from gradcheck_suite.port.pair import is_neutral, is_statistic, shaped_as
from gradcheck_suite.port.search import Repairs


@dataclass(frozen=True)
class _Start:
    """A leaf that stays at its initial value: its path, and its numbers."""

    path: str
    values: Array


def judge_loading(judgement: Judgement) -> None:
    """Judge that every tensor of torch that matters reaches a leaf."""
    state_map = judgement.map
    used = state_map.used()
    parameters = judgement.program.parameters
    for name in state_map.names:
        base = state_map.base[name]
        gone = (used[state_map.part(name)] == 0).reshape(base.shape)
        # other buffers may be tables that the port computes
        is_start = is_statistic(name) and not judgement.pair.train
        is_start |= not is_statistic(name) and is_neutral(base)
        is_wanted = name in parameters or (is_start and gone.all())
        if gone.any() and is_wanted and _matters(judgement, name, gone):
            _add_not_loaded(judgement, name, gone)


def _matters(judgement: Judgement, name: str, elements: Array) -> bool:
    """Return whether the outputs or the loss depend on some elements of torch's state."""
    program = judgement.program
    run = Repairs().run(program)
    # not by the same number everywhere, which a norm or a softmax takes away again
    step = 0.1 * elements * (1 + np.arange(elements.size).reshape(elements.shape) % 3)
    moved = Repairs(leaves={("state", name): lambda v: v + shaped_as(step, v)}).run(program)
    off = outputs_error([*run.outs, run.loss], [*moved.outs, moved.loss])
    return off > judgement.allowed(judgement.sides.given)


def _add_not_loaded(judgement: Judgement, name: str, gone: Array) -> None:
    """Say that elements of torch's state reach no leaf, and give torch what the port has there."""
    whole = bool(gone.all())
    start = _start_of_leaf(judgement, gone.size)
    what = "no element of it" if whole else f"{int((~gone).sum())} of its {gone.size} elements"
    words = f"expected {name} {gone.shape} in the JAX parameters, observed {what}"
    words += f"; {start.path} stays at {start.values[0]:g}" if start is not None else ""
    cause = _why_not_loaded(judgement, name, start)
    finding = judgement.report.add("load", name.rpartition(".")[0], cause, words)
    mask = torch.as_tensor(gone)
    fixed = torch.as_tensor(_without_parameter(judgement, name, gone, start))
    judgement.unloaded.add(name)
    leaves = {("state", name): lambda v: torch.where(mask, fixed, v)}
    judgement.repair(Hypothesis(cause, "", leaves=leaves), finding)


def _start_of_leaf(judgement: Judgement, size: int) -> _Start | None:
    """Return the last leaf of a size that comes from nothing of torch's."""
    found = None
    for leaf, value in zip(judgement.map.leaves, judgement.sides.leaves, strict=True):
        if leaf is not None and leaf.is_constant and leaf.index.size == size:
            found = _Start(leaf.path, np.asarray(value).reshape(-1))
    return found


def _why_not_loaded(judgement: Judgement, name: str, start: _Start | None) -> str:
    if start is not None or name not in judgement.program.parameters:
        return "not-loaded"
    return "missing-bias" if "bias" in name.rpartition(".")[2] else "unused-parameter"


def _without_parameter(judgement: Judgement, name: str, gone: Array, start: _Start | None) -> Array:
    """Return what the port has in place of elements of torch's state."""
    own = name.rpartition(".")[2]
    whole = bool(gone.all())
    base = judgement.map.base[name]
    if whole and is_neutral(base):
        return base
    if start is not None and np.ptp(start.values) == 0:
        return np.full(gone.shape, start.values[0])
    # a scale or a variance that a port does without is 1, anything else 0
    is_scale = "weight" in own or own == "running_var"
    if whole and gone.ndim == 1 and is_scale:
        return np.ones(gone.shape)
    return np.zeros(gone.shape)


def judge_ties(judgement: Judgement) -> None:
    """Judge that what torch ties is one leaf: each of two is stepped by its own part of the
    gradient.
    """
    state_map = judgement.map
    copies: dict[int, list[str]] = {}
    for leaf in state_map.leaves:
        if leaf is not None and leaf.known:
            for start in {state_map.offsets[n] for n in state_map.sources(leaf)}:
                copies.setdefault(start, []).append(leaf.path)
    parameters = judgement.program.parameters
    for start, paths in copies.items():
        names = [n for n in state_map.names if state_map.offsets[n] == start and n in parameters]
        if len(paths) < 2 or len(names) < 2:
            continue
        # two leaves may hold a half of the tensor each, which is no copy
        if (state_map.used()[state_map.part(names[0])] > 1).any():
            words = f"expected one parameter for {' and '.join(names)}, observed"
            words += f" {' and '.join(paths)}, each with its own gradient"
            judgement.report.add("load", names[-1].rpartition(".")[0], "untied-weights", words)
