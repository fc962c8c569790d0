"""Accumulators: a contribution to the sum is lost, repeated, rescaled or rounded away."""

from __future__ import annotations

from typing import Any

import torch

from gradcheck_suite.evidence.zoo.bug import Bug
from gradcheck_suite.evidence.zoo.loops import train_with_sums
from gradcheck_suite.loops.windows import backward_window, part_of_window, window_count, windows
from gradcheck_suite.schema.contract import TrainingRun


def rescaled_accumulator(run: TrainingRun) -> None:
    """Divide the accumulated gradient by `accumulation_steps` after each backward."""
    for window in windows(run):
        run.optimizer.zero_grad()
        for batch in window:
            run.loss(run.model, batch).backward()
            for p in run.model.parameters():
                if p.grad is not None:
                    p.grad.div_(run.accumulation_steps)
        run.optimizer.step()


RESCALED_ACCUMULATOR = Bug(
    number=25,
    name="rescaled-accumulator",
    citations=("torchtitan#1733", "Megatron-LM#3023"),
    mechanism="acc = (acc + g) / K each time: geometric weights.",
    needs="2 micro-batches in a window",
    loop=rescaled_accumulator,
    wanted=frozenset({"gradient/rescaled-accumulator", "gradient/wrong-scale"}),
)


def first_only(run: TrainingRun) -> None:
    """Take the gradient of a window from its first micro-batch, as with a flag that is never set again."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for j, batch in enumerate(window):
            part = part_of_window(run, batch, total)
            if j == 0:
                part.backward()
        run.optimizer.step()


FIRST_ONLY = Bug(
    number=26,
    name="first-only",
    citations=("Megatron-LM#7186", "Primus#1046"),
    mechanism="A flag that marks a window's first micro-batch keeps the later ones out of the main gradient.",
    needs="2 micro-batches in a window",
    loop=first_only,
    wanted=frozenset({"gradient/first-only"}),
)


def last_only(run: TrainingRun) -> None:
    """Copy each gradient into the main one, in place of adding it."""
    train_with_sums(run, lambda j, total, gradient: gradient)


LAST_ONLY = Bug(
    number=26,
    name="last-only",
    citations=("open-instruct#1498",),
    mechanism="The main gradient is assigned where it should be added to.",
    needs="2 micro-batches in a window",
    loop=last_only,
    wanted=frozenset({"gradient/reset-inside-window"}),
)


def overwrites_in_mid_window(run: TrainingRun) -> None:
    """Keep sums in a buffer whose second entry is written, not added."""
    train_with_sums(run, lambda j, total, gradient: gradient if j == 1 or total is None else total + gradient)


OVERWRITES_IN_MID_WINDOW = Bug(
    number=27,
    name="overwrites-in-mid-window",
    citations=("DeepSpeed#6550",),
    mechanism="In mid-window the averaged gradient is copied over the running one: the sum before it is lost.",
    needs="2 micro-batches in a window",
    loop=overwrites_in_mid_window,
    wanted=frozenset({"gradient/dropped-micro-batch", "gradient/reset-inside-window"}),
)


def doubling(run: TrainingRun) -> None:
    """Add the whole accumulated gradient again before each backward."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            for p in run.model.parameters():
                if p.grad is not None:
                    p.grad.mul_(2)
            part_of_window(run, batch, total).backward()
        run.optimizer.step()


DOUBLING = Bug(
    number=28,
    name="doubling",
    citations=("Megatron-LM#6660",),
    mechanism="acc = 2 acc + g: the main gradient is added to the gradient that contains it already.",
    needs="2 micro-batches in a window",
    loop=doubling,
    wanted=frozenset({"gradient/rescaled-accumulator", "gradient/repeated-micro-batch"}),
)

UNROLLED = 4


def ignores_add_mode(run: TrainingRun) -> None:
    """Add up to four gradients; from the fifth on, overwrite in place of adding."""
    train_with_sums(run, lambda j, total, gradient: gradient if total is None or j >= UNROLLED else total + gradient)


IGNORES_ADD_MODE = Bug(
    number=31,
    name="ignores-add-mode",
    citations=("mxnet#18499", "mxnet#17989", "mxnet#16708"),
    mechanism="An operation's sum ignores the request to add from the fifth summand on.",
    needs="5 micro-batches in a window",
    loop=ignores_add_mode,
    wanted=frozenset({"gradient/dropped-micro-batch", "gradient/reset-inside-window"}),
    least_micro_batches=UNROLLED + 1,
)


def hook_accumulates_the_sum(run: TrainingRun) -> None:
    """Collect gradients in a post-accumulate hook, which sees the sum so far."""
    collected: dict[torch.Tensor, torch.Tensor] = {}

    def collect(p: torch.Tensor) -> None:
        assert p.grad is not None
        gradient = p.grad.to_dense()
        collected[p] = collected[p] + gradient if p in collected else gradient.clone()

    handles = [p.register_post_accumulate_grad_hook(collect) for p in run.model.parameters() if p.requires_grad]
    for window in windows(run):
        run.optimizer.zero_grad()
        collected.clear()
        backward_window(run, window)
        for p, gradient in collected.items():
            p.grad = gradient
        run.optimizer.step()
    for handle in handles:
        handle.remove()


HOOK_ACCUMULATES_THE_SUM = Bug(
    number=32,
    name="hook-accumulates-the-sum",
    citations=("pytorch#187268",),
    mechanism="A post-accumulate hook reads p.grad, the running sum, and adds it to a sum of its own.",
    needs="2 micro-batches in a window",
    loop=hook_accumulates_the_sum,
    wanted=frozenset({"gradient/running-loss", "gradient/repeated-micro-batch"}),
)


def running_loss(run: TrainingRun) -> None:
    """Add losses up and send the sum through backward at every micro-batch."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        running: Any = 0.0
        for batch in window:
            running = running + part_of_window(run, batch, total)
            running.backward(retain_graph=True)
        run.optimizer.step()


RUNNING_LOSS = Bug(
    number=33,
    name="running-loss",
    citations=("discuss.pytorch.org: backward of the total loss",),
    mechanism="`total += loss; total.backward(retain_graph=True)`: the first micro-batch counts K times.",
    needs="2 micro-batches in a window",
    loop=running_loss,
    wanted=frozenset({"gradient/running-loss", "gradient/repeated-micro-batch"}),
)


def _add_in_bfloat16(j: int, total: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
    rounded = gradient.to_dense().bfloat16()
    return rounded if total is None else total + rounded


def low_precision_accumulator(run: TrainingRun) -> None:
    """Accumulate in bfloat16 to save memory, and cast back for the step: in bfloat16, 256 + 1 is 256."""
    train_with_sums(run, _add_in_bfloat16)


LOW_PRECISION_ACCUMULATOR = Bug(
    number=44,
    name="low-precision-accumulator",
    citations=("DeepSpeed#2768",),
    mechanism="Gradients are added up in bfloat16: small contributions are rounded away.",
    needs="a gradient that bfloat16 does not hold exactly",
    loop=low_precision_accumulator,
    wanted=frozenset({"gradient/rounded-gradient", "gradient/rounded-weights"}),
)
