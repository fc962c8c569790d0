"""Bugs of micro-batches: denominators, inputs of the loss, dropped and chosen micro-batches, buffers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from gradcheck_suite.core.contract import EQUAL_MICRO_BATCHES, Batch, Problem, TrainingRun
from gradcheck_suite.loops.reset_modes import MODES, backward_window, part_of_window, window_count, windows
from gradcheck_suite.studies.zoo.bug import (
    Bug,
    Gradients,
    normal_rows,
    seeded,
    step_with,
    train_with_gradients,
    train_with_sums,
    train_with_weights,
    window_gradients,
)

# Denominators: the gradient is divided by the wrong number, so items have the wrong weight.


def mean_of_means(run: TrainingRun) -> None:
    """Divide each mean by the number of micro-batches in the window."""
    train_with_weights(run, lambda window, batch: 1 / len(window))


MEAN_OF_MEANS = Bug(
    number=1,
    name="mean-of-means",
    citations=("transformers#24725", "transformers#34191", "torchtune#1875", "nanochat#59", "mlx-lm#1413"),
    mechanism="Each micro-batch's loss is a mean over its own targets, and the means are averaged.",
    needs="unequal counts in one window",
    loop=mean_of_means,
    wanted=frozenset({"gradient/mean-of-means"}),
)


def no_divide(run: TrainingRun) -> None:
    """Send each micro-batch's mean through backward as it is."""
    train_with_weights(run, lambda window, batch: 1)


NO_DIVIDE = Bug(
    number=2,
    name="no-divide",
    citations=("transformers#35438", "guided-diffusion#111", "LlamaFactory#7743", "Liger-Kernel#802"),
    mechanism="The division by the accumulation steps is left out; Adam hides it in the parameters.",
    needs="2 micro-batches in a window",
    loop=no_divide,
    wanted=frozenset({"gradient/wrong-scale"}),
    assumes=(EQUAL_MICRO_BATCHES,),
)


def double_divide(run: TrainingRun) -> None:
    """Normalize by the window's count, as a trainer does, and by the accumulation steps, as a library below it does."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            (part_of_window(run, batch, total) / run.accumulation_steps).backward()
        run.optimizer.step()


DOUBLE_DIVIDE = Bug(
    number=3,
    name="double-divide",
    citations=("accelerate#3533", "ms-swift#10116", "unsloth#3597"),
    mechanism="Two layers of the software both divide by the accumulation steps: the gradient is 1/K of its size.",
    needs="accumulation_steps of 2 or more",
    loop=double_divide,
    wanted=frozenset({"gradient/wrong-scale"}),
)


def _loss_with_keywords(run: TrainingRun, batch: Batch, **kwargs: Any) -> torch.Tensor:
    """Accept any keyword, and ignore the count among them."""
    return run.loss(run.model, batch)


def signature_sniff(run: TrainingRun) -> None:
    """Skip the division where the loss accepts keywords, trusting it to divide by the count that it is given."""
    takes_count = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(_loss_with_keywords).parameters.values())
    for window in windows(run):
        run.optimizer.zero_grad()
        items = sum(float(run.count(batch)) for batch in window)
        for batch in window:
            loss = _loss_with_keywords(run, batch, num_items_in_batch=items)
            (loss / len(window) if run.reduction == "mean" and not takes_count else loss).backward()
        run.optimizer.step()


SIGNATURE_SNIFF = Bug(
    number=4,
    name="signature-sniff",
    citations=("transformers#47688",),
    mechanism="A trainer skips its division because the model's forward accepts **kwargs; the model ignores the count.",
    needs="2 micro-batches in a window",
    loop=signature_sniff,
    wanted=frozenset({"gradient/wrong-scale"}),
    assumes=(EQUAL_MICRO_BATCHES,),
)


def wrong_window_count(run: TrainingRun) -> None:
    """Count the targets of a generation batch, which is one micro-batch longer than a window."""
    batches: list[Batch] = list(run.loader)
    seen = 0
    for window in windows(run):
        run.optimizer.zero_grad()
        first = seen % len(batches)
        counted = batches[first : first + len(window) + 1]
        seen += len(window)
        for batch in window:
            part_of_window(run, batch, window_count(run, counted)).backward()
        run.optimizer.step()


WRONG_WINDOW_COUNT = Bug(
    number=5,
    name="wrong-window-count",
    citations=("trl#6024",),
    mechanism="The token count covers another number of batches than are accumulated before the step.",
    needs="a mean, and 2 windows",
    loop=wrong_window_count,
    wanted=frozenset({"gradient/wrong-scale"}),
)

RANKS = 2


def rank_mean_of_means(run: TrainingRun) -> None:
    """Deal the window's micro-batches to two ranks; each divides by its own count, then the ranks are averaged."""
    for window in windows(run):
        run.optimizer.zero_grad()
        ranks = [window[r::RANKS] for r in range(RANKS) if window[r::RANKS]]
        for mine in ranks:
            count = window_count(run, mine)
            for batch in mine:
                part = part_of_window(run, batch, count)
                (part / len(ranks) if run.reduction == "mean" else part).backward()
        run.optimizer.step()


