"""What the fix sentence of a bug asks for is done, and the loop holds."""

from __future__ import annotations

import importlib.util

import pytest

from gradcheck_suite.core.contract import EQUAL_MICRO_BATCHES, WHOLE_WINDOWS, dealt_to_ranks, is_jax
from gradcheck_suite.core.faults import FIX
from gradcheck_suite.run.ranks import kept_ranks
from gradcheck_suite.verification.check import check
from gradcheck_suite.verification.search import first_cases, slopes_case
from studies.tests.zoo.mended import MENDS
from studies.zoo import BUGS
from tests.faults.small_cases import CASES

UNEDITED = {
    **dict.fromkeys(
        ("in-batch-negatives", "batch-norm", "stolen-buffer", "tied-weights-overwritten"),
        "the problem is to change, and not the loop",
    ),
    **dict.fromkeys(
        ("no-sync-left-on-at-the-step", "no-sync-in-the-short-window"),
        "the loop must know the window's last micro-batch before its forward",
    ),
    **dict.fromkeys(
        (
            "micro-batches-of-ranks-averaged",
            "sampler-pads-by-repeated-items",
            "uneven-tail-dropped",
            "idle-rank-skips-the-all-reduce",
            "rank-skips-its-all-reduce",
            "ranks-at-different-steps",
            "unreached-parameters-not-reduced",
            "first-micro-batch-only-reduced",
            "stale-bucket-view-after-set-to-none",
        ),
        "the ranks must agree on the windows, or on the parameters, by a communication of their own",
    ),
    **dict.fromkeys(
        (
            "jax-multi-steps",
            "jax-multi-steps-tail",
            "jax-first-count",
            "jax-donated-again",
            "jax-closed-over-params",
            "jax-state-forgotten",
            "jax-updates-added-up",
        ),
        "the wrapper or the trace is what is wrong: another one is the remedy",
    ),
    "jax-updates-thrown-away": "none of the small cases shows it",
}
"""Bug -> why no edit of its loop is its remedy."""


def cases_of(bug):
    """Return small cases within what a bug assumes, those that show most faults first."""
    assumes = frozenset(bug.assumes)
    found = []
    if bug.problem is None:
        dtype = "float32" if is_jax(bug.loop) else "float64"
        found += first_cases(assumes, dtype, "cpu", bug.ranks, compiles=is_jax(bug.loop))
    if bug.problem is None and "non-finite/poisoned-by-earlier-window" in bug.wanted:
        # the only case here with a window whose gradient is infinite or NaN
        found.append(slopes_case(assumes, "float32", "cpu"))
    for case in CASES[:1] if is_jax(bug.loop) else CASES:
        unequal = EQUAL_MICRO_BATCHES in assumes and len(set(case.plan.micro_batches)) > 1
        if unequal or (WHOLE_WINDOWS in assumes and case.plan.has_short_window):
            continue
        if bug.ranks > 1 and (case.plan.masked or case.spec.loss.reduction == "sum"):
            continue
        plan = dealt_to_ranks(case.plan, bug.ranks, assumes)
        found.append(
            case.replace(problem=case.problem if bug.problem is None else "problem", plan=plan)
        )
    return found


def mended_loop(bug, folder):
    file = folder / f"mended_{bug.name.replace('-', '_')}.py"
    MENDS[bug.name].write(bug, file)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
@pytest.mark.parametrize("name", MENDS)
def test_a_loop_that_is_changed_as_its_fix_says_holds(name, tmp_path, monkeypatch):
    bug = BUGS[name]
    monkeypatch.syspath_prepend(tmp_path)
    mended_loop(bug, tmp_path)
    loop = importlib.import_module(f"mended_{name.replace('-', '_')}").train
    fixes = []
    with kept_ranks():
        for case in cases_of(bug):
            options = {"problem": bug.problem, "assumes": bug.assumes}
            wrong = check(bug.loop, case, **options).violation
            if wrong is not None and f"{wrong.kind}/{wrong.diagnosis}" in bug.wanted:
                fixes.append(wrong.explanation.partition(FIX)[2])
            held = check(loop, case, **options).violation
            assert held is None, f"{case!r}: {held.diagnosis}: {held.explanation}"
    assert fixes, "no case has shown the bug"
    assert any(MENDS[name].fix in fix for fix in fixes), fixes


def test_each_bug_has_a_mended_form_or_a_reason():
    assert MENDS.keys() | UNEDITED.keys() == BUGS.keys()
    assert not MENDS.keys() & UNEDITED.keys()
