"""Bugs of values: accumulators of low precision, edited gradients, one parameter alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gradcheck_suite.core.contract import Problem, TrainingRun
from gradcheck_suite.loops.reset_modes import backward_window, windows
from studies.zoo.bug import (
    ByParameter,
    before_each_step,
    bug,
    gradients_of,
    normal_rows,
    reported,
    seeded,
    step_with,
    train_with_sums,
    window_gradients,
    window_losses,
)

# Accumulators: a contribution to the sum is lost, repeated, rescaled or rounded away.


@bug("gradient/rescaled-accumulator, gradient/wrong-scale", needs="2 micro-batches in a window")
@reported("torchtitan#1733, Megatron-LM#3023", number=25)
def rescaled_accumulator(run: TrainingRun) -> None:
    """acc = (acc + g) / K each time: geometric weights."""  # noqa: D403
    for window in windows(run):
        run.optimizer.zero_grad()
        for batch in window:
            run.loss(run.model, batch).backward()
            for g in gradients_of(run).values():
                g.div_(run.accumulation_steps)
        run.optimizer.step()


@bug("gradient/first-only", needs="2 micro-batches in a window")
@reported("Megatron-LM#7186, Primus#1046", number=26)
def first_only(run: TrainingRun) -> None:
    """A flag that marks a window's first micro-batch keeps the later ones out of the main gradient."""
    for window in windows(run):
        run.optimizer.zero_grad()
        for j, loss in enumerate(window_losses(run, window)):
            if j == 0:
                loss.backward()
        run.optimizer.step()


@bug("gradient/reset-inside-window", needs="2 micro-batches in a window")
@reported("open-instruct#1498", number=26)
def last_only(run: TrainingRun) -> None:
    """The main gradient is assigned where it should be added to."""
    train_with_sums(run, lambda j, total, gradient: gradient)


@bug(
    "gradient/dropped-micro-batch, gradient/reset-inside-window",
    needs="2 micro-batches in a window",
)
@reported("DeepSpeed#6550", number=27)
def overwrites_in_mid_window(run: TrainingRun) -> None:
    """In mid-window the averaged gradient is copied over the running one: the sum before it is
    lost.
    """
    train_with_sums(
        run, lambda j, total, gradient: gradient if j == 1 or total is None else total + gradient
    )


@bug(
    "gradient/rescaled-accumulator, gradient/repeated-micro-batch",
    needs="2 micro-batches in a window",
)
@reported("Megatron-LM#6660", number=28)
def doubling(run: TrainingRun) -> None:
    """acc = 2 acc + g: the main gradient is added to the gradient that contains it already."""  # noqa: D403
    for window in windows(run):
        run.optimizer.zero_grad()
        for loss in window_losses(run, window):
            for g in gradients_of(run).values():
                g.mul_(2)
            loss.backward()
        run.optimizer.step()


@bug(
    "gradient/dropped-micro-batch, gradient/reset-inside-window",
    needs="5 micro-batches in a window",
    least_micro_batches=5,
)
@reported("mxnet#18499, mxnet#17989, mxnet#16708", number=31)
def ignores_add_mode(run: TrainingRun) -> None:
    """An operation's sum ignores the request to add from the fifth summand on."""
    train_with_sums(
        run, lambda j, total, gradient: gradient if total is None or j >= 4 else total + gradient
    )


@bug("gradient/repeated-micro-batch", needs="2 micro-batches in a window")
@reported("pytorch#187268", number=32)
def hook_accumulates_the_sum(run: TrainingRun) -> None:
    """A post-accumulate hook reads p.grad, the running sum, and adds it to a sum of its own."""
    collected: dict[torch.Tensor, torch.Tensor] = {}

    def collect(p: torch.Tensor) -> None:
        assert p.grad is not None
        gradient = p.grad.to_dense()
        collected[p] = collected[p] + gradient if p in collected else gradient.clone()

    handles = [
        p.register_post_accumulate_grad_hook(collect)
        for p in run.model.parameters()
        if p.requires_grad
    ]
    for window in windows(run):
        run.optimizer.zero_grad()
        collected.clear()
        backward_window(run, window)
        for p, gradient in collected.items():
            p.grad = gradient
        run.optimizer.step()
    for handle in handles:
        handle.remove()


