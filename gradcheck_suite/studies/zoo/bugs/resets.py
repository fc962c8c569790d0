"""Bugs of resets and windows: no reset, a reset at the wrong place, parts of other windows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradcheck_suite.core.contract import EQUAL_MICRO_BATCHES, WHOLE_WINDOWS, Batch, Problem, TrainingRun
from gradcheck_suite.loops.reset_modes import backward_window, part_of_window, window_count, windows
from gradcheck_suite.studies.zoo.bug import Bug, Gradients, step_with, train_with_the_gradients_before, window_gradients

# Resets: gradients are never reset, reset too often, reset in part, or reset by an operation that keeps a NaN.


def no_reset(run: TrainingRun) -> None:
    """Send every micro-batch backward and step, without a reset."""
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()


NO_RESET = Bug(
    number=17,
    name="no-reset",
    citations=("discuss.pytorch.org: zero_grad forgotten",),
    mechanism="No reset at all: every window's gradient contains all earlier ones.",
    needs="2 windows, or 2 epochs",
    loop=no_reset,
    wanted=frozenset({"gradient/stale-window"}),
)


def reset_per_micro_batch(run: TrainingRun) -> None:
    """Reset before every micro-batch."""
    for window in windows(run):
        total = window_count(run, window)
        for batch in window:
            run.optimizer.zero_grad()
            part_of_window(run, batch, total).backward()
        run.optimizer.step()


RESET_PER_MICRO_BATCH = Bug(
    number=18,
    name="reset-per-micro-batch",
    citations=("RAE#67", "openWakeWord#316", "mmf#747", "opacus#93"),
    mechanism="`zero_grad` stands inside the accumulation: only the last micro-batch's gradient survives.",
    needs="2 micro-batches in a window",
    loop=reset_per_micro_batch,
    wanted=frozenset({"gradient/reset-inside-window"}),
)


def cross_model_residue(run: TrainingRun) -> None:
    """Train as a discriminator: the generator's loss passes through this model, and clears only its own gradients."""
    for window in windows(run):
        run.optimizer.zero_grad()
        run.loss(run.model, window[0]).backward()  # the generator's turn
        backward_window(run, window)
        run.optimizer.step()


CROSS_MODEL_RESIDUE = Bug(
    number=19,
    name="cross-model-residue",
    citations=("Lightning#557", "Lightning#591"),
    mechanism="The generator's backward fills the discriminator's gradients too, and only the generator's are cleared.",
    needs="any case",
    loop=cross_model_residue,
    wanted=frozenset({"gradient/repeated-micro-batch", "gradient/wrong-scale", "gradient/unrecognised-weights"}),
)


def own_groups_only(run: TrainingRun) -> None:
    """Reset through an optimizer that was made before the last parameter was unfrozen."""
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    first = torch.optim.SGD(parameters[:-1], lr=0.1) if len(parameters) > 1 else None
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        if first is not None:
            first.zero_grad()


OWN_GROUPS_ONLY = Bug(
    number=20,
    name="own-groups-only",
    citations=("rslearn#217",),
    mechanism="`optimizer.zero_grad` resets its own groups alone; a parameter that is unfrozen later keeps its sum.",
    needs="2 windows or epochs",
    loop=own_groups_only,
    wanted=frozenset({"gradient/stale-window"}),
)


def closure_without_reset(run: TrainingRun) -> None:
    """Evaluate the closure three times before the step, as a line search does, with one reset before the first."""
    for window in windows(run):
        run.optimizer.zero_grad()
        for _ in range(3):
            backward_window(run, window)
        run.optimizer.step()


CLOSURE_WITHOUT_RESET = Bug(
    number=21,
    name="closure-without-reset",
    citations=("Lightning#6147",),
    mechanism="LBFGS calls its closure up to 20 times a step; the reset stands outside of it.",
    needs="any case",
    loop=closure_without_reset,
    wanted=frozenset({"gradient/wrong-scale"}),
)


