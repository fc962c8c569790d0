"""A known bug as a record, and the loops that several bugs are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradcheck_suite.core.contract import Batch, Loop, Problem, TrainingRun
from gradcheck_suite.loops.ranks import add_up_gradients
from gradcheck_suite.loops.reset_modes import backward_window, over_ranks, part_of_window, window_count, windows

# What a bug of the zoo is.


@dataclass(frozen=True)
class Bug:
    """A bug in a few lines: one that was reported in public, or one that was planted to tell similar faults apart.

    Attributes:
        name: of the mechanism, such as `"mean-of-means"`; unique.
        mechanism: what goes wrong, in one or two sentences.
        needs: what a case must have to show it.
        loop: the training loop that has the bug, or a sound loop where `problem` has it.
        wanted: the diagnoses that it may get, `kind/diagnosis`; several where a small window shows two faults alike.
        number: of its entry in the corpus, from 1; None if it is not in the corpus.
        citations: where it was reported, such as `"transformers#24725"`; empty if it was planted.
        problem: a model that shows the bug; None for the random ones. With a problem, only plans are drawn.
        assumes: what the loop rightly relies on, names from `ASSUMPTIONS`.
        least_micro_batches: fewest micro-batches of a case that shows the bug.
        says: what the explanation must contain, one of these texts; empty if the name suffices.
        ranks: number of ranks that it needs.
    """

    name: str
    mechanism: str
    needs: str
    loop: Loop
    wanted: frozenset[str]
    number: int | None = None
    citations: tuple[str, ...] = ()
    problem: Problem | None = None
    assumes: tuple[str, ...] = ()
    least_micro_batches: int = 1
    says: tuple[str, ...] = ()
    ranks: int = 1


bug_of_two_ranks = partial(Bug, ranks=2)
"""Return a bug that two ranks show; takes the other attributes of `Bug`."""


# What the loops and Problems of several bugs share: weighted losses, sums kept outside of `.grad`, seeded data.


def train_with_weights(run: TrainingRun, weight: Callable[[list[Batch], Batch], Any]) -> None:
    """Train with `weight(window, batch)` times the mean loss of every micro-batch; a sum stays as it is.

    Only the weight can be wrong: the loop resets, accumulates and steps as it should.
    """
    for window in windows(run):
        run.optimizer.zero_grad()
        for batch in window:
            loss = run.loss(run.model, batch)
            (loss * weight(window, batch) if run.reduction == "mean" else loss).backward()
        run.optimizer.step()


def train_with_sums(
    run: TrainingRun, add: Callable[[int, torch.Tensor | None, torch.Tensor], torch.Tensor], gradient: str = "grad"
) -> None:
    """Train with sums that are kept outside of `.grad`, which holds the gradient of one micro-batch at a time.

    Args:
        run: the training run.
        add: of a micro-batch's index in its window, the sum so far (None before the first) and the micro-batch's
            gradient: the new sum.
        gradient: the parameters' attribute that holds the gradient after a backward, `.grad` where there is none.
    """
    for window in windows(run):
        total = window_count(run, window)
        sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        for j, batch in enumerate(window):
            run.optimizer.zero_grad()
            part_of_window(run, batch, total).backward()
            for p in run.model.parameters():
                found = getattr(p, gradient, p.grad)
                if found is not None:
                    sums[p] = add(j, sums.get(p), found)
        for p, found in sums.items():
            p.grad = found.to(p.dtype)
        run.optimizer.step()


def dense(run: TrainingRun) -> list[torch.nn.Parameter]:
    """Return the parameters that have a gradient which is not sparse."""
    return [p for p in run.model.parameters() if p.grad is not None and not p.grad.is_sparse]


def seeded(make: Callable[[], torch.nn.Module]) -> Callable[[int], torch.nn.Module]:
    """Return the `model` of a Problem: a fresh module whose weights are drawn from the seed."""

    def model(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return make()

    return model


def normal_rows(features: int) -> Callable[[int, int], Batch]:
    """Return the `batch` of a Problem: (items, features) float64, drawn from the standard normal distribution."""
    return lambda items, seed: torch.randn(
        items, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


Gradients = dict[torch.nn.Parameter, torch.Tensor]


def window_gradients(run: TrainingRun, window: list[Batch]) -> Gradients:
    """Return the right gradient of a window, of the parameters that it reaches; `.grad` is None afterwards."""
    run.optimizer.zero_grad()
    backward_window(run, window)
    found = {p: p.grad.to_dense() for p in run.model.parameters() if p.grad is not None}
    run.optimizer.zero_grad()
    return found


def step_with(run: TrainingRun, gradients: Gradients) -> None:
    """Step with these gradients: zeros where a parameter has none."""
    for p in run.model.parameters():
        if p.requires_grad:
            p.grad = gradients[p].clone() if p in gradients else torch.zeros_like(p)
    run.optimizer.step()


def train_with_the_gradients_before(
    run: TrainingRun, choose: Callable[[Gradients, Gradients | None], Gradients]
) -> None:
    """Train with a choice between the right gradient of every window and that of the window before it.

    Args:
        run: the training run.
        choose: of a window's gradients and of those of the window before, None for the first: the gradients of the
            step.
    """
    before: Gradients | None = None
    for window in windows(run):
        gradients = window_gradients(run, window)
        step_with(run, choose(gradients, before))
        before = gradients


def train_with_gradients(run: TrainingRun, change: Callable[[Gradients, list[torch.nn.Parameter]], None]) -> None:
    """Train with the right gradient of every window, changed before the step.

    Args:
        run: the training run.
        change: changes the gradients in place, given them and the model's trainable parameters.
    """
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    for window in windows(run):
        gradients = window_gradients(run, window)
        change(gradients, parameters)
        step_with(run, gradients)


# What the bugs between ranks share: a loop that adds up over ranks, of which one part is wrong.


Share = Callable[[torch.Tensor, torch.Tensor], Any]
"""(this rank's count of the window, all ranks' count) -> what the summed loss is divided by, for a mean."""


def right_share(own: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return all ranks' count."""
    return total


def _own_count(run: TrainingRun, window: list[Batch]) -> torch.Tensor:
    """Return what this rank's micro-batches of a window count together."""
    return sum((run.count(batch) for batch in window), start=torch.zeros((), dtype=torch.float64))


def train_over_ranks(
    run: TrainingRun,
    share: Share = right_share,
    *,
    reduce: Callable[[TrainingRun], None] = add_up_gradients,
    factor: float = 1.0,
) -> None:
    """Train with one reduction over ranks per window.

    Args:
        run: the training run.
        share: what each rank divides its summed losses by.
        reduce: makes the ranks' gradients one, before the step.
        factor: of every loss.
    """
    for window in windows(run):
        run.optimizer.zero_grad()
        own = _own_count(run, window)
        divisor = share(own, over_ranks(run, own.clone()))
        for batch in window:
            (part_of_window(run, batch, divisor) * factor).backward()
        reduce(run)
        run.optimizer.step()


def fill_missing(run: TrainingRun) -> list[torch.Tensor]:
    """Return the gradients of all trainable parameters, zeros where there was none."""
    for p in run.model.parameters():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
    return [p.grad for p in run.model.parameters() if p.grad is not None]


def reduce_each(gradients: Iterable[torch.Tensor]) -> None:
    """Add up each gradient over ranks, in place."""
    for gradient in gradients:
        dist.all_reduce(gradient)
