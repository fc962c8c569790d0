"""Window boundaries: a step comes too early, too late or never, or a short last window gets the wrong scale."""

from __future__ import annotations

from collections.abc import Callable

from gradcheck_suite.evidence.zoo.bug import Bug
from gradcheck_suite.loops.windows import backward_window, part_of_window, window_count, windows
from gradcheck_suite.schema.contract import EQUAL_MICRO_BATCHES, WHOLE_WINDOWS, TrainingRun


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
