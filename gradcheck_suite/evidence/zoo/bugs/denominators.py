"""Denominators: the gradient is divided by the wrong number, so items have the wrong weight."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from gradcheck_suite.evidence.zoo.bug import Bug
from gradcheck_suite.evidence.zoo.loops import normal_rows, seeded, train_with_weights
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import EQUAL_MICRO_BATCHES, Batch, Problem, TrainingRun


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