@bug("gradient/repeated-micro-batch", needs="2 micro-batches in a window")
@reported("discuss.pytorch.org: backward of the total loss", number=33)
def running_loss(run: TrainingRun) -> None:
    """`total += loss; total.backward(retain_graph=True)`: the first micro-batch counts K times."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total: Any = 0.0
        for loss in window_losses(run, window):
            total = total + loss
            total.backward(retain_graph=True)
        run.optimizer.step()


@bug("gradient/low-precision", needs="a gradient that bfloat16 does not hold exactly")
@reported("DeepSpeed#2768", number=44)
def low_precision_accumulator(run: TrainingRun) -> None:
    """Gradients are added up in bfloat16: small contributions are rounded away."""

    def add(j: int, total: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
        rounded = gradient.to_dense().bfloat16()
        return rounded if total is None else total + rounded

    train_with_sums(run, add)


# Values: what is done to a gradient depends on its size, or does not depend on the loss at all.


LOSS_SCALE = 2.0**16


def each_gradient(run: TrainingRun) -> Iterator[torch.Tensor]:
    """Yield the right gradient of every parameter to a loop whose body changes it.

    The step then takes it.
    """
    for gradients in before_each_step(run):
        yield from gradients.values()


def each_matrix(run: TrainingRun) -> Iterator[torch.Tensor]:
    """Yield those gradients that have several rows and columns."""
    return (g for g in each_gradient(run) if g.ndim == 2 and min(g.shape) > 1)


def _norm(gradients: ByParameter) -> float:
    """Return the norm of all gradients together."""
    norms = [g.norm().double() for g in gradients.values()]
    return float(torch.stack(norms).norm()) if norms else 0.0


def _clip(gradients: ByParameter, most: float) -> None:
    """Clip the norm of all gradients together, in place."""
    factor = min(most / max(_norm(gradients), 1e-300), 1.0)
    for g in gradients.values():
        g.mul_(factor)


@bug("gradient/clipped", needs="a norm above the threshold")
def clip_norm_per_window(run: TrainingRun) -> None:
    """The window's gradient is clipped, on purpose or by a default."""
    for gradients in before_each_step(run):
        _clip(gradients, 0.5)


@bug("gradient/clipped", needs="an element above the threshold")
def clip_value_per_window(run: TrainingRun) -> None:
    """Elements of the gradient are clamped."""
    for g in each_gradient(run):
        g.clamp_(-0.05, 0.05)


@bug("gradient/clipped", needs="a norm above the threshold")
def clip_each_micro_batch(run: TrainingRun) -> None:
    """Each micro-batch's gradient is clipped before it is added."""
    # as in private training
    for window in windows(run):
        sums: ByParameter = {}
        for loss in window_losses(run, window):
            run.optimizer.zero_grad()
            loss.backward()
            own = {p: g.to_dense() for p, g in gradients_of(run).items()}
            _clip(own, 0.2)
            for p, g in own.items():
                sums[p] = sums.get(p, torch.zeros_like(p)) + g
        step_with(run, sums)


@bug("gradient/normalised", needs="any case")
def normalised_gradient(run: TrainingRun) -> None:
    """The gradient is divided by its norm."""
    for gradients in before_each_step(run):
        norm = _norm(gradients)
        for g in gradients.values():
            g.div_(norm or 1.0)


@bug("gradient/normalised", needs="any case")
def signs_only(run: TrainingRun) -> None:
    """The gradient is compressed to its signs."""
    for g in each_gradient(run):
        g.sign_()


@bug("gradient/added-term", needs="any case", says=("decay",))
def penalty_in_the_gradient(run: TrainingRun) -> None:
    """Weight decay is added to the gradient, and the optimizer has its own."""
    for gradients in before_each_step(run):
        for p, g in gradients.items():
            g.add_(p.detach(), alpha=0.01)


@bug("gradient/added-term", needs="any case")
def noise_in_the_gradient(run: TrainingRun) -> None:
    """Noise is added to the gradient."""
    for g in each_gradient(run):
        g.add_(1e-3 * torch.randn_like(g))


@bug("gradient/skipped-by-size", needs="an element below the threshold")
def small_elements_dropped(run: TrainingRun) -> None:
    """Small elements of the gradient are not communicated."""
    for g in each_gradient(run):
        g[g.abs() < 0.1] = 0


@bug("gradient/wrong-scale", needs="any case", says=("loss scale",))
@reported("discuss.pytorch.org: scaler.scale(loss).backward() and optimizer.step()")
def never_unscaled(run: TrainingRun) -> None:
    """The loss is scaled, and `optimizer.step()` is called in place of `scaler.step(optimizer)`."""
    for g in each_gradient(run):
        g.mul_(LOSS_SCALE)


@bug("gradient/wrong-scale", needs="any case", says=("loss scale",))
def unscaled_twice(run: TrainingRun) -> None:
    """The gradient is unscaled by hand and by the scaler."""
    for g in each_gradient(run):
        g.div_(LOSS_SCALE)


@bug("gradient/projected-gradient", needs="2 elements in a parameter")
def centred_gradient(run: TrainingRun) -> None:
    """Gradient centralisation is applied to `.grad` itself."""
    for g in each_gradient(run):
        g.sub_(g.mean())


@bug(
    "gradient/misplaced-gradient",
    needs="2 parameters whose names are not in the model's order",
)
def flat_buffer_in_another_order(run: TrainingRun) -> None:
    """A flat gradient buffer is filled in one order of parameters and read in another."""
    for gradients in before_each_step(run):
        named = {name: gradients[p] for name, p in run.model.named_parameters() if p in gradients}
        if named:
            flat = torch.cat([named[name].reshape(-1) for name in sorted(named)])
            parts = flat.split([g.numel() for g in gradients.values()])
            gradients.update(
                {p: part.reshape(p.shape) for p, part in zip(gradients, parts, strict=True)}
            )