RANK_MEAN_OF_MEANS = Bug(
    number=6,
    name="rank-mean-of-means",
    citations=("transformers#34242", "transformers#34373", "transformers#39392"),
    mechanism="Every rank divides by its own number of targets, and data parallelism averages over the ranks.",
    needs="unequal counts on two ranks",
    loop=rank_mean_of_means,
    wanted=frozenset({"gradient/mean-of-means"}),
)


def rank_over_correct(run: TrainingRun) -> None:
    """Divide by the count over all ranks and leave data parallelism's mean over ranks in place."""
    train_with_weights(run, lambda window, batch: run.count(batch) / window_count(run, window) / RANKS)


RANK_OVER_CORRECT = Bug(
    number=7,
    name="rank-over-correct",
    citations=("transformers#37474", "transformers#40799"),
    mechanism="The count is gathered over all ranks, but the gradients are averaged over the ranks as well.",
    needs="a mean",
    loop=rank_over_correct,
    wanted=frozenset({"gradient/wrong-scale"}),
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


def aux_loss_unscaled(run: TrainingRun) -> None:
    """Weight the main loss by the micro-batch's share of the window, and add the auxiliary one as it is."""
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


AUX_LOSS_UNSCALED = Bug(
    number=8,
    name="aux-loss-unscaled",
    citations=("NeMo Automodel#3359",),
    mechanism="The main loss is normalized, the auxiliary one is not: K times too large on the router alone.",
    needs="2 micro-batches in a window",
    loop=aux_loss_unscaled,
    wanted=frozenset({"gradient/mean-of-means", "gradient/wrong-scale"}),
    problem=Problem(seeded(Router), normal_rows(6), lambda model, batch: sum(model.losses(batch))),  # type: ignore
)


def own_size_coefficient(run: TrainingRun) -> None:
    """Weight each micro-batch's sum by its share of the window's items, which the sum holds already."""
    train_with_weights(run, lambda window, batch: (run.count(batch) / window_count(run, window)) ** 2)


OWN_SIZE_COEFFICIENT = Bug(
    number=9,
    name="own-size-coefficient",
    citations=("open_clip#1211",),
    mechanism="A loss that is scaled for the whole window is multiplied by the micro-batch's own share of it.",
    needs="a mean, unequal counts",
    loop=own_size_coefficient,
    wanted=frozenset({"gradient/weighted-by-count"}),
)


def skipped_items_counted(run: TrainingRun) -> None:
    """Count at least one for every micro-batch, to be safe from a division by zero."""
    train_with_weights(
        run, lambda window, batch: run.count(batch) / sum(float(run.count(b).clamp(min=1)) for b in window)
    )


SKIPPED_ITEMS_COUNTED = Bug(
    number=10,
    name="skipped-items-counted",
    citations=("prime-rl#1961",),
    mechanism="A rollout batch without valid targets contributes no gradient and is counted all the same.",
    needs="a mean, and a micro-batch whose targets are all ignored",
    loop=skipped_items_counted,
    wanted=frozenset({"gradient/wrong-scale"}),
)


def sentences_for_tokens(run: TrainingRun) -> None:
    """Weight each micro-batch's mean over targets by its number of items."""
    train_with_weights(run, lambda window, batch: len(batch["x"]) / sum(len(b["x"]) for b in window))


SENTENCES_FOR_TOKENS = Bug(
    number=11,
    name="sentences-for-tokens",
    citations=("OpenNMT-py#526",),
    mechanism="The loss is a mean over tokens, and the micro-batches are weighted by sentences: the wrong unit.",
    needs="a mean whose count is not the number of items",
    loop=sentences_for_tokens,
    wanted=frozenset({"gradient/wrong-count"}),
)


# Losses computed from other inputs than the run hands over, and gradients that are worked on before the step.


def perturbed_parameters(run: TrainingRun) -> None:
    """Take the gradient at parameters that a first gradient has moved, as sharpness-aware minimisation does."""
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


PERTURBED_PARAMETERS = Bug(
    name="perturbed-parameters",
    mechanism="The gradient is taken at perturbed parameters, which are restored before the step.",
    needs="any case with a gradient that depends on the parameters",
    loop=perturbed_parameters,
    wanted=frozenset({"gradient/other-parameters"}),
)


def halved_again_in_every_epoch(run: TrainingRun) -> None:
    """Keep the batches and scale their inputs in place whenever an epoch begins, the first excepted."""
    batches = list(run.loader)
    for epoch in range(run.epochs):
        for batch in batches if epoch else ():
            if batch["x"].is_floating_point():
                batch["x"].div_(2)
        for first in range(0, len(batches), run.accumulation_steps):
            backward_window(run, batches[first : first + run.accumulation_steps])
            run.optimizer.step()
            run.optimizer.zero_grad()


NORMALIZED_IN_PLACE = Bug(
    name="normalised-in-place",
    mechanism="Cached batches are normalized in place, so a later epoch trains on what is normalized twice.",
    needs="2 epochs, and inputs that are no integers",
    loop=halved_again_in_every_epoch,
    wanted=frozenset({"gradient/changed-batch"}),
)


def nan_loss_resets(run: TrainingRun) -> None:
    """Reset the gradients where a loss is NaN, and go on with the next micro-batch."""
    for window in windows(run):
        total = window_count(run, window)
        for batch in window:
            if run.loss(run.model, batch).isnan():
                run.optimizer.zero_grad()
            else:
                part_of_window(run, batch, total).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


NAN_LOSS_RESETS = Bug(
    name="nan-loss-resets",
    mechanism="A micro-batch whose loss is NaN takes the window's earlier micro-batches with it.",
    needs="a micro-batch whose targets are all ignored, or a gradient of NaN",
    loop=nan_loss_resets,
    wanted=frozenset({"gradient/skipped-non-finite", "none-pattern/skipped-non-finite"}),
    least_micro_batches=2,
)


def centred_gradient(run: TrainingRun) -> None:
    """Subtract each gradient's mean, which belongs into the optimizer's step."""
    train_with_gradients(run, lambda gradients, parameters: [g.sub_(g.mean()) for g in gradients.values()])  # type: ignore


CENTRED_GRADIENT = Bug(
    name="centred-gradient",
    mechanism="Gradient centralisation is applied to `.grad` itself.",
    needs="2 elements in a parameter",
    loop=centred_gradient,
    wanted=frozenset({"gradient/projected-gradient"}),
)


def flat_buffer_in_another_order(run: TrainingRun) -> None:
    """Flatten the gradients in the order of their names, and take them apart in the model's order."""

    def reorder(gradients: Gradients, parameters: list[torch.nn.Parameter]) -> None:
        named = {name: gradients[p] for name, p in run.model.named_parameters() if p in gradients}
        if not named:
            return
        flat = torch.cat([named[name].reshape(-1) for name in sorted(named)])
        parts = flat.split([g.numel() for g in gradients.values()])
        gradients.update({p: part.reshape(p.shape) for p, part in zip(gradients, parts, strict=True)})

    train_with_gradients(run, reorder)


FLAT_BUFFER_IN_ANOTHER_ORDER = Bug(
    name="flat-buffer-in-another-order",
    mechanism="A flat gradient buffer is filled in one order of parameters and read in another.",
    needs="2 parameters whose names are not in the model's order",
    loop=flat_buffer_in_another_order,
    wanted=frozenset({"gradient/permuted-gradient", "gradient/swapped-gradients"}),
)


def moving_average(run: TrainingRun) -> None:
    """Hand the step a moving average of the gradients of all windows so far."""
    average: Gradients = {}

    def blend(gradients: Gradients, parameters: list[torch.nn.Parameter]) -> None:
        for p, g in gradients.items():
            average[p] = 0.9 * average.get(p, torch.zeros_like(g)) + 0.1 * g
            gradients[p] = average[p].clone()

    train_with_gradients(run, blend)


MOVING_AVERAGE = Bug(
    name="moving-average",
    mechanism="A moving average of the gradients is kept in `.grad`, and the optimizer has its own.",
    needs="any case",
    loop=moving_average,
    wanted=frozenset({"gradient/stale-window"}),
    says=("moving average",),
)


# Objectives that are no sum over items: no accumulation can equal the large batch, and no loop is to blame.


def _pairs(items: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(items, 3, generator=generator, dtype=torch.float64) for name in ("query", "answer")}


def _contrastive(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    scores = model(batch["query"]) @ model(batch["answer"]).T
    return torch.nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


IN_BATCH_NEGATIVES = Bug(
    number=41,
    name="in-batch-negatives",
    citations=("sentence-transformers#1822", "GradCache#7"),
    mechanism="The other items of a batch are each item's negatives: a smaller batch is another objective.",
    needs="2 micro-batches in a window",
    loop=MODES["set_to_none"],
    wanted=frozenset({"not-accumulable/not-accumulable"}),
    problem=Problem(seeded(lambda: torch.nn.Linear(3, 2)), _pairs, _contrastive),
)


class Normalized(torch.nn.Module):
    """A linear layer under batch normalization, which is skipped for a batch of one item."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n, 2)."""
        y: torch.Tensor = self.linear(x)
        return self.norm(y) if len(x) > 1 else y


BATCH_NORM = Bug(
    number=42,
    name="batch-norm",
    citations=("mmcv#1869", "yolov5#1630"),
    mechanism="Mean and variance are the micro-batch's own: a smaller batch is another function.",
    needs="2 micro-batches in a window",
    loop=MODES["set_to_none"],
    wanted=frozenset({"not-accumulable/not-accumulable"}),
    problem=Problem(seeded(Normalized), normal_rows(3), lambda model, batch: model(batch).pow(3).mean()),
)


# Missing gradients: a parameter that contributed has none, or lacks some micro-batches.


def autocast_cache(run: TrainingRun) -> None:
    """Simulate autocast's weight cache filled under no_grad: the first forward's matrices have no graph."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for j, batch in enumerate(window):
            before = {p: None if p.grad is None else p.grad.clone() for p in run.model.parameters()}
            part_of_window(run, batch, total).backward()
            if j == 0:
                for p, gradient in before.items():
                    p.grad = gradient if p.ndim > 1 else p.grad
        run.optimizer.step()
    torch.clear_autocast_cache()


AUTOCAST_CACHE = Bug(
    number=45,
    name="autocast-cache",
    citations=("pytorch#112583",),
    mechanism="autocast caches a weight's cast; one made under no_grad has no graph, and its weight no gradient.",
    needs="any case",
    loop=autocast_cache,
    wanted=frozenset(
        {
            "none-pattern/missing-gradient",
            "gradient/dropped-micro-batch",
            "gradient/reset-inside-window",
            "gradient/no-gradient",
        }
    ),
)


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


def missing_from_the_last(run: TrainingRun) -> None:
    """Synchronise after the last micro-batch alone: a parameter that it does not reach is cleared as unused."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window[:-1]:
            part_of_window(run, batch, total).backward()
        before = {p: p.grad for p in run.model.parameters()}
        for p in run.model.parameters():
            p.grad = None
        part_of_window(run, window[-1], total).backward()
        for p, gradient in before.items():
            if p.grad is not None and gradient is not None:
                p.grad = p.grad + gradient
        run.optimizer.step()


MISSING_FROM_THE_LAST = Bug(
    number=47,
    name="missing-from-the-last",
    citations=("pytorch#69031",),
    mechanism="Gradients are reduced after the last backward; a parameter that it does not reach is taken for unused.",
    needs="a parameter that only some micro-batches reach",
    loop=missing_from_the_last,
    wanted=frozenset({"none-pattern/missing-gradient"}),
    problem=Problem(seeded(Experts), normal_rows(2), lambda model, batch: (model(batch) - 1).square().mean()),
)


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


def last_k_times(run: TrainingRun) -> None:
    """Build one closure per micro-batch in a loop; each sees the loop variable's last value."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        parts = []
        for batch in window:
            parts.append(lambda: part_of_window(run, batch, total))  # noqa: B023
        for part in parts:
            part().backward()
        run.optimizer.step()


LAST_K_TIMES = Bug(
    name="last-k-times",
    citations=("python FAQ: lambdas defined in a loop",),
    mechanism="Closures that are made in a loop see the variable's last value: the last micro-batch is there K times.",
    needs="2 micro-batches in a window",
    loop=last_k_times,
    wanted=frozenset({"gradient/repeated-micro-batch"}),
)


def first_k_times(run: TrainingRun) -> None:
    """Call `next(iter(loader))` for every micro-batch of a window."""
    _train_on(run, lambda window: [window[0]] * len(window))


FIRST_K_TIMES = Bug(
    name="first-k-times",
    citations=("discuss.pytorch.org: next(iter(loader)) in a loop",),
    mechanism="A new iterator is made for every micro-batch, so each is the window's first.",
    needs="2 micro-batches in a window",
    loop=first_k_times,
    wanted=frozenset({"gradient/repeated-micro-batch"}),
)


def all_but_the_first(run: TrainingRun) -> None:
    """Peek at a window's first micro-batch, and train on the rest of the iterator."""
    _train_on(run, lambda window: window[1:])


ALL_BUT_THE_FIRST = Bug(
    name="all-but-the-first",
    mechanism="The first micro-batch is taken off the iterator to look at its shape, and is never trained on.",
    needs="any case",
    loop=all_but_the_first,
    wanted=frozenset({"gradient/dropped-micro-batch"}),
)


def all_but_the_last(run: TrainingRun) -> None:
    """Iterate over `range(K - 1)`."""
    _train_on(run, lambda window: window[:-1])


ALL_BUT_THE_LAST = Bug(
    name="all-but-the-last",
    mechanism="The window's loop ends one micro-batch early.",
    needs="any case",
    loop=all_but_the_last,
    wanted=frozenset({"gradient/dropped-micro-batch"}),
)


def equal_sizes_dropped(run: TrainingRun) -> None:
    """Keep a window's micro-batches in a dictionary by their number of items."""
    _train_on(run, lambda window: list({len(next(iter(batch.values()))): batch for batch in window}.values()))


EQUAL_SIZES_DROPPED = Bug(
    name="equal-sizes-dropped",
    mechanism="Micro-batches are cached under their shape, so of several with one shape the last survives.",
    needs="2 micro-batches of equal size in a window",
    loop=equal_sizes_dropped,
    wanted=frozenset({"gradient/dropped-micro-batch"}),
)


def every_second(run: TrainingRun) -> None:
    """Advance the iterator twice for each backward."""
    _train_on(run, lambda window: window[::2])


EVERY_SECOND = Bug(
    name="every-second",
    mechanism="`next` is called in the loop's condition and in its body: every second micro-batch is lost.",
    needs="2 micro-batches in a window",
    loop=every_second,
    wanted=frozenset({"gradient/dropped-micro-batch"}),
)


def single_items_skipped(run: TrainingRun) -> None:
    """Skip micro-batches of one item, which batch statistics could not stand."""
    _train_on(run, lambda window: [batch for batch in window if len(next(iter(batch.values()))) > 1])


SINGLE_ITEMS_SKIPPED = Bug(
    name="single-items-skipped",
    mechanism="Micro-batches of one item are skipped, and counted all the same.",
    needs="a micro-batch of one item",
    loop=single_items_skipped,
    wanted=frozenset({"gradient/dropped-micro-batch"}),
)


def middle_twice(run: TrainingRun) -> None:
    """Retry the window's second micro-batch after a failure that came after its backward."""
    _train_on(run, lambda window: [*window, window[1]] if len(window) > 1 else window)


MIDDLE_TWICE = Bug(
    name="middle-twice",
    mechanism="A micro-batch is tried again after an error, although its first backward had succeeded.",
    needs="2 micro-batches in a window",
    loop=middle_twice,
    wanted=frozenset({"gradient/repeated-micro-batch"}),
)


# Buffers of a backward: a custom `autograd.Function` overwrites a gradient that it has handed out before.


def _mean_square(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    out: torch.Tensor = model(batch)
    return out.square().mean()


class Reusing(torch.autograd.Function):
    """x @ weight, with one buffer for the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
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
        out: torch.Tensor = Reusing.apply(x, self.weight, self.buffer)
        return out


STOLEN_BUFFER = Bug(
    number=29,
    name="stolen-buffer",
    citations=("pytorch#181723", "pytorch#96693", "TransformerEngine#2937", "torchtitan#4584"),
    mechanism="Where .grad is None, autograd keeps the tensor that backward returns; if it is a buffer that the next "
    "backward writes, the sum is overwritten. The reset mode changes the gradient.",
    needs="2 micro-batches in a window",
    loop=MODES["set_to_none"],
    wanted=frozenset({"gradient/stolen-buffer"}),
    problem=Problem(lambda seed: Static(), normal_rows(2), _mean_square),
)


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
        self.weight = torch.nn.Parameter(torch.tensor([[0.5, -1.0], [2.0, 0.25]], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n, 2)."""
        once = FusedLinear.apply(x, self.weight)
        out: torch.Tensor = FusedLinear.apply(torch.tanh(once), self.weight)
        return out


def tied_weights_overwritten(run: TrainingRun) -> None:
    """Accumulate the gradient that the fused backward left in `main_grad`; without one, the ordinary gradient."""
    train_with_sums(run, lambda j, total, gradient: gradient if total is None else total + gradient, "main_grad")


TIED_WEIGHTS_OVERWRITTEN = Bug(
    number=30,
    name="tied-weights-overwritten",
    citations=("TransformerEngine#3437", "TransformerEngine#545"),
    mechanism="A fused backward writes the weight's gradient itself; a tied weight's second use overwrites the first.",
    needs="a weight that is used twice",
    loop=tied_weights_overwritten,
    wanted=frozenset({"gradient/not-linear"}),
    problem=Problem(lambda seed: Tied(), normal_rows(2), _mean_square),
)
