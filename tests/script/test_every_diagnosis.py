"""Each diagnosis in each framework: its script ends with 1, and with 0 for the loop as it should be.

The zoo's bugs have the other diagnoses, and their scripts run in `studies/tests/zoo`.
"""

from __future__ import annotations

import pytest

from gradcheck_suite.cli.loading import resolve_loop
from gradcheck_suite.core.contract import is_jax
from gradcheck_suite.core.faults import FAULTS
from gradcheck_suite.script import NoScriptError, script_text
from gradcheck_suite.verification.check import check
from studies.zoo import BUGS
from tests.script.alone import SUITE, Ended, run_alone
from tests.script.planted import PLANTED

LIMIT_S = 10.0
"""Seconds after which a loop is stopped; one that never ends takes them all."""
WITHOUT_JAX = ("gradcheck_suite", "tests", "torch")
OF_A_PROBLEM = ("plain-accumulation", "not-accumulable", "stolen-buffer")
NO_LOOP: dict[bool, dict[str, str]] = {
    False: {
        **dict.fromkeys(OF_A_PROBLEM, "a user's problem has it, whatever the loop"),
        "not-repeatable": "another run gives another gradient than the script shows",
    },
    True: {
        **dict.fromkeys(OF_A_PROBLEM, "a user's problem has it, whatever the loop"),
        "not-repeatable": "another run gives another gradient than the script shows",
        **dict.fromkeys(
            ("not-reduced", "deadlock"), "a loop of JAX that `verify` runs has one process"
        ),
        **dict.fromkeys(
            ("changed-batch", "wrong-mode", "other-parameters", "weighted-by-loss"),
            "the inputs and the numbers of a loss are not recorded in JAX",
        ),
        "not-summed": "combinations of elements are read in float64, and these loops are of float32",
        **dict.fromkeys(
            ("overflow", "skipped-by-size", "skipped-non-finite"),
            "gradients of many sizes are on a probe with slopes, whose scripts are those of torch",
        ),
        **dict.fromkeys(
            (
                "parameter-not-updated",
                "optimizer-state-changed",
                "changed-settings",
                "wrong-update",
                "changed-model",
                "changed-torch",
            ),
            "a script of JAX shows gradients and steps, as `parameter-drift` says here",
        ),
    },
}
"""Whether in JAX -> diagnosis -> why no loop of it has a script here."""


def in_file(planted, folder, monkeypatch, *, sound=False):
    """Return a planted loop, or the sound one, from a file of its own."""
    name = f"{'sound' if sound else 'faulty'}_{planted.id.replace('-', '_')}"
    planted.write(folder / f"{name}.py", sound=sound)
    monkeypatch.chdir(folder)
    return resolve_loop(f"{name}.py:train"), f"{name}.py:train"


@pytest.mark.share(18)
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.id)
def test_the_script_of_a_diagnosis_shows_it_and_the_sound_loop_does_not(
    planted, tmp_path, monkeypatch
):
    loop, name = in_file(planted, tmp_path, monkeypatch)
    violation = check(loop, planted.case, time_limit_s=LIMIT_S).violation
    assert violation is not None
    assert violation.diagnosis == planted.diagnosis, violation.explanation
    sound, sound_name = in_file(planted, tmp_path, monkeypatch, sound=True)
    held = check(sound, planted.case, time_limit_s=None)
    assert held.holds
    assert not held.skipped
    if planted.no_script:
        with pytest.raises(NoScriptError, match=planted.no_script):
            script_text(loop, name, violation, time_limit_s=LIMIT_S)
        return
    missing = WITHOUT_JAX if planted.jax else SUITE
    faulty, mended = (
        run_alone(
            script_text(one, place, violation, time_limit_s=LIMIT_S), tmp_path, missing=missing
        )
        for one, place in ((loop, name), (sound, sound_name))
    )
    assert faulty.status == 1, faulty
    if planted.diagnosis != "timed-out":  # its process is ended
        assert faulty.output.endswith("the fault is there\n")
    assert mended == Ended(0, mended.output, ""), mended
    assert mended.output.endswith("the fault is gone\n")


@pytest.mark.parametrize("jax", [False, True], ids=["torch", "jax"])
def test_each_diagnosis_has_a_loop_whose_script_runs_or_a_reason(jax):
    planted = {one.diagnosis for one in PLANTED if one.jax == jax}
    of_zoo = {
        name.partition("/")[2]
        for bug in BUGS.values()
        if is_jax(bug.loop) == jax
        for name in bug.wanted
    }
    of_verify = {fault.name for fault in FAULTS.values() if fault.command != "audit"}
    assert of_verify - planted - of_zoo == NO_LOOP[jax].keys() - planted - of_zoo
    assert not planted & NO_LOOP[jax].keys()
