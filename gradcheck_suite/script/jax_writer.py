"""The stand-alone script of a violation by a loop of JAX: it needs jax and optax alone.

The loss of each item is linear, with the gradient that the item has in the case. So a script contains no model, and is
short whatever the case is made of.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from gradcheck_suite.catalogue.description import describe_case
from gradcheck_suite.core.case import is_probe, slopes_of
from gradcheck_suite.core.contract import Loop, Problem
from gradcheck_suite.core.results import Violation
from gradcheck_suite.core.text import violation_title
from gradcheck_suite.reference.large_batch import Reference, gradients_of
from gradcheck_suite.run import jax_run
from gradcheck_suite.run.instance import instance_of
from gradcheck_suite.verification.check import of_torch

TEMPLATE = (Path(__file__).parent / "jax_template.txt").read_text(encoding="utf-8")
SHOWN = ("gradient", "non-finite", "step-count", "raised")
"""Kinds of violation that a script shows."""
MOST = 100_000
"""Numbers that a script may contain."""


def jax_script_text(loop: Loop, name: str, violation: Violation, problem: Problem | None) -> str | None:
    """Return the script of a violation; None where it would not show the fault, or be too long.

    Args:
        loop: the loop that is violated.
        name: the name of the loop, `FILE.py:NAME` or `package.module:NAME`.
        violation: what the script shows.
        problem: the user's problem, or None.
    """
    case = violation.case
    source = inspect.getsourcefile(inspect.unwrap(loop))
    if violation.kind not in SHOWN or violation.moved or source is None or ":" not in name:
        return None
    instance = instance_of(case, of_torch(loop, problem))
    reference = Reference(instance)
    model = reference.model(None, None)
    # the leaves of a dict are sorted by name
    names = sorted(reference.layout.names)

    def ordered(vector: Any) -> Any:
        return np.concatenate([reference.layout.part(vector, parameter).ravel() for parameter in names])

    items = range(case.plan.total_items)
    rows = [reference.flat(gradients_of(instance, model, range(i, i + 1), summed=True)) for i in items]
    gradients = np.array([ordered(row) for row in rows])
    if is_probe(case):
        gradients = np.diag(np.resize(slopes_of(case), len(items)))
    if gradients.size > MOST:
        return None
    evidence, windows = violation.evidence, len(case.plan.windows)
    step = None if violation.window is None else (violation.epoch or 0) * windows + violation.window
    parameters = sorted((n, p.detach().double().numpy()) for n, p in model.named_parameters() if n in names)
    with np.printoptions(threshold=2 * MOST, floatmode="unique", linewidth=110):
        return Template(TEMPLATE).substitute(
            title=violation_title(violation.kind, violation.diagnosis),
            explanation=violation.explanation,
            case="\n".join(describe_case(case)),
            dtype=case.dtype,
            params=repr(dict(parameters)),
            gradients=repr(gradients),
            counts=repr(np.array([float(instance.count(instance.batch(range(i, i + 1)))) for i in items])),
            micro_batches=repr(case.plan.micro_batches),
            steps=case.plan.steps,
            step=step,
            expected=None if evidence is None else repr(ordered(evidence.expected)),
            allowed=None if evidence is None else repr(ordered(np.nan_to_num(evidence.allowed))),
            file=Path(source).name,
            source=repr(Path(source).read_text(encoding="utf-8")).replace("\\n", "\\n'\n    '").join("()"),
            name=name.rpartition(":")[2],
            observer="\n\n".join(inspect.getsource(part) for part in jax_run.OBSERVER),
            is_sum=instance.problem.reduction == "sum",
            accumulation_steps=case.plan.accumulation_steps,
            epochs=case.plan.epochs,
            reduction=instance.problem.reduction,
            kind=violation.kind,
        )