def _from_zero(items: int, seed: int) -> Batch:
    """Return (items, 1): 0, 1, 2, ...; at 0 the loss is 0 and the root's gradient NaN."""
    return torch.arange(items, dtype=torch.float64)[:, None]


def _twice(seed: int) -> torch.nn.Module:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 2.0)
    return model


def reset_by_multiplication(run: TrainingRun) -> None:
    """Reset by multiplying with 0."""
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0)


RESET_BY_MULTIPLICATION = Bug(
    number=22,
    name="reset-by-multiplication",
    citations=("optax MultiSteps 0.2.8",),
    mechanism="The accumulator is reset by a factor 0; 0 * NaN is NaN, so one bad micro-batch poisons all that follow.",
    needs="a NaN gradient in an earlier window",
    loop=reset_by_multiplication,
    wanted=frozenset({"non-finite/poisoned-by-earlier-window"}),
    problem=Problem(_twice, _from_zero, lambda model, batch: model(batch).sqrt().mean()),
)


def none_breaks_readers(run: TrainingRun) -> None:
    """Log the norm of every parameter's gradient before the step."""
    for window in windows(run):
        run.optimizer.zero_grad(set_to_none=True)
        backward_window(run, window)
        norms = [p.grad.norm() for p in run.model.parameters()]  # type: ignore[union-attr]
        run.optimizer.step()
        del norms


NONE_BREAKS_READERS = Bug(
    number=24,
    name="none-breaks-readers",
    citations=("pytorch/examples#1172", "trl#1422"),
    mechanism="A parameter that no item of the window reached has no gradient after a release; reading it raises.",
    needs="a parameter that no item reaches, or a frozen one",
    loop=none_breaks_readers,
    wanted=frozenset({"raised/raised"}),
)


# Leaks: a part of an earlier window's gradient, in some parameter or of some size, survives the reset.


def _leak(run: TrainingRun, share: float) -> None:
    """Add a share of what the step before had to every window's gradient."""
    before: Gradients = {}
    for window in windows(run):
        gradients = window_gradients(run, window)
        for p, left in before.items():
            gradients[p] = gradients[p] + share * left if p in gradients else share * left
        step_with(run, gradients)
        before = gradients


def faded_reset(run: TrainingRun) -> None:
    """Multiply the gradients by 0.1 in place of a reset."""
    _leak(run, 0.1)


FADED_RESET = Bug(
    name="faded-reset",
    mechanism="A momentum of 0.1 is kept in the gradient itself: every step has a tenth of the one before.",
    needs="2 windows",
    loop=faded_reset,
    wanted=frozenset({"gradient/stale-window"}),
)


def leak_of_a_hundred_millionth(run: TrainingRun) -> None:
    """Leave 1e-8 of the gradients behind."""
    _leak(run, 1e-8)


LEAK_OF_A_HUNDRED_MILLIONTH = Bug(
    name="leak-of-1e-8",
    mechanism="An epsilon of 1e-8 in a blend keeps that share of the gradient of the step before.",
    needs="2 windows",
    loop=leak_of_a_hundred_millionth,
    wanted=frozenset({"gradient/stale-window"}),
)


def leak_of_a_trillionth(run: TrainingRun) -> None:
    """Leave 1e-11 of the gradients behind."""
    _leak(run, 1e-11)


LEAK_OF_A_TRILLIONTH = Bug(
    name="leak-of-1e-11",
    mechanism="The same with 1e-11, which float32 does not see.",
    needs="2 windows",
    loop=leak_of_a_trillionth,
    wanted=frozenset({"gradient/stale-window"}),
)


def reset_every_second_step(run: TrainingRun) -> None:
    """Reset after every second step."""
    for step, window in enumerate(windows(run)):
        backward_window(run, window)
        run.optimizer.step()
        if step % 2:
            run.optimizer.zero_grad()


