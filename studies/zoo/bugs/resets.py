"""Bugs of resets and windows: no reset, a reset at the wrong place, parts of other windows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradcheck_suite.core.contract import (
    EQUAL_MICRO_BATCHES,
    WHOLE_WINDOWS,
    Batch,
    Problem,
    TrainingRun,
)
from gradcheck_suite.loops.reset_modes import backward_window, part_of_window, window_count, windows
from studies.zoo.bug import (
    ByParameter,
    before_each_step,
    bug,
    epoch_windows,
    fill_missing,
    gradients_of,
    reported,
    step_with,
    window_gradients,
    window_losses,
)

# Resets: gradients are never reset, reset too often, reset in part, or reset by an operation that
# keeps a NaN.


@bug("gradient/stale-window", needs="2 windows, or 2 epochs")
@reported("discuss.pytorch.org: zero_grad forgotten", number=17)
def no_reset(run: TrainingRun) -> None:
    """No reset at all: every window's gradient contains all earlier ones."""
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()


@bug("gradient/reset-inside-window", needs="2 micro-batches in a window")
@reported("RAE#67, openWakeWord#316, mmf#747, opacus#93", number=18)
def reset_per_micro_batch(run: TrainingRun) -> None:
    """`zero_grad` stands inside the accumulation: only the last micro-batch's gradient survives."""
    for window in windows(run):
        for loss in window_losses(run, window):
            run.optimizer.zero_grad()
            loss.backward()
        run.optimizer.step()


@bug(
    "gradient/repeated-micro-batch, gradient/wrong-scale, gradient/unrecognised-weights",
    needs="any case",
)
@reported("Lightning#557, Lightning#591", number=19)
def cross_model_residue(run: TrainingRun) -> None:
    """The generator's backward fills the discriminator's gradients too, and only the generator's
    are cleared.
    """
    for window in windows(run):
        run.optimizer.zero_grad()
        run.loss(run.model, window[0]).backward()  # the generator's turn
        backward_window(run, window)
        run.optimizer.step()


@bug("gradient/stale-window", needs="2 windows or epochs")
@reported("rslearn#217", number=20)
def own_groups_only(run: TrainingRun) -> None:
    """`optimizer.zero_grad` resets its own groups alone.

    A parameter that is unfrozen later keeps its sum.
    """
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    # made before the last parameter was unfrozen
    first = torch.optim.SGD(parameters[:-1], lr=0.1) if len(parameters) > 1 else None
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        if first is not None:
            first.zero_grad()


@bug("gradient/wrong-scale", needs="any case")
@reported("Lightning#6147", number=21)
def closure_without_reset(run: TrainingRun) -> None:
    """LBFGS calls its closure up to 20 times a step; the reset stands outside of it."""
    for window in windows(run):
        run.optimizer.zero_grad()
        for _ in range(3):
            backward_window(run, window)
        run.optimizer.step()


def _from_zero(items: int, seed: int) -> Batch:
    """Return (items, 1): 0, 1, 2, ...; at 0 the loss is 0 and the root's gradient NaN."""
    return torch.arange(items, dtype=torch.float64)[:, None]


def _twice(seed: int) -> torch.nn.Module:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 2.0)
    return model


ROOT = Problem(_twice, _from_zero, lambda model, batch: model(batch).sqrt().mean())


@bug(
    "non-finite/poisoned-by-earlier-window",
    needs="a NaN gradient in an earlier window",
    problem=ROOT,
)
@reported("optax MultiSteps 0.2.8", number=22)
def reset_by_multiplication(run: TrainingRun) -> None:
    """The accumulator is reset by a factor 0.

    0 * NaN is NaN, so one bad micro-batch poisons all that follow.
    """
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        for g in gradients_of(run).values():
            g.mul_(0)


@bug("raised/raised", needs="a parameter that no item reaches, or a frozen one")
@reported("pytorch/examples#1172, trl#1422", number=24)
def none_breaks_readers(run: TrainingRun) -> None:
    """A parameter that no item of the window reached has no gradient after a release.

    Reading it raises.
    """
    for window in windows(run):
        run.optimizer.zero_grad(set_to_none=True)
        backward_window(run, window)
        norms = [p.grad.norm() for p in run.model.parameters()]  # type: ignore[union-attr]
        run.optimizer.step()
        del norms


# Leaks: a part of an earlier window's gradient, in some parameter or of some size, survives the
# reset.


