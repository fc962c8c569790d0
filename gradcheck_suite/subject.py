"""Running a loop on a trial, with everything it does written down."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

import torch

from gradcheck_suite.contract import Loop
from gradcheck_suite.guard import TimedOut, time_limit
from gradcheck_suite.observer import Observation, Observer, TooManySteps
from gradcheck_suite.trial import Trial

DEFAULT_TIME_LIMIT = 30.0
"""Seconds one case's loop may take; a generated case takes milliseconds."""


@dataclass(frozen=True)
class Outcome:
    """What a loop did.

    Attributes:
        observations: one per optimizer step, in order.
        parameters: trainable parameters' values at the end.
        start: trainable parameters' values at the beginning.
        raised: one line about the exception that ended the loop, or None.
        trace: that exception's traceback.
        endless: whether it was stopped for stepping too often.
        structure: how the loop changed the model's parameters, or None.
    """

    observations: list[Observation]
    start: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    raised: str | None = None
    trace: str = ""
    endless: bool = False
    structure: str | None = None


def run_loop(loop: Loop, trial: Trial, *, time_limit_s: float | None = DEFAULT_TIME_LIMIT) -> Outcome:
    """Run a loop on a fresh model; whatever it raises, but an interrupt by the user, is part of the outcome."""
    run = trial.run()
    steps = trial.case.plan.steps
    observer = Observer(run.model, run.optimizer, limit=2 * steps + 8, trajectory=trial.case.optimizer is not None)
    before = dict(run.model.named_parameters())
    start = {name: p.detach().clone() for name, p in observer.parameters.items()}
    raised, trace, endless = None, "", False
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), time_limit(time_limit_s):
            # torch.manual_seed would queue a call for every kind of device, each with a formatted stack
            torch.default_generator.manual_seed(trial.case.seed)
            loop(run)
    except KeyboardInterrupt:
        raise
    except TooManySteps:
        endless = True
    except TimedOut:
        raised = f"it did not return within {time_limit_s:g} s (the time limit per case)"
    except BaseException as error:
        raised, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
    finally:
        observer.close()
    return Outcome(
        observations=observer.observations,
        start=start,
        parameters={name: p.detach() for name, p in observer.parameters.items()},
        raised=raised,
        trace=trace,
        endless=endless,
        structure=_changed_structure(before, dict(run.model.named_parameters())),
    )


def _changed_structure(before: dict[str, torch.nn.Parameter], after: dict[str, torch.nn.Parameter]) -> str | None:
    changes = [
        *(f"removed {name}" for name in before.keys() - after.keys()),
        *(f"added {name}" for name in after.keys() - before.keys()),
        *(f"replaced {name}" for name in before.keys() & after.keys() if before[name] is not after[name]),
    ]
    return ", ".join(sorted(changes)) or None