RESET_EVERY_SECOND_STEP = Bug(
    name="reset-every-second-step",
    mechanism="The reset is under a condition that every second step meets.",
    needs="2 windows",
    loop=reset_every_second_step,
    wanted=frozenset({"gradient/stale-window"}),
)


def biases_are_not_reset(run: TrainingRun) -> None:
    """Reset the parameters of two and more dimensions."""
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        for p in run.model.parameters():
            if p.ndim > 1:
                p.grad = None


BIASES_ARE_NOT_RESET = Bug(
    name="biases-are-not-reset",
    mechanism="A reset by hand goes over the matrices alone: biases and scales keep their sums.",
    needs="2 windows, and a parameter of one dimension",
    loop=biases_are_not_reset,
    wanted=frozenset({"gradient/stale-window"}),
)


def short_windows_are_not_reset(run: TrainingRun) -> None:
    """Step after every window, and reset after whole ones."""
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        if len(window) == run.accumulation_steps:
            run.optimizer.zero_grad()


SHORT_WINDOWS_ARE_NOT_RESET = Bug(
    name="short-windows-are-not-reset",
    mechanism="The short last window is stepped and not cleared: it joins the next epoch's first window.",
    needs="a short last window, and 2 epochs",
    loop=short_windows_are_not_reset,
    wanted=frozenset({"gradient/stale-window"}),
)


# Other windows: a step holds another window's gradient, beside its own or in its place.


def delayed_by_one(run: TrainingRun) -> None:
    """Step with the gradient of the window before, as a pipeline does that fills up first."""
    train_with_the_gradients_before(run, lambda own, before: before or {})


DELAYED_BY_ONE = Bug(
    name="delayed-by-one",
    mechanism="The step applies the gradient of the window before it; the first step has none.",
    needs="any case",
    loop=delayed_by_one,
    wanted=frozenset({"gradient/delayed-window"}),
)


def delayed_after_warm_up(run: TrainingRun) -> None:
    """Step with the first window's gradient twice, and from then on with that of the window before."""
    train_with_the_gradients_before(run, lambda own, before: own if before is None else before)


DELAYED_AFTER_WARM_UP = Bug(
    name="delayed-after-warm-up",
    mechanism="Communication overlaps the next window, and the step applies the gradient that has arrived by then.",
    needs="2 windows",
    loop=delayed_after_warm_up,
    wanted=frozenset({"gradient/delayed-window"}),
)


def reversed_windows(run: TrainingRun) -> None:
    """Pop the windows of an epoch from the end of a list."""
    for _ in range(run.epochs):
        batches = list(run.loader)
        k = run.accumulation_steps
        stack = [batches[first : first + k] for first in range(0, len(batches), k)]
        while stack:
            step_with(run, window_gradients(run, stack.pop()))


REVERSED_WINDOWS = Bug(
    name="reversed-windows",
    mechanism="The windows of an epoch are trained in reverse order.",
    needs="2 windows",
    loop=reversed_windows,
    wanted=frozenset({"gradient/other-window"}),
)


def swapped_pairs(run: TrainingRun) -> None:
    """Swap the windows 0 and 1, 2 and 3, and so on of every epoch."""
    for _ in range(run.epochs):
        batches = list(run.loader)
        k = run.accumulation_steps
        listed = [batches[first : first + k] for first in range(0, len(batches), k)]
        for i in range(len(listed)):
            step_with(run, window_gradients(run, listed[i ^ 1] if i ^ 1 < len(listed) else listed[i]))


SWAPPED_PAIRS = Bug(
    name="swapped-pairs",
    mechanism="Two buffers take turns, and the step reads the one that is being filled.",
    needs="2 windows",
    loop=swapped_pairs,
    wanted=frozenset({"gradient/other-window"}),
)


def first_window_always(run: TrainingRun) -> None:
    """Train on the first window again and again: a captured batch is never refilled."""
    first: list[Batch] | None = None
    for window in windows(run):
        first = first or window
        step_with(run, window_gradients(run, first))