@bug("gradient/stale-window", needs="any case", says=("moving average",))
def moving_average(run: TrainingRun) -> None:
    """A moving average of the gradients is kept in `.grad`, and the optimizer has its own."""
    average: ByParameter = {}
    for gradients in before_each_step(run):
        for p, g in gradients.items():
            gradients[p] = average[p] = 0.9 * average.get(p, torch.zeros_like(g)) + 0.1 * g


# One parameter: the gradient of one of several parameters is wrong, or some of its elements are.


def _trainable(run: TrainingRun) -> list[torch.nn.Parameter]:
    return [p for p in run.model.parameters() if p.requires_grad]


def last_gradient(run: TrainingRun) -> Iterator[torch.Tensor]:
    """Yield the right gradient of the last of several parameters, as `each_gradient` does of all."""
    *others, last = _trainable(run)
    for gradients in before_each_step(run):
        if others and last in gradients:
            yield gradients[last]


@bug("gradient/wrong-scale", needs="2 parameters", says=("alone",))
def last_parameter_doubled(run: TrainingRun) -> None:
    """A parameter with two names is reduced once per name: its gradient is twice as large."""
    for g in last_gradient(run):
        g.mul_(2)


@bug("gradient/wrong-scale", needs="2 parameters", says=("sign", "-1 times"))
def last_parameter_reversed(run: TrainingRun) -> None:
    """One parameter's gradient has the wrong sign."""
    for g in last_gradient(run):
        g.neg_()


@bug("gradient/no-gradient", needs="2 parameters", says=("alone",))
def last_parameter_zero(run: TrainingRun) -> None:
    """One parameter's gradient is cleared between backward and step."""
    for g in last_gradient(run):
        g.zero_()


@bug(
    "gradient/other-window",
    needs="2 parameters, and 2 windows",
    says=("alone",),
)
def last_parameter_stale(run: TrainingRun) -> None:
    """A bucket of gradients is not waited for: its parameter has the gradient of the step before."""
    *others, last = _trainable(run)
    before: ByParameter = {}
    for window in windows(run):
        own = window_gradients(run, window)
        stale = {last: before.get(last, torch.zeros_like(last))} if others and before else {}
        step_with(run, own | stale)
        before = own


@bug(
    "gradient/reset-inside-window, gradient/reset-inside-window or dropped-micro-batch,"
    " gradient/dropped-micro-batch, gradient/no-gradient or dropped-micro-batch,"
    " none-pattern/no-gradient",
    needs="2 parameters, and 2 micro-batches in a window",
)
def last_parameter_overwritten(run: TrainingRun) -> None:
    """A fused kernel writes one parameter's gradient in place of adding to it."""
    *others, last = _trainable(run)
    for window in windows(run):
        run.optimizer.zero_grad()
        for loss in window_losses(run, window):
            last.grad = None if others else last.grad
            loss.backward()
        run.optimizer.step()


@bug("gradient/misplaced-gradient", needs="a matrix of several rows")
def rows_permuted(run: TrainingRun) -> None:
    """Shards are gathered in another order than they were scattered in: rows change places."""
    for g in each_matrix(run):
        g.copy_(g.roll(1, 0))


@bug("gradient/misplaced-gradient", needs="a square matrix", says=("transpose",))
def square_transposed(run: TrainingRun) -> None:
    """A square weight's gradient is written transposed: no shape tells."""
    for g in each_matrix(run):
        if g.shape[0] == g.shape[1]:
            g.copy_(g.T.clone())


@bug("gradient/partial-gradient", needs="a matrix of several rows")
def first_row_only(run: TrainingRun) -> None:
    """Only the first shard of a matrix is gathered; the other rows are 0."""
    for g in each_matrix(run):
        g[1:].zero_()


@bug("gradient/partial-gradient", needs="a parameter of several elements")
def one_element_doubled(run: TrainingRun) -> None:
    """Two shards overlap in one element, which is added twice."""
    for g in each_gradient(run):
        if g.numel() > 1 and g.is_contiguous():
            g.view(-1)[-1].mul_(2)


class TwoHeads(torch.nn.Module):
    """Two linear heads of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(4, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n, 3)."""
        return self.left(x).square() + self.right(x).tanh()


TWO_HEADS = Problem(
    seeded(TwoHeads), normal_rows(4), lambda model, batch: (model(batch) - 1).square().mean()
)


@bug("gradient/misplaced-gradient", needs="2 parameters of one shape", problem=TWO_HEADS)
def heads_swapped(run: TrainingRun) -> None:
    """Parameters are matched by position, in another order than the model's: two of one shape are
    swapped.
    """
    for gradients in before_each_step(run):
        parameters = _trainable(run)
        if len(parameters) == 2 and parameters[0].shape == parameters[1].shape:
            left, right = parameters
            gradients[left], gradients[right] = gradients[right], gradients[left]
