"""Further ways of keeping gradients, for what they cost: the ledger measures them beside the reset modes.

`foreach_zero` and `main_gradients` are sound under the loop contract. `optimizer_in_backward` is not a subject of it:
it never calls `run.optimizer.step()`, so there is no moment at which its gradients could be looked at together.
"""

from __future__ import annotations

import inspect

import torch

from gradcheck_suite.loops.windows import backward_window, part_of_window, window_count, windows
from gradcheck_suite.schema.contract import Loop, TrainingRun


def foreach_zero(run: TrainingRun) -> None:
    """Zero all dense gradients in one call to `torch._foreach_zero_`, after each step."""
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
        for gradient in gradients:
            gradient.detach_()
        dense = [gradient for gradient in gradients if not gradient.is_sparse]
        if dense:
            torch._foreach_zero_(dense)
        for gradient in gradients:
            if gradient.is_sparse:
                gradient.zero_()


def main_gradients(run: TrainingRun) -> None:
    """Keep each sum in float32 or wider, round it to the parameter's dtype for the step, then zero it."""
    trainable = [p for p in run.model.parameters() if p.requires_grad]
    mains = {p: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in trainable}
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
    """Step on each parameter as soon as its gradient of the window's last micro-batch is there, and release it."""
    optimizers = {p: _optimizer_like(run.optimizer, p) for group in run.optimizer.param_groups for p in group["params"]}
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
            if p.grad is not None:  # reached by an earlier micro-batch, but not by the last
                step(p)
    for hook in hooks:
        hook.remove()


def _optimizer_like(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter) -> torch.optim.Optimizer:
    """Return an optimizer of the same kind and settings over one parameter."""
    takes = inspect.signature(type(optimizer)).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in takes}
    return type(optimizer)([p], **settings)


COSTS: dict[str, Loop] = {"foreach_zero": foreach_zero, "main_gradients": main_gradients}
"""Sound under the loop contract."""
MEASURED: dict[str, Loop] = {"optimizer_in_backward": optimizer_in_backward}
"""Outside the loop contract: measured, never verified."""
