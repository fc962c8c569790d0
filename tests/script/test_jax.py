"""The script of a loop of JAX: status 1 with the faulty loop, 0 with a sound one, 2 where it fails."""

from __future__ import annotations

import pytest

from gradcheck_suite.cli.loading import resolve_loop
from gradcheck_suite.core.case import Case, Plan
from gradcheck_suite.script import NoScriptError, script_text
from gradcheck_suite.verification.check import check
from tests.script.alone import Ended, run_alone
from tests.script.test_violations import LINEAR

LOOP = """
from itertools import islice
import gradcheck_suite, jax, optax
from besides import SUM

def window_gradient(run, params, window):
    total = sum(run.count(batch) for batch in window)
    def loss(params, batch):
        return run.loss(params, batch) * {weight}
    return jax.tree.map(lambda *g: SUM(g), *[jax.grad(loss)(params, batch) for batch in window])

@gradcheck_suite.jax_training_loop
def train(run):
    params, state = run.params, run.optimizer.init(run.params)
    for _ in range(run.epochs):
        batches = iter(run.batches)
        while window := list(islice(batches, {size})):
            {before}
            updates, state = run.optimizer.update(window_gradient(run, params, window), state, params)
            params = optax.apply_updates(params, updates)
"""
SOUND = {"weight": "run.count(batch) / total", "size": "run.accumulation_steps", "before": ""}
TAIL = "if len(window) < run.accumulation_steps: continue"
FAULTS = {
    "step-per-micro-batch": {"size": "1"},
    "tail-dropped": {"before": TAIL},
    "mean-of-means": {"weight": "1 / len(window)"},
    "raised": {"before": "raise ValueError('planted')"},
    "timed-out": {"before": "while True: pass"},
}
DEFAULT = ("step-per-micro-batch", "tail-dropped")
"""The faults whose scripts run in every run of the tests: each takes seconds."""
CASE = Case(LINEAR, Plan((1, 2, 3), 2), dtype="float32")
MISSING = ("gradcheck_suite", "torch")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Return the file of a loop that imports another file of its folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *__import__("sys").path])
    (tmp_path / "besides.py").write_text("SUM = lambda parts: sum(parts[1:], parts[0])\n")
    return tmp_path / "mine.py"


def script_of(file, fault) -> tuple[str, str]:
    """Return the script of a planted fault, and that of the sound loop on the same case."""
    texts = {}
    for name, changes in ((fault, FAULTS[fault]), ("sound", {})):
        file.write_text(LOOP.format(**{**SOUND, **changes}))
        loop = resolve_loop("mine.py:train")
        if name == fault:
            violation = check(loop, CASE, time_limit_s=20.0 if fault == "timed-out" else 60.0)
            violation = violation.violation
            assert violation.diagnosis == fault, violation.explanation
        texts[name] = script_text(loop, "mine.py:train", violation, time_limit_s=20.0)
    return texts[fault], texts["sound"]


@pytest.mark.parametrize(
    "fault",
    [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.full) for name in FAULTS],
)
def test_a_script_of_jax_ends_with_1_for_the_fault_and_with_0_for_the_sound_loop(file, fault):
    faulty, sound = (run_alone(text, missing=MISSING) for text in script_of(file, fault))
    assert faulty.status == 1, faulty
    if fault != "timed-out":  # its process is ended
        assert faulty.output.endswith("the fault is there\n")
        assert faulty.errors == ""
    assert sound == Ended(0, sound.output, "")
    assert sound.output.endswith("the fault is gone\n")


@pytest.mark.share(4)
def test_a_script_of_jax_that_fails_otherwise_ends_with_2(file):
    text, _ = script_of(file, "tail-dropped")
    assert text.count("observer.steps(STEPS)") == 1
    failing = run_alone(text.replace("observer.steps(STEPS)", "nobody_knows"), missing=MISSING)
    assert failing.status == 2
    assert "NameError: name 'nobody_knows' is not defined" in failing.errors
    assert failing.errors.endswith(
        "This is another failure than the fault that the script shows.\n"
    )
    assert "the fault is" not in failing.output


def test_without_a_script_of_jax_there_is_a_reason(file):
    file.write_text(LOOP.format(**{**SOUND, **FAULTS["tail-dropped"]}))
    loop = resolve_loop("mine.py:train")
    violation = check(loop, CASE).violation
    with pytest.raises(NoScriptError, match="the loop is in no file of its own"):
        script_text(loop, "tail_dropped", violation)
