"""The lines of a loop: what computes the loss, sends it backward, steps, and what must change.

The comment at the end of a line is what the line is.
"""

from __future__ import annotations

import importlib.util
import re

import pytest

from gradcheck_suite.core.faults import FIX, remedy_of
from gradcheck_suite.core.results import Violation
from gradcheck_suite.core.source_lines import loop_places, loop_source

ARGUMENTS = """
def part(run, batch, total):
    return run.loss(run.model, batch) / total

def train(run):
    total = total_of(run)
    for batch in run.loader:
        part(run, batch, total).backward()  # backward
    run.optimizer.step()  # step
"""
DIVIDED = """
def train(run):
    for batch in run.loader:
        total = run.count(batch)
        loss = run.loss(run.model, batch)  # loss
        loss = loss / total  # to change
        loss.backward()  # backward
    run.optimizer.step()  # step
"""
AT_BACKWARD = """
def train(run):
    total = total_of(run)
    for batch in run.loader:
        loss = run.loss(run.model, batch)  # loss
        (loss / total).backward()  # backward, to change
    run.optimizer.step()  # step
"""
WRAPPED = """
def train(run):
    scaler, accelerator = run.scaler, run.accelerator
    for batch in run.loader:
        found = run.criterion(run.model(batch), batch)  # loss
        scaled = scaler.scale(found)
        accelerator.backward(scaled)  # backward
    run.optimizer.step()  # step
"""
GRADIENT_GIVEN = """
def train(run):
    for batch in run.loader:
        weight = run.count(batch)
        value = run.loss(run.model, batch)  # loss
        value.backward(weight)  # backward
    run.optimizer.step()  # step
"""
LISTED = """
def train(run):
    losses = []
    for batch in run.loader:
        losses.append(run.loss(run.model, batch))  # loss
    sum(losses).backward()  # backward
    run.optimizer.step()  # step
"""
HELPERS = """
import functools

def decorated(function):
    return functools.wraps(function)(lambda run: function(run))

def advance(run):
    run.optimizer.step()  # step
    run.optimizer.zero_grad()

def one(run, batch):
    loss = run.loss(run.model, batch)  # loss
    loss.backward()  # backward

@decorated
def train(run):
    for batch in run.loader:
        one(run, batch)
    advance(run)
"""
RESETS = """
def train(run):
    for batch in run.loader:
        run.optimizer.zero_grad()  # to change
        run.loss(run.model, batch).backward()  # backward
    run.optimizer.step()  # step
"""
CLIPS = """
import torch

def train(run):
    for batch in run.loader:
        run.loss(run.model, batch).backward()  # backward
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)  # to change
    run.optimizer.step()  # step
"""
RAISES = """
def train(run):
    run.loss(run.model, 1).backward()  # backward
    raise ValueError  # to change
"""
OF_JAX = """
import functools

def marked(function):
    return function

@marked
def train(run):
    def objective(params, batch):
        return run.loss(params, batch)  # loss
    for batch in run.batches:
        gradient = jax.grad(objective)(run.params, batch)  # backward
        updates, state = run.optimizer.update(gradient, state, run.params)  # step
"""
NOTHING = """
def marked(function):
    return function

@marked
@marked
def train(run):  # loss
    pass
"""
TABLE = [
    (ARGUMENTS, "changed-batch", "gradient"),
    (ARGUMENTS, "tail-dropped", "step-count"),
    (DIVIDED, "mean-of-means", "gradient"),
    (AT_BACKWARD, "wrong-scale", "gradient"),
    (WRAPPED, "not-linear", "gradient"),
    (GRADIENT_GIVEN, "not-linear", "gradient"),
    (LISTED, "not-linear", "gradient"),
    (HELPERS, "not-linear", "gradient"),
    (RESETS, "reset-inside-window", "gradient"),
    (CLIPS, "clipped", "gradient"),
    (RAISES, "raised", "raised"),
    (OF_JAX, "no-gradient", "gradient"),
    (NOTHING, "never-stepped", "step-count"),
]
FIELDS = {"where": "loss", "backward": "backward", "stepped": "step", "to_change": "to change"}


def loop_of(text, folder):
    file = folder / "mine.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("mine", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train


def lines_of(text, what):
    return [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if what in re.split(", ", line.partition("  # ")[2])
    ]


@pytest.mark.parametrize(("text", "diagnosis", "kind"), TABLE)
def test_each_line_is_what_its_comment_says(text, diagnosis, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    violation = Violation(kind, diagnosis, "planted (mine.py, line 4)")
    found = loop_places(loop_of(text, tmp_path), violation)
    wanted = {field: lines_of(text, what) for field, what in FIELDS.items()}
    assert {
        field: [int(place.rpartition(":")[2])] if (place := found.get(field)) else []
        for field in FIELDS
    } == wanted


@pytest.mark.parametrize("cause", ["", "average", "sent-again"])
def test_a_reset_is_not_to_change_where_the_gradient_is_wrong_for_another_cause(cause, tmp_path):
    remedy = remedy_of("stale-window", [cause])
    violation = Violation("gradient", "stale-window", f"planted{FIX}{remedy}")
    found = loop_places(loop_of(RESETS, tmp_path), violation)
    assert ("to_change" in found) == (not cause)


@pytest.mark.parametrize(
    ("text", "diagnosis", "kind", "leads"),
    [
        (ARGUMENTS, "mean-of-means", "gradient", "backward"),
        (ARGUMENTS, "tail-dropped", "step-count", "step"),
        (AT_BACKWARD, "mean-of-means", "gradient", "to change"),
        (AT_BACKWARD, "changed-batch", "gradient", "loss"),
        (OF_JAX, "tail-dropped", "step-count", "step"),
        (OF_JAX, "mean-of-means", "gradient", "loss"),
        (NOTHING, "never-stepped", "step-count", "loss"),
    ],
)
def test_a_verdict_leads_with_the_line_that_must_change(
    text, diagnosis, kind, leads, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    violation = Violation(kind, diagnosis, "planted")
    shown = Violation(kind, diagnosis, "planted", **loop_places(loop_of(text, tmp_path), violation))
    (line,) = lines_of(text, leads)
    assert shown.place == f"mine.py:{line}"


def test_the_lines_that_a_page_marks_are_those_of_the_loop(tmp_path):
    source = loop_source(loop_of(AT_BACKWARD, tmp_path))
    assert {number: mark for number, _, mark in source["lines"] if mark} == {
        5: "loss",
        6: "backward",
        7: "step",
    }
