"""A parameter trained by torch over windows that reach it, miss it, freeze it, or come before it is added."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradcheck_suite.evidence.zero_or_none.laws import Law, Settings
from gradcheck_suite.loops.modes import ResetMode

REACHED, MISSED, FROZEN, ABSENT = "reached", "missed", "frozen", "absent"
"""What a window is to the parameter. Absent: the optimizer does not have it yet."""
ROUTED = (REACHED, REACHED, MISSED, MISSED, REACHED, MISSED)
UNFROZEN = (REACHED, REACHED, FROZEN, FROZEN, REACHED)
ADDED_LATE = (ABSENT, ABSENT, REACHED, MISSED, REACHED)
MISSED_FIRST = (MISSED, MISSED, REACHED, REACHED)
SCENARIOS = {"routed": ROUTED, "unfrozen": UNFROZEN, "added late": ADDED_LATE, "missed first": MISSED_FIRST}

_MATRIX = ((1.0, -0.5), (0.75, 2.0))
HADAMARD = ((1.0, 1.0), (1.0, -1.0))
SIZES = (1.0, 0.5, 0.25, -0.75, -0.5, -1.0)
"""Window w has the gradient `SIZES[w]` times the matrix of +-1; the signs turn once."""
FALLING = (1.0, 0.5, 0.375, 0.25, 0.125, 0.0625)
"""The sizes for L-BFGS, whose pairs then have positive curvature."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Run:
    """What torch did.

    Attributes:
        settings: all settings of the optimizer.
        seen: for each window the gradient that the step found, or None; None for an element that a sparse gradient
            lacks.
        thetas: the parameter after each window.
        states: the state of the parameter after each window.
    """

    settings: dict[str, Any]
    seen: list[Array | None]
    thetas: list[Array]
    states: list[dict[str, Any]]


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Make torch keep the scalars of the state (`step`, `eta`, `mu`, `mu_product`) in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def start(law: Law) -> Array:
    """Return the parameter before the first window: (2, 2), or (4,) for a law of a vector."""
    return _shaped(law, np.array(_MATRIX))


def _shaped(law: Law, matrix: Array) -> Array:
    return matrix.ravel() if law.of == "vector" else matrix


def gradient(law: Law, window: int) -> Array:
    """Return the gradient of a window that reaches the parameter; None for the elements that a sparse one lacks."""
    values = np.array(HADAMARD) * (FALLING if law.reads_none_as_zero else SIZES)[window]
    if law.sparse:
        values = values.astype(object)
        values[window % 2] = None
    return _shaped(law, values)


def expected_gradients(law: Law, windows: Sequence[str], mode: ResetMode) -> list[Array | None]:
    """Return the gradient that each step must find, from what a reset leaves and a backward adds.

    A release leaves None. Zeroing leaves zeros once there has been a gradient, or from the start where the loop
    allocates one. A frozen parameter keeps what the reset has left.
    """
    found, present = list[Array | None](), mode.preallocate is not None
    for w, window in enumerate(windows):
        full = gradient(law, w)
        zeros = np.full(full.shape, None) if law.sparse else 0 * full
        if window == REACHED:
            present = True
            found.append(full)
        elif law.reads_none_as_zero:
            found.append(full * [[1], [0]])  # the first row is a parameter that every window reaches
        else:
            found.append(zeros if present and not mode.releases and window != ABSENT else None)
    return found


def run(law: Law, variant: Settings, windows: Sequence[str], mode: ResetMode, **implementation: Any) -> Run:
    """Train in windows of two micro-batches, and return what each step found and left.

    Args:
        law: of the optimizer.
        variant: settings that differ from torch's defaults.
        windows: for each window one of `REACHED`, `MISSED`, `FROZEN`, `ABSENT`.
        mode: how gradients are reset after each step.
        implementation: further settings, such as `foreach=True`.
    """
    with float64_by_default(), torch.sparse.check_sparse_tensor_invariants():
        return _run(law, {**variant, **implementation}, windows, mode)


def _run(law: Law, settings: Settings, windows: Sequence[str], mode: ResetMode) -> Run:
    # L-BFGS has one state for all parameters: the first row of the matrix is one that every window reaches
    rows = [torch.nn.Parameter(torch.tensor(row)) for row in (start(law) if law.reads_none_as_zero else ())]
    subject = rows[1] if rows else torch.nn.Parameter(torch.tensor(start(law)))
    other = rows[0] if rows else torch.nn.Parameter(torch.zeros(2, 2))
    late = windows[0] == ABSENT
    optimizer = getattr(torch.optim, law.optimizer)([other] if late else [other, subject], **settings)
    if mode.preallocate is not None:
        mode.preallocate([other, subject])
    done = Run(dict(optimizer.param_groups[0]), [], [], [])
    for w, window in enumerate(windows):
        if late and window != ABSENT:
            optimizer.add_param_group({"params": [subject]})
            late = False
        subject.requires_grad_(window not in (FROZEN, ABSENT))
        for half in range(2):  # the other micro-batch reaches the other parameter alone
            reached = [subject] if window != MISSED and half else []
            _backward(law, w, other, reached, gradient(law, w))
        done.seen.append(_seen(law, subject, other))
        optimizer.step(_closure) if law.reads_none_as_zero else optimizer.step()
        both = torch.stack([other, subject]) if rows else subject
        done.thetas.append(both.detach().numpy().copy())
        state = optimizer.state[other if rows else subject]
        done.states.append({name: _plain(value) for name, value in state.items() if name not in ("al", "prev_loss")})
        mode.reset([other, subject], optimizer)  # type: ignore[misc]
    return done


def _closure() -> float:
    return 0.0


def _backward(law: Law, window: int, other: torch.Tensor, reached: Sequence[torch.Tensor], full: Array) -> None:
    if law.sparse:
        row = torch.tensor([1 - window % 2])
        given = torch.tensor(full[row].astype(float))
        rows = [torch.nn.functional.embedding(row, p, sparse=True) for p in (other, *reached)]
        loss = rows[0].sum() + sum(((part * given).sum() for part in rows[1:]), torch.zeros(()))
    elif law.reads_none_as_zero:
        mine, its = torch.tensor(full)
        loss = (other * mine / 2).sum() + sum(((p * its).sum() for p in reached), torch.zeros(()))
    else:
        loss = other.sum() + sum(((p * torch.tensor(full)).sum() for p in reached), torch.zeros(()))
    loss.backward()


def _seen(law: Law, subject: torch.Tensor, other: torch.Tensor) -> Array | None:
    if law.reads_none_as_zero:
        rows = [torch.zeros_like(p) if p.grad is None else p.grad for p in (other, subject)]
        return torch.stack(rows).numpy().copy()
    if subject.grad is None:
        return None
    if not law.sparse:
        return subject.grad.numpy().copy()
    found = np.full(subject.shape, None)
    entries = subject.grad.coalesce()
    for row, values in zip(entries.indices()[0].tolist(), entries.values().tolist(), strict=True):
        found[row] = values
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_plain(part) for part in value] if isinstance(value, list) else value
