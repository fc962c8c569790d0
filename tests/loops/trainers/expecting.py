"""What each trainer was found to do, written down: a release that does otherwise makes a test fail,
which is news.
"""

from __future__ import annotations

import importlib.metadata

import pytest
from packaging.version import Version

from gradcheck_suite.loops.trainers import TRAINERS
from gradcheck_suite.loops.trainers.trainer import Question
from gradcheck_suite.verification.trainers import ask


def at_version(package, version):
    """Skip unless that version is installed."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        found = None
    return pytest.mark.skipif(
        found != version, reason=f"needs {package} {version}; here is {found}"
    )


def from_version(package, version):
    """Skip unless that version or a later one is installed."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        found = None
    return pytest.mark.skipif(
        found is None or Version(found) < Version(version),
        reason=f"needs {package} {version} or later; here is {found}",
    )


def diagnosis(
    trainer: str, question: Question, examples: int = 8, *, small: bool = True
) -> str | None:
    """Return what a trainer is blamed for on a question, or None.

    Hold, if asked, that the case was made small. Time for making smaller is limited, so that only
    problems of torch alone come to their smallest on any machine.
    """
    answer = ask(TRAINERS[trainer], question, examples=examples)
    assert answer.result is not None, answer.why
    assert not answer.result.skipped
    violation = answer.result.violation
    assert not small or violation is None or violation.case.plan.total_items <= 4
    return violation and violation.diagnosis


def cells(table: dict[str, tuple[str | None, ...]], questions: tuple[Question, ...]):
    """Return (trainer, question, diagnosis) for each cell of a table."""
    return [
        pytest.param(trainer, question, wanted, id=f"{trainer}-{question.name}")
        for trainer, row in table.items()
        for question, wanted in zip(questions, row, strict=True)
    ]
