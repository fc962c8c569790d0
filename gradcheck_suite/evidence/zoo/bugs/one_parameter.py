"""One parameter: the gradient of one of several parameters is wrong, or some of its elements are."""

from __future__ import annotations

import torch

from gradcheck_suite.evidence.zoo.bug import Bug
from gradcheck_suite.evidence.zoo.loops import (
    Gradients,
    normal_rows,
    seeded,
    train_with_gradients,
    train_with_the_gradients_before,
)
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.schema.contract import Problem, TrainingRun

Parameters = list[torch.nn.Parameter]


def _last(gradients: Gradients, parameters: Parameters) -> torch.Tensor:
    """Return the gradient of the last of several parameters; an empty tensor if there are not several."""
    return gradients.get(parameters[-1], torch.empty(0)) if len(parameters) > 1 else torch.empty(0)


def last_parameter_doubled(run: TrainingRun) -> None:
    """Count the last parameter under two names, as a tied weight is."""
    train_with_gradients(run, lambda gradients, parameters: _last(gradients, parameters).mul_(2))  # type: ignore


LAST_PARAMETER_DOUBLED = Bug(
    name="last-parameter-doubled",
    mechanism="A parameter with two names is reduced once per name: its gradient is twice as large.",
    needs="2 parameters",
    loop=last_parameter_doubled,
    wanted=frozenset({"gradient/wrong-scale"}),
    says=("alone",),
)


def last_parameter_reversed(run: TrainingRun) -> None:
    """Flip the sign of the last parameter's gradient, as a gradient reversal in the wrong place does."""
    train_with_gradients(run, lambda gradients, parameters: _last(gradients, parameters).neg_())  # type: ignore


LAST_PARAMETER_REVERSED = Bug(
    name="last-parameter-reversed",
    mechanism="One parameter's gradient has the wrong sign.",
    needs="2 parameters",
    loop=last_parameter_reversed,
    wanted=frozenset({"gradient/wrong-scale"}),
    says=("sign", "-1 times"),
)


def last_parameter_zero(run: TrainingRun) -> None:
    """Zero the last parameter's gradient."""
    train_with_gradients(run, lambda gradients, parameters: _last(gradients, parameters).zero_())  # type: ignore


LAST_PARAMETER_ZERO = Bug(
    name="last-parameter-zero",
    mechanism="One parameter's gradient is cleared between backward and step.",
    needs="2 parameters",
    loop=last_parameter_zero,
    wanted=frozenset({"gradient/no-gradient"}),
    says=("alone",),
)


def last_parameter_stale(run: TrainingRun) -> None:
    """Keep the last parameter's gradient from the window before."""
    *others, last = [p for p in run.model.parameters() if p.requires_grad]

    def choose(own: Gradients, before: Gradients | None) -> Gradients:
        return {**own, last: before.get(last, torch.zeros_like(last))} if others and before else own

    train_with_the_gradients_before(run, choose)


LAST_PARAMETER_STALE = Bug(
    name="last-parameter-stale",
    mechanism="A bucket of gradients is not waited for: its parameter has the gradient of the step before.",
    needs="2 parameters, and 2 windows",
    loop=last_parameter_stale,
    wanted=frozenset({"gradient/delayed-window", "gradient/other-window", "gradient/delayed-window or other-window"}),
    says=("alone",),
)


