"""A known bug: a faulty loop with a decorator that says what shows it, and what several such loops
are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradcheck_suite.core.contract import Batch, Loop, Problem, TrainingRun
from gradcheck_suite.loops.ranks import add_up_gradients
from gradcheck_suite.loops.reset_modes import (
    backward_window,
    over_ranks,
    part_of_window,
    window_count,
    windows,
)


@dataclass(frozen=True)
class Bug:
    """A bug in a few lines: one that was reported in public, or one that was planted to tell
    similar faults apart.

    Attributes:
        name: of the mechanism, such as `"mean-of-means"`; unique.
        mechanism: what goes wrong, in one or two sentences.
        needs: what a case must have to show it.
        loop: the training loop that has the bug, or a sound loop where `problem` has it.
        wanted: the diagnoses that it may get, `kind/diagnosis`; several where a small window shows
            two faults alike.
        number: of its entry in the corpus, from 1; None if it is not in the corpus.
        citations: where it was reported, such as `"transformers#24725"`; empty if it was planted.
        problem: a model that shows the bug; None for the random ones. With a problem, only plans
            are drawn.
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


DECLARED: list[Bug] = []
"""The bugs of the modules that were imported so far, in the order of their definitions."""
_REPORTS: dict[Loop, dict[str, Any]] = {}


def bug(wanted: str, *, needs: str, **others: Any) -> Callable[[Loop], Loop]:
    """Return a decorator that declares a loop to be a known bug: its name is the bug's, its
    docstring the mechanism.

    Args:
        wanted: the diagnoses that it may get, separated by commas.
        needs: what a case must have to show it.
        others: further attributes of `Bug`.
    """

    def declare(loop: Loop) -> Loop:
        name, mechanism = loop.__name__.replace("_", "-"), " ".join((loop.__doc__ or "").split())
        report = _REPORTS.get(loop, {})
        DECLARED.append(
            Bug(name, mechanism, needs, loop, frozenset(wanted.split(", ")), **report, **others)
        )
        return loop

    return declare


def reported(where: str, number: int | None = None) -> Callable[[Loop], Loop]:
    """Return a decorator, to be written below `bug`, that says where a bug was reported.

    Args:
        where: the citations, separated by commas.
        number: of its entry in the corpus.
    """

    def note(loop: Loop) -> Loop:
        _REPORTS[loop] = {"citations": tuple(where.split(", ")), "number": number}
        return loop

    return note


# Models and data of a Problem.


def seeded(make: Callable[[], torch.nn.Module]) -> Callable[[int], torch.nn.Module]:
    """Return the `model` of a Problem: a fresh module whose weights are drawn from the seed."""

    def model(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return make()

    return model


def normal_rows(features: int) -> Callable[[int, int], Batch]:
    """Return the `batch` of a Problem: (items, features) float64, drawn from the standard normal
    distribution.
    """
    return lambda items, seed: torch.randn(
        items, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


# Sound parts of a loop.


ByParameter = dict[torch.nn.Parameter, torch.Tensor]


def window_losses(run: TrainingRun, window: list[Batch]) -> Iterator[torch.Tensor]:
    """Yield each micro-batch's part of the window's loss, weighted as it should be."""
    total = window_count(run, window)
    for batch in window:
        yield part_of_window(run, batch, total)


def epoch_windows(run: TrainingRun) -> list[list[Batch]]:
    """Return the windows of one epoch, the last one possibly shorter."""
    batches, k = list(run.loader), run.accumulation_steps
    return [batches[first : first + k] for first in range(0, len(batches), k)]


def train_soundly(run: TrainingRun) -> None:
    """Reset, accumulate and step as it should be."""
    for window in windows(run):
        run.optimizer.zero_grad()
        backward_window(run, window)
        run.optimizer.step()


def gradients_of(run: TrainingRun) -> ByParameter:
    """Return the gradients that there are at this moment, by parameter."""
    return {p: p.grad for p in run.model.parameters() if p.grad is not None}


def window_gradients(run: TrainingRun, window: list[Batch]) -> ByParameter:
    """Return the right gradient of a window, of the parameters that it reaches.

    `.grad` is None afterwards.
    """
    run.optimizer.zero_grad()
    backward_window(run, window)
    found = {p: g.to_dense() for p, g in gradients_of(run).items()}
    run.optimizer.zero_grad()
    return found


def step_with(run: TrainingRun, gradients: ByParameter) -> None:
    """Step with these gradients: zeros where a parameter has none."""
    for p in run.model.parameters():
        if p.requires_grad:
            p.grad = gradients[p].clone() if p in gradients else torch.zeros_like(p)
    run.optimizer.step()


# Loops of which one part is wrong: the weights, the sum, the gradient before the step, the
# reduction over ranks.


def train_with_weights(run: TrainingRun, weight: Callable[[list[Batch], Batch], Any]) -> None:
    """Train with `weight(window, batch)` times the mean loss of every micro-batch.

    A sum stays as it is.
    """
    for window in windows(run):
        run.optimizer.zero_grad()
        for batch in window:
            loss = run.loss(run.model, batch)
            (loss * weight(window, batch) if run.reduction == "mean" else loss).backward()
        run.optimizer.step()


def train_with_sums(
    run: TrainingRun,
    add: Callable[[int, torch.Tensor | None, torch.Tensor], torch.Tensor],
    gradient: str = "grad",
) -> None:
    """Train with sums that are kept outside of `.grad`, which holds the gradient of one micro-batch
    at a time.

    Args:
        run: the training run.
        add: of a micro-batch's index in its window, the sum so far (None before the first) and the
            micro-batch's gradient: the new sum.
        gradient: the parameters' attribute that holds the gradient after a backward, `.grad` where
            there is none.
    """
    for window in windows(run):
        sums: ByParameter = {}
        for j, loss in enumerate(window_losses(run, window)):
            run.optimizer.zero_grad()
            loss.backward()
            for p in run.model.parameters():
                found = getattr(p, gradient, p.grad)
                if found is not None:
                    sums[p] = add(j, sums.get(p), found)
        for p, found in sums.items():
            p.grad = found.to(p.dtype)
        run.optimizer.step()


def before_each_step(run: TrainingRun) -> Iterator[ByParameter]:
    """Yield the right gradients of every window to a loop whose body changes them.

    The step then takes them.
    """
    for window in windows(run):
        gradients = window_gradients(run, window)
        yield gradients
        step_with(run, gradients)


Share = Callable[[torch.Tensor, torch.Tensor], Any]
"""(this rank's count of the window, all ranks' count) -> what the summed loss is divided by, for a mean."""


def train_over_ranks(
    run: TrainingRun,
    share: Share = lambda own, total: total,
    *,
    reduce: Callable[[TrainingRun], None] = add_up_gradients,
    factor: float = 1.0,
) -> None:
    """Train with one reduction over ranks per window.

    Args:
        run: the training run.
        share: what each rank divides its summed losses by, rightly all ranks' count.
        reduce: makes the ranks' gradients one, before the step.
        factor: of every loss.
    """
    for window in windows(run):
        run.optimizer.zero_grad()
        own = sum(
            (run.count(batch) for batch in window), start=torch.zeros((), dtype=torch.float64)
        )
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
    return list(gradients_of(run).values())


def reduce_each(gradients: Iterable[torch.Tensor]) -> None:
    """Add up each gradient over ranks, in place."""
    for gradient in gradients:
        dist.all_reduce(gradient)
