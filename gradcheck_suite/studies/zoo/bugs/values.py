"""Bugs of values: accumulators of low precision, edited gradients, one parameter alone."""

from __future__ import annotations

from typing import Any

import torch

from gradcheck_suite.core.contract import Problem, TrainingRun
from gradcheck_suite.loops.reset_modes import backward_window, part_of_window, window_count, windows
from gradcheck_suite.studies.zoo.bug import (
    Bug,
    Gradients,
    normal_rows,
    seeded,
    step_with,
    train_with_gradients,
    train_with_sums,
    train_with_the_gradients_before,
)

# Accumulators: a contribution to the sum is lost, repeated, rescaled or rounded away.


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


# Values: what is done to a gradient depends on its size, or does not depend on the loss at all.


LOSS_SCALE = 2.0**16


def _norm(gradients: Gradients) -> torch.Tensor:
    return torch.stack([g.norm().double() for g in gradients.values()]).norm()


def clip_norm_per_window(run: TrainingRun) -> None:
    """Clip the norm of the window's gradient at 0.5."""

    def clip(gradients: Gradients, parameters: list[torch.nn.Parameter]) -> None:
        factor = float((0.5 / _norm(gradients).clamp(min=1e-300)).clamp(max=1)) if gradients else 1.0
        for g in gradients.values():
            g.mul_(factor)

    train_with_gradients(run, clip)


CLIP_NORM_PER_WINDOW = Bug(
    name="clip-norm-per-window",
    mechanism="The window's gradient is clipped, on purpose or by a default.",
    needs="a norm above the threshold",
    loop=clip_norm_per_window,
    wanted=frozenset({"gradient/clipped"}),
)


def clip_value_per_window(run: TrainingRun) -> None:
    """Clamp the elements of the window's gradient."""
    train_with_gradients(run, lambda gradients, parameters: [g.clamp_(-0.05, 0.05) for g in gradients.values()])  # type: ignore


CLIP_VALUE_PER_WINDOW = Bug(
    name="clip-value-per-window",
    mechanism="Elements of the gradient are clamped.",
    needs="an element above the threshold",
    loop=clip_value_per_window,
    wanted=frozenset({"gradient/clipped"}),
)


def clip_each_micro_batch(run: TrainingRun) -> None:
    """Clip every micro-batch's own gradient before it is added, as in private training."""
    for window in windows(run):
        total = window_count(run, window)
        sums: Gradients = {}
        for batch in window:
            run.optimizer.zero_grad()
            part_of_window(run, batch, total).backward()
            own = {p: p.grad.to_dense() for p in run.model.parameters() if p.grad is not None}
            factor = float((0.2 / _norm(own).clamp(min=1e-300)).clamp(max=1)) if own else 1.0
            for p, g in own.items():
                sums[p] = sums.get(p, torch.zeros_like(p)) + factor * g
        step_with(run, sums)


CLIP_EACH_MICRO_BATCH = Bug(
    name="clip-each-micro-batch",
    mechanism="Each micro-batch's gradient is clipped before it is added.",
    needs="a norm above the threshold",
    loop=clip_each_micro_batch,
    wanted=frozenset({"gradient/clipped"}),
)


def normalized_gradient(run: TrainingRun) -> None:
    """Divide the gradient by its norm."""

    def normalize(gradients: Gradients, parameters: list[torch.nn.Parameter]) -> None:
        size = _norm(gradients) if gradients else torch.zeros(())
        for g in gradients.values():
            g.div_(float(size) or 1.0)

    train_with_gradients(run, normalize)


NORMALIZED_GRADIENT = Bug(
    name="normalised-gradient",
    mechanism="The gradient is divided by its norm.",
    needs="any case",
    loop=normalized_gradient,
    wanted=frozenset({"gradient/normalised"}),
)


def signs_only(run: TrainingRun) -> None:
    """Replace the gradient by its sign."""
    train_with_gradients(run, lambda gradients, parameters: [g.sign_() for g in gradients.values()])  # type: ignore


SIGNS_ONLY = Bug(
    name="signs-only",
    mechanism="The gradient is compressed to its signs.",
    needs="any case",
    loop=signs_only,
    wanted=frozenset({"gradient/normalised"}),
)


def penalty_in_the_gradient(run: TrainingRun) -> None:
    """Add the gradient of a penalty on the parameters, which the objective does not have."""

    def add(gradients: Gradients, parameters: list[torch.nn.Parameter]) -> None:
        for p, g in gradients.items():
            g.add_(p.detach(), alpha=0.01)

    train_with_gradients(run, add)


PENALTY_IN_THE_GRADIENT = Bug(
    name="penalty-in-the-gradient",
    mechanism="Weight decay is added to the gradient, and the optimizer has its own.",
    needs="any case",
    loop=penalty_in_the_gradient,
    wanted=frozenset({"gradient/added-term"}),
    says=("decay",),
)


def noise_in_the_gradient(run: TrainingRun) -> None:
    """Add noise of a fixed size to the gradient."""
    train_with_gradients(
        run,
        lambda gradients, parameters: [g.add_(1e-3 * torch.randn_like(g)) for g in gradients.values()],  # type: ignore
    )


NOISE_IN_THE_GRADIENT = Bug(
    name="noise-in-the-gradient",
    mechanism="Noise is added to the gradient.",
    needs="any case",
    loop=noise_in_the_gradient,
    wanted=frozenset({"gradient/added-term"}),
)


def small_elements_dropped(run: TrainingRun) -> None:
    """Send only the elements above a threshold."""

    def drop(gradients: Gradients, parameters: list[torch.nn.Parameter]) -> None:
        for g in gradients.values():
            g[g.abs() < 0.1] = 0

    train_with_gradients(run, drop)


SMALL_ELEMENTS_DROPPED = Bug(
    name="small-elements-dropped",
    mechanism="Small elements of the gradient are not communicated.",
    needs="an element below the threshold",
    loop=small_elements_dropped,
    wanted=frozenset({"gradient/flushed-to-zero"}),
)


def never_unscaled(run: TrainingRun) -> None:
    """Scale the loss, and never divide the gradient."""
    train_with_gradients(run, lambda gradients, parameters: [g.mul_(LOSS_SCALE) for g in gradients.values()])  # type: ignore


NEVER_UNSCALED = Bug(
    name="never-unscaled",
    citations=("discuss.pytorch.org: scaler.scale(loss).backward() and optimizer.step()",),
    mechanism="The loss is scaled, and `optimizer.step()` is called in place of `scaler.step(optimizer)`.",
    needs="any case",
    loop=never_unscaled,
    wanted=frozenset({"gradient/wrong-scale"}),
    says=("loss scale",),
)


def unscaled_twice(run: TrainingRun) -> None:
    """Divide by the loss scale twice."""
    train_with_gradients(run, lambda gradients, parameters: [g.div_(LOSS_SCALE) for g in gradients.values()])  # type: ignore


UNSCALED_TWICE = Bug(
    name="unscaled-twice",
    mechanism="The gradient is unscaled by hand and by the scaler.",
    needs="any case",
    loop=unscaled_twice,
    wanted=frozenset({"gradient/wrong-scale"}),
    says=("loss scale",),
)


# One parameter: the gradient of one of several parameters is wrong, or some of its elements are.


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
