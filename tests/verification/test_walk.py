"""How far a reader walks: the files of the package that judging one case enters, and how often a
fault is run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import gradcheck_suite
from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, check, verify
from gradcheck_suite.loops.reset_modes import MODES
from studies.zoo import BUGS

PACKAGE = str(Path(gradcheck_suite.__file__).parent)
SPEC = ProblemSpec(Input("vector", size=2), (Layer("linear", features=2, bias=True),), Loss("mse"))
CASE = Case(SPEC, Plan((2, 1, 3), 2), seed=1)


_mean_of_means = BUGS["mean-of-means"].loop


def _files(judge: Callable[[], object]) -> set[str]:
    """Return the files of the package of which a function is called."""
    entered: set[str] = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.add(frame.f_code.co_filename.removeprefix(PACKAGE))

    sys.setprofile(note)
    try:
        judge()
    finally:
        sys.setprofile(None)
    return entered


def test_a_held_case_passes_few_files():
    check(MODES["zero_"], CASE)  # what is read, imported and computed once is no part of the walk
    held = _files(lambda: check(MODES["zero_"], CASE.replace(seed=2)))
    assert "/verification/check.py" in held
    assert len(held) <= 25, sorted(held)


def test_a_violated_case_passes_few_files():
    verdicts = []
    check(_mean_of_means, CASE)
    violated = _files(lambda: verdicts.append(check(_mean_of_means, CASE.replace(seed=2))))
    assert verdicts[0].violation.diagnosis == "mean-of-means"
    assert "/judge/gradient.py" in violated
    # the gradient is evaluated twice, by numpy and by XLA
    assert len(violated) <= 33, sorted(violated)


def test_the_loop_of_the_readme_is_named_with_few_runs():
    result = verify(_mean_of_means, quiet=True)
    assert result.violation.diagnosis == "mean-of-means"
    assert result.runs <= 20