FIRST_WINDOW_ALWAYS = Bug(
    name="first-window-always",
    mechanism="The static inputs of a captured step are never refilled: every step trains on the first window.",
    needs="2 windows",
    loop=first_window_always,
    wanted=frozenset({"gradient/other-window"}),
)


def prefetched_micro_batch(run: TrainingRun) -> None:
    """Send the next window's first micro-batch backward before the step, and again in its own window."""
    everything = list(windows(run))
    for i, window in enumerate(everything):
        run.optimizer.zero_grad()
        backward_window(run, window)
        if i + 1 < len(everything):
            following = everything[i + 1]
            part_of_window(run, following[0], window_count(run, following)).backward()
        run.optimizer.step()


PREFETCHED_MICRO_BATCH = Bug(
    name="prefetched-micro-batch",
    mechanism="The first micro-batch of the next window is computed ahead, and its gradient joins this window's.",
    needs="2 windows",
    loop=prefetched_micro_batch,
    wanted=frozenset({"gradient/later-window"}),
)


def traces_of_the_next(run: TrainingRun) -> None:
    """Add a ten-millionth of the next window's gradient."""
    everything = list(windows(run))
    gradients = [window_gradients(run, window) for window in everything]
    for i, own in enumerate(gradients):
        ahead = gradients[i + 1] if i + 1 < len(gradients) else {}
        both = {p: own.get(p, 0) + 1e-7 * ahead.get(p, torch.zeros_like(p)) for p in own.keys() | ahead.keys()}
        step_with(run, both)


TRACES_OF_THE_NEXT = Bug(
    name="traces-of-the-next",
    mechanism="An interpolation between windows has a weight of 1e-7 for the next one.",
    needs="2 windows",
    loop=traces_of_the_next,
    wanted=frozenset({"gradient/later-window"}),
)


def step_before_the_last(run: TrainingRun) -> None:
    """Step before the window's last backward: its gradient is left for the next window."""
    run.optimizer.zero_grad()
    for window in windows(run):
        total = window_count(run, window)
        for batch in window[:-1]:
            part_of_window(run, batch, total).backward()
        last = part_of_window(run, window[-1], total)
        for p in run.model.parameters():
            if p.grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)
        run.optimizer.step()
        run.optimizer.zero_grad()
        last.backward()


STEP_BEFORE_THE_LAST = Bug(
    name="step-before-the-last",
    mechanism="The step comes before the window's last backward, whose gradient joins the next window.",
    needs="any case",
    loop=step_before_the_last,
    wanted=frozenset({"gradient/shifted-window"}),
)


def previous_batch_variable(run: TrainingRun) -> None:
    """Train on the batch that was fetched one iteration ago; the first one is taken twice."""
    before: Batch = None
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            part_of_window(run, batch if before is None else before, total).backward()
            before = batch
        run.optimizer.step()


PREVIOUS_BATCH_VARIABLE = Bug(
    name="previous-batch-variable",
    mechanism="A prefetcher returns the batch that it fetched one call before: all batches come one late.",
    needs="2 micro-batches",
    loop=previous_batch_variable,
    wanted=frozenset({"gradient/shifted-window"}),
)


# Window boundaries: a step comes too early, too late or never, or a short last window gets the wrong scale.


def _step_where(run: TrainingRun, condition: Callable[[int], bool]) -> None:
    """Divide by `accumulation_steps`; step and reset after every micro-batch `i` of an epoch that meets a condition."""
    for _ in range(run.epochs):
        for i, batch in enumerate(run.loader):
            loss = run.loss(run.model, batch)
            (loss / run.accumulation_steps if run.reduction == "mean" else loss).backward()
            if condition(i):
                run.optimizer.step()
                run.optimizer.zero_grad()


def tail_divided_by_steps(run: TrainingRun) -> None:
    """Divide by `accumulation_steps`; step at a window's end and at the epoch's."""
    _step_where(run, lambda i: (i + 1) % run.accumulation_steps == 0 or i + 1 == len(run.loader))