def _leak(run: TrainingRun, share: float) -> None:
    """Add a share of what the step before had to every window's gradient."""
    before: ByParameter = {}
    for gradients in before_each_step(run):
        for p, left in before.items():
            gradients[p] = gradients.get(p, torch.zeros_like(p)) + share * left
        before = gradients


@bug("gradient/stale-window", needs="2 windows")
def faded_reset(run: TrainingRun) -> None:
    """A momentum of 0.1 is kept in the gradient itself: every step has a tenth of the one before."""
    _leak(run, 0.1)


@bug("gradient/stale-window", needs="2 windows")
def leak_of_1e_8(run: TrainingRun) -> None:
    """An epsilon of 1e-8 in a blend keeps that share of the gradient of the step before."""
    _leak(run, 1e-8)


@bug("gradient/stale-window", needs="2 windows")
def leak_of_1e_11(run: TrainingRun) -> None:
    """The same with 1e-11, which float32 does not see."""
    _leak(run, 1e-11)


@bug("gradient/stale-window", needs="2 windows")
def reset_every_second_step(run: TrainingRun) -> None:
    """The reset is under a condition that every second step meets."""
    for step, window in enumerate(windows(run)):
        backward_window(run, window)
        run.optimizer.step()
        if step % 2:
            run.optimizer.zero_grad()


@bug("gradient/stale-window", needs="2 windows, and a parameter of one dimension")
def biases_are_not_reset(run: TrainingRun) -> None:
    """A reset by hand goes over the matrices alone: biases and scales keep their sums."""
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        for p in run.model.parameters():
            p.grad = None if p.ndim > 1 else p.grad


@bug("gradient/stale-window", needs="a short last window, and 2 epochs")
def short_windows_are_not_reset(run: TrainingRun) -> None:
    """The short last window is stepped and not cleared: it joins the next epoch's first window."""
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        if len(window) == run.accumulation_steps:
            run.optimizer.zero_grad()


# Other windows: a step holds another window's gradient, beside its own or in its place.


def _delay(run: TrainingRun, before: ByParameter | None) -> None:
    """Step with the gradient of the window before.

    The first one with `before`, or with its own if that is None.
    """
    for window in windows(run):
        own = window_gradients(run, window)
        step_with(run, own if before is None else before)
        before = own


@bug("gradient/other-window", needs="any case")
def delayed_by_one(run: TrainingRun) -> None:
    """The step applies the gradient of the window before it; the first step has none."""
    _delay(run, {})


@bug("gradient/other-window", needs="2 windows")
def delayed_after_warm_up(run: TrainingRun) -> None:
    """Communication overlaps the next window, and the step applies the gradient that has arrived by
    then.
    """
    _delay(run, None)


@bug("gradient/other-window", needs="2 windows")
def reversed_windows(run: TrainingRun) -> None:
    """The windows of an epoch are trained in reverse order."""
    for _ in range(run.epochs):
        for window in reversed(epoch_windows(run)):
            step_with(run, window_gradients(run, window))


@bug("gradient/other-window", needs="2 windows")
def swapped_pairs(run: TrainingRun) -> None:
    """Two buffers take turns, and the step reads the one that is being filled."""
    for _ in range(run.epochs):
        listed = epoch_windows(run)
        for i, own in enumerate(listed):
            step_with(run, window_gradients(run, listed[i ^ 1] if i ^ 1 < len(listed) else own))


@bug("gradient/other-window", needs="2 windows")
def first_window_always(run: TrainingRun) -> None:
    """The static inputs of a captured step are never refilled: every step trains on the first
    window.
    """
    first: list[Batch] = []
    for window in windows(run):
        first = first or window
        step_with(run, window_gradients(run, first))


@bug("gradient/other-window", needs="2 windows")
def prefetched_micro_batch(run: TrainingRun) -> None:
    """The first micro-batch of the next window is computed ahead, and its gradient joins this
    window's.
    """
    everything = list(windows(run))
    for window, following in zip(everything, [*everything[1:], []], strict=True):
        run.optimizer.zero_grad()
        backward_window(run, window)
        if following:
            next(window_losses(run, following)).backward()
        run.optimizer.step()


@bug("gradient/other-window", needs="2 windows")
def traces_of_the_next(run: TrainingRun) -> None:
    """An interpolation between windows has a weight of 1e-7 for the next one."""
    everything = [window_gradients(run, window) for window in windows(run)]
    for own, ahead in zip(everything, [*everything[1:], {}], strict=True):
        step_with(
            run, {p: own.get(p, 0) + 1e-7 * ahead.get(p, torch.zeros_like(p)) for p in own | ahead}
        )


