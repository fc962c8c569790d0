"""Runs a loop on an instance and records its outcome."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch

from gradcheck_suite.core.contract import DEFAULT_TIME_LIMIT, JaxTrainingRun, Loop, TrainingRun
from gradcheck_suite.core.frames import Owner, is_users, owner_of
from gradcheck_suite.core.text import file_text
from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.run.instance import AutocastRecorder, Compute, Instance, epoch_of, seeded
from gradcheck_suite.run.losses import Losses
from gradcheck_suite.run.observer import (
    Observation,
    RankObserver,
    StepObserver,
    Structure,
    TooManySteps,
    as_before_sharding,
    recorded_calls,
    structure,
    structure_changes,
)
from gradcheck_suite.run.time_limits import Limit, TimedOut, time_limit
from gradcheck_suite.run.torch_state import BY_IMPORT, changes_undone

Run = TypeVar("Run")


def users_line(error: BaseException) -> str:
    """Return `FILE, line N` of an exception's innermost frame in user code, or of the frame that
    raised it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [frame for frame in frames if owner_of(frame.filename) is not Owner.SUITE]
    own = [frame for frame in foreign if is_users(frame.filename)]
    # a loop of a library has no frame of the user's below the suite's
    frame = (own or foreign or frames)[-1]
    return f"{Path(file_text(frame.filename)).name}, line {frame.lineno}"


def is_import_failure(error: BaseException) -> bool:
    """Return whether an exception says that something could not be imported.

    It is an `ImportError`, an exception at the top level of a module, or an exception raised in
    place of one of these.
    """
    if isinstance(error, ImportError) or "<module>" in _functions(error):
        return True
    if error.__cause__ is not None:
        return is_import_failure(error.__cause__)
    context = error.__context__
    if context is None or error.__suppress_context__:
        return False
    # a handler that goes on without the import, and fails later in another function, failed by
    # itself
    return _functions(error)[-1:] == _functions(context)[:1] and is_import_failure(context)


def _functions(error: BaseException) -> list[str]:
    return [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]


_BY_TEXT = (
    (
        "does not require grad and does not have a grad_fn",
        (
            "the loss carries no graph: look for torch.no_grad or inference_mode around the loop,"
            " and for detach or item"
        ),
    ),
    (
        "Inference tensors cannot be saved for backward",
        "the loop runs in inference mode: remove torch.inference_mode",
    ),
    (
        "backward through the graph a second time",
        "backward was called twice on the same loss: compute the loss again for each micro-batch",
    ),
    (
        # https://github.com/pytorch/pytorch/issues/143580
        "expect_autograd_hooks_ INTERNAL ASSERT",
        "with static_graph=True, the first forward and backward of a run must not be under no_sync",
    ),
    (
        "Default process group has not been initialized",
        "the loop needs several ranks: verify it with --ranks 2",
    ),
)


def hint(error: BaseException) -> str | None:
    """Return the likely cause of an exception and what to do, or None."""
    if isinstance(error, SystemExit):
        return "the loop ended the program: return from the loop instead"
    if isinstance(error, dataclasses.FrozenInstanceError):
        return "a TrainingRun cannot be changed: keep what the loop needs in variables of its own"
    text = str(error)
    return next((meaning for part, meaning in _BY_TEXT if part in text), None)


_QUIET = ContextVar("_QUIET", default=False)


@contextmanager
def quiet_loops(quiet: bool) -> Iterator[None]:
    """Discard the output of the loops that run inside the block, such as a line for every epoch, if
    `quiet`.
    """
    token = _QUIET.set(quiet)
    try:
        yield
    finally:
        _QUIET.reset(token)


def is_quiet() -> bool:
    """Return whether the output of loops is discarded."""
    return _QUIET.get()


