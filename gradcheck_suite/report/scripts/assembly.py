"""A violation as one Python file that needs torch alone: model, data, loop, right gradient, and the check."""

from __future__ import annotations

import re
import textwrap

import torch

from gradcheck_suite.records.description import describe_case, error_text, violation_title
from gradcheck_suite.references.reference import REFERENCES
from gradcheck_suite.report.scripts.checks import AT_A_STEP, large_batch_text, main_text, numbers_text
from gradcheck_suite.report.scripts.sources import Sources
from gradcheck_suite.report.scripts.subjects import (
    data_text,
    generated_text,
    is_imported,
    loop_text,
    optimizer_text,
    problem_text,
)
from gradcheck_suite.schema.contract import Loop, Problem
from gradcheck_suite.schema.options import DEFAULT_TIME_LIMIT
from gradcheck_suite.schema.results import Violation
from gradcheck_suite.schema.spec import ProblemSpec

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

    Args:
        loop: the subject. It is run once more, to write down what it hands to its optimizer.
        name: of the loop as the command line takes it: `FILE.py:NAME` and `package.module:NAME` are imported from
            their place, the suite's own loops are printed in full.
        violation: what the script is to show.
        problem: the user's problem that the violation's case names, if it is not a generated one.
        time_limit_s: seconds after which a loop that does not return is stopped.
    """
    case = violation.case
    reference = REFERENCES.get(case, problem)
    instance = reference.instance
    sources, parts = Sources(), []

    def section(title: str, *texts: str) -> None:
        """Add a part, below the definitions that it was the first to need."""
        new = [text for text in sources.definitions if text not in written]
        written.update(new)
        parts.append(f"# {title}\n\n{_joined([*new, *texts])}")

    written: set[str] = set()
    sources.add_import("torch")
    where = f'DEVICE, DTYPE = torch.device("{case.device}"), torch.{case.dtype}'
    if case.device == "cuda":
        where += '\ntorch.set_float32_matmul_precision("highest")\ntorch.backends.cudnn.allow_tf32 = False'
    parts.append(where)
    has_loop = violation.kind != "not-accumulable"
    if has_loop:
        sources.add("gradcheck_suite.schema.contract", "TrainingRun")
        section("What a loop is handed")
        section("The loop", loop_text(loop, name, sources))
        section("The optimizer", optimizer_text(case, sources))
    if isinstance(case.problem, ProblemSpec):
        section("The model and its loss", generated_text(case.problem, instance, sources))
        section("The data", data_text(instance))
    else:
        assert problem is not None
        section("The model, its loss and the data", problem_text(case.problem, problem, instance, sources))
    if violation.kind in AT_A_STEP:
        numbers = numbers_text(loop, reference, violation, time_limit_s)
        section("What is right, what was observed, how far off rounding allows", numbers)
        section("What is right, computed by torch", large_batch_text(violation, sources))
    section("The check", main_text(violation, instance.problem.reduction, time_limit_s, sources))
    body = "\n\n\n".join(parts)
    for special in ("inf", "nan"):
        if re.search(rf"(?<![\w.\"]){special}\b", body):
            sources.add_import("math", special)
    head = [_docstring(name, violation), "from __future__ import annotations", "\n".join(sources.imports)]
    return "\n\n".join([*head, body]) + "\n"


def _joined(texts: list[str]) -> str:
    """Join definitions as people do: two empty lines around functions and classes, none between constants."""
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
        needs += ", and the file of the loop, which may import what it likes (gradcheck_suite too)"
    if not isinstance(violation.case.problem, ProblemSpec):
        needs += f", and {violation.case.problem}, which imports gradcheck_suite to say what it trains"
    use = (
        f"Run this file with Python: exit status 1 while the fault is there, 0 when it is gone, 2 where something "
        f"cannot be imported. {needs}."
    )
    lines = [
        f"{name}: {kind}.",
        "",
        *textwrap.wrap(violation.explanation, WIDTH),
        *textwrap.wrap(where, WIDTH),
        *(short for line in violation.details for short in _within(line)),
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
