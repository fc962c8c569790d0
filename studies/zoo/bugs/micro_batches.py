"""Bugs of micro-batches: denominators, inputs of the loss, dropped and chosen micro-batches, buffers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from gradcheck_suite.core.contract import EQUAL_MICRO_BATCHES, Batch, Problem, TrainingRun
from gradcheck_suite.loops.reset_modes import backward_window, part_of_window, window_count, windows
from studies.zoo.bug import (
    bug,
    epoch_windows,
    gradients_of,
    normal_rows,
    reported,
    seeded,
    step_with,
    train_soundly,
    train_with_sums,
    train_with_weights,
    window_gradients,
    window_losses,
)

# Denominators: the gradient is divided by the wrong number, so items have the wrong weight.


@bug("gradient/mean-of-means", needs="unequal counts in one window")
@reported(
    "transformers#24725, transformers#34191, torchtune#1875, nanochat#59, mlx-lm#1413", number=1
)
def mean_of_means(run: TrainingRun) -> None:
    """Each micro-batch's loss is a mean over its own targets, and the means are averaged."""
    train_with_weights(run, lambda window, batch: 1 / len(window))


@bug("gradient/wrong-scale", needs="2 micro-batches in a window", assumes=(EQUAL_MICRO_BATCHES,))
@reported("transformers#35438, guided-diffusion#111, LlamaFactory#7743, Liger-Kernel#802", number=2)
def no_divide(run: TrainingRun) -> None:
    """The division by the accumulation steps is left out; Adam hides it in the parameters."""
    train_with_weights(run, lambda window, batch: 1)


@bug("gradient/wrong-scale", needs="accumulation_steps of 2 or more")
@reported("accelerate#3533, ms-swift#10116, unsloth#3597", number=3)
def double_divide(run: TrainingRun) -> None:
    """Two layers of the software both divide by the accumulation steps: the gradient is 1/K of its size."""
    for window in windows(run):
        run.optimizer.zero_grad()
        for loss in window_losses(run, window):
            (loss / run.accumulation_steps).backward()
        run.optimizer.step()


def _loss_with_keywords(run: TrainingRun, batch: Batch, **kwargs: Any) -> torch.Tensor:
    """Accept any keyword, and ignore the count among them."""
    return run.loss(run.model, batch)


@bug("gradient/wrong-scale", needs="2 micro-batches in a window", assumes=(EQUAL_MICRO_BATCHES,))
@reported("transformers#47688", number=4)
def signature_sniff(run: TrainingRun) -> None:
    """A trainer skips its division because the model's forward accepts **kwargs; the model ignores the count."""
    takes_count = any(
        p.kind is p.VAR_KEYWORD for p in inspect.signature(_loss_with_keywords).parameters.values()
    )
    for window in windows(run):
        run.optimizer.zero_grad()
        items = sum(float(run.count(batch)) for batch in window)
        for batch in window:
            loss = _loss_with_keywords(run, batch, num_items_in_batch=items)
            (loss / len(window) if run.reduction == "mean" and not takes_count else loss).backward()
        run.optimizer.step()


@bug("gradient/wrong-scale", needs="a mean, and 2 windows")
@reported("trl#6024", number=5)
def wrong_window_count(run: TrainingRun) -> None:
    """The token count covers another number of batches than are accumulated before the step."""
    for _ in range(run.epochs):
        batches, k = list(run.loader), run.accumulation_steps
        for first in range(0, len(batches), k):
            run.optimizer.zero_grad()
            total = window_count(run, batches[first : first + k + 1])
            for batch in batches[first : first + k]:
                part_of_window(run, batch, total).backward()
            run.optimizer.step()


RANKS = 2


@bug("gradient/mean-of-means", needs="unequal counts on two ranks")
@reported("transformers#34242, transformers#34373, transformers#39392", number=6)
def rank_mean_of_means(run: TrainingRun) -> None:
    """Every rank divides by its own number of targets, and data parallelism averages over the ranks."""
    for window in windows(run):
        run.optimizer.zero_grad()
        # one process stands for all ranks, to which the window's micro-batches are dealt
        ranks = [window[r::RANKS] for r in range(RANKS) if window[r::RANKS]]
        for mine in ranks:
            for loss in window_losses(run, mine):
                (loss / len(ranks) if run.reduction == "mean" else loss).backward()
        run.optimizer.step()


@bug("gradient/wrong-scale", needs="a mean")
@reported("transformers#37474, transformers#40799", number=7)
def rank_over_correct(run: TrainingRun) -> None:
    """The count is gathered over all ranks, but the gradients are averaged over the ranks as well."""
    train_with_weights(
        run, lambda window, batch: run.count(batch) / window_count(run, window) / RANKS
    )


