"""Scripts of JAX with their truth: faulty ones are named, and sound ones are not blamed."""

from __future__ import annotations

import contextlib
import io

import pytest

import gradcheck_suite
from gradcheck_suite.cli.audit import script_runner
from tests.auditing.jax import words
from tests.auditing.jax.programs import FAULTY, PROLOGUE, SOUND, UNJUDGED

jax = pytest.importorskip("jax")
pytest.importorskip("optax")


def audited(folder, name, text, **options):
    """Return the result of an audit of a script, and what the script printed."""
    path = folder / f"script_{name}.py"
    path.write_text(PROLOGUE + text)
    printed = io.StringIO()
    with (
        jax.enable_x64(False),  # another test of the session may have switched it on
        gradcheck_suite.audit(name=name, quiet=True, **options) as audit,
        contextlib.redirect_stdout(printed),
    ):
        script_runner(str(path), ())()
    return audit.result, printed.getvalue()


def needs(text):
    """Skip a script whose packages are not installed."""
    for package in ("equinox", "flax"):
        if package in text:
            pytest.importorskip(package)


@pytest.mark.share(9)
@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_script_is_named(tmp_path, name, pytestconfig):
    truth, text = FAULTY[name]
    needs(text)
    result, _ = audited(tmp_path, name, text)
    assert [violation.diagnosis for violation in result.violations] == [truth]
    (violation,) = result.violations
    assert violation.place.rpartition(":")[0].endswith(f"script_{name}.py")
    assert violation.fix
    said = f"{violation.diagnosis}: {violation.explanation}"
    if pytestconfig.getoption("--write-golden"):
        words.write(name, said)
    if jax.__version__.startswith("0.10."):  # other releases round other digits
        assert words.rows()[name] == said


@pytest.mark.share(9)
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_script_holds(tmp_path, name):
    needs(SOUND[name])
    result, _ = audited(tmp_path, name, SOUND[name])
    assert result.violations == ()
    assert result.holds, result.unjudged
    assert result.windows
    # no batch of these programs has rows that depend on each other
    assert "dependent-items" not in {one.name for one in result.named_findings}


@pytest.mark.share(4)
@pytest.mark.parametrize("name", UNJUDGED)
def test_what_cannot_be_judged_has_its_reason(tmp_path, name):
    reason, text = UNJUDGED[name]
    result, _ = audited(tmp_path, name, text)
    assert result.violations == ()
    assert result.unjudged
    assert reason in {one.name for one in result.named_findings}


def test_a_step_in_each_micro_batch_is_named_where_the_user_states_k(tmp_path):
    text = SOUND["apply_every_of_plain_sgd"].replace("optax.apply_every(4)", "optax.identity()")
    result, _ = audited(tmp_path, "each", text)
    assert result.holds
    result, _ = audited(tmp_path, "each", text, accumulation_steps=4)
    assert [violation.diagnosis for violation in result.violations] == ["step-per-micro-batch"]


def test_a_share_of_the_loss_and_one_micro_batch_is_a_finding(tmp_path):
    text = SOUND["apply_every_of_plain_sgd"].replace("optax.apply_every(4)", "optax.identity()")
    text = text.replace("jax.grad(mse)(p, x, y)", "jax.grad(lambda p: mse(p, x, y) / 4)(p)")
    result, _ = audited(tmp_path, "share", text)
    assert result.holds
    assert "step-per-micro-batch" in {one.name for one in result.named_findings}


def test_leaves_that_never_get_a_gradient_are_a_finding(tmp_path):
    text = SOUND["clip_before_update_by_hand"].replace(
        "jax.grad(mse)(p, x, y)",
        "jax.grad(lambda p: mse({**p, 'b': jax.lax.stop_gradient(p['b'])}, x, y))(p)",
    )
    result, _ = audited(tmp_path, "detached", text)
    assert result.holds
    assert "no-gradient" in {one.name for one in result.named_findings}


def test_an_accepted_diagnosis_is_no_violation(tmp_path):
    _, text = FAULTY["divided_twice"]
    result, _ = audited(tmp_path, "accepted", text, accept=("wrong-scale",))
    assert result.holds
    assert [violation.diagnosis for violation in result.accepted] == ["wrong-scale"]


@pytest.mark.share(4)
def test_the_audit_ends_after_as_many_steps_as_asked_for(tmp_path):
    result, _ = audited(tmp_path, "few", SOUND["inject_hyperparams"], steps=3)
    assert result.steps == 3
    assert result.holds


@pytest.mark.share(4)
def test_the_run_ends_at_its_first_violation_where_that_is_asked_for(tmp_path):
    from gradcheck_suite.auditing.stopping import StoppedOnViolation

    _, text = FAULTY["clipped_per_micro_batch"]
    path = tmp_path / "script_stops.py"
    path.write_text(PROLOGUE + text)
    audit = gradcheck_suite.audit(name="stops", quiet=True, stop_on_violation=True).open()
    try:
        with pytest.raises(StoppedOnViolation):
            script_runner(str(path), ())()
    finally:
        result = audit.close()
    assert [violation.diagnosis for violation in result.violations] == ["clipped"]
    assert result.steps < 6