@bug("gradient/wrong-windows", needs="any case")
def step_before_the_last(run: TrainingRun) -> None:
    """The step comes before the window's last backward, whose gradient joins the next window."""
    run.optimizer.zero_grad()
    for window in windows(run):
        *others, last = window_losses(run, window)
        for loss in others:
            loss.backward()
        fill_missing(run)
        run.optimizer.step()
        run.optimizer.zero_grad()
        last.backward()


@bug("gradient/wrong-windows", needs="2 micro-batches")
def previous_batch_variable(run: TrainingRun) -> None:
    """A prefetcher returns the batch that it fetched one call before: all batches come one late."""
    before: Batch = None
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            part_of_window(run, batch if before is None else before, total).backward()
            before = batch
        run.optimizer.step()


# Window boundaries: a step comes too early, too late or never, or a short last window gets the
# wrong scale.


def _step_where(run: TrainingRun, condition: Callable[[int], bool]) -> None:
    """Divide by `accumulation_steps`.

    Step and reset after every micro-batch `i` of an epoch that meets a condition.
    """
    for _ in range(run.epochs):
        for i, batch in enumerate(run.loader):
            loss = run.loss(run.model, batch)
            (loss / run.accumulation_steps if run.reduction == "mean" else loss).backward()
            if condition(i):
                run.optimizer.step()
                run.optimizer.zero_grad()


@bug("gradient/wrong-scale", needs="a short last window", assumes=(EQUAL_MICRO_BATCHES,))
@reported("transformers#39659, ms-swift#10084, Lightning#19987", number=12)
def tail_divided_by_steps(run: TrainingRun) -> None:
    """The last window of an epoch has r < K micro-batches and is divided by K: scaled r/K."""
    _step_where(run, lambda i: (i + 1) % run.accumulation_steps == 0 or i + 1 == len(run.loader))


@bug("step-count/tail-leak", needs="a short last window; 2 epochs to leak")
@reported("transformers#22098, AnimaLoraStudio#305", number=13)
def tail_leak(run: TrainingRun) -> None:
    """An epoch's short last window is neither stepped nor cleared, so it joins the next epoch's
    first window.
    """
    for window in windows(run):
        backward_window(run, window)
        if len(window) == run.accumulation_steps:
            run.optimizer.step()
            run.optimizer.zero_grad()


@bug("step-count/tail-dropped", needs="a short last window")
@reported("transformers#22098", number=14)
def tail_dropped(run: TrainingRun) -> None:
    """A data set shorter than the accumulation steps never updates anything.

    The end of a longer one is lost.
    """
    for window in windows(run):
        if len(window) < run.accumulation_steps:
            continue
        run.optimizer.zero_grad()
        backward_window(run, window)
        run.optimizer.step()


@bug(
    "step-count/wrong-windows, gradient/wrong-windows",
    needs="any accumulation_steps but 2, or one window",
    assumes=(EQUAL_MICRO_BATCHES, WHOLE_WINDOWS),
)
@reported("accelerate#435", number=15)
def inverted_condition(run: TrainingRun) -> None:
    """`if (i + 1) % K:` in place of `if (i + 1) % K == 0:`."""
    _step_where(run, lambda i: (i + 1) % run.accumulation_steps != 0)


@bug(
    "gradient/wrong-windows",
    needs="2 micro-batches in a window",
    assumes=(EQUAL_MICRO_BATCHES, WHOLE_WINDOWS),
)
@reported("LLMs-from-scratch#299, torchtune#1275", number=15)
def off_by_one(run: TrainingRun) -> None:
    """`i % K == 0` in place of `(i + 1) % K == 0`: steps fall one micro-batch into each window."""
    _step_where(run, lambda i: i % run.accumulation_steps == 0)


@bug(
    "gradient/dropped-micro-batch, gradient/reset-inside-window",
    needs="2 micro-batches in the first window",
)
@reported("transformers#22143, mmcv#2093", number=16)
def resume_in_mid_window(run: TrainingRun) -> None:
    """A checkpoint in mid-window holds no gradients: the first step after a resume is
    under-accumulated.
    """
    resumed = False
    for window in windows(run):
        run.optimizer.zero_grad()
        for loss in window_losses(run, window):
            loss.backward()
            if not resumed and len(window) > 1:
                resumed = True
                run.model.zero_grad()
        run.optimizer.step()
