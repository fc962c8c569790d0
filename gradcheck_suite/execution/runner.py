"""Runs a loop on an instance and records its outcome."""

from __future__ import annotations

import inspect
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.execution.autocast import AutocastRecorder, Compute
from gradcheck_suite.execution.batches import epoch_of
from gradcheck_suite.execution.devices import seeded
from gradcheck_suite.execution.instance import Instance
from gradcheck_suite.execution.observer import Observation, Observer, TooManySteps
from gradcheck_suite.execution.parameters import Structure, structure, structure_changes
from gradcheck_suite.execution.quiet import loop_output
from gradcheck_suite.execution.ranks.sharded import RankObserver, as_before_sharding
from gradcheck_suite.execution.scaler_calls import ScalerCalls, scaler_calls
from gradcheck_suite.execution.scheduler_steps import Calls, scheduler_steps
from gradcheck_suite.execution.time_limits import Limit, TimedOut, time_limit
from gradcheck_suite.execution.tracebacks import hint, is_import_failure
from gradcheck_suite.schema.contract import Loop
from gradcheck_suite.schema.options import DEFAULT_TIME_LIMIT


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        observations: one per optimizer step, in order.
        start: values of the parameters before the run, by name.
        parameters: values of the parameters after the run, by name.
        start_state: the optimizer's state for each trainable parameter before the run, by name.
        raised: one line about the exception that ended the loop, or None.
        trace: the traceback of that exception, from the loop's frame on.
        timed_out: whether the loop was stopped by the time limit.
        endless: whether the loop was stopped because it stepped too often.
        structure: how the loop changed the model's parameters, or None.
        compute: the autocast dtype of its losses, or None.
        refused: the message of a `CannotRunHere` with which the loop declined to train this, or None.
        scheduler_steps: number of steps in each epoch, one for each learning rate scheduler. An epoch is a pass over
            the loader.
        skipped: for each step that a `GradScaler` skipped, the number of steps before it.
        scaler_calls: (method, number of its calls in each epoch), one for each `GradScaler` and optimizer.
        deadlock: whether the loop was stopped because its ranks wait for each other.
        mismatched: whether this rank was ended because other ranks were in another collective.
        collectives: (name, bytes) -> how often the rank entered such a collective; empty where that was not counted.
        alike: whether all of several ranks had the same gradients, to the bit, at each step.
    """

    observations: list[Observation]
    start: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    start_state: dict[str, Any] = field(default_factory=dict)
    raised: str | None = None
    trace: str = ""
    timed_out: bool = False
    endless: bool = False
    structure: str | None = None
    compute: Compute = None
    refused: str | None = None
    scheduler_steps: tuple[dict[int, int], ...] = ()
    skipped: tuple[int, ...] = ()
    scaler_calls: tuple[tuple[str, dict[int, int]], ...] = ()
    deadlock: bool = False
    mismatched: bool = False
    collectives: dict[tuple[str, int], int] = field(default_factory=dict)
    alike: bool = False


def run_loop(
    loop: Loop, instance: Instance, *, time_limit_s: float | None = DEFAULT_TIME_LIMIT, rank: int = 0
) -> Outcome:
    """Run a loop on a fresh model. Every exception except `KeyboardInterrupt` is part of the outcome.

    Raises:
        CannotRunHere: the loop cannot import what it needs, so it would fail on every case.
    """
    run = instance.run(rank)
    alone = run.world_size == 1
    observer = (Observer if alone else RankObserver)(run.model, run.optimizer, limit=instance.case.plan.step_limit)
    before = structure(run.model)
    raised, trace, refused, limit = None, "", None, Limit()
    scaled, scheduled, epoch = ScalerCalls(), Calls(), epoch_of(run.loader)
    default_dtype = torch.get_default_dtype()
    try:
        with (
            loop_output(),
            seeded(instance.case.seed, instance.device),
            torch.enable_grad(),
            scaler_calls(lambda: len(observer.observations), epoch) as scaled,
            scheduler_steps(epoch) as scheduled,
            time_limit(time_limit_s) as limit,
        ):
            loop(run)
    except KeyboardInterrupt:
        raise
    except (TooManySteps, TimedOut):
        pass
    except CannotRunHere as error:
        raised = refused = str(error)
    except BaseException as error:
        raised, trace = _account(error, loop)
        if is_import_failure(error):
            raise CannotRunHere(f"the loop cannot import what it needs: {raised}") from error
    finally:
        observer.close()
        torch.set_default_dtype(default_dtype)
    endless, timed_out = observer.exceeded, limit.expired and not observer.exceeded
    if timed_out:
        raised = f"it did not return within {time_limit_s:g} s (the time limit per case)"
    return Outcome(
        observations=observer.observations,
        start=observer.start,
        start_state=observer.start_state,
        # other ranks do not gather sharded parameters where this one has failed
        parameters=observer.values() if alone or raised is None else observer.last,
        raised=None if endless else raised,
        trace=trace,
        timed_out=timed_out,
        endless=endless,
        structure=_changes(run.model, before, observer),
        compute=run.loss.compute if isinstance(run.loss, AutocastRecorder) else None,
        refused=refused,
        scheduler_steps=scheduled.counts,
        skipped=tuple(scaled.skipped),
        scaler_calls=scaled.counts,
    )


def _changes(model: torch.nn.Module, before: Structure, observer: Observer) -> str | None:
    """Return how the loop changed the model's parameters apart from their values, or None."""
    if isinstance(observer, RankObserver) and (left := observer.left_behind):
        return (
            f"fully_shard made new ones, and run.optimizer still has the old {left[0]}: put the new parameters into "
            "run.optimizer.param_groups"
        )
    return structure_changes(before, as_before_sharding(structure(model), before))


def _account(error: BaseException, loop: Loop) -> tuple[str, str]:
    """Return one line about an exception, and its traceback, both without the suite's frame."""
    own = error.__traceback__ and error.__traceback__.tb_next
    code = getattr(inspect.unwrap(loop), "__code__", None)
    inside = [frame for frame in traceback.extract_tb(own) if code and frame.filename == code.co_filename]
    where = f" ({Path(inside[-1].filename).name}, line {inside[-1].lineno})" if inside else ""
    message = " ".join(str(error).split())
    line = f"{type(error).__name__}: {message}" if message else type(error).__name__
    meaning = hint(error)
    text = f"{line}{where}; {meaning}" if meaning else f"{line}{where}"
    return text, "".join(traceback.format_exception(type(error), error, own))