TAIL_DIVIDED_BY_STEPS = Bug(
    number=12,
    name="tail-divided-by-steps",
    citations=("transformers#39659", "ms-swift#10084", "Lightning#19987"),
    mechanism="The last window of an epoch has r < K micro-batches and is divided by K: scaled r/K.",
    needs="a short last window",
    loop=tail_divided_by_steps,
    wanted=frozenset({"gradient/wrong-scale"}),
    assumes=(EQUAL_MICRO_BATCHES,),
)


def tail_leak(run: TrainingRun) -> None:
    """Step and reset after whole windows alone."""
    for window in windows(run):
        backward_window(run, window)
        if len(window) == run.accumulation_steps:
            run.optimizer.step()
            run.optimizer.zero_grad()


TAIL_LEAK = Bug(
    number=13,
    name="tail-leak",
    citations=("transformers#22098", "AnimaLoraStudio#305"),
    mechanism="An epoch's short last window is neither stepped nor cleared, so it joins the next epoch's first window.",
    needs="a short last window; 2 epochs to leak",
    loop=tail_leak,
    wanted=frozenset({"step-count/tail-leak"}),
)


def tail_dropped(run: TrainingRun) -> None:
    """Skip windows that are not whole."""
    for window in windows(run):
        if len(window) < run.accumulation_steps:
            continue
        run.optimizer.zero_grad()
        backward_window(run, window)
        run.optimizer.step()


TAIL_DROPPED = Bug(
    number=14,
    name="tail-dropped",
    citations=("transformers#22098",),
    mechanism="A data set shorter than the accumulation steps never updates anything; the end of a longer one is lost.",
    needs="a short last window",
    loop=tail_dropped,
    wanted=frozenset({"step-count/tail-dropped"}),
)


def inverted_condition(run: TrainingRun) -> None:
    """Step where `(i + 1) % K` is not 0."""
    _step_where(run, lambda i: (i + 1) % run.accumulation_steps != 0)


INVERTED_CONDITION = Bug(
    number=15,
    name="inverted-condition",
    citations=("accelerate#435",),
    mechanism="`if (i + 1) % K:` in place of `if (i + 1) % K == 0:`.",
    needs="any accumulation_steps but 2, or one window",
    loop=inverted_condition,
    wanted=frozenset({"step-count/inverted-condition", "gradient/inverted-condition"}),
    assumes=(EQUAL_MICRO_BATCHES, WHOLE_WINDOWS),
)


def off_by_one(run: TrainingRun) -> None:
    """Step where the index is divisible."""
    _step_where(run, lambda i: i % run.accumulation_steps == 0)


OFF_BY_ONE = Bug(
    number=15,
    name="off-by-one",
    citations=("LLMs-from-scratch#299", "torchtune#1275"),
    mechanism="`i % K == 0` in place of `(i + 1) % K == 0`: steps fall one micro-batch into each window.",
    needs="2 micro-batches in a window",
    loop=off_by_one,
    wanted=frozenset({"gradient/shifted-window"}),
    assumes=(EQUAL_MICRO_BATCHES, WHOLE_WINDOWS),
)


def resume_in_mid_window(run: TrainingRun) -> None:
    """Stop after the run's first micro-batch and resume: a checkpoint holds no gradients."""
    resumed = False
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            part_of_window(run, batch, total).backward()
            if not resumed and len(window) > 1:
                resumed = True
                for p in run.model.parameters():
                    p.grad = None
        run.optimizer.step()


RESUME_IN_MID_WINDOW = Bug(
    number=16,
    name="resume-in-mid-window",
    citations=("transformers#22143", "mmcv#2093"),
    mechanism="A checkpoint in mid-window holds no gradients: the first step after a resume is under-accumulated.",
    needs="2 micro-batches in the first window",
    loop=resume_in_mid_window,
    wanted=frozenset({"gradient/dropped-micro-batch", "gradient/reset-inside-window"}),
)
