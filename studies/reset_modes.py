"""The reset modes as they are measured: one record each with its law of cost, and modes that are
only measured.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gradcheck_suite.core.contract import Loop, TrainingRun
from gradcheck_suite.loops.reset_modes import (
    MODES,
    Parameters,
    Reset,
    after_step,
    allocate_flat,
    backward_window,
    none_by_hand,
    part_of_window,
    window_count,
    windows,
    zero_by_hand,
    zero_flat,
    zero_grad_false,
    zero_grad_foreach,
    zero_grad_none,
)
from studies import reset_laws


@dataclass(frozen=True)
class ResetMode:
    """One way to reset gradients between a window's step and the next window's first backward.

    Attributes:
        name: the mode's name on the command line, in records and in the report.
        loop: the training loop that resets in this way; sound under the loop contract if `steps`.
        law: what one window does to gradients in memory.
        reset: resets the gradients of the given parameters; None where the loop resets in some
            other way.
        releases: whether the reset leaves None. Otherwise it leaves zeros.
        preallocate: gives every parameter the gradient, of zeros, that the loop allocates at its
            start; None where autograd makes the gradients.
        steps: whether the loop calls `run.optimizer.step()`; if not, no observer sees its gradients
            together.
        benchmarked: whether the benchmarks time the reset; False where another mode runs the same
            kernels.
    """

    name: str
    loop: Loop
    law: reset_laws.Law
    reset: Reset | None = None
    releases: bool = False
    preallocate: Callable[[Parameters], None] | None = None
    steps: bool = True
    benchmarked: bool = False


def foreach_zero(parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Zero all dense gradients in one call to `torch._foreach_zero_`."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    for gradient in gradients:
        gradient.detach_()
    if dense := [gradient for gradient in gradients if not gradient.is_sparse]:
        torch._foreach_zero_(dense)
    for gradient in gradients:
        if gradient.is_sparse:
            gradient.zero_()


def main_gradients(run: TrainingRun) -> None:
    """Keep each sum in float32 or wider, round it to the parameter's dtype for the step, then zero
    it.
    """
    trainable = [p for p in run.model.parameters() if p.requires_grad]
    mains = {
        p: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in trainable
    }
    reached: dict[torch.nn.Parameter, None] = {}

    def add(p: torch.Tensor) -> None:
        assert isinstance(p, torch.nn.Parameter)
        assert p.grad is not None
        mains[p].add_(p.grad.to_dense() if p.grad.is_sparse else p.grad)
        reached[p] = None
        p.grad = None

    hooks = [p.register_post_accumulate_grad_hook(add) for p in trainable]
    for window in windows(run):
        backward_window(run, window)
        for p in reached:
            p.grad = mains[p].to(p.dtype)
        run.optimizer.step()
        for p in reached:
            p.grad = None
            mains[p].zero_()
        reached.clear()
    for hook in hooks:
        hook.remove()


def optimizer_in_backward(run: TrainingRun) -> None:
    """Step on each parameter as soon as its gradient of the window's last micro-batch is there, and
    release it.
    """
    groups = run.optimizer.param_groups
    optimizers = {
        p: _optimizer_like(run.optimizer, group, p) for group in groups for p in group["params"]
    }
    last = False

    def step(p: torch.Tensor) -> None:
        if last:
            assert isinstance(p, torch.nn.Parameter)
            optimizers[p].step()
            p.grad = None

    hooks = [p.register_post_accumulate_grad_hook(step) for p in optimizers]
    for window in windows(run):
        total = window_count(run, window)
        for j, batch in enumerate(window):
            last = j == len(window) - 1
            part_of_window(run, batch, total).backward()
        for p in optimizers:
            if p.grad is not None:  # an earlier micro-batch reached it, the last one did not
                step(p)
    for hook in hooks:
        hook.remove()


def _optimizer_like(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], p: torch.nn.Parameter
) -> torch.optim.Optimizer:
    """Return an optimizer of the same type over one parameter, with the settings of its group."""
    takes = inspect.signature(type(optimizer)).parameters
    settings = {name: value for name, value in group.items() if name in takes and name != "params"}
    return type(optimizer)([p], **settings)


def _built_in(name: str, law: reset_laws.Law, reset: Reset, **about: Any) -> ResetMode:
    return ResetMode(name, MODES[name], law, reset, **about)


RESET_MODES: dict[str, ResetMode] = {
    mode.name: mode
    for mode in (
        _built_in("zero_", reset_laws.zeroed, zero_by_hand, benchmarked=True),
        _built_in("zero_grad", reset_laws.zeroed, zero_grad_false),
        _built_in(
            "zero_grad_foreach", reset_laws.zeroed_at_once, zero_grad_foreach, benchmarked=True
        ),
        _built_in(
            "set_to_none", reset_laws.released, zero_grad_none, releases=True, benchmarked=True
        ),
        _built_in("grad_none", reset_laws.released, none_by_hand, releases=True),
        _built_in(
            "flat_buffer",
            reset_laws.flat_buffer,
            zero_flat,
            preallocate=allocate_flat,
            benchmarked=True,
        ),
        _built_in("zero_before_forward", reset_laws.zeroed, zero_by_hand),
        _built_in("zero_between", reset_laws.zeroed, zero_by_hand),
        ResetMode(
            "foreach_zero", after_step(foreach_zero), reset_laws.zeroed_at_once, foreach_zero
        ),
        ResetMode("main_gradients", main_gradients, reset_laws.main_gradients),
        ResetMode(
            "optimizer_in_backward",
            optimizer_in_backward,
            reset_laws.stepped_in_backward,
            steps=False,
        ),
    )
}
"""Every reset mode by name, those included that are only measured."""

BENCHMARKED: tuple[ResetMode, ...] = tuple(
    mode for mode in RESET_MODES.values() if mode.benchmarked
)
"""The reset modes that the benchmarks time."""