def last_parameter_of_the_last_micro_batch(run: TrainingRun) -> None:
    """Assign the last parameter's gradient where it should be added."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        parameters = [p for p in run.model.parameters() if p.requires_grad]
        for batch in window:
            if len(parameters) > 1:
                parameters[-1].grad = None
            part_of_window(run, batch, total).backward()
        run.optimizer.step()


LAST_PARAMETER_OF_THE_LAST_MICRO_BATCH = Bug(
    name="last-parameter-overwritten",
    mechanism="A fused kernel writes one parameter's gradient in place of adding to it.",
    needs="2 parameters, and 2 micro-batches in a window",
    loop=last_parameter_of_the_last_micro_batch,
    wanted=frozenset(
        {
            "gradient/reset-inside-window",
            "gradient/reset-inside-window or dropped-micro-batch",
            "gradient/no-gradient or dropped-micro-batch",
            "none-pattern/missing-gradient",
        }
    ),
)


def _matrices(gradients: Gradients) -> list[torch.Tensor]:
    return [g for g in gradients.values() if g.ndim == 2 and min(g.shape) > 1]


def rows_permuted(run: TrainingRun) -> None:
    """Hand every matrix's gradient over with its rows in another order."""
    train_with_gradients(run, lambda gradients, parameters: [g.copy_(g.roll(1, 0)) for g in _matrices(gradients)])  # type: ignore


ROWS_PERMUTED = Bug(
    name="rows-permuted",
    mechanism="Shards are gathered in another order than they were scattered in: rows change places.",
    needs="a matrix of several rows",
    loop=rows_permuted,
    wanted=frozenset({"gradient/permuted-gradient"}),
)


def square_transposed(run: TrainingRun) -> None:
    """Transpose the gradients of square matrices."""
    train_with_gradients(
        run,
        lambda gradients, parameters: [  # type: ignore
            g.copy_(g.T.clone()) for g in _matrices(gradients) if g.shape[0] == g.shape[1]
        ],
    )


SQUARE_TRANSPOSED = Bug(
    name="square-transposed",
    mechanism="A square weight's gradient is written transposed: no shape tells.",
    needs="a square matrix",
    loop=square_transposed,
    wanted=frozenset({"gradient/permuted-gradient"}),
    says=("transpose",),
)


def first_row_only(run: TrainingRun) -> None:
    """Keep the first row of every matrix's gradient."""
    train_with_gradients(run, lambda gradients, parameters: [g[1:].zero_() for g in _matrices(gradients)])  # type: ignore


FIRST_ROW_ONLY = Bug(
    name="first-row-only",
    mechanism="Only the first shard of a matrix is gathered; the other rows are 0.",
    needs="a matrix of several rows",
    loop=first_row_only,
    wanted=frozenset({"gradient/partial-gradient"}),
)


def one_element_doubled(run: TrainingRun) -> None:
    """Double the last element of every gradient that has several."""
    train_with_gradients(
        run,
        lambda gradients, parameters: [g.view(-1)[-1:].mul_(2) for g in map(_flat, gradients.values())],  # type: ignore
    )


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.flatten()[:0] if gradient.numel() < 2 or not gradient.is_contiguous() else gradient


ONE_ELEMENT_DOUBLED = Bug(
    name="one-element-doubled",
    mechanism="Two shards overlap in one element, which is added twice.",
    needs="a parameter of several elements",
    loop=one_element_doubled,
    wanted=frozenset({"gradient/partial-gradient"}),
)


class TwoHeads(torch.nn.Module):
    """Two linear heads of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(4, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n, 3)."""
        out: torch.Tensor = self.left(x).square() + self.right(x).tanh()
        return out


def heads_swapped(run: TrainingRun) -> None:
    """Write each head's gradient to the other."""

    def swap(gradients: Gradients, parameters: Parameters) -> None:
        if len(parameters) == 2 and parameters[0].shape == parameters[1].shape:
            gradients[parameters[0]], gradients[parameters[1]] = gradients[parameters[1]], gradients[parameters[0]]

    train_with_gradients(run, swap)


HEADS_SWAPPED = Bug(
    name="heads-swapped",
    mechanism="Parameters are matched by position, in another order than the model's: two of one shape are swapped.",
    needs="2 parameters of one shape",
    loop=heads_swapped,
    wanted=frozenset({"gradient/swapped-gradients"}),
    problem=Problem(seeded(TwoHeads), normal_rows(4), lambda model, batch: (model(batch) - 1).square().mean()),
)
