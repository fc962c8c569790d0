"""Checking while a case is made smaller: the same verdict on every violation, for less work, and
settled at the end.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import Phase, given, settings

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, check, verify
from gradcheck_suite.core.comparison import FEW_DRAWS, MANY_DRAWS
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.reference import large_batch
from gradcheck_suite.reference.large_batch import Reference
from gradcheck_suite.run.instance import generated_instance
from gradcheck_suite.strategies.cases import cases
from studies.zoo import BUGS

LINEAR = ProblemSpec(
    Input("vector", size=3),
    (Layer("linear", bias=True, features=2),),
    Loss("mse", reduction="mean"),
)
CASE = Case(LINEAR, Plan((1, 3, 2, 2), 2), seed=5)
LOOPS = {
    "zero_": MODES["zero_"],
    **{n: BUGS[n].loop for n in ("mean-of-means", "tail-leak", "skipped-items-counted")},
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.full)])
def test_a_violation_is_the_same_and_nothing_else_becomes_one(name, dtype):
    kinds = set()

    @settings(max_examples=6, phases=(Phase.generate,), database=None, derandomize=True)
    @given(cases(dtype=dtype))
    def agree(case):
        full, quick = (
            check(LOOPS[name], case, shrinking=shrinking).violation for shrinking in (False, True)
        )
        kinds.add(full and full.diagnosis)
        assert (full and (full.kind, full.epoch, full.window)) == (
            quick and (quick.kind, quick.epoch, quick.window)
        )

    agree()
    assert None in kinds
    assert len(kinds) > 1 or name in ("zero_", "skipped-items-counted")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_what_lies_between_the_two_bounds_is_measured_again(dtype, many_draws):
    # of one micro-batch: of several, their own rounding errors are drawn too
    first = Reference(generated_instance(CASE.replace(dtype=dtype, plan=Plan((4,), 1)))).window(0)
    allowed, wide = first.allowed(MANY_DRAWS), first.allowed(FEW_DRAWS)
    at = int(np.argmax(wide / allowed))
    assert wide[at] > 1.1 * allowed[at] > 0
    between = first.expected.copy()
    between[at] += (allowed[at] + wide[at]) / 2
    for roughly in (True, False):
        assert first.compare(between, roughly=roughly).worst.allowed == pytest.approx(allowed[at])
    beyond = first.expected.copy()
    beyond[at] += 2 * wide[at]
    assert first.compare(beyond, roughly=True).worst.allowed == pytest.approx(wide[at])
    assert first.compare(beyond).worst.allowed == pytest.approx(allowed[at])


def _counted(loop):
    calls = []

    def counted(run):
        calls.append(run)
        loop(run)

    return counted, calls


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    "name",
    [
        "mean-of-means",
        "skipped-items-counted",
        "no-reset",
        "clip-per-micro-batch",
        "running-loss",
        "tail-leak",
    ],
)
def test_a_fault_is_named_by_at_most_four_further_runs_and_by_none_while_shrinking(name, dtype):
    loop, calls = _counted(BUGS[name].loop)
    loss = Loss(
        "cross_entropy",
        ignore_index=True,
        label_smoothing=0.0,
        class_weights=False,
        reduction="mean",
    )
    problem = dataclasses.replace(LINEAR, loss=loss)
    case = Case(problem, Plan((1, 3, 2, 2, 1), 2, 2, masked=(1,)), seed=5, dtype=dtype)
    assert check(loop, case).violation.diagnosis in {
        wanted.split("/")[1] for wanted in BUGS[name].wanted
    }
    assert 2 <= len(calls) <= 5
    calls.clear()
    assert check(loop, case, shrinking=True).violation is not None
    assert len(calls) == 1


def test_a_verification_runs_the_loop_once_per_case_and_few_times_more(monkeypatch):
    loop, calls = _counted(BUGS["mean-of-means"].loop)
    judged = []

    def noted(*args, **options):
        judged.append(options.get("shrinking", False))
        return check(*args, **options)

    monkeypatch.setattr("gradcheck_suite.verification.search.check", noted)
    assert verify(loop, examples=20).violation.diagnosis == "mean-of-means"
    # named on the probe and on the smallest case, beside which a louder probe is run twice
    assert judged.count(False) == 2
    assert len(judged) < len(calls) <= len(judged) + 3 * 2 + 2


def _no_jax(monkeypatch):
    def refuse(*_):
        raise AssertionError("JAX was asked")

    for name in ("large_batch_gradients", "StartedGradients"):
        monkeypatch.setattr(large_batch, name, refuse)
    monkeypatch.setattr(large_batch.REFERENCES, "_kept", type(large_batch.REFERENCES._kept)())


def test_jax_is_not_asked_about_a_right_gradient(monkeypatch):
    _no_jax(monkeypatch)
    assert check(MODES["zero_"], CASE, shrinking=True).violation is None
    with pytest.raises(AssertionError, match="JAX was asked"):
        check(MODES["zero_"], CASE)


def test_the_smallest_case_is_reported_with_the_whole_measurement():
    loop = BUGS["mean-of-means"].loop
    found = verify(loop, examples=20).violation
    whole = check(loop, found.case).violation
    assert (found.allowed, found.error, found.details) == (
        whole.allowed,
        whole.error,
        whole.details,
    )
    assert check(loop, found.case, shrinking=True).violation.allowed > found.allowed
