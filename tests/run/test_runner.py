"""Loops that misbehave: each is an outcome with its own kind of violation, and torch is as it was
afterwards.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import time

import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Plan, check
from gradcheck_suite.loops.reset_modes import backward_window, windows
from gradcheck_suite.loops.reset_modes import plain as sound
from gradcheck_suite.run.instance import generated_instance
from gradcheck_suite.run.runner import quiet_loops, run_loop
from tests.run.test_instance import SPEC

CASE = Case(SPEC, Plan((1, 2), 1, 2))
SHORT = 0.1


def raises(run):
    next(windows(run))
    raise LookupError("no such\nthing")


def never_steps(run):
    for window in windows(run):
        backward_window(run, window)


def returns_at_once(run):
    return


def steps_for_ever(run):
    while True:
        run.optimizer.step()


def swallows_and_steps_for_ever(run):
    for _ in range(1000):
        try:
            run.optimizer.step()
        except BaseException:
            continue


def hangs(run):
    time.sleep(60)


def exits(run):
    sys.exit(3)


def adds_a_parameter(run):
    sound(run)
    run.model.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))


def replaces_a_parameter(run):
    sound(run)
    run.model[0].weight = torch.nn.Parameter(torch.zeros(1, 2, dtype=run.dtype))


def removes_a_parameter(run):
    sound(run)
    run.model[0].bias = None


def freezes_a_parameter(run):
    sound(run)
    run.model[0].bias.requires_grad_(False)


def forgets_a_parameter(run):
    del run.optimizer.param_groups[0]["params"][0]
    sound(run)


def forgets_a_parameter_and_resets_it(run):
    del run.optimizer.param_groups[0]["params"][0]
    for window in windows(run):
        run.model.zero_grad()
        backward_window(run, window)
        run.optimizer.step()


def regroups_parameters(run):
    (group,) = run.optimizer.param_groups
    run.optimizer.param_groups = [{**group, "params": [p]} for p in reversed(group["params"])]
    sound(run)


def changes_the_run(run):
    run.epochs = 1


@pytest.mark.parametrize(
    ("loop", "kind", "diagnosis", "says"),
    [
        (raises, "raised", "raised", "LookupError: no such thing"),
        (hangs, "raised", "timed-out", "did not return within 0.1 s"),
        (exits, "raised", "raised", "SystemExit: 3"),
        (changes_the_run, "raised", "raised", "a TrainingRun cannot be changed"),
        (
            never_steps,
            "step-count",
            "never-stepped",
            "was called 0 times, expected 4 (2 epochs of 2 windows)",
        ),
        (returns_at_once, "step-count", "never-stepped", "was called 0 times"),
        (steps_for_ever, "step-count", "wrong-step-count", "was called 16 or more times"),
        (
            swallows_and_steps_for_ever,
            "step-count",
            "wrong-step-count",
            "was called 16 or more times",
        ),
        (adds_a_parameter, "parameters", "changed-model", "added extra"),
        (replaces_a_parameter, "parameters", "changed-model", "replaced 0.weight"),
        (removes_a_parameter, "parameters", "changed-model", "removed 0.bias"),
        (
            forgets_a_parameter,
            "parameters",
            "parameter-not-updated",
            "0.weight is in no parameter group",
        ),
        (forgets_a_parameter_and_resets_it, "parameters", "parameter-not-updated", "nor resets it"),
        (
            freezes_a_parameter,
            "parameters",
            "changed-model",
            "0.bias.requires_grad from True to False",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_misbehaving_loop_is_a_violation_of_its_own_kind(loop, kind, diagnosis, says):
    violation = check(loop, CASE, time_limit_s=SHORT if loop is hangs else 30).violation
    assert violation is not None
    assert (violation.kind, violation.diagnosis) == (kind, diagnosis)
    assert says in violation.explanation
    assert "\n" not in violation.explanation


def test_the_traceback_starts_in_the_loop_and_names_the_line():
    violation = check(raises, CASE).violation
    assert "test_runner.py, line" in violation.explanation
    text = "\n".join(violation.details)
    assert 'raise LookupError("no such\\nthing")' in text
    assert "gradcheck_suite/run/runner.py" not in text


def test_a_users_interrupt_is_no_verdict():
    def interrupted(run):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_loop(interrupted, generated_instance(CASE))


@pytest.mark.parametrize("loop", [sound, regroups_parameters])
def test_a_sound_loop_holds(loop):
    assert check(loop, CASE).holds


def turns_gradients_off(run):
    torch.set_grad_enabled(False)


def seeds_torch(run):
    torch.manual_seed(12345)
    torch.randn(100)


def sets_the_default_dtype(run):
    torch.set_default_dtype(
        torch.float32 if torch.get_default_dtype() is torch.float64 else torch.float64
    )


def turns_gradients_off_and_raises(run):
    torch.set_grad_enabled(False)
    torch.randn(3)
    raise ValueError


def _state():
    return torch.is_grad_enabled(), torch.get_rng_state().tolist(), torch.get_default_dtype()


@pytest.mark.parametrize(
    "loop",
    [
        sound,
        raises,
        exits,
        hangs,
        steps_for_ever,
        turns_gradients_off,
        seeds_torch,
        sets_the_default_dtype,
        turns_gradients_off_and_raises,
    ],
    ids=lambda loop: loop.__name__,
)
def test_torch_is_as_it_was_afterwards(loop):
    torch.manual_seed(7)
    before = _state()
    run_loop(loop, generated_instance(CASE), time_limit_s=SHORT if loop is hangs else 30)
    assert _state() == before


def test_a_loop_runs_with_gradients_on_even_where_they_are_off():
    with torch.no_grad():
        assert check(sound, CASE).holds
        assert not torch.is_grad_enabled()


def test_a_loop_that_draws_from_torch_sees_the_same_numbers_every_time():
    drawn = []

    def draws(run):
        drawn.append(torch.randn(3).tolist())

    for outside_seed in (1, 2):
        torch.manual_seed(outside_seed)
        run_loop(draws, generated_instance(CASE))
    run_loop(draws, generated_instance(CASE.replace(seed=1)))
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_trial_draws_nothing_from_the_global_generators():
    torch.manual_seed(7)
    before = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
    run_loop(sound, generated_instance(CASE))
    assert (
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    ) == before


def test_every_run_has_a_fresh_model():
    seen = []

    def spoils(run):
        seen.append([p.detach().clone() for p in run.model.parameters()])
        with torch.no_grad():
            for p in run.model.parameters():
                p.add_(1)
        sound(run)

    instance = generated_instance(CASE)
    for _ in range(2):
        run_loop(spoils, instance)
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


# What a quiet loop writes is discarded, and what the suite writes afterwards is not.


@pytest.fixture
def loud():
    """A loop that prints, logs, writes to the file descriptor, and raises."""
    # as a library does when it is imported: the handler keeps the stream
    handler = logging.StreamHandler(sys.stderr)
    logger = logging.getLogger("loud")
    logger.addHandler(handler)

    def loop(run):
        print("to standard output")
        print("to standard error", file=sys.stderr)
        logger.error("to the log")
        os.write(1, b"to the file descriptor")
        raise ValueError("too loud")

    yield loop
    logger.removeHandler(handler)


SAID = ("to standard output", "to standard error", "to the log", "to the file descriptor")


def test_quiet_loops(capfd, loud):
    instance = generated_instance(Case(SPEC, Plan((1,), 1)))
    for quiet in (False, True):
        with quiet_loops(quiet):
            outcome = run_loop(loud, instance)
        print("the suite")
        assert outcome.raised.startswith("ValueError: too loud")
        assert 'print("to standard output")' not in outcome.trace
        printed = "".join(capfd.readouterr())
        assert "the suite" in printed
        assert [text in printed for text in SAID] == [not quiet] * len(SAID)


def test_a_quiet_loop_that_hangs_leaves_the_output_as_it_was(capfd):
    def hangs(run):
        while True:
            try:
                print("x")
            except BaseException:
                continue

    with quiet_loops(True):
        outcome = run_loop(hangs, generated_instance(Case(SPEC, Plan((1,), 1))), time_limit_s=0.05)
    assert outcome.timed_out
    print("the suite")
    assert "".join(capfd.readouterr()) == "the suite\n"
