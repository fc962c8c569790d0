"""A violation as one Python file that needs torch alone: model, data, loop, right gradient, and the check."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

import torch

from gradcheck_suite.execution.instance import instance_of
from gradcheck_suite.records.description import describe_case, details_of, error_text, violation_title
from gradcheck_suite.report.scripts.check_code import (
    AT_A_STEP,
    allowed_text,
    large_batch_text,
    main_text,
    numbers_text,
)
from gradcheck_suite.report.scripts.copied_source import CopiedSource
from gradcheck_suite.report.scripts.training_code import (
    data_text,
    generated_text,
    is_imported,
    loop_text,
    optimizer_text,
    problem_text,
)
from gradcheck_suite.schema.contract import Loop, Problem, TrainingRun
from gradcheck_suite.schema.options import DEFAULT_TIME_LIMIT
from gradcheck_suite.schema.results import Violation

WIDTH = 110


def script_text(
    loop: Loop,
    name: str,
    violation: Violation,
    *,
    problem: Problem | None = None,
    time_limit_s: float | None = DEFAULT_TIME_LIMIT,
) -> str:
    """Return the text of a script that shows a violation: exit status 1 while it is there, 0 when it is gone.

    The numbers come from the violation's evidence; the loop is not run.

    Args:
        loop: the subject.
        name: of the loop as the command line takes it: `FILE.py:NAME` and `package.module:NAME` are imported from
            their place, the suite's own loops are printed in full.
        violation: what the script shows; with its evidence, where there is one for its kind.
        problem: the user's problem that the violation's case names, if it is not a generated one.
        time_limit_s: seconds that the loop may take, which the script repeats for a loop that took longer.
    """
    case, sources = violation.case, CopiedSource()
    sources.add_import("torch")
    parts = [f'DEVICE, DTYPE = torch.device("{case.device}"), torch.{case.dtype}']
    if case.device == "cuda":
        parts[0] += '\ntorch.set_float32_matmul_precision("highest")\ntorch.backends.cudnn.allow_tf32 = False'
    for title, text in _sections(loop, name, violation, problem, time_limit_s, sources):
        # definitions stand above the first text that needs them
        parts.append(f"# {title}\n\n{_joined([*sources.take(), *text])}")
    body = "\n\n\n".join(parts)
    for special in ("inf", "nan"):
        if re.search(rf"(?<![\w.\"]){special}\b", body):
            sources.add_import("math", special)
    head = [_docstring(name, violation), "from __future__ import annotations", sources.imports()]
    return "\n\n".join([*head, body]) + "\n"


def _sections(
    loop: Loop,
    name: str,
    violation: Violation,
    problem: Problem | None,
    time_limit_s: float | None,
    sources: CopiedSource,
) -> Iterator[tuple[str, list[str]]]:
    """Yield each section's title and its texts, with what they need gathered in `sources`."""
    case = violation.case
    instance = instance_of(case, problem)
    if violation.kind != "not-accumulable":
        sources.copy(TrainingRun)
        yield "The argument of a loop", []
        yield "The loop", [loop_text(loop, name, sources)]
        yield "The optimizer", [optimizer_text(case, sources)]
    if problem is None:
        yield "The model and its loss", [generated_text(instance, sources)]
    else:
        yield "The model and its loss", [problem_text(problem, instance, sources)]
    yield "The data", [data_text(instance, sources)]
    if violation.kind in AT_A_STEP:
        yield "The gradient: expected, observed, and the error that rounding allows", [numbers_text(violation)]
        yield "The expected gradient, computed by torch", [large_batch_text(violation, sources)]
    elif violation.evidence is not None:
        yield "The error that rounding allows", [allowed_text(violation)]
    yield "The check", [main_text(violation, instance.problem.reduction, time_limit_s, sources)]


def _joined(texts: list[str]) -> str:
    """Join definitions with two empty lines around functions and classes, and none between constants."""
    joined = ""
    for text in texts:
        is_line = "\n" not in text and joined and "\n" not in joined.rpartition("\n\n\n")[2]
        joined += ("\n" if is_line else "\n\n\n") + text if joined else text
    return joined


def _docstring(name: str, violation: Violation) -> str:
    kind = violation_title(violation.kind, violation.diagnosis)
    where = ""
    if violation.window is not None:
        where = f"Window {violation.window} of epoch {violation.epoch}"
        if violation.parameter is not None and violation.error is not None and violation.allowed is not None:
            where += f", {violation.parameter}: off by {error_text(violation.error, violation.allowed)}."
    needs = "It needs Python and torch alone"
    if violation.kind != "not-accumulable" and is_imported(name):
        needs += ", and the file of the loop, which may import other packages (gradcheck_suite too)"
    if violation.case.problem_name:
        needs += f", and {violation.case.problem}, which imports gradcheck_suite for its Problem"
    use = (
        f"Run this file with Python: exit status 1 while the fault is there, 0 when it is gone, 2 where something "
        f"cannot be imported or fails otherwise. {needs}."
    )
    lines = [
        f"{name}: {kind}.",
        "",
        *textwrap.wrap(violation.explanation, WIDTH),
        *textwrap.wrap(where, WIDTH),
        *(short for line in details_of(violation) for short in _within(line)),
        "",
        *(f"    {line}" for line in describe_case(violation.case)),
        "",
        *textwrap.wrap(use, WIDTH),
        f"Written by gradcheck-suite with torch {torch.__version__}, for case {violation.case.digest}.",
    ]
    text = "\n".join(line.rstrip() for line in lines).replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return f'"""{text}\n"""'


def _within(line: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent="  ") if len(line) > WIDTH else [line]