@contextmanager
def discarded_output() -> Iterator[None]:
    """Discard what is written to the process's standard output and error, also by loggers and by
    code in C.
    """
    out = sys.stdout
    err = sys.stderr
    # what is buffered already is the program's, and must not be discarded; a process without a
    # console has no streams
    for stream in filter(None, (out, err)):
        stream.flush()
    # file descriptors, since code in C writes to these and not to `sys.stdout`
    kept = {number: os.dup(number) for number in (1, 2)}
    with open(os.devnull, "w") as nowhere:
        try:
            for number in kept:
                os.dup2(nowhere.fileno(), number)
            # a stream of Python's own, as a notebook has, is replaced
            sys.stdout = sys.stderr = nowhere
            yield
        finally:
            for stream in filter(None, (out, err, nowhere)):
                stream.flush()
            sys.stdout = out
            sys.stderr = err
            for number, copy in kept.items():
                os.dup2(copy, number)
                os.close(copy)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        observations: one per optimizer step, in order.
        start: values of the parameters before the run, by name.
        parameters: values of the parameters after the run, by name.
        beginning: the parameters, the optimizer's settings and its state before the run, as a step
            would leave them.
        raised: one line about the exception that ended the loop, or None.
        trace: the traceback of that exception, from the loop's frame on.
        timed_out: whether the loop was stopped by the time limit.
        endless: whether the loop was stopped because it stepped too often.
        structure: how the loop changed the model's parameters, or None.
        process: what the loop, or its module when it was imported, changed of torch for the whole
            process.
        compute: the autocast dtype of its losses, or None.
        swallowed: the exceptions of its losses after which the loop went on, a line for each.
        hooked: the modules of its model that have a backward hook.
        refused: the message of a `CannotRunHere` with which the loop declined to train this, or
            None.
        scheduler_steps: number of steps in each epoch, one for each learning rate scheduler. An
            epoch is a pass over the loader.
        skipped: for each step that a `GradScaler` skipped, the number of steps before it.
        scaler_calls: (method, number of its calls in each epoch), one for each `GradScaler` and
            optimizer.
        deadlock: whether the loop was stopped because its ranks wait for each other.
        mismatched: whether this rank was ended because other ranks were in another collective.
        collectives: (name, bytes) -> how often the rank entered such a collective; empty where that
            was not counted.
        alike: whether all of several ranks had the same gradients, to the bit, at each step.
        keeps_non_finite: whether `optax.MultiSteps` accumulates, which keeps a NaN or an infinity
            for ever.
        losses: what this rank computed its losses from; None where that was not recorded.
    """

    observations: list[Observation]
    start: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    beginning: Observation = field(default_factory=lambda: Observation((), {}, [], []))
    raised: str | None = None
    trace: str = ""
    timed_out: bool = False
    endless: bool = False
    structure: str | None = None
    process: tuple[str, ...] = ()
    compute: Compute = None
    swallowed: tuple[str, ...] = ()
    hooked: tuple[str, ...] = ()
    refused: str | None = None
    scheduler_steps: tuple[dict[int, int], ...] = ()
    skipped: tuple[int, ...] = ()
    scaler_calls: tuple[tuple[str, dict[int, int]], ...] = ()
    deadlock: bool = False
    mismatched: bool = False
    collectives: dict[tuple[str, int], int] = field(default_factory=dict)
    alike: bool = False
    keeps_non_finite: bool = False
    losses: Losses | None = None


class Ending(TypedDict):
    """How a loop ended: the fields of an `Outcome` that say so."""

    raised: str | None
    trace: str
    refused: str | None
    timed_out: bool
    endless: bool


def run_to_end(
    loop: Callable[[Run], None],
    run: Run,
    time_limit_s: float | None,
    *,
    expect: Callable[[BaseException, Run], None],
    exceeded: Callable[[], bool],
    finish: Callable[[], object] = lambda: None,
) -> Ending:
    """Run a loop and return how it ended.

    Every exception except `KeyboardInterrupt` is a way to end.

    Args:
        loop: the subject.
        run: its argument.
        time_limit_s: seconds after which it is stopped, None for no limit.
        expect: raises `UsageError` where an exception shows that the loop is one of the other
            framework.
        exceeded: returns whether the loop was stopped because it stepped too often.
        finish: called after the loop, within the time limit.

    Raises:
        CannotRunHere: the loop cannot import what it needs, so it would fail on every case.
    """
    raised = None
    trace = ""
    refused = None
    limit = Limit()
    try:
        # the limit is the innermost context, so that it never interrupts the exit of another
        with discarded_output() if is_quiet() else nullcontext(), time_limit(time_limit_s) as limit:
            loop(run)
            finish()
    except KeyboardInterrupt:
        raise
    except (TooManySteps, TimedOut):
        pass
    except CannotRunHere as error:
        raised = refused = str(error)
    except BaseException as error:
        expect(error, run)
        raised, trace = account(error, loop)
        if is_import_failure(error):
            raise CannotRunHere(f"the loop cannot import what it needs: {raised}") from error
    endless = exceeded()
    timed_out = limit.expired and not endless
    if timed_out:
        raised = f"it did not return within {time_limit_s:g} s (the time limit per case)"
    return Ending(
        raised=None if endless else raised,
        trace=trace,
        refused=refused,
        timed_out=timed_out,
        endless=endless,
    )


def run_loop(
    loop: Loop,
    instance: Instance,
    *,
    time_limit_s: float | None = DEFAULT_TIME_LIMIT,
    rank: int = 0,
) -> Outcome:
    """Run a loop on a fresh model.

    Every exception except `KeyboardInterrupt` is part of the outcome.

    Raises:
        CannotRunHere: the loop cannot import what it needs, so it would fail on every case.
    """
    run = instance.run(rank)
    single_process = run.world_size == 1
    observer = (StepObserver if single_process else RankObserver)(
        run.model, run.optimizer, limit=instance.case.plan.step_limit
    )
    before = structure(run.model)
    default_dtype = torch.get_default_dtype()
    try:
        with (
            changes_undone() as changed,
            # a loop that draws, as dropout does, draws the same in every run of the case
            seeded(instance.case.seed, instance.device),
            # a caller may have switched gradients off for itself
            torch.enable_grad(),
            recorded_calls(lambda: len(observer.observations), epoch_of(run.loader)) as calls,
        ):
            ending = run_to_end(
                loop, run, time_limit_s, expect=_expect_torch, exceeded=lambda: observer.exceeded
            )
    finally:
        observer.close()
        # a loop may have set it for the whole process
        torch.set_default_dtype(default_dtype)
    return Outcome(
        observations=observer.observations,
        start=observer.start,
        beginning=observer.beginning,
        # other ranks do not gather sharded parameters where this one has failed
        parameters=(
            observer.values() if single_process or ending["raised"] is None else observer.last
        ),
        structure=_structure_change(run.model, before, observer),
        process=(*BY_IMPORT.get(getattr(loop, "__module__", None) or "", ()), *changed),
        compute=run.loss.compute if isinstance(run.loss, AutocastRecorder) else None,
        swallowed=(
            tuple(run.loss.raised)
            if isinstance(run.loss, AutocastRecorder) and ending["raised"] is None
            else ()
        ),
        hooked=_hooked(run.model),
        scheduler_steps=tuple(map(dict, calls.schedulers.values())),
        skipped=tuple(calls.skipped),
        scaler_calls=tuple(
            (method, dict(counts)) for (method, *_), counts in calls.scalers.items()
        ),
        **ending,
    )


def _hooked(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that have a hook which may change what goes backward."""
    return tuple(
        name or type(module).__name__
        for name, module in model.named_modules()
        # torch has no public way to ask for a module's hooks
        if module._backward_hooks or module._backward_pre_hooks
    )