class Router(torch.nn.Module):
    """A linear model with a router of its own, which only the auxiliary loss trains."""

    def __init__(self) -> None:
        super().__init__()
        self.main = torch.nn.Linear(6, 1, bias=False)
        self.router = torch.nn.Linear(6, 1, bias=False)

    def losses(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the main and the auxiliary mean over the items."""
        return (self.main(x) - 1).square().mean(), self.router(x).square().mean()


ROUTED = Problem(seeded(Router), normal_rows(6), lambda model, batch: sum(model.losses(batch)))  # type: ignore


@bug(
    "gradient/mean-of-means, gradient/wrong-scale",
    needs="2 micro-batches in a window",
    problem=ROUTED,
)
@reported("NeMo Automodel#3359", number=8)
def aux_loss_unscaled(run: TrainingRun) -> None:
    """The main loss is normalized, the auxiliary one is not: K times too large on the router alone."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            if isinstance(run.model, Router):
                main, auxiliary = run.model.losses(batch)
                (main * run.count(batch) / total + auxiliary).backward()
            else:
                part_of_window(run, batch, total).backward()
        run.optimizer.step()


@bug("gradient/wrong-count", needs="a mean, unequal counts")
@reported("open_clip#1211", number=9)
def own_size_coefficient(run: TrainingRun) -> None:
    """A loss that is scaled for the whole window is multiplied by the micro-batch's own share of it."""
    train_with_weights(
        run, lambda window, batch: (run.count(batch) / window_count(run, window)) ** 2
    )


@bug("gradient/wrong-scale", needs="a mean, and a micro-batch whose targets are all ignored")
@reported("prime-rl#1961", number=10)
def skipped_items_counted(run: TrainingRun) -> None:
    """A rollout batch without valid targets contributes no gradient and is counted all the same."""
    # clamped to be safe from a division by zero
    train_with_weights(
        run,
        lambda window, batch: run.count(batch) / sum(float(run.count(b).clamp(1)) for b in window),
    )


@bug("gradient/wrong-count", needs="a mean whose count is not the number of items")
@reported("OpenNMT-py#526", number=11)
def sentences_for_tokens(run: TrainingRun) -> None:
    """The loss is a mean over tokens, and the micro-batches are weighted by sentences: the wrong unit."""
    train_with_weights(
        run, lambda window, batch: len(batch["x"]) / sum(len(b["x"]) for b in window)
    )


# Losses computed from other inputs than the run hands over.


@bug("gradient/other-parameters", needs="any case with a gradient that depends on the parameters")
def perturbed_parameters(run: TrainingRun) -> None:
    """The gradient is taken at perturbed parameters, which are restored before the step."""
    # as sharpness-aware minimisation does
    for window in windows(run):
        start = {p: p.detach().clone() for p in run.model.parameters()}
        ascent = window_gradients(run, window)
        with torch.no_grad():
            for p, g in ascent.items():
                p.add_(g, alpha=0.05)
        gradients = window_gradients(run, window)
        with torch.no_grad():
            for p, value in start.items():
                p.copy_(value)
        step_with(run, gradients)


@bug("gradient/changed-batch", needs="2 epochs, and inputs that are no integers")
def normalised_in_place(run: TrainingRun) -> None:
    """Cached batches are normalized in place, so a later epoch trains on what is normalized twice."""
    cached = epoch_windows(run)
    for epoch in range(run.epochs):
        for batch in chain.from_iterable(cached) if epoch else ():
            if batch["x"].is_floating_point():
                batch["x"].div_(2)
        for window in cached:
            backward_window(run, window)
            run.optimizer.step()
            run.optimizer.zero_grad()


@bug(
    "gradient/skipped-non-finite, none-pattern/skipped-non-finite",
    needs="a micro-batch whose targets are all ignored, or a gradient of NaN",
    least_micro_batches=2,
)
def nan_loss_resets(run: TrainingRun) -> None:
    """A micro-batch whose loss is NaN takes the window's earlier micro-batches with it."""
    for window in windows(run):
        total = window_count(run, window)
        for batch in window:
            if run.loss(run.model, batch).isnan():
                run.optimizer.zero_grad()
            else:
                part_of_window(run, batch, total).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


# Objectives that are no sum over items: no accumulation can equal the large batch, and no loop is to blame.


def _pairs(items: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(items, 3, generator=generator, dtype=torch.float64)
        for name in ("query", "answer")
    }


def _contrastive(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    scores = model(batch["query"]) @ model(batch["answer"]).T
    return torch.nn.functional.cross_entropy(
        scores, torch.arange(len(scores), device=scores.device)
    )


CONTRASTED = Problem(seeded(lambda: torch.nn.Linear(3, 2)), _pairs, _contrastive)


@bug("not-accumulable/not-accumulable", needs="2 micro-batches in a window", problem=CONTRASTED)
@reported("sentence-transformers#1822, GradCache#7", number=41)
def in_batch_negatives(run: TrainingRun) -> None:
    """The other items of a batch are each item's negatives: a smaller batch is another objective."""
    train_soundly(run)


class Normalized(torch.nn.Module):
    """A linear layer under batch normalization, which is skipped for a batch of one item."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n, 2)."""
        y = self.linear(x)
        return self.norm(y) if len(x) > 1 else y


NORMALIZED = Problem(
    seeded(Normalized), normal_rows(3), lambda model, batch: model(batch).pow(3).mean()
)


@bug("not-accumulable/not-accumulable", needs="2 micro-batches in a window", problem=NORMALIZED)
@reported("mmcv#1869, yolov5#1630", number=42)
def batch_norm(run: TrainingRun) -> None:
    """Mean and variance are the micro-batch's own: a smaller batch is another function."""
    train_soundly(run)


# Missing gradients: a parameter that contributed has none, or lacks some micro-batches.


@bug(
    "none-pattern/no-gradient, gradient/dropped-micro-batch, gradient/reset-inside-window,"
    " gradient/no-gradient",
    needs="any case",
)
@reported("pytorch#112583", number=45)
def autocast_cache(run: TrainingRun) -> None:
    """autocast caches a weight's cast; one made under no_grad has no graph, and its weight no gradient."""  # noqa: D403
    for window in windows(run):
        run.optimizer.zero_grad()
        for j, loss in enumerate(window_losses(run, window)):
            loss.backward()
            for p in run.model.parameters() if j == 0 else ():
                # no cast is made: of the first forward, the matrices' gradients are taken away
                p.grad = None if p.ndim > 1 else p.grad
        run.optimizer.step()


class Experts(torch.nn.Module):
    """Two experts; the sign of an item's first feature chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(2, 1, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n,)."""
        out = x.new_zeros(len(x))
        for index, expert in enumerate(self.experts):
            chosen = (x[:, 0] > 0) == bool(index)
            if chosen.any():
                out = out.masked_scatter(chosen, expert(x[chosen]))
        return out


OF_EXPERTS = Problem(
    seeded(Experts), normal_rows(2), lambda model, batch: (model(batch) - 1).square().mean()
)


@bug(
    "none-pattern/no-gradient",
    needs="a parameter that only some micro-batches reach",
    problem=OF_EXPERTS,
)
@reported("pytorch#69031", number=47)
def missing_from_the_last(run: TrainingRun) -> None:
    """Gradients are reduced after the last backward; a parameter that it does not reach is taken for unused."""
    for window in windows(run):
        run.optimizer.zero_grad()
        *others, last = window_losses(run, window)
        for loss in others:
            loss.backward()
        before = gradients_of(run)
        run.model.zero_grad()
        last.backward()
        for p, gradient in gradients_of(run).items():
            p.grad = gradient + before.get(p, 0)
        run.optimizer.step()


# Chosen micro-batches: some of a window's micro-batches are left out, others are there several times.


def _train_on(run: TrainingRun, chosen: Callable[[list[Batch]], list[Batch]]) -> None:
    """Train on some of each window's micro-batches; weights are those of the whole window."""
    for window in windows(run):
        run.optimizer.zero_grad(set_to_none=False)
        total = window_count(run, window)
        kept = chosen(window)
        for batch in kept:
            part_of_window(run, batch, total).backward()
        if not kept:
            (0 * part_of_window(run, window[0], total)).backward()
        run.optimizer.step()


def _size(batch: Batch) -> int:
    return len(next(iter(batch.values())))


@bug("gradient/repeated-micro-batch", needs="2 micro-batches in a window")
@reported("python FAQ: lambdas defined in a loop")
def last_k_times(run: TrainingRun) -> None:
    """Closures that are made in a loop see the variable's last value: the last micro-batch is there K times."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        parts = []
        for batch in window:
            parts.append(lambda: part_of_window(run, batch, total))  # noqa: B023
        for part in parts:
            part().backward()
        run.optimizer.step()


@bug("gradient/repeated-micro-batch", needs="2 micro-batches in a window")
@reported("discuss.pytorch.org: next(iter(loader)) in a loop")
def first_k_times(run: TrainingRun) -> None:
    """A new iterator is made for every micro-batch, so each is the window's first."""
    _train_on(run, lambda window: [window[0]] * len(window))


@bug("gradient/dropped-micro-batch", needs="any case")
def all_but_the_first(run: TrainingRun) -> None:
    """The first micro-batch is taken off the iterator to look at its shape, and is never trained on."""
    _train_on(run, lambda window: window[1:])


@bug("gradient/dropped-micro-batch", needs="any case")
def all_but_the_last(run: TrainingRun) -> None:
    """The window's loop ends one micro-batch early."""
    _train_on(run, lambda window: window[:-1])


@bug("gradient/dropped-micro-batch", needs="2 micro-batches of equal size in a window")
def equal_sizes_dropped(run: TrainingRun) -> None:
    """Micro-batches are cached under their shape, so of several with one shape the last survives."""
    _train_on(run, lambda window: list({_size(batch): batch for batch in window}.values()))


@bug("gradient/dropped-micro-batch", needs="2 micro-batches in a window")
def every_second(run: TrainingRun) -> None:
    """`next` is called in the loop's condition and in its body: every second micro-batch is lost."""
    _train_on(run, lambda window: window[::2])


@bug("gradient/dropped-micro-batch", needs="a micro-batch of one item")
def single_items_skipped(run: TrainingRun) -> None:
    """Micro-batches of one item are skipped, and counted all the same."""
    _train_on(run, lambda window: [batch for batch in window if _size(batch) > 1])


@bug("gradient/repeated-micro-batch", needs="2 micro-batches in a window")
def middle_twice(run: TrainingRun) -> None:
    """A micro-batch is tried again after an error, although its first backward had succeeded."""
    _train_on(run, lambda window: [*window, window[1]] if len(window) > 1 else window)


# Buffers of a backward: a custom `autograd.Function` overwrites a gradient that it has handed out before.


def _mean_square(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch).square().mean()


class Reusing(torch.autograd.Function):
    """x @ weight, with one buffer for the weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, buffer: torch.Tensor
    ) -> torch.Tensor:
        """Return (n,)."""
        ctx.save_for_backward(x)
        ctx.buffer = buffer
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Return a view of the buffer: where `.grad` is None, autograd keeps that very tensor."""
        (x,) = ctx.saved_tensors
        ctx.buffer.copy_(x.T @ grad)
        return None, ctx.buffer.detach(), None


class Static(torch.nn.Module):
    """One weight vector."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.buffer = torch.zeros(2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n,)."""
        self.buffer = self.buffer.to(self.weight.device, self.weight.dtype)
        return Reusing.apply(x, self.weight, self.buffer)


STATIC = Problem(lambda seed: Static(), normal_rows(2), _mean_square)


@bug("gradient/stolen-buffer", needs="2 micro-batches in a window", problem=STATIC)
@reported("pytorch#181723, pytorch#96693, TransformerEngine#2937, torchtitan#4584", number=29)
def stolen_buffer(run: TrainingRun) -> None:
    """Where .grad is None, autograd keeps the tensor that backward returns; if it is a buffer that the next backward
    writes, the sum is overwritten. The reset mode changes the gradient.
    """
    train_soundly(run)


class FusedLinear(torch.autograd.Function):
    """x @ weight, whose backward writes the weight's gradient into `weight.main_grad` itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.nn.Parameter) -> torch.Tensor:
        """Return (n, features)."""
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Assign where it should add: right as long as a weight is used once."""
        x, weight = ctx.saved_tensors
        ctx.weight.main_grad = x.T @ grad
        return grad @ weight.T, x.T @ grad


class Tied(torch.nn.Module):
    """One weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.tensor([[0.5, -1.0], [2.0, 0.25]], dtype=torch.float64)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n, 2)."""
        once = FusedLinear.apply(x, self.weight)
        return FusedLinear.apply(torch.tanh(once), self.weight)


TIED = Problem(lambda seed: Tied(), normal_rows(2), _mean_square)


@bug("gradient/not-linear", needs="a weight that is used twice", problem=TIED)
@reported("TransformerEngine#3437, TransformerEngine#545", number=30)
def tied_weights_overwritten(run: TrainingRun) -> None:
    """A fused backward writes the weight's gradient itself; a tied weight's second use overwrites the first."""
    train_with_sums(
        run, lambda j, total, gradient: gradient if total is None else total + gradient, "main_grad"
    )
