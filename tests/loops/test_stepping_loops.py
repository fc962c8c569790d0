"""Loops that do more around a step: schedulers, clipping, scaling, averages, logging, interruption,
freezing.

The sound forms hold under optimizers that keep a state, and the faulty ones are found and named.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch

from gradcheck_suite import Plan, check, verify
from gradcheck_suite.core.results import result_lines
from gradcheck_suite.loops.reset_modes import backward_window, part_of_window, window_count, windows
from studies.zoo.bug import window_losses
from tests.faults.small_cases import CASES, REGRESSION
from tests.training import trains

SOUND, FAULTY = {}, {}
OPTIMIZERS = ("momentum", "adamw")


def sound(loop):
    SOUND[loop.__name__] = loop
    return loop


def faulty(diagnosis):
    def kept(loop):
        FAULTY[loop.__name__] = (loop, diagnosis)
        return loop

    return kept


# --- schedulers


@sound
def scheduler_per_window(run):
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 10)
    trains(after=lambda *_: scheduler.step())(run)


@sound
def scheduler_per_epoch(run):
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1)
    for _ in range(run.epochs):
        batches = list(run.loader)
        for first in range(0, len(batches), run.accumulation_steps):
            run.optimizer.zero_grad()
            backward_window(run, batches[first : first + run.accumulation_steps])
            run.optimizer.step()
        scheduler.step()


@faulty("step-per-micro-batch")
def plateau_per_micro_batch(run):
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer)

    def backward(run, window):
        for batch in window:
            loss = part_of_window(run, batch, window_count(run, window))
            loss.backward()
            scheduler.step(loss.detach())

    trains(backward=backward)(run)


@faulty("step-per-micro-batch")
def scheduler_per_micro_batch_in_the_last_epoch(run):
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 100)
    for epoch in range(run.epochs):
        batches = list(run.loader)
        for first in range(0, len(batches), run.accumulation_steps):
            window = batches[first : first + run.accumulation_steps]
            run.optimizer.zero_grad()
            backward_window(run, window)
            run.optimizer.step()
            for _ in window if epoch == run.epochs - 1 else window[:1]:
                scheduler.step()


# --- clipping, scaling, averages, logging


@sound
def clip_and_log_at_the_windows_end(run):
    norms = []
    trains(
        before=lambda *_: norms.append(
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), math.inf)
        )
    )(run)


def scaled_windows(run, scaler):
    """Yield after the scaled backward passes of each window."""
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            scaler.scale(part_of_window(run, batch, total)).backward()
        yield


@sound
def scaler_at_the_windows_end(run):
    scaler = torch.amp.GradScaler(run.device.type, init_scale=2.0**8)
    for _ in scaled_windows(run, scaler):
        scaler.unscale_(run.optimizer)
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), math.inf)
        scaler.step(run.optimizer)
        scaler.update()


@faulty("step-per-micro-batch")
def disabled_scaler_updated_per_micro_batch(run):
    scaler = torch.amp.GradScaler(run.device.type, enabled=False)
    for window in windows(run):
        run.optimizer.zero_grad()
        for part in window_losses(run, window):
            scaler.scale(part).backward()
            scaler.update()
        scaler.step(run.optimizer)


@sound
def two_scalers(run):
    """One scaler is enabled and one is not; each is called once per window."""
    scaler, disabled = (
        torch.amp.GradScaler(run.device.type, 2.0**8, enabled=enabled) for enabled in (True, False)
    )
    for _ in scaled_windows(run, scaler):
        disabled.unscale_(run.optimizer)
        scaler.step(run.optimizer)
        scaler.update()
        disabled.update()


@sound
def average_of_the_weights_kept(run):
    average = torch.optim.swa_utils.AveragedModel(
        run.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    trains(after=lambda *_: average.update_parameters(run.model))(run)


# --- an optimizer in the backward


def step_in_a_hook(run):
    """Step in the hook of the last gradient that a backward adds, and release the gradients there."""
    parameters, arrived = [p for p in run.model.parameters() if p.requires_grad], set()

    def arrive(p):
        arrived.add(p)
        if len(arrived) == len(parameters):
            run.optimizer.step()
            run.optimizer.zero_grad()
            arrived.clear()

    handles = [p.register_post_accumulate_grad_hook(arrive) for p in parameters]
    for window in windows(run):
        total = window_count(run, window)
        for batch in window:
            part_of_window(run, batch, total).backward()
    for handle in handles:
        handle.remove()


FAULTY["step_in_a_hook"] = step_in_a_hook, "step-per-micro-batch"


# --- an interruption in mid-window


def resumed(run, restored):
    """Save after each micro-batch, lose everything, and go on from what `restored` reads of the
    checkpoint.
    """
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            part_of_window(run, batch, total).backward()
            checkpoint = {
                "model": copy.deepcopy(run.model.state_dict()),
                "optimizer": copy.deepcopy(run.optimizer.state_dict()),
                "gradients": [
                    None if p.grad is None else p.grad.clone() for p in run.model.parameters()
                ],
            }
            for p in run.model.parameters():
                p.grad = None
            run.optimizer.state.clear()
            restored(checkpoint)
        run.optimizer.step()


def restore(run, checkpoint, *, optimizer=True):
    run.model.load_state_dict(checkpoint["model"])
    if optimizer:
        run.optimizer.load_state_dict(checkpoint["optimizer"])
    for p, gradient in zip(run.model.parameters(), checkpoint["gradients"], strict=True):
        p.grad = gradient


@sound
def resumed_with_everything(run):
    resumed(run, lambda checkpoint: restore(run, checkpoint))


@faulty("optimizer-state-changed")
def resumed_without_the_optimizer(run):
    resumed(run, lambda checkpoint: restore(run, checkpoint, optimizer=False))


# --- freezing


@sound
def frozen_between_windows(run):
    """Freeze the model while it is evaluated, after each step."""
    trained = [p for p in run.model.parameters() if p.requires_grad]

    def require(gradients):
        for p in trained:
            p.requires_grad_(gradients)
        run.model.train(gradients)

    def evaluate(*_):
        require(False)
        assert not run.loss(run.model, next(iter(run.loader))).requires_grad
        require(True)

    trains(after=evaluate)(run)


PLANS = (Plan((2, 2, 2, 2), 2), Plan((1, 3, 2), 2, 2))


def found(loop, optimizer, plans=PLANS):
    """Return the diagnoses of a loop on small plans; None where it holds."""
    cases = (CASES[0].replace(problem=REGRESSION, plan=plan, optimizer=optimizer) for plan in plans)
    verdicts = [check(loop, case) for case in cases]
    return {None if v.violation is None else v.violation.diagnosis for v in verdicts}, verdicts


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_loop_holds_with_a_real_optimizer(name):
    for optimizer in OPTIMIZERS:
        assert found(SOUND[name], optimizer)[0] == {None}


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_loop_is_found_and_named(name):
    loop, diagnosis = FAULTY[name]
    for optimizer in OPTIMIZERS:
        names, verdicts = found(loop, optimizer)
        assert names <= set(diagnosis.split(" or ")), [
            v.violation and v.violation.explanation for v in verdicts
        ]


def test_a_step_in_a_hook_is_sound_for_windows_of_one_micro_batch():
    for optimizer in OPTIMIZERS:
        assert found(
            step_in_a_hook, optimizer, [plan.replace(accumulation_steps=1) for plan in PLANS]
        )[0] == {None}


@pytest.mark.full
@pytest.mark.usefixtures("only_linear")
def test_a_schedule_of_micro_batches_may_be_declared():
    loop, _ = FAULTY["plateau_per_micro_batch"]
    meant = verify(loop, examples=10, assumes=("schedules-micro-batches",))
    assert meant.holds, meant.violation
    lines = result_lines(meant)
    assert "    assumes schedules-micro-batches: steps of schedulers were not judged" in lines
    violation = verify(loop, examples=10).violation
    assert violation.diagnosis == "step-per-micro-batch"
    assert "assumes `schedules-micro-batches`" in violation.explanation


def test_the_epoch_is_named_in_which_a_scheduler_is_stepped_once_per_micro_batch():
    loop, _ = FAULTY["scheduler_per_micro_batch_in_the_last_epoch"]
    case = CASES[0].replace(problem=REGRESSION, plan=PLANS[1])
    assert "was stepped 3 times in epoch 1, once per micro-batch, and the optimizer 2 times" in (
        check(loop, case).violation.explanation
    )
