"""Every bug of the zoo is found, named and made small; and the corpus is covered."""

from __future__ import annotations

import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec
from gradcheck_suite.core.contract import is_jax
from gradcheck_suite.loops.reset_modes import BUILT_IN, MODES
from gradcheck_suite.run.instance import generated_instance
from gradcheck_suite.run.runner import run_loop
from gradcheck_suite.script import NoScriptError, script_failure, script_text
from gradcheck_suite.verification.check import check
from properties.devices import DEVICES
from studies.report.evidence import NOT_EXPRESSED
from studies.zoo import BUGS
from studies.zoo.scoreboard import FIXED_TESTS, run_bug
from tests.faults.small_cases import diagnoses, until

CORPUS = range(1, 48)
SEARCHED = ("mean-of-means", "in-batch-negatives")
"""The bugs that are searched for in every run of the tests; the others are marked `full`."""
ACCUMULABLE = [
    b for b in BUGS.values() if b.problem and "not-accumulable/not-accumulable" not in b.wanted
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "bug",
    [bug for bug in BUGS.values() if bug.ranks == 1 and not is_jax(bug.loop)],
    ids=lambda bug: bug.name,
)
def test_a_known_bug_is_found_and_named_on_a_small_case(bug, device):
    names = list(until(bug.wanted, diagnoses(bug.loop, bug.problem, bug.assumes, device)))
    assert bug.wanted.intersection(names), f"diagnosis {names}, should be one of {bug.wanted}"


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(bug, marks=() if bug.name in SEARCHED else pytest.mark.full)
        for bug in BUGS.values()
    ],
    ids=lambda bug: bug.name,
)
def test_a_known_bug_is_found_named_made_small_and_shown_by_its_script(bug, tmp_path):
    row = run_bug(bug, [0], examples=200)
    assert row.found == 1
    violation = row.runs[0].violation
    assert row.rightly_named == 1, (
        f"diagnosis {row.names}, should be {bug.wanted}: {violation.explanation}"
    )
    assert not bug.says or any(text in violation.explanation for text in bug.says), (
        violation.explanation
    )
    assert row.small, violation.case
    assert_script_shows(bug, violation, tmp_path)


NO_SCRIPT = ("a script of several ranks compares", "a script of JAX shows", "a script of JAX has")
"""How the reasons begin for which a violation has no script."""


def assert_script_shows(bug, violation, folder):
    __tracebackhide__ = True
    problem = None if violation.case.spec else bug.problem
    if problem is not None and ":" not in str(violation.case.problem_name):
        return  # a problem of the zoo has no place from which a script could import it
    place = f"{bug.loop.__module__}:{bug.loop.__name__}"
    script, reason = folder / "script.py", ""
    try:
        text = script_text(bug.loop, place, violation, problem=problem, assumes=bug.assumes)
    except NoScriptError as error:
        text, reason = "", str(error)
    if not text:
        assert reason.startswith(NO_SCRIPT)
        return
    script.write_text(text)
    failure = script_failure(script, violation, 60.0)
    assert failure is None, failure


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_accumulator_in_bfloat16_is_no_fault_of_a_run_in_bfloat16(dtype):
    """There `.grad` is bfloat16 as well, so both loops round the same sums in the same order."""
    layer = Layer("linear", bias=True, features=3)
    spec = ProblemSpec(
        Input("vector", size=3), (layer, Layer("tanh"), layer), Loss("mse", reduction="mean")
    )
    instance = generated_instance(Case(spec, Plan((3, 5, 4, 4, 1, 2, 6, 3), 4), dtype=dtype))
    seen, plain = (
        [observation.gradients for observation in run_loop(loop, instance).observations]
        for loop in (BUGS["low-precision-accumulator"].loop, BUILT_IN["plain"])
    )
    same = [
        torch.equal(gradients[name], right[name])
        for gradients, right in zip(seen, plain, strict=True)
        for name in right
    ]
    assert all(same) == (dtype == "bfloat16")


def test_the_whole_corpus_is_in_the_zoo_or_has_a_reason():
    numbers = {bug.number for bug in BUGS.values() if bug.number is not None}
    assert numbers | NOT_EXPRESSED.keys() == set(CORPUS)
    assert not numbers & NOT_EXPRESSED.keys()


def test_every_bug_of_the_corpus_says_where_it_was_reported():
    assert all(bug.citations for bug in BUGS.values() if bug.number is not None)
    assert all(bug.mechanism.endswith(".") and bug.wanted for bug in BUGS.values())


@pytest.mark.parametrize(
    "bug", [b for b in ACCUMULABLE if b.name != "stolen-buffer"], ids=lambda bug: bug.name
)
def test_a_sound_loop_holds_on_the_problem_of_a_bug(bug):
    assert list(diagnoses(MODES["zero_"], bug.problem)) == []


@pytest.mark.parametrize(
    ("test", "found", "missed"),
    [
        ("loss after one SGD step, equal parts", "no-divide", "no-reset"),
        ("one window, equal parts", "no-divide", "mean-of-means"),
        ("two windows, equal parts", "no-reset", "mean-of-means"),
        ("one window, unequal parts", "mean-of-means", "tail-leak"),
    ],
)
def test_a_fixed_test_finds_the_bug_it_is_made_for_and_no_more(test, found, missed):
    passes = FIXED_TESTS[test]
    assert not passes(BUGS[found].loop, None)
    assert passes(BUGS[missed].loop, None)
    assert passes(MODES["zero_"], None)


def test_the_stolen_buffer_is_gone_where_gradients_are_allocated_before():
    bug = BUGS["stolen-buffer"]
    case = Case("stolen-buffer", Plan((1, 2, 1), 3))
    assert check(MODES["flat_buffer"], case, problem=bug.problem).violation is None
    found = check(MODES["set_to_none"], case, problem=bug.problem).violation
    assert found is not None
    assert found.diagnosis == "stolen-buffer"
    assert "set_to_none and zero_ differ by" in found.explanation