def _structure_change(
    model: torch.nn.Module, before: Structure, observer: StepObserver
) -> str | None:
    """Return how the loop changed the model's parameters apart from their values, or None."""
    if isinstance(observer, RankObserver) and (left := observer.left_behind):
        return (
            f"fully_shard made new ones, and run.optimizer still has the old {left[0]}: put the new"
            " parameters into run.optimizer.param_groups"
        )
    return structure_changes(before, as_before_sharding(structure(model), before))


_OF_JAX = {field.name for field in dataclasses.fields(JaxTrainingRun)} - {
    field.name for field in dataclasses.fields(TrainingRun)
}


def _expect_torch(error: BaseException, run: TrainingRun) -> None:
    """Raise `UsageError` where a loop failed because it takes what a loop of JAX is given."""
    if not isinstance(error, AttributeError):
        return
    of_run = error.obj is run and error.name in _OF_JAX
    if of_run or (error.obj is run.optimizer and error.name in ("init", "update")):
        raise UsageError(
            f"the loop asks for run.{'' if of_run else 'optimizer.'}{error.name}, which a loop of"
            " JAX is given: decorate it with @gradcheck_suite.jax_training_loop, or say"
            " --framework jax"
        ) from None


def account(error: BaseException, loop: Callable[..., Any]) -> tuple[str, str]:
    """Return one line about an exception, and its traceback, both without the suite's frame."""
    # the outermost frame is that of `run_to_end`
    own = error.__traceback__ and error.__traceback__.tb_next
    code = getattr(inspect.unwrap(loop), "__code__", None)
    inside = [
        frame for frame in traceback.extract_tb(own) if code and frame.filename == code.co_filename
    ]
    where = (
        f" ({Path(file_text(inside[-1].filename)).name}, line {inside[-1].lineno})"
        if inside
        else ""
    )
    message = " ".join(str(error).split())
    line = f"{type(error).__name__}: {message}" if message else type(error).__name__
    meaning = hint(error)
    text = f"{line}{where}; {meaning}" if meaning else f"{line}{where}"
    return text, "".join(traceback.format_exception(type(error), error, own))
